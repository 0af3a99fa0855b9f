// Both contractions of a Monarch layer of any sizes in one pass, or of its gradient of x: A groups of P numbers by weights
// [A][R][B][P] to a state [A][R][B], and that, for each of B groups, by weights [B][Q][A][R] to Q numbers.
//
// A block has SAMPLES samples, BB output groups and COLUMNS of their numbers, whose sums stay in registers. Input groups go
// by in chunks of CA, of which the state that these output groups need is made, rounded, and used:
//     x [SAMPLES][CA][P] -> state [BB][SAMPLES][CA * R] in shared memory -> sums [BB][SAMPLES][COLUMNS]
// so that what a state is padded to is a chunk's CA * R, not R. Weights lie in memory in the order of their copies, padded
// and rounded, as MonarchChunkWeights has put them. Results meet in shared memory and are stored by runs.
//
// Where all input groups are one chunk, a block of MonarchKept copies both weights from where they lie, once, and takes tile after
// tile of samples. The next tile's x comes as soon as the states of this one are made. Back, weights are turned as they come, and
// so a state is [R][A] and its weights' rows [B][R]: numbers that lie side by side in either weight are side by side there, too.
//
// kernels/monarch/monarch_chunks.py writes the constants:
//
// Pass:  Math, Element, Activation, BIAS; WARPS, SAMPLES, A, P, B, Q, R; CA, BB, COLUMNS (q's of a block), JN (parts of
//        these, of NT tiles of 8), MT (tiles of 16 samples of a warp), N1 (tiles of 8 of a warp's states); X_STEP (from a p of x
//        to the next; where it is 1, groups lie P apart, else side by side), Y_GROUP and Y_STEP (from a group of y to the
//        next, and from a q, one of which is 1); LOAD (bytes of an access to x), STORE, SLOTS, SECONDS (where second weights lie, in bytes)
// Kept:  also TURNED (weights, back), FIRST and SECOND (parameters), FIRST_LOAD and SECOND_LOAD (bytes of an access to them)
// Weights: FIRST, SECOND, and steps FIRST_A, FIRST_B, FIRST_R, FIRST_P, SECOND_B, SECOND_Q, SECOND_A, SECOND_R
#pragma once
#include "kernels/monarch/monarch_rows.cuh"
#include "kernels/operands.cuh"
#include "finish/pointwise.cuh"
#include "types/params.cuh"

// Sizes that both kernels know
template <class Pass> struct MonarchChunkSizes {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using Tensors = Operands<Math, Element, Pass::WARPS * 32>;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep;
  static constexpr int A = Pass::A, P = Pass::P, B = Pass::B, Q = Pass::Q, R = Pass::R;
  static constexpr int CA = Pass::CA, BB = Pass::BB, COLUMNS = Pass::COLUMNS;
  static constexpr int kP = round_up(P, kStep), kDepth = round_up(CA * R, kStep);  // what either product sums over
  // Rows of first weights for an input group; tiles of the last one read as many behind them. Of second ones for an output group
  static constexpr int kOfGroup = BB * R, kAcross = ceil_div(kOfGroup, Pass::N1 * 8), kBehind = kAcross * Pass::N1 * 8 - kOfGroup;
  static constexpr int kFirstRows = CA * kOfGroup + kBehind, kSecondRows = Pass::JN * Pass::NT * 8;
  static constexpr int kFirstStride = Tensors::stride(kP), kSecondStride = Tensors::stride(kDepth);
  static constexpr int kFirstCount = kFirstRows * kFirstStride, kSecondCount = BB * kSecondRows * kSecondStride;  // of a chunk
  static constexpr int kChunks = ceil_div(A, CA), kParts = ceil_div(B, BB), kRuns = ceil_div(Q, COLUMNS);
};

