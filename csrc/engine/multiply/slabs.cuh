// States of 16 bits in shared memory as Hopper's matrix unit reads them, with k or with m and n contiguous: slabs of 64 columns,
// each of HEIGHT rows of 128 bytes, which come by asynchronous copies of 16 bytes.
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "multiply/wgmma.cuh"

// To what a store adds: to nothing, to what it asks memory for, or to what has been brought to other slabs.
enum class AddsTo { NOTHING, MEMORY, SLABS };

template <class Element, int HEIGHT> struct Slabs {
  static constexpr int kSlab = HEIGHT * 128;

  static DEVICE u32 place(int row, int column) {
    return column / 64 * kSlab + swizzled(row, column % 64 / 8) + column % 8 * 2;
  }
  // Operands: the 16 k's of step s, with k contiguous from row `row` on, or with all columns, or those from slab `slab` on,
  // contiguous.
  static DEVICE u64 by_k(u32 state, int row, int s) { return operand(state + row * 128 + s / 4 * kSlab) + s % 4 * 2; }
  static DEVICE u64 by_column(u32 state, int slab, int s) { return turned_operand(state + slab * kSlab + s * 2048, kSlab); }

  // From and To, below: pointers, or several tensors.
  template <int ROWS, int COLUMNS, int THREADS, class From> static DEVICE void copy(const From& from, u32 to) {
    UNROLL_BY(4) for (int j = threadIdx.x % THREADS; j < ROWS * COLUMNS / 8; j += THREADS)
      copy_async<16>(to + place(j / (COLUMNS / 8), j % (COLUMNS / 8) * 8), from + j * 8, true);
  }
  // What copies leave of steps of 16; what lies behind these is multiplied, but not looked at.
  template <int ROWS, int COLUMNS, int THREADS> static DEVICE void clear_padding(u32 at) {
    constexpr int kWidth = round_up(COLUMNS, 16), kRow = kWidth / 8;
    if constexpr (COLUMNS < kWidth)
      for (int row = threadIdx.x % THREADS; row < ROWS; row += THREADS) store_u32x4(at + place(row, COLUMNS), {});
    for (int j = threadIdx.x % THREADS; j < (round_up(ROWS, 16) - ROWS) * kRow; j += THREADS)
      store_u32x4(at + place(ROWS + j / kRow, j % kRow * 8), {});
  }
  // Two sums of neighbouring columns of COLUMNS, rounded; zeros for padding, which infinities would make NaN.
  template <int COLUMNS, int N>
  static DEVICE u32 pair(const float (&sums)[N], int j, const Lane& lane, float scale, bool present) {
    const int column = j / 4 * 8 + lane.t * 2;
    const auto at = [&](int i) { return present && (COLUMNS % 16 == 0 || column + i < COLUMNS) ? sums[j + i] * scale : 0.f; };
    return Pair<Element>(at(0), at(1)).bits;
  }
  // A warp's 16 rows of sums so, from row `first` on: into slabs, of which ROWS are there; and as a left operand of products.
  template <int ROWS, int COLUMNS, int N>
  static DEVICE void put(u32 to, const float (&sums)[N], int first, const Lane& lane, float scale) {
    UNROLL for (int j = 0; j < N; j += 2) {
      const int row = first + lane.g + j / 2 % 2 * 8;
      store_shared(to + place(row, j / 4 * 8 + lane.t * 2),
                   pair<COLUMNS>(sums, j, lane, scale, ROWS == HEIGHT || row < ROWS));
    }
  }
  template <int COLUMNS, int STEPS, int N>
  static DEVICE void as_left(u32 (&left)[STEPS][4], const float (&sums)[N], const Lane& lane, const float (&scale)[2]) {
    UNROLL for (int s = 0; s < STEPS; ++s) {
      UNROLL for (int i = 0; i < 4; ++i) left[s][i] = pair<COLUMNS>(sums, s * 8 + i * 2, lane, scale[i % 2], true);
      settle(left[s]);
    }
  }
  // A warp's 16 rows of sums, from row `first` on, to memory, by whole pieces through the slabs at `through`. If it ADDS, then
  // to what a kernel before has left there, which is asked for first, or in the slabs at `there`.
  template <int ROWS, int COLUMNS, AddsTo ADDS = AddsTo::NOTHING, int STRIDE = COLUMNS, int N, class To>
  static DEVICE void store(
      const float (&sums)[N], u32 through, int first, const Lane& lane, float scale, const To& to, u32 there = 0) {
    constexpr int kRow = COLUMNS / 8, kEach = ceil_div(16 * kRow, 32);
    constexpr bool kAsks = ADDS == AddsTo::MEMORY;
    const auto each_piece = [&](const auto& act) {
      UNROLL_BY(kAsks ? kEach : 4) for (int i = 0; i < kEach; ++i) {
        const int j = i * 32 + lane.index, row = first + j / kRow, column = j % kRow * 8;
        if ((kRow % 2 == 0 || j < 16 * kRow) && (ROWS == HEIGHT || row < ROWS))
          act(i, place(row, column), to + (row * STRIDE + column));
      }
    };
    [[maybe_unused]] u32 made[kAsks ? kEach : 1][4];
    if constexpr (kAsks) each_piece([&](int i, u32, const Element* at) { load_made<16>(at, made[i], true); });
    UNROLL for (int j = 0; j < N; j += 2)
      store_shared(through + place(first + lane.g + j / 2 % 2 * 8, j / 4 * 8 + lane.t * 2),
                   Pair<Element>(sums[j] * scale, sums[j + 1] * scale).bits);
    __syncwarp();
    each_piece([&](int i, u32 piece, Element* at) {
      if constexpr (ADDS != AddsTo::NOTHING) {
        u32 word[4], brought[4];
        load_u32x4(through + piece, word);
        if constexpr (!kAsks) load_u32x4(there + piece, brought);
        add_words<Element>(word, kAsks ? made[kAsks ? i : 0] : brought);
        store_global<16>(at, word);
      } else {
        store_words<16>(at, load_words<16>(through + piece));
      }
    });
    __syncwarp();
  }
  // A weight, the one with this number in parameter FACTOR, by the first THREADS of a block: copied, or made, several elements
  // on their way, if it is none.
  template <int FACTOR, int Q, int P, int THREADS, class At>
  static DEVICE void load_weight(const Params& params, u32 to, int number, At at) {
    if constexpr (FACTOR >= 0 && P % 8 == 0) {
      copy<Q, P, THREADS>(static_cast<const Element*>(params.weights[FACTOR]) + number * (Q * P), to);
      commit_copies();
      clear_padding<Q, P, THREADS>(to);
    } else {
      make_weight<Element, Q, P, round_up(Q, 16), round_up(P, 16), THREADS, 16>(
          [&](int q, int p) { return narrow<Element>(at(q, p)); },
          [&](int q, int p, Element x) { store_shared(to + place(q, p), x); });
    }
  }
};

// Sums of what Slabs::copy brings time after time, by the threads that copy: each has those of its own pieces.
template <class Slabs, int ROWS, int COLUMNS, int THREADS> struct CopiedSums {
  static constexpr int kPieces = ROWS * COLUMNS / 8, kEach = ceil_div(kPieces, THREADS);
  float sums[kEach][8] = {};

  DEVICE void add(u32 from) {
    UNROLL for (int i = 0; i < kEach; ++i) {
      const int piece = i * THREADS + threadIdx.x % THREADS;
      u32 x[4] = {};
      if (piece < kPieces) load_u32x4(from + Slabs::place(piece / (COLUMNS / 8), piece % (COLUMNS / 8) * 8), x);
      UNROLL for (int e = 0; e < 8; ++e) sums[i][e] += widen(reinterpret_cast<const typename Slabs::Element*>(x)[e]);
    }
  }
  DEVICE void store(float* to) const {
    UNROLL for (int i = 0; i < kEach; ++i) {
      const int piece = i * THREADS + threadIdx.x % THREADS;
      if (piece < kPieces) UNROLL for (int e = 0; e < 8; ++e) store_global(to + piece * 8 + e, sums[i][e]);
    }
  }
};
