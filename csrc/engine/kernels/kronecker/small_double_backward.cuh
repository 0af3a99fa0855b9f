// All gradients of three or four small tied factors in double, sizes up to 16, in one pass. A group of warps takes a unit
// after the other: forward by columns once more (small_double.cuh), with every state kept, then back. A weight's gradient is the
// matrix unit's, 16 q's and 8 p's, from the states before and behind it: its k's are the columns, many, so that little is
// padded. What goes back through a contraction goes by columns again, and lies where the state before it was. The first
// contraction is that of the first mode: neighbouring lanes store neighbours of dX.
//
// Pass: WARPS, GROUPS, SLOTS, UNITS_PER_SAMPLE, kSlot, kGroup, kWeights, load_weights(kernel) as in small_double.cuh; X and G, their
//       Strides in slots; kGrad (bytes before G's); forward(kernel) and back(kernel, sums), which take the Steps in their
//       order; kFours (tiles of sums), place(kernel, n, ...) of one; kSums (elements of all weights); GRAD (the parameter
//       that G is)
#pragma once
#include "kernels/kronecker/small_double.cuh"
#include "multiply/mma.cuh"
#include "finish/sums.cuh"

// FOURS: the first of its weight's tiles of sums; TO: where that weight's sums begin.
template <class Step_, int FOURS_, int TO_> struct BackStep : Step_ {
  static constexpr int FOURS = FOURS_, TO = TO_, TILES = ceil_div(Step_::P, 8);
};

