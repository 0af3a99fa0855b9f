// A Kronecker layer as one dense weight, for dense products: W[q, p] = sum_r prod_i Ai_r[qi, pi], where q's and p's digits, the
// last one the fastest, are those of factors i. And the gradients of all factors, from that of the dense one:
//
//   dAi_r[qi, pi] = sum over all other digits of dW[q, p] prod_(j != i) Aj_r[qj, pj]
//
// by two passes: for each column p the sums over the other digits of q, by one factor after another; then the sums of these over
// the columns that have pi. All sums are made by FMA in one order, and rounded once. Nothing here depends on samples. In half
// precision, where products may be too small or too large, the dense weight is multiplied by a power of two, which its largest
// number tells, and whoever takes the samples divides by it.
//
// Pass:  Element, Qs and Ps (the factors' sizes), R (terms); of KroneckerLargest and KroneckerWeight HEIGHT (rows of a thread); of
//        KroneckerWeight TURNED (whether the dense weight is [in][out]); in half precision SCALED and LARGEST (floats in what is
//        prepared: the power of two and what takes it back, and what each of BLOCKS blocks of KroneckerLargest has found), else
//        -1; of KroneckerColumns and KroneckerGradients COLUMNS (sums in s2 before those of columns), HEIGHT (r's of a thread),
//        and for each factor Longs (of the others the one with most q's) and Eaches (q's of that one that a thread takes); of
//        KroneckerGradients Ways (threads for a gradient)
#pragma once
#include "move/memory.cuh"
#include "types/halves.cuh"
#include "types/params.cuh"

template <int... N> struct Sizes {
  static constexpr int COUNT = sizeof...(N);
  static constexpr DEVICE int of(int i) {
    const int sizes[] = {N...};
    return sizes[i];
  }
  // What one more of digit i is worth; of one before all, how many numbers there are
  static constexpr DEVICE int step(int i) {
    int step = 1;
    for (int j = COUNT - 1; j > i; --j) step *= of(j);
    return step;
  }
};

template <class Pass> struct OfFactors {
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  using Qs = typename Pass::Qs;
  using Ps = typename Pass::Ps;
  static constexpr int K = Qs::COUNT, R = Pass::R, kIn = Ps::step(-1), kOut = Qs::step(-1), kThreads = 256, kSize = sizeof(Real);
  const Params& params;
  const int thread;
  const u32 memory;
  DEVICE OfFactors(const Params& given) : params(given), thread(threadIdx.x), memory(shared_address(shared_memory)) {}
  template <class Of, int I> static DEVICE int digit(int at) {
    constexpr int kStep = Of::step(I), kSize = Of::of(I);
    return I == 0 ? at / kStep : at / kStep % kSize;
  }
  template <int I> DEVICE Real factor(int r, int q, int p) const {
    constexpr int kQ = Qs::of(I), kP = Ps::of(I);
    return widen(static_cast<const Element*>(params.weights[I])[(r * kQ + q) * kP + p]);
  }
};

// A tile of the dense weight is 32 columns and as many rows: a warp has neighbouring columns, a thread HEIGHT rows of one.
template <class Pass> struct KroneckerTiles : OfFactors<Pass> {
  using Base = OfFactors<Pass>;
  using typename Base::Element, typename Base::Real, typename Base::Qs, typename Base::Ps;
  using Base::K, Base::R, Base::kIn, Base::kOut, Base::kThreads, Base::params, Base::thread, Base::memory;
  static constexpr int HEIGHT = Pass::HEIGHT, kWide = 32, kHigh = kThreads / kWide * HEIGHT;
  static constexpr int kAcross = ceil_div(kIn, kWide), kTiles = kAcross * ceil_div(kOut, kHigh);
  const int lane, row;  // the column, and the first of the rows
  DEVICE KroneckerTiles(const Params& given) : Base(given), lane(thread % kWide), row(thread / kWide * HEIGHT) {}
  template <int I> DEVICE Real product(int r, int q, int p) const {
    const Real x = Base::template factor<I>(r, Base::template digit<Qs, I>(q), Base::template digit<Ps, I>(p));
    if constexpr (I + 1 < K)
      return x * product<I + 1>(r, q, p);
    else
      return x;
  }
  // Of those that are not there some that are
  DEVICE void make(Real (&sums)[HEIGHT], int q, int p) const {
    UNROLL for (Real& sum : sums) sum = 0;
    UNROLL_BY(4) for (int r = 0; r < R; ++r)
      UNROLL for (int j = 0; j < HEIGHT; ++j) sums[j] += product<0>(r, min(q + j, kOut - 1), min(p, kIn - 1));
  }
};

