// Results of 16 bits, of groups that take turns in y, on their way through shared memory: of a tile's row TURNS runs, each of
// HELD groups' B columns side by side. A warp has 16 rows. What it has put down of a group lies where it does in memory, but for
// what a run is longer there, modulo 16 bytes; when those of HELD groups are there, whole pieces go.
//
// Where a tile has more groups than that (SWEPT), it stores whole sectors of L2: what a run has of another one is kept, and goes
// with the next groups.
#pragma once
#include "ptx/instructions.cuh"

template <class Pass> struct Runs {
  using Element = typename Pass::Element;
  static constexpr int N = Pass::N, B = Pass::B, FAST = Pass::FAST, HELD = Pass::HELD, TURNS = Pass::TURNS;
  static constexpr int kSector = 16, kPiece = 8;               // elements
  static constexpr bool kAll = HELD == FAST;                   // all runs of a row are one
  static constexpr bool kKeeps = Pass::SWEPT > HELD;
  static constexpr i64 kDown = Pass::EVERY * Pass::Y_SAMPLE;   // from a row to the next in memory
  static constexpr int kWidth = TURNS * B, kTurn = FAST * B;   // columns of a tile; from a run to the next in memory
  static constexpr int kRuns = kAll ? 1 : TURNS, kMost = kAll ? TURNS * FAST * B : HELD * B;  // of a row; elements of one
  // In front of a run, what is kept; between runs, what this moves, in whole pieces
  static constexpr int kLead = kKeeps ? kSector : 0, kApart = HELD * B + (kKeeps ? kSector - 1 + 2 * (kPiece - 1) : 0);
  static constexpr int kStep = kAll ? kTurn : kApart + (kTurn + kPiece * kApart - kApart) % kPiece;
  static constexpr int kRow = (ceil_div(kLead + kPiece - 1 + (TURNS - 1) * kStep + HELD * B, kPiece) | 1) * 16;  // bytes
  static constexpr int kUnits = ceil_div(kMost + kSector - 1, 2 * kSector);
  static_assert(kStep % kPiece == kTurn % kPiece && kStep >= (kAll ? kMost / TURNS : kApart));
  static_assert(!kKeeps || (HELD * B >= kSector && !kAll));

  u32 memory;  // of this warp
  u32 places[N / 8];  // of two columns of a thread

  static DEVICE u32 place_of(int j) { return (j / B * kStep + j % B) * 2; }
  DEVICE explicit Runs(u32 memory) : memory(memory) {
    UNROLL for (int n = 0; n < N / 8; ++n) {
      const int j = n * 8 + threadIdx.x % 4 * 2;
      places[n] = place_of(j) | place_of(j + 1) << 16;
    }
  }
  // Of the held-th group; `begin` is where the first of them has a thread's first row in memory, and modulo a piece its second.
  DEVICE void put(const u32 (&made)[N / 4], i64 begin, int held) const {
    const u32 first = memory + threadIdx.x % 32 / 4 * kRow + (kLead + (int(begin) & kPiece - 1) + held * B) * 2;
    UNROLL for (int n = 0; n < N / 8; ++n) {
      const int j = n * 8 + threadIdx.x % 4 * 2;
      const u32 to = first + (places[n] & 0xffff), next = first + (places[n] >> 16);
      UNROLL for (int half = 0; half < 2; ++half) {
        const u32 pair = made[n * 2 + half];
        const int down = half * 8 * kRow;
        if constexpr (Pass::EDGE >= 4) {
          if (n * 8 + 8 <= kWidth || j < kWidth) store_shared(to + down, pair);
        } else {
          if (n * 8 + 8 <= kWidth || j < kWidth) store_shared(to + down, u16(pair));
          if (n * 8 + 8 <= kWidth || j + 1 < kWidth) store_shared(next + down, u16(pair >> 16));
        }
      }
    }
  }
  // `begin` is where the warp's first row begins; the first groups of a tile begin with a part of a sector, and the last
  // ones end with one. Whole pieces: two lanes have two sectors, and half of each.
  DEVICE void store(Element* y, i64 begin, int rows, int columns, int held, bool first, bool last) const {
    constexpr int kLanes = 2 * kUnits, kItems = kRuns * kLanes, kAtOnce = 2, kEach = 2;
    const int count = kAll ? columns * FAST : held * B, runs = kAll ? 1 : columns / B, lane = threadIdx.x % 32;
    const int from = first ? 0 : -kSector;
    int r = lane / kItems, item = lane % kItems;
    ROLL while (r < rows) {
      Element* to[kAtOnce];
      Words<16> words[kAtOnce][kEach];
      bool whole[kAtOnce][kEach];
      UNROLL for (int i = 0; i < kAtOnce; ++i) {
        const int run = item / kLanes, place = item % kLanes;
        const i64 row = begin + r * kDown, here = row + run * kTurn;
        const int end = r < rows && run < runs ? end_of(here, count, last) : -2 * kSector;
        const int column = place / 2 * (kEach * kSector) + place % 2 * kPiece - (int(here) & kSector - 1);
        const u32 at = place_of(r, row, run, column);
        to[i] = y + here + column;
        UNROLL for (int e = 0; e < kEach; ++e) {
          const int c = column + e * kSector;
          whole[i][e] = c >= from && c + kPiece <= end;
          if (whole[i][e]) words[i][e] = load_words<16>(at + e * kSector * 2);
        }
        item += 32 % kItems, r += 32 / kItems;
        if (item >= kItems) item -= kItems, ++r;
      }
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        UNROLL for (int e = 0; e < kEach; ++e)
          if (whole[i][e]) store_words<16>(to[i] + e * kSector, words[i][e]);
    }
    if (Pass::EDGE < 16 && (first || last)) store_ends(y, begin, rows, runs, count, first, last);
  }
  // Of pieces in which runs begin or end, what they have, by the widest accesses: a lane for each end.
  DEVICE void store_ends(Element* y, i64 begin, int rows, int runs, int count, bool first, bool last) const {
    ROLL for (int i = threadIdx.x % 32; i < rows * (kRuns * 2); i += 32) {
      const int r = i / (kRuns * 2), run = i / 2 % kRuns;
      const i64 row = begin + r * kDown, here = row + run * kTurn;
      const int front = -(int(here) & kPiece - 1), end = end_of(here, count, last), back = end - (int(here + end) & kPiece - 1);
      const bool behind = i % 2;
      if (run >= runs || (first && (behind ? back < 0 : front == 0)) || !(first || behind)) continue;
      const int piece = behind ? back : front, from = first && piece < 0 ? 0 : piece;
      Element* to = y + here + from;
      u32 at = place_of(r, row, run, from);
      int left = min(piece + kPiece, end) - from;
      const auto move = [&](auto size, bool there) {
        if (Pass::EDGE > size.bytes || !there) return;
        store_words<size.bytes>(to, load_words<size.bytes>(at));
        to += size.bytes / 2, at += size.bytes, left -= size.bytes / 2;
      };
      move(Bytes<2>(), at & 2 && left >= 1), move(Bytes<4>(), at & 4 && left >= 2), move(Bytes<8>(), left >= 4);
      move(Bytes<4>(), left >= 2), move(Bytes<2>(), left >= 1);
    }
  }
  template <int BYTES> struct Bytes { static constexpr int bytes = BYTES; };
  // Of a run, `count` elements from `here` on, those that are stored now
  static DEVICE int end_of(i64 here, int count, bool last) { return last ? count : count - (int(here + count) & kSector - 1); }
  DEVICE u32 place_of(int r, i64 row, int run, int column) const {
    return memory + r * kRow + (kLead + (int(row) & kPiece - 1) + run * kStep + column) * 2;
  }
  // What is left of the runs' last sectors, to where they are in front of the next groups
  DEVICE void keep(i64 begin, int rows, int columns) const {
    ROLL for (int i = threadIdx.x % 32; i < rows * TURNS; i += 32) {
      const int r = i / TURNS, run = i % TURNS;
      if (run * B >= columns) continue;
      const i64 row = begin + r * kDown, next = row + HELD * B;
      const int kept = int(next + run * kTurn) & kSector - 1;
      const u32 line = memory + r * kRow + (kLead + run * kStep - kept) * 2;
      const u32 from = line + ((int(row) & kPiece - 1) + HELD * B) * 2, to = line + (int(next) & kPiece - 1) * 2;
      Words<16> pieces[2] = {};
      UNROLL for (int i = 0; i < 2; ++i)
        if (i * kPiece < kept) pieces[i] = load_words<16>(from + i * 16);
      UNROLL for (int i = 0; i < 2; ++i)
        if (i * kPiece < kept) store_words<16>(to + i * 16, pieces[i]);
    }
  }
};
