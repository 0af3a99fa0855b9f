// Products of floats on Hopper's matrix unit as those of bf16 pieces, whose sums they are: of three pieces, which hold all bits,
// the six largest of nine products count; of two, enough for tf32, three of four. Those of first pieces are summed apart from the
// rest: small numbers lose nothing to large ones, and where an operand is infinite or NaN, the rest, which would be NaN, is left
// out.
#pragma once
#include "wgmma.cuh"

template <int N> struct SplitSums {
  float high[N / 2], low[N / 2];
  DEVICE void arrived() {
    touch(high);
    touch(low);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) high[i] += fabsf(low[i]) <= 3.402823466e38f ? low[i] : 0.f;
  }
};

// STEPS of k: multiply(sums, s, i, j, add) has the product made of the left operand's piece i and the right one's piece j.
template <int PIECES, int STEPS, int N, class Multiply>
DEVICE void multiply_pieces(SplitSums<N>& sums, const Multiply& multiply) {
  open_products();
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
      for (int j = 0; i + j < PIECES; ++j) {
        if (i + j == 0)
          multiply(sums.high, s, i, j, s > 0);
        else
          multiply(sums.low, s, i, j, s > 0 || i > 0 || j > 1);
      }
  commit_products();
}

// Four neighbours' pieces, SLAB bytes apart
template <int PIECES, int SLAB> DEVICE void put_four(u32 to, const u32 (&x)[4]) {
  u32 word[2][PIECES];
#pragma unroll
  for (int i = 0; i < 2; ++i) split<bf16>(__uint_as_float(x[i * 2]), __uint_as_float(x[i * 2 + 1]), word[i]);
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece)
    store_f32x2(to + piece * SLAB, __uint_as_float(word[0][piece]), __uint_as_float(word[1][piece]));
}
