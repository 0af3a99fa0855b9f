// States of 16 bits in shared memory as Hopper's matrix unit reads them, with k or with m and n contiguous: slabs of 64 columns,
// each of HEIGHT rows of 128 bytes, which come by asynchronous copies of 16 bytes.
#pragma once
#include "params.cuh"
#include "wgmma.cuh"

template <class Element, int HEIGHT> struct Slabs {
  static constexpr int kSlab = HEIGHT * 128;

  static DEVICE u32 place(int row, int column) {
    return column / 64 * kSlab + swizzled(row, column % 64 / 8) + column % 8 * 2;
  }
  template <int ROWS, int COLUMNS, int THREADS> static DEVICE void copy(const Element* from, u32 to) {
#pragma unroll 4
    for (int j = threadIdx.x % THREADS; j < ROWS * COLUMNS / 8; j += THREADS)
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
  // A weight, by the first THREADS of a block: copied if it is parameter FACTOR, or made, several elements on their way.
  template <int FACTOR, int Q, int P, int THREADS, class At>
  static DEVICE void load_weight(const Params& params, u32 to, At at) {
    if constexpr (FACTOR >= 0 && P % 8 == 0) {
      copy<Q, P, THREADS>(static_cast<const Element*>(params.weights[FACTOR]), to);
      commit_copies();
      clear_padding<Q, P, THREADS>(to);
    } else {
      constexpr int kWidth = round_up(P, 16), kAll = round_up(Q, 16) * kWidth, kTogether = 16;
#pragma unroll 1
      for (int from = threadIdx.x; from < kAll; from += THREADS * kTogether) {
        Element x[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int q = (from + i * THREADS) / kWidth, p = (from + i * THREADS) % kWidth;
          x[i] = q < Q && p < P ? narrow<Element>(at(q, p)) : Element{};
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int j = from + i * THREADS;
          if (j < kAll) store_shared(to + place(j / kWidth, j % kWidth), x[i]);
        }
      }
    }
  }
};
