"""Plans of gated recurrent units: of all their steps forward, and of what goes back through them."""

from __future__ import annotations

from factorlayer.device.gpu import Gpu
from factorlayer.kernels.recurrent.recurrent import why_not
from factorlayer.maths.recurrence import Recurrence
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.registry import OF_RECURRENCE, OF_RECURRENCE_BACK, OF_RECURRENT_SLOPES, fastest

BACKWARD, SLOPES = "backward", "slopes"  # behind a recurrence's text, what is asked for


def is_recurrent(text: str) -> bool:
    return text.startswith("gru ")


def plan_recurrent(text: str, dtype: str, batch: int, gpu: Gpu) -> Plan:
    """For so many sequences, or, of slopes, rows."""
    head, _, asked = text.partition(" | ")
    if asked not in ("", BACKWARD, SLOPES):
        raise ValueError(f"recurrence {text[:200]!r} should have nothing, {BACKWARD!r} or {SLOPES!r} behind it")
    recurrence = Recurrence.parse(head)
    chain = recurrence.chain
    computed = "tf32" if dtype == "float32" and chain.tf32 else dtype
    kind = {"": OF_RECURRENCE, BACKWARD: OF_RECURRENCE_BACK, SLOPES: OF_RECURRENT_SLOPES}[asked]
    found = fastest(kind, recurrence, computed, batch, gpu)
    if not found:
        raise PlanError(
            why_not(recurrence)
            or f"the recurrent weights of {recurrence.hidden} features in {computed} do not fit in "
            f"the {gpu.shared} bytes of a multiprocessor's shared memory"
        )
    return Plan(chain, computed, batch, gpu, found)
