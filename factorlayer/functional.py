"""From a call to an implementation: check what came, apply autocast, choose, run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from factorlayer.activations.formula import formula
from factorlayer.activations.named import activate
from factorlayer.activations.texts import UserActivation, activation_of, scalars
from factorlayer.autograd.batch import LARGE_MEMBER, batch_of, mapped, of_no_members, one_by_one
from factorlayer.autograd.input_ops import fused_inputs, of_inputs, why_concatenated
from factorlayer.autograd.inputs import (
    Input,
    are_several,
    check_alike,
    checked,
    concatenated,
    dense_product,
)
from factorlayer.autograd.layer_ops import (
    DTYPES,
    any_requires_grad,
    fused,
    is_sharded,
    prepare_fused,
    runs_in_tf32,
    take_kernels,
    text_for,
    transforms_active,
    why_never_fused,
    why_not_fused,
)
from factorlayer.autograd.layer_ops import layer_at_once as every_layer_at_once
from factorlayer.autograd.nested import through
from factorlayer.autograd.runtime import CompileError, dtype_name, is_hopper
from factorlayer.autograd.stack_ops import is_left_to_cublas, is_left_to_pytorch
from factorlayer.maths.batched import batched
from factorlayer.maths.chain import MOST_INPUTS, Chain
from factorlayer.maths.multiplied import multiplied_out
from factorlayer.maths.naive import naive
from factorlayer.maths.spec import LayerSpec, Structure, spec_of_weights
from factorlayer.tuning import choices, predicted

if TYPE_CHECKING:
    from factorlayer.tuning.candidates import Forward, Tuned

Implementation = Literal["auto", "naive", "batched", "fused", "v1", "v2", "v3"]
IMPLEMENTATIONS: dict[str, Implementation] = {"auto": "auto", "naive": "naive", "batched": "batched", "fused": "fused"}
IMPLEMENTATIONS |= {"v1": "naive", "v2": "batched", "v3": "fused"}


def implementation_name(implementation: str, who: str = "") -> Implementation:
    """The name that is meant; `who`, if given, is named in the error."""
    if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
        words = f"implementation should be one of {', '.join(IMPLEMENTATIONS)}; it is {implementation!r}"
        raise ValueError(f"{who}: {words}" if who else words)
    return IMPLEMENTATIONS[implementation]


def factor_linear(
    x: Input,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    activation: UserActivation = None,
    structure: Structure = "kronecker",
    implementation: Implementation = "auto",
    *,
    rank: int | None = None,
    batch_dims: int = 0,
) -> Tensor:
    """activation(x Wᵀ + bias), where W is the structured matrix that the weights stand for.

    Kronecker weights are [Qi, Pi] each, or [rank, Qi, Pi]; Monarch weights are [positions, Qi, Pi], and for two of them
    [L, s, K·rank] and [K, rank·L, p]: maths/spec.py has the definitions. If `rank` is given, weights of any other rank
    are refused.

    x may be a list of tensors. It is taken as if it were concatenated along the features; the tensors are read where
    they lie, and each has a gradient of its own.

    With batch_dims=n, the first n axes of every tensor are axes of a batch, and each member of the batch has a W of its
    own: weights [*batch, Qi, Pi], x [*batch, …, in], y [*batch, …, out], and bias [*batch, out], or [out] for all. Axes
    of 1 are expanded. Without it, a leading axis of Kronecker weights is the rank: W is a sum. Where x has as many
    entries along its first axis as that rank, a batch may be meant, and a warning asks for batch_dims or rank.

    An activation is None, a name, or a module or function of one tensor. A module or function is traced at every call,
    which takes a few milliseconds; FactorLinear does so once.
    """
    if not isinstance(weights, (list, tuple)):  # they are read more than once
        if not isinstance(weights, Iterable):
            kind = type(weights).__name__
            raise TypeError(f"factor_linear: weights should be a list of tensors, it is of the type {kind}")
        weights = list(weights)
    try:
        first = _first(x)
        _check_batch_dims(batch_dims, first, weights, bias)
        stage, names = activation_of(activation)
        spec, chain = _described(
            structure, tuple([weight.shape[batch_dims:] for weight in weights]), bias is not None, stage
        )
        if rank not in (None, spec.rank):
            raise ValueError(f"rank={rank} was given, the weights are of rank {spec.rank}: {_shapes(weights)}")
        chosen = implementation_name(implementation)
    except (TypeError, ValueError) as error:
        raise type(error)(f"factor_linear: {error}{_hint(weights, batch_dims)}") from None
    except AttributeError:
        _check_parameters_are_tensors("factor_linear", weights, bias)
        raise
    parameters = scalars(activation, names) if names else []
    if batch_dims:
        whole = concatenated(x) if are_several(x) else x
        return _run_batch(spec, chain, whole, weights, bias, parameters, chosen, batch_dims)
    if rank is None and spec.terms > 1 and _may_be_a_batch(first, spec) and not is_dynamo_compiling():
        warnings.warn(
            f"factor_linear: W is the sum of {spec.rank} products, as the weights are {_shapes(weights)}; x "
            f"{tuple(first.shape)} has as many along its first axis: say batch_dims=1 if each of these has a W of its "
            f"own, or rank={spec.rank} if not",
            UserWarning,
            stacklevel=2,
        )
    return run(spec, chain, x, [*weights, *parameters], bias, chosen, "factor_linear")


Shapes = tuple[tuple[int, ...], ...]


def _described(structure: Structure, shapes: Shapes, bias: bool, stage: str) -> tuple[LayerSpec, Chain]:
    """The layer that weights of such shapes stand for. It is kept, as finding it takes longer than a small layer."""
    if not is_dynamo_compiling() and torch._C._is_tracing():  # whose sizes are tensors
        shapes = tuple(tuple(map(int, shape)) for shape in shapes)
    try:
        return (_made if is_dynamo_compiling() else _known)(structure, shapes, bias, stage)
    except TypeError:  # what has no hash, as sizes that are only known later
        return _made(structure, shapes, bias, stage)


def _made(structure: Structure, shapes: Shapes, bias: bool, stage: str) -> tuple[LayerSpec, Chain]:
    spec = spec_of_weights(structure, shapes)
    return spec, Chain.of(spec, bias, stage)


_known = functools.lru_cache(1024)(_made)


def _first(x: Input) -> Tensor:
    """x, or the first tensor of a list."""
    if are_several(x):
        if not x:
            raise ValueError("x should be a tensor or a list of tensors, the list is empty")
        return x[0]
    return x


def _may_be_a_batch(x: Tensor, spec: LayerSpec) -> bool:
    return len(x.shape) > 2 and x.shape[0] == spec.rank


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


def _hint(weights: Sequence[Tensor], batch_dims: int) -> str:
    """What an error says of batch_dims, where the weights look like a batch and none was given."""
    (dims, *others) = {len(weight.shape) for weight in weights} or {0}
    more = not others and (dims > 3 or (dims == 3 and {weight.shape[0] for weight in weights} == {1}))
    return "; a batch of them is said by batch_dims" if more and not batch_dims else ""


def _check_batch_dims(batch_dims: int, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> None:
    if not isinstance(batch_dims, int) or isinstance(batch_dims, bool) or batch_dims < 0:
        raise ValueError(f"batch_dims should be how many axes of a batch there are, it is {batch_dims!r}")
    if not batch_dims:
        return
    if len(x.shape) <= batch_dims:
        raise ValueError(f"batch_dims={batch_dims}: x should be [*batch, …, in_features], it is {tuple(x.shape)}")
    if any(len(weight.shape) < batch_dims + 2 for weight in weights):
        raise ValueError(
            f"batch_dims={batch_dims}: weights should be [*batch, Qi, Pi] or more, they are {_shapes(weights)}"
        )
    if bias is not None and len(bias.shape) not in (1, batch_dims + 1):
        raise ValueError(
            f"batch_dims={batch_dims}: bias should be [*batch, out_features] or [out_features], it is "
            f"{tuple(bias.shape)}"
        )


def _run_batch(
    spec: LayerSpec,
    chain: Chain,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    implementation: str,
    dims: int,
) -> Tensor:
    """Runs each member of the batch with its own weights; the activation's parameters are the same for all members."""
    who, tensors, biases = "factor_linear", [x, *weights], []
    if bias is not None:
        biases = [bias if len(bias.shape) > 1 else bias.reshape(*[1] * dims, -1)]
    named = [("x", x), *((f"weight_{i}", weight) for i, weight in enumerate(weights)), *(("bias", b) for b in biases)]
    try:
        batch = batch_of(named, dims)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None
    if 0 in batch:
        return of_no_members([*tensors, *biases], (*batch, *x.shape[dims:-1], spec.out_features))
    chosen = implementation
    if implementation == "auto":
        first = x[(0,) * dims]
        is_large = first.numel() >= LARGE_MEMBER and not any_complex(x, weights, bias)
        recorded = torch.is_grad_enabled() and any_requires_grad(x, bias, weights)
        rows = first.numel() // spec.in_features if spec.in_features else 0
        way = choose(chain, first, "auto", who, rows, recorded) if is_large else ""
        chosen = "fused" if way == "fused" else "batched"

    def member(x: Tensor, *given: Tensor) -> Tensor:
        own = given[: len(weights)]
        return run(spec, chain, x, [*own, *parameters], given[len(weights)] if biases else None, chosen, who)

    return (one_by_one if chosen == "fused" else mapped)(member, [*tensors, *biases], batch)


