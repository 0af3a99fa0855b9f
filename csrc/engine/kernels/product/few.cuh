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
};

// What a lane has asked memory for of a row, BYTES by accesses of LOAD. Elements of 2 bytes that come one by one have a register
// each until they are used.
template <class Math, int LOAD, int BYTES = 16> struct FewPiece {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kEach = LOAD / Base::kSize, kAccesses = BYTES / LOAD, kOfOne = LOAD < 4 ? 1 : LOAD / 4;  // registers
  u32 of[kAccesses][kOfOne];
  // `left` elements are there from `from` on, none if that is not positive. MADE by a kernel that had not ended when this one
  // started.
  template <bool MADE> DEVICE void ask(const Element* from, int left) {
    UNROLL for (int i = 0; i < kAccesses; ++i) {
      if constexpr (MADE)
        load_made<LOAD>(from + i * kEach, of[i], i * kEach < left);
      else
        load_global<LOAD>(from + i * kEach, of[i], i * kEach < left);
    }
  }
  // The same where zeros are not needed for what is not there
  template <bool MADE> DEVICE void ask_some(const Element* from, int left) {
    UNROLL for (int i = 0; i < kAccesses; ++i) load_some<LOAD, MADE>(from + i * kEach, of[i], i * kEach < left);
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

// What warps have summed, in shared memory: for each of WAYS warps ROWS rows of SAMPLES. BY_SAMPLES these lie side by side,
// else the rows. Every SKEW samples are 16 or 32 bytes further than they would be, so that no two lanes meet in a bank.
template <class Total, int ROWS, int SAMPLES, int WAYS, bool BY_SAMPLES, int SKEW> struct FewTotals {
  static constexpr bool kBySamples = BY_SAMPLES;
  static constexpr int kSize = sizeof(Total), kEach = 16 / kSize, kShift = (BY_SAMPLES ? 16 : 32) / kSize;
  static constexpr int kSkews = SKEW ? SAMPLES / SKEW * kShift : 0;
  static constexpr int kLine = BY_SAMPLES ? SAMPLES + 8 + kSkews : ROWS + kEach;
  static constexpr int kWay = (BY_SAMPLES ? ROWS * kLine : SAMPLES * kLine + kSkews) * kSize, kBytes = WAYS * kWay + 16;
  u32 memory;
  DEVICE u32 place(int row, int sample) const {
    const int skew = SKEW ? sample / (SKEW ? SKEW : 1) * kShift : 0;
    return memory + ((BY_SAMPLES ? row * kLine + sample : sample * kLine + row) + skew) * kSize;
  }
  // COUNT that lie side by side
  template <int COUNT> DEVICE void put(int way, int row, int sample, const Total (&x)[COUNT]) const {
    const u32 to = place(row, sample) + way * kWay;
    if constexpr (COUNT == 1) {
      store_shared(to, x[0]);
    } else if constexpr (COUNT * kSize == 8) {
      store_shared(to, Pair<Total>(x[0], x[1]));
    } else {
      UNROLL for (int i = 0; i < COUNT; i += kEach) {
        if constexpr (kSize == 8)
          store_shared(to + i * kSize, Pair<Total>(x[i], x[i + 1]));
        else
          store_u32x4(to + i * kSize, {__float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                                       __float_as_uint(x[i + 3])});
      }
    }
  }
  // The same of all ways, added in order
  template <int COUNT> DEVICE void sum(int row, int sample, Total (&sum)[COUNT]) const {
    const u32 from = place(row, sample);
    UNROLL for (int i = 0; i < COUNT; ++i) sum[i] = 0;
    UNROLL for (int way = 0; way < WAYS; ++way)
      UNROLL for (int i = 0; i < COUNT; i += kAtOnce<COUNT>) add<kAtOnce<COUNT>>(from + way * kWay + i * kSize, sum + i);
  }
  template <int COUNT> static constexpr int kAtOnce = COUNT < kEach ? COUNT : kEach;
  template <int COUNT> static DEVICE void add(u32 from, Total* sum) {
    if constexpr (COUNT == 1) {
      sum[0] += load_sum(from, Total());
    } else if constexpr (kSize == 8) {
      double x, y;
      load_f64x2(from, x, y);
      sum[0] += x, sum[1] += y;
    } else {
      u32 x[COUNT];
      if constexpr (COUNT == 2)
        load_u32x2(from, x);
      else
        load_u32x4(from, x);
      UNROLL for (int i = 0; i < COUNT; ++i) sum[i] += __uint_as_float(x[i]);
    }
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
// The same to shared memory, of 16 bytes
template <class Element, int COUNT> DEVICE void store_shared_few(u32 to, const Sum<Element> (&x)[COUNT]) {
  if constexpr (sizeof(Element) == 8) {
    store_f64x2(to, x[0], x[1]);
  } else {
    u32 words[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 2)
        words[i] = Pair<Element>(x[i * 2], x[i * 2 + 1]).bits;
      else
        words[i] = __float_as_uint(x[i]);
    }
    store_u32x4(to, words);
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

constexpr int kMostOfFew = 64;  // samples, of passes that have as many as that at once
// Chunks of a weight that a thread has at once in registers, and of states: as many as divide the former
constexpr DEVICE int few_held(int chunks, int most) { return chunks > most ? round_up(chunks, 2) : chunks; }
constexpr DEVICE int few_ahead(int held, int most) {
  int ahead = most < held ? most : held;
  while (held % ahead) --ahead;
  return ahead;
}
// All chunks of a tile, and of as many samples as it has at once. What comes next, if there is more, is asked for as soon as its
// registers are free: of another tile's weight, and of its states or further samples', where to_weight() and to_states() go.
template <class Tile, class ToWeight, class ToStates>
DEVICE void few_sum(Tile& tile, typename Tile::Sums& y, bool more_weight, const ToWeight& to_weight, bool more,
                    const ToStates& to_states) {
  constexpr int kHeld = Tile::kHeld, kAhead = Tile::kAhead, kRounds = Tile::kRounds;
  ROLL for (int round = 0; round < kRounds; ++round) {
    const bool last = kRounds == 1 || round + 1 == kRounds;
    if (last && more_weight) to_weight();
    UNROLL for (int i = 0; i < kHeld; ++i) {
      tile.multiply(y, i, i % kAhead);
      const int at = round * kHeld + i;
      if (!last || more_weight) tile.ask_weight(i, last ? i : at + kHeld);
      if (last && more && i + kAhead == kHeld) to_states();
      if (last && i + kAhead >= kHeld) {
        if (more) tile.ask(i % kAhead, i + kAhead - kHeld);
      } else {
        tile.ask(i % kAhead, at + kAhead);
      }
    }
  }
}

// The first chunks of both
template <class Tile> DEVICE void few_weight(Tile& tile) { UNROLL for (int i = 0; i < Tile::kHeld; ++i) tile.ask_weight(i, i); }
template <class Tile> DEVICE void few_states(Tile& tile) { UNROLL for (int i = 0; i < Tile::kAhead; ++i) tile.ask(i, i); }
// All units of a block, so many samples of a tile each: tiles are every `stride`-th from `tile` on, samples every `step`-th from
// `first` on. to_weight(tile) and to_states(tile, first) are where the next ones begin, store(tile, first) what becomes of sums.
// Without MORE a block has one tile, and its code none for another.
template <bool MORE, class Tile, class ToWeight, class ToStates, class Store>
DEVICE void few_units(Tile& tiles, int tile, int stride, int all, int first, int step, int batch, const ToWeight& to_weight,
                      const ToStates& to_states, const typename Tile::Totals& totals, const Store& store) {
  const int begin = first;
  bool begun = false;
  ROLL while (tile < all) {
    const bool same = !Tile::kAllSamples && first + step < batch;
    const int next = same ? tile : MORE ? tile + stride : all, next_first = same ? first + step : begin;
    const bool more = same || (MORE && next < all), more_weight = Tile::kRounds > 1 ? more : MORE && more && !same;
    typename Tile::Sums y;
    tiles.at(first, batch);
    few_sum(
        tiles, y, more_weight, [&] { to_weight(next); }, more, [&] { to_states(next, next_first); });
    if (begun) __syncthreads();
    tiles.put(totals, y);
    __syncthreads();
    store(tile, first);
    tile = next, first = next_first, begun = true;
  }
}

// HEIGHT times 16 rows of a weight, [.., P], times TILES times 8 samples, X_SAMPLE apart; one of WAYS warps has every WAYS-th
// chunk of p's, a ROUNDS-th of these at once in registers. Rows come by accesses of LOAD bytes.
template <class Math, int P, int HEIGHT, int TILES, int WAYS, int ROUNDS, int LOAD, i64 X_SAMPLE, bool BY_SAMPLES>
struct FewRows : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kPiece = Base::kPiece, kChunk = Base::kChunk, kStep = WAYS * kChunk, kMost = (LOAD == 2 ? 8 : 16) / TILES;
  static constexpr int kHeld = few_held(ceil_div(ceil_div(ceil_div(P, kChunk), WAYS), ROUNDS), kMost), kRounds = ROUNDS;
  static constexpr int kAhead = few_ahead(kHeld, kMost);
  static constexpr bool kAllSamples = TILES * 8 >= kMostOfFew;
  using Sums = typename Base::Sums[HEIGHT][TILES];
  using Totals = FewTotals<typename Base::Total, HEIGHT * 16, TILES * 8, WAYS, BY_SAMPLES, 0>;
  const int way;
  const Lane lane;
  FewPiece<Math, LOAD> weight[kHeld][HEIGHT * 2], x[kAhead][TILES];
  const Element *rows[HEIGHT * 2], *states;
  int left, present, asked;  // p's from this lane's first chunk on; samples: to multiply, to ask for
  bool here;
  static constexpr int kWhole = P / kStep;  // chunks that all of a row's p's are there of
  DEVICE FewRows(int way) : way(way), left(P - from()) {}
  DEVICE int from() const { return way * kChunk + lane.t * kPiece; }
  // row(i) is where one of HEIGHT times 16 begins; nothing is read where the tile is not `there`.
  template <class Row> DEVICE void to_weight(const Row& row, bool there = true) {
    here = there;
    UNROLL for (int h = 0; h < HEIGHT * 2; ++h) rows[h] = row(h * 8 + lane.g) + from();
  }
  DEVICE void ask_weight(int i, int chunk) {
    UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
      const Element* at = rows[h] + chunk * kStep;
      if (chunk < kWhole)
        weight[i][h].template ask_some<false>(at, here ? kPiece : 0);
      else
        weight[i][h].template ask<false>(at, here ? left - chunk * kStep : 0);
    }
  }
  // The first of so many samples
  DEVICE void to_states(const Element* x, int samples) { states = x + (lane.g * X_SAMPLE + from()), asked = samples - lane.g; }
  DEVICE void ask(int slot, int chunk) {
    const Element* at = states + chunk * kStep;
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (chunk < kWhole)
        x[slot][n].template ask_some<true>(at + n * 8 * X_SAMPLE, n * 8 < asked ? kPiece : 0);
      else
        x[slot][n].template ask<true>(at + n * 8 * X_SAMPLE, n * 8 < asked ? left - chunk * kStep : 0);
    }
  }
  DEVICE void at(int first, int batch) { present = batch - first; }
  DEVICE bool is_behind(int n) const { return n > 0 && n % 2 == 0 && n * 8 >= present; }
  DEVICE void multiply(Sums& y, int i, int slot) const {
    typename Base::A a[HEIGHT][Base::kSteps];
    UNROLL for (int h = 0; h < HEIGHT; ++h) {
      const auto &u = weight[i][h * 2], &l = weight[i][h * 2 + 1];
      UNROLL for (int s = 0; s < Base::kSteps; ++s)
        a[h][s] = Base::left(u.word(s * 2), l.word(s * 2), u.word(s * 2 + 1), l.word(s * 2 + 1));
    }
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (is_behind(n)) break;
      typename Base::B b[Base::kSteps];
      UNROLL for (int s = 0; s < Base::kSteps; ++s) b[s] = Base::right(x[slot][n].word(s * 2), x[slot][n].word(s * 2 + 1));
      UNROLL for (int h = 0; h < HEIGHT; ++h) Base::multiply(y[h][n], a[h], b);
    }
  }
  DEVICE void put(const Totals& totals, const Sums& y) const {
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (is_behind(n)) break;
      UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
        const int row = h * 8 + lane.g, sample = n * 8 + lane.t * 2;
        const typename Base::Total sums[2] = {Base::total(y[h / 2][n], h % 2 * 2), Base::total(y[h / 2][n], h % 2 * 2 + 1)};
        if constexpr (BY_SAMPLES) {
          totals.put(way, row, sample, sums);
        } else {
          totals.template put<1>(way, row, sample, {sums[0]});
          totals.template put<1>(way, row, sample + 1, {sums[1]});
        }
      }
    }
  }
};

