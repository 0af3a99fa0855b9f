// A warp's 16 x N sums of a product on Hopper's warpgroup instructions, to a matrix in memory: of each row four sums side by side by
// whole sectors of L2, or by way of shared memory, where rows begin anywhere.
#pragma once
#include "multiply/wgmma.cuh"
#include "multiply/mma.cuh"

// The columns of one row that a lane has of four: row g of a warp's 16, or g + 8 (half), from column p on to end; `to` is where
// the row's column 0 belongs. Four lanes store whole sectors, once neighbours have exchanged two of four.
template <class Result, int SUMS> DEVICE void store_row(const float (&sums)[SUMS], int half, Result* to, int p, int end) {
  const int t = threadIdx.x % 4, odd = t & 1;
  UNROLL for (int n = 0; n < SUMS / 4; n += 2) {
    const float* near = &sums[n * 4 + half * 2];
    const int c = p + (n + odd) * 8 + t / 2 * 4;
    if constexpr (sizeof(Result) == 2) {
      const u32 first = Pair<Result>(near[0], near[1]).bits, second = Pair<Result>(near[4], near[5]).bits;
      const u32 given = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
      const u32 words[2] = {odd ? given : first, odd ? second : given};
      if (c < end) store_global<8>(to + c, words);
    } else {
      u32 words[4];
      four_columns(near, words);
      if (c < end) store_global<16>(to + c, words);
    }
  }
}

// Sixteen rows of N sums in shared memory, for a warp to store runs of them: they fill sectors, but at their ends.
template <int N> struct StagedRows {
  static constexpr int kRow = N + 8, kBytes = 16 * kRow * 4;
  const u32 memory;
  DEVICE explicit StagedRows(u32 memory) : memory(memory) {}

  DEVICE u32 at(int row, int column) const { return memory + (row * kRow + column) * 4; }
  DEVICE void put(const float (&sums)[N / 2]) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    UNROLL for (int i = 0; i < N / 2; ++i) store_shared(at(g + i / 2 % 2 * 8, i / 4 * 8 + t * 2 + i % 2), sums[i]);
  }
  // Columns from `begin` to `end` of each row to where line(row) says that column 0 belongs, or nowhere if that is null
  template <class Result, class Line> DEVICE void store(int begin, int end, const Line& line) const {
    UNROLL_BY(4) for (int row = 0; row < 16; ++row) {
      Result* to = line(row);
      if (!to) continue;
      const int first = threadIdx.x % 32 - int(reinterpret_cast<u64>(to) % 32 / sizeof(Result));  // of the sector in which it begins
      UNROLL for (int i = 0; i < ceil_div(N + 31, 32); ++i) {
        const int c = first + i * 32;
        if (unsigned(c) < N && c >= begin && c < end)
          store_global(to + c, narrow<Result>(__uint_as_float(load_u32(at(row, c)))));
      }
    }
  }
};
