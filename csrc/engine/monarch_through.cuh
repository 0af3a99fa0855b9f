// Both contractions of a Monarch layer in one pass, as monarch.cuh makes them, of 16 bits, where groups are few and large, by
// products of warpgroups of tensors that the copy engine reads by maps: x [K][P] by weights [K][RHO][L][P] to [K][RHO][L], and
// that, for each group l of L, by weights [L][S][K * RHO] to y [S][L].
//
// Each of TEAMS warpgroups has 64 samples of a block's tile. Weights go by in slots that all of them read, once for a tile:
// so tiles are as large as chip memory allows, which holds their state alone. Half of it, that of the first L / 2 l's, is in
// registers: a thread's sums are, rounded, operand A of the second product as they stand. The other half is in shared memory,
// slab by slab of 64 numbers of the L / 2 l's. Of a k's P, x and the weights come by slabs of 64, a slot for each; then, N of S
// at a time, second weights of the l's in shared memory, and of those in registers. A thread has all l's of two neighbours of
// S, which lie side by side in y.
//
// Slabs of the state that no k has written yet are slots as well. Where the sums of the last k and the state of those before
// are more than a thread's registers, the first k's (in registers) wait where the last one's (in shared memory) will lie: each
// thread finds there what it has put there itself.
// factorlayer/monarch_through.py writes the constants:
//
// Pass:  Element, Activation, BIAS, FIRST and SECOND (the parameters that weights are), K, P, L, S, RHO, N, TEAMS, SLOTS (without
//        those of the state), SLOT (bytes of one), PARKS, MORE and FEWER (registers of consumers and producers)
#pragma once
#include "mma.cuh"
#include "params.cuh"
#include "pointwise.cuh"
#include "wgmma.cuh"

struct Maps {
  TensorMap x, first, second;
};

