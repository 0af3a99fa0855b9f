// All gradients of two untied contractions, K groups from P0 to Q0 = L * R, of which L groups take K * R = P1 to Q1: three
// passes, each of which has blocks for several products that do not depend on each other.
//   FewStates  the state between, and what is contracted over the samples, turned: h [l][p][n], x [k][p][n], g [l][q][n]
//   FewBack    the gradient of the state, by columns of the second weight, [k][q][n]
//   FewLast    the gradients of both weights, and of x, by columns of the first weight
//
// Pass:  Math, Element, K, L, R, P0, Q1, WEIGHT_0 and WEIGHT_1 (which are the weights), GRAD (parameter that grad_y is; w is
//        the next), OF_0 and OF_1 (where their gradients begin in w), WAYS, ROUNDS, TILES (of 8 samples at once), WORDS (of
//        a lane in a row, by columns), HEIGHT (of a warp's part of a weight by rows, or of a gradient, in 16 rows) and STRIPS
//        (of a gradient), MORE (tiles of a weight than blocks), MORE_TILES (of gradients than warps), blocks: TURNS, OF_X and
//        OF_W0 and OF_W1 (that turn states, make x's gradient, and those of the weights), bytes of an access to rows of the
//        weights: LOAD, LOAD_0, LOAD_1 (by columns); elements of one: to x ACROSS_X, to groups of grad_y ACROSS_G, to
//        gradients RUN_X, RUN_0, RUN_1; SHARE, as few_outer.cuh has it; SOME: samples are more than a few
#pragma once
#include "kernels/product/few_columns.cuh"
#include "kernels/product/few_outer.cuh"
#include "kernels/product/few_rows.cuh"
#include "types/params.cuh"

template <class Pass> struct FewBackward {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using Base = FewMath<Math>;
  static constexpr int K = Pass::K, L = Pass::L, R = Pass::R, P0 = Pass::P0, Q0 = L * R, P1 = K * R, Q1 = Pass::Q1;
  static constexpr int WAYS = Pass::WAYS, TILES = Pass::TILES, kThreads = WAYS * 32, kPiece = Base::kPiece, kAtOnce = TILES * 8;
  const Params& params;
  const int batch, samples;  // with padding, which is zero
  const u32 memory;
  const Element* const grad;
  DEVICE FewBackward(const Params& given)
      : params(given), batch(int(given.batch)), samples((batch + 7) / 8 * 8), memory(shared_address(shared_memory)),
        grad(static_cast<const Element*>(given.weights[Pass::GRAD])) {}
  DEVICE const Element* weight(int which) const { return static_cast<const Element*>(params.weights[which]); }
  // Samples of a block begin here, and from one turn to its next one: of more than a few, blocks along x take turns at them.
  static DEVICE int side() { return Pass::SOME ? int(blockIdx.x) : 0; }
  static DEVICE int sides() { return Pass::SOME ? int(gridDim.x) : 1; }
  static DEVICE int first() { return side() * kAtOnce; }
  static DEVICE int step() { return sides() * kAtOnce; }
  // What the first pass has made: a plan's sums are it, or, of more samples than a few, what is in the place of `other`
  static DEVICE const Element* states(const void* sums, const void* other) {
    return static_cast<const Element*>(Pass::SOME ? other : sums);
  }
  // Where states begin there
  DEVICE i64 turned_x() const { return 0; }
  DEVICE i64 turned_h() const { return i64(K) * P0 * samples; }
  DEVICE i64 turned_g() const { return turned_h() + i64(L) * P1 * samples; }
};

