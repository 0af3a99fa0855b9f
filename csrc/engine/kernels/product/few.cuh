// Untied contractions of few samples, which take as long as it takes to ask memory for a weight: all that a thread
// reads of one is on its way to registers at once, by the widest accesses that rows allow, before it waits for the kernel
// that makes the states. Warps of a group share what is contracted, and add up their sums in shared memory, in order.
//
// A weight is the left operand, read as it lies. By rows, Y[q, n] = sum_p W[q, p] X[p, n], a lane's piece of 16 bytes has the
// p's that are its own in two steps of the matrix unit (of doubles: in one): which p is which k is free, if X's pieces are
// read alike. By columns,
// Y[p, n] = sum_q W[q, p] X[q, n], a lane's pieces lie in the rows q that are its own, and the p's of a piece are rows of as
// many tiles. So are those of dW[q, p] = sum_n G[q, n] X[p, n], a row of 64 bytes from four lanes.
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"

// Operands made of words, and their products
template <class Math> struct FewMath {
  using Element = typename Math::Element;
  using Word = typename WordOf<Element>::type;
  using Total = Sum<Element>;
  static constexpr int kSize = sizeof(Element), kPiece = 16 / kSize, kChunk = 4 * kPiece;  // elements: of a lane, of four
  static constexpr int kWords = 16 / int(sizeof(Word)), kSteps = kWords / 2;               // of a piece
  static constexpr int kStepOfLane = kPiece / kSteps;                                      // elements of a lane in one step
  using A = typename Math::A;
  using B = typename Math::B;
  struct Sums { Total sum[4] = {}, low[4] = {}; };
  static DEVICE A left(Word x0, Word x1, Word x2, Word x3) { return operand<A>({x0, x1, x2, x3}); }
  static DEVICE B right(Word x0, Word x1) { return operand<B>({x0, x1}); }
  template <class Operand, int N> static DEVICE Operand operand(const Word (&x)[N]) {
    Operand made;
    UNROLL for (int i = 0; i < N; ++i) Math::template put<true>(made, i, x[i]);
    return made;
  }
  // float: the products of high parts of two steps start from zero; the others, which infinities make NaN, do not count then.
  template <int STEPS> static DEVICE void multiply(Sums& y, const A (&a)[STEPS], const B (&b)[STEPS]) {
    if constexpr (Math::kRepairs) {
      float high[4] = {};
      UNROLL for (int s = 0; s < STEPS; ++s) Math::multiply_apart(high, y.low, a[s], b[s]);
      add_sums(y.sum, high);
    } else {
      UNROLL for (int s = 0; s < STEPS; ++s) Math::template multiply<Math::kStep>(y.sum, a[s], b[s]);
    }
  }
  static DEVICE Total total(const Sums& y, int i) {
    if constexpr (Math::kRepairs) return y.sum[i] + or_zero(y.low[i]);
    return y.sum[i];
  }
  // Words of a piece that begins at element `from`, without what lies behind LENGTH
  template <int LENGTH> static DEVICE void cut(u32 (&x)[4], int from) {
    if constexpr (LENGTH % kPiece) {
      UNROLL for (int i = 0; i < 4; ++i) {
        const int first = from + i * 4 / kSize;
        if (first >= LENGTH) x[i] = 0;
        else if (kSize == 2 && first + 1 >= LENGTH) x[i] &= 0xffff;
      }
    }
  }
};

// What a lane has asked memory for of a row, BYTES by accesses of LOAD. Elements of 2 bytes that come one by one have a register
// each until they are used.
template <class Math, int LOAD, int BYTES = 16> struct FewPiece {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kEach = LOAD / Base::kSize, kAccesses = BYTES / LOAD, kOfOne = LOAD < 4 ? 1 : LOAD / 4;  // registers
  u32 of[kAccesses][kOfOne];
  // `left` elements are there from `from` on, none if that is not positive. MADE by a kernel that had not ended when this one started.
  template <bool MADE> DEVICE void ask(const Element* from, int left) {
    UNROLL for (int i = 0; i < kAccesses; ++i) {
      if constexpr (MADE)
        load_made<LOAD>(from + i * kEach, of[i], i * kEach < left);
      else
        load_global<LOAD>(from + i * kEach, of[i], i * kEach < left);
    }
  }
  DEVICE typename Base::Word word(int i) const {
    const u32* all = &of[0][0];
    if constexpr (Base::kSize == 8)
      return double_of(all[i * 2], all[i * 2 + 1]);
    else if constexpr (LOAD < 4)
      return all[i * 2] | all[i * 2 + 1] << 16;
    else
      return all[i];
  }
};

