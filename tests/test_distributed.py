"""Two gloo ranks on this machine: models are trained as one process trains them, their weights whole, sharded, or
DTensors."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from modules import module, sample
from processes import RANKS, run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformer import Transformer, tokens

from factorlayer import (
    FactorGRU,
    FactorLinear,
    FactorMLP,
    convert,
    fuse,
    load_converted,
    load_dense,
    report,
    restore,
    save_converted,
)

STEPS = 3
MAPPING = {
    "h.*.attn.*": dict(rank=2),
    "h.*.mlp.c_fc": dict(structure="monarch", blocks=4, rank=2),
    "h.*.mlp.c_proj": dict(rank=2),
}


def build() -> FactorLinear:
    torch.manual_seed(0)
    return FactorLinear(16, 36, activation="tanh", implementation="fused", dtype=torch.float64)


def batch(rank: int) -> Tensor:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def train_one_rank(rank: int) -> None:
    alone = build()
    for r in range(RANKS):
        (alone(batch(r)).square().sum() / RANKS).backward()
    for wrap in (DistributedDataParallel, fully_shard):
        layer = wrap(build())
        layer(batch(rank)).square().sum().backward()
        for parameter, expected in zip(layer.parameters(), alone.parameters(), strict=True):
            whole = getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)()
            torch.testing.assert_close(whole, expected.grad)


@pytest.mark.long
@pytest.mark.feature("DistributedDataParallel and fully_shard", result="works")
def test_data_parallel_and_fully_sharded(tmp_path: Path) -> None:
    run(train_one_rank, tmp_path)


# Whole models


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model = Transformer().double()
    convert(model, MAPPING, keep=True)
    return model


def block() -> nn.Module:
    torch.manual_seed(0)
    return FactorMLP([(4, 4), (4, 8), (4, 4)], activation="silu", gated=True, residual=True, dtype=torch.float64)


def stacks() -> nn.Module:
    torch.manual_seed(0)
    layers = FactorLinear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16), FactorLinear(16, 16)
    return fuse(nn.Sequential(*layers).double())


class Recurrent(FactorGRU):
    """Of x [N, features], a sequence of two steps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.stack([x, 2 * x]))[0][-1]


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    structures = ("kronecker", "monarch")
    return nn.Sequential(*(Recurrent(16, 16, structure=structure, dtype=torch.float64) for structure in structures))


def loss_of(model: nn.Module, given: Tensor) -> Tensor:
    y = model(given)
    if given.is_floating_point():
        return y.square().mean()
    return cross_entropy(y[:, :-1].flatten(0, 1), given[:, 1:].flatten())


