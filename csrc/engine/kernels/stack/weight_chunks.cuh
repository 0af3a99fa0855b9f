// Weights of dense layers for dense_streamed.cuh, as its slots hold them: chunks behind one another in the order in which they
// are multiplied, in rows of 128 bytes, floats rounded to tf32, zeros where a weight ends. So the copy engine brings each as it
// is, and nobody rounds it again for every tile of samples.
//
// Pass: Element, THREADS, weights(c), which calls each layer. Layer: as there.
#pragma once
#include "finish/pointwise.cuh"
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "multiply/wgmma.cuh"

// Which feature row r of a chunk makes, column r of sums. What a row is that is the sum of multiples of different powers of
// two, is the sum of what they are.
enum class Dealt { in_order, by_words, by_16_bytes };
template <int SIZE, Dealt DEALT> DEVICE constexpr int dealt_row(int r) {
  if (DEALT == Dealt::by_16_bytes)
    return SIZE == 2 ? r / 32 * 32 + r % 8 / 2 * 8 + r % 32 / 8 * 2 + r % 2 : r / 16 * 16 + r % 8 / 2 * 4 + r % 16 / 8 * 2 + r % 2;
  return DEALT == Dealt::by_words ? r / 8 * 8 + r % 2 * 4 + r % 8 / 2 : r;
}

template <class Pass> struct WeightChunks {
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), kSlab = 128 / kSize, kThreads = Pass::THREADS;
  const Params& params;
  DEVICE WeightChunks(const Params& given) : params(given) {}

  template <class L> DEVICE void layer() const {
    constexpr int kSlabs = ceil_div(L::K, kSlab), kPieces = L::N * 8;  // of a slab, by 16 bytes
    constexpr int kAll = L::PARTS * kSlabs;                             // of a pass
    constexpr Dealt kDealt = L::LAST ? Dealt::by_16_bytes : kSize == 4 ? Dealt::by_words : Dealt::in_order;
    const Element* weight = static_cast<const Element*>(params.weights[L::WEIGHT]);
    char* to = static_cast<char*>(params.y) + L::chunks_at;
    // Each layer begins with the thread behind the last one's: most have one piece of all, and wait for memory once.
    const int threads = gridDim.y * kThreads, before = L::chunks_at / 16 % threads;
    const int first = blockIdx.y * kThreads + threadIdx.x - before;
    ROLL for (int i = first < 0 ? first + threads : first; i < L::PASSES * kAll * kPieces; i += threads) {
      const int row = i % kPieces / 8, pass = i / kPieces / kAll, chunk = i / kPieces % kAll / (L::SLABS * L::PARTS);
      const int slabs = min(L::SLABS, kSlabs - chunk * L::SLABS), inside = i / kPieces % kAll % (L::SLABS * L::PARTS);
      const int q = (pass * L::PARTS + inside / slabs) * L::N + dealt_row<kSize, kDealt>(row);
      const int p = (chunk * L::SLABS + inside % slabs) * kSlab + (i % 8 ^ row % 8) * (16 / kSize);
      u32 x[4] = {};
      UNROLL for (int j = 0; j < 16 / kSize; ++j)
        if (q < L::Q && p + j < L::P) {
          const Element from = weight[i64(q) * L::P + p + j];
          if constexpr (kSize == 4)
            x[j] = tf32_of(__float_as_uint(from));
          else
            x[j / 2] |= u32(from.bits) << j % 2 * 16;
        }
      store_global<16>(to + i64(i) * 16, x);
    }
  }
  DEVICE void run() const {
    start_next_kernel();
    Pass::weights(*this);
  }
};