// Both weights, to the order of a block's copies
template <class Pass> struct MonarchChunkWeights : MonarchChunkSizes<Pass> {
  using Sizes = MonarchChunkSizes<Pass>;
  using typename Sizes::Element;
  using Sizes::A, Sizes::B, Sizes::BB, Sizes::CA, Sizes::P, Sizes::Q, Sizes::R;
  const Params& params;
  DEVICE MonarchChunkWeights(const Params& given) : params(given) {}

  DEVICE Element first(int i) const {
    const int p = i % Sizes::kFirstStride, row = i / Sizes::kFirstStride % Sizes::kFirstRows, part = i / Sizes::kFirstCount;
    const int n = row % Sizes::kOfGroup, r = n / BB;
    const int a = part % Sizes::kChunks * CA + row / Sizes::kOfGroup, b = part / Sizes::kChunks * BB + n % BB;
    if (p >= P || a >= A || b >= B) return Element{};
    const i64 at = a * Pass::FIRST_A + b * Pass::FIRST_B + r * Pass::FIRST_R + p * Pass::FIRST_P;
    return rounded(static_cast<const Element*>(params.weights[Pass::FIRST])[at]);
  }
  DEVICE Element second(int i) const {
    const int k = i % Sizes::kSecondStride, row = i / Sizes::kSecondStride % (BB * Sizes::kSecondRows);
    const int part = i / Sizes::kSecondCount, run = part / Sizes::kChunks % Sizes::kRuns, j = row % Sizes::kSecondRows;
    const int a = part % Sizes::kChunks * CA + k / R, q = run * Pass::COLUMNS + j;
    const int b = part / (Sizes::kChunks * Sizes::kRuns) * BB + row / Sizes::kSecondRows;
    if (k >= CA * R || a >= A || j >= Pass::COLUMNS || q >= Q || b >= B) return Element{};
    const i64 at = b * Pass::SECOND_B + q * Pass::SECOND_Q + a * Pass::SECOND_A + k % R * Pass::SECOND_R;
    return rounded(static_cast<const Element*>(params.weights[Pass::SECOND])[at]);
  }
  static DEVICE Element rounded(Element x) {
    if constexpr (sizeof(Element) == 2) return x;
    else return Pass::Math::rounded(x);
  }
  template <int COUNT, class At> DEVICE void put(Element* to, const At& at) const {
    constexpr int kTogether = 8;
    const int all = gridDim.y * Pass::THREADS;
    ROLL for (int from = blockIdx.y * Pass::THREADS + threadIdx.x; from < COUNT; from += kTogether * all) {
      Element x[kTogether];
      UNROLL for (int i = 0; i < kTogether; ++i) x[i] = from + i * all < COUNT ? at(from + i * all) : Element{};
      UNROLL for (int i = 0; i < kTogether; ++i)
        if (from + i * all < COUNT) store_global(to + from + i * all, x[i]);
    }
  }
  DEVICE void run() const {
    char* to = static_cast<char*>(params.y);
    put<Sizes::kParts * Sizes::kChunks * Sizes::kFirstCount>(reinterpret_cast<Element*>(to), [&](int i) { return first(i); });
    put<Sizes::kParts * Sizes::kRuns * Sizes::kChunks * Sizes::kSecondCount>(
        reinterpret_cast<Element*>(to + Pass::SECONDS), [&](int i) { return second(i); });
  }
};

