// The gradient of x of a Monarch layer whose groups are small and many, back through both contractions in one pass: grad_y
// [S][L] by weights [L][S][K * RHO] to the gradient of the state, which stays in registers, and that by weights
// [K][RHO][L][P] to [K][P]. On its way, grad_y is left turned in memory, in the order of monarch_order.cuh.
//
// A unit is four of the RHO numbers of a k. A block has 16 units and takes tiles of 64 samples. Its first products are
// `wgmma` of grad_y and second weights, an l at a time, eight units for each of two warpgroups; the second ones a warp's own.
// Columns 2 t and 2 t + 1 of the former's tiles of eight are, for the l-th of four l's, numbers of unit t ^ l of four. So a lane
// has all units, each for another l, and what it has of the i-th one is operand A of a step over four numbers and four l's,
// once its registers of four l's have changed places.
//
// Seven more warps turn grad_y, a tile or two ahead of what is multiplied: a lane reads a square, some s's by 16 bytes of l's,
// and writes it down turned, from where the copy engine brings an l at a time for both blocks of a cluster, which have
// different units, and turn different samples. What weights a block reads lies as shared memory is to have it, too:
// monarch_weights.cuh. factorlayer/monarch_backward.py writes the constants:
//
// Pass:  Math, Element, GRAD (the parameter that grad_y is), K, P, L, S, RHO, STAGES (of an l), FIRSTS (of the first weights of
//        four), BLOCKS (of a cluster)
#pragma once
#include "mma.cuh"
#include "monarch_order.cuh"
#include "params.cuh"
#include "sums.cuh"
#include "wgmma.cuh"

