// Weights for products of floats that are split (wide.cuh), once instead of for each tile of rows: rows of CHUNKS times 256
// bytes, the high halves of 64 k's and the low ones, where each two neighbours are one of either part of the chunk, and what
// scales a row. Terms that are summed have one scale for each of their rows.
//
// Those that are multiplied by rows which begin somewhere in a piece of 16 bytes (wide.cuh) become EVERY weights, for
// EVERY rows of x behind one another: rows of CHUNKS times 128 bytes with as many zeros first as such a row of x has of others.
//
// Pass: THREADS, weights(c), which calls split or pad of each weight. Weight: WEIGHT (the parameter that it is), P, ROWS, TERMS, PART (k's) and
// CHUNKS, AT and SCALES (where its rows lie, and their scales).
#pragma once
#include "types/halves.cuh"
#include "types/params.cuh"

template <class Pass> struct WeightHalves {
  const Params& params;
  DEVICE WeightHalves(const Params& given) : params(given) {}

  // Four of a row from k on, where 16 bytes divide rows at once
  template <class W> static DEVICE void load_four(const float* from, int k, u32 (&x)[4], bool there) {
    if constexpr (W::P % 4 == 0) {
      load_global(from + k, x, there && k < W::P);
    } else {
      UNROLL for (int i = 0; i < 4; ++i) x[i] = there && k + i < W::P ? __float_as_uint(from[k + i]) : 0;
    }
  }
  // A warp takes a row, eight lanes a chunk. A round's are on their way at once; where there is one, they stay in registers.
  template <class W> DEVICE void split() const {
    constexpr int kAll = W::TERMS * W::CHUNKS, kTogether = kAll <= 4 ? 1 : kAll <= 8 ? 2 : 4, kRound = 4 * kTogether;
    const int lane = threadIdx.x % 32, piece = lane % 8 * 4, warps = gridDim.y * (Pass::THREADS / 32);
    char* to = static_cast<char*>(params.y);
    ROLL for (int row = blockIdx.y * (Pass::THREADS / 32) + threadIdx.x / 32; row < W::ROWS; row += warps) {
      u32 x[kTogether][2][4];
      const auto load = [&](int first) {
        UNROLL for (int j = 0; j < kTogether; ++j) {
          const int i = first + j * 4 + lane / 8, term = i / W::CHUNKS, k = i % W::CHUNKS * 2 * W::PART + piece;
          const float* from = static_cast<const float*>(params.weights[W::WEIGHT]) + (i64(term) * W::ROWS + row) * W::P;
          UNROLL for (int part = 0; part < 2; ++part)
            load_four<W>(from, k + part * W::PART, x[j][part], piece < W::PART && i < kAll);
        }
      };
      float most[1] = {};
      ROLL for (int first = 0; first < kAll; first += kRound) {
        load(first);
        UNROLL for (int j = 0; j < kTogether; ++j) most[0] = larger_of(larger_of(most[0], x[j][0]), x[j][1]);
      }
      most_of<32>(most);
      const Scale scale(most[0]);
      ROLL for (int first = 0; first < kAll; first += kRound) {
        if constexpr (kAll > kRound) load(first);
        UNROLL for (int j = 0; j < kTogether; ++j) {
          const int i = first + j * 4 + lane / 8;
          u32 high[4], low[4];
          scale.split(x[j][0], x[j][1], high, low);
          char* place = to + W::AT + ((i64(i / W::CHUNKS) * W::ROWS + row) * W::CHUNKS + i % W::CHUNKS) * 256 + piece * 4;
          if (i < kAll) store_global<16>(place, high), store_global<16>(place + 128, low);
        }
      }
      if (lane == 0) store_global(reinterpret_cast<float*>(to + W::SCALES) + row, scale.back);
    }
  }
  // A thread takes 16 bytes.
  template <class W, class Element> DEVICE void shift() const {
    constexpr int kPieces = W::CHUNKS * 8, kPiece = 16 / sizeof(Element), kEach = 4 / sizeof(Element);
    constexpr i64 kRows = i64(W::TERMS) * W::ROWS;
    const Element* weight = static_cast<const Element*>(params.weights[W::WEIGHT]);
    ROLL for (i64 i = blockIdx.y * Pass::THREADS + threadIdx.x; i < W::EVERY * kRows * kPieces; i += gridDim.y * Pass::THREADS) {
      const int row = int(i / kPieces % kRows), of_x = int(i / kPieces / kRows), block = row % W::ROWS / W::Q;
      const int shift = (of_x * W::X_ROW + block * W::X_BLOCK) % kPiece;
      const int k = int(i % kPieces) * kPiece - shift;
      u32 words[4] = {};
      UNROLL for (int e = 0; e < kPiece; ++e)
        if (k + e >= 0 && k + e < W::P) words[e / kEach] |= u32(weight[i64(row) * W::P + k + e]) << e % kEach * 16;
      store_global<16>(static_cast<char*>(params.y) + W::AT + i * 16, words);
    }
  }
  DEVICE void run() const {
    start_next_kernel();
    Pass::weights(*this);
  }
};
