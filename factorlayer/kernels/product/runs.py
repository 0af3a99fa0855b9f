"""Results of 16 bits, of groups that take turns in y, on their way through shared memory: runs.cuh and its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from factorlayer.device.kept import kept
from factorlayer.kernels.product.streamed import SECTOR, Product

MOST_COLUMNS = 256  # of a tile
MORE_TILES = 8  # of columns than there have to be, that are compared
HELD = (1, 2, 4, 8, 16, 32)  # groups, where not all are
PIECE, KEPT = 8, SECTOR // 2  # elements of a piece, and of a sector of L2
# Cycles of a warp for a store of its results to shared memory, for a pair of sectors of each of its 16 rows, and for
# both ends of these; a share of them where another warp has the same scheduler. Fitted to 685 tilings of 110
# contractions of drawn Monarch layers on one H100: 89 % are within 30 %, of a contraction's the one with the least
# prediction takes 1.04 of the best one's time, 1.54 at most
PUT_CYCLES, PAIR_CYCLES, END_CYCLES, BESIDE = 2.5, 176, 274, 0.85


@dataclass(frozen=True)
class Runs:
    """Of a tile `turns` runs of a row; `held` of its `groups` have theirs side by side, and go together."""

    product: Product
    turns: int
    held: int
    groups: int

    @property
    def columns(self) -> int:
        return self.turns * self.product.b

    @property
    def n(self) -> int:
        """Columns that are multiplied, some of them for nothing."""
        return -(-self.columns // 8) * 8

    @property
    def keeps(self) -> bool:
        """Whether some groups go before others, and parts of sectors with these."""
        return self.groups > self.held

    @kept
    def step(self) -> int:
        """Elements from one run to the next: as in memory, modulo a piece."""
        turn, held = self.product.fast * self.product.b, self.held * self.product.b
        if self.held == self.product.fast:
            return turn
        apart = held + (KEPT - 1 + 2 * (PIECE - 1) if self.keeps else 0)
        return apart + (turn - apart) % PIECE

    @kept
    def row_bytes(self) -> int:
        """Of a row, an odd number of pieces."""
        elements = KEPT * self.keeps + PIECE - 1 + (self.turns - 1) * self.step + self.held * self.product.b
        return (-(-elements // PIECE) | 1) * 16

    def us(self, consumers: int, cycles: float) -> float:
        """Microseconds of a tile: of each warp, in turns with others of its scheduler."""
        p, stores = self.product, -(-self.groups // self.held)
        alone = self.held == p.fast
        runs, run = (1, self.turns * p.fast * p.b) if alone else (self.turns, self.held * p.b)
        put = self.groups * self.n / 8 * (2 if p.b % 2 == 0 else 4)
        pairs = stores * runs * -(-(run + KEPT - 1) // (2 * KEPT)) + (stores - 1) * self.turns / 4
        ends = 0.0 if p.b % PIECE == 0 else runs * min(stores, 2)
        taken = PUT_CYCLES * put + PAIR_CYCLES * pairs + END_CYCLES * ends
        return taken * (1 + BESIDE * (consumers - 1)) / cycles


def runs_of(product: Product) -> Iterator[Runs]:
    """Those of a product that are compared; none where groups do not take turns, or results are no halves."""
    b, fast, turns = product.b, product.fast, product.contraction.q // product.b
    if product.size > 2 or fast == 1 or turns == 1 or b > MOST_COLUMNS or product.reads_beside:
        return
    least = -(-turns // (MOST_COLUMNS // b))
    for each in sorted({-(-turns // tiles) for tiles in range(least, min(turns, least + MORE_TILES) + 1)}):
        yield Runs(product, each, fast, fast)
        for held in HELD:
            if held * b >= KEPT:
                parts = sorted({-(-fast // parts) for parts in (1, 2, 4)})
                yield from (Runs(product, each, held, groups) for groups in parts if held < groups)
