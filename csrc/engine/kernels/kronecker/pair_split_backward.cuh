// The backward pass of two tied contractions of 32 bits, of the last two modes, up to 64 x 64, on sm_90a: as pair_backward.cuh,
// for each unit, of X [p0, p1] and G [q0, q1],
//
//     dT = A' G,  T = X B',  dA' += T G',  dB += dT' X,  dX = dT B
//
// by warpgroups, each with units of its own. An operand is the sum of some bf16 pieces: of three, which hold all bits of a float,
// or of two, for tf32. As 16 bits, the matrix unit reads them with k or with m and n contiguous. All lies in shared memory once,
// a block each; T alone is an operand in registers. Another warpgroup loads units and splits them; it refills G's
// place while X is still read, and X's while dX is made.
//
// Pass: P0, P1, Q0, Q1, UNITS_PER_SAMPLE; of a sum, RANK and TERM (which it is): dX is added to that of the terms before;
//       PIECES, GROUPS (warpgroups that multiply); registers of a thread, COPY_REGISTERS of who loads and REGISTERS of the
//       others; weight_a(), weight_b(); GRAD (the parameter that G is); SINGLES: sums of each block that a pass before has made,
//       and with them G, which lies where dX belongs; or 0; Source and Sink: void, or Several, the tensors that X and dX are
#pragma once
#include "types/params.cuh"
#include "multiply/splits.cuh"
#include "finish/sums.cuh"
#include "move/ring.cuh"
#include "move/several.cuh"

