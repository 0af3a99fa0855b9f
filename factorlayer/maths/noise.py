"""Noise that a token is drawn by: Gumbel's, with which a score is the best one as often as a softmax of all says.

It depends on a seed, the step, the sample and the token alone, so that all implementations draw alike. Its bits are a
word of Philox4x32-10 (Salmon et al. 2011), the first, of the counter (token, sample, step's words) and the seed as key.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
FACTORS = 0xD2511F53, 0xCD9E8D57
KEYS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
DROPPED = 9  # bits, so that floats hold the others, and a half of the last one


def gumbel(random: Tensor, samples: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Of `random`, a seed and the number of a step, and of samples and tokens: integers, whose shapes go together."""
    halves = 2 * (bits(random, samples, tokens) >> DROPPED) + 1
    uniform = halves.to(dtype) * 2.0 ** (DROPPED - 33)
    return -torch.log(-torch.log(uniform))


def draw(scores: Tensor, places: Tensor | None, random: Tensor, temperature: float) -> Tensor:
    """A token for each sample, by scores [samples, tokens], of all or of those at `places`; `random` goes a step on."""
    samples = torch.arange(scores.shape[0], device=scores.device)[:, None]
    tokens = torch.arange(scores.shape[1], device=scores.device).expand_as(scores) if places is None else places
    scores = scores if scores.dtype == torch.float64 else scores.float()
    noisy = scores / temperature + gumbel(random, samples, tokens, scores.dtype)
    random[1] += 1
    return tokens.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]


def bits(random: Tensor, samples: Tensor, tokens: Tensor) -> Tensor:
    seed, step = random[0], random[1]
    tokens, samples = torch.broadcast_tensors(tokens.long(), samples.long())
    counter = [tokens & WORD, samples & WORD, (step & WORD).expand_as(tokens), (step >> 32 & WORD).expand_as(tokens)]
    keys = [seed & WORD, seed >> 32 & WORD]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = (_product(counter[2 * i], FACTORS[i]) for i in range(2))
        counter = [high1 ^ counter[1] ^ keys[0], low1, high0 ^ counter[3] ^ keys[1], low0]
        keys = [(key + by) & WORD for key, by in zip(keys, KEYS, strict=True)]
    return counter[0]


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of words, by halves of the factor: 64 bits have a sign."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & WORD