def losses(model: nn.Module, given: Tensor, alone: bool = False) -> list[float]:
    """Of some steps, averaged over the ranks if each has a part of what is given."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, given)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        if not alone:
            dist.all_reduce(mean)
        found.append(mean.item() / (1 if alone else RANKS))
    return found


def by_blocks(model: nn.Module, **how: object) -> nn.Module:
    """Sharded as large models are: what is in h, or what a sequence holds, by itself."""
    for part in model.h if hasattr(model, "h") else model if isinstance(model, nn.Sequential) else ():
        fully_shard(part, **how)
    return fully_shard(model, **how)


def train_models(rank: int) -> None:
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for make, given in ((transformer, tokens(4)), (block, x), (stacks, x), (recurrent, x)):
        expected = losses(make(), given, alone=True)
        mine = given.chunk(RANKS)[rank]
        for wrap in (DistributedDataParallel, by_blocks):
            assert losses(wrap(make()), mine) == pytest.approx(expected, rel=1e-12)
    expected = losses(transformer(), tokens(4), alone=True)
    mine = tokens(4).chunk(RANKS)[rank]
    fused = transformer()
    for i, part in enumerate(fused.h):
        fused.h[i] = fuse(part)
    assert losses(by_blocks(fused), mine) == pytest.approx(expected, rel=1e-12)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    assert losses(by_blocks(transformer(), mp_policy=policy), mine) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
@pytest.mark.feature("DistributedDataParallel and fully_shard of converted, fused and recurrent models", result="works")
def test_models_are_trained_as_by_one_process(tmp_path: Path) -> None:
    run(train_models, tmp_path)


def keep_models(rank: int, folder: str) -> None:
    alone, sharded = transformer(), by_blocks(transformer())
    expected = loss_of(alone, tokens())

    def zeroed(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model

    dcp.save(sharded.state_dict(), checkpoint_id=f"{folder}/dcp")
    again = zeroed(by_blocks(transformer()))
    state = again.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    again.load_state_dict(state)
    torch.testing.assert_close(loss_of(again, tokens()), expected)
    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        other = zeroed(transformer())
        other.load_state_dict(whole)
        torch.testing.assert_close(loss_of(other, tokens()), expected)
    file = f"{folder}/model.safetensors"
    save_converted(sharded, file)
    dense = Transformer().double()
    load_converted(dense, file)
    torch.testing.assert_close(loss_of(dense, tokens()), expected)
    again = zeroed(by_blocks(transformer()))
    assert load_converted(again, file) is None
    torch.testing.assert_close(loss_of(again, tokens()), expected)
    with pytest.raises(ValueError, match=r"its weight is sharded \(DTensor\): convert the model before it is sharded"):
        load_converted(by_blocks(Transformer().double()), file)
    again = zeroed(again)
    torch.manual_seed(0)
    load_dense(again, Transformer().double().state_dict())  # what transformer() converts
    torch.testing.assert_close(loss_of(again, tokens()), expected)
    assert report(again, 8).json() == report(alone, 8).json()
    with pytest.raises(ValueError, match=r"restore: h.0.attn.c_attn cannot be restored: its weights are sharded"):
        restore(again)
    with pytest.raises(ValueError, match=r"to_dense: W is made of whole weights, these are sharded \(DTensor\)"):
        again.h[0].mlp["c_fc"].to_dense()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.feature("fully_shard: torch.distributed.checkpoint, whole state_dict, safetensors files", result="works")
def test_sharded_models_are_kept(tmp_path: Path) -> None:
    run(keep_models, tmp_path, str(tmp_path))


# DTensors


def sharded(layer: nn.Module, mesh: DeviceMesh, placement: Placement) -> nn.Module:
    def shard(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))

    return distribute_module(layer, mesh, shard)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_dtensors(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for kind in ("layer", "learned", "monarch", "ranked", "block", "fuse"):
        for of_parameters, of_x in (
            (Replicate(), Shard(0)),  # samples, of which one rank has more
            (Replicate(), Shard(2)),  # features
            (Shard(0), Shard(1)),
            (Shard(0), Replicate()),
        ):
            compare_dtensors(kind, mesh, of_x, of_parameters)
    for kind in ("layer", "block", "fuse"):
        samples_need_no_communication(kind, mesh)
        refuse_dtensors(kind, mesh)
    for structure in ("kronecker", "blocks"):
        steps_of_dtensors(structure, mesh)
    told = module("layer", "auto").explain()
    said = sharded(module("layer", "auto"), mesh, Shard(0)).explain().removeprefix(told).strip()
    assert said.startswith("its parameters are DTensors now: of an x that is one, each process runs what it has")


def compare_dtensors(kind: str, mesh: DeviceMesh, of_x: Placement, of_parameters: Placement) -> None:
    plain, x = module(kind, "naive"), sample(5, 3)
    y = plain(x)
    for implementation in ("batched", "auto"):
        model = sharded(module(kind, implementation), mesh, of_parameters)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="factorlayer")
            found = model(distribute_tensor(x, mesh, [of_x]))
        torch.testing.assert_close(whole(found), y)
    for one, other in zip(derivatives(model, found), derivatives(plain, y), strict=True):
        torch.testing.assert_close(one, other)


def derivatives(model: nn.Module, y: Tensor) -> list[Tensor]:
    """Of first and second order, for every parameter."""
    parameters = list(model.parameters())
    first = torch.autograd.grad(whole(y).square().sum(), parameters, create_graph=True)
    total = sum(whole(gradient).square().sum() for gradient in first)
    return [whole(each) for each in (*first, *torch.autograd.grad(total, parameters))]


def samples_need_no_communication(kind: str, mesh: DeviceMesh) -> None:
    model, x = sharded(module(kind, "fused"), mesh, Replicate()), distribute_tensor(sample(6), mesh, [Shard(0)])
    with CommDebugMode() as communication:
        y = model(x)
    assert (communication.get_total_counts(), y.placements) == (0, (Shard(0),))


def steps_of_dtensors(structure: str, mesh: DeviceMesh) -> None:
    """By PyTorch's operations: the kernels of steps take no DTensors."""
    gru = FactorGRU(12, 12, structure=structure, **({"blocks": 4} if structure == "blocks" else {})).double()
    expected = gru(sample(5, 3))[0]
    given = distribute_tensor(sample(5, 3), mesh, [Shard(1)])
    sharded(gru, mesh, Replicate())
    torch.testing.assert_close(whole(gru(given)[0]), expected)
    gru.implementation = "fused"
    with pytest.raises(RuntimeError, match=r"FactorGRU: implementation='fused' cannot run: .* x is a DTensor; or use"):
        gru(given)


def refuse_dtensors(kind: str, mesh: DeviceMesh) -> None:
    x = sample(6)
    for implementation in ("auto", "naive", "batched", "fused"):
        with pytest.raises(TypeError, match="should all be DTensors, or none of them, x is none; give x to distribute"):
            sharded(module(kind, implementation), mesh, Replicate())(x)
        with pytest.raises(TypeError, match="should all be DTensors, or none of them, a weight or the bias is none"):
            module(kind, implementation)(distribute_tensor(x, mesh, [Replicate()]))
    model = sharded(module(kind, "auto"), mesh, Replicate())
    with pytest.raises(ValueError, match="the last dimension of x should be in_features=12"):
        model(distribute_tensor(sample(6)[:, 1:], mesh, [Replicate()]))
    other = init_device_mesh("cpu", (1, RANKS))
    with pytest.raises(ValueError, match="x and the parameters should be DTensors of one DeviceMesh"):
        model(distribute_tensor(x, other, [Replicate(), Replicate()]))


@pytest.mark.long
@pytest.mark.feature("DTensors", result="works")
def test_dtensors(tmp_path: Path) -> None:
    run(run_dtensors, tmp_path)


def checkpoint_in_parallel(rank: int) -> None:
    for kind in ("layer", "block", "fuse"):
        alone = module(kind, "fused")
        for r in range(RANKS):
            (alone(batch(r)[:, :12]).square().sum() / RANKS).backward()
        wrapped = DistributedDataParallel(module(kind, "fused"))
        checkpoint(wrapped, batch(rank)[:, :12], use_reentrant=False).square().sum().backward()
        for parameter, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.feature("activation checkpointing under DistributedDataParallel", result="works")
def test_checkpointing_in_parallel(tmp_path: Path) -> None:
    run(checkpoint_in_parallel, tmp_path)
