"""Activations in words for people: a name as it is, a program as the formula it stands for."""

from __future__ import annotations

from factorlayer.activations.expression import Expression

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "lt": "<", "le": "<=", "eq": "=="}
LONGEST = 200  # of a part; what is longer is left out


def formula(activation: str) -> str:
    """Of a chain's stage: `x * tanh(softplus(x))`. p0, p1, … are learned."""
    return _write(Expression.parse(activation), {}) if "/" in activation else activation


def _write(node: Expression, known: dict[Expression, str]) -> str:
    if node in known:
        return known[node]
    parts = [_write(arg, known) for arg in node.args]
    if node.op == "number":
        text = f"{float(node.value or 0):.6g}"
    elif not parts:
        text = f"{node.op}{'' if node.value is None else node.value}"
    elif node.op == "neg" or node.op in INFIX:
        inner = [f"({part})" if arg.op in (*INFIX, "neg") else part for arg, part in zip(node.args, parts, strict=True)]
        text = f"-{inner[0]}" if node.op == "neg" else f" {INFIX[node.op]} ".join(inner)
    else:
        text = f"{node.op}({', '.join(parts)})"
    known[node] = text if len(text) <= LONGEST else "…"
    return known[node]
