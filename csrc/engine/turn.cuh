// Matrices, one behind another in memory, turned: [ROWS][COLUMNS] to [COLUMNS][ROWS].
//
// A block turns TR x TC of one in shared memory, where a column lies in pieces of 16 bytes, in an order that changes from
// one run of columns to the next: so neither what arrives by rows nor what leaves by columns meets itself in a bank. Of 16
// bits, where a run lies in one row, two rows are read together, and words of both are stored.
//
// Pass:  Element, ROWS, COLUMNS, TR (TR * sizeof(Element) a multiple of 128), TC (all columns, or whole runs of them),
//        READ and WRITE (elements of one access), THREADS, ROUNDS (to tf32)
#pragma once
#include "params.cuh"

template <class Pass> struct Turn {
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), kPiece = 16 / kSize, TR = Pass::TR, TC = Pass::TC;
  static constexpr int ROWS = Pass::ROWS, COLUMNS = Pass::COLUMNS, READ = Pass::READ, WRITE = Pass::WRITE;
  static constexpr int kTilesR = ceil_div(ROWS, TR), kTilesC = ceil_div(COLUMNS, TC);
  static constexpr int kTogether = kSize == 2 && COLUMNS % READ == 0 ? 2 : 1;  // rows
  static constexpr int kReads = ceil_div(TR * TC / READ, Pass::THREADS * kTogether), kWrites = TR / WRITE * TC;
  static constexpr int kSpan = 32 * READ * kTogether / TC / kPiece, kStep = kSpan ? kSpan : 1;  // pieces that a warp stores to
  static_assert(TR * TC % READ == 0 && TR % kPiece == 0 && (TC == COLUMNS || TC % READ == 0));
  using Run = Words<READ * kSize>;

  const Params& params;
  DEVICE Turn(const Params& given) : params(given) {}

  static DEVICE u32 place(u32 memory, int r, int c) {
    return memory + (c * TR + (r / kPiece ^ c / kPiece * kStep % 8) * kPiece + r % kPiece) * kSize;
  }

  static DEVICE Element rounded(Element x) {
    if constexpr (Pass::ROUNDS) return __uint_as_float(tf32_of(__float_as_uint(x)));
    return x;
  }

  DEVICE void run() const {
    const u32 memory = shared_address(shared_memory);
    const int tile = blockIdx.x % (kTilesR * kTilesC), row = tile / kTilesC * TR, column = tile % kTilesC * TC;
    const i64 matrix = i64(blockIdx.x / (kTilesR * kTilesC)) * (i64(ROWS) * COLUMNS);
    const Element* x = static_cast<const Element*>(params.x) + matrix + i64(row) * COLUMNS + column;
    Element* y = static_cast<Element*>(params.y) + matrix + i64(column) * ROWS + row;

    Run read[kReads][kTogether];
#pragma unroll
    for (int n = 0; n < kReads; ++n) {
      const int at = (n * Pass::THREADS + threadIdx.x) * READ, r = at / TC * kTogether, c = at % TC;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        read[n][i] = Run{};
        // Where a tile has all columns, a run of elements may go on into the next row; the last row ends with one.
        if (r < TR && row + r + i < ROWS && column + c < COLUMNS)
          read[n][i] = *reinterpret_cast<const Run*>(x + i64(r + i) * COLUMNS + c);
      }
    }
#pragma unroll
    for (int n = 0; n < kReads; ++n) {
      const int at = (n * Pass::THREADS + threadIdx.x) * READ;
      if (TR * TC / READ % (Pass::THREADS * kTogether) && at / TC * kTogether >= TR) break;
      if constexpr (kTogether == 2) {
        const auto *upper = reinterpret_cast<const u16*>(&read[n][0]), *lower = reinterpret_cast<const u16*>(&read[n][1]);
#pragma unroll
        for (int e = 0; e < READ; ++e)
          store_shared(place(memory, at / TC * 2, at % TC + e), u32(upper[e]) | u32(lower[e]) << 16);
      } else {
        const Element* element = reinterpret_cast<const Element*>(&read[n]);
#pragma unroll
        for (int e = 0; e < READ; ++e) store_shared(place(memory, (at + e) / TC, (at + e) % TC), rounded(element[e]));
      }
    }
    __syncthreads();
#pragma unroll 4
    for (int j = threadIdx.x; j < kWrites; j += Pass::THREADS) {
      const int c = j / (TR / WRITE), r = j % (TR / WRITE) * WRITE;
      if (row + r < ROWS && column + c < COLUMNS)
        store_words<WRITE * kSize>(y + i64(c) * ROWS + r, load_words<WRITE * kSize>(place(memory, r, c)));
    }
  }
};
