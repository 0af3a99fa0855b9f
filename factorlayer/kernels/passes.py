"""A pass: one kernel of a plan, and what it says of itself to the plan, the runtime and the emulator.

A family's pass is a dataclass with Pass as its base, and overrides what is not as it is here. Nothing else asks which
family it is of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from factorlayer.device.code import Asks, headers, kernel
from factorlayer.device.gpu import ELEMENT_BYTES
from factorlayer.device.kept import kept
from factorlayer.kernels.batches import samples_of_class

MOST_BLOCKS = 65535  # along y of a grid
STATES = "s0", "s1", "s3", "s4", "s5", "s6", "s7"  # scratch buffers that hold states
MOST_TENSORS = 61  # of a stack that a kernel is given, and one more for the gradient behind them
FAR = 1.5  # times the least predicted time
CHUNK_BYTES = 512 << 20  # of a state between passes: each pass then runs long enough for its start not to count


class Pass:
    """A kernel of a plan, with what is the same of most. `units` are what blocks take one after another."""

    dtype: Any

    if TYPE_CHECKING:  # as properties, so that a family may have them as fields, constants or properties of its own

        @property
        def us(self) -> float:
            """Predicted microseconds."""

        @property
        def threads(self) -> int:
            """Threads of a block."""

        @property
        def shared(self) -> int:
            """Bytes of a block's shared memory."""

        @property
        def units_per_sample(self) -> int: ...

        @property
        def units_per_block(self) -> int:
            """Units that are worth a block of their own."""

        @property
        def split(self) -> int:
            """Blocks along y of the grid: parts of a unit's work, or of all there is."""

        @property
        def told(self) -> list[str]:
            """What its kernel's template is told: lines of the struct Pass that its header describes."""

        @property
        def products(self) -> str:
            """The widths of Hopper's products that it makes, as device/code.py writes them."""

        @property
        def template(self) -> str:
            """The template of its kernel, where that has another name than the family itself."""

        @property
        def details(self) -> str:
            """What a plan says of it in words, beside its title and its shared memory."""

        title: ClassVar[str]  # in a plan in words, where that is not the family's name

        header: ClassVar[str]  # that has the template, without its ending, where its stem is not this module's

        @property
        def blocks(self) -> int:
            """Blocks of its kernel that share a multiprocessor's registers."""

        @property
        def cluster(self) -> int:
            """Blocks along y of the grid that share their memory."""

        @property
        def asks(self) -> Asks:
            """Tensors that it asks L2 for before the kernel before it has ended."""

        @property
        def waits(self) -> bool:
            """Whether its kernel waits for the kernel before, ahead of anything else."""

        @property
        def starts(self) -> bool:
            """Whether it starts the next kernel early, though it asks for nothing."""

        @property
        def sums_at(self) -> int:
            """The place in s2 where its sums begin, behind those of other passes."""

        @property
        def adds_up_all(self) -> bool:
            """Whether it takes sums of several passes before it."""

    else:
        split = blocks = 1  # a `cluster` of more than one is a field of its families
        products = template = header = title = ""
        asks, waits, starts = (), True, False
        sums_at, adds_up_all = 0, False

    def __str__(self) -> str:
        words = self.title or in_words(type(self)).replace(" backward", ", backward")
        return f"{words}: {self.details}, {self.shared} bytes of shared memory"

    @kept
    def size(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def blocks_per_sm(self) -> int:
        """Blocks of a multiprocessor, at most; 0 where there are as many blocks as there is work."""
        return 1

    @property
    def maps(self) -> tuple[str, ...]:
        """Tensors that the copy engine reads by maps, as csrc/runtime/plan.h has them."""
        return ()

    def source(self, name: str) -> str:
        """Self-contained CUDA C++ of the kernel `name`."""
        header = self.header or type(self).__module__.rpartition(".")[2]
        code, template = headers(f"{header}.cuh") + self.products, self.template or type(self).__name__
        sizes = self.threads, self.blocks, getattr(self, "cluster", 1)
        return kernel(code, name, template, self.told, *sizes, self.waits, self.asks, self.starts, bool(self.maps))

    # What it reads and writes

    @property
    def reads(self) -> str:
        """A buffer of csrc/runtime/plan.h; "state" is what the pass before has made, or x. "none" are weights alone."""
        return "state"

    @property
    def beside(self) -> tuple[str, int]:
        """A buffer that it reads beside that, and the weight in whose place; or none."""
        return "", 0

    @property
    def writes(self) -> str:
        """A buffer; "state" is what the next pass reads, or y."""
        return "state"

    @property
    def output_bytes(self) -> int:
        """Bytes of what it writes there for one sample, without padding."""
        return 0

    @property
    def scratch(self) -> tuple[int, ...]:
        """Bytes that it needs of the scratch buffers beside states: of s0 and s1 for a sample, of s2 for all, and maybe
        of others for a sample."""
        return 0, 0, 0

    @property
    def most_samples(self) -> int:
        """Samples that one launch can take; 0 is any number."""
        return 0

    @property
    def finishing(self) -> tuple[Pass, ...]:
        """Passes that make gradients of its blocks' sums."""
        return ()

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Itself, with those that it needs before and behind it."""
        return self, *self.finishing

    def from_the_end(self) -> Pass:
        """The same, that takes the last samples first, if that is faster behind a pass which has made them last."""
        return self

    def behind_weight(self, begin: int, scaled_at: int, weights: int) -> Pass:
        """The same of a dense layer whose weight another pass has prepared of so many, in the first `begin` bytes of
        s2: what this one's own passes prepare lies behind that. If `scaled_at` is not negative, the weight is scaled:
        what takes it back lies there."""
        if scaled_at >= 0:
            raise NotImplementedError
        return self

    @property
    def is_for_many(self) -> bool:
        """Whether others may be faster with fewer samples of a class than it is chosen for."""
        return False

    def us_of(self, batch: int) -> float:
        """Predicted microseconds for another number of samples than its tiling was chosen for."""
        raise NotImplementedError

    def with_bias(self, batch: int) -> Pass | None:
        """The same, if it makes all gradients alone, and a bias's as well, of so many samples; None where it cannot."""
        return None

    # What it leaves, for the emulator, which runs passes one by one

    def outputs(self, batch: int) -> tuple[int, ...]:
        """Bytes of each tensor that it writes, one behind another, with padding that nobody writes."""
        return (batch * self.output_bytes,)

    def written(self, batch: int) -> int:
        """Bytes of its outputs without padding."""
        return sum(self.outputs(batch))

    def sum_bytes(self, blocks: int) -> int:
        """Bytes behind its outputs that so many blocks along x of the grid write: sums, or what it prepares."""
        return 0

    def result_dtype(self, dtype: str) -> str:
        """The dtype of what it writes."""
        return dtype

    @property
    def reads_prepared(self) -> bool:
        """Whether it reads what a pass before it has left in s2."""
        return False

    @property
    def prepared_at(self) -> int:
        """The place in s2 where what it prepares begins, behind what a pass before it has prepared."""
        return 0

    @property
    def leaves(self) -> str:
        """What a later pass goes on from: "prepared", weights or states in s2; "state", its second output, in place of
        x; "begun", outputs and sums that are not whole; "sums", of some weights."""
        return ""

    @property
    def takes_sums(self) -> int:
        """Sums of each block, the first ones, that the pass before it has left."""
        return 0

    @property
    def is_apart(self) -> bool:
        """Whether its outputs are tensors of different kinds."""
        return False

    def is_others(self, missing: int, padding: int) -> bool:
        """Whether bytes that it has not written, and padding that it has, are sums that another pass writes."""
        return False


def in_words(kind: type[Pass]) -> str:
    """Its name, as "pair backward" of PairBackward."""
    return re.sub("(?<!^)(?=[A-Z])", " ", kind.__name__).lower()


class Placed:
    """A pass that stands elsewhere in a plan than its family has it: what it reads and writes is said anew, all else is
    as it says itself."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        if name == "of":  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self.of, name)

    def __str__(self) -> str:
        return str(self.of)


class OneSpread(Pass):
    """A pass whose blocks, along y of the grid, share all there is, however many samples there are."""

    units_per_sample = 1
    units_per_block = 1 << 40

    def us_of(self, batch: int) -> float:
        return self.us


class Preparing(OneSpread):
    """A pass that puts weights into s2 as one behind it reads them."""

    reads, writes = "none", "s2"
    leaves = "prepared"

    @property
    def prepared_bytes(self) -> int:
        raise NotImplementedError

    @property
    def scratch(self) -> tuple[int, int, int]:
        return 0, 0, self.prepared_at + self.prepared_bytes

    def outputs(self, batch: int) -> tuple[int, ...]:
        return (self.prepared_at + self.prepared_bytes,)

    def written(self, batch: int) -> int:
        return self.prepared_bytes


def scratch_of(states: Mapping[str, int], sums: int = 0) -> tuple[int, ...]:
    """Bytes of scratch buffers, those of s2 and of others by their names, of which some may be none of a plan's."""
    scratch = {"s0": 0, "s1": 0, "s2": sums} | {name: size for name, size in states.items() if name in STATES}
    return tuple(scratch.get(f"s{i}", 0) for i in range(1 + max(int(name[1:]) for name in scratch)))


Tiled = TypeVar("Tiled", bound=Pass)


def sum_us(passes: Iterable[Pass], batch: int = 0) -> float:
    """What passes are predicted to take, or would for another number of samples."""
    return sum(p.us_of(batch) if batch else p.us for p in passes)


def class_us(passes: Sequence[Pass], batch: int) -> float:
    """What passes are predicted to take for the class of batches that a number of samples stands for."""
    samples = samples_of_class(batch)
    return math.prod(sum_us(passes, each) for each in samples) ** (1 / len(samples))


def timed(plan: Tiled, batch: int) -> Tiled:
    """The same, with what it is predicted to take for so many samples."""
    return replace(plan, us=plan.us_of(batch))  # type: ignore[type-var]


def fastest(plans: Iterable[Tiled], batch: int, behind: Callable[[Tiled], float] = lambda plan: 0.0) -> Tiled | None:
    """The tiling of a family that is predicted to be the fastest for a class of batches, with microseconds `behind` it,
    and what it is predicted to take; None where it has none. Those that take far longer than another one for the number
    of samples that the class is planned for are not looked at further."""
    found = [(plan.us_of(batch) + behind(plan), plan) for plan in plans]
    most = FAR * min((us for us, _ in found), default=0.0)
    batches = samples_of_class(batch)

    def together(us: float, plan: Tiled) -> float:
        return math.prod(us if each == batch else plan.us_of(each) + behind(plan) for each in batches)

    near = [(together(us, plan), plan) for us, plan in found if us <= most]
    return timed(min(near, key=lambda each: each[0])[1], batch) if near else None


def steadiest(plans: Iterable[Tiled], batch: int) -> Tiled | None:
    """The fastest for so many samples and for twice as many together: one number alone may just fill the last round of
    tiles. None where there is none. Twice as many take no less."""
    found, least = None, math.inf
    for plan in plans:
        if 2 * plan.us < least and (us := plan.us + plan.us_of(2 * batch)) < least:
            found, least = plan, us
    return found


def tensor_map(of: int | str, dtype: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> str:
    """A map of x, or of a parameter, as csrc/runtime/plan.h has it: sizes, strides in elements, and a box of five
    dimensions, the contiguous one first."""
    kind, size = ("tf32", 4) if dtype == "tf32" else ("u16", 2)
    return " ".join(map(str, (of, kind, *sizes, *(size * stride for stride in strides), *box)))
