// Rings: slots of shared memory, in turns, through which some threads of a block bring what others multiply. Each slot has a
// barrier that says that it is full, and one that it is empty again. Who brings are threads that copy, or one that asks the copy
// engine for runs of memory or for boxes of tensors.
#pragma once
#include "ptx/instructions.cuh"

// Where someone is who takes slot after slot, and the phase of what is waited for there. It begins at {0, 0} for who reads, and
// at {0, 1} for who writes, to whom all slots are free at first.
template <int SLOTS> struct RingCursor {
  int slot;
  u32 phase;
  DEVICE void next() {
    if (++slot == SLOTS) slot = 0, phase ^= 1;
  }
  DEVICE void skip(int by) {
    slot += by;
    if (slot >= SLOTS) slot -= SLOTS, phase ^= 1;
  }
};

// The barriers of SLOTS, wherever these lie; BLOCKS of a cluster write to each.
template <int SLOTS, int BLOCKS = 1> struct Barriers {
  const u32 barriers;
  static constexpr int kBarrierBytes = SLOTS * 16;
  using Cursor = RingCursor<SLOTS>;

  DEVICE explicit Barriers(u32 barriers) : barriers(barriers) {}

  DEVICE u32 full(u32 slot) const { return barriers + slot * 8; }
  DEVICE u32 empty(u32 slot) const { return barriers + (SLOTS + slot) * 8; }
  // By at least as many threads as there are slots: how many say that a slot is full, and how many that it is empty.
  DEVICE void init(int writers, int readers, u32 thread = threadIdx.x) const {
    if (thread < SLOTS) {
      init_barrier(full(thread), writers);
      init_barrier(empty(thread), readers);
    }
  }

  DEVICE void wait_until_full(const Cursor& cursor) const { wait_for_bytes(full(cursor.slot), cursor.phase); }
  DEVICE void wait_until_empty(const Cursor& cursor) const { wait_for_bytes(empty(cursor.slot), cursor.phase); }
  // The same of who counts slots instead: the `position`th of all that go by
  DEVICE void wait_until_full(u32 position) const { wait_for_bytes(full(position % SLOTS), position / SLOTS & 1); }
  DEVICE void wait_until_empty(u32 position) const {
    wait_for_bytes(empty(position % SLOTS), (position / SLOTS & 1) ^ 1);
  }
  // A thread has written its part of a slot, which the copy engine or the matrix unit reads.
  DEVICE void hand_over(u32 slot) const {
    fence_copy_engine();
    arrive(full(slot));
  }
  // A warp has read a slot: all who write there are told.
  DEVICE void release(u32 slot, int lane = threadIdx.x % 32) const {
    if constexpr (BLOCKS == 1) {
      if (lane == 0) arrive(empty(slot));
    } else {
      if (lane < BLOCKS) free_in_other_block(in_block(empty(slot), lane));
    }
  }
};

// SLOTS of BYTES each behind one another
template <int SLOTS, int BYTES, int BLOCKS = 1> struct Ring : Barriers<SLOTS, BLOCKS> {
  using Base = Barriers<SLOTS, BLOCKS>;
  const u32 slots;

  DEVICE Ring(u32 slots, u32 barriers) : Base(barriers), slots(slots) {}
  DEVICE explicit Ring(u32 slots) : Ring(slots, slots + SLOTS * BYTES) {}

  DEVICE u32 at(u32 slot) const { return slots + slot * BYTES; }
  // By the one thread that asks the copy engine for so many bytes next. Returns the barrier that counts them.
  DEVICE u32 begin_to_fill(const RingCursor<SLOTS>& cursor, u32 bytes = BYTES) const {
    Base::wait_until_empty(cursor);
    expect_bytes(Base::full(cursor.slot), bytes);
    return Base::full(cursor.slot);
  }
};

// A ring with where someone is in it: `take` waits for the next slot to be full, `fill` for it to be empty, and says which it is.
template <int SLOTS, int BYTES, int BLOCKS = 1> struct Stream : Ring<SLOTS, BYTES, BLOCKS> {
  using Base = Ring<SLOTS, BYTES, BLOCKS>;
  RingCursor<SLOTS> cursor;
  DEVICE Stream(u32 slots, u32 barriers, u32 phase) : Base(slots, barriers), cursor{0, phase} {}
  DEVICE int take() {
    Base::wait_until_full(cursor);
    return next();
  }
  DEVICE int fill(u32 bytes = BYTES) {
    Base::begin_to_fill(cursor, bytes);
    return next();
  }
  DEVICE int next() {
    const int slot = cursor.slot;
    cursor.next();
    return slot;
  }
};

// Where the warps of a block part: CONSUMERS threads take REGISTERS each and multiply, the others bring, with FEWER.
template <int CONSUMERS, int REGISTERS, int FEWER, class Consume, class Produce>
DEVICE void part_ways(const Consume& consume, const Produce& produce) {
  if (threadIdx.x < CONSUMERS)
    take_registers<REGISTERS>(), consume();
  else
    give_registers<FEWER>(), produce();
}
// The same by warpgroups, of which the last one, number PRODUCER, brings.
template <int PRODUCER, int REGISTERS, int FEWER, class Consume, class Produce>
DEVICE void part_ways(int warpgroup, const Consume& consume, const Produce& produce) {
  if (warpgroup == PRODUCER)
    give_registers<FEWER>(), produce();
  else
    take_registers<REGISTERS>(), consume();
}

// A box to `to` in each of a cluster's BLOCKS: a part, which this one brings for all.
template <int BLOCKS> DEVICE void load_box_of(u32 to, const TensorMap& map, const int (&at)[5], u32 barrier) {
  if constexpr (BLOCKS == 1)
    load_box(to, map, at, barrier);
  else
    load_box(to, map, at, barrier, (1u << BLOCKS) - 1);
}
