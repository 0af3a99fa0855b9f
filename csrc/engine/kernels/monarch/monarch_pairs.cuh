// Gradients of both weights of a Monarch layer of any sizes, from x and grad_y. For input group k and output group l
//     s = x_k W0_kl'    [samples][R]        dW0_kl = gs' x_k    [R][P]
//     gs = g_l W1_kl    [samples][R]        dW1_kl = s' g_l     [R][S]
// depends on no other pair. A block has KB input and LB output groups, their weights in shared memory and their sums in
// registers. Of each tile of SAMPLES it makes both states, rounded, to shared memory, whose rows are then summed over:
// those of all r's and groups of the other kind together, so that small ranks are not padded by themselves.
//
// Either kind of groups is a side: what it multiplies are rows of its own tensor. kernels/monarch/monarch_pairs.py writes
// the constants:
//
// Pass:  Math, Element; WARPS, SAMPLES, DOWN (tiles of 16 samples of a warp's states), SLOTS; R; GRAD (the parameter that grad_y is),
//        COUNT (sums of a block); X and Y, the sides. Side: WEIGHT, ALL (groups), NUMBERS, SOME (groups of a block), STEP (between
//        numbers), N1 (tiles of 8 of a warp's states), MT, NT (of its gradients), LOAD (monarch_rows.cuh); of the weight and its
//        gradient, GROUP, OTHER, RANK and NUMBER (steps), BEGIN (where its gradient lies)
#pragma once
#include "kernels/monarch/monarch_rows.cuh"
#include "kernels/operands.cuh"
#include "types/params.cuh"

