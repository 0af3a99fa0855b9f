// The gradient of x of a Monarch layer whose groups are small and many, back through both contractions in one pass: grad_y
// [S][L] by weights [L][S][K * RHO] to the gradient of the state, which stays in registers, and that by weights
// [K][RHO][L][P] to [K][P]. On its way, grad_y is left turned in memory, in the order of monarch_order.cuh.
//
// A unit is four of the RHO numbers of a k. A block has 16 units and takes tiles of 64 samples. Its products are `wgmma`: the
// first ones of grad_y and second weights, an l at a time, eight units for each of two warpgroups. Columns 2 t and 2 t + 1 of
// their tiles of eight are, for the l-th of four l's, numbers of unit t ^ l of four. So a lane has all units, each for another
// l, and what it has of the i-th one is operand A of a step over four numbers and four l's, once its registers of four l's have
// changed places.
//
// More warps turn grad_y, a tile or two ahead of what is multiplied, and write it down, from where the copy engine brings an
// l at a time for both blocks of a cluster, which have different units, and turn different samples. Of 16 bits it brings them
// samples, too, of which `ldmatrix` hands out columns; of 32 a lane reads a square, some s's by 16 bytes of l's. What weights
// a block reads lies as shared memory is to have it: monarch_weights.cuh. kernels/monarch/monarch_backward.py writes the constants:
//
// Pass:  Math, Element, GRAD (the parameter that grad_y is), K, P, L, S, RHO, SLOTS (of an l), FIRSTS (of the first weights of
//        four), BLOCKS (of a cluster), TURNERS (warps), DEPTH (of 16 bits: samples that each of these has on their way)
#pragma once
#include "multiply/mma.cuh"
#include "kernels/monarch/monarch_order.cuh"
#include "types/params.cuh"
#include "finish/sums.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"