// The largest finite number of the dense weight, by blocks.
template <class Pass> struct KroneckerLargest : KroneckerTiles<Pass> {
  using Base = KroneckerTiles<Pass>;
  using Base::kAcross, Base::kHigh, Base::kTiles, Base::kWide, Base::kThreads, Base::params, Base::thread, Base::memory;
  DEVICE KroneckerLargest(const Params& given) : Base(given) {}
  DEVICE void run() const {
    float most[1] = {};
    ROLL for (int at = blockIdx.y; at < Base::kTiles; at += gridDim.y) {
      float sums[Base::HEIGHT];
      Base::make(sums, at / kAcross * kHigh + Base::row, at % kAcross * kWide + Base::lane);
      UNROLL for (float sum : sums) most[0] = is_finite(sum) ? fmaxf(most[0], fabsf(sum)) : most[0];
    }
    most_of<32>(most);
    if (thread % 32 == 0) store_shared(memory + thread / 32 * 4, most[0]);
    __syncthreads();
    if (thread > 0) return;
    for (int warp = 1; warp < kThreads / 32; ++warp) most[0] = fmaxf(most[0], load_sum(memory + warp * 4, 0.f));
    store_global(static_cast<float*>(params.y) + Pass::LARGEST + blockIdx.y, most[0]);
  }
};

// Turned, a tile leaves by shared memory, so that neighbouring threads store neighbouring rows.
template <class Pass> struct KroneckerWeight : KroneckerTiles<Pass> {
  using Base = KroneckerTiles<Pass>;
  using typename Base::Element, typename Base::Real;
  using Base::HEIGHT, Base::kIn, Base::kOut, Base::kAcross, Base::kHigh, Base::kTiles, Base::kWide, Base::kThreads;
  using Base::lane, Base::memory, Base::params, Base::row, Base::thread;
  static constexpr int kBytes = sizeof(Element);
  static constexpr int kLine = kHigh * kBytes + (kBytes < 4 ? 4 : kBytes);  // bytes: columns begin in different banks
  DEVICE KroneckerWeight(const Params& given) : Base(given) {}

  // What the dense weight is multiplied by
  DEVICE Real scale() const {
    if constexpr (Pass::LARGEST >= 0) {
      static_assert(Pass::BLOCKS <= kThreads);
      float most[1] = {thread < Pass::BLOCKS ? static_cast<const float*>(params.sums)[Pass::LARGEST + thread] : 0.f};
      most_of<32>(most);
      if (thread % 32 == 0) store_shared(memory + thread / 32 * 4, most[0]);
      __syncthreads();
      UNROLL for (int warp = 0; warp < kThreads / 32; ++warp) most[0] = fmaxf(most[0], load_sum(memory + warp * 4, 0.f));
      __syncthreads();
      const Scale found(most[0]);
      float* to = static_cast<float*>(params.y) + Pass::SCALED;
      if (blockIdx.y == 0 && thread == 0) store_global(to, found.there), store_global(to + 1, found.back);
      return found.there;
    }
    return 1;
  }
  DEVICE void tile(int q, int p, Real scale) const {
    Real sums[HEIGHT];
    Base::make(sums, q + row, p + lane);
    Element* y = static_cast<Element*>(params.y);
    UNROLL for (int j = 0; j < HEIGHT; ++j) {
      const Element made = narrow<Element>(Pass::LARGEST >= 0 ? sums[j] * scale : sums[j]);
      if constexpr (Pass::TURNED)
        store_shared(memory + lane * kLine + (row + j) * kBytes, made);
      else if (q + row + j < kOut && p + lane < kIn)
        store_global(y + i64(q + row + j) * kIn + p + lane, made);
    }
    if constexpr (Pass::TURNED) {
      __syncthreads();
      UNROLL for (int i = thread; i < kWide * kHigh; i += kThreads) {
        const int column = i / kHigh, at = i % kHigh;
        if (p + column < kIn && q + at < kOut)
          store_words<kBytes>(y + i64(p + column) * kOut + q + at, load_words<kBytes>(memory + column * kLine + at * kBytes));
      }
      __syncthreads();
    }
  }
  DEVICE void run() const {
    const Real scale = this->scale();
    ROLL for (int at = blockIdx.y; at < kTiles; at += gridDim.y) tile(at / kAcross * kHigh, at % kAcross * kWide, scale);
  }
};

