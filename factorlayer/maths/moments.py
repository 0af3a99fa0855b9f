"""What least squares need of samples, added up batch by batch in float64: sums of products, never the samples.

Targets are taken less the outputs of a start, so that errors far below the targets' size are not lost to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS = 4096  # samples that are in float64 at once


class Moments:
    """Of inputs x and of r = targets - (x Wᵀ + bias), where W and bias are the start's. With a bias that is to be
    found, x and r count from their means."""

    def __init__(self, start: Tensor, bias: Tensor | None, has_mean: bool) -> None:
        out_features, in_features = start.shape
        self.start, self.bias, self.has_mean = start, bias, has_mean
        self.samples, self.of_targets, self.of_rest = 0, 0.0, 0.0  # the two: sums of squares
        self.mean_x, self.mean_rest = start.new_zeros(in_features), start.new_zeros(out_features)
        self.inputs = start.new_zeros(in_features, in_features)  # sum of x xᵀ
        self.rest = start.new_zeros(out_features, in_features)  # sum of r xᵀ

    def add(self, x: Tensor, targets: Tensor) -> None:
        """Samples [N, in_features] and [N, out_features], of any dtype."""
        for first in range(0, len(x), ROWS):
            rows = slice(first, first + ROWS)
            self._add(x[rows].double(), targets[rows].double())

    def _add(self, x: Tensor, targets: Tensor) -> None:
        rest = targets - x @ self.start.T
        if self.bias is not None:
            rest = rest - self.bias
        total = self.samples + len(x)
        self.of_targets += float(targets.square().sum())
        if self.has_mean:  # sums about two means become sums about one
            step_x, step_rest = x.mean(0) - self.mean_x, rest.mean(0) - self.mean_rest
            x, rest = x - x.mean(0), rest - rest.mean(0)
            share = self.samples * (total - self.samples) / total
            self.inputs += share * torch.outer(step_x, step_x)
            self.rest += share * torch.outer(step_rest, step_x)
            self.of_rest += share * float(step_rest.square().sum())
            self.mean_x += step_x * ((total - self.samples) / total)
            self.mean_rest += step_rest * ((total - self.samples) / total)
        self.inputs += x.T @ x
        self.rest += rest.T @ x
        self.of_rest += float(rest.square().sum())
        self.samples = total

    def bias_for(self, matrix: Tensor) -> Tensor | None:
        """The bias that is best with a matrix."""
        if self.bias is None or not self.has_mean:
            return self.bias
        return self.bias + self.mean_rest - (matrix - self.start) @ self.mean_x

    def error_of(self, matrix: Tensor, bias: Tensor | None) -> float:
        """‖x matrixᵀ + bias - targets‖ / ‖targets‖ over all samples."""
        change = matrix - self.start
        squares = self.of_rest + float((change @ self.inputs * change).sum() - 2 * (change * self.rest).sum())
        if self.has_mean and self.bias is not None and bias is not None:
            left = self.mean_rest - change @ self.mean_x - (bias - self.bias)
            squares += self.samples * float(left.square().sum())
        error = math.sqrt(max(0.0, squares))
        return error / math.sqrt(self.of_targets) if self.of_targets else error
