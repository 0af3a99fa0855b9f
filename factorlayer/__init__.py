"""Structured linear layers (Kronecker, Monarch) for PyTorch, each run as one chain that stays on chip."""

from factorlayer.activations import ACTIVATIONS
from factorlayer.expression import Expression
from factorlayer.functional import factor_linear
from factorlayer.layers import FactorLinear
from factorlayer.runtime import CompileError

__version__ = "0.1.0"
__all__ = ["ACTIVATIONS", "CompileError", "Expression", "FactorLinear", "factor_linear"]
