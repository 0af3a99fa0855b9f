"""Structured linear layers (Kronecker, Monarch) and MLP blocks for PyTorch, run as chains that stay on chip."""

from typing import TYPE_CHECKING, Any

import factorlayer.autograd.stack_ops  # noqa: F401 (its import tells PyTorch what it has to know of the ops)
from factorlayer.activations.expression import Expression
from factorlayer.activations.named import ACTIVATIONS
from factorlayer.autograd.build import VERSION
from factorlayer.autograd.runtime import CompileError
from factorlayer.functional import Implementation, factor_linear
from factorlayer.layers import FactorLinear
from factorlayer.maths.spec import Structure

__version__ = VERSION
__all__ = [
    "ACTIVATIONS",
    "CompileError",
    "Expression",
    "FactorGRU",
    "FactorGRUCell",
    "FactorLinear",
    "FactorMLP",
    "Implementation",
    "Structure",
    "export_choices",
    "factor_linear",
    "fuse",
    "import_choices",
    "tune",
]

if TYPE_CHECKING:
    from factorlayer.fusion import fuse
    from factorlayer.mlp import FactorMLP
    from factorlayer.recurrent import FactorGRU, FactorGRUCell
    from factorlayer.stacks.tuning import tune
    from factorlayer.tuning.kept import export_choices, import_choices


def __getattr__(name: str) -> Any:
    """Blocks, recurrent layers and tuning, whose modules are imported when they are needed: it takes as long as all the
    rest."""
    if name == "FactorMLP":
        from factorlayer.mlp import FactorMLP

        return FactorMLP
    if name in ("FactorGRU", "FactorGRUCell"):
        from factorlayer import recurrent

        return getattr(recurrent, name)
    if name == "fuse":
        from factorlayer.fusion import fuse

        return fuse
    if name == "tune":
        from factorlayer.stacks.tuning import tune

        return tune
    if name in ("export_choices", "import_choices"):
        from factorlayer.tuning import kept

        return getattr(kept, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