// What both passes of gradients know of the sums of columns: those of factor i are [part, r, qi, p], where a part is of the q's
// of the longest other factor.
template <class Pass> struct OfColumns : OfFactors<Pass> {
  using Base = OfFactors<Pass>;
  using typename Base::Qs, typename Base::Ps;
  using Base::R, Base::kIn;
  static constexpr DEVICE int parts(int i) { return ceil_div(Qs::of(Pass::Longs::of(i)), Pass::Eaches::of(i)); }
  static constexpr DEVICE i64 begin(int i) {
    i64 begin = Pass::COLUMNS;
    for (int j = 0; j < i; ++j) begin += i64(parts(j)) * R * Qs::of(j) * kIn;
    return begin;
  }
  DEVICE OfColumns(const Params& given) : Base(given) {}

  // A kernel's blocks one factor behind the other: each is kernel.of<I>(its number among those of factor I).
  template <class Kernel, int I = 0> static DEVICE void of_any(const Kernel& kernel, int block) {
    if constexpr (I < Base::K) {
      if (block < Kernel::blocks(I))
        kernel.template of<I>(block);
      else
        of_any<Kernel, I + 1>(kernel, block - Kernel::blocks(I));
    }
  }
  template <class Kernel> static constexpr DEVICE int all() {
    int all = 0;
    for (int i = 0; i < Base::K; ++i) all += Kernel::blocks(i);
    return all;
  }
  template <class Kernel> static DEVICE void of_all(const Kernel& kernel) {
    ROLL for (int at = blockIdx.y; at < all<Kernel>(); at += gridDim.y) of_any(kernel, at);
  }
};

// Of dW, [out][in], as sums: a block has neighbouring columns, for HEIGHT r's of some q's of a factor.
template <class Pass> struct KroneckerColumns : OfColumns<Pass> {
  using Base = OfColumns<Pass>;
  using typename Base::Real, typename Base::Qs, typename Base::Ps;
  using Base::K, Base::R, Base::kIn, Base::kThreads, Base::params, Base::thread;
  static constexpr int HEIGHT = Pass::HEIGHT, kTilesR = ceil_div(R, HEIGHT);
  static constexpr DEVICE int across(int i) { return ceil_div(Qs::of(i) * kIn, kThreads); }
  static constexpr DEVICE int blocks(int i) { return across(i) * Base::parts(i) * kTilesR; }
  DEVICE KroneckerColumns(const Params& given) : Base(given) {}

  static constexpr DEVICE bool is_other(int i, int j) { return j != i && j != Pass::Longs::of(i); }
  // Of factor i all others but the longest one together: how many q's they have from j on
  static constexpr DEVICE int others(int i, int j) {
    int others = 1;
    for (; j < K; ++j) others *= is_other(i, j) ? Qs::of(j) : 1;
    return others;
  }
  // The q of one of them in their `at`-th q, the rows before that of all of them, and their product
  template <int I, int J> static DEVICE int other_q(int at) { return at / others(I, J + 1) % Qs::of(J); }
  template <int I, int J> static DEVICE int row(int at) {
    if constexpr (J == K)
      return 0;
    else
      return row<I, J + 1>(at) + (is_other(I, J) ? other_q<I, J>(at) * Qs::step(J) : 0);
  }
  template <int I, int J> DEVICE Real product(int r, int at, int column) const {
    if constexpr (J == K)
      return 1;
    else if constexpr (is_other(I, J))
      return Base::template factor<J>(r, other_q<I, J>(at), Base::template digit<Ps, J>(column)) * product<I, J + 1>(r, at, column);
    else
      return product<I, J + 1>(r, at, column);
  }
  // sums[j] of term r + j, of factor I: of the longest other one the q's from `from` on, innermost
  template <int I> DEVICE void add(Real (&sums)[HEIGHT], int q, int column, int r, int from) const {
    constexpr int kLong = Pass::Longs::of(I), kEach = Pass::Eaches::of(I), kStep = Qs::step(kLong), kOthers = others(I, 0);
    constexpr int kTogether = kEach <= 16 ? kEach : 8, kOuter = kEach <= 16 ? 16 / kEach : 1;
    const int p = Base::template digit<Ps, kLong>(column), to = min(from + kEach, Qs::of(kLong));
    UNROLL_BY(kOuter) for (int at = 0; at < kOthers; ++at) {
      const Real* gradient = static_cast<const Real*>(params.x) + i64(q * Qs::step(I) + row<I, 0>(at)) * kIn + column;
      Real inner[HEIGHT] = {};
      UNROLL_BY(kTogether) for (int of_long = from; of_long < to; ++of_long) {
        const Real g = gradient[i64(of_long) * (kStep * kIn)];
        UNROLL for (int j = 0; j < HEIGHT; ++j) inner[j] += g * Base::template factor<kLong>(min(r + j, R - 1), of_long, p);
      }
      UNROLL for (int j = 0; j < HEIGHT; ++j) sums[j] += inner[j] * product<I, 0>(min(r + j, R - 1), at, column);
    }
  }
  template <int I> DEVICE void of(int block) const {
    constexpr int kAcross = across(I), kParts = Base::parts(I), kQ = Qs::of(I);
    const int item = block % kAcross * kThreads + thread, part = block / kAcross % kParts, r = block / (kAcross * kParts) * HEIGHT;
    if (item >= kQ * kIn) return;
    Real sums[HEIGHT] = {};
    add<I>(sums, item / kIn, item % kIn, r, part * Pass::Eaches::of(I));
    Real* to = static_cast<Real*>(params.y) + Base::begin(I) + item;
    UNROLL for (int j = 0; j < HEIGHT; ++j)
      if (r + j < R) store_global(to + i64(part * R + r + j) * (kQ * kIn), sums[j]);
  }
  DEVICE void run() const { Base::of_all(*this); }
};

