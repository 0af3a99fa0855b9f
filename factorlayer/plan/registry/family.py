"""A family of kernels as the planner knows it: a record of what it takes, how it is tiled, where its files are.

A family is asked only for what its record takes; its own tile function may refuse more, such as rows that 16 bytes do
not divide, or tiles that do not fit into shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels.batches import MOST_FEW
from factorlayer.kernels.passes import Pass, class_us, in_words
from factorlayer.kernels.product.streamed import Product
from factorlayer.kernels.work import Mode, Work
from factorlayer.maths.chain import Chain
from factorlayer.maths.recurrence import Recurrence
from factorlayer.maths.spec import Contraction

ANY = 1 << 60  # where a number has no bound
FEW, MANY = (1, MOST_FEW), (MOST_FEW + 1, ANY)
HALVES = ("bfloat16", "float16")
FLOATS = ("float32", "tf32", *HALVES)
ON_TABLES = "chosen so that an H200 gets the faster of the two in the rows of docs/benchmarks.md"
WORDS = {
    DTYPES: "any dtype",
    HALVES: "16 bits",
    ("float32", "tf32"): "32 bits",
    ("tf32", *HALVES): "tf32, 16 bits",
    FLOATS: "32 and 16 bits",
}


@dataclass(frozen=True)
class Takes:
    """Bounds of what a family takes, both ends among it.

    `needs` are capabilities of device/gpu.py, `factors` how many contractions, or layers of a stack, `sizes` their p's
    and q's. If factors are `merged`, neighbours are taken as one until `sizes` hold.
    """

    dtypes: tuple[str, ...] = DTYPES
    needs: tuple[str, ...] = ()
    factors: tuple[int, int] = (1, ANY)
    sizes: tuple[int, int] = (1, ANY)
    merged: bool = False
    tied: bool | None = None  # None is both
    samples: tuple[int, int] = (1, ANY)  # that it is planned for
    sums: bool = False  # of several products: a rank, of which one pass or several may make the terms
    inputs: bool = False  # x as several tensors, read where they lie
    slopes: bool = False  # back through the activation behind them, with grad_y or a result beside
    more: str = ""  # what else, for people

    def admits(self, asked: Asked) -> bool:
        least, most = self.sizes
        return (
            asked.dtype in self.dtypes
            and all(getattr(asked.gpu, capability) for capability in self.needs)
            and self.samples[0] <= asked.batch <= self.samples[1]
            and (asked.tied is None or self.tied in (None, asked.tied))
            and (self.sums or not asked.sums)
            and (self.inputs or not asked.inputs)
            and (self.slopes or not asked.slopes)
            and (not asked.sizes or self.factors[0] <= len(asked.sizes) // 2 <= self.factors[1])
            and all(n <= most and (self.merged or n >= least) for n in asked.sizes)
        )

    def __str__(self) -> str:
        parts = [WORDS.get(self.dtypes, ", ".join(self.dtypes)), *(need.replace("_", " ") for need in self.needs)]
        noun = {True: "tied ", False: "untied ", None: ""}[self.tied] + f"contraction{'s' * (self.factors[1] > 1)}"
        parts += [f"{_range(self.factors)} {noun}"] if self.factors != (1, ANY) else []
        merged = ", several factors as one" * self.merged
        parts += [f"sizes {_range(self.sizes)}{merged}"] if self.sizes != (1, ANY) else []
        parts += [f"{_range(self.samples)} samples"] if self.samples != (1, ANY) else []
        return "; ".join(
            [
                *parts,
                *(["sums"] if self.sums else []),
                *(["inputs"] if self.inputs else []),
                *(["slopes"] if self.slopes else []),
                *([self.more] if self.more else []),
            ]
        )


def _range(bounds: tuple[int, int]) -> str:
    least, most = bounds
    return str(least) if least == most else f"{least} or more" if most == ANY else f"{least} to {most}"


class Asked(NamedTuple):
    """What a kind of families is asked for, as far as records speak of it."""

    dtype: str
    batch: int
    gpu: Gpu
    sizes: tuple[int, ...]  # p and q of each contraction; none where there is no contraction
    tied: bool | None  # None where there are both kinds, or none
    sums: bool
    inputs: bool = False  # whether x is several tensors
    slopes: bool = False  # whether what is made goes back through an activation

    @classmethod
    def of(cls, *asked: Any) -> Asked:
        """Of the arguments of a tile function: a subject, its dtype if it does not have one itself, batch and gpu."""
        *subject, batch, gpu = asked
        what, dtype = subject[0], subject[-1] if isinstance(subject[-1], str) else subject[0].dtype
        sizes = tuple(n for pair in _sizes(what) for n in pair)
        first = what[0] if isinstance(what, tuple) and what else what
        slopes = bool(getattr(first, "slope", 0) or getattr(first, "through", 0))
        return cls(dtype, batch, gpu, sizes, *_kind(what), bool(getattr(first, "inputs", ())), slopes)


def _sizes(what: Any) -> Iterator[tuple[int, int]]:
    if isinstance(what, Work):
        yield from ((mode.p, mode.q) for _, mode in what.steps)
    elif isinstance(what, Product):
        yield what.contraction.p, what.contraction.q
    elif isinstance(what, Contraction):
        yield what.p, what.q
    elif isinstance(what, Recurrence):
        yield from _sizes(what.chain)
    elif isinstance(what, Chain):
        yield from ((c.p, c.q) for c in what.contractions)
    elif isinstance(what, tuple):  # of modes or layers
        for each in what:
            yield from ((p, q) for _, q, p in each.parts) if isinstance(each, Mode) else _sizes(each)


def _kind(what: Any) -> tuple[bool | None, bool]:
    """Whether contractions are tied, and whether products are summed."""
    if isinstance(what, Work):
        return True, what.rank > 1 or what.terms > 1 or what.apart
    if isinstance(what, Product):
        return what.contraction.tied, what.terms > 1
    if isinstance(what, Contraction):
        return what.tied, False
    if isinstance(what, Recurrence):
        return _kind(what.chain)
    if isinstance(what, Chain):
        kinds = {c.tied for c in what.contractions}
        return next(iter(kinds)) if len(kinds) == 1 else None, what.rank > 1
    return (True if isinstance(what, tuple) else None), False


@dataclass(frozen=True)
class Margin:
    """What a family's predicted time is multiplied by where others' stand beside it, `times` or, where something
    `holds` of what it is asked for, `instead`. One cost model for all families would need none."""

    times: float = 1.0
    instead: float = 1.0
    holds: Callable[..., bool] | None = None
    source: str = ""  # of the numbers, and beside what

    def of(self, *asked: Any) -> float:
        return self.instead if self.holds and self.holds(*asked) else self.times

    def __str__(self) -> str:
        """`holds` says by its name what it asks."""
        where = f" ({self.instead} where it{self.holds.__name__.replace('_', ' ')})" if self.holds else ""
        return f"{self.times}{where} {self.source}"


@dataclass(frozen=True)
class Family:
    """`tile` has the pass, or passes in order, that are predicted to be the fastest, or nothing; a family without it is
    beside others' passes. `told` are names of what it is told beside what all of a kind are asked. Its name is that of
    the first pass that it makes, unless it is `named` otherwise."""

    about: str
    tile: Callable[..., Any] | None
    makes: tuple[type[Pass], ...]
    page: str  # of docs/kernels
    takes: Takes = Takes()
    margin: Margin = Margin()
    told: tuple[str, ...] = ()
    alone: bool = False  # where it has a kernel, those of its kind behind it are not asked
    last: bool = False  # taken only where no family of another kind has a kernel
    named: str = ""

    @property
    def name(self) -> str:
        return self.named or in_words(self.makes[0])

    @property
    def module(self) -> str:
        """Its path in the repository."""
        return f"{self.makes[0].__module__.replace('.', '/')}.py"

    @property
    def template(self) -> str:
        """The path of its device header."""
        room, stem = self.module.removeprefix("factorlayer/kernels/").rpartition("/")[::2]
        stem = self.makes[0].header or stem.removesuffix(".py")
        return "/".join(["csrc/engine/kernels", *([room] if room else []), f"{stem}.cuh"])

    def way(self, *asked: Any, **told: Any) -> tuple[Pass, ...]:
        """Its passes, with those that it needs before and behind; none where it has no kernel."""
        return self._way(Asked.of(*asked), asked, told)

    def _way(self, about: Asked, asked: tuple[Any, ...], told: dict[str, Any]) -> tuple[Pass, ...]:
        if self.tile is None or not self.takes.admits(about):
            return ()
        found = self.tile(*asked, **{name: told[name] for name in self.told if name in told}) or ()
        return (*found, *found[-1].finishing) if found and isinstance(found, tuple) else found and found.passes


class Offer(NamedTuple):
    us: float  # predicted for the class of batches, times the family's margin
    passes: tuple[Pass, ...]
    family: Family


def offers(families: Iterable[Family], *asked: Any, **told: Any) -> Iterator[Offer]:
    """Of each family that has a kernel, up to the first one that answers alone."""
    about = Asked.of(*asked)
    inputs, sums = told.get("inputs") is not None, told.get("rank", 1) > 1
    about = about._replace(inputs=about.inputs or inputs, sums=about.sums or sums)
    for family in families:
        if passes := family._way(about, asked, told):
            yield Offer(family.margin.of(*asked) * class_us(passes, about.batch), passes, family)
            if family.alone:
                return


def ways(families: Iterable[Family], *asked: Any, **told: Any) -> Iterator[tuple[Pass, ...]]:
    """Passes of each family that has a kernel."""
    yield from (offer.passes for offer in offers(families, *asked, **told))


def fastest(families: Iterable[Family], *asked: Any, **told: Any) -> tuple[Pass, ...]:
    """By predicted times and margins; the first of equals. None where no family has a kernel."""
    found = min(offers(families, *asked, **told), key=lambda offer: offer.us, default=None)
    return found.passes if found else ()
