// Matrices, one behind another in memory, turned: [ROWS][COLUMNS] to [COLUMNS][ROWS].
//
// A block turns TR x TC in shared memory, where a column lies in pieces of 16 bytes, in an order that changes from one run
// of columns to the next: so neither what arrives by rows nor what leaves by columns meets itself in a bank. Of 16 bits,
// words of two rows are stored: of a run that goes over several, or of two runs that are read together. Where a tile has
// all columns, rows of several matrices, which follow each other in memory, can be in it; where it has all rows, several
// tiles side by side.
//
// Pass:  Element, MATRICES (of a sample), ROWS, COLUMNS, TR and TC (a multiple of 8, and all columns, or whole runs of
//        them; TR * TC elements are a multiple of 128 bytes), BESIDE (tiles), READ and WRITE (elements of one access),
//        THREADS, ROUNDS (to tf32), MIXED_ROWS and MIXED_COLUMNS (rows, as they lie, are [MIXED_ROWS][MIXED_COLUMNS], and taken
//        as [MIXED_COLUMNS][MIXED_ROWS]; ROWS and 1: in order)
#pragma once
#include "move/memory.cuh"
#include "types/params.cuh"

template <class Pass> struct Turn {
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), kPiece = 16 / kSize, TR = Pass::TR, TC = Pass::TC;
  static constexpr int ROWS = Pass::ROWS, COLUMNS = Pass::COLUMNS, READ = Pass::READ, WRITE = Pass::WRITE;
  static constexpr bool kStacked = TC == COLUMNS;  // matrices are one of more rows
  static constexpr int kTilesR = ceil_div(ROWS, TR), kColumns = TC * Pass::BESIDE, kTilesC = ceil_div(COLUMNS, kColumns);
  static constexpr int kTogether = kSize == 2 && COLUMNS % READ == 0 ? 2 : 1;  // rows
  static constexpr bool kMixed = Pass::MIXED_COLUMNS > 1;
  static_assert(!kMixed || COLUMNS % READ == 0, "a run is of one row");
  static constexpr bool kInRun = kSize == 2 && READ % (2 * TC) == 0;  // these lie in one run
  static constexpr int kRows = TR * Pass::BESIDE;  // of all tiles, one below the other
  static constexpr int kReads = ceil_div(kRows * TC / READ, Pass::THREADS * kTogether), kWrites = TR / WRITE * kColumns;
  static constexpr int kSpan = 32 * READ * kTogether / TC / kPiece, kStep = kSpan ? kSpan : 1;  // pieces that a warp stores to
  static_assert(TR * TC % READ == 0 && TR % 8 == 0 && TR * TC * kSize % 128 == 0 && (TC == COLUMNS || TC % READ == 0));
  using Run = Words<READ * kSize>;

  const Params& params;
  DEVICE Turn(const Params& given) : params(given) {}

  static DEVICE u32 place(u32 memory, int r, int c) {
    return memory + (((c * TR + r) / kPiece ^ c / kPiece * kStep % 8) * kPiece + r % kPiece) * kSize;
  }

  static DEVICE Element rounded(Element x) {
    if constexpr (Pass::ROUNDS) return __uint_as_float(tf32_of(__float_as_uint(x)));
    return x;
  }

  // Where the row that is taken at some place begins, of matrices as one.
  static DEVICE i64 from_row(i64 row) {
    if constexpr (!kMixed) return row * COLUMNS;
    const int at = int(row % ROWS);
    return (row - at + at % Pass::MIXED_ROWS * Pass::MIXED_COLUMNS + at / Pass::MIXED_ROWS) * COLUMNS;
  }

  DEVICE void run() const {
    const u32 memory = shared_address(shared_memory);
    const int tile = blockIdx.x % (kTilesR * kTilesC), column = kStacked ? 0 : tile % kTilesC * kColumns;
    const i64 first = i64(blockIdx.x) * TR;  // of all rows
    const i64 matrix = kStacked ? first / ROWS : blockIdx.x / (kTilesR * kTilesC);
    const int row = kStacked ? int(first % ROWS) : tile / kTilesC * TR;
    const int rows = kStacked ? int(min(params.batch * Pass::MATRICES * ROWS - first, i64(TR))) : min(ROWS - row, TR);
    const i64 first_row = matrix * ROWS + row;
    const Element* x = static_cast<const Element*>(params.x) + column + (kMixed ? 0 : from_row(first_row));
    Element* y = static_cast<Element*>(params.y) + matrix * (i64(ROWS) * COLUMNS) + i64(column) * ROWS;

    Run read[kReads][kTogether];
    UNROLL for (int n = 0; n < kReads; ++n) {
      const int at = (n * Pass::THREADS + threadIdx.x) * READ, below = at / TC * kTogether;
      const int r = below % TR, c = below / TR * TC + at % TC;
      UNROLL for (int i = 0; i < kTogether; ++i) {
        read[n][i] = Run{};
        // Where a tile has all columns, a run of elements may go on into the next row; the last row ends with one.
        if (r + i < rows && below < kRows && column + c < COLUMNS)
          read[n][i] = *reinterpret_cast<const Run*>(x + from_row(kMixed ? first_row + r + i : r + i) + c);
      }
    }
    UNROLL for (int n = 0; n < kReads; ++n) {
      const int at = (n * Pass::THREADS + threadIdx.x) * READ, below = at / TC * kTogether;
      const int r = below % TR, c = below / TR * TC + at % TC;
      if (kRows * TC / READ % (Pass::THREADS * kTogether) && below >= kRows) break;
      if constexpr (kInRun) {
        const auto* element = reinterpret_cast<const u16*>(&read[n]);
        UNROLL for (int e = 0; e < READ; ++e)
          if (e / TC % 2 == 0)
            store_shared(place(memory, r + e / TC, e % TC), u32(element[e]) | u32(element[e + TC]) << 16);
      } else if constexpr (kTogether == 2) {
        const auto *upper = reinterpret_cast<const u16*>(&read[n][0]), *lower = reinterpret_cast<const u16*>(&read[n][1]);
        UNROLL for (int e = 0; e < READ; ++e)
          store_shared(place(memory, r, c + e), u32(upper[e]) | u32(lower[e]) << 16);
      } else {
        const Element* element = reinterpret_cast<const Element*>(&read[n]);
        UNROLL for (int e = 0; e < READ; ++e) {
          const int over = TC % READ ? (at % TC + e) / TC : 0;
          store_shared(place(memory, r + over, c + e - over * TC), rounded(element[e]));
        }
      }
    }
    __syncthreads();
    UNROLL_BY(4) for (int j = threadIdx.x; j < kWrites; j += Pass::THREADS) {
      const int c = j / (TR / WRITE), r = j % (TR / WRITE) * WRITE, further = kStacked ? (row + r) / ROWS : 0;
      Element* to = y + (i64(further) * COLUMNS + c) * ROWS + (row + r - further * ROWS);
      if (r < rows && column + c < COLUMNS)
        store_words<WRITE * kSize>(to, load_words<WRITE * kSize>(place(memory, r, c)));
    }
  }
};

