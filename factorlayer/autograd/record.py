"""What a module computes, kept beside its parameters in a state_dict, so that another one refuses them by name.

Shapes tell most layers apart: given the structure, they say factors, blocks and rank. They do not tell a sum of r
Kronecker products from a Monarch layer whose matrices are as many and as large (64 -> 64 by rank 8 or 8 blocks), and
know of no activation. So there is a record, in the metadata that nn.Module keeps of every state_dict. That leaves the
keys those of the parameters. A further key is what strict loading, torch.distributed.checkpoint and
torch.func.functional_call(strict=True) compare: with it, the last two refuse what was saved before.

The metadata go through torch.save, copies and memory. What keeps tensors only, as safetensors, save_pretrained of
transformers, or a dict made anew, loses them. For these, `record = True`, of a class or of one module, has the
state_dict hold the record as a tensor of bytes as well, `_extra_state`. Both are checked wherever they are found, and
neither is missed. A record that the tensors beside it contradict is an old one, whose keys were renamed, and says
nothing. What differs in structure is an error; what only differs in activation is an unexpected key, which
strict=False lets pass, as nn.Module does not say here whether it is strict.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from factorlayer.maths.spec import LayerSpec, spec_of_weights

IN_METADATA, AS_TENSOR = "factorlayer", "_extra_state"  # the keys; the second is nn.Module's
Record = dict[str, Any]  # of names, numbers and lists of them


class Recorded(nn.Module):
    """A module that keeps a record of what it computes."""

    record: bool = False

    def what_it_is(self) -> Record:
        raise NotImplementedError

    def record_of_given(self, found: Record | None, given: Mapping[str, Any]) -> Record | None:
        """What is known of tensors, given by their names in this module: the record found with them, or what their
        shapes say."""
        return found

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(json.dumps(self.what_it_is()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Refuses the record of another layer. nn.Module calls it where keys are loaded one by one, as transformers
        does."""
        found, own = _decoded(state), self.what_it_is()
        if found is not None and found != own:
            raise ValueError(f"{type(self).__name__}: {why_another(found, own)}")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.record:
            destination.pop(prefix + AS_TENSOR)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})[IN_METADATA] = json.dumps(self.what_it_is())

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = _decoded(state_dict.pop(prefix + AS_TENSOR, None))
        if found is None and IN_METADATA in local_metadata:
            found = json.loads(local_metadata[IN_METADATA])
        given = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        found, own = self.record_of_given(found, given), self.what_it_is()
        if found is not None and not _same_layer(found, own):
            error_msgs.append(f"{type(self).__name__}{f' {prefix[:-1]}' if prefix else ''}: {why_another(found, own)}")
        elif found is not None and not found.items() <= own.items():
            unexpected_keys.append(f"{prefix}{AS_TENSOR} ({why_another(found, own)})")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + AS_TENSOR in missing_keys:
            missing_keys.remove(prefix + AS_TENSOR)


def why_another(found: Record, own: Record) -> str:
    advice = (
        "strict=False loads the parameters all the same" if _same_layer(found, own) else "build that one to load it"
    )
    return f"what is loaded is of {in_words(found)}, this is of {in_words(own)}; {advice}"


def record_of(spec: LayerSpec) -> Record:
    factors = [list(spec.in_factors), list(spec.out_factors)]
    return {"structure": spec.structure, "factors": factors, "rank": spec.rank}


def record_of_weights(spec: LayerSpec, found: Record | None, given: Mapping[str, Any]) -> Record | None:
    """What is known of weights, by their names in a layer: their record, or what their shapes say."""
    names = itertools.takewhile(given.__contains__, map("weight_{}".format, itertools.count()))
    shapes = tuple(tuple(given[name].shape) for name in names)
    if found is not None and _shapes(found) == shapes:
        return found
    if len(shapes) < len(spec.weight_shapes):  # a part of them, which is no layer
        return None
    try:
        return record_of(spec_of_weights(spec.structure, shapes))
    except ValueError:  # PyTorch has words for shapes
        return None


def warn_of_dense(spec: LayerSpec, given: Mapping[str, Any]) -> None:
    """Warns where an nn.Linear's parameters are loaded: unless loading is strict, nn.Module leaves the weights as they
    are."""
    if "weight" in given and "weight_0" not in given:
        warnings.warn(
            f"FactorLinear keeps the weights it has: what is loaded has an nn.Linear's weight "
            f"{tuple(given['weight'].shape)}, this is of {in_words(record_of(spec))}; load it into an nn.Linear, and "
            "make the layer of that with FactorLinear.from_linear",
            UserWarning,
            stacklevel=2,
        )


def _shapes(record: Record) -> tuple[tuple[int, ...], ...] | None:
    """Shapes of the weights that a record is of."""
    try:
        in_factors, out_factors = map(tuple, record["factors"])
        return LayerSpec(record["structure"], in_factors, out_factors, record["rank"]).weight_shapes
    except (KeyError, TypeError, ValueError):
        return None


def _same_layer(found: Record, own: Record) -> bool:
    return all(found.get(name) == own.get(name) for name in ("structure", "factors", "rank"))


def in_words(record: Record) -> str:
    return ", ".join(f"{name}={_tuples(value)!r}" for name, value in record.items())


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _decoded(state: Any) -> Record | None:
    """The record that a tensor holds, or None if it holds none: it was summed over processes, or made by somebody
    else."""
    try:
        found = json.loads(bytes(int(byte) for byte in state.flatten().tolist()))
    except (AttributeError, TypeError, ValueError):
        return None
    return found if isinstance(found, dict) else None
