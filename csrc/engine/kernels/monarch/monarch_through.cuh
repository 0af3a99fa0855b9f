// Both contractions of a Monarch layer in one pass, as monarch.cuh makes them, of 16 bits, where groups are few and large, by
// products of warpgroups of tensors that the copy engine reads by maps: x [K][P] by weights [K][RHO][L][P] to [K][RHO][L], and
// that, for each group l of L, by weights [L][S][K * RHO] to y [S][L].
//
// A block has 64 samples, and each of its two warpgroups half of the l's: a thread's sums of the first product are, rounded,
// operand A of the second one as they stand, so that registers hold the state. Weights go by, once for each tile, in slots of
// both warpgroups' rows: slabs of 64 numbers of a k's P, then N of S for an l of either. Two blocks of a cluster bring a half
// of each for both. Warpgroups exchange half of their results, so that a thread has all l's of two neighbours of S, which lie
// side by side in y. kernels/monarch/monarch_through.py writes the constants:
//
// Pass:  Element, Activation, BIAS, K, P, L, S, RHO, N, X_SLOTS, SLOTS and SLOT (of weights, and bytes of one), MORE and FEWER
//        (registers of consumers and producers)
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"

struct Maps { TensorMap x, first, second; };

template <class Pass> struct MonarchThrough {
  using Element = typename Pass::Element;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO, N = Pass::N;
  static constexpr int M = 64, kBlocks = 2, kConsumers = 256, kHalf = L / 2;
  static constexpr int kColumns = kHalf * RHO, kSlabs = ceil_div(P, 64);  // of a k's product
  static constexpr int kDepth = ceil_div(K * RHO, 64), kEach = RHO / 16, kSteps = K * kEach;
  static constexpr int kSlabBytes = M * 128, kFirst = kColumns * 128, kSecond = kDepth * N * 128;  // bytes, of weights for half
  static constexpr int kWords = N / 16 * kHalf * 2;  // of a thread, that the other warpgroup gets
  static constexpr int kWeights = Pass::X_SLOTS * kSlabBytes, kExchange = kWeights + Pass::SLOTS * Pass::SLOT;
  static constexpr int kBarriers = kExchange + 2 * kConsumers * kWords * 4;
  static constexpr int kBias = kBarriers + (Pass::X_SLOTS + Pass::SLOTS) * 16, kPitch = round_up(S, N) * 2;  // of an l
  static_assert(RHO % 16 == 0 && L % 4 == 0 && N % 16 == 0 && kWords % 4 == 0);

  const Params& params;
  const Maps& maps;
  const u32 memory;

  DEVICE MonarchThrough(const Params& p, const Maps& m)
      : params(p), maps(m), memory(shared_address(shared_memory) + 1023 & ~1023u) {}

  static DEVICE int rank() { return blockIdx.y; }
  // Of a cluster; both blocks take as many.
  DEVICE i64 tiles() const { return (params.batch + kBlocks * M - 1) / (kBlocks * M); }
  DEVICE i64 first_sample(i64 tile) const { return (tile * kBlocks + rank()) * M; }

  // Of this block, and of both, which bring each a half
  using Xs = Stream<Pass::X_SLOTS, kSlabBytes>;
  using Weights = Stream<Pass::SLOTS, Pass::SLOT, kBlocks>;
  DEVICE Xs xs(u32 phase) const { return {memory, memory + kBarriers, phase}; }
  DEVICE Weights weights(u32 phase) const { return {memory + kWeights, memory + kBarriers + Pass::X_SLOTS * 16, phase}; }

  // One thread brings x, and another one weights: of each pair of halves this block's, for both.
  DEVICE void produce_x() const {
    Xs ring = xs(1);
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x)
      ROLL for (int k = 0; k < K; ++k)
        ROLL for (int slab = 0; slab < kSlabs; ++slab) {
          const int slot = ring.fill(kSlabBytes), at[5] = {slab * 64, k, int(first_sample(tile)), 0, 0};
          load_box(ring.at(slot), maps.x, at, ring.full(slot));
        }
  }
  DEVICE void produce_weights() const {
    Weights ring = weights(1);
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      ROLL for (int k = 0; k < K; ++k)
        ROLL for (int slab = 0; slab < kSlabs; ++slab) {
          const int slot = ring.fill(2 * kFirst), at[5] = {slab * 64, 0, rank() * kHalf, k, 0};
          load_box_of<kBlocks>(ring.at(slot) + rank() * kFirst, maps.first, at, ring.full(slot));
        }
      ROLL for (int s = 0; s < S; s += N)
        ROLL for (int l = 0; l < kHalf; ++l) {
          const int slot = ring.fill(2 * kSecond);
          ROLL for (int slab = 0; slab < kDepth; ++slab) {
            const int at[5] = {slab * 64, s, rank() * kHalf + l, 0, 0};
            load_box_of<kBlocks>(ring.at(slot) + rank() * kSecond + slab * (N * 128), maps.second, at, ring.full(slot));
          }
        }
    }
  }

  using Left = u32[kHalf][kSteps][4];
  using Held = u32[kHalf][N / 4];

  DEVICE void make_states(Left& left, Xs& x, Weights& weight, int team) const {
    UNROLL for (int k = 0; k < K; ++k) {
      float sums[kColumns / 2];
      int last_x = 0, last_weight = 0;
      ROLL for (int slab = 0; slab < kSlabs; ++slab) {
        const int of_x = x.take(), of_weight = weight.take();
        const u64 rows = operand(x.at(of_x)), columns = operand(weight.at(of_weight) + team * kFirst);
        ask_for_products<4>([&](int step) {
          Wgmma<Element, kColumns>::multiply(sums, rows + step * 2, columns + step * 2, slab > 0 || step > 0);
        });
        if (slab > 0) {
          wait_for_products<1>();
          x.release(last_x);
          weight.release(last_weight);
        }
        last_x = of_x, last_weight = of_weight;
      }
      wait_for_products<0>();
      touch(sums);
      x.release(last_x);
      weight.release(last_weight);
      UNROLL for (int i = 0; i < kColumns / 4; ++i) {
        const int n = i / 2;  // eights of columns
        left[n * 8 / RHO][k * kEach + n % (RHO / 8) / 2][n % 2 * 2 + i % 2] = Pair<Element>(sums[i * 2], sums[i * 2 + 1]).bits;
      }
    }
    UNROLL for (int l = 0; l < kHalf; ++l)
      UNROLL for (int step = 0; step < kSteps; ++step) settle(left[l][step]);
  }

  using Sums = float[N / 2];
  // Asks for products of an l.
  DEVICE int ask(Sums& sums, u32 (&left)[kSteps][4], Weights& weight, int team) const {
    const int slot = weight.take();
    const u64 columns = operand(weight.at(slot) + team * kSecond);
    ask_for_products<kSteps>([&](int step) {
      Wgmma<Element, N>::multiply(sums, left[step], columns + step / 4 * (N * 128 / 16) + step % 4 * 2, step > 0);
    });
    return slot;
  }
  // A bias, of all samples, as those want it who have an l: by consumers, two neighbours of S at once.
  DEVICE void keep_bias() const {
    ROLL for (int j = threadIdx.x; j < S / 2; j += kConsumers) {
      u32 words[L / 4][4];
      UNROLL for (int i = 0; i < L / 4; ++i) load_global(static_cast<const Element*>(params.bias) + j * (2 * L) + i * 8, words[i]);
      UNROLL for (int l = 0; l < L; ++l) {
        const u32 x = words[l / 8][l / 2 % 4], y = words[(L + l) / 8][(L + l) / 2 % 4];
        store_shared(memory + kBias + l * kPitch + j * 4, l % 2 ? upper_halves(x, y) : lower_halves(x, y));
      }
    }
    sync_consumers<kConsumers>();
  }
  // With bias and activation, rounded: two neighbours for row g or g + 8 of a warp.
  DEVICE void finish(u32 (&held)[N / 4], const Sums& sums, int l, int s) const {
    const typename Pass::Activation activation(params);
    const Lane lane;
    UNROLL for (int n = 0; n < N / 8; ++n) {
      float bias[2] = {};
      if constexpr (Pass::BIAS) {
        const u32 two = load_u32(memory + kBias + l * kPitch + (s + n * 8 + lane.t * 2) * 2);
        UNROLL for (int i = 0; i < 2; ++i) bias[i] = number_of<Element>(&two, i);
      }
      UNROLL for (int row = 0; row < 2; ++row) {
        const float* sum = sums + n * 4 + row * 2;
        held[n * 2 + row] = Pair<Element>(activation.of(sum[0] + bias[0]), activation.of(sum[1] + bias[1])).bits;
      }
    }
  }
  // Of an eight of columns and a row, the words of two l's for both neighbours, one behind the other.
  static DEVICE void in_order(u32* words, const Held& held, int at) {
    UNROLL for (int l = 0; l < kHalf; l += 2) {
      words[l / 2] = held[l][at] & 0xffff | held[l + 1][at] << 16;
      words[kHalf / 2 + l / 2] = held[l][at] >> 16 | held[l + 1][at] & 0xffff0000;
    }
  }
  // The first warpgroup stores the first half of the columns, the second one the other half.
  DEVICE void store(const Held& held, i64 first, int s, int team, int buffer) const {
    constexpr int kCount = N / 16 * 2;  // of a thread, of L / 2 words each for both neighbours
    const Lane lane;
    const int thread = threadIdx.x % 128;
    const u32 through = memory + kExchange + buffer * (kConsumers * kWords * 4) + thread * 16;
    u32 mine[kCount][kHalf], words[kWords];
    UNROLL for (int i = 0; i < kCount; ++i) {
      u32 near[kHalf], far[kHalf];
      in_order(near, held, i);
      in_order(far, held, kCount + i);
      UNROLL for (int j = 0; j < kHalf; ++j)
        mine[i][j] = team ? far[j] : near[j], words[i * kHalf + j] = team ? near[j] : far[j];
    }
    UNROLL for (int i = 0; i < kWords; i += 4)
      store_u32x4(through + (team * (kWords / 4) + i / 4) * 2048, {words[i], words[i + 1], words[i + 2], words[i + 3]});
    sync_consumers<kConsumers>();
    UNROLL for (int i = 0; i < kWords; i += 4) {
      u32 given[4];
      load_u32x4(through + ((1 - team) * (kWords / 4) + i / 4) * 2048, given);
      UNROLL for (int j = 0; j < 4; ++j) words[i + j] = given[j];
    }
    const i64 sample = first + thread / 32 * 16 + lane.g;
    const int column = s + team * (N / 2) + lane.t * 2;
    Element* y = static_cast<Element*>(params.y) + sample * (S * L) + column * L;
    UNROLL for (int i = 0; i < kCount; ++i) {
      u32 all[L];  // of a neighbour, those of the first warpgroup and of the second one; then of the other neighbour
      UNROLL for (int j = 0; j < kHalf; ++j) {
        const u32 mine_j = mine[i][j], given_j = words[i * kHalf + j];
        const int at = j / (kHalf / 2) * kHalf + j % (kHalf / 2);
        all[at] = team ? given_j : mine_j;
        all[at + kHalf / 2] = team ? mine_j : given_j;
      }
      if (sample + i % 2 * 8 < params.batch && (S % N == 0 || column + i / 2 * 8 < S)) {
        UNROLL for (int j = 0; j < L; j += 4)
          store_global<16>(y + i64(i % 2) * (8 * S * L) + i / 2 * (8 * L) + j * 2, all + j);
      }
    }
  }
  DEVICE void produce() const {
    if (threadIdx.x == kConsumers) produce_x();
    if (threadIdx.x == kConsumers + 32) produce_weights();
  }
  DEVICE void consume() const {
    Xs x = xs(0);
    Weights weight = weights(0);
    const int team = uniform(threadIdx.x / 128);
    if constexpr (Pass::BIAS) keep_bias();
    int buffer = 0;  // of two, so that the other warpgroup has time to read one
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      Left left;
      make_states(left, x, weight, team);
      // Products of the next l are made while one's results are finished, those of the next columns while these are stored.
      Sums sums[2];
      int slots[2] = {ask(sums[0], left[0], weight, team)};
      UNROLL for (int s = 0; s < S; s += N) {
        Held held;
        UNROLL for (int l = 0; l < kHalf; ++l) {
          const int now = l % 2, next = 1 - now;
          if (l + 1 < kHalf || s + N < S) {
            slots[next] = ask(sums[next], left[(l + 1) % kHalf], weight, team);
            wait_for_products<1>();
          } else {
            wait_for_products<0>();
          }
          touch(sums[now]);
          weight.release(slots[now]);
          finish(held[l], sums[now], team * kHalf + l, s);
        }
        store(held, first_sample(tile), s, team, buffer);
        buffer ^= 1;
      }
    }
  }

  DEVICE void run() const {
    xs(0).init(1, kConsumers / 32);
    weights(0).init(1, kConsumers / 32 * kBlocks);
    fence_copy_engine();
    __syncthreads();
    sync_cluster();
    part_ways<kConsumers, Pass::MORE, Pass::FEWER>([&] { consume(); }, [&] { produce(); });
    sync_cluster();  // the other block may still tell this one's producer, or write here
  }
};