def run(
    spec: LayerSpec,
    chain: Chain,
    x: Input,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    implementation: str,
    who: str,
) -> Tensor:
    """Runs the layer on x [..., in] by the implementation named; `who` is named in errors. `weights` are those of the
    contractions and, behind them, the activation's parameters."""
    eager = not is_dynamo_compiling() and implementation in ("auto", "fused")
    if eager:
        y = layer_at_once(chain.text, chain.tf32_text, implementation == "auto", x, bias, weights)
        if y is not None:
            return y
    if are_several(x):
        return _run_inputs(spec, chain, x, weights, bias, implementation, who)
    if type(x) is not Tensor and is_sharded(x):
        return _run_sharded(spec, chain, x, weights, bias, implementation, who)
    try:
        if any_complex(x, weights, bias):
            x, weights, bias = all_complex(x, weights, bias, implementation, who)
        is_cast = any_autocast()
        if is_cast:
            x, weights, bias = autocast(x, weights, bias)
        shape = x.shape
        if not shape or shape[-1] != spec.in_features:
            _check(who, spec, x, weights, bias)
        is_matrix = len(shape) == 2  # reshape costs a microsecond, even where it changes nothing
        rows = x if is_matrix else x.reshape(-1, spec.in_features)
    except (AttributeError, RuntimeError):
        return _of_no_rows(spec, chain, x, weights, bias, implementation, who)
    if eager and (is_cast or not is_matrix):
        y = layer_at_once(chain.text, chain.tf32_text, implementation == "auto", rows, bias, weights, is_cast)
        if y is not None:
            return y if is_matrix else y.reshape(*shape[:-1], spec.out_features)
    try:
        recorded = torch.is_grad_enabled() and any_requires_grad(x, bias, weights)
        chosen = choose(chain, rows, implementation, who, rows.shape[0], recorded)
        if chosen == "fused":
            y = fused(chain, rows, weights, bias, recorded)  # which checks the tensors itself, in less time
        else:
            _check(who, spec, x, weights, bias)
            if implementation == "auto":
                _warn_if_never_fused(chain, x)
            y = _run_in_torch(chosen, spec, chain, rows, weights, bias, who)
    except CompileError as error:
        if implementation == "fused":
            raise
        _give_up(chain, x, error)
        y = _run_in_torch("batched", spec, chain, rows, weights, bias, who)
    except (AttributeError, RuntimeError):
        _check_kinds(who, x, weights, bias)  # which have better words for it
        _check(who, spec, x, weights, bias)
        _check_shapes(who, spec, weights)
        raise
    return y if is_matrix else y.reshape(*shape[:-1], spec.out_features)