// Columns of a weight, [Q, P], 8 * kEach of them, times TILES times 8 samples, which lie side by side in states, [Q][samples]:
// WORDS of a lane in each of its rows, by accesses of LOAD bytes, a ROUNDS-th at once in registers. A lane's run of samples has
// one of each of as many tiles.
template <class Math, int P, int Q, int WORDS, int TILES, int WAYS, int ROUNDS, int LOAD, bool BY_SAMPLES>
struct FewColumns : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  using Total = typename Base::Total;
  static constexpr int kSize = Base::kSize, kPiece = Base::kPiece, kChunk = Base::kChunk, kStep = WAYS * kChunk;
  static constexpr int kEach = WORDS * 4 / kSize, kTall = kEach / 2, kColumns = 8 * kEach, kMost = 16 / TILES;
  static constexpr int kHeld = few_held(ceil_div(ceil_div(ceil_div(Q, kChunk), WAYS), ROUNDS), kMost), kRounds = ROUNDS;
  static constexpr int kAhead = few_ahead(kHeld, kMost), kRun = TILES < kPiece ? TILES : kPiece, kRuns = TILES / kRun;
  static constexpr bool kAllSamples = TILES * 8 >= kMostOfFew;
  using Sums = typename Base::Sums[kTall][TILES];
  using Totals = FewTotals<Total, kColumns, TILES * 8, WAYS, BY_SAMPLES, 2 * kRun < kPiece ? kPiece : 2 * kRun>;
  const int way;
  const Lane lane;
  FewPiece<Math, LOAD, WORDS * 4> weight[kHeld][kPiece];
  FewPiece<Math, kRun * kSize, kRun * kSize> x[kAhead][kPiece][kRuns];
  const Element *rows, *states;
  const int samples;       // of a row of states
  int left, first, asked;  // columns from this lane's first one on; samples: to multiply, to ask for
  static constexpr int kWhole = Q / kStep;  // chunks that all rows are there of
  DEVICE FewColumns(int way, int samples) : way(way), samples(samples) {}
  DEVICE int from() const { return way * kChunk + lane.t * kPiece; }
  DEVICE void to_weight(const Element* group, int column) {
    rows = group + i64(from()) * P + column + lane.g * kEach, left = P - column - lane.g * kEach;
  }
  // Rows of q's that are there, of those of this lane's piece in a chunk
  DEVICE int there(int chunk) const { return Q - chunk * kStep - from(); }
  DEVICE void ask_weight(int i, int chunk) {
    UNROLL for (int r = 0; r < kPiece; ++r) {
      const Element* at = rows + i64(chunk * kStep + r) * P;
      if (chunk < kWhole)
        weight[i][r].template ask_some<false>(at, left);
      else
        weight[i][r].template ask<false>(at, r < there(chunk) ? left : 0);
    }
  }
  DEVICE void to_states(const Element* x, int sample) {
    states = x + (from() * samples + sample + lane.g * kRun), asked = sample + lane.g * kRun;
  }
  DEVICE void ask(int slot, int chunk) {
    UNROLL for (int r = 0; r < kPiece; ++r)
      UNROLL for (int v = 0; v < kRuns; ++v) {
        const Element* at = states + ((chunk * kStep + r) * samples + v * 8 * kRun);
        const bool here = v * 8 * kRun < samples - asked;
        if (chunk < kWhole)
          x[slot][r][v].template ask_some<true>(at, here ? kRun : 0);
        else
          x[slot][r][v].template ask<true>(at, here && r < there(chunk) ? kRun : 0);
      }
  }
  // The left operand of step s: rows of tile m are p's 2m and 2m + 1 of each lane's piece.
  DEVICE typename Base::A left_of(int i, int s, int m) const {
    if constexpr (kSize >= 4) {
      const auto &w = weight[i][s * 2], &v = weight[i][s * 2 + 1];
      return Base::left(w.word(m * 2), w.word(m * 2 + 1), v.word(m * 2), v.word(m * 2 + 1));
    } else {
      const u32 w0 = weight[i][s * 4].word(m), w1 = weight[i][s * 4 + 1].word(m);
      const u32 w2 = weight[i][s * 4 + 2].word(m), w3 = weight[i][s * 4 + 3].word(m);
      return Base::left(lower_halves(w0, w1), upper_halves(w0, w1), lower_halves(w2, w3), upper_halves(w2, w3));
    }
  }
  // The right one, of tile n
  DEVICE typename Base::B right_of(int slot, int s, int n) const {
    const int v = n / kRun, e = n % kRun;
    if constexpr (kSize >= 4) {
      return Base::right(x[slot][s * 2][v].word(e), x[slot][s * 2 + 1][v].word(e));
    } else {
      const u32 w0 = x[slot][s * 4][v].word(e / 2), w1 = x[slot][s * 4 + 1][v].word(e / 2);
      const u32 w2 = x[slot][s * 4 + 2][v].word(e / 2), w3 = x[slot][s * 4 + 3][v].word(e / 2);
      if (e % 2) return Base::right(upper_halves(w0, w1), upper_halves(w2, w3));
      return Base::right(lower_halves(w0, w1), lower_halves(w2, w3));
    }
  }
  DEVICE void at(int sample, int) { first = sample; }
  DEVICE bool is_behind(int n) const { return n > 0 && n % kRun == 0 && first + n * 8 >= samples; }
  DEVICE void multiply(Sums& y, int i, int slot) const {
    typename Base::A a[kTall][Base::kSteps];
    UNROLL for (int m = 0; m < kTall; ++m)
      UNROLL for (int s = 0; s < Base::kSteps; ++s) a[m][s] = left_of(i, s, m);
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (is_behind(n)) break;
      typename Base::B b[Base::kSteps];
      UNROLL for (int s = 0; s < Base::kSteps; ++s) b[s] = right_of(slot, s, n);
      UNROLL for (int m = 0; m < kTall; ++m) Base::multiply(y[m][n], a[m], b);
    }
  }
  // Of a lane's columns c of the products, 2t and 2t + 1, as many runs of samples
  DEVICE Total total(const Sums& y, int row, int v, int sample) const {
    return Base::total(y[row / 2][v * kRun + sample % kRun], row % 2 * 2 + sample / kRun);
  }
  DEVICE void put(const Totals& totals, const Sums& y) const {
    UNROLL for (int v = 0; v < kRuns; ++v) {
      if (is_behind(v * kRun)) break;
      const int row = lane.g * kEach, sample = v * 8 * kRun + lane.t * 2 * kRun;
      if constexpr (BY_SAMPLES) {
        UNROLL for (int i = 0; i < kEach; ++i) {
          Total sums[2 * kRun];
          UNROLL for (int e = 0; e < 2 * kRun; ++e) sums[e] = total(y, i, v, e);
          totals.put(way, row + i, sample, sums);
        }
      } else {
        UNROLL for (int e = 0; e < 2 * kRun; ++e) {
          Total sums[kEach];
          UNROLL for (int i = 0; i < kEach; ++i) sums[i] = total(y, i, v, e);
          totals.put(way, row, sample + e, sums);
        }
      }
    }
  }
};