template <class Pass> struct FewStates : FewBackward<Pass> {
  using Base = FewBackward<Pass>;
  using Element = typename Pass::Element;
  using Base::K, Base::L, Base::R, Base::P0, Base::Q0, Base::P1, Base::Q1, Base::WAYS, Base::TILES, Base::kThreads, Base::kPiece,
      Base::kAtOnce;
  using Base::params, Base::batch, Base::samples, Base::memory, Base::grad;
  static constexpr int kRows = Pass::HEIGHT * 16, kColumnTiles = ceil_div(Q0, kRows), kAll = K * kColumnTiles;
  static constexpr int kAcross = Pass::ACROSS_G, kAcrossX = Pass::ACROSS_X;
  // What is turned at once of more samples than a few: samples of columns. In shared memory a row has a column's, of 16 bits in pairs.
  static constexpr int kSize = sizeof(Element), kPair = kSize == 2 ? 2 : 1, kWidth = 32;
  static constexpr int kTurned = 8 * WAYS * kPair < 64 ? 8 * WAYS * kPair : 64;  // whose loads of a thread are all on their way
  static constexpr int kRow = (kTurned + kPair) * kSize, kWords = kPiece / kPair;  // bytes; words of 16 bytes
  DEVICE FewStates(const Params& given) : Base(given) {}

  // Of few samples: ACROSS columns of kPiece rows that are STEP apart, of which `count` are there (or none): column c goes to
  // place(c).
  template <int ACROSS, class Place> static DEVICE void turn_piece(const Element* from, int step, int count, const Place& place) {
    using Run = Words<ACROSS * int(sizeof(Element))>;
    Run row[kPiece];
    UNROLL for (int i = 0; i < kPiece; ++i)
      row[i] = i < count ? *reinterpret_cast<const Run*>(from + i64(i) * step) : Run{};
    UNROLL for (int c = 0; c < ACROSS; ++c) {
      __align__(16) Element column[kPiece];
      UNROLL for (int i = 0; i < kPiece; ++i) column[i] = reinterpret_cast<const Element*>(&row[i])[c];
      store_words<16>(place(c), *reinterpret_cast<const Words<16>*>(column));
    }
  }
  DEVICE void turn_few(int block) const {
    const Element* x = static_cast<const Element*>(params.x);
    Element* y = static_cast<Element*>(params.y);
    constexpr int kGroups = L / kAcross;
    const int runs = samples / kPiece, of_x = K * P0 / kAcrossX * runs, all = of_x + Q1 * kGroups * runs;
    ROLL for (int unit = block * kThreads + threadIdx.x; unit < all; unit += Pass::TURNS * kThreads) {
      if (unit < of_x) {
        const int n = unit % runs * kPiece, column = unit / runs * kAcrossX;
        turn_piece<kAcrossX>(x + i64(n) * (K * P0) + column, K * P0, batch - n,
                             [&](int c) { return y + Base::turned_x() + i64(column + c) * samples + n; });
      } else {
        const int at = unit - of_x, n = at % runs * kPiece, l = at / runs % kGroups * kAcross, q = at / (runs * kGroups);
        turn_piece<kAcross>(grad + i64(n) * (Q1 * L) + q * L + l, Q1 * L, batch - n,
                            [&](int c) { return y + Base::turned_g() + (i64(l + c) * Q1 + q) * samples + n; });
      }
    }
  }

  // Of more of them, by way of shared memory: columns of `width` from `column` on and samples from n on, column c's to row(c)
  template <class Row> DEVICE void turn(const Element* from, int width, int column, int n, const Row& row) const {
    const int lane = threadIdx.x % 32, mine = column + lane;
    UNROLL_BY(8) for (int i = threadIdx.x / 32 * kPair; i < kTurned; i += WAYS * kPair) {
      __align__(8) Element run[kPair] = {};
      UNROLL for (int e = 0; e < kPair; ++e)
        if (mine < width && n + i + e < batch) run[e] = from[i64(n + i + e) * width + mine];
      store_words<kPair * kSize>(memory + lane * kRow + i * kSize, *reinterpret_cast<const Words<kPair * kSize>*>(run));
    }
    __syncthreads();
    constexpr int kRuns = kTurned / kPiece;
    ROLL for (int cell = threadIdx.x; cell < kWidth * kRuns; cell += kThreads) {
      const int c = cell / kRuns, at = cell % kRuns * kPiece;
      if (column + c >= width || n + at >= samples) continue;
      __align__(16) Words<kPair * kSize> run[kWords];
      UNROLL for (int i = 0; i < kWords; ++i)
        run[i] = load_words<kPair * kSize>(memory + c * kRow + (at + i * kPair) * kSize);
      store_words<16>(row(column + c) + n + at, *reinterpret_cast<const Words<16>*>(run));
    }
    __syncthreads();
  }
  // Every `stride`-th part of x and of grad_y, from `part` on
  DEVICE void turn_some(int part, int stride) const {
    constexpr int kOfX = ceil_div(K * P0, kWidth), kOfG = ceil_div(Q1 * L, kWidth);
    Element* y = static_cast<Element*>(params.y);
    const int all = (kOfX + kOfG) * ceil_div(samples, kTurned);
    ROLL for (; part < all; part += stride) {
      const int strip = part % (kOfX + kOfG), n = part / (kOfX + kOfG) * kTurned;
      if (strip < kOfX)
        turn(static_cast<const Element*>(params.x), K * P0, strip * kWidth, n,
             [&](int c) { return y + Base::turned_x() + i64(c) * samples; });
      else
        turn(grad, Q1 * L, (strip - kOfX) * kWidth, n,
             [&](int c) { return y + Base::turned_g() + (i64(c % L) * Q1 + c / L) * samples; });
    }
  }
  DEVICE void run() const {
    wait_for_kernel_before();
    start_next_kernel();
    if (blockIdx.y < Pass::TURNS) {
      if constexpr (Pass::SOME)
        turn_some(blockIdx.x * Pass::TURNS + blockIdx.y, gridDim.x * Pass::TURNS);
      else
        turn_few(blockIdx.y);
      return;
    }
    using Rows = FewRows<typename Pass::Math, P0, Pass::HEIGHT, TILES, WAYS, Pass::ROUNDS, Pass::LOAD, K * P0, true>;
    Rows rows(threadIdx.x / 32);
    const auto to_weight = [&](int tile) {
      const int j = tile % kColumnTiles * kRows;
      const Element* weight = Base::weight(Pass::WEIGHT_0) + i64(tile / kColumnTiles) * Q0 * P0;
      // Rows count (l, r).
      rows.to_weight([&](int i) {
        const int row = min(j + i, Q0 - 1);
        return weight + i64(row % R * L + row / R) * P0;
      });
    };
    const auto to_states = [&](int tile, int first) {
      rows.to_states(static_cast<const Element*>(params.x) + tile / kColumnTiles * P0 + i64(first) * (K * P0), batch - first);
    };
    const int tile = blockIdx.y - Pass::TURNS;
    to_weight(tile);
    few_weight(rows);
    to_states(tile, Base::first());
    few_states(rows);
    const typename Rows::Totals totals{memory};
    Element* h = static_cast<Element*>(params.y) + Base::turned_h();
    const auto store = [&](int tile, int first) {
      const int k = tile / kColumnTiles, j = tile % kColumnTiles * kRows, runs = min(samples - first, kAtOnce) / kPiece;
      ROLL for (int cell = threadIdx.x; cell < kRows * runs; cell += kThreads) {
        const int row = cell / runs, n = cell % runs * kPiece, l = (j + row) / R, r = (j + row) % R;
        if (j + row >= Q0) continue;
        Sum<Element> sums[kPiece];
        totals.sum(row, n, sums);
        UNROLL for (int i = 0; i < kPiece; ++i) sums[i] = first + n + i < batch ? sums[i] : 0;
        store_run(h + (i64(l) * P1 + k * R + r) * samples + first + n, sums);
      }
    };
    const int stride = gridDim.y - Pass::TURNS;
    few_units<Pass::MORE>(rows, tile, stride, kAll, Base::first(), Base::step(), batch, to_weight, to_states, totals, store);
  }
};

