// The backward pass of two tied contractions of 16 bits, of the last two modes, up to 64 x 64, on sm_90a: as pair_backward.cuh,
// for each unit, of X [p0, p1] and G [q0, q1],
//
//     dT = A' G,  T = X B',  dA' += T G',  dB += dT' X,  dX = dT B
//
// by warpgroups, each with units of its own (unit_products.cuh). The block's units go through a ring of slots, which another
// warpgroup fills, several units ahead, so that memory never waits for products.
//
// Pass: Element, P0, P1, Q0, Q1, UNITS_PER_SAMPLE; of a sum, RANK, TERM (the first term) and TERMS (how many): dX is added to
//       that of the terms before, which comes to the slots as well; SLOTS, AHEAD (units on their way), GROUPS (warpgroups that
//       multiply); registers of a thread, COPY_REGISTERS of who copies and REGISTERS of the others; weight_a(), weight_b(), what
//       they are multiplied by, normal_a() and normal_b(); FACTOR_A, FACTOR_B: the parameter that these are, or -1; GRAD (the
//       parameter that G is); BIAS: whether sums of G over all units are made as well, behind those of weights, a unit being a
//       sample; dX may have no place then; SINGLES: sums of each block that a pass before has made, and with them G, which lies
//       where dX belongs; or 0; Source and Sink: void, or Several, the tensors that X and dX are
#pragma once
#include "finish/sums.cuh"
#include "move/ring.cuh"
#include "move/several.cuh"
#include "multiply/unit_products.cuh"

template <class Pass> struct Pair16Backward : UnitProducts<Pass> {
  using Products = UnitProducts<Pass>;
  using typename Products::Element;
  using Products::P0, Products::P1, Products::Q0, Products::Q1, Products::kSlab, Products::kConsumers;
  using Products::params, Products::lane, Products::warpgroup, Products::first, Products::d_t;
  static constexpr int SLOTS = Pass::SLOTS, AHEAD = Pass::AHEAD, GROUPS = Pass::GROUPS;
  static constexpr bool kAdds = Pass::TERM > 0;
  static constexpr int kSlot = (2 + kAdds) * kSlab, kBarrierBytes = 1024, kThreads = kConsumers + 128;
  static constexpr int TERMS = Pass::TERMS, kWeights = PlacesOfSums<Pass>::kAll, kSums = kWeights + (Pass::BIAS ? Q0 * Q1 : 0);
  static_assert(Pass::SINGLES == 0 || P0 * P1 == Q0 * Q1);  // of the same places, which are read first
  static_assert(AHEAD < SLOTS && Pass::COPY_REGISTERS + GROUPS * Pass::REGISTERS <= kAllRegisters<GROUPS + 1>);

  const Ring<SLOTS, kSlot> ring;
  const u32 units;  // of this block

  DEVICE Pair16Backward(const Params& given)
      : Products(given, shared_address(shared_memory) + kBarrierBytes),
        ring{Products::a + (2 * TERMS + GROUPS) * kSlab, shared_address(shared_memory)},
        units(u32((given.batch * Pass::UNITS_PER_SAMPLE + gridDim.x - 1 - blockIdx.x) / gridDim.x)) {}

  DEVICE i64 unit(u32 position) const { return blockIdx.x + i64(position) * gridDim.x; }

  DEVICE void run() {
    ring.init(128, 4);
    ROLL for (int slot = 0; slot < SLOTS; ++slot) {
      Products::template clear_padding<P0, P1, kThreads>(ring.at(slot));
      Products::template clear_padding<Q0, Q1, kThreads>(ring.at(slot) + kSlab);
    }
    fence_copy_engine();
    __syncthreads();
    part_ways<GROUPS, Pass::REGISTERS, Pass::COPY_REGISTERS>(warpgroup, [&] { consume(); }, [&] { produce(); });
  }

  // Who copies adds up, of its own pieces, what has arrived.
  DEVICE void produce() const {
    CopiedSums<Products, Q0, Q1, 128> copied;
    const void* grad = Pass::SINGLES > 0 ? params.y : params.weights[Pass::GRAD];
    const auto x = source_of<typename Pass::Source, Element>(params);
    const auto* g = static_cast<const Element*>(grad);
    ROLL for (u32 position = 0; position < units + AHEAD; ++position) {
      if (position < units) {
        const u32 to = ring.at(position % SLOTS);
        ring.wait_until_empty(position);
        Products::template copy<Q0, Q1, 128>(g + unit(position) * (Q0 * Q1), to + kSlab);
        Products::template copy<P0, P1, 128>(x + unit(position) * (P0 * P1), to);
        if constexpr (kAdds)
          Products::template copy<P0, P1, 128>(
              sink_of<typename Pass::Sink, Element>(params) + unit(position) * (P0 * P1), to + 2 * kSlab);
      }
      commit_copies();
      if (position >= AHEAD) {
        wait_for_copies<AHEAD>();
        const u32 slot = (position - AHEAD) % SLOTS;
        if constexpr (Pass::BIAS) copied.add(ring.at(slot) + kSlab);
        ring.hand_over(slot);
      }
    }
    if constexpr (Pass::BIAS) copied.store(static_cast<float*>(params.sums) + i64(blockIdx.x) * kSums + kWeights);
  }

  DEVICE void consume() {
    const float normal_a = Pass::normal_a(params), normal_b = Pass::normal_b(params);
    Products::load_weights(normal_a, normal_b);
    const float scale_a = 1 / normal_a, scale_b = 1 / normal_b;
    typename Products::SumsA d_a[TERMS] = {};
    typename Products::SumsB d_b[TERMS] = {};
    u32 position = warpgroup;
    ROLL for (; position < units; position += GROUPS) {
      stay_here(lane.index, first), stay_here(d_t, first);  // or all places are kept from unit to unit, and spilled
      lane = Lane(lane.index);
      const u32 slot = position % SLOTS, x = ring.at(slot);
      ring.wait_until_full(position);
      typename Products::SumsB d_x;
      Products::visit(x, x + kSlab, scale_a, scale_b, d_a, d_b, d_x);
      if constexpr (!kAdds) ring.release(slot, lane.index);
      sync_warpgroup(warpgroup);  // dT has been read
      if (!Pass::BIAS || params.y)
        Products::template store<P0, P1, kAdds ? AddsTo::SLABS : AddsTo::NOTHING>(
            d_x, d_t, first, lane, 1.f, sink_of<typename Pass::Sink, Element>(params) + unit(position) * (P0 * P1),
            x + 2 * kSlab);
      if constexpr (kAdds) ring.release(slot, lane.index);
    }
    meet_as_others<GROUPS>(position - warpgroup, units, 2 * TERMS, [&] { sync_warpgroup(warpgroup); });
    if (Pass::BIAS && units > 0) ring.wait_until_full(units - 1);  // who copies has read there, and sums go there next
    float* to = static_cast<float*>(params.sums) + i64(gridDim.x) * Pass::SINGLES + i64(blockIdx.x) * kSums;
    UNROLL for (int term = 0; term < TERMS; ++term)
      store_sums<Pass, kConsumers, SLOTS * kSlot>(ring.slots, {to, term}, d_a[term], d_b[term]);
  }
};
