// The backward pass of two tied contractions of 16 bits, of the last two modes, up to 64 x 64, on sm_90a: as pair_backward.cuh,
// for each unit, of X [p0, p1] and G [q0, q1],
//
//     dT = A' G,  T = X B',  dA' += T G',  dB += dT' X,  dX = dT B
//
// by warpgroups, each with units of its own, of whose matrices each is one slab, which the matrix unit reads with k or with m and
// n contiguous; T alone is an operand in registers. The block's units go through a ring of slots, which another warpgroup fills,
// several units ahead, so that memory never waits for products.
//
// Pass: Element, P0, P1, Q0, Q1, UNITS_PER_SAMPLE; SLOTS, AHEAD (units on their way), GROUPS (warpgroups that multiply);
//       registers of a thread, COPY_REGISTERS of who copies and REGISTERS of the others; weight_a(), weight_b(), what they are multiplied by,
//       normal_a() and normal_b(); FACTOR_A, FACTOR_B: the parameter that these are, or -1; GRAD (the parameter that G is);
//       SINGLES: sums of each block that a pass before has made, and with them G, which lies where dX belongs; or 0
#pragma once
#include "slabs.cuh"
#include "splits.cuh"
#include "sums.cuh"

template <class Pass> struct UnitBackward : Slabs<typename Pass::Element, 64> {
  using Element = typename Pass::Element;
  using Base = Slabs<Element, 64>;
  using Base::place, Base::kSlab;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int SLOTS = Pass::SLOTS, AHEAD = Pass::AHEAD, GROUPS = Pass::GROUPS;
  static constexpr int kP0 = round_up(P0, 16), kP1 = round_up(P1, 16), kQ0 = round_up(Q0, 16), kQ1 = round_up(Q1, 16);
  static constexpr int kSlot = 2 * kSlab, kBarrierBytes = 1024, kConsumers = GROUPS * 128, kThreads = kConsumers + 128;
  static constexpr int kSums = Q0 * P0 + Q1 * P1;
  static_assert(Pass::SINGLES == 0 || P0 * P1 == Q0 * Q1);  // of the same places, which are read first
  static_assert(P0 <= 64 && P1 <= 64 && Q0 <= 64 && Q1 <= 64 && P1 % 8 == 0 && Q1 % 8 == 0 && AHEAD < SLOTS);
  static_assert(Pass::COPY_REGISTERS + GROUPS * Pass::REGISTERS <= kAllRegisters<GROUPS + 1>);

  const Params& params;
  Lane lane;
  const int warpgroup;
  int first;  // the warp's first row
  const u32 memory, a, b, slots;
  int d_t;
  const u32 units;  // of this block

  DEVICE UnitBackward(const Params& given)
      : params(given), warpgroup(uniform(threadIdx.x / 128)), first(threadIdx.x / 32 % 4 * 16),
        memory(shared_address(shared_memory)), a(memory + kBarrierBytes), b(a + kSlab), slots(b + kSlab),
        d_t(slots + SLOTS * kSlot + warpgroup * kSlab),
        units(u32((given.batch * Pass::UNITS_PER_SAMPLE + gridDim.x - 1 - blockIdx.x) / gridDim.x)) {}

  DEVICE u32 full(u32 slot) const { return memory + slot * 8; }
  DEVICE u32 empty(u32 slot) const { return memory + (SLOTS + slot) * 8; }
  DEVICE i64 unit(u32 position) const { return blockIdx.x + i64(position) * gridDim.x; }

  DEVICE void run() {
    if (threadIdx.x < SLOTS) {
      init_barrier(full(threadIdx.x), 128);
      init_barrier(empty(threadIdx.x), 4);
    }
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
      Base::template clear_padding<P0, P1, kThreads>(slots + slot * kSlot);
      Base::template clear_padding<Q0, Q1, kThreads>(slots + slot * kSlot + kSlab);
    }
    fence_copy_engine();
    __syncthreads();
    if (warpgroup == GROUPS) {
      give_registers<Pass::COPY_REGISTERS>();
      produce();
    } else {
      take_registers<Pass::REGISTERS>();
      const float normal_a = Pass::normal_a(params), normal_b = Pass::normal_b(params);
      Base::template load_weight<Pass::FACTOR_A, Q0, P0, kConsumers>(
          params, a, [&](int q, int p) { return normal_a * Pass::weight_a(params, q, p); });
      Base::template load_weight<Pass::FACTOR_B, Q1, P1, kConsumers>(
          params, b, [&](int q, int p) { return normal_b * Pass::weight_b(params, q, p); });
      wait_for_copies<0>();
      fence_copy_engine();
      sync_threads<kConsumers>(1);
      consume(1 / normal_a, 1 / normal_b);
    }
  }

  DEVICE void produce() const {
    const void* grad = Pass::SINGLES > 0 ? params.y : params.weights[Pass::GRAD];
    const auto *x = static_cast<const Element*>(params.x), *g = static_cast<const Element*>(grad);
#pragma unroll 1
    for (u32 position = 0; position < units + AHEAD; ++position) {
      if (position < units) {
        const u32 slot = position % SLOTS, to = slots + slot * kSlot;
        wait_for_bytes(empty(slot), (position / SLOTS & 1) ^ 1);
        Base::template copy<Q0, Q1, 128>(g + unit(position) * (Q0 * Q1), to + kSlab);
        Base::template copy<P0, P1, 128>(x + unit(position) * (P0 * P1), to);
      }
      commit_copies();
      if (position >= AHEAD) {
        wait_for_copies<AHEAD>();
        fence_copy_engine();
        arrive(full((position - AHEAD) % SLOTS));
      }
    }
  }

  DEVICE void consume(float scale_a, float scale_b) {
    float d_a[kQ0 / 2] = {}, d_b[kP1 / 2] = {};
#pragma unroll 1
    for (u32 position = warpgroup; position < units; position += GROUPS) {
      stay_here(lane.index, first), stay_here(d_t, first);  // or all places are kept from unit to unit, and spilled
      lane = Lane(lane.index);
      const u32 slot = position % SLOTS, x = slots + slot * kSlot, g = x + kSlab;
      wait_for_bytes(full(slot), position / SLOTS & 1);
      u32 t[kQ1 / 16][4];
      {
        float of_d_t[kQ1 / 2], of_t[kQ1 / 2];
        open_products();
#pragma unroll
        for (int s = 0; s < kQ0 / 16; ++s)
          Wgmma<Element, kQ1>::multiply_turned(of_d_t, by_column(a, 0, s), by_column(g, 0, s), s > 0);
        commit_products();
#pragma unroll
        for (int s = 0; s < kP1 / 16; ++s) Wgmma<Element, kQ1>::multiply(of_t, by_k(x, 0, s), by_k(b, 0, s), s > 0);
        commit_products();
        wait_for_products<1>();
        touch(of_d_t);
#pragma unroll
        for (int j = 0; j < kQ1 / 2; j += 2) {
          const int row = first + lane.g + j / 2 % 2 * 8;
          store_shared(d_t + place(row, j / 4 * 8 + lane.t * 2),
                       Base::template pair<Q1>(of_d_t, j, lane, scale_a, P0 == 64 || row < P0));
        }
        fence_copy_engine();
        wait_for_products<0>();
        touch(of_t);
#pragma unroll
        for (int s = 0; s < kQ1 / 16; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) t[s][i] = Base::template pair<Q1>(of_t, s * 8 + i * 2, lane, scale_b, true);
          settle(t[s]);
        }
      }
      open_products();
#pragma unroll
      for (int s = 0; s < kQ1 / 16; ++s) Wgmma<Element, kQ0>::multiply(d_a, t[s], by_k(g, 0, s));
      commit_products();
      sync_threads<128>(2 + warpgroup);  // all of dT is there
      float d_x[kP1 / 2];
#pragma unroll
      for (int s = 0; s < kQ1 / 16; ++s)
        Wgmma<Element, kP1>::multiply_right_turned(d_x, by_k(d_t, 0, s), by_column(b, 0, s), s > 0);
#pragma unroll
      for (int s = 0; s < kP0 / 16; ++s)
        Wgmma<Element, kP1>::multiply_turned(d_b, by_column(d_t, 0, s), by_column(x, 0, s));
      commit_products();
      wait_for_products<0>();
      touch(d_a), touch(d_b), touch(d_x);
      if (lane.index == 0) arrive(empty(slot));
      sync_threads<128>(2 + warpgroup);  // dT has been read
      Base::template store<P0, P1>(d_x, d_t, first, lane, scale_b, static_cast<Element*>(params.y) + unit(position) * (P0 * P1));
    }
    store_sums<P0, P1, Q0, Q1, kConsumers, SLOTS * kSlot>(
        slots, static_cast<float*>(params.sums) + i64(gridDim.x) * Pass::SINGLES + i64(blockIdx.x) * kSums, d_a, d_b);
  }
};
