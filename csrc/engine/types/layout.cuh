// Where elements lie. A state is one row-major array of a tile's units; each stage sees it as [rows, P, I].
#pragma once
#include "types/types.cuh"

// In shared memory: rows ROW elements apart, the P's of a row STEP apart, I contiguous.
template <int P_, int I_, int ROW_, int STEP_> struct Layout {
  static constexpr int P = P_, I = I_, ROW = ROW_, STEP = STEP_;
  static constexpr DEVICE int at(int e) { return e / (P * I) * ROW + e / I % P * STEP + e % I; }
};

// An element's place there, and that of one that lies some elements behind it: by additions, where at() divides.
template <class L> struct Place {
  int place, i, p;
  DEVICE explicit Place(int e) : place(L::at(e)), i(e % L::I), p(e / L::I % L::P) {}
  // IN_ROW: as far as anybody asks, all is in one row.
  template <int BY, bool IN_ROW = false> DEVICE void advance() {
    constexpr int kI = BY % L::I, kP = BY / L::I % L::P;
    place += BY / (L::P * L::I) * L::ROW + kP * L::STEP + kI;
    if constexpr (kI > 0) {
      i += kI;
      const bool over = i >= L::I;
      i -= over ? L::I : 0, p += over, place += over ? L::STEP - L::I : 0;
    }
    if constexpr ((kI > 0 || kP > 0) && L::ROW != L::P * L::STEP && !IN_ROW) {
      p += kP;
      const bool over = p >= L::P;
      p -= over ? L::P : 0, place += over ? L::ROW - L::P * L::STEP : 0;
    }
  }
};

// How THREADS threads go through COUNT elements, EACH at once, in lines of RUN that lie together in shared memory and in memory,
// there STEP elements from one to the next: some lines at a time, or one, of which a thread has several pieces. Most places are
// then constants behind a thread's first one. The last piece of a line may have fewer elements.
template <class L, int COUNT, int RUN, i64 STEP, int EACH, int THREADS> struct Lines {
  static constexpr int kPieces = ceil_div(RUN, EACH), kLines = COUNT / RUN, kRounds = ceil_div(kPieces, THREADS);
  static constexpr int kFit = kRounds > 1 ? 1 : THREADS / kPieces, kAtOnce = kFit < kLines ? kFit : kLines;
  static constexpr int kWhole = kLines / kAtOnce, kMore = kLines % kAtOnce > 0;  // lines that a thread has, and one that it may have
  static_assert(COUNT % RUN == 0);
  const int line, piece;  // a thread's first line, and its first element of a line
  DEVICE explicit Lines(int thread)
      : line(kRounds > 1 ? 0 : thread / kPieces), piece((kRounds > 1 ? thread : thread % kPieces) * EACH) {}

  // take(place, offset, element, left) of some pieces, then put(place, offset, element, left, what was taken) of each. `first` is
  // the element of the layout that the first line begins with, places and offsets count elements, of which `left` are left of a line.
  template <int SOME, class Take, class Put> DEVICE void each(int first, Take take, Put put) const {
    if (kRounds == 1 && kAtOnce * kPieces < THREADS && line >= kAtOnce) return;
    constexpr int kFits = SOME / kRounds, kSome = kFits < 1 ? 1 : kFits < kWhole + kMore ? kFits : kWhole + kMore;
    constexpr int kLoop = (kMore ? kWhole + kMore - 1 : kWhole) / kSome * kSome;
    Cursor cursor{Place<L>(first + line * RUN + piece), line * STEP + piece, line * RUN + piece};
    ROLL for (int step = 0; step < kLoop; step += kSome) lines<kSome, false, SOME>(cursor, take, put);
    if constexpr (kLoop < kWhole + kMore) lines<kWhole - kLoop, kMore, SOME>(cursor, take, put);
  }

 private:
  struct Cursor {
    Place<L> at;
    i64 offset;
    int element;
  };
  // A thread's next WHOLE lines, and one MORE if it is there
  template <int WHOLE, bool MORE, int SOME, class Take, class Put> DEVICE void lines(Cursor& cursor, Take take, Put put) const {
    constexpr int kPart = kRounds < SOME ? kRounds : SOME, kCount = WHOLE + MORE;  // pieces of a line, and lines
    constexpr bool kInRow = COUNT == L::P * L::I;
    Place<L> here = cursor.at;
    ROLL for (int round = 0; round < kRounds; round += kPart) {
      decltype(take(0, cursor.offset, 0, 0)) taken[kCount][kPart];
      const auto go = [&](auto what) {
        here = cursor.at;
        UNROLL for (int i = 0; i < kCount; ++i) {
          if (i < WHOLE || kWhole * kAtOnce + line < kLines) {
            UNROLL for (int r = 0; r < kPart; ++r) {
              const int behind = (round + r) * THREADS * EACH;
              if (kRounds == 1 || (kPieces % THREADS == 0 && kRounds % kPart == 0) || behind + piece < RUN)
                what(here.place + behind, cursor.offset + i * kAtOnce * STEP + behind, cursor.element + i * kAtOnce * RUN + behind,
                     RUN % EACH == 0 ? EACH : RUN - piece - behind, taken[i][r]);
            }
          }
          here.template advance<kAtOnce * RUN, kInRow>();
        }
      };
      go([&](int place, i64 offset, int element, int left, auto& taken) { taken = take(place, offset, element, left); });
      go(put);
    }
    cursor = {here, cursor.offset + kCount * kAtOnce * STEP, cursor.element + kCount * kAtOnce * RUN};
  }
};