def _run_inputs(
    spec: LayerSpec,
    chain: Chain,
    given: Input,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    implementation: str,
    who: str,
) -> Tensor:
    """Runs the layer on several tensors [..., features of each] that lie side by side. Kernels read them where they
    lie, or a dense layer under batched makes a product for each; everything else takes them concatenated."""
    if implementation in ("auto", "fused") and not is_dynamo_compiling():
        y = _inputs_at_once(chain, given, weights, bias, implementation)
        if y is not None:
            return y
    inputs = checked(who, given, spec.in_features, "in_features")
    if any_autocast():
        _, weights, bias = autocast(inputs[0], weights, bias)
        inputs = [autocast(x, (), None)[0] for x in inputs]
    check_alike(who, inputs)
    some = [x for x in inputs if x.shape[-1] or x.requires_grad]
    first, *others = some
    if not others:
        return run(spec, chain, first, weights, bias, implementation, who)
    apart = implementation != "naive" and len(some) <= MOST_INPUTS and all(x.shape[-1] for x in some)
    if apart and not (is_sharded(first) or any_complex(first, weights, bias)):
        _check_parameters(who, spec, first, weights, bias)
        is_matrix = first.dim() == 2
        rows = some if is_matrix else [x.reshape(-1, x.shape[-1]) for x in some]
        y = _of_rows(chain, rows, weights, bias, implementation, who)
        if y is not None:
            return y if is_matrix else y.reshape(*first.shape[:-1], spec.out_features)
    return run(spec, chain, concatenated(some), weights, bias, implementation, who)