template <class Pass> struct FewBack : FewBackward<Pass> {
  using Base = FewBackward<Pass>;
  using Element = typename Pass::Element;
  using Base::K, Base::L, Base::R, Base::P0, Base::Q0, Base::P1, Base::Q1, Base::WAYS, Base::TILES, Base::kThreads, Base::kPiece,
      Base::kAtOnce;
  using Base::params, Base::batch, Base::samples, Base::memory;
  using Columns = FewColumns<typename Pass::Math, P1, Q1, Pass::WORDS, TILES, WAYS, Pass::ROUNDS, Pass::LOAD_1, true>;
  static constexpr int kTiles = ceil_div(P1, Columns::kColumns);
  DEVICE FewBack(const Params& given) : Base(given) {}
  DEVICE void run() const {
    start_next_kernel();
    Columns columns(threadIdx.x / 32, samples);
    const auto to_weight = [&](int tile) {
      columns.to_weight(Base::weight(Pass::WEIGHT_1) + i64(tile / kTiles) * Q1 * P1, tile % kTiles * Columns::kColumns);
    };
    const auto to_states = [&](int tile, int first) {
      columns.to_states(Base::states(params.sums, params.x) + Base::turned_g() + i64(tile / kTiles) * Q1 * samples, first);
    };
    const int tile = blockIdx.y;
    to_weight(tile);
    few_weight(columns);
    wait_for_kernel_before();
    to_states(tile, Base::first());
    few_states(columns);
    const typename Columns::Totals totals{memory};
    Element* to = static_cast<Element*>(params.y);
    const auto store = [&](int tile, int first) {
      const int l = tile / kTiles, p = tile % kTiles * Columns::kColumns, runs = min(samples - first, kAtOnce) / kPiece;
      ROLL for (int cell = threadIdx.x; cell < Columns::kColumns * runs; cell += kThreads) {
        const int column = cell / runs, n = cell % runs * kPiece;
        if (p + column >= P1) continue;
        const int k = (p + column) / R, q = (p + column) % R * L + l;
        Sum<Element> sums[kPiece];
        totals.sum(column, n, sums);
        UNROLL for (int i = 0; i < kPiece; ++i) sums[i] = first + n + i < batch ? sums[i] : 0;
        store_run(to + (i64(k) * Q0 + q) * samples + first + n, sums);
      }
    };
    few_units<Pass::MORE>(columns, tile, gridDim.y, L * kTiles, Base::first(), Base::step(), samples, to_weight, to_states, totals, store);
  }
};

