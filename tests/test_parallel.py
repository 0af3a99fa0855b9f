"""Tensor parallelism on two gloo ranks: structured layers that are shared out compute what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import RANKS, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel import style as of_pytorch
from torch.nn.functional import cross_entropy
from transformer import Transformer, tokens

from factorlayer import FactorLinear, FactorMLP, convert
from factorlayer.maths.shards import colwise, rowwise
from factorlayer.maths.spec import BlockDiagonal, LayerSpec
from factorlayer.parallel import ColwiseParallel, RowwiseParallel

WIDE, HIDDEN = 16, 24
KINDS = {
    "kronecker": ({}, {}),
    "of rank 3": (dict(rank=3), dict(rank=3)),
    "of the largest rank": (dict(factors=((2, 8), (2, 12)), rank=4), dict(factors=((2, 12), (2, 8)), rank=4)),
    "three factors": (dict(factors=((2, 2, 4), (4, 3, 2))), dict(factors=((4, 3, 2), (2, 2, 4)))),
    "one factor": (dict(factors=1), dict(factors=1)),
    "monarch": (dict(structure="monarch", blocks=4, rank=2), dict(structure="monarch", blocks=4, rank=2)),
    "low rank": (dict(structure="monarch", blocks=1, rank=3), dict(structure="monarch", blocks=1, rank=3)),
    "untied": (
        dict(structure="monarch", factors=((2, 2, 4), (4, 3, 2))),
        dict(structure="monarch", factors=((4, 3, 2), (2, 2, 4))),
    ),
}
ENDS = {"gelu, none": ("gelu", None), "learned": (nn.PReLU, nn.PReLU), "none, tanh": (None, "tanh")}
PAIR = {"0": ColwiseParallel(), "1": RowwiseParallel()}


def pair(kind: str, ends: str = "gelu, none", bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    made = [end(dtype=torch.float64) if isinstance(end, type) else end for end in ENDS[ends]]
    (first, second), (p, q) = KINDS[kind], (WIDE, HIDDEN)
    return nn.Sequential(
        FactorLinear(p, q, bias, activation=made[0], dtype=torch.float64, **first),
        FactorLinear(q, p, bias, activation=made[1], dtype=torch.float64, **second),
    )


def sample() -> Tensor:
    return torch.randn(4, 6, WIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def derivatives(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What it makes of x, and derivatives of first and second order for x and every parameter."""
    x = x.clone().requires_grad_()
    y = whole(model(x))
    given = [x, *model.parameters()]
    first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
    total = sum(whole(gradient).square().sum() for gradient in first)
    return [whole(each) for each in (y, *first, *torch.autograd.grad(total, given))]


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(derivatives(model, sample()), derivatives(plain, sample()), strict=True):
        torch.testing.assert_close(one, other)


