"""What was done to a model's layers, or would be: a table to print, and the mapping that does it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from factorlayer.maths.project import ProjectionError
from factorlayer.maths.spec import LayerSpec
from factorlayer.models.fit import Fit
from factorlayer.models.selection import Left


@dataclass(frozen=True)
class Change:
    """One layer's. Parameters are its own, with the bias."""

    names: tuple[str, ...]  # of a layer that the model has in several places
    before: str
    after: str
    parameters_before: int
    parameters_after: int
    error: ProjectionError | None = None
    settings: dict[str, Any] | None = None  # of what is structured now
    fit: Fit | None = None  # of its outputs in the model, if that was asked for

    @property
    def name(self) -> str:
        return self.names[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "before": self.before,
            "after": self.after,
            "parameters_before": self.parameters_before,
            "parameters_after": self.parameters_after,
            "error": None if self.error is None else self.error.weight,
            "fit": None if self.fit is None else asdict(self.fit),
        }


@dataclass(frozen=True)
class Conversion:
    """What convert or restore did. str() is a table."""

    changes: tuple[Change, ...]
    left: tuple[Left, ...] = ()
    parameters_before: int = 0  # of the model
    parameters_after: int = 0
    dry_run: bool = False

    @property
    def mapping(self) -> dict[str, dict[str, Any]]:
        """Layers by name, and what they have become: convert does the same to another such model with it."""
        return {change.name: dict(change.settings) for change in self.changes if change.settings is not None}

    def to_json(self) -> dict[str, Any]:
        return {
            "dry_run": self.dry_run,
            "changes": [change.to_json() for change in self.changes],
            "left": [{"name": each.name, "layer": each.layer, "why": each.why} for each in self.left],
            "parameters_before": self.parameters_before,
            "parameters_after": self.parameters_after,
            "mapping": self.mapping,
        }

    def __str__(self) -> str:
        fitted = any(change.fit is not None for change in self.changes)
        head = ("layer", "before", "after", "parameters", "", "error")
        rows = [(*head, "of outputs", "fitted") if fitted else head]
        for change in self.changes:
            error = "-" if change.error is None else f"{change.error.weight:.2e}"
            sizes = f"{change.parameters_before}", f"-> {change.parameters_after}"
            row = (" = ".join(change.names), change.before, change.after, *sizes, error)
            of_outputs = ("-", "-") if change.fit is None else (f"{change.fit.before:.2e}", f"{change.fit.after:.2e}")
            rows.append((*row, *of_outputs) if fitted else row)
        lines = table(rows, "lllrlrrr"[: len(rows[0])])
        would = "would become" if self.dry_run else "became"
        share = self.parameters_after / max(1, self.parameters_before)
        layers = f"{len(self.changes)} layer{'s' * (len(self.changes) != 1)}"
        lines.append(
            f"{layers}; the model's {self.parameters_before} parameters {would} {self.parameters_after} ({share:.1%})"
        )
        unseen = [change for change in self.changes if change.fit is not None and change.fit.unseen]
        lines += [f"few samples of {change.name}: {change.fit}" for change in unseen]
        lines += [f"left as it is: {each}" for each in self.left]
        return "\n".join(lines)


def spec_in_words(spec: LayerSpec) -> str:
    """monarch blocks 4x4, rank 48; kronecker 24·32 -> 48·64"""
    if spec.blocks is not None:
        sizes = f"blocks {spec.blocks[0]}x{spec.blocks[1]}"
    else:
        sizes = " -> ".join("·".join(map(str, factors)) for factors in (spec.in_factors, spec.out_factors))
    return f"{spec.structure} {sizes}{f', rank {spec.rank}' if spec.rank > 1 else ''}"


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Columns side by side, each to the left (l) or the right (r)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(_cell, row, widths, align)).rstrip() for row in rows]


def _cell(text: str, width: int, side: str) -> str:
    return text.ljust(width) if side == "l" else text.rjust(width)