// What warps have summed, in shared memory: for each of WAYS warps ROWS rows of 16 samples.
template <class Total, int ROWS, int WAYS> struct FewTotals {
  static constexpr int kStride = 18, kSize = sizeof(Total), kWarp = ROWS * kStride * kSize, kBytes = WAYS * kWarp;
  u32 memory;
  DEVICE void put(int way, int row, int sample, Total x, Total y) const {
    store_shared(memory + way * kWarp + (row * kStride + sample) * kSize, Pair<Total>(x, y));
  }
  DEVICE Total at(int row, int sample) const {
    Total sum = 0;
    UNROLL for (int way = 0; way < WAYS; ++way)
      sum += load_sum(memory + way * kWarp + (row * kStride + sample) * kSize, sum);
    return sum;
  }
};

// COUNT neighbours of a result, by one access.
template <class Element, int COUNT> DEVICE void store_few(Element* to, const Sum<Element> (&x)[COUNT]) {
  if constexpr (COUNT == 1) {
    store_global(to, narrow<Element>(x[0]));
  } else if constexpr (sizeof(Element) == 8) {
    const Pair<double> both(x[0], x[1]);
    store_words<16>(to, *reinterpret_cast<const Words<16>*>(&both));
  } else {
    constexpr int kBytes = COUNT * sizeof(Element);
    u32 words[kBytes / 4];
    UNROLL for (int i = 0; i < kBytes / 4; ++i) {
      if constexpr (sizeof(Element) == 2)
        words[i] = Pair<Element>(x[i * 2], x[i * 2 + 1]).bits;
      else
        words[i] = __float_as_uint(x[i]);
    }
    store_global<kBytes>(to, words);
  }
}
// COUNT of them by accesses of RUN; `left` are there, a multiple of RUN.
template <int RUN, class Element, int COUNT> DEVICE void store_few(Element* to, const Sum<Element> (&x)[COUNT], int left) {
  UNROLL for (int first = 0; first < COUNT; first += RUN) {
    Sum<Element> run[RUN];
    UNROLL for (int i = 0; i < RUN; ++i) run[i] = x[first + i];
    if (first < left) store_few(to + first, run);
  }
}

// HEIGHT times 16 rows of a weight, [.., P], times 16 samples at a time; one of WAYS warps has every WAYS-th chunk of p's, a
// ROUNDS-th of these at once in registers. Rows come by accesses of LOAD_W and LOAD_X bytes.
template <class Math, int P, int HEIGHT, int WAYS, int ROUNDS, int LOAD_W, int LOAD_X> struct FewRows : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kPiece = Base::kPiece, kChunk = Base::kChunk;
  static constexpr int kMine = ceil_div(ceil_div(ceil_div(P, kChunk), WAYS), ROUNDS);
  using Sums = typename Base::Sums[HEIGHT][2];
  using Totals = FewTotals<typename Base::Total, HEIGHT * 16, WAYS>;
  const int way;
  const Lane lane;
  FewPiece<Math, LOAD_W> weight[kMine][HEIGHT * 2];
  DEVICE FewRows(int way) : way(way) {}
  DEVICE int first(int i, int round) const { return ((round * kMine + i) * WAYS + way) * kChunk + lane.t * kPiece; }
  // row(i) is where one begins, null where there is none.
  template <class Row> DEVICE void fetch(const Row& row, int round = 0) {
    const Element* from[HEIGHT * 2];
    UNROLL for (int h = 0; h < HEIGHT * 2; ++h) from[h] = row(h * 8 + lane.g);
    UNROLL for (int i = 0; i < kMine; ++i)
      UNROLL for (int h = 0; h < HEIGHT * 2; ++h)
        weight[i][h].template ask<false>(from[h] + first(i, round), from[h] ? P - first(i, round) : 0);
  }
  // row(n) is where sample n's p's begin, null where there is none.
  template <class Row> DEVICE void add(Sums& y, const Row& row, int round = 0) const {
    const Element* from[2] = {row(lane.g), row(lane.g + 8)};
    FewPiece<Math, LOAD_X> x[kMine][2];
    UNROLL for (int i = 0; i < kMine; ++i)
      UNROLL for (int n = 0; n < 2; ++n)
        x[i][n].template ask<true>(from[n] + first(i, round), from[n] ? P - first(i, round) : 0);
    UNROLL for (int i = 0; i < kMine; ++i)
      UNROLL for (int n = 0; n < 2; ++n) {
        typename Base::B b[Base::kSteps];
        UNROLL for (int s = 0; s < Base::kSteps; ++s) b[s] = Base::right(x[i][n].word(s * 2), x[i][n].word(s * 2 + 1));
        UNROLL for (int h = 0; h < HEIGHT; ++h) {
          const auto &u = weight[i][h * 2], &l = weight[i][h * 2 + 1];
          typename Base::A a[Base::kSteps];
          UNROLL for (int s = 0; s < Base::kSteps; ++s)
            a[s] = Base::left(u.word(s * 2), l.word(s * 2), u.word(s * 2 + 1), l.word(s * 2 + 1));
          Base::multiply(y[h][n], a, b);
        }
      }
  }
  // All of what has been fetched of rounds, the first of which there is already; the first again, if there are `more` samples.
  template <class Weight, class Row> DEVICE void sum(Sums& y, const Weight& weight, const Row& row, bool more) {
    ROLL for (int round = 0; round < ROUNDS; ++round) {
      add(y, row, round);
      if constexpr (ROUNDS > 1) {
        const bool last = round + 1 == ROUNDS;
        if (!last || more) fetch(weight, last ? 0 : round + 1);
      }
    }
  }
  DEVICE void put(const Totals& totals, const Sums& y) const {
    UNROLL for (int n = 0; n < 2; ++n)
      UNROLL for (int h = 0; h < HEIGHT * 2; ++h)
        totals.put(way, h * 8 + lane.g, n * 8 + lane.t * 2, Base::total(y[h / 2][n], h % 2 * 2),
                   Base::total(y[h / 2][n], h % 2 * 2 + 1));
  }
};