template <class Pass> struct FewLast : FewBackward<Pass> {
  using Base = FewBackward<Pass>;
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using Base::K, Base::L, Base::R, Base::P0, Base::Q0, Base::P1, Base::Q1, Base::WAYS, Base::TILES, Base::kThreads, Base::kPiece,
      Base::kAtOnce;
  using Base::params, Base::batch, Base::samples, Base::memory;
  using Columns = FewColumns<Math, P0, Q0, Pass::WORDS, TILES, WAYS, Pass::ROUNDS, Pass::LOAD_0, false>;
  static constexpr bool kAhead = Pass::SOME || sizeof(Element) > 2;
  using Outer0 = FewOuter<Math, P0, Q0, Pass::HEIGHT, Pass::STRIPS, Pass::RUN_0, kAhead, Pass::SHARE>;
  using Outer1 = FewOuter<Math, P1, Q1, Pass::HEIGHT, Pass::STRIPS, Pass::RUN_1, kAhead, Pass::SHARE>;
  static constexpr int kTiles = ceil_div(P0, Columns::kColumns);
  DEVICE FewLast(const Params& given) : Base(given) {}
  DEVICE void of_x() const {
    Columns columns(threadIdx.x / 32, samples);
    const auto to_weight = [&](int tile) {
      columns.to_weight(Base::weight(Pass::WEIGHT_0) + i64(tile / kTiles) * Q0 * P0, tile % kTiles * Columns::kColumns);
    };
    const auto to_states = [&](int tile, int first) {
      columns.to_states(static_cast<const Element*>(params.x) + i64(tile / kTiles) * Q0 * samples, first);
    };
    const int tile = blockIdx.y;
    to_weight(tile);
    few_weight(columns);
    wait_for_kernel_before();
    start_next_kernel();
    to_states(tile, Base::first());
    few_states(columns);
    const typename Columns::Totals totals{memory};
    const auto store = [&](int tile, int first) {
      const int k = tile / kTiles, p = tile % kTiles * Columns::kColumns, present = min(batch - first, kAtOnce);
      Element* to = static_cast<Element*>(params.y) + k * P0 + p;
      constexpr int kAcross = Columns::kColumns / kPiece;
      ROLL for (int cell = threadIdx.x; cell < present * kAcross; cell += kThreads) {
        const int column = cell % kAcross * kPiece, n = cell / kAcross;
        Sum<Element> sums[kPiece];
        totals.sum(column, n, sums);
        store_runs<Pass::RUN_X>(to + i64(first + n) * (K * P0) + column, sums, P0 - p - column);
      }
    };
    few_units<Pass::MORE>(columns, tile, Pass::OF_X, K * kTiles, Base::first(), Base::step(), samples, to_weight, to_states, totals, store);
  }
  DEVICE void run() const {
    if (blockIdx.y < Pass::OF_X) return of_x();
    wait_for_kernel_before();
    start_next_kernel();
    const Element* turned = Base::states(params.sums, Base::grad);
    Element* w = static_cast<Element*>(const_cast<void*>(params.weights[Pass::GRAD + 1]));
    const int block = blockIdx.y - Pass::OF_X;
    // A block has as many tiles side by side; of more samples than a few, blocks along x take turns at tiles.
    constexpr int kSide = WAYS / Pass::SHARE;
    const int first = Base::side() * kSide, across = Base::sides() * kSide;
    if (block < Pass::OF_W1)
      Outer1(memory, samples)
          .template run<Pass::MORE_TILES>(w + Pass::OF_1, turned + Base::turned_g(), turned + Base::turned_h(), L,
                                          block * across + first, Pass::OF_W1 * across);
    else
      Outer0(memory, samples)
          .template run<Pass::MORE_TILES>(w + Pass::OF_0, static_cast<const Element*>(params.x), turned + Base::turned_x(), K,
                                          (block - Pass::OF_W1) * across + first, Pass::OF_W0 * across);
  }
};