template <class Pass> struct MonarchBack {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using Order = MonarchOrder<Pass>;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kPiece = 16 / kSize;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO;
  static constexpr int SLOTS = Pass::SLOTS, FIRSTS = Pass::FIRSTS, BLOCKS = Pass::BLOCKS;
  static constexpr int TURNERS = Pass::TURNERS, DEPTH = Pass::DEPTH;
  static constexpr int kConsumers = 256, kTurners = 32 * TURNERS, kSamples = Order::kTile, kOwn = kSamples / BLOCKS;
  static constexpr int kCopyRegisters = 56, kRegisters = kSize == 2 ? 224 : 200;  // of 384 or 512 threads
  static constexpr int kLoader = kConsumers / 32 + TURNERS;  // a warp
  static constexpr int kAhead = kSize == 2 ? 2 : 1;  // tiles that are turned before what is loaded, at most
  static constexpr int kOfK = RHO / 4, kUnits = 16, kParts = 16 / kStep;  // steps of a unit
  static_assert(K * kOfK == kUnits * BLOCKS && L % kPiece == 0 && L % 4 == 0 && S % kStep == 0 && P % 8 == 0);
  static_assert(Order::kRun < 8 || Order::kRun % 8 == 0);

  // A slot: rows of samples and of numbers, in slabs. The first weights of a unit: rows of P's, the numbers of four l's.
  static constexpr int kSlabs = Order::kSlabs, kGrad = kSlabs * kSamples * 128, kSecond = Order::kSecondBytes;
  static constexpr int kSlotBytes = kGrad + kSecond, kRow = 16 * kSize, kFirst = Order::kFirstBytes;
  static constexpr int kFirsts = SLOTS * kSlotBytes, kSlots = kFirsts + FIRSTS * kFirst, kSample = L * S * kSize;
  static constexpr int kOfSlots = kSize == 2 ? TURNERS * DEPTH : 0, kBarriers = kSlots + kOfSlots * kSample;

  using Sums = float[8 / kOfK][P / 2];
  using State = float[4][16];  // of four l's: numbers of eight units
  using Left = u32[2 * kParts][4][4];

  const Params& params;
  const u32 memory;
  const Ring<SLOTS, kSlotBytes, BLOCKS> slots;
  const Ring<FIRSTS, kFirst> firsts;
  const Lane lane;
  const int warp, rank;

  DEVICE MonarchBack(const Params& given)
      : params(given), memory(shared_address(shared_memory) + 1023 & ~1023u), slots(memory, memory + kBarriers),
        firsts(memory + kFirsts, slots.full(2 * SLOTS)), warp(uniform(threadIdx.x / 32)),
        rank(blockIdx.y % BLOCKS) {}

  DEVICE i64 tiles() const { return (params.batch + kSamples - 1) / kSamples; }
  DEVICE u32 turned(int tile) const { return firsts.full(2 * FIRSTS + tile); }  // kAhead of them, in turns
  DEVICE u32 full_slot(int slot) const { return turned(kAhead + slot); }
  DEVICE int rows_of(i64 tile) const { return int(min(params.batch - tile * kSamples, i64(kSamples))); }

  DEVICE int own_rows(i64 tile) const {
    const int rows = rows_of(tile) - rank * kOwn;
    return rows < 0 ? 0 : min(rows, kOwn);
  }
  DEVICE const Element* grad_of(i64 tile) const {
    return static_cast<const Element*>(params.weights[Pass::GRAD]) + (tile * kSamples + rank * kOwn) * (L * S);
  }
  DEVICE char* turned_of(i64 tile) const {
    return static_cast<char*>(const_cast<void*>(params.x)) + Order::turned_at(tile * kSamples);
  }
  // Of 32 bits this block's samples of a tile, by squares: neighbouring lanes store pieces of a row, and read rows side by side.
  DEVICE void turn_squares(i64 tile) const {
    constexpr int kAcross = L / kPiece, kRun = Order::kRun, kNear = kRun < 8 ? kRun : 8, kSquares = kAcross * kRun;
    const int rows = rows_of(tile), first = rank * kOwn, all = own_rows(tile) * kSquares;
    const Element* g = grad_of(tile);
    char* to = turned_of(tile);
    ROLL for (int j = threadIdx.x - kConsumers; j < all; j += kTurners) {
      const int across = j / kNear % kAcross, sample = j / kSquares;
      const int piece = j / (kNear * kAcross) % (kRun / kNear) * kNear + j % kNear;
      u32 square[kPiece][4];
      UNROLL for (int i = 0; i < kPiece; ++i)
        load_global(g + (sample * S + piece + i * kRun) * L + across * kPiece, square[i]);
      UNROLL for (int i = 0; i < kPiece; ++i) {
        u32 words[kPiece];
        UNROLL for (int s = 0; s < kPiece; ++s) words[s] = tf32_of(square[s][i]);
        store_global<16>(to + Order::turned_row(across * kPiece + i, piece / 8, first + sample, rows, piece % 8), words);
      }
    }
  }
  // Of 16 bits a sample that lies in shared memory: a lane has 16 bytes of an l.
  DEVICE void turn_sample(i64 tile, int sample, u32 from) const {
    constexpr int kRun = Order::kRun, kOctets = L / 8, kTogether = kOctets % 3 == 0 ? 6 : 4;
    const int rows = rows_of(tile), row = rank * kOwn + sample, step = 8 * kSlabs * 128 * rows;
    char* to = turned_of(tile);
    UNROLL for (int four = 0; four < kRun; four += 4) {
      const int piece = four + lane.t, near = four + lane.index % 8 / 2;  // of those of a column and of a row
      const int s = (near < kRun ? near : 0) + lane.index / 8 * (2 * kRun) + lane.index % 2 * kRun;
      char* here = to + Order::turned_row(lane.g, piece / 8, row, rows, piece % 8);
      ROLL for (int begin = 0; begin < kOctets; begin += kTogether) {
        u32 words[kTogether][4];
        UNROLL for (int i = 0; i < kTogether; ++i)
          if (begin + i < kOctets) load_matrices<true>(words[i], from + s * (L * 2) + (begin + i) * 16);
        UNROLL for (int i = 0; i < kTogether; ++i, here += step)
          if (begin + i < kOctets && (kRun % 4 == 0 || piece < kRun)) store_global<16>(here, words[i]);
      }
    }
  }
  // A warp's samples, one behind another
  struct Next {
    i64 tile;
    int sample;
  };
  DEVICE void advance(Next& next, int mine, int by) const {
    for (next.sample += by; next.tile < tiles() && next.sample >= own_rows(next.tile); next.tile += gridDim.x)
      next.sample = mine;
  }
  DEVICE void ask(const Next& next, int slot) const {
    if (next.tile >= tiles() || lane.index != 0) return;
    expect_bytes(full_slot(slot), kSample);
    load_run(memory + kSlots + slot * kSample, grad_of(next.tile) + next.sample * (L * S), kSample, full_slot(slot));
  }
  // What a tile's loads wait for: all of it turned, by both blocks, and the tile before loaded
  DEVICE void tell_turned(int tile) const {
    if (lane.index < BLOCKS) arrive_in_other_block(in_block(turned(tile), lane.index));
  }
  DEVICE void turn_all() const {
    const int mine = warp - kConsumers / 32, slots = mine * DEPTH;
    Next next{blockIdx.x, mine};
    if constexpr (kSize == 2) {
      advance(next, mine, 0);
      for (int i = 0; i < DEPTH; ++i) ask(next, slots + i), advance(next, mine, TURNERS);
    }
    RingCursor<DEPTH> cursor{0, 0};
    RingCursor<kAhead> told{0, 1};
    ROLL for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x, told.next()) {
      wait_for_cluster(turned(told.slot), told.phase);
      if constexpr (kSize == 4) {
        turn_squares(tile);
      } else {
        ROLL for (int sample = mine; sample < own_rows(tile); sample += TURNERS, cursor.next()) {
          const int slot = slots + cursor.slot;
          wait_for_bytes(full_slot(slot), cursor.phase);
          turn_sample(tile, sample, memory + kSlots + slot * kSample);
          fence_copy_engine();
          __syncwarp();
          ask(next, slot), advance(next, mine, TURNERS);
        }
      }
      fence_copies_of_memory();
      __syncwarp();
      tell_turned(told.slot);
    }
  }
  DEVICE void load_weights() const {
    const char* second = static_cast<const char*>(params.sums) + i64(blockIdx.y) * L * kSecond;
    const char* given = static_cast<const char*>(params.sums) + Order::kFirstAt + i64(blockIdx.y) * (L / 4) * kFirst;
    RingCursor<SLOTS> cursor{0, 1};
    RingCursor<FIRSTS> first{0, 1};
    ROLL for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x)
      ROLL for (int l = 0; l < L; ++l, cursor.next()) {
        const u32 to = slots.at(cursor.slot) + kGrad, full = slots.begin_to_fill(cursor, kSecond);
        load_run(to, second + l * kSecond, kSecond, full);
        if (l % 4) continue;
        const u32 full_first = firsts.begin_to_fill(first);
        load_run(firsts.at(first.slot), given + l / 4 * kFirst, kFirst, full_first);
        first.next();
      }
  }
  DEVICE void load_grad() const {
    RingCursor<SLOTS> cursor{0, 1};
    RingCursor<kAhead> told{0, 0};
    ROLL for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x, told.next()) {
      const int rows = rows_of(tile), mine = own_rows(tile) * 128;
      for (int block = 0; block < BLOCKS; ++block) arrive_in_other_block(in_block(turned(told.slot), block));
      wait_for_cluster(turned(told.slot), told.phase);
      fence_copies_of_memory();
      const char* from = turned_of(tile) + Order::turned_row(0, 0, rank * kOwn, rows, 0);
      ROLL for (int l = 0; l < L; ++l, cursor.next()) {
        const u32 to = slots.at(cursor.slot) + rank * (kOwn * 128), barrier = slots.begin_to_fill(cursor, kSlabs * rows * 128);
        UNROLL for (int slab = 0; slab < kSlabs; ++slab, from += rows * 128) {
          if (mine == 0) continue;
          if constexpr (BLOCKS == 1)
            load_run(to + slab * (kSamples * 128), from, mine, barrier);
          else
            load_run(to + slab * (kSamples * 128), from, mine, barrier, (1u << BLOCKS) - 1);
        }
      }
    }
  }

  // Of an l, eight units: to what is in flight.
  DEVICE void make_state(float (&state)[16], u32 slot, int group) const {
    open_products();
    UNROLL for (int step = 0; step < S / kStep; ++step) {
      const u64 grad = operand(slot + step / 4 * (kSamples * 128)) + step % 4 * 2;
      const u64 second = operand(slot + kGrad + step / 4 * 8192 + group * 4096) + step % 4 * 2;
      Wgmma<Element, 32>::multiply(state, grad, second, step > 0);
    }
    commit_products();
  }
  DEVICE void swap(u32& x, u32& y, bool wanted) const {
    const u32 given = x;
    x = wanted ? y : x, y = wanted ? given : y;
  }
  // Of four l's: for each of four units those that this lane has.
  DEVICE void exchange(u32 (&of)[4]) const {
    swap(of[0], of[1], lane.t & 1), swap(of[2], of[3], lane.t & 1);
    swap(of[0], of[2], lane.t & 2), swap(of[1], of[3], lane.t & 2);
  }
  // Of four units a step's operands, of 32 bits those of half of the numbers
  DEVICE void as_a(u32 (&left)[4][4], const State& state, int four, int part) const {
    UNROLL for (int i = 0; i < 4; ++i) {
      const int half = i % 2, pair = kSize == 2 ? i / 2 : part, at = (four * 2 + pair) * 4 + half * 2;
      u32 of[4];
      UNROLL for (int l = 0; l < 4; ++l) {
        if constexpr (kSize == 2) of[l] = Pair<Element>(state[l][at], state[l][at + 1]).bits;
        else of[l] = tf32_of(__float_as_uint(state[l][at + i / 2]));
      }
      exchange(of);
      UNROLL for (int unit = 0; unit < 4; ++unit) left[unit][i] = of[unit];
    }
  }
  // What eight units add to the sums: to what is in flight.
  DEVICE void add_units(Sums& sums, const Left& left, u32 first) const {
    open_products();
    UNROLL for (int i = 0; i < 2 * kParts; ++i)
      UNROLL for (int unit = 0; unit < 4; ++unit) {
        const int at = i / kParts * 4 + unit;
        const u64 weight = narrow_operand<kRow>(first + at * (P * kRow)) + i % kParts * 2;
        Wgmma<Element, P>::multiply(sums[at / kOfK], left[i][unit], weight);
      }
    commit_products();
  }
  // By lanes that have a block of the cluster each, whose barriers begin `there`
  DEVICE void release(int slot, u32 there) const {
    if constexpr (BLOCKS == 1) {
      if (lane.index == 0) arrive(slots.empty(slot));
    } else {
      if (lane.index < BLOCKS) free_in_other_block(there + (SLOTS + slot) * 8);
    }
  }
  // The first products of four l's are asked for as soon as there is what they are made of, which is free behind them.
  DEVICE void make_states(State& state, RingCursor<SLOTS>& cursor, int group, u32 there) const {
    RingCursor<SLOTS> last = cursor;
    UNROLL for (int l = 0; l < 4; ++l, cursor.next()) {
      slots.wait_until_full(cursor);
      make_state(state[l], slots.at(cursor.slot), group);
      if (l < 1) continue;
      wait_for_products<1>();
      release(last.slot, there), last.next();
    }
    wait_for_products<0>();
    release(last.slot, there);
    UNROLL for (int l = 0; l < 4; ++l) touch(state[l]);
  }
  DEVICE void touch_all(Sums& sums) const {
    UNROLL for (int k = 0; k < 8 / kOfK; ++k) touch(sums[k]);
  }
  DEVICE void release_first(RingCursor<FIRSTS>& first) const {
    firsts.release(first.slot, lane.index);
    first.next();
  }
  // The first products of four l's are made beside the second ones of the four before.
  DEVICE void consume() const {
    const int group = warp / 4;
    const u32 there = in_block(slots.barriers, lane.index % BLOCKS);
    RingCursor<SLOTS> cursor{0, 0};
    RingCursor<FIRSTS> first{0, 0}, last_first = first;
    ROLL for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      Sums sums = {};
      ROLL for (int four = 0; four < L / 4; ++four) {
        State state;
        make_states(state, cursor, group, there);
        touch_all(sums);
        if (four > 0) release_first(last_first);
        Left left;
        UNROLL for (int i = 0; i < 2 * kParts; ++i) as_a(left[i], state, i / kParts, i % kParts);
        firsts.wait_until_full(first);
        add_units(sums, left, firsts.at(first.slot) + group * (8 * P * kRow));
        first.next();
        if constexpr (kSize == 4) wait_for_products<0>(), touch_all(sums);  // registers have no room for the next four's
      }
      wait_for_products<0>();
      touch_all(sums);
      release_first(last_first);
      store(sums, tile, group);
    }
  }
  // The lanes of a row have two columns side by side of each of two or four tiles. Of 16 bits they exchange some, for accesses
  // of whole sectors.
  DEVICE u32 both(const float* sums) const { return Pair<Element>(sums[0], sums[1]).bits; }
  DEVICE void give(u32& kept, u32& given, bool odd, int lanes) const {
    const u32 taken = __shfl_xor_sync(0xffffffff, odd ? kept : given, lanes);
    kept = odd ? taken : kept, given = odd ? given : taken;
  }
  DEVICE void store(const Sums& sums, i64 tile, int group) const {
    constexpr int kTiles = P / kOfK, kTogether = kSize == 4 ? 1 : kTiles % 4 ? 2 : 4;
    Element* y = static_cast<Element*>(params.y) + (i64(blockIdx.y) * kUnits + group * 8) / kOfK * P;
    const bool odd = lane.t & 1, upper = lane.t & 2;
    UNROLL for (int half = 0; half < 2; ++half) {
      const i64 sample = tile * kSamples + warp % 4 * 16 + half * 8 + lane.g;
      Element* row = y + sample * (K * P);
      const bool present = sample < params.batch;
      UNROLL for (int n = 0; n < kTiles; n += kTogether) {
        const float* of = sums[0] + n * 4 + half * 2;
        if constexpr (kTogether == 1) {
          if (present) store_two<true, Element>(row + n * 8 + lane.t * 2, of[0], of[1], true);
        } else {
          u32 words[kTogether];
          UNROLL for (int i = 0; i < kTogether; ++i) words[i] = both(of + i * 4);
          UNROLL for (int i = 0; i < kTogether; i += 2) give(words[i], words[i + 1], odd, 1);
          if constexpr (kTogether == 4) give(words[0], words[2], upper, 2), give(words[1], words[3], upper, 2);
          const int column = kTogether == 4 ? lane.t * 8 : odd * 8 + lane.t / 2 * 4;
          if (present) store_global<4 * kTogether>(row + n * 8 + column, words);
        }
      }
    }
  }

  DEVICE void run() const {
    slots.init(2, kConsumers / 32 * BLOCKS);
    firsts.init(1, kConsumers / 32);
    if (int(threadIdx.x) < kOfSlots) init_barrier(full_slot(threadIdx.x), 1);
    if (threadIdx.x < kAhead) init_barrier(turned(threadIdx.x), (TURNERS + 1) * BLOCKS);
    fence_copy_engine();
    __syncthreads();
    if constexpr (BLOCKS > 1) sync_cluster();
    if (warp >= kConsumers / 32)
      give_registers<kCopyRegisters>(), produce();
    else
      take_registers<kRegisters>(), consume();
    if constexpr (BLOCKS > 1) sync_cluster();  // the other one may still tell this one's loaders, or write here
  }
  DEVICE void produce() const {
    if (warp < kConsumers / 32 + TURNERS)
      turn_all();
    else if (warp == kLoader && lane.index == 0)
      load_grad();
    else if (warp == kLoader + 1 && lane.index == 0)
      load_weights();
  }
};
