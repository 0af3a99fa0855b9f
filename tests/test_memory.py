"""Memory over many calls: a call leaves nothing behind, and holds no state of the batch.

In processes of their own, where no other test has shaped the heap.
"""

import platform
import subprocess
import sys

import pytest
from forked import python

PROGRAM = """
import resource, sys, torch
from factorlayer import FactorLinear

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
factors, batch, backward = eval(sys.argv[1])
features = torch.Size(factors).numel()
layer = FactorLinear(features, features, factors=factors, implementation="fused", dtype=torch.float64)
x = torch.randn(batch, features, dtype=torch.float64, requires_grad=backward)

def call():
    y = layer(x)
    if backward:
        y.backward(y)
        x.grad = None

for _ in range(5):
    call()
before = resident()
for _ in range(60):
    call()
print((resident() - before) / (x.numel() * x.element_size()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize(("factors", "batch"), [((64, 64, 64), 1), ((32, 32), 512)], ids=["64³", "32²"])
def test_calls_leave_nothing_behind(factors: tuple[int, ...], batch: int, backward: bool) -> None:
    """A call that kept its output would grow by 60 of them."""
    arguments = repr((factors, batch, backward))
    result = subprocess.run([*python(), "-c", PROGRAM, arguments], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 20


SMALL_CALLS = """
import ctypes, torch
from factorlayer import FactorLinear

class Heap(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
layer = FactorLinear(16, 16, activation="relu", implementation="fused")
x = torch.randn(2, 16)

def call():
    layer(x).sum().backward()

for _ in range(500):
    call()
before = libc.mallinfo2().uordblks
for _ in range(2000):
    call()
print((libc.mallinfo2().uordblks - before) / 2000)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's allocator")
def test_small_calls_leave_nothing_behind() -> None:
    result = subprocess.run([*python(), "-c", SMALL_CALLS], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 8  # bytes a call
