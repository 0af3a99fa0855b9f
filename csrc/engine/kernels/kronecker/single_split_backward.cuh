// The backward pass of one tied contraction of 32 bits, up to 128 x 128, on sm_90a: as single_backward.cuh, for units of 64
// columns or rows of X and G,
//
//     BY_COLUMNS: dW' += X G', dX = W' G;  or else dW' += X' G, dX = G W
//
// by products of bf16 pieces (splits.cuh), three of a float or two for tf32, of blocks of 64 x 64: 64 p's of a unit are a part,
// which a warpgroup has, 64 q's a piece of work. Parts share a unit; where there is one, two groups take turns in units. Another
// warpgroup loads units and splits them, each block once nobody reads it any more.
//
// Pass: P, Q (both need as many blocks), BY_COLUMNS, INNER, UNITS_PER_SAMPLE; PIECES; registers of a thread, COPY_REGISTERS of who
//       loads and REGISTERS of the others; GRAD (the parameter that G is)
#pragma once
#include "types/params.cuh"
#include "multiply/splits.cuh"
#include "finish/sums.cuh"
#include "move/ring.cuh"

template <class Pass> struct SingleSplitBackward {
  static constexpr int P = Pass::P, Q = Pass::Q, INNER = Pass::INNER, PIECES = Pass::PIECES;
  static constexpr bool kByColumns = Pass::BY_COLUMNS;
  static constexpr int kParts = ceil_div(P, 64), kGroups = 2 / kParts, kBlock = PIECES * kPieceBytes;
  static constexpr int kGroup = 2 * kParts * kBlock, kBarrierBytes = 1024, kWeight = kParts * kParts * kBlock;
  static constexpr int kConsumers = 256, kStates = kParts + 1;  // of a group: X, and G's blocks
  static_assert(ceil_div(Q, 64) == kParts && kParts <= 2 && (kByColumns ? INNER % 64 == 0 : P % 4 == 0 && Q % 4 == 0));
  static_assert(Pass::COPY_REGISTERS + 2 * Pass::REGISTERS <= kAllRegisters<3>);
  using Four = u32[4];
  using Fours = Four[8];  // of a block on its way: every eighth row, and where in these a thread's are

  const Params& params;
  Lane lane;
  const int warpgroup;
  int first;  // the warp's first row
  const Barriers<kGroups * kStates> states;
  const u32 weight, groups;
  const i64 units;

  DEVICE SingleSplitBackward(const Params& given)
      : params(given), warpgroup(uniform(threadIdx.x / 128)), first(threadIdx.x / 32 % 4 * 16),
        states(shared_address(shared_memory)), weight(states.barriers + kBarrierBytes), groups(weight + kWeight),
        units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  // What a group has: blocks of X and of G. All of X is state 0, each of G's blocks one (1 and 2).
  DEVICE u32 x_of(int group) const { return groups + group * kGroup; }
  DEVICE u32 g_of(int group) const { return x_of(group) + kParts * kBlock; }
  static DEVICE int state(int group, int which) { return group * kStates + which; }

  DEVICE void run() {
    states.init(threadIdx.x % kStates == 0 ? 128 * kParts : 128, 4 * kParts);
    if constexpr (P % 64 || Q % 64)
      for (u32 at = weight + threadIdx.x * 16; at < groups + kGroups * kGroup; at += (kConsumers + 128) * 16)
        store_u32x4(at, {});
    fence_copy_engine();
    __syncthreads();
    part_ways<2, Pass::REGISTERS, Pass::COPY_REGISTERS>(warpgroup, [&] { consume(); }, [&] { produce(); });
  }

  // Where a unit begins in a state whose contracted mode has N's, and from one row of it to the next
  template <int N> static DEVICE i64 place_of(i64 unit) {
    if constexpr (kByColumns) return unit / (INNER / 64) * (i64(N) * INNER) + unit % (INNER / 64) * 64;
    return unit * (i64(N) * 64);
  }
  template <int N> static constexpr int kStep = kByColumns ? INNER : N;
  // Whether a row and a column of a block are there: one of them is in the contracted mode.
  template <int N> static DEVICE bool inside(int block, int row, int column) {
    return N % 64 == 0 || block * 64 + (kByColumns ? row : column) < N;
  }

  template <int N> DEVICE void load(const void* state, i64 unit, int block, Fours& x) const {
    const int row = threadIdx.x % 128 / 16, column = threadIdx.x % 16 * 4;
    const float* from = static_cast<const float*>(state) + place_of<N>(unit) + row * i64(kStep<N>) + column +
                        block * (kByColumns ? i64(64) * INNER : i64(64));
    UNROLL for (int i = 0; i < 8; ++i)
      load_global(from + i64(i * 8) * kStep<N>, x[i], unit < units && inside<N>(block, row + i * 8, column));
  }
  template <int N> DEVICE void put(u32 to, int block, const Fours& x) const {
    const int row = threadIdx.x % 128 / 16, column = threadIdx.x % 16 * 4;
    UNROLL for (int i = 0; i < 8; ++i)
      if (inside<N>(block, row + i * 8, column)) put_four<PIECES>(to + block * kBlock + place_in_block(row + i * 8, column), x[i]);
  }
  // Blocks in the order in which they are needed and free: two are on their way while one is put.
  DEVICE void produce() const {
    const void* grad = params.weights[Pass::GRAD];
    i64 unit = blockIdx.x;
    Fours one, other;
    load<Q>(grad, unit, 0, one);
    load<P>(params.x, unit, 0, other);
    int group = 0;
    u32 phase = 1;
    ROLL for (; unit < units; unit += gridDim.x) {
      const i64 next = unit + gridDim.x;
      const u32 x = x_of(group), g = g_of(group);
      states.wait_until_empty({state(group, 1), phase});
      put<Q>(g, 0, one);
      states.hand_over(state(group, 1));
      if constexpr (kParts == 1)
        load<Q>(grad, next, 0, one);
      else
        load<P>(params.x, unit, 1, one);
      states.wait_until_empty({state(group, 0), phase});
      put<P>(x, 0, other);
      states.hand_over(state(group, 0));
      if constexpr (kParts == 1) {
        load<P>(params.x, next, 0, other);
      } else {
        load<Q>(grad, unit, 1, other);
        put<P>(x, 1, one);
        states.hand_over(state(group, 0));
        load<Q>(grad, next, 0, one);
        states.wait_until_empty({state(group, 2), phase});
        put<Q>(g, 1, other);
        states.hand_over(state(group, 2));
        load<P>(params.x, next, 0, other);
      }
      if (++group == kGroups) group = 0, phase ^= 1;
    }
  }

  using Sums = SplitSums<64>;
  DEVICE void consume() {
    const float* w = static_cast<const float*>(params.weights[0]);
    load_split_weight<PIECES, Q, P, kConsumers>(weight, [&](int q, int p) { return w[q * P + p]; });
    fence_copy_engine();
    sync_consumers<kConsumers>();
    const int part = kParts == 2 ? warpgroup : 0, group = kParts == 2 ? 0 : warpgroup;
    int own = x_of(group), weights = weight + part * kBlock;
    float d_w[kParts][32] = {};  // 64 q's each
    u32 phase = 0;
    ROLL for (i64 unit = blockIdx.x + i64(group) * gridDim.x; unit < units;
              unit += i64(gridDim.x) * kGroups, phase ^= 1) {
      stay_here(lane.index, first), stay_here(own, weights);  // or all places are kept from unit to unit, and spilled
      lane = Lane(lane.index);
      const u32 x = own + part * kBlock, all_g = own + kParts * kBlock;
      Sums d_x;
      UNROLL for (int h = 0; h < kParts; ++h) {
        const u32 g = all_g + h * kBlock, w = weights + h * kParts * kBlock;
        states.wait_until_full({state(group, 1 + h), phase});
        if (h == 0) states.wait_until_full({state(group, 0), phase});
        Sums more;
        multiply_pieces<PIECES, 4>(more, false, [&](float(&sums)[32], int s, int i, int j, bool add) {
          if constexpr (kByColumns)
            Wgmma<bf16, 64>::multiply(sums, by_k(x, i, s), by_k(g, j, s), add);
          else
            Wgmma<bf16, 64>::multiply_turned(sums, by_column(x, i, s), by_column(g, j, s), add);
        });
        multiply_pieces<PIECES, 4>(d_x, h > 0, [&](float(&sums)[32], int s, int i, int j, bool add) {
          if constexpr (kByColumns)
            Wgmma<bf16, 64>::multiply_turned(sums, by_column(w, i, s), by_column(g, j, s), add);
          else
            Wgmma<bf16, 64>::multiply_right_turned(sums, by_k(g, i, s), by_column(w, j, s), add);
        });
        wait_for_products<1>();
        if (h == kParts - 1) states.release(state(group, 0), lane.index);
        more.arrived();
        add_sums(d_w[h], more.high);
        wait_for_products<0>();
        states.release(state(group, 1 + h), lane.index);
      }
      d_x.arrived();
      store(d_x.high, static_cast<float*>(params.y) + place_of<P>(unit), part);
    }
    store_sums(d_w);
  }

  DEVICE void store(const float (&d_x)[32], float* to, int part) const {
    to += part * (kByColumns ? i64(64) * INNER : i64(64));
    UNROLL for (int j = 0; j < 32; j += 2) {
      const int row = first + lane.g + j / 2 % 2 * 8, column = j / 4 * 8 + lane.t * 2;
      if (inside<P>(part, row, column)) store_two<true>(to + i64(row) * kStep<P> + column, d_x[j], d_x[j + 1], true);
    }
  }
  // All groups' sums, to where this block's belong.
  DEVICE void store_sums(const float (&d_w)[kParts][32]) const {
    float* to = static_cast<float*>(params.sums) + i64(blockIdx.x) * (P * Q);
    add_up<kParts * 8, kConsumers, 128 * kParts, kGroups * kGroup, float>(
        groups, [&](int n) -> const float(&)[4] { return reinterpret_cast<const float(&)[4]>(d_w[n / 8][n % 8 * 4]); },
        [&](int n, int member, const float(&sum)[4]) {
          const Lane at(member % 32);
          UNROLL for (int i = 0; i < 4; ++i) {
            const int p = member / 32 * 16 + at.g + i / 2 * 8, q = n * 8 + at.t * 2 + i % 2;
            if (q < Q && p < P) store_global(to + q * P + p, sum[i]);
          }
        },
        [] { sync_consumers<kConsumers>(); });
  }
};
