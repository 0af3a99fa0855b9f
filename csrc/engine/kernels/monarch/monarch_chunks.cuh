// Both contractions of a Monarch layer of any sizes in one pass, or of its gradient of x: A groups of P numbers by weights
// [A][B][R][P] to a state [A][B][R], and that, for each of B groups, by weights [B][Q][A][R] to Q numbers.
//
// A block has SAMPLES samples, BB output groups and COLUMNS of their numbers, whose sums stay in registers. Input groups go
// by in chunks of CA, of which the state that these output groups need is made, rounded, and used:
//     x [SAMPLES][CA][P] -> state [BB][SAMPLES][CA * R] in shared memory -> sums [BB][SAMPLES][COLUMNS]
// so that what a state is padded to is a chunk's CA * R, not R. Weights lie in memory in the order of their copies, padded
// and rounded, as MonarchChunkWeights has put them. Results meet in shared memory and are stored by runs.
//
// kernels/monarch/monarch_chunks.py writes the constants:
//
// Pass:  Math, Element, Activation, BIAS; WARPS, SAMPLES, A, P, B, Q, R; CA, BB, COLUMNS (q's of a block), JN (parts of
//        these, of NT tiles of 8), MT (tiles of 16 samples of a warp), N1 (tiles of 8 of a warp's states); X_STEP (from a p of x
//        to the next; where it is 1, groups lie P apart, else side by side), Y_GROUP and Y_STEP (from a group of y to the
//        next, and from a q, one of which is 1); LOAD (bytes of an access to x), STORE, SLOTS, FIRSTS (where first weights lie, in bytes), SECONDS
// Weights: FIRST, SECOND (parameters), and steps FIRST_A, FIRST_B, FIRST_R, FIRST_P, SECOND_B, SECOND_Q, SECOND_A, SECOND_R
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
  static constexpr int kFirstRows = ceil_div(BB * R, Pass::N1 * 8) * Pass::N1 * 8, kSecondRows = Pass::JN * Pass::NT * 8;
  static constexpr int kFirstStride = Tensors::stride(kP), kSecondStride = Tensors::stride(kDepth);
  static constexpr int kFirstCount = CA * kFirstRows * kFirstStride, kSecondCount = BB * kSecondRows * kSecondStride;  // of a chunk
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
    const int p = i % Sizes::kFirstStride, row = i / Sizes::kFirstStride % (CA * Sizes::kFirstRows);
    const int part = i / Sizes::kFirstCount, n = row % Sizes::kFirstRows;
    const int a = part % Sizes::kChunks * CA + row / Sizes::kFirstRows, b = part / Sizes::kChunks * BB + n / R;
    if (p >= P || n >= BB * R || a >= A || b >= B) return Element{};
    const i64 at = a * Pass::FIRST_A + b * Pass::FIRST_B + n % R * Pass::FIRST_R + p * Pass::FIRST_P;
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

