"""Plans of gated recurrent units: of all their steps forward, of what goes back through them, of a decoder's step."""

from __future__ import annotations

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.recurrent.recurrent import why_not
from factorlayer.maths.chain import Chain
from factorlayer.maths.decoder import DRAWS, FEW, Decoder
from factorlayer.maths.recurrence import Recurrence
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.registry.family import fastest
from factorlayer.plan.registry.recurrent import (
    OF_DECODE_CHOICE,
    OF_DECODE_DRAW,
    OF_DECODE_FEW,
    OF_DECODE_STEP,
    OF_RECURRENCE,
    OF_RECURRENT_SLOPES,
)

NOTHING = Chain(())  # of a plan without a contraction
BACKWARD, SLOPES = "backward", "slopes"  # behind a recurrence's text, what is asked for


def is_recurrent(text: str) -> bool:
    return text.startswith(("gru ", "decode ")) or text in (*DRAWS, FEW)


def plan_recurrent(text: str, dtype: str, batch: int, gpu: Gpu) -> Plan:
    """The plan of a recurrent unit's text, for so many sequences; if it asks for slopes, for so many rows."""
    if text == FEW:
        return Plan(NOTHING, dtype, batch, gpu, fastest(OF_DECODE_FEW, dtype, batch, gpu))
    if text in DRAWS:
        return Plan(NOTHING, dtype, batch, gpu, fastest(OF_DECODE_DRAW, text == DRAWS[1], dtype, batch, gpu))
    if text.startswith("decode "):
        return _plan_decoder(Decoder.parse(text), dtype, batch, gpu)
    head, _, asked = text.partition(" | ")
    if asked not in ("", BACKWARD, SLOPES):
        raise ValueError(f"recurrence {text[:200]!r} should have nothing, {BACKWARD!r} or {SLOPES!r} behind it")
    recurrence = Recurrence.parse(head)
    chain = recurrence.chain
    computed = "tf32" if dtype == "float32" and chain.tf32 else dtype
    kind = OF_RECURRENT_SLOPES if asked == SLOPES else OF_RECURRENCE
    found = fastest(kind, recurrence, computed, batch, gpu, back=asked == BACKWARD)
    if not found:
        raise PlanError(
            why_not(recurrence)
            or f"the recurrent weights of {recurrence.hidden} features in {computed} do not fit in "
            f"the {gpu.shared} bytes of a multiprocessor's shared memory"
        )
    return Plan(chain, computed, batch, gpu, found)


def _plan_decoder(decoder: Decoder, dtype: str, batch: int, gpu: Gpu) -> Plan:
    """The plan of a decoder's step: its layers one behind another, and the head."""
    steps = [fastest(OF_DECODE_STEP, decoder, layer, dtype, batch, gpu) for layer in range(decoder.layers)]
    parts = [*steps, fastest(OF_DECODE_CHOICE, decoder, dtype, batch, gpu)]
    if not all(parts):
        raise PlanError(
            f"what {decoder.samples} samples are multiplied by, in {dtype}, does not fit in the {gpu.shared} bytes of "
            "a multiprocessor's shared memory"
        )
    return Plan(decoder.recurrence.chain, dtype, batch, gpu, tuple(p for part in parts for p in part))
