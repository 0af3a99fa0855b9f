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
  static constexpr int kWeightSlab = kHalf * N * 128;  // of second weights
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
        for (int slab = 0; slab < kSlabs; ++slab) {
          int slot = producer.begin(count, kSlabBytes);
          const int of_x[5] = {slab * 64, k, int(tile) * M, 0, 0}, of_weight[5] = {slab * 64, 0, 0, k, 0};
          load_box(bytes(slot), maps.x, of_x, full(slot));
          slot = producer.begin(count, L * RHO * 128);
          load_box(bytes(slot), maps.first, of_weight, full(slot));
        }
      }
#pragma unroll 1
      for (int s = 0; s < S; s += N) {
#pragma unroll 1
        for (int half = 1; half >= 0; --half) {
          const int slot = producer.begin(Pass::SLOTS, kDepth * kWeightSlab);
#pragma unroll 1
          for (int slab = 0; slab < kDepth; ++slab) {
            const int at[5] = {slab * 64, s, half * kHalf, 0, 0};
            load_box(bytes(slot) + slab * kWeightSlab, maps.second, at, full(slot));
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
  using Words = u32[kColumns / 4];

  DEVICE void release(int slot) const {
    if (threadIdx.x % 32 == 0) arrive(empty(slot));
  }
  DEVICE int wait(Ring& ring, int count) const {
    const int slot = ring.next(count);
    wait_for_bytes(full(slot), ring.phase(slot));
    ring.turn(slot);
    return slot;
  }
  // Both halves of a k's state.
  DEVICE void make_state(Sums (&sums)[2], Ring& ring, int k) const {
    const int team = uniform(threadIdx.x / 128), count = slots_of(k);
    int last_x = 0, last_weight = 0;
#pragma unroll 1
    for (int slab = 0; slab < kSlabs; ++slab) {
      const int x = wait(ring, count), weight = wait(ring, count);
      const u64 left = operand(bytes(x) + team * 8192), right = operand(bytes(weight));
      open_products();
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          Wgmma<Element, kColumns>::multiply(sums[half], left + step * 2, right + half * (kColumns * 128 / 16) + step * 2,
                                             slab > 0 || step > 0);
      commit_products();
      if (count < 4) {  // the next slab needs them
        wait_for_products<0>();
        release(x);
        release(weight);
      } else if (slab > 0) {
        wait_for_products<1>();
        release(last_x);
        release(last_weight);
      }
      last_x = x, last_weight = weight;
    }
    wait_for_products<0>();
    touch(sums[0]);
    touch(sums[1]);
    if (count < 4) return;
    release(last_x);
    release(last_weight);
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
  // Where a thread's words of a k lie in shared memory: two neighbours of RHO for row g or g + 8 of a warp.
  DEVICE u32 place(int k, int word) const {
    const Lane lane;
    const int column = word / 2 * 8 % RHO, number = k * RHO + column, row = threadIdx.x / 32 * 16 + lane.g + word % 2 * 8;
    return state(number / 64, word / 2 * 8 / RHO) + swizzled(row, number % 64 / 8) + lane.t * 4;
  }
  DEVICE void put(const Words& words, int k) const {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) store_shared(place(k, i), words[i]);
  }
  static DEVICE void rounded(Words& words, const Sums& sums) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) words[i] = Pair<Element>(sums[i * 2], sums[i * 2 + 1]).bits;
  }
  // A k's words are operands of its steps.
  static DEVICE u32& word_of(Left& left, int k, int i) {
    const int n = i / 2;  // eights of columns
    return left[n * 8 / RHO][k * kEach + n % (RHO / 8) / 2][n % 2 * 2 + i % 2];
  }
  DEVICE void make_states(Left& left, Ring& ring) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const bool parks = Pass::PARKS && k == K - 1;
      if (parks) {
        wait_for_place(ring, k);
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) store_shared(place(k, i), word_of(left, 0, i));
      }
      Sums sums[2];
      make_state(sums, ring, k);
      Words words;
      rounded(words, sums[0]);
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) word_of(left, k, i) = words[i];
      rounded(words, sums[1]);
      if (parks) {
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) word_of(left, 0, i) = load_u32(place(k, i));
      } else {
        wait_for_place(ring, k);
      }
      put(words, k);
    }
  }

  // Sums of N of S for half of the l's, of the state in shared memory or in registers.
  using Results = float[kHalf][N / 2];
  using Held = u32[kHalf][N / 4];
  template <bool SHARED> DEVICE void multiply(Results& sums, Left& left, int slot) const {
    const u32 weight = bytes(slot), rows = uniform(threadIdx.x / 128) * 8192;
    open_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int l = 0; l < kHalf; ++l) {
        const u64 right = operand(weight + step / 4 * kWeightSlab + l * (N * 128)) + step % 4 * 2;
        if constexpr (SHARED)
          Wgmma<Element, N>::multiply(sums[l], operand(state(step / 4, l) + rows) + step % 4 * 2, right, step > 0);
        else
          Wgmma<Element, N>::multiply(sums[l], left[l][step], right, step > 0);
      }
    commit_products();
    wait_for_products<0>();
#pragma unroll
    for (int l = 0; l < kHalf; ++l) touch(sums[l]);
    release(slot);
  }
  // Bias and activation of sums of l's from `first` on, rounded.
  DEVICE void finish(Held& held, const Results& sums, int first, int s) const {
    const typename Pass::Activation activation(params);
    const Lane lane;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const int column = s + n * 8 + lane.t * 2;
#pragma unroll
      for (int l = 0; l < kHalf; ++l) {
        float bias[2] = {};
        if constexpr (Pass::BIAS) {
          const Element* from = static_cast<const Element*>(params.bias) + column * L + first + l;
          if (S % N == 0 || column < S) bias[0] = widen(from[0]), bias[1] = widen(from[L]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float* sum = sums[l] + n * 4 + row * 2;
          held[l][n * 2 + row] = Pair<Element>(activation.of(sum[0] + bias[0]), activation.of(sum[1] + bias[1])).bits;
        }
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
        Results sums;
        Held far, near;
        multiply<true>(sums, left, wait(ring, Pass::SLOTS));
        if (s + N >= S && threadIdx.x % 32 == 0) arrive(memory + kFree);
        finish(far, sums, kHalf, s);
        multiply<false>(sums, left, wait(ring, Pass::SLOTS));
        finish(near, sums, 0, s);
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