// A tile of samples, some output groups and some of their numbers
template <class Pass> struct MonarchTile : MonarchChunkSizes<Pass> {
  using Sizes = MonarchChunkSizes<Pass>;
  using typename Sizes::Element;
  using typename Sizes::Math;
  using typename Sizes::Tensors;
  using Real = Sum<Element>;
  using Sizes::kSize, Sizes::kStep, Sizes::A, Sizes::B, Sizes::BB, Sizes::CA, Sizes::P, Sizes::Q, Sizes::R, Sizes::COLUMNS;
  using Sizes::kP, Sizes::kDepth, Sizes::kOfGroup, Sizes::kAcross, Sizes::kSecondRows, Sizes::kFirstStride, Sizes::kSecondStride;
  static constexpr int WARPS = Pass::WARPS, SAMPLES = Pass::SAMPLES, MT = Pass::MT, N1 = Pass::N1, NT = Pass::NT, JN = Pass::JN;
  static constexpr int kThreads = WARPS * 32, kDown = SAMPLES / (16 * MT);
  static constexpr int kStates = CA * kDown * kAcross, kItems = BB * kDown * JN;  // of which warps take turns
  static constexpr int kEach = ceil_div(kItems, WARPS);
  static constexpr int kXStride = Tensors::stride(CA * kP), kStateStride = kSecondStride;
  static constexpr int kXBytes = SAMPLES * kXStride * kSize, kFirstBytes = Sizes::kFirstCount * kSize;
  static constexpr int kSecondBytes = Sizes::kSecondCount * kSize;
  static constexpr int kStateBytes = BB * SAMPLES * kStateStride * kSize;
  // Results of a sample: runs of kInner neighbours
  static constexpr bool kGroupsInner = Pass::Y_STEP > 1;
  static constexpr int kInner = kGroupsInner ? BB : COLUMNS, kOuter = kGroupsInner ? COLUMNS : BB, kLine = kInner * kOuter;
  static constexpr i64 kOuterStep = kGroupsInner ? Pass::Y_STEP : Pass::Y_GROUP;

  const Params& params;
  const Lane lane;
  const int warp;
  const u32 memory, state;
  i64 first;      // sample
  int part, run_; // of output groups, and of their numbers

  // The part of y that is the one of so many, from a sample on; STATE: where its state lies
  DEVICE MonarchTile(const Params& given, int state, i64 sample, int of_y)
      : params(given), warp(uniform(threadIdx.x / 32)), memory(shared_address(shared_memory)), state(memory + state), first(sample),
        part(of_y / Sizes::kRuns), run_(of_y % Sizes::kRuns) {}

  using Rows = MonarchRows<Element, kThreads, SAMPLES, A, P, CA, Pass::X_STEP, kP, kXStride, Pass::LOAD>;
  DEVICE void load_x(int chunk, u32 to) const {
    Rows::load(static_cast<const Element*>(params.x), first, params.batch, chunk * CA, to);
  }
  // What copies never write, and padding of states
  DEVICE void clear(int end) const {
    if constexpr (kP != P || kDepth != CA * R) {
      for (int at = threadIdx.x * 16; at < end; at += kThreads * 16) store_u32x4(memory + at, {0, 0, 0, 0});
      __syncthreads();
    }
  }

  // Of first weights that are rounded now or have been; TURNED: of rows [B][R], to states [R][A]
  template <bool ROUND, bool TURNED = false> DEVICE void make_states(u32 x, u32 firsts) const {
    ROLL for (int item = warp; item < kStates; item += WARPS) {
      const int a = item % CA, m = item / CA % kDown, n = item / (CA * kDown);
      Real sums[MT][N1][4] = {};
      const u32 left = x + (m * (MT * 16) * kXStride + a * kP) * kSize + Math::template lane_row_a<kXStride>(lane);
      const u32 right = firsts + (a * kOfGroup + n * (N1 * 8)) * (kFirstStride * kSize) +
                        Math::template lane_row_b<kFirstStride>(lane);
      Tensors::template multiply<kP / kStep>(sums, Tensors::template tiles_by_rows<kXStride, Math::kRounds>(left),
                                             Tensors::template by_k<kFirstStride, ROUND>(right));
      UNROLL for (int i = 0; i < N1; ++i) {
        const int column = (n * N1 + i) * 8 + lane.t * 2;
        const u32 to = state + (m * (MT * 16) + lane.g) * (kStateStride * kSize) + a * ((TURNED ? 1 : R) * kSize);
        UNROLL for (int k = 0; k < 2; ++k) {
          const int row = column + k, b = TURNED ? row / R : row % BB, r = TURNED ? row % R : row / BB;
          if (row >= BB * R) continue;
          UNROLL for (int j = 0; j < MT * 2; ++j)
            store_shared(to + (b * SAMPLES + j * 8) * (kStateStride * kSize) + r * ((TURNED ? CA : 1) * kSize),
                         narrow<Element>(Math::rounded(sums[j / 2][i][j % 2 * 2 + k])));
        }
      }
    }
  }

  using Sums = Real[kEach][MT][NT][4];
  struct Item { int b, m, j; };
  static DEVICE Item item_of(int item) { return {item % BB, item / BB % kDown, item / (BB * kDown)}; }
  template <bool ROUND> DEVICE void use_states(Sums& y, u32 seconds) const {
    UNROLL for (int i = 0; i < kEach; ++i) {
      const int item = warp + i * WARPS;
      if (kItems % WARPS != 0 && item >= kItems) break;
      const auto [b, m, j] = item_of(item);
      const u32 left = state + (b * SAMPLES + m * (MT * 16)) * (kStateStride * kSize) + Math::template lane_row_a<kStateStride>(lane);
      const u32 right = seconds + (b * kSecondRows + j * (NT * 8)) * (kSecondStride * kSize) +
                        Math::template lane_row_b<kSecondStride>(lane);
      Tensors::template multiply<kDepth / kStep>(y[i], Tensors::template tiles_by_rows<kStateStride, false>(left),
                                                 Tensors::template by_k<kSecondStride, ROUND>(right));
    }
  }

  // With bias and activation, to where a sample's runs lie in shared memory
  DEVICE void put(const Sums& y, u32 result) const {
    const typename Pass::Activation activation(params);
    UNROLL for (int i = 0; i < kEach; ++i) {
      const int item = warp + i * WARPS;
      if (kItems % WARPS != 0 && item >= kItems) break;
      const auto [b, m, j] = item_of(item);
      if (part * BB + b >= B) continue;
      UNROLL for (int n = 0; n < NT * 2; ++n) {
        const int column = (j * NT + n / 2) * 8 + lane.t * 2 + n % 2, q = run_ * COLUMNS + column;
        if (column >= COLUMNS || q >= Q) continue;
        Real bias = 0;
        if constexpr (Pass::BIAS)
          bias = widen(static_cast<const Element*>(params.bias)[i64(part * BB + b) * Pass::Y_GROUP + i64(q) * Pass::Y_STEP]);
        const u32 to = result + (kGroupsInner ? column * BB + b : b * COLUMNS + column) * kSize;
        UNROLL for (int k = 0; k < MT * 2; ++k)
          store_shared(to + (m * (MT * 16) + k * 8 + lane.g) * (kLine * kSize),
                       narrow<Element>(activation.of(y[i][k / 2][n / 2][k % 2 * 2 + n % 2] + bias)));
      }
    }
  }
  DEVICE void store(u32 result, i64 sample) const {
    constexpr bool kWhole = kOuterStep == kInner;  // runs follow each other in memory, too
    constexpr i64 kSample = i64(B) * Q;
    using Runs = MonarchRuns<kThreads, SAMPLES, kWhole ? 1 : kOuter, kWhole ? kLine : kInner, Pass::STORE / kSize, B * Q,
                             int(kOuterStep), kLine, kInner>;
    const int groups = min(BB, B - part * BB), columns = min(COLUMNS, Q - run_ * COLUMNS);
    const int inner = kGroupsInner ? groups : columns, outer = kGroupsInner ? columns : groups;
    const i64 left = params.batch - sample;
    Element* y = static_cast<Element*>(params.y) + sample * kSample + i64(part) * BB * Pass::Y_GROUP + i64(run_) * COLUMNS * Pass::Y_STEP;
    const auto here = [&](const auto& at) { return kWhole ? at.element < outer * inner : at.run < outer && at.element < inner; };
    Runs::template each<Words<Pass::STORE>, 4>(
        left < SAMPLES ? int(left) : SAMPLES,
        [&](const auto& at, auto& x) { x = load_words<Pass::STORE>(result + (at.to + at.element) * kSize); },
        [&](const auto& at, auto& x) {
          if (here(at)) store_words<Pass::STORE>(y + at.from, x);
        });
  }
};