// Columns of a weight, [Q, P], 8 * kEach of them, times 16 samples at a time: WORDS of a lane in each of its rows, by accesses of
// LOAD bytes, a ROUNDS-th at once in registers.
template <class Math, int P, int Q, int WORDS, int WAYS, int ROUNDS, int LOAD> struct FewColumns : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  using Piece = FewPiece<Math, LOAD, WORDS * 4>;
  static constexpr int kSize = Base::kSize, kPiece = Base::kPiece, kChunk = Base::kChunk;
  static constexpr int kEach = WORDS * 4 / kSize, kTiles = kEach / 2, kColumns = 8 * kEach;
  static constexpr int kMine = ceil_div(ceil_div(ceil_div(Q, kChunk), WAYS), ROUNDS), kRow = round_up(Q, kPiece);
  using Sums = typename Base::Sums[kTiles][2];
  using Totals = FewTotals<typename Base::Total, kColumns, WAYS>;
  const int way;
  const Lane lane;
  Piece weight[kMine][kPiece];
  DEVICE FewColumns(int way) : way(way) {}
  DEVICE int first(int i, int round) const { return ((round * kMine + i) * WAYS + way) * kChunk + lane.t * kPiece; }
  DEVICE void fetch(const Element* group, int column, int round = 0) {
    const int p = column + lane.g * kEach;
    UNROLL for (int i = 0; i < kMine; ++i)
      UNROLL for (int r = 0; r < kPiece; ++r) {
        const int q = first(i, round) + r;
        weight[i][r].template ask<false>(group + i64(q) * P + p, q < Q ? P - p : 0);
      }
  }
  // The left operand of step s: rows of tile m are p's 2m and 2m + 1 of each lane's piece.
  DEVICE typename Base::A left(int i, int s, int m) const {
    if constexpr (kSize >= 4) {
      const auto &w = weight[i][s * 2], &v = weight[i][s * 2 + 1];
      return Base::left(w.word(m * 2), w.word(m * 2 + 1), v.word(m * 2), v.word(m * 2 + 1));
    } else {
      const u32 w0 = weight[i][s * 4].word(m), w1 = weight[i][s * 4 + 1].word(m);
      const u32 w2 = weight[i][s * 4 + 2].word(m), w3 = weight[i][s * 4 + 3].word(m);
      return Base::left((w0 & 0xffff) | w1 << 16, w0 >> 16 | (w1 & 0xffff0000), (w2 & 0xffff) | w3 << 16,
                        w2 >> 16 | (w3 & 0xffff0000));
    }
  }
  // row(n) is where sample n's q's begin, kRow of them in memory; null where there is none.
  template <class Row> DEVICE void add(Sums& y, const Row& row, int round) const {
    const Element* from[2] = {row(lane.g), row(lane.g + 8)};
    FewPiece<Math, 16> x[kMine][2];
    UNROLL for (int i = 0; i < kMine; ++i)
      UNROLL for (int n = 0; n < 2; ++n) {
        x[i][n].template ask<true>(from[n] + first(i, round), from[n] ? Q - first(i, round) : 0);
        Base::template cut<Q>(x[i][n].of[0], first(i, round));
      }
    UNROLL for (int i = 0; i < kMine; ++i)
      UNROLL for (int m = 0; m < kTiles; ++m) {
        typename Base::A a[Base::kSteps];
        UNROLL for (int s = 0; s < Base::kSteps; ++s) a[s] = left(i, s, m);
        UNROLL for (int n = 0; n < 2; ++n) {
          typename Base::B b[Base::kSteps];
          UNROLL for (int s = 0; s < Base::kSteps; ++s)
            b[s] = Base::right(x[i][n].word(s * 2), x[i][n].word(s * 2 + 1));
          Base::multiply(y[m][n], a, b);
        }
      }
  }
  // As FewRows has it
  template <class Row> DEVICE void sum(Sums& y, const Element* group, int column, const Row& row, bool more) {
    ROLL for (int round = 0; round < ROUNDS; ++round) {
      add(y, row, round);
      if constexpr (ROUNDS > 1) {
        const bool last = round + 1 == ROUNDS;
        if (!last || more) fetch(group, column, last ? 0 : round + 1);
      }
    }
  }
  DEVICE void put(const Totals& totals, const Sums& y) const {
    UNROLL for (int m = 0; m < kTiles; ++m)
      UNROLL for (int n = 0; n < 2; ++n)
        UNROLL for (int h = 0; h < 2; ++h)
          totals.put(way, lane.g * kEach + m * 2 + h, n * 8 + lane.t * 2, Base::total(y[m][n], h * 2),
                     Base::total(y[m][n], h * 2 + 1));
  }
};

