// Both contractions of a Monarch layer in one pass, as monarch.cuh makes them, in tf32, by products of warpgroups, of tensors
// that the copy engine reads by maps: x [K][P] by weights [K][RHO][L][P] to [K][RHO][L], and that, for each group l of L, by
// weights [L][S][K * RHO] to y [S][L].
//
// A block has the second weights of eight l's and N of S in shared memory. Each of two warpgroups takes tiles of 64 samples
// by itself, so that one stores while the other one multiplies, and has a warp that loads for it: x in slabs of 32 numbers of
// a sample, whatever groups these belong to, and the first weights of as many k's as make pairs of units.
// 32 columns of the first product, a unit, are four of the RHO numbers of a k, for all eight l's: column 8 n + 2 t + i is
// number t for l = 2 n + i. So thread (g, t) holds number t of all l's, and the sums of two units are, rounded, operand A of
// one step of each l's second product. That of a pair of units is made beside the first product of the next pair.
//
// A thread holds eight l's of a row and column, which lie side by side in y: a sector of L2. The BLOCKS of a cluster have the
// same l's, and other columns, so that each reads a part of x and of the first weights for both.
// kernels/monarch/monarch_mapped.py writes the constants:
//
// Pass:  Activation, BIAS, FIRST and SECOND (the parameters that weights are), K, P, L, S, RHO, N, BLOCKS, SLABS and SLOTS
//        (of a warpgroup, for x and for the first weights), MORE and FEWER (registers of consumers and producers)
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"

struct Maps { TensorMap x, weight; };