def _inputs_at_once(
    chain: Chain, given: Input, weights: Sequence[Tensor], bias: Tensor | None, implementation: str
) -> Tensor | None:
    """Makes the eager call for inputs that are not matrices. Returns None where that call does not apply, or an input
    is wrong."""
    try:
        leading = given[0].shape[:-1]
        if len(leading) == 1 or any(x.shape[:-1] != leading for x in given):
            return None
        rows = [x.reshape(-1, x.shape[-1]) for x in given]
    except (AttributeError, IndexError, RuntimeError):
        return None
    y = layer_at_once(chain.text, chain.tf32_text, implementation == "auto", rows, bias, weights)
    return None if y is None else y.reshape(*leading, y.shape[1])


def _of_rows(
    chain: Chain, rows: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, implementation: str, who: str
) -> Tensor | None:
    """Runs the layer on inputs [N, features of each] without concatenating them. Returns None where they have to be
    concatenated."""
    x, batch = rows[0], rows[0].shape[0]
    recorded = torch.is_grad_enabled() and any_requires_grad(x, bias, [*rows, *weights])
    chosen = choose(chain, x, implementation, who, batch, recorded)
    if chosen == "batched" and chain.is_dense:
        return activate(chain.activation, dense_product(rows, weights[0], bias), weights[1:])
    text = text_for(of_inputs(chain, tuple(row.shape[1] for row in rows)), x)
    if chosen == "batched" or why_concatenated(text, x, batch) is not None:
        return None
    if implementation == "auto" and x.is_cuda and type(batch) is int and batch and not is_compiling():
        take_kernels(text, dtype_name(x.dtype), x.get_device(), batch, recorded)  # by the eager call from now on
    try:
        return fused_inputs(text, rows, [*weights, *([] if bias is None else [bias])], recorded)
    except CompileError:
        if implementation == "fused":
            raise
        return None  # the kernels for one tensor may be another matter