template <class Pass> struct MonarchPairs {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  static constexpr int WARPS = Pass::WARPS, SAMPLES = Pass::SAMPLES, DOWN = Pass::DOWN, R = Pass::R;
  static constexpr int kThreads = WARPS * 32, kSize = sizeof(Element), kStep = Math::kStep;
  using Tensors = Operands<Math, Element, kThreads>;
  static constexpr bool kPairs = Tensors::kPairs, kRound = Math::kRounds;

  // Side S, where a block has OTHERS groups of the other one
  template <class S, int OTHERS> struct Of : S {
    static constexpr int kP = round_up(S::NUMBERS, kStep), kColumns = OTHERS * R;  // of its states
    static constexpr int kAcross = ceil_div(kColumns, 8 * S::N1), kWeightRows = kAcross * 8 * S::N1;
    static constexpr int kWeightStride = Tensors::stride(kP), kWeightBytes = S::SOME * kWeightRows * kWeightStride * kSize;
    static constexpr int kM = ceil_div(kColumns, 16 * S::MT), kN = ceil_div(S::NUMBERS, 8 * S::NT);  // tiles of its gradient
    static constexpr int kItems = S::SOME * kM * kN, kEach = ceil_div(kItems, WARPS);
    static constexpr int kWidth = (S::SOME - 1) * kP + (kN * 8 * S::NT > kP ? kN * 8 * S::NT : kP);
    static constexpr int kStride = Tensors::stride(round_up(kWidth, kStep)), kBytes = SAMPLES * kStride * kSize;
    // The other side's states, which it reads: [SOME][SAMPLES][OTHERS * R]
    static constexpr int kStateStride = Tensors::stride(kM * 16 * S::MT), kStateBytes = S::SOME * SAMPLES * kStateStride * kSize;
    using Rows = MonarchRows<Element, kThreads, SAMPLES, S::ALL, S::NUMBERS, S::SOME, S::STEP, kP, kStride, S::LOAD>;
    using Sums = Real[kEach][S::MT][S::NT][4];
  };
  using X = Of<typename Pass::X, Pass::Y::SOME>;
  using Y = Of<typename Pass::Y, Pass::X::SOME>;
  static constexpr int kSlotBytes = X::kBytes + Y::kBytes, kStates = X::kWeightBytes + Y::kWeightBytes;
  static constexpr int kSlots = kStates + X::kStateBytes + Y::kStateBytes, kParts = ceil_div(X::ALL, X::SOME);

  const Params& params;
  const Lane lane;
  const int warp, first_x, first_y;  // groups
  const u32 memory;

  DEVICE MonarchPairs(const Params& given)
      : params(given), warp(uniform(threadIdx.x / 32)),
        first_x(blockIdx.y % kParts * X::SOME), first_y(blockIdx.y / kParts * Y::SOME),
        memory(shared_address(shared_memory)) {}

  // A weight, [SOME][OTHERS * R][NUMBERS], neighbours in memory by neighbouring threads
  template <class S, class Other> DEVICE void load_weight(u32 to, int first, int first_other) const {
    constexpr int kCount = S::SOME * Other::SOME * R * S::NUMBERS, kRow = Other::SOME * R;
    const Element* weight = static_cast<const Element*>(params.weights[S::WEIGHT]);
    struct At { int group, other, r, number; };
    const auto at = [](int j) -> At {
      const int group = j / (kRow * S::NUMBERS), rest = j % (kRow * S::NUMBERS);
      const int number = S::NUMBER == 1 ? rest % S::NUMBERS : rest / kRow, row = S::NUMBER == 1 ? rest / S::NUMBERS : rest % kRow;
      return {group, row / R, row % R, number};
    };
    const auto has = [&](const At& at) { return first + at.group < S::ALL && first_other + at.other < Other::ALL; };
    const auto from = [&](const At& at) {
      return weight + (first + at.group) * S::GROUP + (first_other + at.other) * S::OTHER + at.r * S::RANK + at.number * S::NUMBER;
    };
    const auto place = [&](const At& at) {
      return to + ((at.group * S::kWeightRows + at.other * R + at.r) * S::kWeightStride + at.number) * kSize;
    };
    if constexpr (kSize >= 4) {
      UNROLL_BY(4) for (int j = threadIdx.x; j < kCount; j += kThreads) {
        const At here = at(j);
        copy_async<kSize>(place(here), has(here) ? from(here) : weight, has(here));
      }
    } else {
      move_together<kCount, kThreads, 16>(
          [&](int j) {
            const At here = at(j);
            return j < kCount && has(here) ? *from(here) : Element{};
          },
          [&](int j, Element x) {
            if (j < kCount) store_shared(place(at(j)), x);
          });
    }
  }

  DEVICE void load(i64 tile, u32 slot) const {
    const i64 sample = tile * SAMPLES;
    if (sample < params.batch) {
      X::Rows::load(static_cast<const Element*>(params.x), sample, params.batch, first_x, slot);
      Y::Rows::load(static_cast<const Element*>(params.weights[Pass::GRAD]), sample, params.batch, first_y, slot + X::kBytes);
    }
    commit_copies();
  }

  // States of side S, to where the other one reads them. Of samples that are not there they are zero, whatever weights are.
  template <class S, class Other> DEVICE void make_states(u32 rows, u32 weight, u32 states, int left) const {
    constexpr int kDown = SAMPLES / (16 * DOWN), N1 = S::N1;
    ROLL for (int item = warp; item < S::SOME * kDown * S::kAcross; item += WARPS) {
      const int group = item % S::SOME, m = item / S::SOME % kDown, n = item / (S::SOME * kDown);
      Real sums[DOWN][N1][4] = {};
      const u32 a = rows + (m * (DOWN * 16) * S::kStride + group * S::kP) * kSize + Math::template lane_row_a<S::kStride>(lane);
      const u32 b = weight + (group * S::kWeightRows + n * (N1 * 8)) * (S::kWeightStride * kSize) +
                    Math::template lane_row_b<S::kWeightStride>(lane);
      Tensors::template multiply<S::kP / kStep>(sums, Tensors::template tiles_by_rows<S::kStride, kRound>(a),
                                                Tensors::template by_k<S::kWeightStride, kRound>(b));
      UNROLL for (int i = 0; i < N1 * 2; ++i) {
        const int column = (n * N1 + i / 2) * 8 + lane.t * 2 + i % 2;
        if (column >= S::kColumns) continue;
        UNROLL for (int j = 0; j < DOWN * 2; ++j) {
          const int sample = m * (DOWN * 16) + j * 8 + lane.g;
          const Real state = sample < left ? Math::rounded(sums[j / 2][i / 2][j % 2 * 2 + i % 2]) : Real(0);
          store_shared(states + ((column / R * SAMPLES + sample) * Other::kStateStride + group * R + column % R) * kSize,
                       narrow<Element>(state));
        }
      }
    }
  }
  template <class S> DEVICE void add(typename S::Sums& y, u32 rows, u32 states) const {
    UNROLL for (int i = 0; i < S::kEach; ++i) {
      const int item = warp + i * WARPS;
      if (S::kItems % WARPS != 0 && item >= S::kItems) break;
      const int group = item % S::SOME, m = item / S::SOME % S::kM, n = item / (S::SOME * S::kM);
      const u32 a = states + (group * SAMPLES * S::kStateStride + m * (S::MT * 16)) * kSize +
                    Math::template lane_a_by_m<S::kStateStride, kPairs>(lane);
      const u32 b = rows + (group * S::kP + n * (S::NT * 8)) * kSize + Math::template lane_b_by_n<S::kStride, kPairs>(lane);
      Tensors::template multiply<SAMPLES / kStep>(y[i], Tensors::template tiles_by_m<S::kStateStride, false>(a),
                                                  Tensors::template by_n<S::kStride, kRound>(b, lane.index));
    }
  }
  template <class S, class Other> DEVICE void store(const typename S::Sums& y, int first, int first_other) const {
    Real* to = static_cast<Real*>(params.sums) + i64(blockIdx.x) * Pass::COUNT + S::BEGIN;
    UNROLL for (int i = 0; i < S::kEach; ++i) {
      const int item = warp + i * WARPS;
      if (S::kItems % WARPS != 0 && item >= S::kItems) break;
      const int group = first + item % S::SOME, m = item / S::SOME % S::kM, n = item / (S::SOME * S::kM);
      if (group >= S::ALL) continue;
      UNROLL for (int j = 0; j < S::MT * 2; ++j) {
        const int row = m * (S::MT * 16) + j * 8 + lane.g, other = first_other + row / R;
        if (row >= S::kColumns || other >= Other::ALL) continue;
        UNROLL for (int k = 0; k < S::NT * 2; ++k) {
          const int number = (n * S::NT + k / 2) * 8 + lane.t * 2 + k % 2;
          if (number < S::NUMBERS)
            store_global(to + group * S::GROUP + other * S::OTHER + row % R * S::RANK + number * S::NUMBER,
                         y[i][j / 2][k / 2][j % 2 * 2 + k % 2]);
        }
      }
    }
  }

  DEVICE void run() const {
    for (int at = threadIdx.x * 16; at < kSlots + Pass::SLOTS * kSlotBytes; at += kThreads * 16)
      store_u32x4(memory + at, {0, 0, 0, 0});
    __syncthreads();
    load_weight<X, Y>(memory, first_x, first_y);
    load_weight<Y, X>(memory + X::kWeightBytes, first_y, first_x);
    const i64 tiles = (params.batch + SAMPLES - 1) / SAMPLES, step = gridDim.x;
    load(blockIdx.x, memory + kSlots);
    const u32 of_x = memory + kStates, of_y = of_x + X::kStateBytes;  // what either side reads
    typename X::Sums sums_x = {};
    typename Y::Sums sums_y = {};
    int slot = 0;
    ROLL for (i64 tile = blockIdx.x; tile < tiles; tile += step) {
      const u32 here = memory + kSlots + slot * kSlotBytes;
      wait_for_copies<0>();
      __syncthreads();
      if (Pass::SLOTS > 1) slot ^= 1, load(tile + step, memory + kSlots + slot * kSlotBytes);
      const i64 left = params.batch - tile * SAMPLES;
      const int present = left < SAMPLES ? int(left) : SAMPLES;
      make_states<X, Y>(here, memory, of_y, present);
      make_states<Y, X>(here + X::kBytes, memory + X::kWeightBytes, of_x, present);
      __syncthreads();
      add<X>(sums_x, here, of_x);
      add<Y>(sums_y, here + X::kBytes, of_y);
      if (Pass::SLOTS == 1) {
        __syncthreads();
        load(tile + step, here);
      }
    }
    wait_for_copies<0>();
    store<X, Y>(sums_x, first_x, first_y);
    store<Y, X>(sums_y, first_y, first_x);
  }
};