// The same of whole matrices: a block copies TOGETHER of them as they lie, one behind another, and stores them as they will lie.
// Threads read single elements in shared memory, and store words: one element, or of 16 bits two.
//
// Pass:  Element, MATRICES, ROWS, COLUMNS, TOGETHER (matrices, multiples of 16 bytes), THREADS, ROUNDS
template <class Pass> struct TurnWhole {
  using Element = typename Pass::Element;
  static constexpr int ROWS = Pass::ROWS, COLUMNS = Pass::COLUMNS, kOne = ROWS * COLUMNS, THREADS = Pass::THREADS;
  static constexpr int kSize = sizeof(Element), kPiece = 16 / kSize, kWord = kSize == 2 ? 2 : 1;  // elements
  static_assert(Pass::TOGETHER * kOne % kPiece == 0);

  const Params& params;
  DEVICE TurnWhole(const Params& given) : params(given) {}

  static DEVICE int from(int matrix, int c, int r) { return matrix * kOne + r * COLUMNS + c; }

  DEVICE void run() const {
    const u32 memory = shared_address(shared_memory);
    const i64 first = i64(blockIdx.x) * Pass::TOGETHER;
    const int elements = int(min(params.batch * Pass::MATRICES - first, i64(Pass::TOGETHER))) * kOne, pieces = elements / kPiece;
    const Element* x = static_cast<const Element*>(params.x) + first * kOne;
    Element* y = static_cast<Element*>(params.y) + first * kOne;
    UNROLL_BY(4) for (int at = threadIdx.x; at < pieces; at += THREADS) copy_async<16>(memory + at * 16, x + at * kPiece, true);
    if (const int at = pieces * kPiece + threadIdx.x; at < elements) store_shared(memory + at * kSize, x[at]);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    UNROLL_BY(4) for (int at = threadIdx.x * kWord; at < elements; at += THREADS * kWord) {
      const int matrix = at / kOne, place = at - matrix * kOne, c = place / ROWS, r = place - c * ROWS;
      const u32 here = memory + from(matrix, c, r) * kSize;
      if constexpr (kSize == 2) {
        const int next = r + 1 < ROWS ? from(matrix, c, r + 1) : c + 1 < COLUMNS ? from(matrix, c + 1, 0) : from(matrix + 1, 0, 0);
        const u16 lower = load_u16(here);
        if (at + 1 < elements)
          store_global(reinterpret_cast<u32*>(y + at), u32(lower) | u32(load_u16(memory + next * kSize)) << 16);
        else
          store_global(reinterpret_cast<u16*>(y + at), lower);
      } else if constexpr (Pass::ROUNDS) {
        store_global(reinterpret_cast<u32*>(y + at), tf32_of(load_u32(here)));
      } else {
        store_words<kSize>(y + at, load_words<kSize>(here));
      }
    }
  }
};