// Gradients of the weights of all groups, from states that have `samples` side by side, a multiple of 8 of them: G
// [group][Q][samples] and X [group][P][samples]. A warp has tiles of HEIGHT times 16 rows and STRIPS * kChunk columns, stored by
// runs of RUN: where these are short, by way of shared memory, so that lanes side by side store whole sectors.
template <class Math, int P, int Q, int HEIGHT, int STRIPS, int RUN> struct FewOuter : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kPiece = Base::kPiece, kChunk = Base::kChunk, kSize = Base::kSize, kEights = kPiece / 2;
  static constexpr int kRows = HEIGHT * 16, kColumns = STRIPS * kChunk;
  static constexpr int kAcross = ceil_div(P, kColumns), kDown = ceil_div(Q, kRows);
  static constexpr int kRow = kColumns * kSize + 64, kStaged = kRows * kRow;  // bytes in shared memory
  using Piece = FewPiece<Math, 16>;
  const Lane lane;
  const u32 memory;
  const int samples;
  const Element *rows, *columns;
  int q, p;
  Piece of_g[HEIGHT * 2], of_x[STRIPS][kEights];
  DEVICE FewOuter(u32 memory, int samples) : memory(memory), samples(samples) {}
  // Of tile eights j a lane has columns of its own.
  DEVICE int column() const { return lane.g / 2 * kPiece + lane.g % 2; }
  DEVICE void to_tile(const Element* g, const Element* x, int tile) {
    const int group = tile / (kAcross * kDown);
    q = tile % kDown * kRows, p = tile / kDown % kAcross * kColumns;
    rows = g + (i64(group) * Q + q + lane.g) * samples + lane.t * kPiece;
    columns = x + (i64(group) * P + p + column()) * samples + lane.t * kPiece;
  }
  DEVICE void ask(int n) {
    const int left = samples - n - lane.t * kPiece, down = Q - q - lane.g, across = P - p - column();
    const auto ask = [&](Piece& piece, const Element* from, bool here) {
      if (n + kChunk <= samples)
        piece.template ask_some<true>(from, here ? kPiece : 0);
      else
        piece.template ask<true>(from, here ? left : 0);
    };
    UNROLL for (int h = 0; h < HEIGHT * 2; ++h) ask(of_g[h], rows + (h * 8 * samples + n), h * 8 < down);
    UNROLL for (int strip = 0; strip < STRIPS; ++strip)
      UNROLL for (int j = 0; j < kEights; ++j) {
        const int at = strip * kChunk + j * 2;
        ask(of_x[strip][j], columns + (at * samples + n), at < across);
      }
  }
  using Sums = typename Base::Sums[HEIGHT][STRIPS][kEights];
  DEVICE void multiply(Sums& y) const {
    typename Base::A a[HEIGHT][Base::kSteps];
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int s = 0; s < Base::kSteps; ++s) {
        const auto &u = of_g[h * 2], &l = of_g[h * 2 + 1];
        a[h][s] = Base::left(u.word(s * 2), l.word(s * 2), u.word(s * 2 + 1), l.word(s * 2 + 1));
      }
    UNROLL for (int strip = 0; strip < STRIPS; ++strip)
      UNROLL for (int j = 0; j < kEights; ++j) {
        typename Base::B b[Base::kSteps];
        UNROLL for (int s = 0; s < Base::kSteps; ++s)
          b[s] = Base::right(of_x[strip][j].word(s * 2), of_x[strip][j].word(s * 2 + 1));
        UNROLL for (int h = 0; h < HEIGHT; ++h) Base::multiply(y[h][strip][j], a[h], b);
      }
  }
  // The tile of rows from q_ and columns from p_ on, of the group's gradient
  DEVICE void store(Element* to, const Sums& y, int q_, int p_) const {
    UNROLL for (int strip = 0; strip < STRIPS; ++strip)
      UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
        const int row = h * 8 + lane.g, at = strip * kChunk + lane.t * kPiece;
        typename Base::Total sums[kPiece];
        UNROLL for (int i = 0; i < kPiece; ++i) sums[i] = Base::total(y[h / 2][strip][i / 2], h % 2 * 2 + i % 2);
        if constexpr (RUN * kSize == 16)
          store_few<RUN>(to + i64(q_ + row) * P + p_ + at, sums, q_ + row < Q ? P - p_ - at : 0);
        else
          store_shared_few<Element>(memory + row * kRow + at * kSize, sums);
      }
    if constexpr (RUN * kSize < 16) {
      constexpr int kRuns = kColumns / RUN;
      using Run = Words<RUN * kSize>;
      __syncwarp();
      ROLL for (int from = 0; from < kRows * kRuns; from += 32 * 8) {
        Run run[8];
        UNROLL for (int i = 0; i < 8; ++i) {
          const int cell = from + i * 32 + lane.index;
          run[i] = load_words<RUN * kSize>(memory + cell / kRuns * kRow + cell % kRuns * (RUN * kSize));
        }
        UNROLL for (int i = 0; i < 8; ++i) {
          const int cell = from + i * 32 + lane.index, row = q_ + cell / kRuns, column = p_ + cell % kRuns * RUN;
          if (row < Q && column < P) store_words<RUN * kSize>(to + i64(row) * P + column, run[i]);
        }
      }
      __syncwarp();
    }
  }
  // Every `stride`-th tile from `tile` on; what the next one reads is on its way while this one's sums are stored.
  template <bool MORE> DEVICE void run(Element* to, const Element* g, const Element* x, int groups, int tile, int stride) {
    const int all = groups * kAcross * kDown;
    if (tile >= all) return;
    to_tile(g, x, tile);
    ask(0);
    ROLL while (tile < all) {
      Sums y;
      const int of_q = q, of_p = p, next = MORE ? tile + stride : all;
      ROLL for (int n = 0; n < samples; n += kChunk) {
        multiply(y);
        if (n + kChunk < samples) {
          ask(n + kChunk);
        } else if (next < all) {
          to_tile(g, x, next);
          ask(0);
        }
      }
      store(to + i64(tile / (kAcross * kDown)) * Q * P, y, of_q, of_p);
      tile = next;
    }
  }
};