template <class Pass> struct MonarchChunks : MonarchTile<Pass> {
  using Base = MonarchTile<Pass>;
  using Base::params, Base::memory, Base::state, Base::part, Base::run_, Base::kThreads, Base::kXBytes, Base::kFirstBytes;
  using Base::kSecondBytes, Base::kChunks, Base::kParts, Base::kRuns;
  static constexpr int kSlotBytes = kXBytes + kFirstBytes + kSecondBytes, kState = Pass::SLOTS * kSlotBytes;

  DEVICE MonarchChunks(const Params& p) : MonarchChunks(p, i64(blockIdx.y) * gridDim.x + blockIdx.x) {}
  DEVICE MonarchChunks(const Params& p, i64 n)  // neighbours share samples
      : Base(p, kState, n / (kParts * kRuns) * Pass::SAMPLES, int(n % (kParts * kRuns))) {}

  template <int BYTES> static DEVICE void copy_run(u32 to, const char* from) {
    UNROLL_BY(4) for (int at = threadIdx.x * 16; at < BYTES; at += kThreads * 16) copy_async<16>(to + at, from + at, true);
  }
  DEVICE void load(int chunk, int slot) const {
    const u32 to = memory + slot * kSlotBytes;
    const char* prepared = static_cast<const char*>(params.sums);
    copy_run<kFirstBytes>(to + kXBytes, prepared + (i64(part) * kChunks + chunk) * kFirstBytes);
    copy_run<kSecondBytes>(to + kXBytes + kFirstBytes,
                           prepared + Pass::SECONDS + ((i64(part) * kRuns + run_) * kChunks + chunk) * kSecondBytes);
    Base::load_x(chunk, to);
  }

  DEVICE void run() const {
    Base::clear(kState + Base::kStateBytes);
    load(0, 0);
    commit_copies();
    typename Base::Sums y = {};
    ROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int slot = Pass::SLOTS > 1 ? chunk % Pass::SLOTS : 0;
      const u32 x = memory + slot * kSlotBytes;
      wait_for_copies<0>();
      __syncthreads();
      if (Pass::SLOTS > 1 && chunk + 1 < kChunks) load(chunk + 1, (chunk + 1) % Pass::SLOTS);
      commit_copies();
      Base::template make_states<false>(x, x + kXBytes);
      __syncthreads();
      Base::template use_states<false>(y, x + kXBytes + kFirstBytes);
      if (Pass::SLOTS == 1 && chunk + 1 < kChunks) {
        __syncthreads();
        load(chunk + 1, 0);
        commit_copies();
      }
    }
    __syncthreads();
    Base::put(y, memory);
    __syncthreads();
    Base::store(memory, Base::first);
  }
};

