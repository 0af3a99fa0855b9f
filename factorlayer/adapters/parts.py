"""The tensors of one LoKr adapter: whether they are all there, fit, and what they make."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from factorlayer.adapters.ways import multiply_adds


@dataclass(frozen=True)
class Parts:
    """One adapter of a layer: its tensors by name, which are None where there is none, and its matrix's sizes."""

    adapter: str  # in words
    tensors: dict[str, Tensor | None]
    sizes: tuple[int, int]  # out, in

    def wrong(self) -> str | None:
        """What is missing, or does not fit, in words."""
        for name in ("lokr_w1", "lokr_w2"):
            halves = [half for half in (f"{name}_a", f"{name}_b") if self.tensors.get(half) is not None]
            if self.tensors.get(name) is None and len(halves) < 2:
                lacks = f"{name}, and has no {name}_a and {name}_b either"
                if halves:
                    lacks = f"{name}_b" if halves[0].endswith("a") else f"{name}_a"
                return f"{self.adapter} lacks {lacks}"
        for name, tensor in self.tensors.items():
            if tensor is not None and tensor.is_meta:
                return f"{self.adapter} has no numbers in {name}, which is on the meta device"
        (first, second), (out, into) = self.factors(), self.sizes
        for name, pair in (("lokr_w1", first), ("lokr_w2", second)):
            if len(pair) == 2 and pair[0].shape[1] != pair[1].shape[0]:
                return f"{self.adapter} has {name}_a {tuple(pair[0].shape)} and {name}_b {tuple(pair[1].shape)}"
        made = first[0].shape[0] * second[0].shape[0], first[-1].shape[1] * second[-1].shape[1]
        if made != (out, into):
            return f"{self.adapter} makes a matrix of {made}, the layer's is {(out, into)}"
        return None

    def factors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Both factors, each of one matrix or two: 1x1 convolutions are matrices."""
        found = []
        for name in ("lokr_w1", "lokr_w2"):
            whole = self.tensors.get(name)
            pair = [whole] if whole is not None else [self.tensors[f"{name}_a"], self.tensors[f"{name}_b"]]
            found.append([tensor.flatten(1) for tensor in pair if tensor is not None])
        return found[0], found[1]

    def __str__(self) -> str:
        first, second = self.factors()
        (q1, p1), (q2, p2) = ((pair[0].shape[0], pair[-1].shape[1]) for pair in (first, second))
        words = f"{self.adapter}, {self.sizes[1]} -> {self.sizes[0]} by {q1} x {p1} ⊗ {q2} x {p2}"
        if len(second) == 2:
            together, apart = multiply_adds((q1, p1), *((*w.shape,) for w in second))
            how = "contracted by its halves" if apart < together else "multiplied before"
            words += f", the second of rank {second[0].shape[1]}, {how} on a CPU"
        return words
