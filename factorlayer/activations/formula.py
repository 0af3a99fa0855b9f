"""Activations in words for people: a name as it is, a program as the formula it stands for."""

from __future__ import annotations

from collections.abc import Sequence

from factorlayer.activations.expression import Expression, in_order

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "lt": "<", "le": "<=", "eq": "=="}
LONGEST = 200  # of a part; what is longer is left out


def formula(activation: str) -> str:
    """The formula of a chain's activation, for people: `x * tanh(softplus(x))`. p0, p1, … are learned."""
    if "/" not in activation:
        return activation
    known: dict[Expression, str] = {}
    for node in in_order(result := Expression.parse(activation)):
        text = _write(node, [known[arg] for arg in node.args])
        known[node] = text if len(text) <= LONGEST else "…"
    return known[result]


def _write(node: Expression, parts: Sequence[str]) -> str:
    """The text of a node whose arguments are written."""
    if node.op == "number":
        return f"{float(node.value or 0):.6g}"
    if not parts:
        return f"{node.op}{'' if node.value is None else node.value}"
    if node.op == "neg" or node.op in INFIX:
        inner = [f"({part})" if arg.op in (*INFIX, "neg") else part for arg, part in zip(node.args, parts, strict=True)]
        return f"-{inner[0]}" if node.op == "neg" else f" {INFIX[node.op]} ".join(inner)
    return f"{node.op}({', '.join(parts)})"