// Of sums of columns: some neighbouring threads add up those of a gradient, each its own, then each other's, by halves.
template <class Pass> struct KroneckerGradients : OfColumns<Pass> {
  using Base = OfColumns<Pass>;
  using typename Base::Element, typename Base::Real, typename Base::Qs, typename Base::Ps;
  using Base::K, Base::R, Base::kIn, Base::kSize, Base::kThreads, Base::memory, Base::params, Base::thread;
  static constexpr DEVICE int count(int i) { return R * Qs::of(i) * Ps::of(i); }
  static constexpr DEVICE int blocks(int i) { return ceil_div(count(i), kThreads / Pass::Ways::of(i)); }
  static constexpr DEVICE i64 before(int i) {
    i64 before = 0;
    for (int j = 0; j < i; ++j) before += count(j);
    return before;
  }
  DEVICE KroneckerGradients(const Params& given) : Base(given) {}

  template <int I> DEVICE void of(int block) const {
    constexpr int kWays = Pass::Ways::of(I), kP = Ps::of(I), kStep = Ps::step(I), kColumns = kIn / kP;
    constexpr int kRows = R * Qs::of(I), kAll = Base::parts(I) * kColumns;
    const int at = block * (kThreads / kWays) + thread / kWays, way = thread % kWays, row = at / kP, p = at % kP;
    const Real* from = static_cast<const Real*>(params.x) + Base::begin(I);
    Real sum = 0;
    if (at < count(I)) {
      UNROLL_BY(8) for (int i = way; i < kAll; i += kWays) {
        const int part = i / kColumns, column = i % kColumns;
        sum += from[i64(part * kRows + row) * kIn + (column / kStep * kP + p) * kStep + column % kStep];
      }
    }
    if constexpr (kWays > 1) {
      const u32 mine = memory + thread * kSize;
      store_shared(mine, sum);
      UNROLL for (int by = kWays / 2; by > 0; by /= 2) {
        __syncthreads();
        if (way < by) store_shared(mine, sum += load_sum(mine + by * kSize, Real(0)));
      }
      __syncthreads();
    }
    if (way == 0 && at < count(I)) store_global(static_cast<Element*>(params.y) + before(I) + at, narrow<Element>(sum));
  }
  DEVICE void run() const { Base::of_all(*this); }
};
