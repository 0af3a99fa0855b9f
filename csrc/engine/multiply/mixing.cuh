// Mixtures of up to eight states of 16 bits, by products of a warp: of 8 columns, 8 rows of 16 bytes, which ldmatrix turns, 16 at
// once are operand A, whose k's are the states. What comes of them are columns again, which stmatrix turns.
#pragma once
#include "multiply/mma.cuh"

// Operand B: at(to, from) is what a mixture has of a state.
template <class Element, class At> DEVICE u32 mixing_weights(const Lane& lane, const At& at) {
  return Pair<Element>(at(lane.g, lane.t * 2), at(lane.g, lane.t * 2 + 1)).bits;
}
// 32 columns
template <class Element> DEVICE void mix_columns(u32 (&y)[4], const u32 (&x)[4], u32 weights, float scale) {
  UNROLL for (int i = 0; i < 4; i += 2) {
    float sums[4] = {};
    const u32 left[4] = {x[i], x[i + 1]}, right[2] = {weights};
    multiply_8<Element>(sums, left, right);
    UNROLL for (int k = 0; k < 2; ++k) y[i + k] = Pair<Element>(sums[2 * k] * scale, sums[2 * k + 1] * scale).bits;
  }
}
