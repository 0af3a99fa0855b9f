"""What stands behind contractions, on the way back: columns.cuh, its threads and source.

One pass multiplies grad_y by an activation's slopes, sums each feature over the samples, a bias's gradient, and stores
what it has multiplied as it lies or turned: whatever is asked of these, each element is read and written once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from factorlayer.activations.written import gradient, gradient_by_result
from factorlayer.device.code import ELEMENT, Told, constants
from factorlayer.device.gpu import Gpu
from factorlayer.device.kept import kept
from factorlayer.kernels.batches import MOST_SOME, most_of_class, samples_of_class
from factorlayer.kernels.gradient import REDUCTION_US, SUM_BYTES, InTiles, Reduction
from factorlayer.kernels.passes import Pass
from factorlayer.kernels.product.turn import ACCESS_CYCLES
from factorlayer.kernels.work import round_up
from factorlayer.maths.chain import Chain

THREADS = 256  # of a block, about
MOST_THREADS = 512  # where rows of a tile that is turned would be shorter than a sector
SECTOR = 32  # bytes
# Of a block that makes nothing but sums, which are added up in the block before memory gets them, and of such a block
# where there are more tiles than would have room at once
SUMMING_TOGETHER, SUMMING_APART = 512, 256
# Accesses of a row that a block has then, the first one at most; or those among which a block that has all samples of a
# tile, and so needs no second kernel behind it, has as many as are predicted to be fastest
LANES = (256, 128, 64, 32, 16, 8, 4, 2)
MOST_TIMES = 4  # times as many short accesses as long ones are on their way then
# Threads of a multiprocessor that make sums, that store as well, and that have functions in double: by their registers
SUMMING, STORING, IN_DOUBLE = 1024, 768, 256
# Accesses of a thread to a tensor that are on their way at once: of sums alone, and of what stores
EACH, EACH_STORING = 8, 4
WAY_CYCLES = 4  # of a thread, for each way whose sums it adds up
# Of memory's rate, what is reached by blocks that stay for the whole batch and store: 0.89 to 0.96 on one H100, where
# single accesses reach 1.01 and sums alone, of rows that 16 bytes divide, 0.97 to 1.02
STAYING = 0.9


@dataclass(frozen=True)
class Columns(InTiles):
    """The pass that does what a chain without contractions asks for beside or without a turn: `sums`, the `slope` of
    an activation or the way back `through` it from its result."""

    chain: Chain
    dtype: str
    batch: int
    gpu: Gpu
    whole: int = 0  # accesses of a row, at most, of a block that has all samples of them; 0: blocks share samples

    reads = "x"

    @property
    def features(self) -> int:
        return self.chain.in_features

    @property
    def weights(self) -> int:
        """Sums."""
        return self.features

    @property
    def slopes(self) -> bool:
        return self.chain.slope + self.chain.through > 0

    @property
    def stores(self) -> bool:
        """Whether it makes a gradient of each sample."""
        return self.slopes or self.chain.turn is not None

    @property
    def sums(self) -> bool:
        return self.chain.sums > 0

    @property
    def each(self) -> int:
        if self.whole:
            return EACH * min(MOST_TIMES, self.piece // self.run)
        return EACH_STORING if self.stores else EACH

    @property
    def piece(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.size

    @kept
    def run(self) -> int:
        """Elements of an access."""
        turn = self.chain.turn
        if self.whole:
            return math.gcd(self.piece, self.features)
        return math.gcd(self.piece, turn[1] * turn[2]) if turn else self.piece

    @kept
    def folds(self) -> int:
        """Samples of a row that 16 bytes divide."""
        return 1 if self.chain.turn or self.whole else self.piece // math.gcd(self.piece, self.features)

    @property
    def row(self) -> int:
        """Elements that are taken as a row."""
        return self.features * self.folds if self.sums or self.chain.turn else self.run

    @kept
    def tile_rows(self) -> int:
        """Rows of a matrix, whose tile is turned; none where the tile of a block would be too large."""
        _, rows, columns = self.chain.turn or (0, 0, 0)
        step = math.lcm(self.write, self.run // math.gcd(self.run, columns))
        most = [threads * self.run // columns // step * step for threads in (THREADS, MOST_THREADS)]
        found = next((n for n in most if n >= rows or n * self.size >= 4 * SECTOR), most[-1])
        if found < rows and found * self.size < SECTOR:
            return 0
        return found and round_up(-(-rows // -(-rows // found)), step)

    @property
    def write(self) -> int:
        """Elements of an access to what is turned."""
        return math.gcd(self.piece, (self.chain.turn or (0, 0, 0))[1])

    @kept
    def padding(self) -> int:
        """Elements behind as many columns as a piece has: a warp stores to as many bytes of each such group of them."""
        groups = -(-(self.chain.turn or (0, 0, 0))[2] // self.piece)
        return round_up(-(-32 // groups), self.piece) if groups > 1 else 0

    @property
    def _runs(self) -> int:
        return self.row // self.run

    @kept
    def lanes(self) -> int:
        if self.chain.turn:
            return self.tile_rows * self.chain.turn[2] // self.run
        tiles = -(-self._runs // (self.whole or LANES[0]))
        return -(-self._runs // tiles)

    @property
    def _sums_alone(self) -> bool:
        return self.sums and not self.stores

    @kept
    def ways(self) -> int:
        fits = self._sums_alone and self.tiles * SUMMING_TOGETHER <= self.gpu.sms * SUMMING
        most = (SUMMING_TOGETHER if fits else SUMMING_APART) if self._sums_alone else THREADS
        return max(1, most // self.lanes)

    @property
    def threads(self) -> int:
        return round_up(self.lanes * self.ways, 32)

    @kept
    def tiles(self) -> int:
        if self.chain.turn:
            outer, rows, _ = self.chain.turn
            return int(outer * -(-rows // self.tile_rows))
        return -(-self._runs // self.lanes)

    @kept
    def shared(self) -> int:
        """Bytes: a tile for each sample of a chunk, then the sums of all threads."""
        sums = (self.sums and self.ways > 1) * self.lanes * self.ways * self.run * SUM_BYTES[self.dtype]
        if not self.chain.turn:
            return sums
        columns = self.chain.turn[2]
        tile = columns * self.tile_rows + -(-columns // self.piece) * self.padding
        return max(sums, self.each * self.ways * tile * self.size)

    @property
    def blocks(self) -> int:
        if not (self.sums or self.chain.turn):
            return 1
        running = STORING if self.stores else SUMMING
        return max(1, (IN_DOUBLE if self.slopes and self.dtype == "float64" else running) // self.threads)

    @property
    def blocks_per_sm(self) -> int:
        return self.blocks if self.sums or self.chain.turn else 0  # as many as there is work

    @property
    def units_per_sample(self) -> int:
        return 1 if self.sums or self.chain.turn else self.features

    @property
    def units_per_block(self) -> int:
        """Units that are worth a block: few samples are one block's."""
        if not (self.sums or self.chain.turn):
            return self.ways * self.each * self.run
        return most_of_class(self.batch) if self.whole else self.folds * self.ways * self.each

    @property
    def is_whole(self) -> bool:
        """Whether it writes the sums of all samples: a tile never has several blocks."""
        return self.most * self.folds == 1 and not self.stores

    @property
    def part_bytes(self) -> int:
        """Bytes of the sums that all blocks write, at most."""
        return (
            int(self.most * self.folds * self.features * SUM_BYTES[self.dtype])
            if self.sums and not self.is_whole
            else 0
        )

    @property
    def writes(self) -> str:
        return "y" if self.stores or self.is_whole else "s2"

    @property
    def gradients_to(self) -> str:
        return "w" if self.stores else "y"

    @property
    def finishing(self) -> tuple[Pass, ...]:
        return (Reduction(self),) if self.sums and not self.is_whole else ()

    def outputs(self, batch: int) -> tuple[int, ...]:
        return ((batch if self.stores else self.is_whole) * self.features * self.size,)

    @property
    def us(self) -> float:
        """Predicted microseconds: memory's, or its accesses' if these take longer, and those of sums."""
        elements, gpu = self.batch * self.features, self.gpu
        moved = (1 + self.slopes + self.stores) * elements * self.size / (gpu.memory_bytes * gpu.sms)
        write = self.write if self.chain.turn else self.run
        accesses = elements * ((1 + self.slopes) / self.run + self.stores / write) / (32 * gpu.sms)
        share = STAYING if self.stores and (self.sums or self.chain.turn) else 1.0
        blocks = min(self.most, -(-self.batch * self.units_per_sample // self.units_per_block))
        parts = 2 * blocks * self.part_bytes / (self.most * gpu.l2_bytes * gpu.sms)
        return 1.7 + max(moved / share, ACCESS_CYCLES * accesses / gpu.rates.cycles, self._waiting(blocks)) + parts

    def _waiting(self, blocks: int) -> float:
        """Microseconds that a thread of nothing but sums waits for its rows, as many at once as are on their way, or
        that a block's way from L2 takes, and those in which a block adds up its ways."""
        if not self._sums_alone:
            return 0.0
        gpu, rows = self.gpu, self.batch / (self.folds * blocks)
        waits = math.ceil(rows / (self.ways * self.each)) * gpu.rates.wait_us
        read = rows * max(self._row_bytes, SECTOR) / gpu.l2_bytes
        return max(waits, read) + WAY_CYCLES * self.ways / gpu.rates.cycles

    def us_of(self, batch: int) -> float:
        return replace(self, batch=batch).us

    def with_sums(self, batch: int) -> float:
        """Microseconds with those of a second kernel that adds up what blocks have summed."""
        return self.us_of(batch) + (0.0 if self.is_whole else REDUCTION_US)

    @property
    def has_sectors(self) -> bool:
        """Whether what a block has of a row is a sector and more, or the whole row."""
        return self.tiles == 1 or self._row_bytes >= SECTOR

    @property
    def _row_bytes(self) -> int:
        """Bytes of a row that a block has."""
        return self.lanes * self.run * self.size

    def __str__(self) -> str:
        behind = ", from their results" if self.chain.through else ""
        done = [f"slopes of {self.features} activations{behind}, times grad_y"] if self.slopes else []
        done += [f"sums of {self.features} features"] if self.sums else []
        done += ["turned {}×{}".format(*self.chain.turn[1:])] if self.chain.turn else []
        rows = f", {self.ways} rows at once" if self.sums or self.chain.turn else ""
        return f"columns: {'; '.join(done)}{rows}"

    @property
    def told(self) -> list[str]:
        chain = self.chain
        told: Told = {"Element": ELEMENT[self.dtype], "Result": "Element" if self.is_whole else "Sum<Element>"}
        told |= {"BESIDE": 0 if self.slopes else -1, "STORES": self.stores, "SUMS": self.sums}
        told |= {"FEATURES": self.features, "ROW": self.row, "RUN": self.run, "LANES": self.lanes, "WAYS": self.ways}
        told |= {"EACH": self.each, "TURNS": chain.turn is not None, "ROUNDS": self.dtype == "tf32"}
        if chain.turn:
            _, rows, columns = chain.turn
            told |= {"ROWS": rows, "COLUMNS": columns, "TR": self.tile_rows, "WRITE": self.write, "PAD": self.padding}
        if not self.slopes:
            return constants(told)
        made = gradient_by_result if chain.through else gradient
        return [*constants(told), made(chain.activation, self.dtype, "Gradient")]


def tile(chain: Chain, dtype: str, batch: int, gpu: Gpu) -> Columns | None:
    """The fastest by prediction for a class of batches; None where what is turned has rows that a block cannot have, or
    an order of its own."""
    made = Columns(chain, dtype, batch, gpu)
    if chain.mixed or (chain.turn and (not made.tile_rows or made.shared > gpu.shared)):
        return None
    if not made.sums or made.stores or batch > MOST_SOME:
        return made
    whole = (replace(made, whole=lanes) for lanes in LANES)
    tilings = [made, *(plan for plan in whole if plan.has_sectors)]
    batches = samples_of_class(batch)
    return min(tilings, key=lambda plan: math.prod(plan.with_sums(each) for each in batches))
