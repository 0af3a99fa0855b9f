// Rows of a state that 16 bytes do not divide: they come to shared memory as the pieces of 16 bytes that they lie in, in some
// slots for each row, and are taken out of there by words. Unlike those of packed.cuh's runs, a tile may have parts of rows.
#pragma once
#include "move/packed.cuh"

// A chunk's first row in a state, by bytes behind the piece in which the tile's first column of it lies: that one, and where
// the state ends.
struct FirstRow {
  const char* from;
  int begin, end;
};

// ROWS of FEATURES, STEP elements apart, and a tile of SLABS of 64 columns.
template <class Element, int FEATURES, i64 STEP, int SLABS, int ROWS> struct Pieces {
  static constexpr int kSize = sizeof(Element), kRow = FEATURES * kSize, kFeatures = FEATURES, kSlabs = SLABS;
  static constexpr i64 kStep = STEP;
  static constexpr int kStepBytes = int(STEP) * kSize, kColumns = FEATURES < SLABS * 64 ? FEATURES : SLABS * 64;
  static constexpr bool kWhole = kRow % 16 == 0;
  // How far in its first piece a row may begin. Where rows end within words, one more may be read in vain.
  static constexpr int kFurthest = kWhole ? 0 : kRow % 8 == 0 ? 8 : kRow % 4 == 0 ? 12 : 16;
  static constexpr int kSlots = ceil_div(kFurthest + kColumns * kSize, 16) | 1;  // odd: eight rows are in all banks
  static constexpr int kBytes = ROWS * kSlots * 16;

  static DEVICE FirstRow first_row(const void* state, i64 row, i64 column, i64 rows) {
    const i64 begin = (row * STEP + column) * kSize, piece = begin & ~i64(15);
    return {static_cast<const char*>(state) + piece, int(begin - piece), int(min(rows * STEP * kSize - piece, i64(1) << 30))};
  }
  // Of `rows`, of which the state has `columns` from the tile's first one on. Nothing behind its end is read, not even of a
  // piece that begins in it: the last rows have that one by elements.
  template <int THREADS> static DEVICE void copy(u32 to, const FirstRow& first, int rows, int columns, int thread) {
    static_assert(STEP * kSize * ROWS < i64(1) << 30);
    const int bytes = min(columns, kColumns) * kSize, whole = first.end & ~15;
    const int end = first.begin + (rows - 1) * kStepBytes + bytes;
    UNROLL for (int i = 0; i < ceil_div(ROWS * kSlots, THREADS); ++i) {
      const int at = i * THREADS + thread, row = at / kSlots, begin = first.begin + row * kStepBytes;
      const int piece = (begin & ~15) + at % kSlots * 16;
      if (row < rows && piece < begin + bytes && piece < whole) copy_async<16>(to + at * 16, first.from + piece, true);
    }
    if (end <= whole) return;
    ROLL for (int at = thread; at < rows * kSlots; at += THREADS) {
      const int begin = first.begin + at / kSlots * kStepBytes, piece = (begin & ~15) + at % kSlots * 16;
      if (piece != whole || piece >= begin + bytes) continue;
      ROLL for (int i = 0; i < first.end - piece; i += kSize)
        store_shared(to + at * 16 + i, *reinterpret_cast<const Element*>(first.from + piece + i));
    }
  }
  // Where the tile's first column of a row lies
  static DEVICE u32 row_at(u32 pieces, const FirstRow& first, int row) {
    return pieces + row * (kSlots * 16) + (first.begin + row * kStepBytes & 15);
  }
  // Eight columns of 16 bits, in a tile that begins at the `begin`th; zeros behind the last, and where no row is `there`:
  // then nothing is read, without a branch that would part many loads.
  static DEVICE void take(u32 row, int begin, int column, bool there, u32 (&words)[4]) {
    const int feature = there ? begin + column : FEATURES + 1;
    take_words<Element, FEATURES>(row - begin * kSize, feature, feature + 8 <= FEATURES, 4, words);
  }
};
