"""Weights of modes taken as one, in C++: products of the factors, made as they are loaded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from factorlayer.device.code import constants
from factorlayer.kernels.work import ONE_PRODUCT, Mode, Terms

LARGEST_NORMALISED = 1024  # elements of a half-precision weight, which every warp looks through


def normals(mode: Mode) -> str:
    """The factor that a product of half-precision weights is multiplied by."""
    return f"if_needed(normals({', '.join(f'w{j}, {q * p}' for j, (_, q, p) in enumerate(mode.parts))}))"


def can_be_made(mode: Mode, dtype: str, terms: Terms = ONE_PRODUCT) -> bool:
    """Whether a product of weights keeps what the weights say: terms of a sum would each need a factor of their own."""
    if dtype != "float16" or len(mode.parts) == 1:
        return True
    return terms.of == 1 and all(q * p <= LARGEST_NORMALISED for _, q, p in mode.parts)


def product(mode: Mode) -> str:
    """An element of the Kronecker product of a mode's weights."""
    return " * ".join(factors(mode))


def weight_functions(mode: Mode, letter: str, dtype: str) -> list[str]:
    """A weight's elements, weight_x(), of one of the pass's terms, and what they are multiplied by, normal_x(): 1 but
    for products in fp16.

    FACTOR_X is the parameter that it is, or -1.
    """
    weights = [
        f"  auto w{j} = static_cast<const Element*>(params.weights[{weight}]) + (TERM + term) * {q * p};"
        for j, (weight, q, p) in enumerate(mode.parts)
    ]
    normal = normals(mode) if dtype == "float16" and len(mode.parts) > 1 else "1"
    return [
        f"static DEVICE Sum<Element> normal_{letter}(const Params& params, int term = 0) {{",
        *(weights if normal != "1" else []),
        f"  return {normal};",
        "}",
        f"static DEVICE Sum<Element> weight_{letter}(const Params& params, int q, int p, int term = 0) {{",
        *weights,
        f"  return {product(mode)};",
        "}",
        f"static constexpr int FACTOR_{letter.upper()} = {mode.parts[0][0] if len(mode.parts) == 1 else -1};",
    ]


def told_weights(modes: Sequence[Mode], letters: str, dtype: str, terms: Terms = ONE_PRODUCT) -> list[str]:
    """Lines of weight_functions() for several modes, and the numbers of the terms that these are of."""
    weights = [weight_functions(mode, letter, dtype) for mode, letter in zip(modes, letters, strict=True)]
    return [*constants(terms.numbers), *itertools.chain(*weights)]


def factors(mode: Mode) -> list[str]:
    """Factors, in C++, whose product is an element."""
    found, q_inner, p_inner = [], mode.q, mode.p
    for j, (_, q, p) in enumerate(mode.parts):
        q_inner, p_inner = q_inner // q, p_inner // p
        found.append(f"widen(w{j}[q / {q_inner} % {q} * {p} + p / {p_inner} % {p}])")
    return found