template <class Pass> struct MonarchMapped {
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO, N = Pass::N;
  static constexpr int BLOCKS = Pass::BLOCKS, M = 64, kTeams = 2, kConsumers = kTeams * 128, kHeld = 8, kColumns = 4 * kHeld;
  static constexpr int kParts = ceil_div(S, N * BLOCKS) * BLOCKS;  // of S
  static constexpr int kUnits = RHO / 4, kSteps = P / 8;           // of a k
  // After so many k's slabs, pairs of units and k's begin together.
  static constexpr int period(int k) { return k * P % 32 == 0 && k * kUnits % 2 == 0 ? k : period(k + 1); }
  static constexpr int kPeriod = period(1), kSlabs = kPeriod * P / 32, kPairs = kPeriod * kUnits / 2;
  static constexpr int kPeriods = ceil_div(K, kPeriod), kDepth = ceil_div(kPeriods * kPairs, 4);  // slabs of second weights
  static_assert(RHO % 4 == 0 && P % 8 == 0 && L % kHeld == 0);

  // Of a slot of the first weights: k's, of which units' columns are rows of a slab.
  static constexpr int kEach = kUnits % 2 ? 2 : 1, kUnitBytes = kColumns * 128, kSlotSlabs = kUnits * ceil_div(P, 32);
  static constexpr int kSlabBytes = M * 128, kBoxBytes = kEach * kUnitBytes, kSlotBytes = kSlotSlabs * kBoxBytes;
  static constexpr int kRow = K * RHO;
  static constexpr int kX = kHeld * kDepth * N * 128, kFirst = kX + kTeams * Pass::SLABS * kSlabBytes;
  static constexpr int kBarriers = kFirst + kTeams * Pass::SLOTS * kSlotBytes;

  static constexpr int kHalfway = kBarriers + kTeams * (Pass::SLABS + Pass::SLOTS) * 16;

  const Params& params;
  const Maps& maps;
  const u32 memory;
  const int first_l, first_s;

  DEVICE MonarchMapped(const Params& p, const Maps& m)
      : params(p), maps(m), memory(shared_address(shared_memory) + 1023 & ~1023u), first_l(blockIdx.y / kParts * kHeld),
        first_s(blockIdx.y % kParts * N) {}

  DEVICE i64 tiles() const { return (params.batch + M - 1) / M; }
  static DEVICE i64 first_tile(int team) { return i64(team) * gridDim.x + blockIdx.x; }
  static DEVICE int rank() { return blockIdx.y % BLOCKS; }

  // A team's slabs of x and first weights
  using Slabs = Stream<Pass::SLABS, kSlabBytes, BLOCKS>;
  using Weights = Stream<Pass::SLOTS, kSlotBytes, BLOCKS>;
  DEVICE Slabs slabs(int team, u32 phase) const {
    return {memory + kX + team * (Pass::SLABS * kSlabBytes), memory + kBarriers + team * (Pass::SLABS * 16), phase};
  }
  DEVICE Weights weights(int team, u32 phase) const {
    return {memory + kFirst + team * (Pass::SLOTS * kSlotBytes),
            memory + kBarriers + (kTeams * Pass::SLABS + team * Pass::SLOTS) * 16, phase};
  }

  // Each of a cluster's blocks brings a part for all of them.
  static DEVICE void load(u32 to, int bytes, const TensorMap& map, const int (&at)[5], u32 full) {
    load_box_of<BLOCKS>(to + (BLOCKS > 1 ? rank() * (bytes / BLOCKS) : 0), map, at, full);
  }
  DEVICE void load_slab(Slabs& slabs, int slab, i64 tile) const {
    const int slot = slabs.fill(), at[5] = {slab * 32, 0, int(tile) * M + rank() * (M / BLOCKS), 0, 0};
    load(slabs.at(slot), kSlabBytes, maps.x, at, slabs.full(slot));
  }
  // A box is of p, i, numbers, n and k; of two k's, each of two blocks brings one.
  DEVICE void load_weights(Weights& weights, int k) const {
    const int slot = weights.fill();
    const int further = kEach > 1 ? rank() : 0, n = kEach > 1 ? 0 : rank() * (kHeld / 2 / BLOCKS);
    ROLL for (int box = 0; box < kSlotSlabs; ++box) {
      const int at[5] = {box / kUnits * 32, 0, box % kUnits * 4, first_l / 2 + n, k + further};
      load(weights.at(slot) + box * kBoxBytes, kBoxBytes, maps.weight, at, weights.full(slot));
    }
  }
  // A thread for each team
  DEVICE void produce() const {
    const int team = uniform((threadIdx.x - kConsumers) / 32);
    if (team >= kTeams || threadIdx.x % 32) return;
    Slabs ahead = slabs(team, 1);
    Weights first = weights(team, 1);
    for (i64 tile = first_tile(team); tile < tiles(); tile += gridDim.x * kTeams) {
      int slab = 0;
      ROLL for (int k = 0; k < kPeriods * kPeriod; k += kEach) {
        load_weights(first, k);
        for (; slab * 4 < (k + kEach) * kSteps; ++slab) load_slab(ahead, slab, tile);
      }
    }
  }

  // The second weights, rounded, in slabs as the copy engine would write them.
  DEVICE void copy_second() const {
    constexpr int kRowPieces = kDepth * 8;
    const float* weight = static_cast<const float*>(params.weights[Pass::SECOND]);
    UNROLL_BY(8) for (int j = threadIdx.x; j < kHeld * N * kRowPieces; j += kConsumers) {
      const int piece = j % kRowPieces, row = j / kRowPieces % N, l = j / (kRowPieces * N);
      const bool here = piece * 4 < kRow && first_s + row < S;
      u32 x[4];
      load_global<16>(weight + (i64(first_l + l) * S + first_s + row) * kRow + piece * 4, x, here);
      UNROLL for (u32& word : x) word = tf32_of(word);
      store_u32x4(memory + (l * kDepth + piece / 8) * (N * 128) + swizzled(row, piece % 8), x);
    }
    fence_copy_engine();
    sync_threads<kConsumers>(1);
  }

  using Unit = float[kColumns / 2];
  using Left = u32[kHeld][4];
  using Sums = float[kHeld][N / 2];
  // Those of a period.
  struct Taken {
    int slab[kSlabs], weights[kPeriod / kEach];
  };
  // The pair of units that reads a k's weights last.
  static constexpr int last_pair(int k) { return (k * kUnits + kUnits - 1) / 2; }

  // The first product of a pair's units.
  DEVICE void make_units(Unit (&unit)[2], Taken& taken, Slabs& x, Weights& first, int pair) const {
    UNROLL for (int i = 0; i < 2; ++i) {
      const int k = (pair * 2 + i) / kUnits;
      if ((pair * 2 + i) % kUnits > 0) continue;
      if (k % kEach == 0) taken.weights[k / kEach] = first.take();
      UNROLL for (int step = k * kSteps; step < (k + 1) * kSteps; ++step)
        if (step % 4 == 0) taken.slab[step / 4] = x.take();
    }
    open_products();
    UNROLL for (int i = 0; i < 2; ++i) {
      const int k = (pair * 2 + i) / kUnits, tile = (pair * 2 + i) % kUnits;
      UNROLL for (int s = 0; s < kSteps; ++s) {
        const int step = k * kSteps + s;
        const u64 left = operand(x.at(taken.slab[step / 4])) + step % 4 * 2;
        const u32 box = first.at(taken.weights[k / kEach]) + (s / 4 * kUnits + tile) * kBoxBytes;
        const u64 right = operand(box + k % kEach * kUnitBytes) + s % 4 * 2;
        Wgmma<float, kColumns>::multiply(unit[i], left, right, s > 0);
      }
    }
    commit_products();
  }
  // What a pair has read last
  DEVICE void release(const Taken& taken, const Slabs& x, const Weights& first, int pair) const {
    UNROLL for (int i = 0; i < kPeriod / kEach; ++i)
      if (last_pair((i + 1) * kEach - 1) == pair) first.release(taken.weights[i]);
    UNROLL for (int slab = 0; slab < kSlabs; ++slab)
      if (last_pair((slab * 4 + 3) / kSteps) == pair) x.release(taken.slab[slab]);
  }
  // Of all l's, the step that a pair's units are.
  DEVICE void add_step(Sums& sums, const Left& left, int step) const {
    const u32 weight = memory + step / 4 * (N * 128);
    ask_for_products<kHeld>([&](int l) {
      Wgmma<float, N>::multiply(sums[l], left[l], operand(weight + l * (kDepth * N * 128)) + step % 4 * 2, step > 0);
    });
  }
  static DEVICE void as_left(Left& left, Unit (&unit)[2]) {
    touch(unit[0]);
    touch(unit[1]);
    UNROLL for (int l = 0; l < kHeld; ++l) {
      UNROLL for (int i = 0; i < 4; ++i)
        left[l][i] = tf32_of(__float_as_uint(unit[i / 2][l / 2 * 4 + i % 2 * 2 + l % 2]));
      settle(left[l]);
    }
  }
  template <bool BEGINS>
  DEVICE void add_period(Sums& sums, Left& left, Slabs& x, Weights& weights, int first) const {
    Taken taken;
    UNROLL for (int pair = 0; pair < kPairs; ++pair) {
      Unit unit[2];
      make_units(unit, taken, x, weights, pair);
      if constexpr (BEGINS) {
        if (pair > 0) add_step(sums, left, first + pair - 1);
      } else {
        add_step(sums, left, first + pair - 1);
      }
      wait_for_products<0>();
      release(taken, x, weights, pair);
      as_left(left, unit);
    }
  }

  // Eight l's of a row and column: neighbours, whose columns are two apart, store one of theirs together, then the other.
  DEVICE void store(Sums& sums, i64 tile) const {
    const typename Pass::Activation activation(params);
    const Lane lane;
    const i64 first = tile * M + threadIdx.x % 128 / 32 * 16 + lane.g;
    float* y = static_cast<float*>(params.y) + first_l;
    const int odd = lane.t & 1;
    UNROLL for (int j = 0; j < N / 4; ++j) {
      const int s = first_s + j / 2 * 8 + lane.t * 2 + j % 2;
      u32 bias[2][4] = {};
      if constexpr (Pass::BIAS) {
        UNROLL for (int i = 0; i < 2; ++i)
          load_global<16>(static_cast<const float*>(params.bias) + s * L + first_l + i * 4, bias[i], s < S);
      }
      UNROLL for (int half = 0; half < 2; ++half) {
        u32 words[2][4];
        UNROLL for (int l = 0; l < kHeld; ++l) {
          const float sum = sums[l][j / 2 * 4 + half * 2 + j % 2];
          words[l / 4][l % 4] = __float_as_uint(activation.of(Pass::BIAS ? sum + __uint_as_float(bias[l / 4][l % 4]) : sum));
        }
        UNROLL for (int i = 0; i < 4; ++i) {
          const u32 given = __shfl_xor_sync(0xffffffff, odd ? words[0][i] : words[1][i], 1);
          words[0][i] = odd ? given : words[0][i];
          words[1][i] = odd ? words[1][i] : given;
        }
        const i64 sample = first + half * 8;
        const int even_s = s - odd * 2;
        UNROLL for (int i = 0; i < 2; ++i)
          if (sample < params.batch && even_s + i * 2 < S)
            store_global<16>(y + sample * (S * L) + (even_s + i * 2) * L + odd * 4, words[i]);
      }
    }
  }

  DEVICE void consume() const {
    const int team = uniform(threadIdx.x / 128);
    copy_second();
    Slabs x = slabs(team, 0);
    Weights first = weights(team, 0);
    Sums sums;
    // One begins when the other one is halfway through its first tile.
    if (kPeriods > 1 && team > 0) wait_for_bytes(memory + kHalfway, 0);
    for (i64 tile = first_tile(team); tile < tiles(); tile += gridDim.x * kTeams) {
      Left left;
      add_period<true>(sums, left, x, first, 0);
      ROLL for (int period = 1; period < kPeriods; ++period) {
        if (period == kPeriods / 2 && tile == blockIdx.x && threadIdx.x == 0) arrive(memory + kHalfway);
        add_period<false>(sums, left, x, first, period * kPairs);
      }
      add_step(sums, left, kPeriods * kPairs - 1);
      wait_for_products<0>();
      UNROLL for (int l = 0; l < kHeld; ++l) touch(sums[l]);
      store(sums, tile);
    }
  }

  DEVICE void run() const {
    if (threadIdx.x < kConsumers) {
      slabs(threadIdx.x / 128, 0).init(1, 4 * BLOCKS, threadIdx.x % 128);
      weights(threadIdx.x / 128, 0).init(1, 4 * BLOCKS, threadIdx.x % 128);
    }
    if (threadIdx.x == 0) init_barrier(memory + kHalfway, 1);
    fence_copy_engine();
    __syncthreads();
    if constexpr (BLOCKS > 1) sync_cluster();
    part_ways<kConsumers, Pass::MORE, Pass::FEWER>([&] { consume(); }, [&] { produce(); });
    if constexpr (BLOCKS > 1) sync_cluster();  // the others may still tell this one's producer, or write here
  }
};
