// What recurrent kernels share whose blocks take UNITS sequences through all their steps: warps that multiply, and behind them
// maybe one more that brings what is read at each step, SLOTS steps ahead, and says where its rows lie. All come to the same
// barriers: when a step ends, what the next one reads is there.
//
// Pass: what chain.cuh asks for; SLOTS, STREAMS, tensors with a row for each step that is read; kWalk, the place from which on is
//       said where rows lie (recurrent_rows.cuh); kRowsAt, kStreamsAt, kStreamBytes, kSlotBytes in shared memory; DOWN, whether
//       steps are walked from a sequence's last one to its first one
#pragma once
#include "kernels/chain.cuh"
#include "kernels/recurrent/recurrent_rows.cuh"

template <class Pass> struct RecurrentWalk : Chain<Pass> {
  using Base = Chain<Pass>;
  using Base::kBlock, Base::memory, Base::params, Base::units;
  static constexpr int kCodes = 2 * Pass::SLOTS;
  static_assert((Pass::SLOTS & (Pass::SLOTS - 1)) == 0 && kCodes >= Pass::SLOTS + 2);
  const u32 shared;
  const i64 begin;  // the block's first sequence

  DEVICE RecurrentWalk(const Params& p)
      : Base(p), shared(shared_address(shared_memory)), begin(i64(blockIdx.x) * Pass::UNITS) {}

  // Whether a thread multiplies, or brings what is read
  DEVICE static bool multiplies() { return threadIdx.x < kBlock; }

  DEVICE Rows<Pass::UNITS, kCodes> rows() const { return {shared + Pass::kRowsAt}; }
  DEVICE Row row(u32 step, int unit) const { return rows().of(step, unit); }

  DEVICE u32 stream_address(u32 step, int stream) const {
    return shared + Pass::kStreamsAt + step % Pass::SLOTS * Pass::kSlotBytes + stream * Pass::kStreamBytes;
  }

  // What the loading warp does: `load(to, stream, row, unit)` brings a row of a stream.
  template <class Load> DEVICE void bring(u32 step, const Load& load) const {
    for (int unit = 0; unit < Pass::UNITS; ++unit) {
      const Row mine = row(step, unit);
      if (mine.there())
        UNROLL for (int stream = 0; stream < Pass::STREAMS; ++stream) load(stream_address(step, stream), stream, mine, unit);
    }
    commit_copies();
  }

  // One step after another: the loading warp brings what the others, once they are `ready`, go on with. `loader(thread)` is what
  // brings a row, go(step) what all threads do, each its part.
  template <class Loader, class Ready, class Go> DEVICE void walk(const Loader& loader, const Ready& ready, const Go& go) const {
    static_assert(Pass::UNITS <= 32);
    const Walk walk(params, Pass::kWalk);
    const u32 steps = walk.longest(begin, Pass::UNITS, units);
    const int thread = threadIdx.x - kBlock;
    const bool reads_rows = !multiplies() && thread < Pass::UNITS;
    const auto load = loader(multiplies() ? 0 : thread);
    Ahead<Pass::DOWN> ahead(walk, begin + thread, reads_rows && begin + thread < units);
    if (multiplies())
      for (int at = threadIdx.x * 16; at < Pass::kGroupBytes; at += kBlock * 16) store_u32x4(memory + at, {0, 0, 0, 0});
    __syncthreads();
    if (multiplies()) Pass::load_weights(*this);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    if (multiplies()) {
      Base::round_weights();
      ready();
    } else {
      ahead.advance(0);
      for (u32 step = 0; step < kCodes - 1; ++step)
        if (const Row row = ahead.advance(step + 1); reads_rows) rows().publish(step, thread, row);
      __syncwarp();
      for (u32 step = 0; step < Pass::SLOTS; ++step) bring(step, load);
      wait_for_copies<Pass::SLOTS - 1>();
    }
    __syncthreads();
    ROLL for (u32 step = 0; step < steps; ++step) {
      if (!multiplies()) wait_for_copies<Pass::SLOTS - 2>();
      go(step);
      if (multiplies()) continue;
      if (const Row row = ahead.advance(step + kCodes); reads_rows) rows().publish(step + kCodes - 1, thread, row);
      __syncwarp();
      bring(step + Pass::SLOTS, load);
    }
    wait_for_copies<0>();
  }
  // The same by a cluster of blocks, without a warp for it: all threads bring what is read, AHEAD steps ahead, when a step calls
  // what it is given, and meet at next_is_there() once a step. Behind `hold` nobody reads weights that lie where states will. How
  // many steps there were
  template <int AHEAD, class Hold, class Loader, class Ready, class Go>
  DEVICE u32 walk_together(const Hold& hold, const Loader& loader, const Ready& ready, const Go& go) const {
    const Walk walk(params, Pass::kWalk);
    const u32 steps = walk.longest(begin, Pass::UNITS, units);
    const int thread = threadIdx.x, reader = thread - (kBlock - 32);  // rows are read by the last warp
    const bool warp_reads_rows = reader >= 0, reads_rows = warp_reads_rows && reader < Pass::UNITS;
    const auto load = loader();
    Ahead<Pass::DOWN> ahead(walk, begin + reader, reads_rows && begin + reader < units);
    Base::hold_weights(*this);
    hold();
    ahead.advance(0);
    for (u32 step = 0; step < kCodes - 1; ++step)
      if (const Row row = ahead.advance(step + 1); reads_rows) rows().publish(step, reader, row);
    __syncthreads();
    for (int at = thread * 16; at < Pass::kGroupBytes; at += kBlock * 16) store_u32x4(memory + at, {0, 0, 0, 0});
    __syncthreads();
    ready(steps);
    for (u32 step = 0; step < AHEAD; ++step) bring_together(step, load);
    wait_for_copies<AHEAD - 1>();
    sync_cluster();
    ROLL for (u32 step = 0; step < steps; ++step)
      go(step, steps, [&] {
        bring_together(step + AHEAD, load);
        if (warp_reads_rows)
          if (const Row row = ahead.advance(step + kCodes); reads_rows) rows().publish(step + kCodes - 1, reader, row);
      });
    wait_for_copies<0>();
    return steps;
  }
  // `load(slot, step, row, unit)` brings a row of all streams.
  template <class Load> DEVICE void bring_together(u32 step, const Load& load) const {
    for (int unit = 0; unit < Pass::UNITS; ++unit)
      if (const Row mine = row(step, unit); mine.there()) load(stream_address(step, 0), step, mine, unit);
    commit_copies();
  }
  DEVICE static void next_is_there() {
    wait_for_copies<Pass::SLOTS - 2>();
    __syncthreads();
  }
};