def assert_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Of parameters, which lie as these do."""
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


# Layers


def share_out(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for kind in KINDS:
        for ends in ENDS if kind in ("kronecker", "monarch") else ("gelu, none",):
            assert_same(parallelize_module(pair(kind, ends), mesh, PAIR), pair(kind, ends))
    assert_same(parallelize_module(pair("monarch", bias=False), mesh, PAIR), pair("monarch", bias=False))
    for structure in ("kronecker", "monarch"):
        communicates_once(structure, mesh)
        runs_the_smaller_layer(structure, mesh)
        shards_of_sequences(structure, mesh, rank)
        compiles(structure, mesh)
    of_every_implementation(mesh)
    leaves_other_layers_to_pytorch(mesh)
    of_a_block(mesh)
    refuses(mesh)


def communicates_once(kind: str, mesh: DeviceMesh) -> None:
    """Forward by one sum, of the second layer; back by one for x, and one for each weight that all have whole."""
    model = parallelize_module(pair(kind), mesh, PAIR)
    with CommDebugMode() as forward:
        y = model(sample().requires_grad_())
    with CommDebugMode() as back:
        y.square().sum().backward()
    of_whole_weights = {"kronecker": 2, "monarch": 1}[kind]
    assert (forward.get_total_counts(), back.get_total_counts()) == (1, 1 + of_whole_weights)


def runs_the_smaller_layer(kind: str, mesh: DeviceMesh) -> None:
    """The raw op gets the chain of a layer of half the outputs, or inputs."""
    asked: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.factorlayer.forward.default:
                asked.append(args[3])
            return function(*args, **(kwargs or {}))

    plain, model = pair(kind), parallelize_module(pair(kind), mesh, PAIR)
    with torch.no_grad(), Watch():
        model(sample())
    assert asked == [layer.own_chain.text for layer in model]  # for which warmup compiles
    assert "among processes, each of which has a layer from [16] to [12]" in model[0].explain()
    parts = [colwise(plain[0].spec, RANKS).part, rowwise(plain[1].spec, RANKS).part]
    numbers = [" ".join(map(str, (c.weight, c.outer, c.p, c.q, c.inner))) for p in parts for c in p.contractions]
    assert [stage.split(" ", 1)[1] for text in asked for stage in text.split("; ") if "tied" in stage] == numbers


def shards_of_sequences(kind: str, mesh: DeviceMesh, rank: int) -> None:
    """x and y sharded along the sequence: gathered before the first layer, summed into shards behind the second."""
    plain = pair(kind)
    y = plain(sample())
    y.square().sum().backward()
    styles = {"0": ColwiseParallel(input_layouts=Shard(1)), "1": RowwiseParallel(output_layouts=Shard(1))}
    model = parallelize_module(pair(kind), mesh, styles)
    with CommDebugMode() as communication:
        found = model(sample().chunk(RANKS, 1)[rank])
    counts = {str(op).split(".")[-1]: count for op, count in communication.get_comm_counts().items()}
    assert counts == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    torch.testing.assert_close(found, y.chunk(RANKS, 1)[rank])
    found.square().sum().backward()
    assert_gradients(model, plain)


def compiles(kind: str, mesh: DeviceMesh) -> None:
    plain, model = pair(kind), parallelize_module(pair(kind), mesh, PAIR)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(sample()), plain(sample()))
    compiled(sample()).square().sum().backward()
    plain(sample()).square().sum().backward()
    assert_gradients(model, plain)


def of_every_implementation(mesh: DeviceMesh) -> None:
    for implementation in ("naive", "batched", "fused"):
        model = pair("monarch", "none, tanh")
        for layer in model:
            layer.implementation = implementation
        assert_same(parallelize_module(model, mesh, PAIR), pair("monarch", "none, tanh"))


def leaves_other_layers_to_pytorch(mesh: DeviceMesh) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(16, 24), FactorLinear(24, 16), FactorLinear(16, 16, activation="tanh"), nn.Linear(16, 16)
        return nn.Sequential(*layers).double()

    model, plain = build(), build()
    styles = {str(i): style() for i, style in enumerate((ColwiseParallel, RowwiseParallel) * 2)}
    found, expected = parallelize_module(model, mesh, styles)(sample()), plain(sample())
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_gradients(model, plain)


def of_a_block(mesh: DeviceMesh) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return FactorMLP([(4, 4), (4, 6), (4, 4)], activation="silu", gated=True, residual=True, dtype=torch.float64)

    styles = {"layers.0": ColwiseParallel(), "gates.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    assert_same(parallelize_module(build(), mesh, styles), build())


def refuses(mesh: DeviceMesh) -> None:
    for style, layer, words in (
        (ColwiseParallel, FactorLinear(16, 24, factors=((4, 4), (3, 8))), r"ColwiseParallel: Q1=3 of a kronecker"),
        (RowwiseParallel, FactorLinear(24, 16, factors=((3, 8), (4, 4))), r"RowwiseParallel: P1=3 of a kronecker"),
        (RowwiseParallel, FactorLinear(24, 16, structure="monarch", blocks=(3, 4)), "K=3 of a monarch layer"),
        (ColwiseParallel, FactorLinear(16, 12, structure="monarch", blocks=4), "out_features/L=3 of a monarch layer"),
        (RowwiseParallel, FactorLinear(9, 16, structure="monarch", blocks=1), "in_features=9 of a monarch layer"),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            parallelize_module(layer, mesh, style())
        assert "the number of processes, which is 2; take one of 1, 3" in str(refused.value)
        assert not any(isinstance(parameter, DTensor) for parameter in layer.parameters())
    with pytest.raises(NotImplementedError, match=r"currently only support nn\.Linear"):
        parallelize_module(nn.LayerNorm(4), mesh, ColwiseParallel())
    with pytest.raises(TypeError, match="ColwiseParallel: x should be one tensor, it is a list of 2; concatenate them"):
        parallelize_module(pair("monarch"), mesh, PAIR)([sample()[..., :8], sample()[..., 8:]])
    model = parallelize_module(pair("monarch"), mesh, PAIR)
    with pytest.raises(ValueError, match=r"x should be 16, all of in_features=16, as input_layouts=R says; .*\(4, 8\)"):
        model[0](torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"x should be 12, a share of in_features=24, as input_layouts=S.*\(4, 24\)"):
        model[1](torch.randn(4, 24))
    with pytest.raises(TypeError, match="FactorLinear: x should be a tensor, it is of the type str"):
        model[0]("x")
    layer = FactorLinear(16, 24)
    nn.utils.parametrizations.weight_norm(layer, "weight_0")
    with pytest.raises(ValueError, match="ColwiseParallel: weight_0 is parametrized, so that it cannot be shared out"):
        parallelize_module(layer, mesh, ColwiseParallel())
    with pytest.raises(RuntimeError, match="distribute_module should only be called once"):
        parallelize_module(parallelize_module(pair("monarch"), mesh, PAIR), mesh, PAIR)


@pytest.mark.long
@pytest.mark.feature("tensor parallelism: ColwiseParallel, RowwiseParallel, sequences, torch.compile", result="works")
def test_layers_are_shared_out(tmp_path: Path) -> None:
    run(share_out, tmp_path)


# A model

MAPPING = {"h.*.mlp.*": dict(structure="monarch", blocks=4, rank=2), "h.*.attn.*": dict(rank=2)}
PLAN = {
    "h.*.attn.c_attn": ColwiseParallel(output_layouts=Replicate()),
    "h.*.attn.c_proj": RowwiseParallel(input_layouts=Replicate()),
    "h.*.mlp.c_fc": ColwiseParallel(),
    "h.*.mlp.c_proj": RowwiseParallel(),
}


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model = Transformer().double()
    convert(model, MAPPING)
    return model


def losses(model: nn.Module, given: Tensor) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(model(given)[:, :-1].flatten(0, 1), given[:, 1:].flatten())
        loss.backward()
        of_layers = [
            parameter for block in model.h for parameter in (*block.attn.parameters(), *block.mlp.parameters())
        ]
        nn.utils.clip_grad_norm_(of_layers, 0.1)
        optimizer.step()
        found.append(loss.item())
    return found


def train(rank: int, folder: str) -> None:
    expected = losses(transformer(), tokens())
    for shape in ((1, RANKS), (RANKS, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        for data in (False, True):
            model = parallelize_module(transformer(), mesh["tensor"], PLAN)
            if data:
                for block in model.h:
                    fully_shard(block, mesh=mesh["data"])
                fully_shard(model, mesh=mesh["data"])
            assert losses(model, tokens()) == pytest.approx(expected, rel=1e-12)
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{shape}")
        state = transformer().state_dict()  # of one process, from the shards of two
        dcp.load(state, checkpoint_id=f"{folder}/{shape}", no_dist=True)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], whole(value), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.feature("tensor parallelism: converted models, with fully_shard, clipping and checkpoints", result="works")
def test_a_converted_model_is_trained_as_by_one_process(tmp_path: Path) -> None:
    run(train, tmp_path, str(tmp_path))


# What is shared out, without processes


@pytest.mark.parametrize("spec", [LayerSpec("kronecker", (4, 2), (6, 3), 5), LayerSpec("monarch", (4, 3), (6, 5), 2)])
def test_shares_are_the_rows_and_columns_of_the_matrix(spec: LayerSpec) -> None:
    from factorlayer.maths.project import to_dense

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in spec.weight_shapes]
    matrix = to_dense(spec, weights)
    for share_out, axis in ((colwise, 0), (rowwise, 1)):
        sharing = share_out(spec, 2)
        for process in range(2):
            own = [w if a is None else w.chunk(2, a)[process] for w, a in zip(weights, sharing.axes, strict=True)]
            assert tuple(tuple(w.shape) for w in own) == sharing.part.weight_shapes
            torch.testing.assert_close(to_dense(sharing.part, own), matrix.chunk(2, axis)[process])


def test_a_block_diagonal_layer_has_no_outer_factor() -> None:
    for share_out in (colwise, rowwise):
        with pytest.raises(ValueError, match="a block-diagonal layer is not shared out"):
            share_out(BlockDiagonal("monarch", (4, 2), (4, 3)), 2)


def test_styles_are_pytorchs_own() -> None:
    assert issubclass(ColwiseParallel, of_pytorch.ColwiseParallel)
    assert issubclass(RowwiseParallel, of_pytorch.RowwiseParallel)