// A warp's HEIGHT times 16 rows and STRIPS * kChunk columns of a weight's gradient, stored by runs of RUN, from states that have
// `samples` side by side, a multiple of 8 of them: G [Q][samples] and X [P][samples].
template <class Math, int P, int Q, int HEIGHT, int STRIPS, int RUN> struct FewOuter : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kPiece = Base::kPiece, kLane = Base::kStepOfLane, kStep = 4 * kLane, kTiles = kPiece / 2;
  static constexpr int kAtOnce = 16 / kStep, kRows = HEIGHT * 16, kBytes = kLane * Base::kSize;  // steps; bytes of an access
  static constexpr int kColumns = STRIPS * Base::kChunk;
  using Piece = FewPiece<Math, kBytes, kBytes>;
  static DEVICE void run(Element* to, const Element* g, const Element* x, int samples, int q, int p) {
    const Lane lane;
    typename Base::Sums y[HEIGHT][STRIPS][kTiles];
    ROLL for (int n = lane.t * kLane; n - lane.t * kLane < samples; n += kAtOnce * kStep) {
      Piece of_g[kAtOnce][HEIGHT * 2], of_x[kAtOnce][STRIPS][kTiles];
      UNROLL for (int s = 0; s < kAtOnce; ++s) {
        const int left = samples - n - s * kStep;
        UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
          const int row = q + lane.g + h * 8;
          of_g[s][h].template ask<true>(g + i64(row) * samples + n + s * kStep, row < Q ? left : 0);
        }
        UNROLL for (int strip = 0; strip < STRIPS; ++strip)
          UNROLL for (int j = 0; j < kTiles; ++j) {
            const int column = p + strip * Base::kChunk + lane.g / 2 * kPiece + j * 2 + lane.g % 2;
            of_x[s][strip][j].template ask<true>(x + i64(column) * samples + n + s * kStep, column < P ? left : 0);
          }
      }
      typename Base::A a[HEIGHT][kAtOnce];
      UNROLL for (int h = 0; h < HEIGHT; ++h)
        UNROLL for (int s = 0; s < kAtOnce; ++s) {
          const auto &u = of_g[s][h * 2], &l = of_g[s][h * 2 + 1];
          a[h][s] = Base::left(u.word(0), l.word(0), u.word(1), l.word(1));
        }
      UNROLL for (int strip = 0; strip < STRIPS; ++strip)
        UNROLL for (int j = 0; j < kTiles; ++j) {
          typename Base::B b[kAtOnce];
          UNROLL for (int s = 0; s < kAtOnce; ++s)
            b[s] = Base::right(of_x[s][strip][j].word(0), of_x[s][strip][j].word(1));
          UNROLL for (int h = 0; h < HEIGHT; ++h) Base::multiply(y[h][strip][j], a[h], b);
        }
    }
    UNROLL for (int strip = 0; strip < STRIPS; ++strip)
      UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
        const int row = q + lane.g + h * 8, column = p + strip * Base::kChunk + lane.t * kPiece;
        typename Base::Total sums[kPiece];
        UNROLL for (int i = 0; i < kPiece; ++i) sums[i] = Base::total(y[h / 2][strip][i / 2], h % 2 * 2 + i % 2);
        store_few<RUN>(to + i64(row) * P + column, sums, row < Q ? P - column : 0);
      }
  }
};