template <class Pass> struct PairSplitBackward {
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int PIECES = Pass::PIECES, GROUPS = Pass::GROUPS;
  static constexpr int kP0 = round_up(P0, 16), kP1 = round_up(P1, 16), kQ0 = round_up(Q0, 16), kQ1 = round_up(Q1, 16);
  static constexpr int kState = PIECES * kPieceBytes, kGroup = 3 * kState, kBarrierBytes = 1024;
  static constexpr int kConsumers = GROUPS * 128, kSums = PlacesOfSums<Pass>::kAll;
  static constexpr bool kPads = P0 < 64 || P1 < 64 || Q0 < 64 || Q1 < 64;
  static_assert(Pass::SINGLES == 0 || P0 * P1 == Q0 * Q1);  // of the same places, which are read first
  static_assert(P0 <= 64 && P1 <= 64 && Q0 <= 64 && Q1 <= 64 && P1 % 4 == 0 && Q1 % 4 == 0);
  static_assert(Pass::COPY_REGISTERS + GROUPS * Pass::REGISTERS <= kAllRegisters<GROUPS + 1>);
  template <int N> using Sums = SplitSums<N>;
  using T = u32[kQ1 / 16][PIECES][4];

  const Params& params;
  Lane lane;
  const int warpgroup;
  int first;  // the warp's first row
  const Barriers<2 * GROUPS> states;  // X's and G's
  const u32 a, b, groups;
  const i64 units;

  DEVICE PairSplitBackward(const Params& given)
      : params(given), warpgroup(uniform(threadIdx.x / 128)), first(threadIdx.x / 32 % 4 * 16),
        states(shared_address(shared_memory)), a(states.barriers + kBarrierBytes), b(a + kState), groups(b + kState),
        units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  // What a group has: X, G and dT
  DEVICE u32 x_of(int group) const { return groups + group * kGroup; }
  DEVICE u32 g_of(int group) const { return x_of(group) + kState; }
  static DEVICE int x_state(int group) { return group * 2; }
  static DEVICE int g_state(int group) { return group * 2 + 1; }

  DEVICE void run() {
    states.init(128, 4);
    if constexpr (kPads)
      for (u32 at = a + threadIdx.x * 16; at < groups + GROUPS * kGroup; at += (kConsumers + 128) * 16) store_u32x4(at, {});
    fence_copy_engine();
    __syncthreads();
    part_ways<GROUPS, Pass::REGISTERS, Pass::COPY_REGISTERS>(warpgroup, [&] { consume(); }, [&] { produce(); });
  }

  // A state's fours on their way to a thread, and to their places
  template <int ROWS, int COLUMNS> static constexpr int kFours = ceil_div(ROWS * COLUMNS / 4, 128);
  template <int ROWS, int COLUMNS, bool MADE = false, class From>
  DEVICE void load(const From& from, i64 unit, u32 (&x)[kFours<ROWS, COLUMNS>][4]) const {
    const auto state = from + unit * (ROWS * COLUMNS);
    UNROLL for (int i = 0; i < kFours<ROWS, COLUMNS>; ++i) {
      const int j = i * 128 + threadIdx.x % 128;
      const bool present = unit < units && (ROWS * COLUMNS % 512 == 0 || j < ROWS * COLUMNS / 4);
      if constexpr (MADE)
        load_made<16>(state + j * 4, x[i], present);
      else
        load_global(state + j * 4, x[i], present);
    }
  }
  template <int ROWS, int COLUMNS> DEVICE void put(u32 to, const u32 (&x)[kFours<ROWS, COLUMNS>][4]) const {
    UNROLL for (int i = 0; i < kFours<ROWS, COLUMNS>; ++i) {
      const int j = i * 128 + threadIdx.x % 128;
      if (ROWS * COLUMNS % 512 == 0 || j < ROWS * COLUMNS / 4)
        put_four<PIECES>(to + place_in_block(j / (COLUMNS / 4), j % (COLUMNS / 4) * 4), x[i]);
    }
  }
  DEVICE void produce() const {
    const auto* from = static_cast<const float*>(Pass::SINGLES > 0 ? params.y : params.weights[Pass::GRAD]);
    const auto of_x = source_of<typename Pass::Source, float>(params);
    i64 unit = blockIdx.x;
    u32 x[kFours<P0, P1>][4], g[kFours<Q0, Q1>][4];
    load<Q0, Q1, (Pass::SINGLES > 0)>(from, unit, g);
    load<P0, P1>(of_x, unit, x);
    int group = 0;
    u32 phase = 1;
    ROLL while (unit < units) {
      unit += gridDim.x;
      states.wait_until_empty({g_state(group), phase});
      put<Q0, Q1>(g_of(group), g);
      states.hand_over(g_state(group));
      load<Q0, Q1, (Pass::SINGLES > 0)>(from, unit, g);
      states.wait_until_empty({x_state(group), phase});
      put<P0, P1>(x_of(group), x);
      states.hand_over(x_state(group));
      load<P0, P1>(of_x, unit, x);
      if (Pass::TERM > 0 && unit < units)
        prefetch_state<P0 * P1, 128>(sink_of<typename Pass::Sink, float>(params) + unit * (P0 * P1));
      if (++group == GROUPS) group = 0, phase ^= 1;
    }
  }

  DEVICE void consume() {
    load_split_weight<PIECES, Q0, P0, kConsumers>(a, [&](int q, int p) { return Pass::weight_a(params, q, p); });
    load_split_weight<PIECES, Q1, P1, kConsumers>(b, [&](int q, int p) { return Pass::weight_b(params, q, p); });
    fence_copy_engine();
    sync_consumers<kConsumers>();
    int own = x_of(warpgroup), weights = a;
    float d_a[kQ0 / 2] = {}, d_b[kP1 / 2] = {};
    u32 phase = 0;
    i64 unit = blockIdx.x + i64(warpgroup) * gridDim.x;
    ROLL for (; unit < units; unit += i64(gridDim.x) * GROUPS, phase ^= 1) {
      stay_here(lane.index, first), stay_here(own, weights);  // or all places are kept from unit to unit, and spilled
      lane = Lane(lane.index);
      const u32 x = own, g = x + kState, d_t = g + kState, a = weights, b = a + kState;
      states.wait_until_full({g_state(warpgroup), phase});
      {
        Sums<kQ1> sums;
        multiply_pieces<PIECES, kQ0 / 16>(sums, false, [&](float(&some)[kQ1 / 2], int s, int i, int j, bool add) {
          Wgmma<bf16, kQ1>::multiply_turned(some, by_column(a, i, s), by_column(g, j, s), add);
        });
        wait_for_products<0>();
        sums.arrived();
        UNROLL for (int j = 0; j < kQ1 / 2; j += 2) {
          const int row = first + lane.g + j / 2 % 2 * 8;
          u32 word[PIECES];
          split_pair(sums.high, j, P0 == 64 || row < P0, word);
          UNROLL for (int i = 0; i < PIECES; ++i)
            store_shared(d_t + i * kPieceBytes + place_in_block(row, j / 4 * 8 + lane.t * 2), word[i]);
        }
      }
      fence_copy_engine();
      states.wait_until_full({x_state(warpgroup), phase});
      T t;
      {
        Sums<kQ1> sums;
        multiply_pieces<PIECES, kP1 / 16>(sums, false, [&](float(&some)[kQ1 / 2], int s, int i, int j, bool add) {
          Wgmma<bf16, kQ1>::multiply(some, by_k(x, i, s), by_k(b, j, s), add);
        });
        wait_for_products<0>();
        sums.arrived();
        UNROLL for (int s = 0; s < kQ1 / 16; ++s) {
          UNROLL for (int i = 0; i < 4; ++i) {
            u32 word[PIECES];
            split_pair(sums.high, s * 8 + i * 2, true, word);
            UNROLL for (int piece = 0; piece < PIECES; ++piece) t[s][piece][i] = word[piece];
          }
          UNROLL for (int piece = 0; piece < PIECES; ++piece) settle(t[s][piece]);
        }
      }
      {
        Sums<kQ0> sums;
        multiply_pieces<PIECES, kQ1 / 16>(sums, false, [&](float(&some)[kQ0 / 2], int s, int i, int j, bool add) {
          Wgmma<bf16, kQ0>::multiply(some, t[s][i], by_k(g, j, s), add);
        });
        wait_for_products<0>();
        states.release(g_state(warpgroup), lane.index);
        sums.arrived();
        add_sums(d_a, sums.high);
      }
      sync_warpgroup(warpgroup);  // all of dT is there
      Sums<kP1> to_b, d_x;
      multiply_pieces<PIECES, kP0 / 16>(to_b, false, [&](float(&some)[kP1 / 2], int s, int i, int j, bool add) {
        Wgmma<bf16, kP1>::multiply_turned(some, by_column(d_t, i, s), by_column(x, j, s), add);
      });
      multiply_pieces<PIECES, kQ1 / 16>(d_x, false, [&](float(&some)[kP1 / 2], int s, int i, int j, bool add) {
        Wgmma<bf16, kP1>::multiply_right_turned(some, by_k(d_t, i, s), by_column(b, j, s), add);
      });
      wait_for_products<1>();
      states.release(x_state(warpgroup), lane.index);
      to_b.arrived();
      add_sums(d_b, to_b.high);
      wait_for_products<0>();
      d_x.arrived();
      sync_warpgroup(warpgroup);  // dT has been read
      store(d_x.high, sink_of<typename Pass::Sink, float>(params) + unit * (P0 * P1));
    }
    const i64 of_first = unit - i64(warpgroup) * gridDim.x;
    // The places of others' last states get sums as well: a group without a unit of its own waits until they have been filled.
    UNROLL for (int other = 0; other < GROUPS - 1; ++other)
      if (other < warpgroup && unit >= units && of_first + i64(other) * gridDim.x < units)
        states.wait_until_full({g_state(other), phase}), states.wait_until_full({x_state(other), phase});
    meet_as_others<GROUPS>(of_first, units, 2, [&] { sync_warpgroup(warpgroup); });
    float* to = static_cast<float*>(params.sums) + i64(gridDim.x) * Pass::SINGLES + i64(blockIdx.x) * kSums;
    store_sums<Pass, kConsumers, GROUPS * kGroup>(groups, {to, 0}, d_a, d_b);
  }
  // Two sums of neighbouring columns of T or dT; zeros for padding, which infinities would make NaN.
  DEVICE void split_pair(const float (&sums)[kQ1 / 2], int j, bool present, u32 (&word)[PIECES]) const {
    const bool there = present && (kQ1 == Q1 || j / 4 * 8 + lane.t * 2 < Q1);
    split<bf16>(there ? sums[j] : 0.f, there ? sums[j + 1] : 0.f, word);
  }

  template <class To> DEVICE void store(float (&d_x)[kP1 / 2], const To& to) const {
    const auto each_pair = [&](const auto& act) {
      UNROLL for (int j = 0; j < kP1 / 2; j += 2) {
        const int row = first + lane.g + j / 2 % 2 * 8, column = j / 4 * 8 + lane.t * 2;
        if ((P0 == 64 || row < P0) && (kP1 == P1 || column < P1)) act(j, to + (row * P1 + column));
      }
    };
    if constexpr (Pass::TERM > 0) {
      u32 made[kP1 / 4][2];
      each_pair([&](int j, const float* at) { load_made<8>(at, made[j / 2], true); });
      each_pair([&](int j, const float*) {
        UNROLL for (int i = 0; i < 2; ++i) d_x[j + i] += __uint_as_float(made[j / 2][i]);
      });
    }
    each_pair([&](int j, float* at) { store_two<true>(at, d_x[j], d_x[j + 1], true); });
  }
};
