"""Monarch layers as kernels of both contractions have them."""

from __future__ import annotations

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.passes import Pass
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import Contraction


class OfMonarch(Pass):
    """A pass of both contractions of a Monarch layer."""

    chain: Chain
    gpu: Gpu

    @property
    def both(self) -> tuple[Contraction, Contraction]:
        first, second = self.chain.contractions
        return first, second

    @property
    def rank(self) -> int:
        """Numbers of the state between that a group of either contraction has for one of the other."""
        return self.both[0].q // self.both[1].inner

    @property
    def told_layer(self) -> dict[str, int]:
        first, second = self.both
        numbers = {"FIRST": first.weight, "SECOND": second.weight, "K": first.outer, "P": first.p}
        return numbers | {"L": second.inner, "S": second.q, "RHO": self.rank}

    @property
    def output_bytes(self) -> int:
        return self.chain.out_features * self.size


def takes_forward(chain: Chain) -> bool:
    """Whether it is a layer's own chain, of which nothing is turned, and of no gradient."""
    asked = chain.turn or chain.slope or chain.through or chain.gradient or chain.backward
    return chain.is_monarch and not asked
