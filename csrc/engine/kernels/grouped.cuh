// What passes have in common that make all gradients of their units by groups of warps: ROWS times PARTS warps, each with 16 rows
// of what they make and a part of its columns, take unit after unit through SLOTS of their own. Slots are filled ahead, all but
// one, and sums stay in registers for all units of a block.
//
// Pass: Math, Element, ROWS, PARTS, GROUPS, SLOTS, UNITS_PER_SAMPLE
#pragma once
#include "kernels/operands.cuh"
#include "types/params.cuh"

template <class Pass> struct Grouped : Operands<typename Pass::Math, typename Pass::Element, Pass::ROWS * Pass::PARTS * 32> {
  static constexpr int ROWS = Pass::ROWS, PARTS = Pass::PARTS, WARPS = ROWS * PARTS, kThreads = WARPS * 32;
  static constexpr int GROUPS = Pass::GROUPS, SLOTS = Pass::SLOTS, kBlock = kThreads * GROUPS;
  static constexpr int kFirst = SLOTS > 1 ? SLOTS - 1 : 1;  // slots to be filled when a unit begins

  const Params& params;
  Lane lane;
  const int group, part;
  int first;  // the warp's first row
  const i64 units;

  DEVICE Grouped(const Params& given)
      : params(given), group(threadIdx.x / kThreads), part(PARTS > 1 ? threadIdx.x / 32 % WARPS / ROWS : 0),
        first(threadIdx.x / 32 % ROWS * 16), units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  DEVICE void sync() const { sync_group<WARPS, GROUPS>(group + 1); }  // the block's own barrier is for the end

  // The group's units from `unit` on, in slots of BYTES at `memory`: load(unit, slot) asks for one, ready(slot) does to a thread's
  // own copies what has to be done, make(unit, slot) makes it, in which the group meets MEETINGS times.
  template <int BYTES, class Load> DEVICE void begin(i64 unit, i64 step, u32 memory, const Load& load) const {
    UNROLL for (int s = 0; s < kFirst; ++s) load(unit + s * step, memory + s * BYTES);
  }
  template <int BYTES, int MEETINGS, class Load, class Ready, class Make>
  DEVICE void each_unit(i64 unit, i64 step, u32 memory, const Load& load, const Ready& ready, const Make& make) {
    int slot = 0;
    ROLL for (; unit < units; unit += step) {
      stay_here(lane.index, first);  // or the places of all operands are kept from unit to unit, and spilled
      lane = Lane(lane.index);
      wait_for_copies<(SLOTS > 1 ? SLOTS - 2 : 0)>();
      const u32 here = memory + slot * BYTES;
      ready(here);
      sync();
      if (SLOTS > 1) load(unit + (SLOTS - 1) * step, memory + (slot ? slot - 1 : SLOTS - 1) * BYTES);
      slot = slot + 1 == SLOTS ? 0 : slot + 1;
      make(unit, here);
      if (SLOTS == 1) sync(), load(unit + step, memory);
    }
    wait_for_copies<0>();
    constexpr int kTimes = 1 + MEETINGS + (SLOTS == 1);
    if constexpr (WARPS > 1) meet_as_others<GROUPS>(unit - i64(group) * gridDim.x, units, kTimes, [&] { sync(); });
  }
};