// A pass of one contraction by rows. y: [sample][group / FAST][a][group % FAST][b], as in streamed.cuh; a block has HEIGHT
// times 16 columns a * B + b of WG groups, each group WAYS warps, and stores runs of RUN elements: groups, or b's. Where there
// are more samples than a few, blocks along x of the grid take turns at 16 of them.
//
// Pass:  Math, Element, Activation, BIAS, WEIGHT, P, Q, GROUPS, FAST, NEXT, B, STEP_A, STEP_B, X_SAMPLE, Y_SAMPLE, WG, WAYS,
//        HEIGHT, ROUNDS, TILES (of 8 samples at once), MORE (tiles than blocks), LOAD, RUN, ROUND_Y, FIRST (of its plan's
//        passes), LAST
template <class Pass> struct Few {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  static constexpr int P = Pass::P, Q = Pass::Q, FAST = Pass::FAST, B = Pass::B, ROUNDS = Pass::ROUNDS;
  static constexpr int WG = Pass::WG, WAYS = Pass::WAYS, RUN = Pass::RUN;
  static constexpr int kThreads = WG * WAYS * 32, kRows = Pass::HEIGHT * 16, kAtOnce = Pass::TILES * 8;
  static constexpr int kColumnTiles = ceil_div(Q, kRows), kGroupTiles = ceil_div(FAST, WG);
  static constexpr int kTiles = kColumnTiles * kGroupTiles * (Pass::GROUPS / FAST);
  static_assert((WG == 1 ? B : WG) % RUN == 0 && FAST * B % RUN == 0 && (WG == 1 || B == 1) && 16 % RUN == 0);
  using Rows = FewRows<Math, P, Pass::HEIGHT, Pass::TILES, WAYS, ROUNDS, Pass::LOAD, Pass::X_SAMPLE, false>;
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

  struct Tile {
    int q, fast, slow;
    DEVICE explicit Tile(int tile)
        : q(tile % kColumnTiles * kRows), fast(tile / kColumnTiles % kGroupTiles * WG),
          slow(tile / (kColumnTiles * kGroupTiles)) {}
  };
  DEVICE void run() const {
    if constexpr (Pass::FIRST) wait_for_kernel_before();
    if constexpr (!Pass::LAST) start_next_kernel();
    const int part = threadIdx.x / 32 / WAYS, batch = int(params.batch), step = int(gridDim.x) * kAtOnce;
    const int tile = blockIdx.y, first = int(blockIdx.x) * kAtOnce;
    if (first >= batch) return;
    // This warp's group, where there is one
    const auto here = [&](const Tile& at) { return FAST % WG == 0 || at.fast + part < FAST; };
    const auto group = [&](const Tile& at) { return here(at) ? weight_of(at.slow, at.fast + part) : 0; };
    Rows rows(threadIdx.x / 32 % WAYS);
    const auto to_weight = [&](int tile) {
      const Tile at(tile);
      const Element* weight = static_cast<const Element*>(params.weights[Pass::WEIGHT]) + i64(group(at)) * Q * P;
      rows.to_weight([&](int i) { return weight + i64(weight_row(min(at.q + i, Q - 1))) * P; }, here(at));
    };
    const auto to_states = [&](int tile, int first) {
      const Tile at(tile);
      const Element* x = static_cast<const Element*>(params.x) + i64(group(at)) * P;
      rows.to_states(x + first * Pass::X_SAMPLE, here(at) ? batch - first : 0);
    };
    to_weight(tile);
    few_weight(rows);
    const typename Pass::Activation activation(params);
    if constexpr (!Pass::FIRST) wait_for_kernel_before();
    if constexpr (Pass::LAST) start_next_kernel();
    to_states(tile, first);
    few_states(rows);

    const Totals totals{shared_address(shared_memory)};
    const auto store = [&](int tile, int first) {
      const Tile at(tile);
      constexpr int kAcross = kRows * WG / RUN;
      const int present = min(batch - first, kAtOnce);
      ROLL for (int cell = threadIdx.x; cell < present * kAcross; cell += kThreads) {
        const int n = cell / kAcross, e = cell % kAcross * RUN, g = e % WG, j = e / WG;
        if (at.q + j >= Q || (FAST % WG && at.fast + g >= FAST)) continue;
        const i64 place = feature(at.slow, at.fast + g, at.q + j);
        Sum<Element> sums[RUN];
        if constexpr (WG == 1) {
          totals.sum(j, n, sums);
        } else {
          UNROLL for (int i = 0; i < RUN; ++i) {
            Sum<Element> one[1];
            Totals{totals.memory + (g + i) * Totals::kBytes}.sum(j, n, one);
            sums[i] = one[0];
          }
        }
        UNROLL for (int i = 0; i < RUN; ++i) {
          if constexpr (Pass::BIAS) sums[i] += widen(static_cast<const Element*>(params.bias)[place + i]);
          sums[i] = activation.of(sums[i]);
          if constexpr (Pass::ROUND_Y) sums[i] = Math::rounded(sums[i]);
        }
        store_few(static_cast<Element*>(params.y) + (first + n) * Pass::Y_SAMPLE + place, sums);
      }
    };
    const Totals of_part{totals.memory + part * Totals::kBytes};
    few_units<Pass::MORE>(rows, tile, gridDim.y, kTiles, first, step, batch, to_weight, to_states, of_part, store);
  }
};

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
//        OF_W1 (that turn states, make x's gradient, and the second weight's), bytes of an access to rows of the weights:
//        LOAD, LOAD_0, LOAD_1 (by columns); elements of one: to x ACROSS_X, to groups of grad_y ACROSS_G, to gradients RUN_X,
//        RUN_0, RUN_1
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
  // Where states begin of the first pass's result
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
    constexpr int kGroups = L / kAcross;
    const int runs = samples / kPiece, of_x = K * P0 / kAcrossX * runs, all = of_x + Q1 * kGroups * runs;
    ROLL for (int unit = block * kThreads + threadIdx.x; unit < all; unit += Pass::TURNS * kThreads) {
      if (unit < of_x) {
        const int n = unit % runs * kPiece, column = unit / runs * kAcrossX;
        turn<kAcrossX>(x + i64(n) * (K * P0) + column, K * P0, batch - n,
                       [&](int c) { return y + Base::turned_x() + i64(column + c) * samples + n; });
      } else {
        const int at = unit - of_x, n = at % runs * kPiece, l = at / runs % kGroups * kAcross, q = at / (runs * kGroups);
        turn<kAcross>(grad + i64(n) * (Q1 * L) + q * L + l, Q1 * L, batch - n,
                      [&](int c) { return y + Base::turned_g() + (i64(l + c) * Q1 + q) * samples + n; });
      }
    }
  }
  DEVICE void run() const {
    wait_for_kernel_before();
    start_next_kernel();
    if (blockIdx.y < Pass::TURNS) return turn_all(blockIdx.y);
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
    to_states(tile, 0);
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
        store_few(h + (i64(l) * P1 + k * R + r) * samples + first + n, sums);
      }
    };
    const int stride = gridDim.y - Pass::TURNS;
    few_units<Pass::MORE>(rows, tile, stride, kAll, 0, kAtOnce, batch, to_weight, to_states, totals, store);
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
      columns.to_states(static_cast<const Element*>(params.sums) + Base::turned_g() + i64(tile / kTiles) * Q1 * samples, first);
    };
    const int tile = blockIdx.y;
    to_weight(tile);
    few_weight(columns);
    wait_for_kernel_before();
    to_states(tile, 0);
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
        store_few(to + (i64(k) * Q0 + q) * samples + first + n, sums);
      }
    };
    few_units<Pass::MORE>(columns, tile, gridDim.y, L * kTiles, 0, kAtOnce, samples, to_weight, to_states, totals, store);
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
  using Outer0 = FewOuter<Math, P0, Q0, Pass::HEIGHT, Pass::STRIPS, Pass::RUN_0>;
  using Outer1 = FewOuter<Math, P1, Q1, Pass::HEIGHT, Pass::STRIPS, Pass::RUN_1>;
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
    to_states(tile, 0);
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
        store_few<Pass::RUN_X>(to + i64(first + n) * (K * P0) + column, sums, P0 - p - column);
      }
    };
    few_units<Pass::MORE>(columns, tile, Pass::OF_X, K * kTiles, 0, kAtOnce, samples, to_weight, to_states, totals, store);
  }
  DEVICE void run() const {
    if (blockIdx.y < Pass::OF_X) return of_x();
    wait_for_kernel_before();
    start_next_kernel();
    const Element* turned = static_cast<const Element*>(params.sums);
    Element* w = static_cast<Element*>(const_cast<void*>(params.weights[Pass::GRAD + 1]));
    const int block = blockIdx.y - Pass::OF_X, warp = threadIdx.x / 32;
    if (block < Pass::OF_W1)
      Outer1(memory + warp * Outer1::kStaged, samples)
          .template run<Pass::MORE_TILES>(w + Pass::OF_1, turned + Base::turned_g(), turned + Base::turned_h(), L,
                                          block * WAYS + warp, Pass::OF_W1 * WAYS);
    else
      Outer0(memory + warp * Outer0::kStaged, samples)
          .template run<Pass::MORE_TILES>(w + Pass::OF_0, static_cast<const Element*>(params.x), turned + Base::turned_x(), K,
                                          (block - Pass::OF_W1) * WAYS + warp,
                                          (gridDim.y - Pass::OF_X - Pass::OF_W1) * WAYS);
  }
};
