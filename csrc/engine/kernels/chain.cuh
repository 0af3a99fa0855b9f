// A pass: tiles of units go through a list of tied contractions on chip, with every weight resident in shared memory.
//
// A block is GROUPS groups of WARPS warps. Groups share the weights; each takes tile after tile, copies the next ones
// to its slots while it works, and hands the state on from stage to stage through shared memory:
//     slot -> [contraction]* -> bias, activation -> memory
// A contraction is Y[r, q] = sum_p X[r, p] W[q, p] where the mode is the last one (by rows: X is operand A), and
// Y[q, c] = sum_p W[q, p] X[p, c] where modes follow it (W is operand A). All sizes are constants that kernels/resident.py
// writes; sizes that no matrix unit divides are padded with zeros in shared memory.
//
// Pass:  Math, Element, Activation, BIAS; WARPS, GROUPS, UNITS of a tile, SLOTS; UNITS_PER_SAMPLE, Input and Output
//        (Regions); COPY and STORE, bytes of one access, or LOAD_RUN and STORE_RUN, elements of one run, where BULK_LOAD
//        and BULK_STORE say that the copy engine moves them; kBarrierBytes, kWeightBytes, kSlotBytes, kGroupBytes;
//        FirstStage, AlsoRaw (another one that reads what came from memory, or void), First (its layout), Final (of the
//        result) and FINAL (its offset); SPLIT_STEP; load_weights(), stages(); RANK, terms that are summed; TERM_IN and
//        TERM_OUT, a sample's features where x or y has a state for each term (one term behind the other), or 0; HELD,
//        states in a slot, kHeldBytes apart
#pragma once
#include "types/layout.cuh"
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"

// P, Q, I: the contraction's sizes; ROWS: the tile's units times what lies before the mode. MT x NT tiles of 16 x 8 are a
// warp's share. In and Out: layouts of its state and of the next. Offsets in bytes: in, out in the group's memory (-1: the
// slot), weight in the block's. SPLITS says that a tile's place in Out is its lane's plus a constant, PAIRS that two neighbouring
// sums are stored at once. SCALE is where a number lies that the sums are multiplied by, or -1. FROM_SUMS: the state is not in
// shared memory but what a warp has just summed. PARTS says that a sum's place in Out is its row's plus its column's.
template <bool BY_ROWS_, int P_, int Q_, int I_, int ROWS_, int MT_, int NT_, class In_, class Out_, int IN_, int OUT_,
          int WEIGHT_, bool IN_PLACE_, bool SPLITS_, bool PAIRS_, int SCALE_, int W_STRIDE_,
          bool FROM_SUMS_, bool PARTS_>
struct Stage {
  static constexpr bool PARTS = PARTS_;
  static constexpr bool BY_ROWS = BY_ROWS_, FROM_SUMS = FROM_SUMS_, IN_PLACE = IN_PLACE_, SPLITS = SPLITS_, PAIRS = PAIRS_;
  static constexpr int P = P_, Q = Q_, I = I_, ROWS = ROWS_, MT = MT_, NT = NT_, IN = IN_, OUT = OUT_, WEIGHT = WEIGHT_;
  static constexpr int SCALE = SCALE_;
  using In = In_;
  using Out = Out_;
  static constexpr int IP = BY_ROWS ? 1 : round_up(I, 8), PP = round_up(P, 8);
  static constexpr int M = BY_ROWS ? ROWS : Q, N = BY_ROWS ? Q : ROWS * IP;
  static constexpr int M_TILES = ceil_div(M, MT * 16), N_TILES = ceil_div(N, NT * 8), TILES = M_TILES * N_TILES;
  static constexpr int W_STRIDE = W_STRIDE_;  // between a weight's rows
  static constexpr int W_ROWS = BY_ROWS ? N_TILES * NT * 8 : M_TILES * MT * 16;
};

// Two contractions at one visit, of the last two modes: Y = A X B', A by columns, then B by rows. A warp makes its rows of
// A X, some columns at a time, and they are operand A of the second product as they stand: nothing is exchanged.
template <class First_, class Second_> struct Sandwich {
  using First = First_;
  using Second = Second_;
  static constexpr int TILES = Second::TILES;
};