template <class Pass> struct SmallDoubleBackward : SmallDoubleBase<Pass> {
  using Base = SmallDoubleBase<Pass>;
  using Base::params, Base::group, Base::thread, Base::weights, Base::memory, Base::barriers, Base::units, Base::sync;
  using Base::WARPS, Base::kThreads;
  static constexpr int SLOTS = Pass::SLOTS;
  using Sums = double[Pass::kFours][4];

  Lane lane;
  i64 unit, step;
  int slot;
  u32 phase_x, phase_g;
  DEVICE SmallDoubleBackward(const Params& given) : Base(given), slot(0), phase_x(0), phase_g(0) {
    step = i64(gridDim.x) * Base::GROUPS;
    unit = i64(group) * gridDim.x + blockIdx.x;
  }

  // x, in its slots at the beginning of the group's memory, and G
  DEVICE u32 x() const { return memory + slot * Pass::kSlot + Base::template begin<typename Pass::X>(unit); }
  DEVICE u32 g() const { return memory + Pass::kGrad + Base::template begin<typename Pass::G>(unit); }
  DEVICE void ask_for_x(i64 of, int to) const {
    Base::template ask_for<typename Pass::X>(params.x, of, memory + to * Pass::kSlot, barriers + to * 8);
  }
  DEVICE void ask_for_g(i64 of) const {
    Base::template ask_for<typename Pass::G>(params.weights[Pass::GRAD], of, memory + Pass::kGrad, barriers + 16);
  }

  DEVICE void run() {
    if (thread == 0) {
      for (int to = 0; to < SLOTS; ++to) init_arrivals(barriers + to * 8);
      init_arrivals(barriers + 16);
    }
    __syncwarp();  // a barrier is made for the warp as a whole
    for (int to = 0; to < SLOTS; ++to) ask_for_x(unit + to * step, to);
    ask_for_g(unit);
    Pass::load_weights(*this);
    __syncthreads();
    Sums sums = {};
    ROLL for (; unit < units; unit += step) {
      if constexpr (WARPS > 1) {  // or the places of many columns are kept from unit to unit, and spilled
        stay_here(thread, lane.index);
        lane = Lane(lane.index);
      }
      wait_for_bytes(barriers + slot * 8, phase_x);
      Pass::forward(*this);
      wait_for_bytes(barriers + 16, phase_g);
      Pass::back(*this, sums);
      slot = slot + 1 == SLOTS ? 0 : slot + 1;
      if (slot == 0) phase_x ^= 1;
      phase_g ^= 1;
    }
    store(sums);
  }

  template <class S> DEVICE u32 before() const { return S::IN < 0 ? x() : memory + S::IN; }
  template <class S> DEVICE u32 behind() const { return S::OUT < 0 ? g() : memory + S::OUT; }

  template <class S> DEVICE void forward() const {
    double x[Base::template kEach<S>][S::P];
    Base::template load_columns<S, typename S::In>(x, before<S>());
    Base::template put_columns<S, typename S::Out>(x, weights + S::WEIGHT, behind<S>());
    sync();
  }

  // The gradient of its weight, and that of the state before it, from the one behind it.
  template <class S> DEVICE void back(Sums& sums) const {
    add_products<S>(sums);
    double h[Base::template kEach<S>][S::Q];
    Base::template load_columns<S, typename S::Out>(h, behind<S>());
    sync();
    if constexpr (S::OUT < 0) ask_for_g(unit + step);
    if constexpr (S::IN < 0) {
      ask_for_x(unit + SLOTS * step, slot);
      double* to = static_cast<double*>(params.y) + unit * Pass::X::kSize;
      Base::template multiply<S::P>(h, weights + S::TURNED, [&](int c, int p, double y) {
        const int column = thread + c * kThreads;
        store_global(to + p * S::COLUMNS + column, y, (c + 1) * kThreads <= S::COLUMNS || column < S::COLUMNS);
      });
    } else {
      Base::template put_columns<S, typename S::In>(h, weights + S::TURNED, memory + S::IN);
      sync();
    }
  }

  // Of the warp's columns, eight at a time
  template <class S> DEVICE void add_products(Sums& sums) const {
    using In = typename S::In;
    using Out = typename S::Out;
    constexpr int kEights = ceil_div(S::COLUMNS, 8);
    constexpr bool kWhole = S::COLUMNS % 8 == 0;
    const u32 left = behind<S>() + lane.g * Out::step(S::MODE) * 8, right = before<S>() + lane.g * In::step(S::MODE) * 8;
    constexpr int kTurns = ceil_div(kEights, WARPS);
    UNROLL_BY(kTurns <= 16 ? kTurns : 4) for (int turn = 0; turn < kTurns; ++turn) {
      const int eight = WARPS == 1 ? turn : turn * WARPS + thread / 32;
      if (kEights % WARPS && eight >= kEights) break;
      double a[4] = {}, b[S::TILES][2];
      UNROLL for (int i = 0; i < 2; ++i) {
        const int column = S::SPREAD ? lane.t * (2 * kEights) + eight * 2 + i : eight * 8 + i * 4 + lane.t;
        const bool there = kWhole || column < S::COLUMNS;
        const u32 from = left + Out::template column<S::MODE, S::PRODUCT_REVERSED>(column) * 8;
        a[i * 2] = load_f64(from, there && (S::Q >= 8 || lane.g < S::Q));
        if constexpr (S::Q > 8)
          a[i * 2 + 1] = load_f64(from + 8 * Out::step(S::MODE) * 8, there && (S::Q == 16 || lane.g + 8 < S::Q));
        UNROLL for (int n = 0; n < S::TILES; ++n)
          b[n][i] = load_f64(right + (In::template column<S::MODE, S::PRODUCT_REVERSED>(column) + n * 8 * In::step(S::MODE)) * 8,
                             there && (n * 8 + 8 <= S::P || lane.g + n * 8 < S::P));
      }
      UNROLL for (int n = 0; n < S::TILES; ++n) multiply_f64(sums[S::FOURS + n], a, b[n]);
    }
  }

  // All warps' sums, to where this block's belong.
  DEVICE void store(const Sums& sums) const {
    double* to = static_cast<double*>(params.sums) + i64(blockIdx.x) * Pass::kSums;
    add_up<Pass::kFours, Base::kBlock, 32, Pass::kWeights + Base::GROUPS * Pass::kGroup, double>(
        weights, [&](int n) -> const double(&)[4] { return sums[n]; },
        [&](int n, int index, const double(&sum)[4]) { Pass::place(*this, n, Lane(index), sum, to); });
  }
  // Tile n of all, if it is of this step's
  template <class S> DEVICE void place(int n, Lane at, const double (&sum)[4], double* to) const {
    if (n < S::FOURS || n >= S::FOURS + S::TILES) return;
    UNROLL for (int i = 0; i < 4; ++i) {
      const int q = at.g + i / 2 * 8, p = (n - S::FOURS) * 8 + at.t * 2 + i % 2;
      if (q < S::Q && p < S::P) store_global(to + S::TO + q * S::P + p, sum[i]);
    }
  }
};