template <class Pass> struct MonarchThrough {
  using Element = typename Pass::Element;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO, N = Pass::N;
  static constexpr int TEAMS = Pass::TEAMS, M = 64 * TEAMS, kConsumers = 128 * TEAMS, kHalf = L / 2;
  static constexpr int kColumns = kHalf * RHO, kSlabs = ceil_div(P, 64);  // of a k's product
  static constexpr int kNumbers = K * RHO, kDepth = ceil_div(kNumbers, 64), kEach = RHO / 16, kSteps = K * kEach;
  static constexpr int kSlabBytes = M * 128, kStateSlab = kHalf * kSlabBytes;
  static constexpr int kExtra = kStateSlab / Pass::SLOT, kAll = Pass::SLOTS + kDepth * kExtra;
  static constexpr int kState = Pass::SLOTS * Pass::SLOT, kBarriers = kState + kDepth * kStateSlab;
  static constexpr int kFree = kBarriers + kAll * 16;
  static_assert(RHO % 16 == 0 && L % 2 == 0 && kAll <= 32);

  // Slots that k's loads have: slabs of the state count from the last one down.
  static constexpr DEVICE int slots_of(int k) {
    int count = Pass::SLOTS;
    for (int slab = 0; slab < kDepth; ++slab) count += slab * 64 / RHO >= k ? kExtra : 0;
    return count;
  }

  const Params& params;
  const Maps& maps;
  const u32 memory;

  DEVICE MonarchThrough(const Params& p, const Maps& m)
      : params(p), maps(m), memory(shared_address(shared_memory) + 1023 & ~1023u) {}

  DEVICE i64 tiles() const { return (params.batch + M - 1) / M; }
  DEVICE u32 full(int slot) const { return memory + kBarriers + slot * 8; }
  DEVICE u32 empty(int slot) const { return memory + kBarriers + (kAll + slot) * 8; }
  DEVICE u32 state(int slab, int l) const { return memory + kState + slab * kStateSlab + l * kSlabBytes; }
  DEVICE u32 bytes(int slot) const {
    if (slot < Pass::SLOTS || kExtra == 0) return memory + slot * Pass::SLOT;
    const int extra = slot - Pass::SLOTS, each = kExtra > 0 ? kExtra : 1;
    return state(kDepth - 1 - extra / each, 0) + extra % each * Pass::SLOT;
  }

  // Slots in turns, of as many as there are at the time, each with a phase of its own.
  struct Ring {
    int slot = 0;
    u32 phases;
    DEVICE Ring(u32 phases) : phases(phases) {}
    DEVICE u32 phase(int at) const { return phases >> at & 1; }
    DEVICE int next(int count) { return slot < count ? slot : 0; }
    DEVICE void turn(int at) { slot = at + 1, phases ^= 1u << at; }
  };

  struct Producer {
    const MonarchThrough& pass;
    Ring ring{~0u};
    u32 tile = 0;       // number
    bool waits = false;  // for the state of the one before
    DEVICE int begin(int count, u32 bytes) {
      const int slot = ring.next(count);
      wait_for_bytes(pass.empty(slot), ring.phase(slot));
      if (waits && slot >= Pass::SLOTS) {
        wait_for_bytes(pass.memory + kFree, tile - 1 & 1);
        waits = false;
      }
      expect_bytes(pass.full(slot), bytes);
      ring.turn(slot);
      return slot;
    }
  };
  DEVICE void produce() const {
    Producer producer{*this};
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
#pragma unroll 1
      for (int k = 0; k < K; ++k) {
        const int count = slots_of(k);
#pragma unroll 1
        for (int half = 0; half < 2; ++half)
#pragma unroll 1
          for (int slab = 0; slab < kSlabs; ++slab) {
            if (half == 0) {
              const int slot = producer.begin(count, kSlabBytes), at[5] = {slab * 64, k, int(tile) * M, 0, 0};
              load_box(bytes(slot), maps.x, at, full(slot));
            }
            const int slot = producer.begin(count, kColumns * 128), at[5] = {slab * 64, 0, half * kHalf, k, 0};
            load_box(bytes(slot), maps.first, at, full(slot));
          }
      }
#pragma unroll 1
      for (int s = 0; s < S; s += N) {
#pragma unroll 1
        for (int l = 0; l < L; ++l) {
          const int slot = producer.begin(Pass::SLOTS, kDepth * N * 128);
#pragma unroll 1
          for (int slab = 0; slab < kDepth; ++slab) {
            const int at[5] = {slab * 64, s, (l + kHalf) % L, 0, 0};
            load_box(bytes(slot) + slab * (N * 128), maps.second, at, full(slot));
          }
        }
      }
      ++producer.tile, producer.waits = true;
    }
  }
  // The first tile's rows on their way to L2, in the order in which they are read, by some warps.
  DEVICE void ask(int thread, int threads) const {
    const i64 first = i64(blockIdx.x) * M;
    const int rows = int(min(params.batch - first, i64(M)));
    const Element* x = static_cast<const Element*>(params.x) + first * (K * P);
#pragma unroll 1
    for (int at = thread; at < rows * (K * kSlabs); at += threads) {
      const int row = at % rows, slab = at / rows;
      prefetch(x + i64(row) * (K * P) + slab / kSlabs * P + slab % kSlabs * 64);
    }
  }

  using Sums = float[kColumns / 2];
  using Left = u32[kHalf][kSteps][4];

  DEVICE void release(int slot) const {
    if (threadIdx.x % 32 == 0) arrive(empty(slot));
  }
  DEVICE int wait(Ring& ring, int count) const {
    const int slot = ring.next(count);
    wait_for_bytes(full(slot), ring.phase(slot));
    ring.turn(slot);
    return slot;
  }
  // Half of a k's state. The first half waits for x, the second one is the last that reads it.
  template <bool SECOND> DEVICE void make_half(Sums& sums, int (&x)[kSlabs], Ring& ring, int count) const {
    const u32 rows = uniform(threadIdx.x / 128) * 8192;
    int last = 0;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      if constexpr (!SECOND) x[slab] = wait(ring, count);
      const int weight = wait(ring, count);
      const u64 left = operand(bytes(x[slab]) + rows), right = operand(bytes(weight));
      open_products();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Wgmma<Element, kColumns>::multiply(sums, left + step * 2, right + step * 2, slab > 0 || step > 0);
      commit_products();
      if (slab > 0) {
        wait_for_products<1>();
        release(last);
        if constexpr (SECOND) release(x[slab - 1]);
      }
      last = weight;
    }
    wait_for_products<0>();
    touch(sums);
    release(last);
    if constexpr (SECOND) release(x[kSlabs - 1]);
  }
  // Nobody reads the slots any more that lie where a k's state will.
  DEVICE void wait_for_place(const Ring& ring, int k) const {
#pragma unroll
    for (int slab = k * RHO / 64; slab <= ((k + 1) * RHO - 1) / 64; ++slab)
#pragma unroll
      for (int i = 0; i < kExtra; ++i) {
        const int slot = Pass::SLOTS + (kDepth - 1 - slab) * kExtra + i;
        wait_for_bytes(empty(slot), ring.phase(slot) ^ 1);
      }
  }
  // Sums 2 i and 2 i + 1 of a k are neighbours of RHO for row g or g + 8 of a warp.
  DEVICE void make_states(Left& left, Ring& ring) const {
    const Lane lane;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      int x[kSlabs];
      Sums sums;
      make_half<false>(sums, x, ring, slots_of(k));
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        const int n = i / 2;  // eights of columns
        left[n * 8 / RHO][k * kEach + n % (RHO / 8) / 2][n % 2 * 2 + i % 2] = Pair<Element>(sums[i * 2], sums[i * 2 + 1]).bits;
      }
      make_half<true>(sums, x, ring, slots_of(k));
      wait_for_place(ring, k);
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        const int column = i / 2 * 8, number = k * RHO + column % RHO, row = threadIdx.x / 32 * 16 + lane.g + i % 2 * 8;
        store_shared(state(number / 64, column / RHO) + swizzled(row, number % 64 / 8) + lane.t * 4,
                     Pair<Element>(sums[i * 2], sums[i * 2 + 1]).bits);
      }
    }
  }

  // N of S for half of the l's, rounded, of their state in shared memory or in registers.
  using Held = u32[kHalf][N / 4];
  template <bool SHARED> DEVICE void multiply(Held& held, Left& left, Ring& ring, int s) const {
    const u32 rows = uniform(threadIdx.x / 128) * 8192;
#pragma unroll
    for (int l = 0; l < kHalf; ++l) {
      const int slot = wait(ring, Pass::SLOTS);
      const u64 right = operand(bytes(slot));
      float sums[N / 2];
      open_products();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const u64 numbers = right + step / 4 * (N * 128 / 16) + step % 4 * 2;
        if constexpr (SHARED)
          Wgmma<Element, N>::multiply(sums, operand(state(step / 4, l) + rows) + step % 4 * 2, numbers, step > 0);
        else
          Wgmma<Element, N>::multiply(sums, left[l][step], numbers, step > 0);
      }
      commit_products();
      wait_for_products<0>();
      touch(sums);
      release(slot);
      finish(held[l], sums, SHARED * kHalf + l, s);
    }
  }
  // Bias and activation of an l's sums, rounded.
  DEVICE void finish(u32 (&held)[N / 4], const float (&sums)[N / 2], int l, int s) const {
    const typename Pass::Activation activation(params);
    const Lane lane;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      float bias[2] = {};
      if constexpr (Pass::BIAS) {
        const int column = s + n * 8 + lane.t * 2;
        const Element* from = static_cast<const Element*>(params.bias) + column * L + l;
        if (S % N == 0 || column < S) bias[0] = widen(from[0]), bias[1] = widen(from[L]);
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float* sum = sums + n * 4 + row * 2;
        held[n * 2 + row] = Pair<Element>(activation.of(sum[0] + bias[0]), activation.of(sum[1] + bias[1])).bits;
      }
    }
  }
  DEVICE void store(const Held& near, const Held& far, i64 first, int s) const {
    const Lane lane;
    const i64 sample = first + threadIdx.x / 32 * 16 + lane.g;
    Element* y = static_cast<Element*>(params.y) + sample * (S * L) + (s + lane.t * 2) * L;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const bool inside = sample + row * 8 < params.batch;
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
        u32 words[L];  // of two neighbours of S
#pragma unroll
        for (int l = 0; l < L; l += 2) {
          const u32 even = l < kHalf ? near[l % kHalf][n * 2 + row] : far[l % kHalf][n * 2 + row];
          const u32 odd = l + 1 < kHalf ? near[(l + 1) % kHalf][n * 2 + row] : far[(l + 1) % kHalf][n * 2 + row];
          words[l / 2] = even & 0xffff | odd << 16;
          words[L / 2 + l / 2] = even >> 16 | odd & 0xffff0000;
        }
        constexpr int kPiece = L * 4 < 16 ? L * 4 : 16;
        if (inside && (S % N == 0 || s + n * 8 + lane.t * 2 < S)) {
#pragma unroll
          for (int i = 0; i < L; i += kPiece / 4)
            store_global<kPiece>(y + i64(row) * (8 * S * L) + n * 8 * L + i * 2, words + i);
        }
      }
    }
  }
  DEVICE void consume() const {
    Ring ring{0};
    const int team = uniform(threadIdx.x / 128);
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      Left left;
      make_states(left, ring);
      fence_copy_engine();
      sync_threads<128>(1 + team);
#pragma unroll
      for (int l = 0; l < kHalf; ++l)
#pragma unroll
        for (int step = 0; step < kSteps; ++step) settle(left[l][step]);
#pragma unroll 1
      for (int s = 0; s < S; s += N) {
        Held far, near;
        multiply<true>(far, left, ring, s);
        if (s + N >= S && threadIdx.x % 32 == 0) arrive(memory + kFree);
        multiply<false>(near, left, ring, s);
        store(near, far, tile * M, s);
      }
    }
  }

  DEVICE void run() const {
    if (threadIdx.x < kAll) {
      init_barrier(full(threadIdx.x), 1);
      init_barrier(empty(threadIdx.x), kConsumers / 32);
    }
    if (threadIdx.x == 0) init_barrier(memory + kFree, kConsumers / 32);
    fence_copy_engine();
    __syncthreads();
    if (threadIdx.x < kConsumers) {
      take_registers<Pass::MORE>();
      consume();
    } else {
      give_registers<Pass::FEWER>();
      if (threadIdx.x == kConsumers)
        produce();
      else if (threadIdx.x >= kConsumers + 32)
        ask(threadIdx.x - kConsumers - 32, 96);
    }
  }
};
