// In which order the ways back through a Monarch layer whose groups are small and many have what they multiply: grad_y turned,
// whose rows are s's, and both weights, as monarch_back.cuh's shared memory is to have them.
//
// Pass:  K, P, L, S, RHO, Element
#pragma once
#include "multiply/wgmma.cuh"

template <class Pass> struct MonarchOrder {
  static constexpr int kSize = sizeof(typename Pass::Element), kPiece = 16 / kSize, kRun = Pass::S / kPiece;
  static constexpr int kUnits = 16, kParts = Pass::K * Pass::RHO / (4 * kUnits);  // units of a block, and blocks that have all

  // A piece of 16 bytes holds s's as far apart as there are pieces: a lane that has read some rows of grad_y, which warps read
  // side by side, has whole pieces.
  static constexpr DEVICE int s_at(int place) { return place / kPiece + place % kPiece * kRun; }
  static constexpr DEVICE int place_of(int s) { return s % kRun * kPiece + s / kRun; }

  // Of a tile of samples, of which there are `rows`, an l's slabs, and in these the samples' rows
  static constexpr int kTile = 64, kSlabs = ceil_div(Pass::S * kSize, 128);
  static constexpr DEVICE i64 turned_at(i64 sample) { return sample * (Pass::L * kSlabs * 128); }
  static constexpr DEVICE u32 turned_row(int l, int slab, int row, int rows, int piece) {
    return (l * kSlabs + slab) * rows * 128 + swizzled(row, piece);
  }

  // Second weights by parts and l's: numbers are rows of slabs. First ones behind them, by parts and fours of l's: units, P's,
  // and of these all numbers of the unit and of the four.
  static constexpr int kSecondBytes = kSlabs * 64 * 128;
  static constexpr int kFirstBytes = kUnits * Pass::P * 16 * kSize;
  static constexpr i64 kFirstAt = i64(kParts) * Pass::L * kSecondBytes, kBytes = kFirstAt + i64(kParts) * (Pass::L / 4) * kFirstBytes;
  static constexpr DEVICE int piece_of_first(int row, int piece) { return piece ^ row / (4 / (kSize / 2)) % (2 * (kSize / 2)); }

  // Of a part, which number row n of the l-th of four is, and of unit i of four, which number and l the c-th of 16 is.
  static constexpr DEVICE int number_of(int n, int l) { return (n / 16 * 4 + (n % 8 / 2 ^ l)) * 4 + n % 16 / 8 * 2 + n % 2; }
  static constexpr DEVICE int number_at(int c) { return c / 8 * 2 + (kSize == 2 ? c % 2 : c % 8 / 4); }
  static constexpr DEVICE int l_at(int i, int c) { return i ^ (kSize == 2 ? c % 8 / 2 : c % 4); }
};
