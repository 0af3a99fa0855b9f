"""Structured linear layers (Kronecker, Monarch) and MLP blocks for PyTorch, run as chains that stay on chip."""

import importlib
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
    "GRUDecoder",
    "Implementation",
    "Structure",
    "convert",
    "export_choices",
    "factor_linear",
    "fit",
    "freeze",
    "fuse",
    "import_choices",
    "load_converted",
    "load_dense",
    "param_groups",
    "report",
    "restore",
    "save_converted",
    "suggest",
    "tune",
    "unfreeze",
]

OF_MODELS = {"convert": "convert", "restore": "convert", "load_dense": "convert"}  # each with its module
OF_MODELS |= {"load_converted": "checkpoints", "save_converted": "checkpoints"}
OF_MODELS |= {"fit": "fit", "param_groups": "groups", "report": "report", "suggest": "suggest"}

if TYPE_CHECKING:
    from factorlayer.decoder import GRUDecoder
    from factorlayer.fusion import fuse
    from factorlayer.mlp import FactorMLP
    from factorlayer.models.checkpoints import load_converted, save_converted
    from factorlayer.models.convert import convert, load_dense, restore
    from factorlayer.models.fit import fit
    from factorlayer.models.groups import param_groups
    from factorlayer.models.report import report
    from factorlayer.models.suggest import suggest
    from factorlayer.recurrent import FactorGRU, FactorGRUCell
    from factorlayer.stacks.stack import freeze, unfreeze
    from factorlayer.stacks.tuning import tune
    from factorlayer.tuning.kept import export_choices, import_choices


def __getattr__(name: str) -> Any:
    """Imports the module of a block, a recurrent layer, a whole-model function or tuning when its name is first used:
    together these imports take as long as all the rest."""
    if name == "FactorMLP":
        from factorlayer.mlp import FactorMLP

        return FactorMLP
    if name in ("FactorGRU", "FactorGRUCell"):
        from factorlayer import recurrent

        return getattr(recurrent, name)
    if name == "GRUDecoder":
        from factorlayer.decoder import GRUDecoder

        return GRUDecoder
    if name == "fuse":
        from factorlayer.fusion import fuse

        return fuse
    if name in ("freeze", "unfreeze"):
        from factorlayer.stacks import stack

        return getattr(stack, name)
    if name == "tune":
        from factorlayer.stacks.tuning import tune

        return tune
    if name in OF_MODELS:
        return getattr(importlib.import_module(f"factorlayer.models.{OF_MODELS[name]}"), name)
    if name in ("export_choices", "import_choices"):
        from factorlayer.tuning import kept

        return getattr(kept, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