template <class Pass> struct MonarchChunks : MonarchChunkSizes<Pass> {
  using Sizes = MonarchChunkSizes<Pass>;
  using typename Sizes::Element;
  using typename Sizes::Math;
  using typename Sizes::Tensors;
  using Real = Sum<Element>;
  using Sizes::kSize, Sizes::kStep, Sizes::A, Sizes::B, Sizes::BB, Sizes::CA, Sizes::P, Sizes::Q, Sizes::R, Sizes::COLUMNS;
  using Sizes::kP, Sizes::kDepth, Sizes::kFirstRows, Sizes::kSecondRows, Sizes::kFirstStride, Sizes::kSecondStride;
  static constexpr int WARPS = Pass::WARPS, SAMPLES = Pass::SAMPLES, MT = Pass::MT, N1 = Pass::N1, NT = Pass::NT, JN = Pass::JN;
  static constexpr int kThreads = WARPS * 32, kDown = SAMPLES / (16 * MT), kAcross = kFirstRows / (8 * N1);
  static constexpr int kStates = CA * kDown * kAcross, kItems = BB * kDown * JN;  // of which warps take turns
  static constexpr int kEach = ceil_div(kItems, WARPS);
  static constexpr int kXStride = Tensors::stride(CA * kP), kStateStride = kSecondStride;
  static constexpr int kXBytes = SAMPLES * kXStride * kSize, kFirstBytes = Sizes::kFirstCount * kSize;
  static constexpr int kSecondBytes = Sizes::kSecondCount * kSize, kSlotBytes = kXBytes + kFirstBytes + kSecondBytes;
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

  DEVICE MonarchChunks(const Params& given)
      : params(given), warp(uniform(threadIdx.x / 32)), memory(shared_address(shared_memory)),
        state(memory + Pass::SLOTS * kSlotBytes) {
    const i64 n = i64(blockIdx.y) * gridDim.x + blockIdx.x;  // neighbours share samples
    first = n / (Sizes::kParts * Sizes::kRuns) * SAMPLES;
    run_ = int(n % Sizes::kRuns), part = int(n / Sizes::kRuns % Sizes::kParts);
  }

  template <int BYTES> static DEVICE void copy_run(u32 to, const char* from) {
    UNROLL_BY(4) for (int at = threadIdx.x * 16; at < BYTES; at += kThreads * 16) copy_async<16>(to + at, from + at, true);
  }
  using Rows = MonarchRows<Element, kThreads, SAMPLES, A, P, CA, Pass::X_STEP, kP, kXStride, Pass::LOAD>;
  DEVICE void load(int chunk, int slot) const {
    const u32 to = memory + slot * kSlotBytes;
    const char* prepared = static_cast<const char*>(params.sums);
    copy_run<kFirstBytes>(to + kXBytes, prepared + (i64(part) * Sizes::kChunks + chunk) * kFirstBytes);
    copy_run<kSecondBytes>(to + kXBytes + kFirstBytes,
                           prepared + Pass::SECONDS + ((i64(part) * Sizes::kRuns + run_) * Sizes::kChunks + chunk) * kSecondBytes);
    Rows::load(static_cast<const Element*>(params.x), first, params.batch, chunk * CA, to);
  }
  // What copies never write, and padding of states
  DEVICE void clear() const {
    constexpr int kEnd = Pass::SLOTS * kSlotBytes + kStateBytes;
    if constexpr (kP != P || kDepth != CA * R) {
      for (int at = threadIdx.x * 16; at < kEnd; at += kThreads * 16) store_u32x4(memory + at, {0, 0, 0, 0});
      __syncthreads();
    }
  }

  DEVICE void make_states(u32 slot) const {
    constexpr bool kRound = Math::kRounds;
    ROLL for (int item = warp; item < kStates; item += WARPS) {
      const int a = item % CA, m = item / CA % kDown, n = item / (CA * kDown);
      Real sums[MT][N1][4] = {};
      const u32 left = slot + (m * (MT * 16) * kXStride + a * kP) * kSize + Math::template lane_row_a<kXStride>(lane);
      const u32 right = slot + kXBytes + (a * kFirstRows + n * (N1 * 8)) * (kFirstStride * kSize) +
                        Math::template lane_row_b<kFirstStride>(lane);
      Tensors::template multiply<kP / kStep>(sums, Tensors::template tiles_by_rows<kXStride, kRound>(left),
                                             Tensors::template by_k<kFirstStride>(right));
      UNROLL for (int i = 0; i < N1; ++i) {
        const int column = (n * N1 + i) * 8 + lane.t * 2;
        const u32 to = state + (m * (MT * 16) + lane.g) * (kStateStride * kSize) + a * (R * kSize);
        UNROLL for (int k = 0; k < 2; ++k) {
          const int b = (column + k) / R, r = (column + k) % R;
          if (b >= BB) continue;
          UNROLL for (int j = 0; j < MT * 2; ++j)
            store_shared(to + (b * SAMPLES + j * 8) * (kStateStride * kSize) + r * kSize,
                         narrow<Element>(Math::rounded(sums[j / 2][i][j % 2 * 2 + k])));
        }
      }
    }
  }

  using Sums = Real[kEach][MT][NT][4];
  struct Item { int b, m, j; };
  static DEVICE Item item_of(int item) { return {item % BB, item / BB % kDown, item / (BB * kDown)}; }
  DEVICE void use_states(Sums& y, u32 slot) const {
    UNROLL for (int i = 0; i < kEach; ++i) {
      const int item = warp + i * WARPS;
      if (kItems % WARPS != 0 && item >= kItems) break;
      const auto [b, m, j] = item_of(item);
      const u32 left = state + (b * SAMPLES + m * (MT * 16)) * (kStateStride * kSize) + Math::template lane_row_a<kStateStride>(lane);
      const u32 right = slot + kXBytes + kFirstBytes + (b * kSecondRows + j * (NT * 8)) * (kSecondStride * kSize) +
                        Math::template lane_row_b<kSecondStride>(lane);
      Tensors::template multiply<kDepth / kStep>(y[i], Tensors::template tiles_by_rows<kStateStride, false>(left),
                                                 Tensors::template by_k<kSecondStride>(right));
    }
  }

  // With bias and activation, to where a sample's runs lie in shared memory
  DEVICE void put(const Sums& y) const {
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
        const u32 to = memory + (kGroupsInner ? column * BB + b : b * COLUMNS + column) * kSize;
        UNROLL for (int k = 0; k < MT * 2; ++k)
          store_shared(to + (m * (MT * 16) + k * 8 + lane.g) * (kLine * kSize),
                       narrow<Element>(activation.of(y[i][k / 2][n / 2][k % 2 * 2 + n % 2] + bias)));
      }
    }
  }
  DEVICE void store() const {
    constexpr bool kWhole = kOuterStep == kInner;  // runs follow each other in memory, too
    constexpr i64 kSample = i64(B) * Q;
    using Runs = MonarchRuns<kThreads, SAMPLES, kWhole ? 1 : kOuter, kWhole ? kLine : kInner, Pass::STORE / kSize, B * Q,
                             int(kOuterStep), kLine, kInner>;
    const int groups = min(BB, B - part * BB), columns = min(COLUMNS, Q - run_ * COLUMNS);
    const int inner = kGroupsInner ? groups : columns, outer = kGroupsInner ? columns : groups;
    const i64 left = params.batch - first;
    Element* y = static_cast<Element*>(params.y) + first * kSample + i64(part) * BB * Pass::Y_GROUP + i64(run_) * COLUMNS * Pass::Y_STEP;
    const auto here = [&](const auto& at) { return kWhole ? at.element < outer * inner : at.run < outer && at.element < inner; };
    Runs::template each<Words<Pass::STORE>, 4>(
        left < SAMPLES ? int(left) : SAMPLES,
        [&](const auto& at, auto& x) { x = load_words<Pass::STORE>(memory + (at.to + at.element) * kSize); },
        [&](const auto& at, auto& x) {
          if (here(at)) store_words<Pass::STORE>(y + at.from, x);
        });
  }

  DEVICE void run() const {
    clear();
    load(0, 0);
    commit_copies();
    Sums y = {};
    ROLL for (int chunk = 0; chunk < Sizes::kChunks; ++chunk) {
      const int slot = Pass::SLOTS > 1 ? chunk % Pass::SLOTS : 0;
      wait_for_copies<0>();
      __syncthreads();
      if (Pass::SLOTS > 1 && chunk + 1 < Sizes::kChunks) load(chunk + 1, (chunk + 1) % Pass::SLOTS);
      commit_copies();
      make_states(memory + slot * kSlotBytes);
      __syncthreads();
      use_states(y, memory + slot * kSlotBytes);
      if (Pass::SLOTS == 1 && chunk + 1 < Sizes::kChunks) {
        __syncthreads();
        load(chunk + 1, 0);
        commit_copies();
      }
    }
    __syncthreads();
    put(y);
    __syncthreads();
    store();
  }
};