template <class Pass> struct Chain {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), kThreads = Pass::WARPS * 32, kBlock = kThreads * Pass::GROUPS;
  const Params& params;
  const Lane lane;
  const int group, warp, thread;  // thread within the group
  const u32 weights, memory;      // shared addresses: of the block's weights, of this group's memory
  const i64 units;
  const typename Pass::Activation activation;

  DEVICE Chain(const Params& p)
      : params(p), group(threadIdx.x / kThreads), warp(threadIdx.x / 32 % Pass::WARPS), thread(threadIdx.x % kThreads),
        weights(shared_address(shared_memory) + Pass::kBarrierBytes),
        memory(weights + Pass::kWeightBytes + group * Pass::kGroupBytes), units(p.batch * Pass::UNITS_PER_SAMPLE),
        activation(p) {}

  DEVICE void sync() const { sync_group<Pass::WARPS, Pass::GROUPS>(group); }
  // Units of a tile that are there
  DEVICE int present(i64 first) const { return units - first < Pass::UNITS ? int(units - first) : Pass::UNITS; }
  DEVICE u32 slot_address(int slot) const { return memory + slot * Pass::kSlotBytes; }

  // Copies a tile's units, if there is such a tile, to a slot.
  DEVICE void load(i64 tile, i64 tiles, int slot) const {
    if constexpr (Pass::BULK_LOAD) {
      if (warp == 0 && tile < tiles) load_runs(tile * Pass::UNITS, slot);
    } else {
      for (int held = 0; tile < tiles && held < Pass::HELD; ++held)
        load_pieces<typename Pass::Input, typename Pass::First, Pass::COPY>(
            state_of(held), tile * Pass::UNITS, slot_address(slot) + held * Pass::kHeldBytes);
      commit_copies();
    }
  }

  // Where each term has a state of its own, a block takes its own term's, or all of them.
  DEVICE const Element* state_of(int held) const {
    const Element* x = static_cast<const Element*>(params.x);
    if constexpr (Pass::TERM_IN > 0) x += (i64(blockIdx.y) + held) * params.batch * Pass::TERM_IN;
    return x;
  }

  DEVICE void load_runs(i64 first, int slot) const {
    using R = typename Pass::Input;
    constexpr int kRun = Pass::LOAD_RUN, kBytes = kRun * kSize, kEach = R::kSize / kRun;  // runs of a unit
    const int present = this->present(first);
    fence_copy_engine();
    if (lane.index == 0) expect_bytes(barrier(slot), Pass::HELD * present * R::kSize * kSize);
    __syncwarp();
    for (int held = 0; held < Pass::HELD; ++held)
      for (int k = lane.index; k < present * kEach; k += 32)
        load_run(slot_address(slot) + held * Pass::kHeldBytes + Pass::First::at(k * kRun) * kSize,
                 state_of(held) + R::unit(first + k / kEach) + R::at(k % kEach * kRun), kBytes, barrier(slot));
  }

  // Units beyond the last one, and what is missing of a slice's last chunk, become zeros.
  // R: where they lie in memory, Place: in shared memory, COPY: bytes of one access.
  template <class R, class Place, int COPY> DEVICE void load_pieces(const Element* x, i64 first, u32 to) const {
    constexpr int kEach = COPY / kSize, kCount = Pass::UNITS * R::kSize / kEach, kBy = kThreads * kEach;
    if constexpr (COPY < 4 && R::kDense) return load_elements<R, Place>(x, first, to);
    if constexpr (COPY >= 4 && R::side_by_side(Pass::UNITS) && R::splits(kBy) && Place::splits(kBy)) {
      if (first + Pass::UNITS <= units) {
        const Element* from = x + R::unit(first) + R::along(thread * kEach);
        const u32 place = to + Place::at(thread * kEach) * kSize;
#pragma unroll 16
        for (int k = 0; k < ceil_div(kCount, kThreads); ++k)
          if (kCount % kThreads == 0 || k * kThreads + thread < kCount)
            copy_async<COPY>(place + Place::at(k * kBy) * kSize, from + R::along(k * kBy), true);
        return;
      }
    }
    const Element* from = x + R::from(first);
    const int chunk = R::chunk(first), there = present(first) * R::kSize;
    if constexpr (COPY >= 4) {
      Pace<Place, kBy> at(thread * kEach);
      PaceOf<R, Pass::UNITS, kBy> of(chunk, thread * kEach);
#pragma unroll 4
      for (int j = thread; j < kCount; j += kThreads) {
        const bool here = of.e < there && of.is_there();
        copy_async<COPY>(to + at.place * kSize, from + (here ? of.behind() : 0), here);
        at.next(), of.next();
      }
    } else {
      constexpr int kRounds = ceil_div(kCount, kThreads), kAtOnce = kRounds < 8 ? kRounds : 8;
      Pace<Place, kThreads> at(thread);
      PaceOf<R, Pass::UNITS, kThreads> of(chunk, thread);
#pragma unroll 1
      for (int j = thread; j < kCount; j += kThreads * kAtOnce) {
        Element some[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          some[i] = of.e < there && of.is_there() ? from[of.behind()] : Element{};
          of.next();
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (j + i * kThreads < kCount) store_shared(to + at.place * kSize, some[i]);
          at.next();
        }
      }
    }
  }

  // What is too small to be copied, to shared memory: the loads of several are on their way together.
  template <int COUNT, int STEP, class Value, class At> static DEVICE void by_registers(int begin, Value value, At at) {
    constexpr int kRounds = ceil_div(COUNT, STEP), kAtOnce = kRounds < 8 ? kRounds : 8;
#pragma unroll 1
    for (int j = begin; j < COUNT; j += STEP * kAtOnce) {
      Element some[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (j + i * STEP < COUNT) some[i] = value(j + i * STEP);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (j + i * STEP < COUNT) store_shared(at(j + i * STEP), some[i]);
    }
  }

  static constexpr int kWord = 16 / kSize;  // elements
  // Elements of a 16-byte word that lie before `from`.
  static DEVICE int before(const Element* from) { return int(size_t(from) % 16) / kSize; }

  // Units side by side that 16 bytes do not divide: whole words wherever they begin, whose elements find their places.
  template <class R, class Place> DEVICE void load_elements(const Element* x, i64 first, u32 to) const {
    constexpr int kCount = Pass::UNITS * R::kSize, kRounds = ceil_div(kCount / kWord + 2, kThreads);
    constexpr int kAtOnce = kRounds < 4 ? kRounds : 4;
    const Element* from = x + R::unit(first);
    const int skipped = before(from);
    const int left = units - first > 2 * Pass::UNITS ? 2 * kCount : int((units - first) * R::kSize);  // of x
#pragma unroll 1
    for (int j = thread; j * kWord < skipped + kCount; j += kThreads * kAtOnce) {
      Words<16> words[kAtOnce] = {};
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int e = (j + n * kThreads) * kWord - skipped;
        if (e < kCount && e + kWord <= left) {
          words[n] = *reinterpret_cast<const Words<16>*>(from + e);
        } else if (e < kCount) {
#pragma unroll
          for (int k = 0; k < kWord; ++k)
            if (e + k >= 0 && e + k < left) words[n].word[k / 4] |= u64(from[e + k].bits) << k % 4 * 16;
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int e = (j + n * kThreads) * kWord - skipped;
        const auto element = [&](int k) { return u16(words[n].word[k / 4] >> k % 4 * 16); };
        Pace<Place, 1> at(e < 0 ? 0 : e);
        if (e >= 0 && e + kWord <= (left < kCount ? left : kCount)) {
#pragma unroll
          for (int k = 0; k < kWord; ++k) store_shared(to + at.place * kSize, element(k)), at.next();
        } else {
#pragma unroll
          for (int k = 0; k < kWord; ++k)
            if (e + k >= 0 && e + k < kCount) {
              store_shared(to + at.place * kSize, e + k < left ? element(k) : u16(0));
              at.next();
            }
        }
      }
    }
  }

  // Zeros where a layout of a stage pads p up to what the matrix unit takes.
  template <class S> DEVICE void zero_padding(u32 state) const {
    if constexpr (S::PP != S::P && S::BY_ROWS) {
      for (int row = thread; row < S::ROWS; row += kThreads) zeros<S::PP - S::P>(state + (row * S::In::ROW + S::P) * kSize);
    } else if constexpr (S::PP != S::P) {  // whole p's, with what lies between them
      constexpr int kWords = (S::PP - S::P) * S::In::STEP / kWord;
      for (int j = thread; j < S::ROWS * kWords; j += kThreads)
        store_u32x4(state + (j / kWords * S::In::ROW + S::P * S::In::STEP) * kSize + j % kWords * 16, {0, 0, 0, 0});
    }
  }
  template <int COUNT> static DEVICE void zeros(u32 to) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) store_shared(to + i * kSize, Element{});
  }

  // Weight [Q, P] to its place in shared memory, rows and columns padded with zeros.
  template <class S> DEVICE void load_weight(int term, const Element* weight) const {
    constexpr bool kPermuted = Math::place_of(1, S::FROM_SUMS) != 1;
    constexpr int kEach = kPermuted || S::P * kSize % 16 ? 1 : 16 / kSize;
    constexpr int kRow = S::PP / kEach, kCount = S::W_ROWS * kRow;
    const u32 to = weight_address<S>(term);
    const auto place = [&](int q, int p) { return to + (q * S::W_STRIDE + Math::place_of(p, S::FROM_SUMS)) * kSize; };
    if constexpr (kEach * kSize >= 4) {
#pragma unroll 4
      for (int j = threadIdx.x; j < kCount; j += kBlock) {
        const int q = j / kRow, p = j % kRow * kEach;
        const bool present = q < S::Q && p < S::P;
        copy_async<kEach * kSize>(place(q, p), weight + (present ? q * S::P + p : 0), present);
      }
    } else {
      by_registers<kCount, kBlock>(
          threadIdx.x,
          [&](int j) {
            const int q = j / kRow, p = j % kRow;
            return q < S::Q && p < S::P ? weight[q * S::P + p] : Element{};
          },
          [&](int j) { return place(j / kRow, j % kRow); });
    }
  }

  // A weight made as it is loaded: `at` gives its elements.
  template <class S, class At> DEVICE void make_weight(int term, At at) const {
    constexpr int kCount = S::W_ROWS * S::PP;
    const u32 to = weight_address<S>(term);
    by_registers<kCount, kBlock>(
        threadIdx.x,
        [&](int j) {
          const int q = j / S::PP, p = j % S::PP;
          return q < S::Q && p < S::P ? at(q, p) : Element{};
        },
        [&](int j) { return to + (j / S::PP * S::W_STRIDE + Math::place_of(j % S::PP, S::FROM_SUMS)) * kSize; });
  }
  template <class S> DEVICE void keep_scale(float scale) const {
    if (threadIdx.x == 0) store_shared(shared_address(shared_memory) + S::SCALE, 1 / scale);
  }
  template <class S> DEVICE float kept_scale() const {
    return __uint_as_float(load_u32(shared_address(shared_memory) + S::SCALE));
  }

  template <class S> DEVICE u32 weight_address(int term) const {
    return weights + S::WEIGHT + term * S::W_ROWS * S::W_STRIDE * kSize;
  }

  template <class S> DEVICE u32 in_address(u32 slot) const { return S::IN < 0 ? slot : memory + S::IN; }
  template <class S> DEVICE u32 out_address(u32 slot) const { return S::OUT < 0 ? slot : memory + S::OUT; }

  template <class S> using Sums = Sum<Element>[S::MT][S::NT][4];

  // Adds one warp tile's products to y.
  template <class S> DEVICE void multiply(Sums<S>& y, int tile, u32 state, u32 weight) const {
    int row = tile % S::M_TILES * S::MT * 16, column = tile / S::M_TILES * S::NT * 8;
    constexpr bool kAligned = S::IP % (S::NT * 8) == 0 || (S::NT * 8) % S::IP == 0;
    if constexpr (!kAligned) stay_here(row, column);
    u32 a, b[S::NT];
    constexpr int kStepA = S::BY_ROWS ? S::In::ROW : S::W_STRIDE;  // between rows of A
    if constexpr (S::BY_ROWS) {
      a = state + row * S::In::ROW * kSize + Math::template lane_row_a<S::In::ROW>(lane);
      b[0] = weight + column * S::W_STRIDE * kSize + Math::template lane_row_b<S::W_STRIDE>(lane);
    } else {
      a = weight + row * S::W_STRIDE * kSize + Math::template lane_row_a<S::W_STRIDE>(lane);
      const u32 from = state + Math::template lane_b_by_n<S::In::STEP>(lane);
      b[0] = from + (column / S::IP * S::In::ROW + column % S::IP) * kSize;
      [[maybe_unused]] int i = column % S::IP;
#pragma unroll
      for (int n = 1; n < S::NT; ++n) {
        if constexpr (kAligned) {
          b[n] = b[0] + (n * 8 / S::IP * S::In::ROW + n * 8 % S::IP) * kSize;
        } else {  // the next eight of this row, or of the next one
          i += 8;
          const bool over = i == S::IP;
          i = over ? 0 : i, b[n] = b[n - 1] + (over ? S::In::ROW - S::IP + 8 : 8) * kSize;
        }
      }
    }
    all_steps<S, kStepA>(y, a, b);
  }

  template <class S, int STEP_A> DEVICE void all_steps(Sums<S>& y, u32 a, const u32 (&b)[S::NT]) const {
    constexpr int kSteps = ceil_div(S::PP, Math::kStep);
    constexpr int kWhole = S::PP / Math::kStep;
    if constexpr (Math::kFlush > 0) {
#pragma unroll 2
      for (int k = 0; k < kSteps; k += Math::kFlush) {
        Sums<S> part = {};
#pragma unroll
        for (int j = 0; j < Math::kFlush; ++j)
          if (kSteps % Math::kFlush == 0 || k + j < kSteps) step<S, Math::kStep, STEP_A>(part, a, b, (k + j) * Math::kStep);
        add<S>(y, part);
      }
    } else {
#pragma unroll(kSteps <= 8 ? kSteps : 4)
      for (int k = 0; k < kWhole; ++k) step<S, Math::kStep, STEP_A>(y, a, b, k * Math::kStep);
      if constexpr (kWhole < kSteps) step<S, 8, STEP_A>(y, a, b, kWhole * Math::kStep);
    }
  }

  // Whether a stage reads what came from memory; states between stages, and weights, are stored as the matrix unit
  // wants them.
  template <class S> static constexpr bool kRaw = is_same<S, typename Pass::FirstStage> || is_same<S, typename Pass::AlsoRaw>;

  template <class S, int K, int STEP_A> DEVICE void step(Sums<S>& y, u32 a_from, const u32 (&b_from)[S::NT], int k) const {
    typename Math::A a[S::MT];
    typename Math::B b[S::NT];
#pragma unroll
    for (int m = 0; m < S::MT; ++m) Math::template load_row_a<K, STEP_A, S::BY_ROWS && kRaw<S>>(a[m], a_from + (m * 16 * STEP_A + k) * kSize);
    if constexpr (S::BY_ROWS) {
      Math::template load_row_b<K, S::W_STRIDE, S::NT, false>(b, b_from[0] + k * kSize);
    } else {
      u32 from[S::NT];
#pragma unroll
      for (int n = 0; n < S::NT; ++n) from[n] = b_from[n] + k * S::In::STEP * kSize;
      // Pairs of tiles are read at once where the second's columns lie at one distance from the first's: in the same row,
      // which a pair that begins at an odd tile may leave.
      constexpr bool kSameRow = S::IP % 16 == 0 && (S::NT % 2 == 0 || S::IP % (S::NT * 8) == 0);
      constexpr int kPairStep = kSameRow ? 8 : S::IP == 8 ? S::In::ROW : 0;
      Math::template load_b_by_n<K, S::In::STEP, S::NT, kPairStep, kRaw<S>>(b, from, lane.index);
    }
#pragma unroll
    for (int m = 0; m < S::MT; ++m)
#pragma unroll
      for (int n = 0; n < S::NT; ++n) Math::template multiply<K>(y[m][n], a[m], b[n]);
  }

  // Infinities and NaNs are not what they should be once an operand is split: such sums are made again, one by one.
  template <class S> DEVICE void repair(Sums<S>& y, int tile, u32 state, u32 weight) const {
    bool finite = true;
#pragma unroll
    for (auto& row : y)
#pragma unroll
      for (auto& four : row)
#pragma unroll
        for (float value : four) finite &= fabsf(value) <= 3.402823466e38f;
    if (__all_sync(~0u, finite)) return;
    const int row = tile % S::M_TILES * S::MT * 16, column = tile / S::M_TILES * S::NT * 8;
#pragma unroll
    for (int m = 0; m < S::MT; ++m)
#pragma unroll
      for (int n = 0; n < S::NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (fabsf(y[m][n][i]) <= 3.402823466e38f) continue;
          const int r = row + m * 16 + i / 2 * 8 + lane.g, c = column + n * 8 + lane.t * 2 + i % 2;
          const int q = S::BY_ROWS ? c : r;
          const int x = S::BY_ROWS ? r * S::In::ROW : c / S::IP * S::In::ROW + c % S::IP;
          float sum = 0;
#pragma unroll 1
          for (int p = 0; p < S::P; ++p)
            sum += __uint_as_float(load_u32(state + (x + p * S::In::STEP) * kSize)) *
                   __uint_as_float(load_u32(weight + (q * S::W_STRIDE + Math::place_of(p, S::FROM_SUMS)) * kSize));
          y[m][n][i] = sum;
        }
  }

  template <class S, bool LAST> DEVICE void write(const Sums<S>& y, int tile, u32 to, i64 unit) const {
    int row = tile % S::M_TILES * S::MT * 16 + lane.g, column = tile / S::M_TILES * S::NT * 8 + lane.t * 2;
    if constexpr (!S::SPLITS && S::PARTS) return write_by_parts<S, LAST>(y, row, column, to, unit);
    if constexpr (!S::SPLITS) stay_here(row, column);
    const u32 mine = to + S::Out::at(element<S>(row, column)) * kSize;
    [[maybe_unused]] float scale = 1;
    if constexpr (S::SCALE >= 0) scale = kept_scale<S>();
#pragma unroll
    for (int m = 0; m < S::MT; ++m)
#pragma unroll
      for (int n = 0; n < S::NT; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = m * 16 + h * 8, c = n * 8;
          auto first = y[m][n][h * 2], second = y[m][n][h * 2 + 1];
          if constexpr (S::SCALE >= 0) first *= scale, second *= scale;
          if (!inside<S>(row + r, column + c)) continue;
          if constexpr (LAST) {
            first = finished<S>(first, row + r, column + c, unit);
            second = finished<S>(second, row + r, column + c + 1, unit);
          } else {
            first = Math::rounded(first), second = Math::rounded(second);
          }
          u32 place;
          if constexpr (S::SPLITS)
            place = mine + S::Out::at(element<S>(r, c)) * kSize;
          else
            place = to + S::Out::at(element<S>(row + r, column + c)) * kSize;
          if constexpr (S::PAIRS) {
            store_shared(place, Pair<Element>(first, second));
          } else {
            store_shared(place, narrow<Element>(first));
            if (inside<S>(row + r, column + c + 1))
              store_shared(to + S::Out::at(element<S>(row + r, column + c + 1)) * kSize, narrow<Element>(second));
          }
        }
  }
  // The same where places are computed as the kernel runs: once for each row, and for each column.
  template <class S, bool LAST> DEVICE void write_by_parts(const Sums<S>& y, int row, int column, u32 to, i64 unit) const {
    [[maybe_unused]] float scale = 1;
    if constexpr (S::SCALE >= 0) scale = kept_scale<S>();
    int columns[2 * S::NT];  // their places, or -1
#pragma unroll
    for (int n = 0; n < 2 * S::NT; ++n) {
      const int c = column + n / 2 * 8 + n % 2;
      columns[n] = c < S::N && (S::BY_ROWS || S::I == S::IP || c % S::IP < S::I) ? S::Out::at(element<S>(0, c)) : -1;
    }
#pragma unroll
    for (int h = 0; h < 2 * S::MT; ++h) {
      const int r = row + h * 8;
      if (r >= S::M) continue;
      const u32 mine = to + S::Out::at(element<S>(r, 0)) * kSize;
#pragma unroll
      for (int n = 0; n < 2 * S::NT; ++n) {
        if (columns[n] < 0) continue;
        auto sum = y[h / 2][n / 2][h % 2 * 2 + n % 2];
        if constexpr (S::SCALE >= 0) sum *= scale;
        if constexpr (LAST)
          sum = finished<S>(sum, r, column + n / 2 * 8 + n % 2, unit);
        else
          sum = Math::rounded(sum);
        store_shared(mine + columns[n] * kSize, narrow<Element>(sum));
      }
    }
  }
  // A sum with bias and activation
  template <class S> DEVICE Sum<Element> finished(Sum<Element> sum, int row, int column, i64 unit) const {
    if constexpr (Pass::BIAS) {
      using R = typename Pass::Output;
      const int e = element<S>(row, column);
      if (inside<S>(row, column) && e < present(unit) * R::kSize && R::has(R::chunk(unit), e))
        sum += widen(static_cast<const Element*>(params.bias)[i64(blockIdx.y) * Pass::SPLIT_STEP +
                                                              R::feature(R::of_sample(unit), e)]);
    }
    return activation.of(sum);
  }
  // The place of a sum in the state that comes out, and whether it belongs to it or to padding.
  template <class S> static constexpr DEVICE int element(int row, int column) {
    return S::BY_ROWS ? row * S::Q + column : (column / S::IP * S::Q + row) * S::I + column % S::IP;
  }
  template <class S> static DEVICE bool inside(int row, int column) {
    return (S::M % (S::MT * 16) == 0 || row < S::M) && (S::N % (S::NT * 8) == 0 || column < S::N) &&
           (S::BY_ROWS || S::I == S::IP || column % S::IP < S::I);
  }

  // Adds one term's products. What has to be repaired is a term by itself.
  template <class S> DEVICE void accumulate(Sums<S>& y, int tile, int term, u32 slot) const {
    const u32 weight = weight_address<S>(term), state = in_address<S>(slot);
    if constexpr (Math::kRepairs && Pass::RANK > 1) {
      Sums<S> part = {};
      multiply<S>(part, tile, state, weight);
      repair<S>(part, tile, state, weight);
      add<S>(y, part);
    } else {
      multiply<S>(y, tile, state, weight);
      if constexpr (Math::kRepairs) repair<S>(y, tile, state, weight);
    }
  }
  template <class S> static DEVICE void add(Sums<S>& y, const Sums<S>& part) {
#pragma unroll
    for (int m = 0; m < S::MT; ++m)
#pragma unroll
      for (int n = 0; n < S::NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) y[m][n][i] += part[m][n][i];
  }

  // All of a stage's result is written; NEXT is the stage that reads it, or void.
  template <class NEXT> DEVICE void end_stage(u32 to) const {
    if constexpr (!is_void<NEXT>)
      zero_padding<NEXT>(to);
    else if constexpr (Pass::BULK_LOAD || Pass::BULK_STORE)
      fence_copy_engine();
    sync();
  }

  // One contraction of the tile in shared memory.
  template <class S, class NEXT> DEVICE void stage(int term, u32 slot, i64 tile_index) const {
    const u32 to = out_address<S>(slot);
    if constexpr (S::IN_PLACE) {  // every warp holds its share while the others read
      Sums<S> y = {};
      if (warp < S::TILES) accumulate<S>(y, warp, term, slot);
      sync();
      if (warp < S::TILES) write<S, is_void<NEXT>>(y, warp, to, tile_index * Pass::UNITS);
    } else {
#pragma unroll 1
      for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
        Sums<S> y = {};
        accumulate<S>(y, tile, term, slot);
        write<S, is_void<NEXT>>(y, tile, to, tile_index * Pass::UNITS);
      }
    }
    end_stage<NEXT>(to);
  }

  template <class S, class NEXT> DEVICE void sandwich(u32 slot, i64 tile_index) const {
    using A = typename S::First;
    using B = typename S::Second;
    const u32 state = in_address<A>(slot), to = out_address<B>(slot);
#pragma unroll 1
    for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
      constexpr int kTiles = A::Q / (A::MT * 16);  // of one row
      const u32 a = weight_address<A>(0) + tile % kTiles * A::MT * 16 * A::W_STRIDE * kSize +
                    Math::template lane_row_a<A::W_STRIDE>(lane);
      const u32 x = state + tile / kTiles * A::In::ROW * kSize + Math::template lane_b_by_n<A::In::STEP>(lane);
      const u32 b = weight_address<B>(0) + Math::template lane_row_b<B::W_STRIDE>(lane);
      Sums<B> y = {};
#pragma unroll 1
      for (int column = 0; column < A::I; column += A::NT * 8) {
        Sums<A> t = {};
        u32 from[A::NT];
#pragma unroll
        for (int n = 0; n < A::NT; ++n) from[n] = x + (column + n * 8) * kSize;
        all_steps<A, A::W_STRIDE>(t, a, from);
        if constexpr (A::SCALE >= 0) {
          const float scale = kept_scale<A>();
#pragma unroll
          for (auto& row : t)
#pragma unroll
            for (auto& four : row)
#pragma unroll
              for (auto& sum : four) sum *= scale;
        }
#pragma unroll
        for (int k = 0; k < A::NT * 8; k += Math::kStep) {
          typename Math::A left[A::MT];
          typename Math::B right[B::NT];
#pragma unroll
          for (int m = 0; m < A::MT; ++m) Math::as_a(left[m], &t[m][k / 8]);
          Math::template load_row_b<Math::kStep, B::W_STRIDE, B::NT, false>(right, b + (column + k) * kSize);
#pragma unroll
          for (int m = 0; m < A::MT; ++m)
#pragma unroll
            for (int n = 0; n < B::NT; ++n) Math::template multiply<Math::kStep>(y[m][n], left[m], right[n]);
        }
      }
      write<B, is_void<NEXT>>(y, tile, to, tile_index * Pass::UNITS);
    }
    end_stage<NEXT>(to);
  }

  // The result to memory
  DEVICE void store(i64 tile, u32 slot) const {
    const u32 from = Pass::FINAL < 0 ? slot : memory + Pass::FINAL;
    Element* y = static_cast<Element*>(params.y) + i64(blockIdx.y) * Pass::SPLIT_STEP;
    if constexpr (Pass::TERM_OUT > 0) y += i64(blockIdx.y) * params.batch * Pass::TERM_OUT;
    if constexpr (Pass::BULK_STORE) {
      if (warp == 0) store_runs(tile * Pass::UNITS, from, y);
    } else {
      store_pieces<typename Pass::Output, typename Pass::Final, Pass::STORE>(tile * Pass::UNITS, from, y);
    }
  }

  DEVICE void store_runs(i64 first, u32 from, Element* y) const {
    using R = typename Pass::Output;
    constexpr int kRun = Pass::STORE_RUN, kEach = R::kSize / kRun;
    const int present = this->present(first);
    for (int k = lane.index; k < present * kEach; k += 32)
      store_run(y + R::unit(first + k / kEach) + R::at(k % kEach * kRun), from + Pass::Final::at(k * kRun) * kSize,
                kRun * kSize);
    commit_stores();
  }

  // A unit's first `limit` elements, of a part that may reach behind what it is a part of.
  template <class R, class Place, int STORE, bool LIMITED = false>
  DEVICE void store_pieces(i64 first, u32 from, Element* y, int limit = R::kSize) const {
    constexpr int kEach = STORE / kSize, kCount = Pass::UNITS * R::kSize / kEach, kBy = kThreads * kEach;
    if constexpr (STORE < 4 && R::kDense && !LIMITED) return store_elements<R, Place>(first, from, y);
    if constexpr (R::side_by_side(Pass::UNITS) && R::splits(kBy) && Place::splits(kBy)) {
      if (first + Pass::UNITS <= units && (!LIMITED || limit >= R::kSize)) {
        Element* to = y + R::unit(first) + R::along(thread * kEach);
        const u32 place = from + Place::at(thread * kEach) * kSize;
#pragma unroll 8
        for (int k = 0; k < ceil_div(kCount, kThreads); ++k)
          if (kCount % kThreads == 0 || k * kThreads + thread < kCount)
            store_words<STORE>(to + R::along(k * kBy),
                               load_words<STORE>(place + Place::at(k * kBy) * kSize));
        return;
      }
    }
    y += R::from(first);
    const int chunk = R::chunk(first), there = present(first) * R::kSize;
    Pace<Place, kBy> at(thread * kEach);
    PaceOf<R, Pass::UNITS, kBy> of(chunk, thread * kEach);
#pragma unroll 4
    for (int j = thread; j < kCount; j += kThreads) {
      if (of.e < there && of.is_there() && !(LIMITED && of.e % R::kSize >= limit))
        store_words<STORE>(y + of.behind(), load_words<STORE>(from + at.place * kSize));
      at.next(), of.next();
    }
  }

  // The other way round: the elements of a word are put together.
  template <class R, class Place> DEVICE void store_elements(i64 first, u32 from, Element* y) const {
    Element* to = y + R::unit(first);
    const int skipped = before(to), present = this->present(first) * R::kSize;
#pragma unroll 2
    for (int j = thread; j * kWord < skipped + present; j += kThreads) {
      const int e = j * kWord - skipped;
      Pace<Place, 1> at(e < 0 ? 0 : e);
      Words<16> word = {};
      if (e >= 0 && e + kWord <= present) {
#pragma unroll
        for (int k = 0; k < kWord; ++k) word.word[k / 4] |= u64(load_u16(from + at.place * kSize)) << k % 4 * 16, at.next();
        store_words<16>(to + e, word);
      } else {
#pragma unroll
        for (int k = 0; k < kWord; ++k)
          if (e + k >= 0 && e + k < present) {
            word.word[k / 4] |= u64(load_u16(from + at.place * kSize)) << k % 4 * 16;
            at.next();
          }
#pragma unroll
        for (int k = 0; k < kWord; ++k)
          if (e + k >= 0 && e + k < present) store_global(to + e + k, Element{u16(word.word[k / 4] >> k % 4 * 16)});
      }
    }
  }

  // Weights in shared memory, behind what has been asked for, for all threads. `kernel` is this, or what has it as its base.
  template <class Kernel> DEVICE void hold_weights(const Kernel& kernel) const {
    Pass::load_weights(kernel);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    if constexpr (Math::kRounds) {
      for (int at = threadIdx.x * 4; at < Pass::kWeightBytes; at += kBlock * 4)
        store_shared(weights + at, tf32_of(load_u32(weights + at)));
      __syncthreads();
    }
  }

  DEVICE void run() const {
    const i64 tiles = (units + Pass::UNITS - 1) / Pass::UNITS, step = i64(gridDim.x) * Pass::GROUPS;
    const i64 first = i64(blockIdx.x) * Pass::GROUPS + group;
    begin();
#pragma unroll
    for (int slot = 0; slot < Pass::SLOTS; ++slot) load(first + slot * step, tiles, slot);
    hold_weights(*this);
    int slot = 0, last = 0;
    u32 phase = 0;
    for (i64 tile = first; tile < tiles; tile += step) {
      if (tile != first) {
        finish_store();
        sync();  // the last tile's result has left
        if constexpr (Pass::FINAL < 0) load(tile + (Pass::SLOTS - 1) * step, tiles, last);
      }
      wait_for_load(slot, phase);
      if constexpr (!Pass::BULK_LOAD || Pass::FirstStage::PP != Pass::FirstStage::P) {
        for (int held = 0; held < Pass::HELD; ++held)
          zero_padding<typename Pass::FirstStage>(slot_address(slot) + held * Pass::kHeldBytes);
        sync();
      }
      Pass::stages(*this, slot_address(slot), tile);
      if constexpr (Pass::FINAL >= 0) load(tile + Pass::SLOTS * step, tiles, slot);
      store(tile, slot_address(slot));
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
  DEVICE void wait_for_load(int slot, u32 phase) const {
    if constexpr (Pass::BULK_LOAD)
      wait_for_bytes(barrier(slot), phase);
    else
      wait_for_copies<Pass::SLOTS - 1>();
  }
  DEVICE void finish_store() const {
    if constexpr (Pass::BULK_STORE)
      if (warp == 0) wait_for_stores_to_read();
  }
};
