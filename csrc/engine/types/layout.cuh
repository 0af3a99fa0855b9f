// Where elements lie. A state is one row-major array of a tile's units; each stage sees it as [rows, P, I].
#pragma once
#include "types/types.cuh"

// In shared memory: rows ROW elements apart, the P's of a row STEP apart, I contiguous.
template <int P_, int I_, int ROW_, int STEP_> struct Layout {
  static constexpr int P = P_, I = I_, ROW = ROW_, STEP = STEP_;
  static constexpr DEVICE int at(int e) { return e / (P * I) * ROW + e / I % P * STEP + e % I; }
  // Whether at(e + k * by) = at(e) + at(k * by) for e below `by`
  static constexpr bool splits(int by) {
    return (by % I == 0 || I % by == 0) && (by % (P * I) == 0 || P * I % by == 0);
  }
};

// An element's place there, and that of the element BY behind it, and so on: by additions, where at() divides.
template <class L, int BY> struct Pace {
  int place, i, p;
  DEVICE explicit Pace(int e) : place(L::at(e)), i(e % L::I), p(e / L::I % L::P) {}
  DEVICE void next() {
    constexpr int kI = BY % L::I, kP = BY / L::I % L::P;
    place += BY / (L::P * L::I) * L::ROW + kP * L::STEP + kI;
    if constexpr (kI > 0) {
      i += kI;
      const bool over = i >= L::I;
      i -= over ? L::I : 0, p += over, place += over ? L::STEP - L::I : 0;
    }
    if constexpr (kI > 0 || kP > 0) {
      p += kP;
      const bool over = p >= L::P;
      p -= over ? L::P : 0, place += over ? L::ROW - L::P * L::STEP : 0;
    }
  }
};

// In memory: units are slices of a sample's features, or chunks of their last axis. A unit is [ROWS, C], C contiguous,
// STEP elements from row to row. Where C does not divide that axis, of WIDTH elements then, the last chunk is not whole.
template <int ROWS_, int C_, int CHUNKS_, i64 SLICE_, i64 STEP_, int UNITS_PER_SAMPLE_, int WIDTH_ = 0> struct Region {
  static constexpr int C = C_, CHUNKS = CHUNKS_, kSize = ROWS_ * C_, WIDTH = WIDTH_;
  static constexpr i64 STEP = STEP_;
  static constexpr bool kDense = kSize == SLICE_;
  static DEVICE i64 unit(i64 u) { return u / CHUNKS * SLICE_ + u % CHUNKS * C; }
  static DEVICE i64 at(int e) { return e / C * STEP_ + e % C; }

  // Element e of a tile whose first unit is u: its place behind from(u), which takes no long divisions, and its feature.
  static DEVICE i64 from(i64 u) { return u / CHUNKS * SLICE_; }
  static DEVICE int chunk(i64 u) { return int(u % CHUNKS); }
  static DEVICE i64 behind(int chunk, int e) {
    if constexpr (kDense) return e;
    const int here = chunk + e / kSize;
    return i64(here / CHUNKS) * SLICE_ + here % CHUNKS * C + at(e % kSize);
  }
  static DEVICE bool has(int chunk, int e) {
    return WIDTH_ == 0 || (chunk + e / kSize) % CHUNKS * C + e % C < WIDTH_;
  }
  static DEVICE int of_sample(i64 u) { return int(u % UNITS_PER_SAMPLE_); }
  static DEVICE int feature(int of_sample, int e) {
    const int here = UNITS_PER_SAMPLE_ > 1 ? (of_sample + e / kSize) % UNITS_PER_SAMPLE_ : 0;
    return here / CHUNKS * int(SLICE_) + here % CHUNKS * C + int(at(e % kSize));
  }

  // A tile of units that lie side by side: an element's place behind the first one's.
  static constexpr bool side_by_side(int units) { return WIDTH_ == 0 && (kDense || CHUNKS % units == 0); }
  static constexpr DEVICE i64 along(int e) {
    return kDense ? e : i64(e % kSize / C) * STEP_ + e / kSize * C + e % C;
  }
  static constexpr bool splits(int by) {
    return kDense || ((by % C == 0 || C % by == 0) && (by % kSize == 0 || kSize % by == 0));
  }
};

// The same of a tile's elements in memory, behind its first unit's slice; `is_there` says whether an element is in its chunk.
template <class R, int UNITS, int BY> struct PaceOf {
  static constexpr bool kCounts = !R::kDense && UNITS == 1;  // a unit's rows, by additions
  const int chunk;
  int e, c;
  i64 offset;
  DEVICE PaceOf(int chunk, int e) : chunk(chunk), e(e), c(e % R::C), offset(0) {
    if constexpr (kCounts) offset = R::behind(chunk, e);
  }
  DEVICE i64 behind() const {
    if constexpr (R::kDense) return e;
    if constexpr (kCounts) return offset;
    return R::behind(chunk, e);
  }
  DEVICE bool is_there() const {
    if constexpr (kCounts) return R::WIDTH == 0 || chunk * R::C + c < R::WIDTH;
    return R::has(chunk, e);
  }
  DEVICE void next() {
    e += BY;
    if constexpr (kCounts) {
      c += BY % R::C, offset += i64(BY / R::C) * R::STEP + BY % R::C;
      if (BY % R::C > 0 && c >= R::C) c -= R::C, offset += R::STEP - R::C;
    }
  }
};
