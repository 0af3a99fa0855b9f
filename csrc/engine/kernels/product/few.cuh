// One untied contraction, or a dense layer, of few samples, which takes as long as it takes to ask memory for a weight: all that a
// thread reads of one is on its way to registers at once, by the widest accesses that rows allow, before it waits for the kernel
// that makes the states.
#pragma once
#include "finish/pointwise.cuh"
#include "kernels/product/few_rows.cuh"
#include "types/params.cuh"

// A pass of one contraction by rows. y: [sample][group / FAST][a][group % FAST][b], as in streamed.cuh; a block has HEIGHT
// times 16 columns a * B + b of WG groups, each group WAYS warps, and stores runs of RUN elements: groups, or b's. Where there
// are more samples than a few, blocks along x of the grid take turns at them.
//
// Pass:  Math, Element, Activation, BIAS, WEIGHT, P, Q, GROUPS, FAST, NEXT, B, BIAS_INNER, STEP_A, STEP_B, X_SAMPLE, Y_SAMPLE, WG,
//        WAYS, HEIGHT, ROUNDS, TILES (of 8 samples at once), MORE (tiles than blocks), LOAD, RUN, ROUND_Y, FIRST (of its plan's
//        passes), LAST
template <class Pass> struct Few {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  static constexpr int P = Pass::P, Q = Pass::Q, FAST = Pass::FAST, B = Pass::B, ROUNDS = Pass::ROUNDS;
  static constexpr int WG = Pass::WG, WAYS = Pass::WAYS, RUN = Pass::RUN;
  static constexpr int kThreads = WG * WAYS * 32, kRows = Pass::HEIGHT * 16, kAtOnce = Pass::TILES * 8;
  static constexpr int kColumnTiles = ceil_div(Q, kRows), kGroupTiles = ceil_div(FAST, WG);
  static constexpr int kTiles = kColumnTiles * kGroupTiles * (Pass::GROUPS / FAST);
  static constexpr int kInner = Pass::BIAS_INNER;  // where y has one group after the other, they still take turns in a bias
  static_assert(kInner == 1 || WG == 1);
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
        const i64 bias = kInner > 1 ? (i64(at.fast) / kInner * Q + at.q + j) * kInner + at.fast % kInner : place;
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
          if constexpr (Pass::BIAS) sums[i] += widen(static_cast<const Element*>(params.bias)[bias + i * kInner]);
          sums[i] = activation.of(sums[i]);
          if constexpr (Pass::ROUND_Y) sums[i] = Math::rounded(sums[i]);
        }
        store_run(static_cast<Element*>(params.y) + (first + n) * Pass::Y_SAMPLE + place, sums);
      }
    };
    const Totals of_part{totals.memory + part * Totals::kBytes};
    few_units<Pass::MORE>(rows, tile, gridDim.y, kTiles, first, step, batch, to_weight, to_states, of_part, store);
  }
};
