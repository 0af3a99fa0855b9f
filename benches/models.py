"""Times GPT-2 small and ViT-B of transformers, random weights, with dense MLPs and with structured ones, fused in place
and as they are, and saves what came out: `python -m benches.models --output FILE`; `--small --device cpu` is a try.

A training step is forward, loss and backward under autocast to bfloat16, and AdamW's step apart; a token is one call
with a cache of what was before it, weights in bfloat16. On a GPU each is captured in a CUDA graph, so that launches of
the host do not count; where it cannot be, a note says why, and they do.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benches.machine import describe, in_words
from factorlayer import convert, fuse

ROUNDS = 10
WARM_UP = 3  # calls before a graph is captured
RATE = 1e-4
TASKS = ("gpt2-train", "gpt2-token-1", "gpt2-token-16", "vit-train")
MODES = ("eager", "compiled")
SUBJECTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "monarch": {"structure": "monarch", "blocks": 4},  # rank 48 at 768 features, as in fly's GPT-2 small
    "kronecker": {"structure": "kronecker"},
    "monarch batched": {"structure": "monarch", "blocks": 4, "implementation": "batched"},
}
FUSED = ", fused"  # behind a subject's name: with fuse(model, inplace=True) as well
ALL = ("dense", "monarch, fused", "kronecker, fused", "monarch", "kronecker", "monarch batched")
FEATURES_A_RANK = 16  # of Monarch layers
# Attention of GPT-2: where a graph is captured or compiled, transformers cannot see that sequences are not packed, and
# make a mask, with which there is no flash attention. No masks are made for a name that is not theirs.
ATTENTION = "sdpa_without_masks"
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Sizes:
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    vocabulary: int = 50257
    sequences: int = 16
    tokens: int = 1024
    images: int = 128
    pixels: int = 224
    patch: int = 16


SMALL = Sizes(32, 2, 2, 64, 2, 8, 2, 16, 8)


@dataclass
class Row:
    """Milliseconds of a step or a token, and of AdamW's step; the largest memory that tensors took in both."""

    task: str
    mode: str
    subject: str
    parameters: int
    ms: float | None = None
    adamw_ms: float | None = None
    peak_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


@app.command()
def main(
    output: Annotated[Path | None, typer.Option(help="Results file.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="Tiny models, for a try.")] = False,
    task: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(TASKS)}; several times.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODES)}; several times.")] = None,
    subject: Annotated[list[str] | None, typer.Option(help=f"Of {'; '.join(ALL)}. Several times.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Rows begin before that many have passed.")] = None,
) -> None:
    for names, known in ((task, TASKS), (mode, MODES), (subject, ALL)):
        for name in names or []:
            if name not in known:
                raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")
    begin, rows, machine = time.monotonic(), [], describe(device, [])
    sizes = SMALL if small else Sizes()
    typer.echo("\n".join(head()))
    for row_mode in mode or MODES:
        for row_task in task or TASKS:
            for row_subject in subject or ALL:
                if seconds is not None and time.monotonic() - begin > seconds:
                    continue
                rows.append(measured(row_task, row_mode, row_subject, sizes, device))
                typer.echo(line(rows[-1], rows))
                if output is not None:
                    found = {"machine": machine, "sizes": asdict(sizes), "rows": [asdict(row) for row in rows]}
                    output.write_text(json.dumps(found, indent=1) + "\n")


def measured(task: str, mode: str, subject: str, sizes: Sizes, device: str) -> Row:
    torch.manual_seed(0)
    with torch.device(device):
        model = build(task, sizes)
    structure(model, subject, sizes)
    row = Row(task, mode, subject, sum(parameter.numel() for parameter in model.parameters()))
    try:
        if "train" in task:
            _train(row, model, sizes, device)
        else:
            _generate(row, model, int(task.rpartition("-")[2]), sizes, device)
    except Exception as error:  # whatever it is, other rows can be measured
        row.notes.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
    del model
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return row


def theirs() -> Any:
    """The package transformers, which only a run needs."""
    return importlib.import_module("transformers")


