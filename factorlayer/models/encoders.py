"""nn.TransformerEncoder's own way past its layers: in eval mode it reads linear1.weight and linear2.weight, and calls
neither. Where one of them is structured, that way is closed by its own switches; restore opens it again."""

from __future__ import annotations

from torch import nn

from factorlayer.layers import FactorLinear

SWITCHES = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)
BEFORE = "_before_convert"


def close(model: nn.Module) -> None:
    """Closes the way of encoders that have structured layers."""
    for part in model.modules():
        for kind, name, off in SWITCHES:
            if isinstance(part, kind) and _is_structured(part) and getattr(part, name, off) != off:
                vars(part)[BEFORE] = getattr(part, name)
                setattr(part, name, off)


def reopen(model: nn.Module) -> None:
    """Opens it again where all layers are dense."""
    for part in model.modules():
        for kind, name, _ in SWITCHES:
            if isinstance(part, kind) and BEFORE in vars(part) and not _is_structured(part):
                setattr(part, name, vars(part).pop(BEFORE))


def _is_structured(part: nn.Module) -> bool:
    layers = [each for each in part.modules() if isinstance(each, nn.TransformerEncoderLayer)]
    return any(isinstance(inner, FactorLinear) for each in layers for inner in (each.linear1, each.linear2))
