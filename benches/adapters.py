"""A training step of a LLaMA-shaped model with random weights: LoKr adapters as PEFT runs them, the same taken over,
LoRA of about as many parameters, and the base with one adapter in its first layer alone.

    python -m benches.adapters                     # on a GPU in bfloat16, each step eagerly and as a CUDA graph
    python -m benches.adapters --device cpu --hidden 256 --layers 2 --batch 2 --tokens 64

Times are a GPU's, or on a CPU the process's own, each the median over rounds in which they take turns. Ratios are
medians of those of the rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from factorlayer import adapters

VOCABULARY = 4096
# LoKr's decompose_factor and r: balanced factors of rank 8, unbalanced ones of rank 8, and those as they are
CONFIGS = ((-1, 8), (8, 8), (8, 64))
Step = Callable[[], Tensor]


def adapted(config: Any, hidden: int, layers: int, device: str, dtype: torch.dtype) -> Any:
    """The model with an adapter on each of its linear layers but the last."""
    import peft
    import transformers

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        use_cache=False,
    )
    with torch.device(device):
        model = transformers.LlamaForCausalLM(shape).to(dtype)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False).train()


def step_of(model: Any, tokens: Tensor) -> Step:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True, capturable=tokens.is_cuda)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graphed(step: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def milliseconds(step: Step, on_gpu: bool, steps: int) -> float:
    if on_gpu:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        total: float = start.elapsed_time(end)
        return total / steps
    begin = time.process_time()
    for _ in range(steps):
        step()
    return 1e3 * (time.process_time() - begin) / steps


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def main(
    hidden: Annotated[int, typer.Option(help="features of the model")] = 1024,
    layers: Annotated[int, typer.Option(help="its layers")] = 8,
    batch: Annotated[int, typer.Option(help="sequences of a step")] = 8,
    tokens: Annotated[int, typer.Option(help="tokens of each")] = 512,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    rounds: Annotated[int, typer.Option(help="turns that each of them takes")] = 7,
) -> None:
    import peft

    on_gpu = device != "cpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{name}, {dtype}, hidden {hidden}, {layers} layers, {batch} x {tokens} tokens; ms a training step")
    print("| LoKr | how | parameters, LoRA's | PEFT | ours | LoRA | base | PEFT / ours | ours / LoRA |")
    print("|---|---|---|---|---|---|---|---|---|")
    ids = torch.randint(VOCABULARY, (batch, tokens), device=device)
    for factor, r in CONFIGS:
        config = peft.LoKrConfig(r=r, alpha=r, decompose_factor=factor, target_modules="all-linear", init_weights=False)
        theirs, ours = (adapted(config, hidden, layers, device, dtype) for _ in range(2))
        adapters.take_over(ours)
        per_rank = parameters(adapted(peft.LoraConfig(r=1, target_modules="all-linear"), hidden, layers, device, dtype))
        rank = max(1, round(parameters(ours) / per_rank))
        lora = adapted(peft.LoraConfig(r=rank, target_modules="all-linear"), hidden, layers, device, dtype)
        first = peft.LoraConfig(r=1, target_modules=r".*layers\.0\.self_attn\.q_proj")  # all that goes back goes to it
        models = theirs, ours, lora, adapted(first, hidden, layers, device, dtype)
        losses = [model(input_ids=ids, labels=ids).loss.item() for model in models[:2]]
        if not math.isclose(*losses, rel_tol=1e-2):
            raise RuntimeError(f"the losses differ: {losses}")
        for how in ("eager", "CUDA graph") if on_gpu else ("eager",):
            steps = [step_of(model, ids) for model in models]
            steps = [graphed(step) for step in steps] if how != "eager" else steps
            for step in steps:
                step()
            taken = [[milliseconds(step, on_gpu, 5 if on_gpu else 1) for step in steps] for _ in range(rounds)]
            times = " | ".join(f"{statistics.median(column):.2f}" for column in zip(*taken, strict=True))
            faster = statistics.median(theirs / ours for theirs, ours, *_ in taken)
            beside = statistics.median(ours / lora for _, ours, lora, _ in taken)
            counts = f"{parameters(ours)}, {parameters(lora)} (r = {rank})"
            row = f"factor {factor}, r = {r} | {how} | {counts} | {times} | {faster:.2f} | {beside:.2f}"
            print(f"| {row} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
