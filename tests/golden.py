"""Whether a change of the planner has changed any plan: hashes of the plans of many layers, made before it and after.

    python tests/golden.py write FILE        # at the commit before
    python tests/golden.py compare FILE      # at the one after; prints what differs

A plan's text has the whole source of its kernels, so that equal hashes are equal kernels. Layers of every structure and
stacks, forward and all that a backward pass asks for, in every dtype, for each class of batch sizes and two GPUs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from oracle import kronecker, monarch

from factorlayer.autograd.backward import columns_texts, slope_texts, sums_text, texts, through_alone, through_text
from factorlayer.device.gpu import DTYPES, Gpu
from factorlayer.kernels.batches import BATCHES
from factorlayer.maths.chain import Chain
from factorlayer.maths.spec import LayerSpec
from factorlayer.plan.plan import Plan, PlanError
from factorlayer.plan.planner import (
    WORDS,
    cut,
    has_plan,
    plan_of,
)

ARCHITECTURES = (90, 80)
LAYERS = [
    kronecker((32, 32), (32, 32)),
    kronecker((64, 64), (64, 64)),
    kronecker((128, 128), (128, 128)),
    kronecker((20, 28), (36, 44)),
    kronecker((112, 48), (72, 128)),
    kronecker((8, 8, 8), (9, 9, 9)),
    kronecker((64, 64, 64), (64, 64, 64)),
    kronecker((8,) * 5, (8,) * 5),
    kronecker((8, 4, 4, 8), (8, 4, 4, 8)),
    kronecker((8, 8, 8, 8), (8, 8, 8, 8)),
    kronecker((4, 8, 8, 8, 4), (4, 8, 8, 8, 4)),
    kronecker((96, 80), (80, 96)),
    kronecker((8, 1024), (8, 4096)),
    kronecker((8, 256), (8, 1024)),
    kronecker((1100,), (9,)),
    kronecker((1000, 3), (1000, 3)),
    kronecker((16, 8, 3), (24, 32, 5), rank=3),
    kronecker((33, 17), (17, 33), rank=2),
    kronecker((128,), (64,)),
    kronecker((1024,), (4096,)),
    monarch((32, 32), (32, 32)),
    monarch((16, 64), (16, 64), rank=4),
    monarch((32, 24), (64, 48), rank=4),
    monarch((8, 32), (32, 8), rank=16),
    monarch((4, 192), (192, 4), rank=48),
    monarch((3, 9), (8, 2), rank=7),
    monarch((12, 11, 10), (9, 12, 13)),
]
WIDTHS = [(32, 64, 64, 64, 16), (128, 128, 128), (63, 256, 256, 4), (48, 512, 256, 12), (13, 45, 5), (128, 127)]
DRAWN = 40  # layers beside these
SIZES = (2, 3, 5, 8, 8, 12, 16, 24, 31, 32, 48, 64, 100, 128, 200)
Case = tuple[str, str, int, int]  # text, dtype as callers have it, class of batch sizes, architecture


def drawn() -> Iterator[LayerSpec]:
    rng = random.Random(4711)
    for _ in range(DRAWN):
        count = rng.choice((1, 2, 2, 3, 4))
        p, q = (tuple(rng.choice(SIZES[: 15 if count < 3 else 9]) for _ in range(count)) for _ in range(2))
        spec = LayerSpec(rng.choice(("kronecker", "kronecker", "monarch")), p, p if rng.random() < 0.3 else q)
        most = 1 if spec.structure == "monarch" and count != 2 else min(4, spec.max_rank)
        yield replace(spec, rank=rng.choice((1, 1, rng.randint(1, most))))


def layers() -> Iterator[Case]:
    specs = enumerate([*LAYERS, *drawn()])
    for (i, spec), dtype, architecture in itertools.product(specs, DTYPES, ARCHITECTURES):
        if architecture == 80 and i % 2:
            continue
        of_torch, gpu = dtype.replace("tf32", "float32"), Gpu.of(architecture)
        limits = of_torch, gpu.arch, gpu.sms, gpu.shared
        chain = replace(Chain.of(spec, i % 2 == 0, ("gelu", "tanh", "identity")[i % 3]), tf32=dtype == "tf32")
        for batch_class, batch in enumerate(BATCHES):

            def fits(part: Chain, asked=batch_class, limits=limits) -> bool:  # type: ignore[no-untyped-def]
                return has_plan(part.text, *limits, batch_class=asked)

            asked = [chain.text, replace(chain, backward=True, bias=False, activation="identity").text]
            asked += [text for text, _ in texts(replace(chain, activation="identity").text, fits, batch)]
            asked += [replace(chain, bias=False, activation="identity", backward=True).text]
            asked += [text for text in slope_texts(chain.text, fits) if text] if chain.activation != "identity" else []
            asked += columns_texts(chain, True, None, fits)
            asked += [through_text(chain.text, -1, "tanh", fits) or through_alone("tanh", chain.in_features)]
            asked += [sums_text(chain.out_features)]
            yield from ((text, of_torch, batch_class, architecture) for text in asked)


def stacks() -> Iterator[Case]:
    for (i, widths), dtype, word in itertools.product(enumerate(WIDTHS), DTYPES, ("", "backward", "states", "frozen")):
        activations = [*["relu", "silu"][i % 2 : i % 2 + 1] * (len(widths) - 2), "identity"]
        sizes = zip(itertools.pairwise(widths), activations, strict=True)
        made = [
            replace(Chain.of(kronecker((p,), (q,)), j % 2 == 0, activation), tf32=dtype == "tf32").text
            for j, ((p, q), activation) in enumerate(sizes)
        ]
        for batch_class, architecture in itertools.product(range(len(BATCHES)), ARCHITECTURES):
            text = " | ".join([*made, word] if word else made)
            yield text, dtype.replace("tf32", "float32"), batch_class, architecture


def cases() -> list[Case]:
    return list(dict.fromkeys([*layers(), *stacks()]))


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def golden() -> tuple[dict[str, str], Counter[str]]:
    """Of each case a hash and the predicted time, or why there is no plan; and how many plans have which passes."""
    found, passes = dict[str, str](), Counter[str]()
    for case in cases():
        text, dtype, batch_class, architecture = case
        name = f"{text} {dtype} {batch_class} sm_{architecture}"
        try:
            made: Plan = plan_of(text, dtype, batch_class, Gpu.of(architecture))
        except PlanError as error:
            found[name] = str(error)
            continue
        passes.update({type(p).__name__ for p in made.passes})
        found[name] = f"{hashed(made.text())} {made.us!r} {len(made.passes)}"
        if " | " in text and text.split(" | ")[-1] not in WORDS and batch_class == 0:
            gpu = Gpu.of(architecture)
            ways = [
                cut(text + behind, dtype, gpu.arch, gpu.sms, gpu.shared, batch_class=each)
                for each in range(len(BATCHES))
                for behind in ("", " | backward")
            ]
            found[f"{name} cut"] = str(ways)
    return found, passes


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "compare"):
        sys.exit(__doc__)
    what, path = sys.argv[1], Path(sys.argv[2])
    now, counted = golden()
    print(f"{len(now)} cases; plans with each pass: {dict(counted.most_common())}")
    if what == "write":
        path.write_text(json.dumps(now, indent=0))
    else:
        before = json.loads(path.read_text())
        differ = [name for name in before | now if before.get(name) != now.get(name)]
        print(*(f"{name}\n  {before.get(name)}\n  {now.get(name)}" for name in differ), sep="\n")
        sys.exit(f"{len(differ)} of {len(before | now)} differ" if differ else 0)