template <class Pass> struct MonarchBack {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using A = typename Math::A;
  using B = typename Math::B;
  using Order = MonarchOrder<Pass>;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kPiece = 16 / kSize;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO;
  static constexpr int STAGES = Pass::STAGES, FIRSTS = Pass::FIRSTS, BLOCKS = Pass::BLOCKS;
  static constexpr int kConsumers = 256, kTurners = 224, kSamples = Order::kTile, kOwn = kSamples / BLOCKS;
  static constexpr int kCopyRegisters = 56, kRegisters = 200;
  static constexpr int kOfK = RHO / 4, kUnits = 16, kParts = 16 / kStep;  // steps of a unit
  static_assert(K * kOfK == kUnits * BLOCKS && L % kPiece == 0 && L % 4 == 0 && S % kStep == 0 && P % 8 == 0);
  static_assert(Order::kRun < 8 || Order::kRun % 8 == 0);

  // A stage: rows of samples and of numbers, in slabs. The first weights of a unit: rows of P's, the numbers of four l's.
  static constexpr int kSlabs = Order::kSlabs, kGrad = kSlabs * kSamples * 128, kSecond = Order::kSecondBytes;
  static constexpr int kStageBytes = kGrad + kSecond, kRow = 16 * kSize, kFirst = Order::kFirstBytes;
  static constexpr int kFirsts = STAGES * kStageBytes, kBarriers = kFirsts + FIRSTS * kFirst;

  using Sums = float[8 / kOfK][P / 8][4];
  using State = float[4][16];  // of four l's: numbers of eight units

  const Params& params;
  const u32 memory;
  const Lane lane;
  const int warp, rank;

  DEVICE MonarchBack(const Params& given)
      : params(given), memory(shared_address(shared_memory) + 1023 & ~1023u), warp(uniform(threadIdx.x / 32)),
        rank(blockIdx.y % BLOCKS) {}

  DEVICE i64 tiles() const { return (params.batch + kSamples - 1) / kSamples; }
  DEVICE u32 full(int stage) const { return memory + kBarriers + stage * 8; }
  DEVICE u32 empty(int stage) const { return full(STAGES + stage); }
  DEVICE u32 full_first(int stage) const { return full(2 * STAGES + stage); }
  DEVICE u32 empty_first(int stage) const { return full(2 * STAGES + FIRSTS + stage); }
  DEVICE u32 turned() const { return full(2 * STAGES + 2 * FIRSTS); }
  DEVICE int rows_of(i64 tile) const { return int(min(params.batch - tile * kSamples, i64(kSamples))); }

  // Stages in turns
  template <int COUNT> struct Ring {
    int stage;
    u32 phase;
    DEVICE void turn() {
      if (++stage == COUNT) stage = 0, phase ^= 1;
    }
  };

  // The i-th l's 16 bytes of a square, whose rows are s's
  static DEVICE void row_of(u32 (&words)[4], const u32 (&square)[kPiece][4], int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kSize == 2) {
        const u32 x = square[j * 2][i / 2], y = square[j * 2 + 1][i / 2];
        words[j] = i % 2 ? x >> 16 | (y & 0xffff0000) : (x & 0xffff) | y << 16;
      } else {
        words[j] = tf32_of(square[j][i]);
      }
    }
  }
  // Of what this block turns of a tile, how many squares there are
  static constexpr int kSquares = kOwn * (L / kPiece) * Order::kRun;
  DEVICE int squares_of(i64 tile) const { return min(kOwn, rows_of(tile) - rank * kOwn) * (kSquares / kOwn); }
  DEVICE const Element* grad_of(i64 tile) const {
    return static_cast<const Element*>(params.weights[Pass::GRAD]) + (tile * kSamples + rank * kOwn) * (L * S);
  }
  // This block's samples of a tile, by squares: neighbouring lanes store pieces of a row, and read rows side by side.
  DEVICE void turn(i64 tile) const {
    constexpr int kAcross = L / kPiece, kRun = Order::kRun, kNear = kRun < 8 ? kRun : 8;
    const int rows = rows_of(tile), first = rank * kOwn, all = squares_of(tile);
    const Element* g = grad_of(tile);
    char* to = static_cast<char*>(const_cast<void*>(params.x)) + Order::turned_at(tile * kSamples);
#pragma unroll 1
    for (int j = threadIdx.x - kConsumers; j < kSquares; j += kTurners) {
      const int across = j / kNear % kAcross, sample = j / (kAcross * kRun);
      const int piece = j / (kNear * kAcross) % (kRun / kNear) * kNear + j % kNear;
      u32 square[kPiece][4];
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
        load_global(g + (sample * S + piece + i * kRun) * L + across * kPiece, square[i], j < all);
      if (j >= all) continue;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        u32 words[4];
        row_of(words, square, i);
        store_global<16>(to + Order::turned_row(across * kPiece + i, piece / 8, first + sample, rows, piece % 8), words);
      }
    }
  }
  // What a tile's loads wait for: all of it turned, by both blocks, and what the one before waited for
  DEVICE void tell_turned() const {
    if (lane.index < BLOCKS) arrive_in_other_block(in_block(turned(), lane.index));
  }
  DEVICE void turn_all() const {
    u32 phase = 1;
#pragma unroll 1
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x, phase ^= 1) {
      wait_for_cluster(turned(), phase);
      turn(tile);
      fence_copies_of_memory();
      __syncwarp();
      tell_turned();
    }
  }
  DEVICE void load() const {
    const char *weights = static_cast<const char*>(params.sums), *grad = static_cast<const char*>(params.x);
    Ring<STAGES> ring{0, 1};
    Ring<FIRSTS> first{0, 1};
    u32 phase = 0;
#pragma unroll 1
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x, phase ^= 1) {
      const int rows = rows_of(tile), mine = min(rows > rank * kOwn ? rows - rank * kOwn : 0, kOwn) * 128;
      for (int block = 0; block < BLOCKS; ++block) arrive_in_other_block(in_block(turned(), block));
      wait_for_cluster(turned(), phase);
      fence_copies_of_memory();
#pragma unroll 1
      for (int l = 0; l < L; ++l, ring.turn()) {
        if (l % 4 == 0) {
          wait_for_bytes(empty_first(first.stage), first.phase);
          expect_bytes(full_first(first.stage), kFirst);
          const i64 at = Order::kFirstAt + (i64(blockIdx.y) * (L / 4) + l / 4) * kFirst;
          load_run(memory + kFirsts + first.stage * kFirst, weights + at, kFirst, full_first(first.stage));
          first.turn();
        }
        const u32 to = memory + ring.stage * kStageBytes, barrier = full(ring.stage);
        wait_for_bytes(empty(ring.stage), ring.phase);
        expect_bytes(barrier, kSecond + kSlabs * rows * 128);
        load_run(to + kGrad, weights + (i64(blockIdx.y) * L + l) * kSecond, kSecond, barrier);
        if (mine == 0) continue;
        const char* from = grad + Order::turned_at(tile * kSamples);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          const u32 there = to + (slab * kSamples + rank * kOwn) * 128;
          const char* row = from + Order::turned_row(l, slab, rank * kOwn, rows, 0);
          if constexpr (BLOCKS == 1)
            load_run(there, row, mine, barrier);
          else
            load_run(there, row, mine, barrier, (1u << BLOCKS) - 1);
        }
      }
    }
  }

  // Of an l, eight units: to what is in flight.
  DEVICE void make_state(float (&state)[16], u32 stage, int group) const {
    open_products();
#pragma unroll
    for (int step = 0; step < S / kStep; ++step) {
      const u64 grad = operand(stage + step / 4 * (kSamples * 128)) + step % 4 * 2;
      const u64 second = operand(stage + kGrad + step / 4 * 8192 + group * 4096) + step % 4 * 2;
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
  DEVICE void as_a(A (&left)[4], const State& state, int four, int part) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2, pair = kSize == 2 ? i / 2 : part, at = (four * 2 + pair) * 4 + half * 2;
      u32 of[4];
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        if constexpr (kSize == 2) of[l] = Pair<Element>(state[l][at], state[l][at + 1]).bits;
        else of[l] = tf32_of(__float_as_uint(state[l][at + i / 2]));
      }
      exchange(of);
#pragma unroll
      for (int unit = 0; unit < 4; ++unit) left[unit].r[i] = of[unit];
    }
  }
  // A row's pieces change places so that eight rows are in all banks.
  DEVICE u32 lane_of_first(int part) const {
    const int row = (lane.index & 7) + (lane.index >> 4) * 8, piece = part * 2 + (lane.index >> 3 & 1);
    return row * kRow + Order::piece_of_first(row, piece) * 16;
  }
  DEVICE void add_unit(float (&sums)[P / 8][4], const A& left, u32 first) const {
#pragma unroll
    for (int n = 0; n < P / 8; n += 2) {
      B b[2];
      if (n + 1 < P / 8) {
        u32 r[4];
        load_matrices<false>(r, first + n * 8 * kRow);
        b[0].r[0] = r[0], b[0].r[1] = r[1], b[1].r[0] = r[2], b[1].r[1] = r[3];
        Math::template multiply<kStep>(sums[n + 1], left, b[1]);
      } else {
        load_matrices<false>(b[0].r, first + n * 8 * kRow);
      }
      Math::template multiply<kStep>(sums[n], left, b[0]);
    }
  }
  DEVICE void release(int stage) const {
    if constexpr (BLOCKS == 1) {
      if (lane.index == 0) arrive(empty(stage));
    } else {
      if (lane.index < BLOCKS) free_in_other_block(in_block(empty(stage), lane.index));
    }
  }
  // What the first products of four l's are made of, as soon as it is there
  DEVICE void make_states(State& state, Ring<STAGES>& ring, int group) const {
#pragma unroll
    for (int l = 0; l < 4; ++l, ring.turn()) {
      wait_for_bytes(full(ring.stage), ring.phase);
      make_state(state[l], memory + ring.stage * kStageBytes, group);
    }
  }
  DEVICE void consume() const {
    const int group = warp / 4;
    const u32 lanes[] = {lane_of_first(0), lane_of_first(kParts - 1)};
    Ring<STAGES> ring{0, 0}, last = ring;
    Ring<FIRSTS> first{0, 0};
#pragma unroll 1
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      Sums sums = {};
#pragma unroll 1
      for (int four = 0; four < L / 4; ++four) {
        State state;
        make_states(state, ring, group);
        wait_for_products<0>();
#pragma unroll
        for (int l = 0; l < 4; ++l, last.turn()) touch(state[l]), release(last.stage);
        wait_for_bytes(full_first(first.stage), first.phase);
        const u32 of_first = memory + kFirsts + first.stage * kFirst + group * (8 * P * kRow);
#pragma unroll
        for (int i = 0; i < 2 * kParts; ++i) {
          A left[4];
          as_a(left, state, i / kParts, i % kParts);
#pragma unroll
          for (int unit = 0; unit < 4; ++unit) {
            const int at = i / kParts * 4 + unit;
            add_unit(sums[at / kOfK], left[unit], of_first + at * (P * kRow) + lanes[i % kParts]);
          }
        }
        fence_copy_engine();  // an arrival does not wait for what has been asked of shared memory, which wgmma keeps busy
        __syncwarp();
        if (lane.index == 0) arrive(empty_first(first.stage));
        first.turn();
      }
      store(sums, tile, group);
    }
  }
  DEVICE void store(const Sums& sums, i64 tile, int group) const {
    Element* y = static_cast<Element*>(params.y) + (i64(blockIdx.y) * kUnits + group * 8) / kOfK * P;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 sample = tile * kSamples + warp % 4 * 16 + half * 8 + lane.g;
      if (sample >= params.batch) continue;
#pragma unroll
      for (int k = 0; k < 8 / kOfK; ++k)
#pragma unroll
        for (int n = 0; n < P / 8; ++n)
          store_two<true, Element>(y + sample * (K * P) + k * P + n * 8 + lane.t * 2, sums[k][n][half * 2],
                                   sums[k][n][half * 2 + 1], true);
    }
  }

  DEVICE void run() const {
    if (threadIdx.x < STAGES) {
      init_barrier(full(threadIdx.x), 1);
      init_barrier(empty(threadIdx.x), kConsumers / 32 * BLOCKS);
    }
    if (threadIdx.x < FIRSTS) {
      init_barrier(full_first(threadIdx.x), 1);
      init_barrier(empty_first(threadIdx.x), kConsumers / 32);
    }
    if (threadIdx.x == 0) init_barrier(turned(), (kTurners / 32 + 1) * BLOCKS);
    fence_copy_engine();
    __syncthreads();
    if constexpr (BLOCKS > 1) sync_cluster();
    if (warp >= kConsumers / 32) {
      give_registers<kCopyRegisters>();
      if (warp < (kConsumers + kTurners) / 32)
        turn_all();
      else if (lane.index == 0)
        load();
    } else {
      take_registers<kRegisters>();
      consume();
    }
    if constexpr (BLOCKS > 1) sync_cluster();  // the other one may still tell this one's loaders, or write here
  }
};