def build(task: str, sizes: Sizes) -> nn.Module:
    model: nn.Module
    if task.startswith("vit"):
        shape = theirs().ViTConfig(
            hidden_size=sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=4 * sizes.hidden,
            image_size=sizes.pixels,
            patch_size=sizes.patch,
            num_labels=1000,
        )
        model = theirs().ViTForImageClassification(shape)
    else:
        functions = theirs().AttentionInterface
        functions.register(ATTENTION, functions()["sdpa"])
        shape = theirs().GPT2Config(
            attn_implementation=ATTENTION,
            n_embd=sizes.hidden,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            vocab_size=sizes.vocabulary,
            n_positions=sizes.tokens,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
        model = theirs().GPT2LMHeadModel(shape)
    return model


def structure(model: nn.Module, subject: str, sizes: Sizes) -> None:
    """Both layers of each MLP."""
    settings = SUBJECTS[subject.removesuffix(FUSED)]
    if settings.get("structure") == "monarch":
        settings = settings | {"rank": sizes.hidden // FEATURES_A_RANK}

    def of_mlp(name: str, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return isinstance(weight, Tensor) and sorted(weight.shape) == [sizes.hidden, 4 * sizes.hidden]

    if settings:
        convert(model, {of_mlp: settings}, initialize="fresh")
    if subject.endswith(FUSED):
        fuse(model, inplace=True)


def _train(row: Row, model: nn.Module, sizes: Sizes, device: str) -> None:
    model.train()
    run = torch.compile(model) if row.mode == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, capturable=device == "cuda")
    given: dict[str, Any]
    if row.task.startswith("vit"):
        pixels = torch.randn(sizes.images, 3, sizes.pixels, sizes.pixels, device=device)
        given = {"pixel_values": pixels, "labels": torch.arange(sizes.images, device=device)}
    else:
        ids = torch.randint(sizes.vocabulary, (sizes.sequences, sizes.tokens), device=device)
        given = {"input_ids": ids, "labels": ids, "use_cache": False}

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = run(**given).loss
        loss.backward()

    def whole() -> None:
        optimizer.zero_grad(set_to_none=True)
        step()
        optimizer.step()

    row.peak_bytes = _warm_up(whole, device)

    def without_gradients() -> None:
        optimizer.zero_grad(set_to_none=True)

    row.ms = _milliseconds(step, device, row.notes, before=without_gradients)
    row.adamw_ms = _milliseconds(optimizer.step, device, row.notes)


def _generate(row: Row, model: nn.Module, sequences: int, sizes: Sizes, device: str) -> None:
    """One token behind all but the last two that the model has places for."""
    model.to(torch.bfloat16).eval()
    run = torch.compile(model) if row.mode == "compiled" else model
    called = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.randint(sizes.vocabulary, (sequences, sizes.tokens - 2), device=device)
    cache = theirs().DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, **{called: cache}, use_cache=True)

    def token() -> Tensor:
        with torch.no_grad():
            logits: Tensor = run(input_ids=ids[:, :1], **{called: cache}, use_cache=True).logits
            cache.crop(-1)  # every call is the same one
            return logits[:, -1].argmax(-1)

    row.peak_bytes = _warm_up(token, device)
    kept = [(layer.keys, layer.values) for layer in cache.layers]  # a graph reads these, where crop has put others
    row.ms = _milliseconds(token, device, row.notes)
    del kept


def _warm_up(call: Callable[[], Any], device: str) -> int | None:
    """What tensors take at most once everything is compiled."""
    if device == "cpu":
        call()
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            torch.cuda.reset_peak_memory_stats()
            call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _milliseconds(
    call: Callable[[], Any], device: str, notes: list[str], before: Callable[[], None] = lambda: None
) -> float:
    """The median of single calls."""
    before()
    if device == "cpu":
        call()
        return statistics.median(_on_the_host(call, before))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay: Callable[[], Any] = graph.replay
    except RuntimeError as error:
        notes.append(f"not in a CUDA graph: {str(error).splitlines()[0][:120]}")
        torch.cuda.synchronize()

        def replay() -> None:
            before()
            call()

    replay()
    return statistics.median(_on_the_gpu(replay))


def _on_the_host(call: Callable[[], Any], before: Callable[[], None]) -> Iterator[float]:
    for _ in range(ROUNDS):
        before()
        begin = time.process_time()
        call()
        yield 1e3 * (time.process_time() - begin)


def _on_the_gpu(call: Callable[[], Any]) -> Iterator[float]:
    """Milliseconds of each call, which comes behind a call that is not timed: the GPU runs that while the host launches
    this one."""
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        call()
        end.record()
        end.synchronize()
        yield start.elapsed_time(end)


def head() -> list[str]:
    names = ["task", "how", "MLPs", "parameters", "ms", "dense over it", "AdamW, ms", "peak, GB", ""]
    return [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]


def line(row: Row, rows: list[Row]) -> str:
    dense = [each.ms for each in rows if (each.task, each.mode, each.subject) == (row.task, row.mode, "dense")]
    times = "-" if row.ms is None or not dense or dense[0] is None else f"{dense[0] / row.ms:.3f}x"
    ms = ["-" if each is None else f"{each:.3f}" for each in (row.ms, row.adamw_ms)]
    peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.2f}"
    millions = f"{row.parameters / 1e6:.1f}M"
    cells = [row.task, row.mode, row.subject, millions, ms[0], times, ms[1], peak, "; ".join(row.notes)]
    return f"| {' | '.join(cells)} |"


def markdown(path: Path) -> list[str]:
    """The table of a results file."""
    told = json.loads(path.read_text())
    rows = [Row(**row) for row in told["rows"]]
    return [f"{in_words(told['machine'])}.", "", *head(), *(line(row, rows) for row in rows)]


if __name__ == "__main__":
    app()
