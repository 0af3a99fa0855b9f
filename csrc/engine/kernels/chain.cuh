// A pass: tiles of units go through a list of tied contractions on chip, with every weight resident in shared memory.
//
// A block is GROUPS groups of WARPS warps. Groups share the weights; each takes tile after tile, copies the next ones
// to its slots while it works, and hands the state on from stage to stage through shared memory:
//     slot -> [contraction]* -> bias, activation -> memory
// Of layers one behind another, which are contractions by rows, each has a bias and an activation of its own.
// A contraction is Y[r, q] = sum_p X[r, p] W[q, p] where the mode is the last one (by rows: X is operand A), and
// Y[q, c] = sum_p W[q, p] X[p, c] where modes follow it (W is operand A). All sizes are constants that kernels/resident.py
// writes; sizes that no matrix unit divides are padded with zeros in shared memory.
//
// With BESIDE sums become the gradient of what is activated: Gradient takes each with what a state like y has at its place,
// grad_y. That is copied to where a result lies in shared memory, while stages make the sums.
//
// Pass:  Math, Element, Activation, BIAS; WARPS, GROUPS, UNITS of a tile, SLOTS; UNITS_PER_SAMPLE, Input and Output
//        (Regions); COPY and STORE, bytes of one access, or LOAD_RUN and STORE_RUN, elements of one run, where BULK_LOAD
//        and BULK_STORE say that the copy engine moves them; kBarrierBytes, kWeightBytes, kSlotBytes, kGroupBytes;
//        FirstStage, AlsoRaw (another one that reads what came from memory, or void), First (its layout), Final (of the
//        result) and FINAL (its offset); SPLIT_STEP; load_weights(), stages(); RANK, terms that are summed; TERM_IN and
//        TERM_OUT, a sample's features where x or y has a state for each term (one term behind the other), or 0; HELD,
//        states in a slot, kHeldBytes apart; MADE, terms whose states are made of one x; RESULT_APART: the first
//        stage does not write where the result is, or the last stage reads; X_ALONE: slots have nothing but x, and if FINAL is
//        not negative, stages() loads the next one; Source: void, or Several, the tensors that x is; STRAIGHT: sums of the last
//        stage go to memory, not to a result in shared memory; AS_MEMORY: rows of the result lie there side by side, as in
//        memory, and behind as many bytes as the tile begins behind whole 16 bytes;
//        BESIDE, the parameter that grad_y is, or -1, Gradient, of a sum and what is beside it, and LATER, tiles of x that are asked
//        for between it and the last stage's end
#pragma once
#include "kernels/held_weights.cuh"
#include "finish/pointwise.cuh"

// Two contractions at one visit, of the last two modes: Y = A X B', A by columns, then B by rows. A warp makes its rows of
// A X, some columns at a time, and they are operand A of the second product as they stand: nothing is exchanged.
template <class First_, class Second_> struct Sandwich {
  using First = First_;
  using Second = Second_;
  static constexpr int TILES = Second::TILES;
};