// In memory: units are slices of a sample's features, or chunks of their last axis. A unit is [ROWS, C], C contiguous,
// STEP elements from row to row. Where C does not divide that axis, of WIDTH elements then, the last chunk is not whole.
template <int ROWS_, int C_, int CHUNKS_, i64 SLICE_, i64 STEP_, int UNITS_PER_SAMPLE_, int WIDTH_ = 0> struct Region {
  static constexpr int ROWS = ROWS_, C = C_, CHUNKS = CHUNKS_, kSize = ROWS_ * C_, WIDTH = WIDTH_;
  static constexpr i64 STEP = STEP_, SLICE = SLICE_;
  static constexpr bool kDense = kSize == SLICE_;
  static constexpr i64 kExtent = (ROWS_ - 1) * STEP_ + (WIDTH > 0 ? WIDTH : CHUNKS * C);  // from the first element of a slice to its end
  static DEVICE i64 unit(i64 u) { return u / CHUNKS * SLICE_ + u % CHUNKS * C; }
  static DEVICE i64 at(int e) { return ROWS_ == 1 ? e : e / C * STEP_ + e % C; }

  // Lines of a unit that lie together there and in a layout of shared memory, and from one to the next.
  template <class L> static constexpr int kRun = ROWS_ > 1 ? C : L::I > 1 ? L::STEP == L::I ? L::P * L::I : L::I : L::P;
  template <class L> static constexpr i64 kLineStep = ROWS_ > 1 ? STEP_ : kRun<L>;
  // Whether these are whole rows of the layout, behind which there is padding. Several short ones may be side by side in a row.
  template <class L> static constexpr bool kWholeRows = kRun<L> % (L::I > 1 ? L::I : L::P) == 0;

  // Of a tile whose first unit is u: where its slice begins, which chunk of that it is, which unit of its sample, and the feature
  // that its element e is.
  static DEVICE i64 from(i64 u) { return u / CHUNKS * SLICE_; }
  static DEVICE int chunk(i64 u) { return int(u % CHUNKS); }
  static DEVICE int of_sample(i64 u) { return int(u % UNITS_PER_SAMPLE_); }
  static DEVICE int feature(int of_sample, int e) {
    const int here = UNITS_PER_SAMPLE_ > 1 ? (of_sample + e / kSize) % UNITS_PER_SAMPLE_ : 0;
    return here / CHUNKS * int(SLICE_) + here % CHUNKS * C + int(at(e % kSize));
  }
};