template <class Pass> struct MonarchKept : MonarchTile<Pass> {
  using Base = MonarchTile<Pass>;
  using typename Base::Element;
  using Base::A, Base::B, Base::BB, Base::P, Base::Q, Base::R, Base::params, Base::memory, Base::first;
  static constexpr int kFirsts = Base::kXBytes, kSeconds = kFirsts + Base::kFirstBytes, kState = kSeconds + Base::kSecondBytes;
  static constexpr int kResult = kState + Base::kStateBytes;
  static constexpr bool kRound = Base::Math::kRounds, TURNED = Pass::TURNED;
  static_assert(Base::kChunks == 1);

  DEVICE MonarchKept(const Params& p) : Base(p, kState, i64(blockIdx.x) * Pass::SAMPLES, blockIdx.y) {}

  // Of both weights: [A * R][B][P] and [B][Q][A * R], or TURNED [A][P][B * R] and [B][R * A][Q]
  template <int OUTER, int ALL, int LENGTH, int SOME, int ROWS, int STRIDE, int LOAD>
  using Rows = MonarchRows<Element, Base::kThreads, OUTER, ALL, LENGTH, SOME, TURNED ? ALL : 1, STRIDE, ROWS * STRIDE, LOAD>;
  DEVICE const Element* weight(int parameter) const { return static_cast<const Element*>(params.weights[parameter]); }
  DEVICE void load_weights() const {
    constexpr int kOnce = TURNED ? R : 1, kOften = TURNED ? 1 : R;  // where ranks count
    using First = Rows<A * kOften, B * kOnce, P, BB * kOnce, BB * kOnce, Base::kFirstStride, Pass::FIRST_LOAD>;
    using Second = Rows<BB, Q, A * R, Base::COLUMNS, Base::kSecondRows, Base::kSecondStride, Pass::SECOND_LOAD>;
    First::load(weight(Pass::FIRST), 0, A * kOften, Base::part * (BB * kOnce), memory + kFirsts);
    Second::load(weight(Pass::SECOND), Base::part * BB, B, Base::run_ * Base::COLUMNS, memory + kSeconds);
  }

  DEVICE void run() {
    Base::clear(kResult);
    load_weights();
    Base::load_x(0, memory);
    commit_copies();
    ROLL while (first < params.batch) {
      wait_for_copies<0>();
      __syncthreads();
      Base::template make_states<kRound, TURNED>(memory, memory + kFirsts);
      __syncthreads();
      const i64 here = first;
      first += i64(gridDim.x) * Pass::SAMPLES;
      if (first < params.batch) Base::load_x(0, memory);
      commit_copies();
      typename Base::Sums y = {};
      Base::template use_states<kRound>(y, memory + kSeconds);
      Base::put(y, memory + kResult);
      __syncthreads();
      Base::store(memory + kResult, here);
    }
  }
};