// A pass of one contraction by rows. y: [sample][group / FAST][a][group % FAST][b], as in streamed.cuh; a block has HEIGHT
// times 16 columns a * B + b of WG groups, each group WAYS warps, and stores runs of RUN elements: groups, or b's. Where there
// are more samples than a few, blocks along x of the grid take turns at 16 of them.
//
// Pass:  Math, Element, Activation, BIAS, WEIGHT, P, Q, GROUPS, FAST, NEXT, B, STEP_A, STEP_B, X_SAMPLE, Y_SAMPLE, WG, WAYS,
//        HEIGHT, ROUNDS, LOAD, RUN, ROUND_Y, FIRST (of its plan's passes), LAST
template <class Pass> struct Few {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  static constexpr int P = Pass::P, Q = Pass::Q, FAST = Pass::FAST, B = Pass::B, ROUNDS = Pass::ROUNDS;
  static constexpr int WG = Pass::WG, WAYS = Pass::WAYS, RUN = Pass::RUN;
  static constexpr int kThreads = WG * WAYS * 32, kRows = Pass::HEIGHT * 16;
  static constexpr int kColumnTiles = ceil_div(Q, kRows), kGroupTiles = ceil_div(FAST, WG);
  static_assert((WG == 1 ? B : WG) % RUN == 0 && FAST * B % RUN == 0 && (WG == 1 || B == 1) && 16 % RUN == 0);
  using Rows = FewRows<Math, P, Pass::HEIGHT, WAYS, ROUNDS, Pass::LOAD, Pass::LOAD>;
  using Totals = typename Rows::Totals;
  const Params& params;
  DEVICE Few(const Params& given) : params(given) {}

  // As in streamed.cuh: the weight of a group, its row for a column, and a result's feature
  static DEVICE int weight_of(int slow, int fast) {
    return (slow * Pass::NEXT + fast % Pass::NEXT) * (FAST / Pass::NEXT) + fast / Pass::NEXT;
  }
  static DEVICE int weight_row(int j) { return j % B * Pass::STEP_B + j / B * Pass::STEP_A; }
  static DEVICE i64 feature(int slow, int fast, int j) {
    return i64(slow) * FAST * Q + (i64(j / B) * FAST + fast) * B + j % B;
  }

  DEVICE void run() const {
    if constexpr (Pass::FIRST) wait_for_kernel_before();
    if constexpr (!Pass::LAST) start_next_kernel();
    const int warp = threadIdx.x / 32, part = warp / WAYS, tile = blockIdx.y;
    const int q = tile % kColumnTiles * kRows, fast = tile / kColumnTiles % kGroupTiles * WG;
    const int slow = tile / (kColumnTiles * kGroupTiles);
    const bool here = FAST % WG == 0 || fast + part < FAST;  // this warp's group
    const int group = here ? weight_of(slow, fast + part) : 0;
    const Element* weight = static_cast<const Element*>(params.weights[Pass::WEIGHT]) + i64(group) * Q * P;
    Rows rows(warp % WAYS);
    const auto row = [&](int i) { return here && q + i < Q ? weight + i64(weight_row(q + i)) * P : nullptr; };
    rows.fetch(row);
    const typename Pass::Activation activation(params);
    if constexpr (!Pass::FIRST) wait_for_kernel_before();
    if constexpr (Pass::LAST) start_next_kernel();

    const Totals totals{shared_address(shared_memory)};
    const Element* x = static_cast<const Element*>(params.x) + i64(group) * P;
    const i64 step = i64(gridDim.x) * 16;
    ROLL for (i64 first = i64(blockIdx.x) * 16; first < params.batch; first += step) {
      const int present = params.batch - first < 16 ? int(params.batch - first) : 16;
      const auto sample = [&](int n) { return here && n < present ? x + (first + n) * Pass::X_SAMPLE : nullptr; };
      typename Rows::Sums y;
      rows.sum(y, row, sample, first + step < params.batch);
      if (first >= step) __syncthreads();
      rows.put({totals.memory + part * Totals::kBytes}, y);
      __syncthreads();
      constexpr int kAcross = kRows * WG / RUN;
      ROLL for (int cell = threadIdx.x; cell < 16 * kAcross; cell += kThreads) {
        const int n = cell / kAcross, e = cell % kAcross * RUN, g = e % WG, j = e / WG;
        if (n >= present || q + j >= Q || (FAST % WG && fast + g >= FAST)) continue;
        const i64 at = feature(slow, fast + g, q + j);
        Sum<Element> sums[RUN];
        UNROLL for (int i = 0; i < RUN; ++i) {
          const int behind = WG == 1 ? 0 : i;
          auto sum = Totals{totals.memory + (g + behind) * Totals::kBytes}.at(j + i - behind, n);
          if constexpr (Pass::BIAS) sum += widen(static_cast<const Element*>(params.bias)[at + i]);
          sum = activation.of(sum);
          sums[i] = Pass::ROUND_Y ? Math::rounded(sum) : sum;
        }
        store_few(static_cast<Element*>(params.y) + (first + n) * Pass::Y_SAMPLE + at, sums);
      }
    }
  }
};

