// The backward pass of two large tied contractions of 16 bits, of the last two modes, on sm_90a: as pair_backward.cuh, for each
// unit, of X [p0, p1] and G [q0, q1],
//
//     T = X B',  dA' += T G',  dT = A' G,  dB += dT' X,  dX = dT B
//
// by two warpgroups, each with 64 rows of p0, or of q1 for dB. All lies in shared memory once, in slabs of 64 columns, which the
// matrix unit reads with k or with m and n contiguous; T alone is an operand in registers. A third warpgroup copies.
//
// Pass: Element, P0, P1, Q0, Q1, UNITS_PER_SAMPLE; of a sum, RANK and TERM (which it is): dX is added to that of the terms
//       before; SLOTS; weight_a(), weight_b(), what they are multiplied by, normal_a() and normal_b(); FACTOR_A, FACTOR_B: the
//       parameter that these are, or -1; GRAD (the parameter that G is); Source and Sink: void, or Several, the tensors that X
//       and dX are
#pragma once
#include "multiply/slabs.cuh"
#include "finish/sums.cuh"
#include "move/ring.cuh"
#include "move/several.cuh"

template <class Pass> struct Pair16LargeBackward : Slabs<typename Pass::Element, 128> {
  using Element = typename Pass::Element;
  using Base = Slabs<Element, 128>;
  using Base::by_column, Base::by_k, Base::place, Base::kSlab;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1, SLOTS = Pass::SLOTS;
  static constexpr int kP0 = round_up(P0, 16), kP1 = round_up(P1, 16), kQ0 = round_up(Q0, 16), kQ1 = round_up(Q1, 16);
  static constexpr int kState = 2 * kSlab;  // of every matrix
  static constexpr int kBarrierBytes = 1024, kThreads = 384;
  static constexpr int kCopyRegisters = 40, kRegisters = 232;
  static_assert(P0 <= 128 && P1 <= 128 && Q0 <= 128 && Q1 <= 128 && P1 % 8 == 0 && Q1 % 8 == 0);

  const Params& params;
  const Lane lane;
  const int warpgroup, first;  // the warp's first row
  const u32 a, b, d_t;
  const Ring<SLOTS, 2 * kState> ring;
  const i64 units;

  DEVICE Pair16LargeBackward(const Params& given)
      : params(given), warpgroup(uniform(threadIdx.x / 128)), first(threadIdx.x / 32 * 16),
        a(shared_address(shared_memory) + kBarrierBytes), b(a + kState), d_t(b + kState),
        ring{d_t + kState, shared_address(shared_memory)},
        units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  DEVICE void run() const {
    ring.init(128, 8);
    UNROLL for (int slot = 0; slot < SLOTS; ++slot) {
      Base::template clear_padding<P0, P1, kThreads>(ring.at(slot));
      Base::template clear_padding<Q0, Q1, kThreads>(ring.at(slot) + kState);
    }
    fence_copy_engine();
    __syncthreads();
    part_ways<2, kRegisters, kCopyRegisters>(warpgroup, [&] { consume(); }, [&] { produce(); });
  }
  DEVICE void produce() const {
    u32 position = 0;
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x, ++position) {
      const u32 slot = position % SLOTS, to = ring.at(slot);
      ring.wait_until_empty(position);
      Base::template copy<P0, P1, 128>(source_of<typename Pass::Source, Element>(params) + unit * (P0 * P1), to);
      const auto* grad_y = static_cast<const Element*>(params.weights[Pass::GRAD]);
      Base::template copy<Q0, Q1, 128>(grad_y + unit * (Q0 * Q1), to + kState);
      if constexpr (Pass::TERM > 0)
        prefetch_state<P0 * P1, 128>(sink_of<typename Pass::Sink, Element>(params) + unit * (P0 * P1));
      commit_copies();
      wait_for_copies<0>();
      fence_copy_engine();
      arrive(ring.full(slot));
    }
  }

  DEVICE void consume() const {
    const float normal_a = Pass::normal_a(params), normal_b = Pass::normal_b(params);
    Base::template load_weight<Pass::FACTOR_A, Q0, P0, 256>(
        params, a, Pass::TERM, [&](int q, int p) { return normal_a * Pass::weight_a(params, q, p); });
    Base::template load_weight<Pass::FACTOR_B, Q1, P1, 256>(
        params, b, Pass::TERM, [&](int q, int p) { return normal_b * Pass::weight_b(params, q, p); });
    wait_for_copies<0>();
    fence_copy_engine();
    sync_consumers<256>();
    const float scale_a = 1 / normal_a, scale_b = 1 / normal_b;
    const int half = warpgroup * 64;
    float d_a[kQ0 / 2] = {}, d_b[kP1 / 2] = {};
    u32 position = 0;
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x, ++position) {
      const u32 slot = position % SLOTS, x = ring.at(slot), g = x + kState;
      ring.wait_until_full(position);
      {
        float sums[kQ1 / 2];
        make_products<kQ0 / 16>(sums, [&](int s) {
          Wgmma<Element, kQ1>::multiply_turned(sums, by_column(a, warpgroup, s), by_column(g, 0, s), s > 0);
        });
        Base::template put<P0, Q1>(d_t, sums, first, lane, scale_a);
      }
      fence_copy_engine();
      u32 t[kQ1 / 16][4];
      {
        float sums[kQ1 / 2];
        make_products<kP1 / 16>(
            sums, [&](int s) { Wgmma<Element, kQ1>::multiply(sums, by_k(x, half, s), by_k(b, 0, s), s > 0); });
        Base::template as_left<Q1>(t, sums, lane, {scale_b, scale_b});
      }
      ask_for_products<kQ1 / 16>([&](int s) { Wgmma<Element, kQ0>::multiply(d_a, t[s], by_k(g, 0, s)); });
      sync_consumers<256>();  // all of dT is there
      UNROLL for (int s = 0; s < kP0 / 16; ++s)
        Wgmma<Element, kP1>::multiply_turned(d_b, by_column(d_t, warpgroup, s), by_column(x, 0, s));
      commit_products();
      wait_for_products<1>();
      touch(d_a);
      float sums[kP1 / 2];
      make_products<kQ1 / 16>(sums, [&](int s) {
        Wgmma<Element, kP1>::multiply_right_turned(sums, by_k(d_t, half, s), by_column(b, 0, s), s > 0);
      });
      touch(d_b);
      ring.release(slot, lane.index);
      sync_consumers<256>();  // dT has been read
      Base::template store<P0, P1, Pass::TERM ? AddsTo::MEMORY : AddsTo::NOTHING>(
          sums, d_t, first, lane, scale_b, sink_of<typename Pass::Sink, Element>(params) + unit * (P0 * P1));
    }
    using Places = PlacesOfSums<Pass>;
    store_rows<Pass>({static_cast<float*>(params.sums) + i64(blockIdx.x) * Places::kAll, 0}, first, lane, d_a, d_b);
  }
};
