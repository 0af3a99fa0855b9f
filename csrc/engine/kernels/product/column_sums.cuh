// Sums over the samples of each feature: a bias's gradient from grad_y. Rows that 16 bytes do not divide are taken several
// at a time, as many as make one that they do, and what lies in those of one feature is added up in the end.
//
// Threads have a piece of 16 bytes of every WAYS-th row, EACH of them on their way at once; the ways of a block add theirs up
// in shared memory. Blocks along x take chunks of WAYS * EACH rows in turn, each writes sums of its own.
//
// Pass:  Element, Result (what is written: Sum<Element> for each block, or Element by the only one), FEATURES, FOLD (samples
//        of a row), LANES (pieces of a row that a block has), WAYS, EACH
#pragma once
#include "move/memory.cuh"
#include "types/params.cuh"

template <class Pass> struct ColumnSums {
  using Element = typename Pass::Element;
  using Part = Sum<Element>;
  static constexpr int kPiece = 16 / sizeof(Element), EACH = Pass::EACH, WAYS = Pass::WAYS, LANES = Pass::LANES;
  static constexpr i64 kRow = i64(Pass::FEATURES) * Pass::FOLD, kPieces = kRow / kPiece;
  static_assert(kRow % kPiece == 0 && WAYS * LANES <= 256);

  const Params& params;
  DEVICE ColumnSums(const Params& given) : params(given) {}

  static DEVICE void add(Part (&sum)[kPiece], const u32 (&word)[4]) {
    const auto* x = reinterpret_cast<const Element*>(word);
    UNROLL for (int e = 0; e < kPiece; ++e) sum[e] += widen(x[e]);
  }

  DEVICE void run() const { sum_up(params.x, params.y, params.batch, blockIdx.y); }
  // What the tile-th LANES pieces of a row are of
  static DEVICE void sum_up(const void* from, void* to, i64 batch, int tile) {
    const int lane = threadIdx.x % LANES, way = threadIdx.x / LANES;
    const i64 piece = i64(tile) * LANES + lane, rows = batch / Pass::FOLD;
    const bool has_piece = way < WAYS && piece < kPieces;
    const auto* x = static_cast<const Element*>(from) + piece * kPiece;
    Part sum[kPiece] = {};
    for (i64 first = i64(blockIdx.x) * (WAYS * EACH); has_piece && first < rows; first += i64(gridDim.x) * (WAYS * EACH)) {
      u32 word[EACH][4];
      UNROLL for (int i = 0; i < EACH; ++i) {
        const i64 row = first + i * WAYS + way;
        load_global(x + row * kRow, word[i], row < rows);
      }
      UNROLL for (int i = 0; i < EACH; ++i) add(sum, word[i]);
    }
    if constexpr (Pass::FOLD > 1) {  // samples that make no whole row
      const i64 rest = (batch - rows * Pass::FOLD) * Pass::FEATURES - piece * kPiece;
      if (has_piece && blockIdx.x == 0 && way == 0)
        for (int e = 0; e < kPiece; ++e)
          if (e < rest) sum[e] += widen(x[rows * kRow + e]);
    }

    const u32 sums = shared_address(shared_memory);
    if constexpr (WAYS > 1) {
      UNROLL for (int e = 0; e < kPiece; ++e) store_shared(sums + (e * 256 + threadIdx.x) * sizeof(Part), sum[e]);
      __syncthreads();
    }
    if (!has_piece || way > 0) return;
    auto* y = static_cast<typename Pass::Result*>(to) + i64(blockIdx.x) * kRow + piece * kPiece;
    UNROLL for (int e = 0; e < kPiece; ++e) {
      for (int other = 1; other < WAYS; ++other)
        sum[e] += load_sum(sums + (e * 256 + other * LANES + lane) * sizeof(Part), sum[e]);
      store_global(y + e, narrow<typename Pass::Result>(sum[e]));
    }
  }
};