// All gradients of two untied contractions, K groups from P0 to Q0 = L * R, of which L groups take K * R = P1 to Q1: three
// passes, each of which has blocks for several products that do not depend on each other.
//   FewStates  the state between, and what is contracted over the samples, turned: h [l][p][n], x [k][p][n], g [l][q][n], and g
//              with q's side by side, [l][n][q]
//   FewBack    the gradient of the state, by columns of the second weight, as [k][q][n] and [k][n][q]
//   FewLast    the gradients of both weights, and of x, by columns of the first weight
//
// Pass:  Math, Element, K, L, R, P0, Q1, WEIGHT_0 and WEIGHT_1 (which are the weights), GRAD (parameter that grad_y is; w is
//        the next), OF_0 and OF_1 (where their gradients begin in w), WAYS, ROUNDS, WORDS (of a lane in a row, by columns), TALL
//        and STRIPS (of a warp's part of a gradient), TURNS (blocks), bytes of an access to rows of the weights: LOAD, LOAD_0, LOAD_1 (by
//        columns); elements of one: to x ACROSS_X, to groups of grad_y ACROSS_G, to gradients RUN_X, RUN_0, RUN_1
template <class Pass> struct FewBackward {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using Base = FewMath<Math>;
  static constexpr int K = Pass::K, L = Pass::L, R = Pass::R, P0 = Pass::P0, Q0 = L * R, P1 = K * R, Q1 = Pass::Q1;
  static constexpr int WAYS = Pass::WAYS, kThreads = WAYS * 32, kPiece = Base::kPiece;
  static constexpr int kRow0 = round_up(Q0, kPiece), kRow1 = round_up(Q1, kPiece);  // in memory, of q's side by side
  const Params& params;
  const int batch, samples;  // with padding, which is zero
  const u32 memory;
  const Element* const grad;
  DEVICE FewBackward(const Params& given)
      : params(given), batch(int(given.batch)), samples((batch + 7) / 8 * 8), memory(shared_address(shared_memory)),
        grad(static_cast<const Element*>(given.weights[Pass::GRAD])) {}
  DEVICE const Element* weight(int which) const { return static_cast<const Element*>(params.weights[which]); }
  // Where states begin: of the first pass's result, and of the second one's
  DEVICE i64 turned_x() const { return 0; }
  DEVICE i64 turned_h() const { return i64(K) * P0 * samples; }
  DEVICE i64 turned_g() const { return turned_h() + i64(L) * P1 * samples; }
  DEVICE i64 rows_of_g() const { return turned_g() + i64(L) * Q1 * samples; }
  DEVICE i64 rows_of_gh() const { return i64(K) * Q0 * samples; }
};

