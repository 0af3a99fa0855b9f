// Products of floats on Hopper's matrix unit as those of bf16 pieces, whose sums they are: of three pieces, which hold all bits,
// the six largest of nine products count; of two, enough for tf32, three of four. Those of first pieces are summed apart from the
// rest: small numbers lose nothing to large ones, and where an operand is infinite or NaN, the rest, which would be NaN, is left
// out.
#pragma once
#include "multiply/wgmma.cuh"

// What the warpgroups of a block have together, each of its threads, when it is launched: whoever takes more waits for ever.
template <int WARPGROUPS> constexpr int kAllRegisters = 65536 / (WARPGROUPS * 128) / 8 * 8 * WARPGROUPS;

// Sums 64 x N of the products of first pieces, and of all others, which one piece has none of.
template <int N, int PIECES = 2> struct SplitSums {
  float high[N / 2], low[PIECES > 1 ? N / 2 : 1];
  DEVICE void arrived() {
    touch(high);
    if constexpr (PIECES > 1) {
      touch(low);
      UNROLL for (int i = 0; i < N / 2; ++i) high[i] += or_zero(low[i]);
    }
  }
};

// STEPS of k: multiply(sums, s, i, j, add) has the product made of the left operand's piece i and the right one's piece j. The
// first product of each kind of sums sets them, unless they are continued.
template <int PIECES, int STEPS, class Sums, class Multiply>
DEVICE void multiply_pieces(Sums& sums, bool continued, const Multiply& multiply) {
  open_products();
  UNROLL for (int s = 0; s < STEPS; ++s)
    UNROLL for (int i = 0; i < PIECES; ++i)
      UNROLL for (int j = 0; i + j < PIECES; ++j) {
        if constexpr (PIECES == 1)
          multiply(sums.high, s, i, j, continued || s > 0);
        else if (i + j == 0)
          multiply(sums.high, s, i, j, continued || s > 0);
        else
          multiply(sums.low, s, i, j, continued || s > 0 || i > 0 || j > 1);
      }
  commit_products();
}

// 64 x 64 of what is multiplied are a block: its pieces lie behind one another, each 64 rows of 128 bytes, which are read with k
// or with m and n contiguous, the 16 k's of step s.
constexpr int kPieceBytes = 64 * 128;
DEVICE u32 place_in_block(int row, int column) { return swizzled(row, column / 8) + column % 8 * 2; }
DEVICE u64 by_k(u32 block, int piece, int s) { return operand(block) + (piece * (kPieceBytes / 16) + s * 2); }
DEVICE u64 by_column(u32 block, int piece, int s) {
  return turned_operand(block, kPieceBytes) + (piece * (kPieceBytes / 16) + s * 128);
}

// A weight [q, p] to blocks, by rows of these; at(q, p) is an element.
template <int PIECES, int Q, int P, int THREADS, class At> DEVICE void load_split_weight(u32 to, const At& at) {
  constexpr int kRow = ceil_div(P, 2);
  struct Two { float w[2]; };
  move_together<Q * kRow, THREADS, 8>(
      [&](int j) -> Two {
        const int q = j / kRow, p = j % kRow * 2;
        return {q < Q ? at(q, p) : 0.f, q < Q && (P % 2 == 0 || p + 1 < P) ? at(q, p + 1) : 0.f};
      },
      [&](int j, const Two& x) {
        const int q = j / kRow, p = j % kRow * 2;
        const u32 block = to + (q / 64 * ceil_div(P, 64) + p / 64) * (PIECES * kPieceBytes);
        u32 word[PIECES];
        split<bf16>(x.w[0], x.w[1], word);
        UNROLL for (int piece = 0; piece < PIECES; ++piece)
          if (q < Q) store_shared(block + piece * kPieceBytes + place_in_block(q % 64, p % 64), word[piece]);
      });
}

// Four neighbours of a row
template <int PIECES> DEVICE void put_four(u32 to, const u32 (&x)[4]) {
  u32 word[2][PIECES];
  UNROLL for (int i = 0; i < 2; ++i) split<bf16>(__uint_as_float(x[i * 2]), __uint_as_float(x[i * 2 + 1]), word[i]);
  UNROLL for (int piece = 0; piece < PIECES; ++piece)
    store_f32x2(to + piece * kPieceBytes, __uint_as_float(word[0][piece]), __uint_as_float(word[1][piece]));
}