template <class Pass> struct Chain : HeldWeights<Pass> {
  using Base = HeldWeights<Pass>;
  using typename Base::Element, typename Base::Math;
  using Base::group, Base::thread, Base::units, Base::weights, Base::kBlock, Base::kSize, Base::kThreads;
  const Params& params;
  const Lane lane;
  const int warp;
  const u32 memory;  // the shared address of this group's memory
  const typename Pass::Activation activation;

  DEVICE Chain(const Params& p)
      : Base(p), params(p), warp(threadIdx.x / 32 % Pass::WARPS),
        memory(weights + Pass::kWeightBytes + group * Pass::kGroupBytes), activation(p) {}

  DEVICE void sync() const { sync_group<Pass::WARPS, Pass::GROUPS>(group); }
  DEVICE u32 slot_address(int slot) const { return memory + slot * Pass::kSlotBytes; }

  DEVICE i64 tiles() const { return (units + Pass::UNITS - 1) / Pass::UNITS; }
  // From a group's tile to its next one
  static DEVICE i64 step() { return i64(gridDim.x) * Pass::GROUPS; }

  // Whether lines of x come by registers, and whether they are padded then
  template <int COPY> static constexpr bool comes_by_registers = COPY < 4 && is_void<typename Pass::Source>;
  template <class R, class L, int COPY> static constexpr bool pads_lines = comes_by_registers<COPY> && R::template kWholeRows<L>;

  // Copies a tile's units, if there is such a tile, to a slot.
  DEVICE void load(i64 tile, int slot) const {
    const bool there = tile < tiles();
    if constexpr (Pass::BULK_LOAD) {
      if (warp == 0 && there) load_runs(tile * Pass::UNITS, slot);
    } else {
      for (int held = 0; there && held < Pass::HELD; ++held) {
        Base::template load_pieces<typename Pass::Input, typename Pass::First, Pass::COPY>(
            state_of(held), tile * Pass::UNITS, slot_address(slot) + held * Pass::kHeldBytes);
        if constexpr (comes_by_registers<Pass::COPY>)
          Base::template fetch<typename Pass::Input>(state_of(held), (tile + step()) * Pass::UNITS);
      }
      commit_copies();
    }
  }

  // What the slot of a tile gets next, as soon as nobody reads the tile there: it comes while the group goes on with that.
  DEVICE void load_next(i64 tile, int slot) const { load(tile + Pass::SLOTS * step(), slot); }

  // Where each term has a state of its own, a block takes its own term's, or all of them.
  DEVICE auto state_of(int held) const {
    auto x = source_of<typename Pass::Source, Element>(params);
    if constexpr (Pass::TERM_IN > 0) x += (i64(blockIdx.y) + held) * params.batch * Pass::TERM_IN;
    return x;
  }

  DEVICE void load_runs(i64 first, int slot) const {
    using R = typename Pass::Input;
    constexpr int kRun = Pass::LOAD_RUN, kBytes = kRun * kSize, kEach = R::kSize / kRun;  // runs of a unit
    const int present = Base::present(first);
    fence_copy_engine();
    if (lane.index == 0) expect_bytes(barrier(slot), Pass::HELD * present * R::kSize * kSize);
    __syncwarp();
    for (int held = 0; held < Pass::HELD; ++held)
      for (int k = lane.index; k < present * kEach; k += 32)
        load_run(slot_address(slot) + held * Pass::kHeldBytes + Pass::First::at(k * kRun) * kSize,
                 state_of(held) + R::unit(first + k / kEach) + R::at(k % kEach * kRun), kBytes, barrier(slot));
  }

  static constexpr int kWord = 16 / kSize;  // elements

  // Zeros where a layout of a stage pads p up to what the matrix unit takes; the TAILS of rows, if they are not zeros as they come.
  // Threads by columns take p's as they are.
  template <class S> static constexpr bool kPadded = S::PP != S::P && (S::BY_ROWS || !S::BY_THREADS);
  template <class S, bool TAILS = true> DEVICE void zero_padding(u32 state) const {
    if constexpr (kPadded<S> && S::BY_ROWS && TAILS) {
      for (int row = thread; row < S::ROWS; row += kThreads) zeros<S::PP - S::P>(state + (row * S::In::ROW + S::P) * kSize);
    } else if constexpr (kPadded<S> && !S::BY_ROWS) {  // whole p's, with what lies between them
      constexpr int kWords = (S::PP - S::P) * S::In::STEP / kWord;
      for (int j = thread; j < S::ROWS * kWords; j += kThreads)
        store_u32x4(state + (j / kWords * S::In::ROW + S::P * S::In::STEP) * kSize + j % kWords * 16, {0, 0, 0, 0});
    }
  }
  template <int COUNT> static DEVICE void zeros(u32 to) {
    UNROLL for (int i = 0; i < COUNT; ++i) store_shared(to + i * kSize, Element{});
  }

  template <class S> DEVICE u32 in_address(u32 slot) const { return S::IN < 0 ? slot : memory + S::IN; }
  template <class S> DEVICE u32 out_address(u32 slot) const { return S::OUT < 0 ? slot : memory + S::OUT; }

  template <class S> using Sums = Sum<Element>[S::MT][S::NT][4];
  template <class S> DEVICE void scale_back(Sums<S>& y, int term) const {
    const float scale = Base::template kept_scale<S>(term);
    UNROLL for (auto& row : y)
      UNROLL for (auto& four : row)
        UNROLL for (auto& sum : four) sum *= scale;
  }

  // Where a warp tile begins: at which row of its product's, in which of the state's, and at which column of that.
  struct Corner {
    int row, o, i;
  };
  template <class S> static DEVICE Corner corner(int tile) {
    const int row = tile % S::M_TILES * S::MT * 16, n = tile / S::M_TILES;
    return {row, n / S::ACROSS * S::DOWN, n % S::ACROSS * S::WIDE};
  }

  // Adds one warp tile's products to y, which has none yet if it is NEW.
  template <class S, bool NEW = false> DEVICE void multiply(Sums<S>& y, int tile, u32 state, u32 weight) const {
    const auto [row, o, i] = corner<S>(tile);
    u32 a, b[S::NT];
    constexpr int kStepA = S::BY_ROWS ? S::In::ROW : S::W_STRIDE;  // between rows of A
    if constexpr (S::BY_ROWS) {
      a = state + row * S::In::ROW * kSize + Math::template lane_row_a<S::In::ROW>(lane);
      b[0] = weight + i * S::W_STRIDE * kSize + Math::template lane_row_b<S::W_STRIDE>(lane);
    } else {
      a = weight + row * S::W_STRIDE * kSize + Math::template lane_row_a<S::W_STRIDE>(lane);
      const u32 from = state + (o * S::In::ROW + i) * kSize + Math::template lane_b_by_n<S::In::STEP>(lane);
      UNROLL for (int n = 0; n < S::NT; ++n)
        b[n] = from + (S::DOWN > 1 ? n * 8 / S::IP * S::In::ROW + n * 8 % S::IP : n * 8) * kSize;
    }
    all_steps<S, kStepA, NEW>(y, a, b);
  }

  template <class S, int STEP_A, bool NEW = false> DEVICE void all_steps(Sums<S>& y, u32 a, const u32 (&b)[S::NT]) const {
    constexpr int kSteps = ceil_div(S::PP, Math::kStep);
    constexpr int kWhole = S::PP / Math::kStep;
    if constexpr (Math::kFlush > 0) {
      const auto some = [&](Sums<S>& part, int k) {
        UNROLL for (int j = 0; j < Math::kFlush; ++j)
          if (kSteps % Math::kFlush == 0 || k + j < kSteps) step<S, Math::kStep, STEP_A>(part, a, b, (k + j) * Math::kStep);
      };
      if constexpr (NEW && kSteps <= Math::kFlush) {
        some(y, 0);
      } else {
        UNROLL_BY(2) for (int k = 0; k < kSteps; k += Math::kFlush) {
          Sums<S> part = {};
          some(part, k);
          add_sums(y, part);
        }
      }
    } else {
      UNROLL_BY(kSteps <= 8 ? kSteps : 4) for (int k = 0; k < kWhole; ++k)
        step<S, Math::kStep, STEP_A>(y, a, b, k * Math::kStep);
      if constexpr (kWhole < kSteps) step<S, 8, STEP_A>(y, a, b, kWhole * Math::kStep);
    }
  }

  // Whether a stage reads what came from memory; states between stages, and weights, are stored as the matrix unit
  // wants them.
  template <class S> static constexpr bool kRaw = is_same<S, typename Pass::FirstStage> || is_same<S, typename Pass::AlsoRaw>;

  template <class S, int K, int STEP_A> DEVICE void step(Sums<S>& y, u32 a_from, const u32 (&b_from)[S::NT], int k) const {
    typename Math::A a[S::MT];
    typename Math::B b[S::NT];
    UNROLL for (int m = 0; m < S::MT; ++m)
      Math::template load_row_a<K, STEP_A, S::BY_ROWS && kRaw<S>>(a[m], a_from + (m * 16 * STEP_A + k) * kSize);
    if constexpr (S::BY_ROWS) {
      Math::template load_row_b<K, S::W_STRIDE, S::NT, false>(b, b_from[0] + k * kSize);
    } else {
      u32 from[S::NT];
      UNROLL for (int n = 0; n < S::NT; ++n) from[n] = b_from[n] + k * S::In::STEP * kSize;
      // Pairs of tiles are read at once where the second's columns lie at one distance from the first's.
      constexpr int kPairStep = S::DOWN == 1 || S::IP % 16 == 0 ? 8 : S::IP == 8 ? S::In::ROW : 0;
      Math::template load_b_by_n<K, S::In::STEP, S::NT, kPairStep, kRaw<S>>(b, from, lane.index);
    }
    UNROLL for (int m = 0; m < S::MT; ++m)
      UNROLL for (int n = 0; n < S::NT; ++n) Math::template multiply<K>(y[m][n], a[m], b[n]);
  }

  // Of TERMS that are summed, whose states are APART bytes from each other
  template <class S, int TERMS = 1, int APART = 0> DEVICE void repair(Sums<S>& y, int tile, u32 state, u32 weight) const {
    repair_sums<TERMS * S::P>(y, [&](int m, int n, int i) {
      const Corner first = corner<S>(tile);
      const int r = first.row + m * 16 + i / 2 * 8 + lane.g, c = first.i + n * 8 + lane.t * 2 + i % 2, o = first.o;
      const int q = S::BY_ROWS ? c : r;
      const int x = S::BY_ROWS ? r * S::In::ROW : S::DOWN > 1 ? (o + c / S::IP) * S::In::ROW + c % S::IP : o * S::In::ROW + c;
      const int group = S::BY_ROWS ? S::group(r, 0) : S::DOWN > 1 ? S::group(o + c / S::IP, c % S::IP) : S::group(o, c);
      return [=](int k) {
        const int term = TERMS > 1 ? k / S::P : 0, p = k - term * S::P, row = term * S::W_ROWS + group * S::Q + q;
        return __uint_as_float(load_u32(state + term * APART + (x + p * S::In::STEP) * kSize)) *
               __uint_as_float(load_u32(weight + (row * S::W_STRIDE + Math::place_of(p, S::FROM_SUMS)) * kSize));
      };
    });
  }

  DEVICE static Sum<Element> number(u32 from) {
    if constexpr (kSize == 2)
      return widen(Element{load_u16(from)});
    else
      return load_sum(from, Sum<Element>());
  }

  struct Everything {
    DEVICE bool operator()(int, int) const { return true; }
  };
  // One contraction of a small mode, for which the matrix unit would multiply padding: a thread has a column, or two neighbours,
  // and all of the weight, or of each of some TERMS' that are summed, whose states are APART bytes from each other. What is not
  // `there`, a row of the state and a column behind its mode, gets zeros.
  template <class S, bool LAST, int TERMS = 1, int APART = 0, class There = Everything>
  DEVICE void by_threads(int term, u32 state, u32 to, i64 unit, There there = {}) const {
    using Real = Sum<Element>;
    using Out = typename S::Out;
    constexpr int kWide = !S::BY_ROWS && S::PAIRS && S::I % 2 == 0 && kSize == 2 ? 2 : 1;
    constexpr int kOfRow = S::BY_ROWS ? 1 : S::I / kWide, kCount = S::ROWS * kOfRow;
    constexpr int kFrom = S::BY_ROWS ? 1 : S::In::STEP;
    Real w[TERMS][S::Q][S::P];
    UNROLL for (int t = 0; t < TERMS; ++t) {
      Real scale = 1;
      if constexpr (S::SCALE >= 0) scale = Base::template kept_scale<S>(term + t);
      UNROLL for (int q = 0; q < S::Q; ++q)
        UNROLL for (int p = 0; p < S::P; ++p)
          w[t][q][p] = scale * number(Base::template weight_address<S>(term + t) + (q * S::W_STRIDE + Math::place_of(p, false)) * kSize);
    }
    const int of_sample = LAST && Pass::BIAS ? Pass::Output::of_sample(unit) : 0;
    if constexpr (LAST) to += piece_of(term, unit);
    UNROLL_BY(2) for (int j = thread; j < kCount; j += kThreads) {
      const int o = j / kOfRow, i = j % kOfRow * kWide;
      const u32 from = state + (o * S::In::ROW + i) * kSize;
      Real y[S::Q][kWide] = {};
      [[maybe_unused]] Real bias[S::Q][kWide];
      if constexpr (LAST && Pass::BIAS) {
        const RowOfBias row(params, of_sample, o * S::Q * S::I);
        UNROLL for (int q = 0; q < S::Q; ++q)
          UNROLL for (int k = 0; k < kWide; ++k) bias[q][k] = row.template at<S::I>(q * S::I, i + k);
      }
      UNROLL for (int t = 0; t < TERMS; ++t)
        UNROLL for (int p = 0; p < S::P; ++p) {
          const u32 at = from + t * APART + p * kFrom * kSize;
          Real x[kWide];
          if constexpr (kWide == 2) {
            const u32 two = load_u32(at);
            x[0] = widen(Element{u16(two)}), x[1] = widen(Element{u16(two >> 16)});
          } else {
            x[0] = number(at);
          }
          UNROLL for (int q = 0; q < S::Q; ++q)
            UNROLL for (int k = 0; k < kWide; ++k) y[q][k] += w[t][q][p] * x[k];
        }
      UNROLL for (int q = 0; q < S::Q; ++q)
        UNROLL for (int k = 0; k < kWide; ++k)
          if (!there(o, i + k)) y[q][k] = 0;
      const u32 place = to + (Out::at(o * S::Q * S::I) + Out::at(i)) * kSize;
      UNROLL for (int q = 0; q < S::Q; ++q) {
        Real grad[2] = {};
        if constexpr (LAST) two_beside<kWide == 2>(place + q * S::TO * kSize, 1, false, grad);
        UNROLL for (int k = 0; k < kWide; ++k) {
          if constexpr (LAST && Pass::BIAS) y[q][k] += bias[q][k];
          y[q][k] = LAST ? finished(y[q][k], grad[k]) : Math::rounded(y[q][k]);
        }
        if constexpr (kWide == 2)
          store_shared(place + q * S::TO * kSize, Pair<Element>(y[q][0], y[q][1]));
        else
          store_shared(place + q * S::TO * kSize, narrow<Element>(y[q][0]));
      }
    }
  }

  // Activation of a sum behind the last stage, which has its bias
  DEVICE Sum<Element> finished(Sum<Element> sum, [[maybe_unused]] Sum<Element> grad = 0) const {
    if constexpr (Pass::BESIDE >= 0)
      return Pass::Gradient::of(sum, grad);
    else
      return activation.of(sum);
  }
  // The bias of a row that begins with element e of a tile whose first unit is `of_sample` of a sample's. Of features that a unit has
  // not, a last chunk's or a second neighbour's, there is none.
  struct RowOfBias {
    using R = typename Pass::Output;
    const Element* bias;
    int left = 0;  // columns of its chunk
    DEVICE RowOfBias(const Params& params, int of_sample, int e)
        : bias(static_cast<const Element*>(params.bias) + i64(blockIdx.y) * Pass::SPLIT_STEP + R::feature(of_sample, e)) {
      if constexpr (R::WIDTH > 0) left = R::WIDTH - (of_sample + e / R::kSize) % R::CHUNKS * R::C;
    }
    // Whether EACH elements lie side by side wherever one begins whose place in a row of WIDTH they divide
    template <int WIDTH, int EACH> static constexpr bool has_whole() {
      constexpr auto divided = [](i64 x) { return x % EACH == 0; };
      return divided(WIDTH) && divided(R::C) && divided(R::WIDTH) && divided(R::STEP) && divided(R::SLICE) && divided(Pass::SPLIT_STEP);
    }
    // Elements behind its begin, of a place in it whose row begins with element r; rows have WIDTH columns.
    template <int WIDTH> static DEVICE int place(int r, int c) { return int(R::at(r)) + (WIDTH <= R::C ? c : int(R::at(c))); }
    template <int WIDTH> DEVICE bool has(int c) const { return c < WIDTH && (R::WIDTH == 0 || (WIDTH <= R::C ? c : c % R::C) < left); }
    template <int WIDTH> DEVICE Sum<Element> at(int r, int c) const {
      u32 words[ceil_div(kSize, 4)];
      load_global<kSize>(bias + place<WIDTH>(r, c), words, has<WIDTH>(c));
      return number_of<Element>(words, 0);
    }
  };
  // Neighbouring tiles of 8 columns that lanes store together, straight to memory, lane t of as many the t-th one's part: 16 bytes
  // of a lane, where rows have so many tiles, so that four lanes store 64 bytes side by side. L2 takes as long for 32.
  template <class S> static constexpr int together() {
    int tiles = kSize < 8 ? 8 / kSize : 1;
    while (tiles > 1 && (S::NT % tiles || (S::BY_ROWS ? S::Q : S::I) % (8 * tiles))) tiles /= 2;
    return tiles;
  }
  // Columns from a lane's sums to what it stores, or loads, for so many tiles
  template <int TILES> DEVICE int exchanged() const { return lane.t % TILES * 6; }
  // Adds the bias to a warp tile's sums. Loads are on their way together. Where rows allow it, lanes load what they would store
  // straight to memory, and exchange that: two numbers of each of eight rows would be a line for 16 bytes.
  template <class S> DEVICE void add_bias(Sums<S>& y, int tile, i64 unit) const {
    using R = typename Pass::Output;
    constexpr int kWidth = S::BY_ROWS ? S::Q : S::I, kDown = 2 * S::MT;
    constexpr int kTiles = RowOfBias::template has_whole<kWidth, 2 * together<S>()>() ? together<S>() : 1;
    constexpr int kEach = RowOfBias::template has_whole<kWidth, 2>() ? 2 * kTiles : 1, kParts = 2 * kTiles / kEach;
    constexpr int kWords = ceil_div(kEach * kSize, 4), kLoads = kDown * S::NT / kTiles, kSome = 16 / (kWords * kParts);
    const auto [first_row, o, first_column] = corner<S>(tile);
    const int row = first_row + lane.g, column = first_column + lane.t * 2, of_sample = Pass::Output::of_sample(unit);
    // By columns, rows are in memory at constants behind the first, where none is parted into chunks.
    constexpr bool kApart = !S::BY_ROWS && (R::ROWS == 1 || kWidth % R::C == 0);
    UNROLL for (int from = 0; from < kLoads; from += kSome) {
      u32 words[kSome][kParts][kWords];
      UNROLL for (int j = 0; j < kSome && from + j < kLoads; ++j) {
        const int h = (from + j) % kDown, n = (from + j) / kDown * kTiles, r = row + h * 8;
        const int down = !S::BY_ROWS && S::DOWN > 1 ? n * 8 / S::IP : 0;
        const bool has_o = S::BY_ROWS || S::ROWS % S::DOWN == 0 || o + down < S::ROWS;
        const bool has_row = has_o && (S::M % (S::MT * 16) == 0 || r < S::M);
        const RowOfBias bias(params, of_sample, S::BY_ROWS ? r * S::Q : (o + down) * S::Q * S::I);
        UNROLL for (int i = 0; i < kParts; ++i) {
          const int c = column + exchanged<kTiles>() + n * 8 - down * S::IP + i;
          const int first = RowOfBias::template place<kWidth>(S::BY_ROWS ? 0 : (kApart ? row : r) * S::I, c);
          load_global<kEach * kSize>(bias.bias + first + (kApart ? int(R::at(h * 8 * S::I)) : 0), words[j][i],
                                     has_row && bias.template has<kWidth>(c));
        }
      }
      UNROLL for (int j = 0; j < kSome && from + j < kLoads; ++j) {
        const int h = (from + j) % kDown, n = (from + j) / kDown * kTiles;
        if constexpr (kTiles > 1) exchange_words<kTiles, kWords / kTiles>(words[j][0]);
        UNROLL for (int i = 0; i < 2 * kTiles; ++i)
          y[h / 2][n + i / 2][h % 2 * 2 + i % 2] += number_of<Element>(words[j][i / kEach], i % kEach);
      }
    }
  }
  // Scaled back, unless what is summed of several terms has been, and with the bias, if they are the LAST stage's
  template <class S, bool LAST> DEVICE void end_sums(Sums<S>& y, int tile, i64 unit, int term) const {
    if constexpr (S::SCALE >= 0 && Pass::RANK == 1) scale_back<S>(y, term);
    if constexpr (LAST && Pass::BIAS) add_bias<S>(y, tile, unit);
  }
  // What is beside two sums, where they will be: TOGETHER, or `further` elements apart, if the second one is there
  template <bool TOGETHER> DEVICE static void two_beside(u32 place, int further, bool second_there, Sum<Element> (&grad)[2]) {
    if constexpr (Pass::BESIDE >= 0) {
      if constexpr (TOGETHER) {
        load_two<Element>(place, grad);
      } else {
        grad[0] = number(place);
        if (second_there) grad[1] = number(place + further * kSize);
      }
    }
  }

  // Of a stage by columns: lanes had better store some neighbouring tiles of 8 columns, TILES, in orders of their own. All lanes
  // storing the same tile, rows of q's that lie TO apart would meet in banks, every APART-th in the same ones: padding is behind
  // several of them.
  template <class S> struct Turns {
    static constexpr int kUnits = 128 / (8 * kSize);  // of eight numbers, in all banks
    static constexpr int meeting() {
      int rows = !S::BY_ROWS && S::PAIRS && kUnits > 2 && S::Out::I % S::I == 0 ? kUnits : 1;
      while (rows > 1 && (S::TO % (8 * rows) || S::NT % rows || S::I % (8 * rows))) rows /= 2;
      return rows;
    }
    static constexpr int TILES = meeting(), APART = kUnits / TILES;
  };
  // Each lane's tile n becomes that of n ^ `which`.
  template <int TILES, class T, int MT, int NT, int COUNT> static DEVICE void exchange(T (&y)[MT][NT][COUNT], int which) {
    UNROLL for (int bit = 1; bit < TILES; bit *= 2) {
      const bool other = which & bit;
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int n = 0; n < NT; ++n)
          UNROLL for (int i = 0; i < COUNT; ++i) {
            if (n & bit) continue;
            const auto here = y[m][n][i], there = y[m][n + bit][i];
            y[m][n][i] = other ? there : here, y[m][n + bit][i] = other ? here : there;
          }
    }
  }

  // Sums to the state that comes out: [q, c] of rows of c's, or, by columns, [o, q, i]. The place of a sum there is that of its row
  // o, plus that of its q, a constant apart from one to the next if they lie EVENLY, plus that of its i. Of a stage in PARTS only one `part` of a tile is
  // a warp's.
  template <class S, bool LAST> DEVICE void write(Sums<S>& y, int tile, u32 to, i64 unit, int term = 0, int part = 0) const {
    using Out = typename S::Out;
    auto [row, o, i] = corner<S>(tile);
    if constexpr (!S::SPLITS) stay_here(row, o);
    row += lane.g, i += lane.t * 2;
    end_sums<S, LAST>(y, tile, unit, term);
    // Two neighbours, the second `further` elements behind the first one's place
    const auto put = [&](int m, int n, int h, u32 place, int further, bool second_there) {
      auto first = y[m][n][h * 2], second = y[m][n][h * 2 + 1];
      if constexpr (LAST) {
        Sum<Element> grad[2] = {};
        two_beside<S::PAIRS>(place, further, second_there, grad);
        first = finished(first, grad[0]), second = finished(second, grad[1]);
      } else {
        first = Math::rounded(first), second = Math::rounded(second);
      }
      if (S::PAIRS && second_there) {
        store_shared(place, Pair<Element>(first, second));
      } else {
        store_shared(place, narrow<Element>(first));
        if (second_there) store_shared(place + further * kSize, narrow<Element>(second));
      }
    };
    if constexpr (LAST) to += piece_of(term, unit);
    if constexpr (S::BY_ROWS) {
      Place<Out> of_row(row * S::Q);
      const u32 first = to + (of_row.place + i * S::TO) * kSize;
      UNROLL for (int h = 0; h < 2 * S::MT; ++h) {
        const int r = row + h * 8;
        const u32 mine = S::SPLITS ? first + Out::at(h * 8 * S::Q) * kSize : to + (of_row.place + i * S::TO) * kSize;
        if constexpr (!S::SPLITS) of_row.template advance<8 * S::Q>();
        if ((S::M % (S::MT * 16) && r >= S::M) || !S::has(part, lane.g + h * 8)) continue;
        UNROLL for (int n = 0; n < S::NT; ++n) {
          const int c = i + n * 8;
          if (S::Q % S::WIDE == 0 || c < S::Q)
            put(h / 2, n, h % 2, S::EVENLY ? mine + n * 8 * S::TO * kSize : to + Out::at(r * S::Q + c) * kSize,
                S::EVENLY ? S::TO : Out::at(r * S::Q + c + 1) - Out::at(r * S::Q + c), S::Q % 2 == 0 || c + 1 < S::Q);
        }
      }
    } else {
      constexpr bool kTogether = Out::I % S::I == 0;  // i's are side by side
      constexpr int kTiles = LAST ? 1 : Turns<S>::TILES;
      const int turn = lane.g / Turns<S>::APART % kTiles;
      constexpr bool kPacked = kTiles > 1 && kSize == 2;  // two sums are one word before lanes part with them
      [[maybe_unused]] u32 words[S::MT][S::NT][2];
      if constexpr (kPacked) {
        UNROLL for (int m = 0; m < S::MT; ++m)
          UNROLL for (int n = 0; n < S::NT; ++n)
            UNROLL for (int h = 0; h < 2; ++h)
              words[m][n][h] = Pair<Element>(Math::rounded(y[m][n][h * 2]), Math::rounded(y[m][n][h * 2 + 1])).bits;
        exchange<kTiles>(words, turn);
      } else {
        exchange<kTiles>(y, turn);
      }
      Place<Out> of_row(o * S::Q * S::I), of_column(kTogether ? 0 : i);
      const int first = of_row.place;
      const auto of_q = [](int o, int q) { return Out::at((o * S::Q + q) * S::I); };
      UNROLL for (int n = 0; n < S::NT; ++n) {
        const int down = S::DOWN > 1 ? n * 8 / S::IP : 0, behind = n * 8 - down * S::IP, c = i + behind;
        if (n > 0 && S::DOWN > 1 && behind == 0) {
          if constexpr (!S::SPLITS) of_row.template advance<S::Q * S::I>();
          if constexpr (!kTogether) of_column = Place<Out>(i);
        }
        const int of_o = S::SPLITS ? first + Out::at(down * S::Q * S::I) : of_row.place;
        const int mine_c = c + ((n ^ turn) - n) * 8;  // of the tile that this lane stores
        const u32 mine = to + (of_o + row * S::TO + (kTogether ? mine_c : of_column.place)) * kSize;
        int further = 1;
        if constexpr (!kTogether) {
          if constexpr (!S::PAIRS) {
            Place<Out> next = of_column;
            next.template advance<1>();
            further = next.place - of_column.place;
          }
          of_column.template advance<8>();
        }
        if ((S::I < S::ACROSS * S::WIDE / S::DOWN && c >= S::I) || (S::ROWS % S::DOWN && o + down >= S::ROWS)) continue;
        if (!S::has(part, lane.t * 2)) continue;
        UNROLL for (int h = 0; h < 2 * S::MT; ++h) {
          if (S::M % (S::MT * 16) && row + h * 8 >= S::M) continue;
          const u32 place = mine + (S::EVENLY ? h * 8 * S::TO : of_q(o + down, row + h * 8) - of_o - row * S::TO) * kSize;
          if constexpr (kPacked)
            store_shared(place, words[h / 2][n][h % 2]);
          else
            put(h / 2, n, h % 2, place, further, S::I % 2 == 0 || c + 1 < S::I);
        }
      }
    }
  }
  // Two sums of a lane of tile n, and those that are stored together with them: `to` is where the first of what a lane stores lies.
  // All lanes have to be here.
  template <class S> DEVICE void store_sums(const Sums<S>& y, int n, int h, Element* to, bool stored) const {
    constexpr int kTiles = together<S>(), kEach = 2 * kSize / 4;
    u32 words[kTiles * kEach];
    UNROLL for (int k = 0; k < kTiles; ++k) {
      const Pair<Element> both(finished(y[h / 2][n + k][h % 2 * 2]), finished(y[h / 2][n + k][h % 2 * 2 + 1]));
      UNROLL for (int i = 0; i < kEach; ++i) words[k * kEach + i] = reinterpret_cast<const u32*>(&both)[i];
    }
    exchange_words<kTiles, kEach>(words);
    if (stored) store_global<4 * kTiles * kEach>(to, words);
  }

  // The same as write() of the last stage, straight to memory.
  template <class S> DEVICE void write_straight(Sums<S>& y, int tile, i64 first, int term) const {
    using R = typename Pass::Output;
    constexpr int kRows = S::ROWS / Pass::UNITS;  // of a unit
    constexpr int kTiles = together<S>();
    static_assert(2 * kTiles * kSize >= 8 && (S::BY_ROWS ? S::Q : S::I) * kSize % 32 == 0);  // a quad stores whole sectors
    const auto [row, o, i] = corner<S>(tile);
    const int mine = row + lane.g, column = i + lane.t * 2;
    const int present = Base::present(first);
    end_sums<S, true>(y, tile, first, term);
    Element* const begin = result(term) + R::from(first);
    if constexpr (S::BY_ROWS) {
      Element* const to = begin + i64(mine) * S::Q + column + exchanged<kTiles>();
      UNROLL for (int h = 0; h < 2 * S::MT; ++h) {
        UNROLL for (int n = 0; n < S::NT; n += kTiles) {
          const int c = column + n * 8;
          const bool stored = mine + h * 8 < present * kRows && (S::Q % S::WIDE == 0 || c < S::Q);
          store_sums<S>(y, n, h, to + h * 8 * S::Q + n * 8, stored);
        }
      }
    } else {
      const int chunk = R::chunk(first);
      const i64 step = R::at(S::I);  // from a q to the next
      Element* to = nullptr;
      bool there = false;
      int left = 0;
      UNROLL for (int n = 0; n < S::NT; n += kTiles) {
        const int down = S::DOWN > 1 ? n * 8 / S::IP : 0, behind = n * 8 - down * S::IP, c = column + behind;
        if (n == 0 || (S::DOWN > 1 && behind == 0)) {
          const int unit = Pass::UNITS > 1 ? (o + down) / kRows : 0, here = chunk + unit, of_chunk = here % R::CHUNKS * R::C;
          there = unit < present && (S::ROWS % S::DOWN == 0 || o + down < S::ROWS);
          to = begin + here / R::CHUNKS * R::SLICE + of_chunk + R::at((o + down - unit * kRows) * S::Q * S::I) + mine * step;
          if constexpr (R::WIDTH > 0) left = R::WIDTH - of_chunk;
        }
        const int other = c + exchanged<kTiles>();
        const bool in_row = there && (S::I == S::ACROSS * S::WIDE / S::DOWN || c < S::I);
        const bool in_chunk = R::WIDTH == 0 || other % R::C < left;
        Element* const at = to + R::at(other);
        UNROLL for (int h = 0; h < 2 * S::MT; ++h) {
          store_sums<S>(y, n, h, at + h * 8 * step, in_row && in_chunk && (S::M % (S::MT * 16) == 0 || mine + h * 8 < S::M));
        }
      }
    }
  }
  template <class S, class NEXT> DEVICE void hand_on(Sums<S>& y, int tile, u32 to, i64 unit, int term) const {
    if constexpr (is_void<NEXT> && Pass::STRAIGHT)
      write_straight<S>(y, tile, unit, term);
    else
      write<S, is_void<NEXT>>(y, tile, to, unit, term);
  }

  // A warp tile's products of a term, or of TERMS from that on, whose states are APART bytes from each other, summed. What has to be
  // scaled back is a term by itself.
  template <class S, int TERMS = 1, int APART = 0> DEVICE void accumulate(Sums<S>& y, int tile, int term, u32 state) const {
    constexpr bool kScaled = S::SCALE >= 0 && Pass::RANK > 1;
    if constexpr (TERMS == 1) {
      multiply<S, true>(y, tile, state, Base::template weight_address<S>(term));
      if constexpr (kScaled) scale_back<S>(y, term);
    } else {
      ROLL for (int t = 0; t < TERMS; ++t) {
        const u32 from = state + t * APART, weight = Base::template weight_address<S>(term + t);
        if constexpr (kScaled) {
          Sums<S> part = {};
          multiply<S, true>(part, tile, from, weight);
          scale_back<S>(part, term + t);
          add_sums(y, part);
        } else {
          multiply<S>(y, tile, from, weight);
        }
      }
    }
    if constexpr (Math::kRepairs) repair<S, TERMS, APART>(y, tile, state, Base::template weight_address<S>(term));
  }

  // A layer's bias and activation. Of what its stage pads q with, an activation of 0, or a NaN, is not handed on, unless ALL q's
  // are there.
  template <class S, bool ALL = S::Q == S::End::Q> DEVICE void end_layer(Sums<S>& y, int tile, int term, int there = S::End::Q) const {
    using End = typename S::End;
    const typename End::Activation activation(params);
    const int column = corner<S>(tile).i + lane.t * 2;
    UNROLL for (int n = 0; n < S::NT; ++n) {
      Sum<Element> bias[2] = {};
      if constexpr (End::BIAS) load_two<Element>(Base::template bias_address<S>(term) + (column + n * 8) * kSize, bias);
      UNROLL for (int m = 0; m < S::MT; ++m)
        UNROLL for (int i = 0; i < 4; ++i) {
          const Sum<Element> made = activation.of(y[m][n][i] + bias[i % 2]);
          y[m][n][i] = ALL || column + n * 8 + i % 2 < there ? made : 0;
        }
    }
  }
  // Its result, which the next layer reads, to memory as well: to the place of a weight
  template <class R, class L, int STORE> DEVICE void keep_state(int weight, i64 tile, u32 from) const {
    Element* to = static_cast<Element*>(const_cast<void*>(params.weights[weight]));
    Base::template store_pieces<R, L, STORE>(tile * Pass::UNITS, from, to);
  }

  // All of a stage's result is written; NEXT is the stage that reads it, or void.
  template <class NEXT> DEVICE void end_stage(u32 to) const {
    if constexpr (is_void<NEXT> && Pass::STRAIGHT) return;
    if constexpr (!is_void<NEXT>)
      zero_padding<NEXT>(to);
    else if constexpr (Pass::BULK_LOAD || Pass::BULK_STORE)
      fence_copy_engine();
    sync();
  }

  // A warp tile's products, and what stands behind them if they are a layer's.
  template <class S> DEVICE void make(Sums<S>& y, int tile, int term, u32 slot) const {
    accumulate<S>(y, tile, term, in_address<S>(slot));
    if constexpr (!is_void<typename S::End>) end_layer<S>(y, tile, term);
  }

  // One contraction of the tile in shared memory.
  template <class S, class NEXT> DEVICE void stage(int term, u32 slot, i64 tile_index) const {
    stage_to<S, NEXT>(term, slot, out_address<S>(slot), tile_index);
  }
  template <class S, class NEXT> DEVICE void stage_to(int term, u32 slot, u32 to, i64 tile_index) const {
    if constexpr (S::BY_THREADS) {
      if constexpr (is_void<NEXT>) wait_for_beside();
      by_threads<S, is_void<NEXT>>(term, in_address<S>(slot), to, tile_index * Pass::UNITS);
    } else if constexpr (S::IN_PLACE) {  // every warp holds its share while the others read
      Sums<S> y = {};
      if (warp < S::TILES) make<S>(y, warp, term, slot);
      if constexpr (is_void<NEXT> && Pass::BESIDE >= 0)
        wait_for_beside();
      else
        sync();
      if (warp < S::TILES) hand_on<S, NEXT>(y, warp, to, tile_index * Pass::UNITS, term);
    } else {
      ROLL for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
        Sums<S> y = {};
        make<S>(y, tile, term, slot);
        if constexpr (is_void<NEXT>) wait_for_beside(tile == warp);
        hand_on<S, NEXT>(y, tile, to, tile_index * Pass::UNITS, term);
      }
      if constexpr (is_void<NEXT>) wait_for_beside(warp >= S::TILES);
    }
    end_stage<NEXT>(to);
  }

  // The last contraction of a sum: of all TERMS' states, APART bytes from each other
  template <class S, int TERMS, int APART> DEVICE void sum_terms(u32 from, u32 to, i64 tile_index) const {
    if constexpr (S::BY_THREADS) {
      wait_for_beside();
      by_threads<S, true, TERMS, APART>(0, from, to, tile_index * Pass::UNITS);
    } else {
      ROLL for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
        Sums<S> y = {};
        accumulate<S, TERMS, APART>(y, tile, 0, from);
        wait_for_beside(tile == warp);
        hand_on<S, void>(y, tile, to, tile_index * Pass::UNITS, 0);
      }
      wait_for_beside(warp >= S::TILES);
    }
    end_stage<void>(to);
  }

  template <class S, class NEXT> DEVICE void sandwich(int term, u32 slot, i64 tile_index) const {
    using A = typename S::First;
    using B = typename S::Second;
    const u32 state = in_address<A>(slot), to = out_address<B>(slot);
    ROLL for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
      constexpr int kTiles = A::Q / (A::MT * 16);  // of one row
      const u32 a = Base::template weight_address<A>(term) + tile % kTiles * A::MT * 16 * A::W_STRIDE * kSize +
                    Math::template lane_row_a<A::W_STRIDE>(lane);
      const u32 x = state + tile / kTiles * A::In::ROW * kSize + Math::template lane_b_by_n<A::In::STEP>(lane);
      const u32 b = Base::template weight_address<B>(term) + Math::template lane_row_b<B::W_STRIDE>(lane);
      Sums<B> y = {};
      ROLL for (int column = 0; column < A::I; column += A::NT * 8) {
        Sums<A> t = {};
        u32 from[A::NT];
        UNROLL for (int n = 0; n < A::NT; ++n) from[n] = x + (column + n * 8) * kSize;
        all_steps<A, A::W_STRIDE>(t, a, from);
        if constexpr (A::SCALE >= 0) scale_back<A>(t, term);
        UNROLL for (int k = 0; k < A::NT * 8; k += Math::kStep) {
          typename Math::A left[A::MT];
          typename Math::B right[B::NT];
          UNROLL for (int m = 0; m < A::MT; ++m) Math::as_a(left[m], &t[m][k / 8]);
          Math::template load_row_b<Math::kStep, B::W_STRIDE, B::NT, false>(right, b + (column + k) * kSize);
          UNROLL for (int m = 0; m < A::MT; ++m)
            UNROLL for (int n = 0; n < B::NT; ++n) Math::template multiply<Math::kStep>(y[m][n], left[m], right[n]);
        }
      }
      if constexpr (is_void<NEXT>) wait_for_beside(tile == warp);
      write<B, is_void<NEXT>>(y, tile, to, tile_index * Pass::UNITS, term);
    }
    if constexpr (is_void<NEXT>) wait_for_beside(warp >= B::TILES);
    end_stage<NEXT>(to);
  }

  // Where the result goes: that of a block's term, or of all its terms one after another
  DEVICE Element* result(int term) const {
    Element* y = static_cast<Element*>(params.y) + i64(blockIdx.y) * Pass::SPLIT_STEP;
    if constexpr (Pass::TERM_OUT > 0) y += (i64(blockIdx.y) + term) * params.batch * Pass::TERM_OUT;
    return y;
  }
  // Bytes by which a tile of the result begins behind whole 16 bytes of memory, and of shared memory, if it lies there AS_MEMORY.
  DEVICE u32 piece_of(int term, i64 first) const {
    if constexpr (Pass::AS_MEMORY)
      return reinterpret_cast<u64>(result(term) + Pass::Output::unit(first)) % 16;
    else
      return 0;
  }
  // Such a tile: its whole 16 bytes, and what is before and behind them by elements
  DEVICE void store_as_memory(int term, i64 first, u32 from) const {
    Element* const to = result(term) + Pass::Output::unit(first);
    const int count = Base::present(first) * Pass::Output::kSize, into = piece_of(term, first) / kSize;
    const int before = min(into > 0 ? kWord - into : 0, count), whole = (count - before) / kWord, behind = before + whole * kWord;
    from += into * kSize;
    UNROLL_BY(4) for (int j = thread; j < whole; j += kThreads)
      store_words<16>(to + before + j * kWord, load_words<16>(from + before * kSize + j * 16));
    if (thread < before) store_words<kSize>(to + thread, load_words<kSize>(from + thread * kSize));
    if (thread < count - behind) store_words<kSize>(to + behind + thread, load_words<kSize>(from + (behind + thread) * kSize));
  }
  DEVICE void store(int term, i64 tile, int slot) const {
    if constexpr (Pass::STRAIGHT) return;
    const u32 from = Pass::FINAL < 0 ? slot_address(slot) : memory + Pass::FINAL;
    if constexpr (Pass::AS_MEMORY) {
      store_as_memory(term, tile * Pass::UNITS, from);
    } else if constexpr (Pass::BULK_STORE) {
      if (warp == 0) store_runs(tile * Pass::UNITS, from, result(term));
    } else {
      Base::template store_pieces<typename Pass::Output, typename Pass::Final, Pass::STORE>(tile * Pass::UNITS, from, result(term));
    }
  }

  // What is beside a tile's sums, to where they will be. Single elements of 16 bits come through registers, from L2, which is asked
  // for them a tile ahead.
  DEVICE const Element* beside() const {
    return static_cast<const Element*>(params.weights[Pass::BESIDE]) + i64(blockIdx.y) * Pass::SPLIT_STEP;
  }
  DEVICE void load_beside(i64 tile) const {
    Base::template load_pieces<typename Pass::Output, typename Pass::Final, Pass::STORE>(beside(), tile * Pass::UNITS,
                                                                                         memory + Pass::BESIDE_AT);
    commit_copies();
    if constexpr (Pass::STORE < 4) Base::template fetch<typename Pass::Output>(beside(), (tile + step()) * Pass::UNITS);
  }
  // Once for each warp and tile, the first time that it has sums, or where it has none
  DEVICE void wait_for_beside(bool now = true) const {
    if constexpr (Pass::BESIDE >= 0)
      if (now) {
        wait_for_copies<Pass::LATER>();
        sync();
      }
  }

  DEVICE void store_runs(i64 first, u32 from, Element* y) const {
    using R = typename Pass::Output;
    constexpr int kRun = Pass::STORE_RUN, kEach = R::kSize / kRun;
    const int present = Base::present(first);
    for (int k = lane.index; k < present * kEach; k += 32)
      store_run(y + R::unit(first + k / kEach) + R::at(k % kEach * kRun), from + Pass::Final::at(k * kRun) * kSize,
                kRun * kSize);
    commit_stores();
  }

  DEVICE void run() const {
    // With one slot, where the result lies, the next tile comes when that has left, and with two, one tile later.
    constexpr bool kInTurn = Pass::FINAL < 0 && Pass::SLOTS == 1, kBehind = Pass::FINAL < 0 && Pass::SLOTS > 1;
    // Tiles are dealt to blocks, so that no block has two more than another one.
    const i64 first = i64(group) * gridDim.x + blockIdx.x;
    begin();
    UNROLL for (int slot = 0; slot < Pass::SLOTS; ++slot) {
      load(first + slot * step(), slot);
      if constexpr (Pass::X_ALONE) pad(slot);
    }
    Base::hold_weights(*this);
    int slot = 0, last = 0;
    u32 phase = 0;
    for (i64 tile = first; tile < tiles(); tile += step()) {
      if constexpr (kInTurn)
        if (tile != first) {
          finish_store();
          sync();
          load(tile, slot);
        }
      wait_for_load<kBehind ? Pass::SLOTS - 2 : Pass::SLOTS - 1>(slot, phase);
      if constexpr (!Pass::X_ALONE) pad(slot);
      if constexpr (!kInTurn) finish_store();
      sync();  // x is there, and the last tile's result has left
      if constexpr (Pass::BESIDE >= 0) load_beside(tile);
      if constexpr (kBehind)
        if (tile != first) load(tile + (Pass::SLOTS - 1) * step(), last);
      ROLL for (int term = 0; term < Pass::MADE; ++term) {
        if (term > 0) {
          finish_store();
          if constexpr (!Pass::RESULT_APART) sync();
        }
        Pass::stages(*this, term, slot, tile);
        if constexpr (Pass::FINAL >= 0 && !Pass::X_ALONE) load_next(tile, slot);
        store(term, tile, slot);
      }
      last = slot;
      if (++slot == Pass::SLOTS) slot = 0, phase ^= 1;
    }
    wait_for_copies<0>();
    if constexpr (Pass::BULK_STORE) wait_for_stores();
  }

  // The copy engine's barriers, one for each slot, and scales lie before the weights.
  DEVICE u32 barrier(int slot) const { return shared_address(shared_memory) + (group * Pass::SLOTS + slot) * 8; }
  DEVICE void begin() const {
    if constexpr (Pass::BULK_LOAD) {
      if (thread < Pass::SLOTS) {
        init_arrivals(barrier(thread));
        fence_copy_engine();
      }
      __syncthreads();
    }
  }
  // LATER: copies to other slots that may still be under way
  template <int LATER> DEVICE void wait_for_load(int slot, u32 phase) const {
    if constexpr (Pass::BULK_LOAD)
      wait_for_bytes(barrier(slot), phase);
    else
      wait_for_copies<LATER>();
  }
  DEVICE void pad(int slot) const {
    for (int held = 0; held < Pass::HELD; ++held)
      zero_padding<typename Pass::FirstStage, !pads_lines<typename Pass::Input, typename Pass::First, Pass::COPY>>(
          slot_address(slot) + held * Pass::kHeldBytes);
  }
  DEVICE void finish_store() const {
    if constexpr (Pass::BULK_STORE)
      if (warp == 0) wait_for_stores_to_read();
  }
};