template <class Pass> struct FewStates : FewBackward<Pass> {
  using Base = FewBackward<Pass>;
  using Element = typename Pass::Element;
  using Base::K, Base::L, Base::R, Base::P0, Base::Q0, Base::P1, Base::Q1, Base::WAYS, Base::kThreads, Base::kPiece;
  using Base::params, Base::batch, Base::samples, Base::memory, Base::grad;
  static constexpr int kColumnTiles = ceil_div(Q0, 16), kAcross = Pass::ACROSS_G, kAcrossX = Pass::ACROSS_X;
  DEVICE FewStates(const Params& given) : Base(given) {}

  // ACROSS columns of kPiece rows that are STEP apart, of which `count` are there (or none): column c goes to place(c).
  template <int ACROSS, class Place> static DEVICE void turn(const Element* from, int step, int count, const Place& place) {
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
  DEVICE void turn_all(int block) const {
    const Element* x = static_cast<const Element*>(params.x);
    Element* y = static_cast<Element*>(params.y);
    constexpr int kGroups = L / kAcross, kPieces = Base::kRow1 / kPiece;
    const int runs = samples / kPiece;
    const int of_x = K * P0 / kAcrossX * runs, of_g = Q1 * kGroups * runs, all = of_x + of_g + kPieces * kGroups * batch;
    ROLL for (int unit = block * kThreads + threadIdx.x; unit < all; unit += Pass::TURNS * kThreads) {
      if (unit < of_x) {
        const int n = unit % runs * kPiece, column = unit / runs * kAcrossX;
        turn<kAcrossX>(x + i64(n) * (K * P0) + column, K * P0, batch - n,
                     [&](int c) { return y + Base::turned_x() + i64(column + c) * samples + n; });
      } else if (unit < of_x + of_g) {
        const int at = unit - of_x, n = at % runs * kPiece, l = at / runs % kGroups * kAcross, q = at / (runs * kGroups);
        turn<kAcross>(grad + i64(n) * (Q1 * L) + q * L + l, Q1 * L, batch - n,
                      [&](int c) { return y + Base::turned_g() + (i64(l + c) * Q1 + q) * samples + n; });
      } else {
        const int at = unit - of_x - of_g, l = at % kGroups * kAcross, q = at / kGroups % kPieces * kPiece;
        const int n = at / (kGroups * kPieces);
        turn<kAcross>(grad + i64(n) * (Q1 * L) + q * L + l, L, Q1 - q,
                      [&](int c) { return y + Base::rows_of_g() + (i64(l + c) * samples + n) * Base::kRow1 + q; });
      }
    }
  }
  DEVICE void run() const {
    wait_for_kernel_before();
    start_next_kernel();
    if (blockIdx.y < Pass::TURNS) return turn_all(blockIdx.y);
    const int tile = blockIdx.y - Pass::TURNS, k = tile / kColumnTiles, j = tile % kColumnTiles * 16;
    const int warp = threadIdx.x / 32;
    using Rows = FewRows<typename Pass::Math, P0, 1, WAYS, Pass::ROUNDS, Pass::LOAD, Pass::LOAD>;
    Rows rows(warp);
    const Element* weight = Base::weight(Pass::WEIGHT_0) + i64(k) * Q0 * P0;
    // Rows count (l, r).
    const auto row = [&](int i) { return j + i < Q0 ? weight + i64((j + i) % R * L + (j + i) / R) * P0 : nullptr; };
    rows.fetch(row);
    const typename Rows::Totals totals{memory};
    const Element* x = static_cast<const Element*>(params.x) + k * P0;
    Element* h = static_cast<Element*>(params.y) + Base::turned_h();
    ROLL for (int first = 0; first < samples; first += 16) {
      typename Rows::Sums y;
      const auto sample = [&](int n) { return first + n < batch ? x + i64(first + n) * (K * P0) : nullptr; };
      rows.sum(y, row, sample, first + 16 < samples);
      if (first) __syncthreads();
      rows.put(totals, y);
      __syncthreads();
      ROLL for (int cell = threadIdx.x; cell < 16 * 16 / kPiece; cell += kThreads) {
        const int row = cell / (16 / kPiece), n = cell % (16 / kPiece) * kPiece, l = (j + row) / R, r = (j + row) % R;
        if (j + row >= Q0 || first + n >= samples) continue;
        Sum<Element> sums[kPiece];
        UNROLL for (int i = 0; i < kPiece; ++i) sums[i] = first + n + i < batch ? totals.at(row, n + i) : 0;
        store_few(h + (i64(l) * P1 + k * R + r) * samples + first + n, sums);
      }
    }
  }
};

template <class Pass> struct FewBack : FewBackward<Pass> {
  using Base = FewBackward<Pass>;
  using Element = typename Pass::Element;
  using Base::K, Base::L, Base::R, Base::P0, Base::Q0, Base::P1, Base::Q1, Base::WAYS, Base::kThreads, Base::kPiece;
  using Base::params, Base::batch, Base::samples, Base::memory;
  using Columns = FewColumns<typename Pass::Math, P1, Q1, Pass::WORDS, WAYS, Pass::ROUNDS, Pass::LOAD_1>;
  static constexpr int kTiles = ceil_div(P1, Columns::kColumns);
  DEVICE FewBack(const Params& given) : Base(given) {}
  DEVICE void run() const {
    start_next_kernel();
    const int l = blockIdx.y / kTiles, p = blockIdx.y % kTiles * Columns::kColumns;
    Columns columns(threadIdx.x / 32);
    const Element* weight = Base::weight(Pass::WEIGHT_1) + i64(l) * Q1 * P1;
    columns.fetch(weight, p);
    wait_for_kernel_before();
    const typename Columns::Totals totals{memory};
    const Element* g = static_cast<const Element*>(params.sums) + Base::rows_of_g() + i64(l) * samples * Base::kRow1;
    Element* to = static_cast<Element*>(params.y);
    ROLL for (int first = 0; first < samples; first += 16) {
      typename Columns::Sums y;
      const auto sample = [&](int n) { return first + n < batch ? g + i64(first + n) * Base::kRow1 : nullptr; };
      columns.sum(y, weight, p, sample, first + 16 < samples);
      if (first) __syncthreads();
      columns.put(totals, y);
      __syncthreads();
      ROLL for (int cell = threadIdx.x; cell < Columns::kColumns * 16 / kPiece; cell += kThreads) {
        const int column = cell % Columns::kColumns, n = cell / Columns::kColumns * kPiece;
        if (p + column >= P1 || first + n >= samples) continue;
        const int k = (p + column) / R, q = (p + column) % R * L + l;
        Sum<Element> sums[kPiece];
        UNROLL for (int i = 0; i < kPiece; ++i) {
          sums[i] = first + n + i < batch ? totals.at(column, n + i) : 0;
          const i64 row = i64(k) * samples + first + n + i;
          store_global(to + Base::rows_of_gh() + row * Base::kRow0 + q, narrow<Element>(sums[i]));
        }
        store_few(to + (i64(k) * Q0 + q) * samples + first + n, sums);
      }
    }
  }
};

template <class Pass> struct FewLast : FewBackward<Pass> {
  using Base = FewBackward<Pass>;
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using Base::K, Base::L, Base::R, Base::P0, Base::Q0, Base::P1, Base::Q1, Base::WAYS, Base::kThreads, Base::kPiece;
  using Base::params, Base::batch, Base::samples, Base::memory;
  using Columns = FewColumns<Math, P0, Q0, Pass::WORDS, WAYS, Pass::ROUNDS, Pass::LOAD_0>;
  using Outer0 = FewOuter<Math, P0, Q0, Pass::TALL, Pass::STRIPS, Pass::RUN_0>;
  using Outer1 = FewOuter<Math, P1, Q1, Pass::TALL, Pass::STRIPS, Pass::RUN_1>;
  static constexpr int kTiles = ceil_div(P0, Columns::kColumns), kOfX = K * kTiles;
  template <class Outer, int P, int Q> struct OfWeight {
    static constexpr int kAcross = ceil_div(P, Outer::kColumns), kDown = ceil_div(Q, Outer::kRows);
    static DEVICE void run(Element* to, const Element* g, const Element* x, int samples, int groups, int tile) {
      const int q = tile % kDown * Outer::kRows, p = tile / kDown % kAcross * Outer::kColumns;
      const int group = tile / (kAcross * kDown);
      if (group < groups)
        Outer::run(to + i64(group) * Q * P, g + i64(group) * Q * samples, x + i64(group) * P * samples, samples, q, p);
    }
  };
  using Of0 = OfWeight<Outer0, P0, Q0>;
  using Of1 = OfWeight<Outer1, P1, Q1>;
  static constexpr int kOf1 = ceil_div(L * Of1::kAcross * Of1::kDown, WAYS);
  DEVICE FewLast(const Params& given) : Base(given) {}
  DEVICE void of_x(int tile) const {
    const int k = tile / kTiles, p = tile % kTiles * Columns::kColumns;
    Columns columns(threadIdx.x / 32);
    const Element* weight = Base::weight(Pass::WEIGHT_0) + i64(k) * Q0 * P0;
    columns.fetch(weight, p);
    wait_for_kernel_before();
    start_next_kernel();
    const typename Columns::Totals totals{memory};
    const Element* g = static_cast<const Element*>(params.x) + Base::rows_of_gh() + i64(k) * samples * Base::kRow0;
    Element* to = static_cast<Element*>(params.y) + k * P0 + p;
    ROLL for (int first = 0; first < batch; first += 16) {
      typename Columns::Sums y;
      const auto sample = [&](int n) { return first + n < batch ? g + i64(first + n) * Base::kRow0 : nullptr; };
      columns.sum(y, weight, p, sample, first + 16 < batch);
      if (first) __syncthreads();
      columns.put(totals, y);
      __syncthreads();
      ROLL for (int cell = threadIdx.x; cell < Columns::kColumns * 16 / kPiece; cell += kThreads) {
        constexpr int kAcross = Columns::kColumns / kPiece;
        const int column = cell % kAcross * kPiece, n = cell / kAcross;
        if (first + n >= batch) continue;
        Sum<Element> sums[kPiece];
        UNROLL for (int i = 0; i < kPiece; ++i) sums[i] = totals.at(column + i, n);
        store_few<Pass::RUN_X>(to + i64(first + n) * (K * P0) + column, sums, P0 - p - column);
      }
    }
  }
  DEVICE void run() const {
    if (blockIdx.y < kOfX) return of_x(blockIdx.y);
    wait_for_kernel_before();
    start_next_kernel();
    const Element* turned = static_cast<const Element*>(params.sums);
    Element* w = static_cast<Element*>(const_cast<void*>(params.weights[Pass::GRAD + 1]));
    const int block = blockIdx.y - kOfX, warp = threadIdx.x / 32;
    if (block < kOf1)
      Of1::run(w + Pass::OF_1, turned + Base::turned_g(), turned + Base::turned_h(), samples, L, block * WAYS + warp);
    else
      Of0::run(w + Pass::OF_0, static_cast<const Element*>(params.x), turned + Base::turned_x(), samples, K,
               (block - kOf1) * WAYS + warp);
  }
};
