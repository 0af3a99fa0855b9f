"""Builds factorlayer._C: host code only, against PyTorch's stable ABI and Python's, so that one build serves
CPU and CUDA machines, PyTorch from 2.11 on and Python from 3.10 on. Needs no nvcc and no CUDA."""

import os
import re
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    raise SystemExit(
        "factorlayer is built against the PyTorch that is installed, and here there is none (an isolated build does "
        "not see it): install PyTorch 2.11 or later, setuptools, wheel and ninja, then add --no-build-isolation to the "
        "command, as in `pip install --no-build-isolation .`"
    ) from None

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11):
    raise SystemExit(
        f"factorlayer needs PyTorch 2.11 or later, whose stable ABI it is built for, and here is {torch.__version__}: "
        "update it with `pip install --upgrade torch`, then run the command again"
    )

os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
PYTHON_ABI = "0x030A0000"  # 3.10
TORCH_ABI = "0x020B000000000000"  # 2.11
VERSION = re.search(r'^version = "(.+)"$', Path("pyproject.toml").read_text(), re.MULTILINE)[1]


class BuildPy(build_py):
    """With the device code, which is compiled where it runs; an editable install finds it in csrc."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for path in glob("csrc/engine/**/*.cuh", recursive=True):
                room = os.path.dirname(os.path.relpath(path, "csrc/engine"))
                folder = os.path.join(self.build_lib, "factorlayer", "engine", room)
                self.mkpath(folder)
                self.copy_file(path, folder)


class BuildExt(BuildExtension):
    """With objects where every other build finds them: those of an editable install would be gone behind it."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"


extension = CppExtension(
    "factorlayer._C",
    sorted(glob("csrc/**/*.cpp", recursive=True)),
    depends=sorted(glob("csrc/**/*.h", recursive=True)),
    define_macros=[
        ("Py_LIMITED_API", PYTHON_ABI),
        ("TORCH_TARGET_VERSION", TORCH_ABI),
        ("FACTORLAYER_VERSION", f'"{VERSION}"'),
    ],
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",  # Python's own flags have -g, which takes a third of the time and is stripped below
        "-ffp-contract=fast",
        "-fvisibility=hidden",
        "-Wall",
        "-Wno-psabi",
    ],
    extra_link_args=["-Wl,-s"] if sys.platform == "linux" else [],
    py_limited_api=True,
)

setup(
    license="MIT",
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
