"""Structured linear layers (Kronecker, Monarch) and MLP blocks for PyTorch, run as chains that stay on chip."""

from factorlayer.activations import ACTIVATIONS
from factorlayer.expression import Expression
from factorlayer.functional import factor_linear
from factorlayer.fusion import fuse
from factorlayer.layers import FactorLinear
from factorlayer.mlp import FactorMLP
from factorlayer.runtime import CompileError

__version__ = "0.1.0"
__all__ = ["ACTIVATIONS", "CompileError", "Expression", "FactorLinear", "FactorMLP", "factor_linear", "fuse"]