def _run_sharded(
    spec: LayerSpec,
    chain: Chain,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    implementation: str,
    who: str,
) -> Tensor:
    """Runs the layer on a DTensor, by what each process runs on its own tensors."""
    from factorlayer.autograd.shards import run_sharded  # where DTensors are, their import has been paid for

    _check_kinds(who, x, weights, bias)
    if not x.dim() or x.shape[-1] != spec.in_features:
        _check(who, spec, x, weights, bias)

    def own(spec: LayerSpec, chain: Chain, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return run(spec, chain, x, weights, bias, implementation, who)

    return run_sharded(own, spec, chain, x, weights, bias, who)


def _of_no_rows(
    spec: LayerSpec,
    chain: Chain,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    implementation: str,
    who: str,
) -> Tensor:
    """Handles an x that cannot be reshaped to a matrix of samples: runs it if it is nested, and says what is wrong with
    it if not. It is called where the reshape's error is handled, and raises that again."""
    _check_kinds(who, x, weights, bias)
    if not x.is_nested:
        raise
    try:
        return through(lambda rows: run(spec, chain, rows, weights, bias, implementation, who), x)
    except ValueError as error:
        raise error if str(error).startswith(who) else ValueError(f"{who}: {error}") from None


def _run_in_torch(
    chosen: str, spec: LayerSpec, chain: Chain, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, who: str
) -> Tensor:
    count = len(weights) - chain.parameters
    if chosen == "batched":
        y = batched_sums(chain, x, weights[:count], bias)
    else:
        y = naive(spec, x, weights[:count])
        y = y if bias is None else y + bias
    try:
        return activate(chain.activation, y, weights[count:])
    except (NotImplementedError, RuntimeError) as error:
        if not y.is_complex():
            raise
        raise TypeError(
            f"{who}: activation {formula(chain.activation)} is one that PyTorch does not have for complex numbers: "
            f"{error}; x is {x.dtype}, use another, as 'tanh', or a function of both parts behind the layer"
        ) from None


def batched_sums(chain: Chain, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The batched implementation up to the activation. A dense layer's bias is added by the product, as in
    nn.Linear."""
    if chain.is_dense:
        return torch.nn.functional.linear(x, weights[0], bias)
    if is_multiplied_out(chain, x, torch.is_grad_enabled() and any_requires_grad(x, bias, weights)):
        return torch.nn.functional.linear(x, multiplied_out(chain, weights), bias)
    y = batched(chain, x, weights)
    return y if bias is None else y + bias


def is_multiplied_out(chain: Chain, x: Tensor, recorded: bool) -> bool:
    """Whether the batched implementation multiplies W out, as is predicted to be faster for some layers on a GPU. It
    never does in compiled graphs, whose number of samples may change, and under torch.func."""
    if not x.is_cuda or x.dtype not in DTYPES or is_compiling() or transforms_active():
        return False
    return predicted.is_multiplied_out(text_for(chain, x), x.dtype, x.get_device(), x.shape[0], recorded)


def warm_up(chain: Chain, x: Tensor, batch: int, implementation: str, who: str, recorded: bool) -> None:
    """Compiles and loads what a first call with `batch` samples like x would run, and its backward pass if
    `recorded`."""
    if choose(chain, x, implementation, who, batch, recorded) != "fused":
        return
    try:
        prepare_fused(chain, x, batch, recorded)
    except CompileError as error:
        if implementation == "fused":
            raise
        _give_up(chain, x, error)


def choose(
    chain: Chain, x: Tensor, implementation: str, who: str, batch: int | None = None, recorded: bool = False
) -> str:
    """Names the implementation that runs: naive, batched or fused. auto is fused, unless a reason against it is known,
    batched was measured to be faster, or, on a GPU, is predicted to be, for that many samples and for training if
    `recorded`."""
    if implementation == "fused":
        reason = why_not_fused(x, chain)
        if reason is not None:
            raise RuntimeError(f"{who}: implementation='fused' cannot run: {reason}; or use implementation='auto'")
        return "fused"
    if implementation != "auto":
        return implementation
    return "fused" if why_auto_is_batched(chain, x, batch, recorded) is None else "batched"


def why_auto_is_batched(chain: Chain, x: Tensor, batch: int | None = None, recorded: bool = False) -> str | None:
    """Why auto takes the batched implementation for x, or None."""
    reason = why_auto_has_no_choice(chain, x)
    if reason is None and (is_dynamo_compiling() or choices.TABLE):  # no look at the table while a graph is compiled
        reason = why_measured_batched(text_for(chain, x), x, batch, recorded)
    if reason is None and x.is_cuda and type(batch) is int and batch and not is_compiling():
        return why_predicted_batched(text_for(chain, x), x, batch, recorded)
    return reason


def why_predicted_batched(text: str, x: Tensor, batch: int, recorded: bool) -> str | None:
    """Why auto takes the batched implementation by prediction, or None; also None where a measured choice exists. Where
    it is None, the eager call of the extension takes the fused kernels from then on."""
    asked = x.dtype, x.get_device(), batch, recorded
    reason = None
    if not choices.TABLE or not choices.measured(text, x.dtype, x.device.type, *asked[1:]):
        reason = predicted.why_batched(text, *asked)
    if reason is None:
        take_kernels(text, dtype_name(x.dtype), *asked[1:])
    return reason


def why_measured_batched(text: str, x: Tensor, batch: int | None, recorded: bool) -> str | None:
    """Why auto takes the batched implementation by what was measured, or None. A compiled graph has no known batch: all
    that was measured has to agree."""
    known = batch if not is_compiling() and type(batch) is int else None
    return choices.why_batched(text, x.dtype, x.device.type, x.get_device(), known, recorded)


def why_auto_has_no_choice(chain: Chain, x: Tensor) -> str | None:
    """Why auto takes the batched implementation whatever was measured, or None."""
    reason = why_not_fused(x, chain)
    if reason is not None:
        return f"fused cannot: {reason}"
    if len(chain.contractions) == 1 and is_left_to_pytorch(chain, x):
        return "a single contraction is one matrix product"
    if x.is_cuda and is_left_to_cublas(chain, x):
        return "products of 16 bits with a weight this large are left to cuBLAS"
    # Under torch.func the batched implementation maps and differentiates as one operation over all samples.
    if transforms_active():
        return "under torch.func the fused one is called for each sample"
    if x.is_cuda and runs_in_tf32(x) and not is_hopper(x.get_device()) and not all(c.tied for c in chain.contractions):
        return "with TF32, products of untied blocks are faster in cuBLAS"
    if _given_up:
        return _given_up.get((chain, x.dtype))
    return None


# `layer_at_once` is the eager call past the dispatcher, which `run` makes. It is the extension's own function while no
# measured choice is batched, so that a call looks nothing up. At first it is one that reads the choices that were kept.


def _read_choices_first(*given: object) -> Tensor | None:
    choices.load()
    _take_choices()
    return layer_at_once(*given)


def _layer_at_once_if_chosen(
    text: str,
    tf32_text: str,
    chooses: bool,
    x: Input,
    bias: Tensor | None,
    weights: Sequence[Tensor],
    is_cast: bool = False,
) -> Tensor | None:
    """The eager call, which returns None where batched was measured to be faster: `choose` decides there."""
    if chooses and (text in choices.BATCHED or tf32_text in choices.BATCHED):
        if are_several(x):
            return None
        if type(x) is not Tensor or x.dim() != 2:
            return every_layer_at_once(text, tf32_text, chooses, x, bias, weights, is_cast)
        recorded = torch.is_grad_enabled() and any_requires_grad(x, bias, weights)
        if why_measured_batched(tf32_text if runs_in_tf32(x) else text, x, x.shape[0], recorded) is not None:
            return None
    return every_layer_at_once(text, tf32_text, chooses, x, bias, weights, is_cast)


def _take_choices() -> None:
    global layer_at_once
    layer_at_once = _layer_at_once_if_chosen if choices.BATCHED else every_layer_at_once


def _read_kept() -> None:
    from factorlayer.tuning.kept import read_kept  # not needed where nothing is kept

    read_kept()


layer_at_once: Callable[..., Tensor | None] = _read_choices_first
choices.when_read(_read_kept)
choices.when_changed(_take_choices)


def tune_layer(
    spec: LayerSpec,
    chain: Chain,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    batch: int,
    recorded: bool,
    who: str,
) -> Iterator[Tuned]:
    """Times a layer with `batch` samples like x, with its backward pass if `recorded`, and keeps which implementation
    was faster."""
    from factorlayer.tuning.candidates import Tuned, tune  # not needed where nobody tunes

    reason = why_auto_has_no_choice(chain, x)
    if reason is not None:
        yield Tuned(who, None, f"auto runs batched: {reason}", lasting=True)
        return

    def by(implementation: str) -> Forward:
        def forward(x: Tensor, given: Sequence[Tensor]) -> Tensor:
            own, last = (given, None) if bias is None else (given[:-1], given[-1])
            return run(spec, chain, x, own, last, implementation, who)

        return forward

    tensors = [*weights, *([] if bias is None else [bias])]
    runs = {"fused": by("fused"), "batched": by("batched")}
    yield from tune(who, text_for(chain, x), x, batch, recorded, tensors, runs)


# The chains whose CUDA kernels could not be had, each with the reason, so that the next call does not try again.
_given_up: dict[tuple[Chain, torch.dtype], str] = {}


def _warn_if_never_fused(chain: Chain, x: Tensor) -> None:
    reason = None if x.is_complex() else why_never_fused(x, chain)  # nobody expects kernels for complex numbers
    if reason is not None and x.device.type in ("cpu", "cuda"):
        _warn_once(f"factorlayer runs the batched implementation, not the fused one: {reason}")


def _give_up(chain: Chain, x: Tensor, error: CompileError) -> None:
    _given_up[chain, x.dtype] = f"fused cannot: {error}"
    _warn_once(f"factorlayer runs the batched implementation, not the fused one, of {chain.text}: {error}")


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def any_complex(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> bool:
    if x.is_complex() or (bias is not None and bias.is_complex()):
        return True
    for weight in weights:  # noqa: SIM110 (any() takes three times as long)
        if weight.is_complex():
            return True
    return False


def all_complex(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, implementation: str, who: str
) -> tuple[Tensor, Sequence[Tensor], Tensor | None]:
    """Makes real tensors beside complex ones complex, in their own precision; their gradients are real, as PyTorch
    makes them. The fused kernels have no complex numbers."""
    if implementation == "fused":
        named = [("x", x), *((f"weight_{i}", weight) for i, weight in enumerate(weights)), ("bias", bias)]
        name, dtype = next((name, t.dtype) for name, t in named if t is not None and t.is_complex())
        raise RuntimeError(
            f"{who}: implementation='fused' cannot run: it has kernels for {', '.join(map(str, DTYPES))}, {name} is "
            f"{dtype}; or use implementation='auto'"
        )

    def convert(t: Tensor) -> Tensor:
        return t.to(t.dtype.to_complex()) if t.is_floating_point() and t.dtype != torch.bfloat16 else t

    return convert(x), [convert(weight) for weight in weights], None if bias is None else convert(bias)


any_autocast = torch._C._is_any_autocast_enabled  # on whatever device: asked in half the time that one's name takes


def autocast(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, Sequence[Tensor], Tensor | None]:
    """Casts all tensors but those in float64 to autocast's dtype, if autocast is on, as nn.Linear does."""
    device = "cpu" if x.is_cpu else "cuda" if x.is_cuda else x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x, weights, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return cast(x), [cast(weight) for weight in weights], None if bias is None else cast(bias)


def _check(who: str, spec: LayerSpec, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> None:
    """Raises what is wrong with the tensors, if anything is."""
    shape = x.shape
    if not shape or shape[-1] != spec.in_features:
        raise ValueError(
            f"{who}: the last dimension of x should be in_features={spec.in_features}, x has the shape {tuple(shape)}"
        )
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{who}: x should be a floating-point tensor, it is {x.dtype}; convert it with x.float()")
    _check_parameters(who, spec, x, weights, bias)


def _check_parameters(who: str, spec: LayerSpec, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> None:
    """Raises if a weight or the bias has another dtype, device or shape than x asks for."""
    dtype, device = x.dtype, x.device
    for weight in weights:
        if weight.dtype != dtype or weight.device != device:
            i = next(i for i, other in enumerate(weights) if other is weight)
            count = len(spec.weight_shapes)
            name = f"weight_{i}" if i < count else f"the activation's parameter {i - count}"
            _refuse_mixture(who, name, weight, x)
    if bias is not None:
        if bias.dtype != dtype or bias.device != device:
            _refuse_mixture(who, "bias", bias, x)
        if bias.shape != (spec.out_features,):
            raise ValueError(
                f"{who}: bias should have the shape ({spec.out_features},), out_features; it has {tuple(bias.shape)}"
            )


def _check_kinds(who: str, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> None:
    """Raises if a tensor is of a kind that no layer takes. Few callers give such, so it is asked only after something
    failed."""
    if not isinstance(x, Tensor):
        given = type(x).__name__
        raise TypeError(f"{who}: x should be a tensor, it is of the type {given}; convert it with torch.as_tensor")
    _check_parameters_are_tensors(who, weights, bias)
    if x.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"{who}: x should be a dense tensor, its layout is {x.layout}; convert it with x.to_dense()")
    parameters = [*weights, *([] if bias is None else [bias])]
    if any(is_sharded(parameter) != is_sharded(x) for parameter in parameters):
        some = "a weight or the bias is none" if is_sharded(x) else "x is none"
        raise TypeError(
            f"{who}: x and the parameters should all be DTensors, or none of them, {some}; give x to distribute_tensor "
            "and the layer to distribute_module, both of torch.distributed.tensor"
        )


def _check_shapes(who: str, spec: LayerSpec, weights: Sequence[Tensor]) -> None:
    """Raises which weight has another shape than the layer has, as one that was assigned may."""
    for i, (weight, shape) in enumerate(zip(weights, spec.weight_shapes, strict=False)):
        if tuple(weight.shape) != shape:
            raise ValueError(f"{who}: weight_{i} should have the shape {shape}, it has {tuple(weight.shape)}")


def _check_parameters_are_tensors(who: str, weights: Sequence[Any], bias: Any) -> None:
    named = [
        *((f"weight_{i}", weight) for i, weight in enumerate(weights)),
        *([] if bias is None else [("bias", bias)]),
    ]
    for name, given in named:
        if not isinstance(given, Tensor):
            raise TypeError(f"{who}: {name} should be a tensor, it is of the type {type(given).__name__}")
        if given.layout != torch.strided:
            raise TypeError(f"{who}: {name} should be a dense tensor, its layout is {given.layout}")


def _refuse_mixture(who: str, name: str, tensor: Tensor, x: Tensor) -> NoReturn:
    if tensor.dtype != x.dtype:
        raise TypeError(
            f"{who}: x and {name} should have one dtype, x is {x.dtype} and {name} is {tensor.dtype}; "
            "convert one with .to(), or use torch.autocast"
        )
    raise TypeError(f"{who}: x and {name} should be on one device, x is on {x.device} and {name} on {tensor.device}")
