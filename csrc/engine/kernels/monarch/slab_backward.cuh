// Both gradients of an untied contraction at one visit, on sm_90a in tf32, of a grad_y that lies as the matrix unit, which turns
// nothing of 32 bits, wants it for sums over samples: by slabs of 32 samples, in each of which a feature has 128 bytes.
//
//     dW[q, p] = sum_r G[r, q] X[r, p]        dX[r, p] = sum_q G[r, q] W[q, p]        r: samples, for each group
//
// A block keeps the weights of 64 p's of a group in shared memory, turned, while units of 64 samples go by, two slabs of G and
// as many rows of X, which the copy engine reads by maps, rounding them, to a ring of SLOTS, a slab each. One warpgroup makes
// dX: its left operand comes from registers, loaded out of G's slabs; the other one dW, turned: its left operand comes from rows
// of X in the same way, and G's slabs are the right one as they lie. A thread's two rows of either product are neighbours in memory.
//
// X's rows are [groups][P]; those of dX may be another contraction's, as untied_backward.cuh has them, or dX lies by slabs, too,
// in the order of X's features. Blocks write their sums side by side, for Reduction. kernels/monarch/slab_backward.py writes the
// constants:
//
// Pass:  P, Q (a multiple of 8 up to 256), OUTER, INNER (groups), RUN, SLABS_OUT (dX lies so), SLOTS, MOST (blocks for a tile),
//        MORE and FEWER (registers of consumers and producers)
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"

struct Maps { TensorMap x, grad; };

template <class Pass> struct SlabBackward {
  static constexpr int P = Pass::P, Q = Pass::Q, INNER = Pass::INNER, GROUPS = Pass::OUTER * INNER, SLOTS = Pass::SLOTS;
  static constexpr int BP = 64, kTiles = ceil_div(P, BP), kConsumers = 256;
  static constexpr int kWeights = ceil_div(Q, 32) * BP * 128;  // bytes
  static constexpr int kLeft = Q * 128, kSlotBytes = kLeft + 2 * 4096;
  using Slabs = Ring<SLOTS, kSlotBytes>;
  static constexpr i64 kFeatures = i64(P) * GROUPS, kSums = i64(Q) * P * GROUPS;
  static_assert(Q % 8 == 0 && Q <= 256 && P % 4 == 0 && SLOTS % 2 == 0 && Pass::RUN % 4 == 0);

  const Params& params;
  const Maps& maps;
  const u32 memory;
  const Slabs ring;
  const int units, blocks, first_p, group;

  DEVICE SlabBackward(const Params& given, const Maps& m)
      : params(given), maps(m), memory(shared_address(shared_memory) + 1023 & ~1023u), ring(memory + kWeights), units(int(given.batch / 64)),
        blocks(min(int(gridDim.x), Pass::MOST)), first_p(blockIdx.y % kTiles * BP), group(blockIdx.y / kTiles) {}

  // From the last samples on, of which L2 still has some (wide_gradient.cuh)
  DEVICE int slab_of(int unit) const { return (units - 1 - unit) * 2; }

  // In the order in which a thread's sums are four p's side by side.
  static DEVICE int row_of(int p) { return p / 16 * 16 + p % 2 * 8 + p % 16 / 2; }
  DEVICE void put_weights() const {
    const float* weights = static_cast<const float*>(params.weights[0]) + i64(group) * Q * P + first_p;
    const int p = threadIdx.x % BP;
    UNROLL_BY(8) for (int q = threadIdx.x / BP; q < ceil_div(Q, 32) * 32; q += kConsumers / BP) {
      const float w = q < Q && first_p + p < P ? weights[i64(q) * P + p] : 0.f;
      store_shared(memory + q / 32 * (BP * 128) + swizzled(row_of(p), q % 32 / 4) + q % 4 * 4, tf32_of(__float_as_uint(w)));
    }
  }

  // One thread
  DEVICE void produce() const {
    if (threadIdx.x != kConsumers) return;
    RingCursor<SLOTS> cursor{0, 1};
    ROLL for (int unit = blockIdx.x; unit < units; unit += blocks) {
      ROLL for (int half = 0; half < 2; ++half) {
        const int slab = slab_of(unit) + half;
        const int of_grad[5] = {0, 0, group % INNER, group / INNER, slab};
        const u32 to = ring.at(cursor.slot), full = ring.begin_to_fill(cursor);
        load_box(to, maps.grad, of_grad, full);
        UNROLL for (int columns = 0; columns < 2; ++columns) {
          const int of_x[5] = {first_p + columns * 32, group, slab * 32, 0, 0};
          load_box(to + kLeft + columns * 4096, maps.x, of_x, full);
        }
        cursor.skip(1);
      }
    }
  }

  // A warp has read a slab.
  DEVICE void release(int slot) const {
    __syncwarp();
    ring.release(slot);
  }

  // A left operand, of which eight k's are rows of a slab: a thread's two m's are neighbours in a row, of the 32 that two warps
  // share, and lanes that read together meet in no bank.
  static constexpr int kSteps = 4;
  using Left = u32[kSteps][4];
  static DEVICE int own_place() {
    const int w = threadIdx.x / 32 % 2, g = threadIdx.x % 32 / 4;
    return (g / 2 % 2 * 4 + w * 2 + g / 4) * 4 + g % 2 * 2;
  }
  static DEVICE void load_left(Left& left, u32 slab, int step, int steps) {
    const int t = threadIdx.x % 4, place = own_place();
    const u32 from = slab + step * 1024 + place % 4 * 4;
    UNROLL for (int s = 0; s < kSteps; ++s) {
      if (s >= steps) break;
      UNROLL for (int half = 0; half < 2; ++half) {
        u32 x[2];
        load_u32x2(from + s * 1024 + swizzled(t + half * 4, place / 4), x);
        left[s][half * 2] = x[0], left[s][half * 2 + 1] = x[1];
      }
      settle(left[s]);
    }
  }

  // Where a group's p lies in a row of dX.
  DEVICE int place_of(int p) const {
    const int k = group * P + p;
    if constexpr (Pass::RUN == P) return k;
    return group / INNER * (P * INNER) + (p / Pass::RUN * INNER + group % INNER) * Pass::RUN + p % Pass::RUN;
  }
  DEVICE void store_x(const float (&sums)[32], int unit) const {
    const int t = threadIdx.x % 4, row = own_place(), slab = slab_of(unit) + threadIdx.x % 128 / 64;
    float* y = static_cast<float*>(params.y);
    UNROLL for (int n = 0; n < 8; n += 2) {
      const int p = first_p + n * 8 + t * 4;
      if constexpr (Pass::SLABS_OUT) {
        const i64 feature = (i64(group / INNER) * P + p) * INNER + group % INNER;
        float* to = y + (slab * kFeatures + feature) * 32 + row;
        UNROLL for (int i = 0; i < 4; ++i) {
          const int at = (n + i % 2) * 4 + i / 2;
          const u32 words[2] = {__float_as_uint(sums[at]), __float_as_uint(sums[at + 2])};
          if (p < P) store_global<8>(to + i * (INNER * 32), words);
        }
      } else {
        float* to = y + (i64(slab) * 32 + row) * kFeatures + place_of(p);
        UNROLL for (int half = 0; half < 2; ++half) {
          u32 words[4];
          UNROLL for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(sums[(n + i % 2) * 4 + i / 2 + half * 2]);
          if (p < P) store_global<16>(to + half * kFeatures, words);
        }
      }
    }
  }
  // Two warps read a slab, and the other two the next: of as many slots as they take turns at, so that they see all phases of
  // theirs. What a unit has made is stored while the next one's first products are on their way.
  DEVICE void make_x() const {
    static constexpr int kAll = Q / 8, kParts = ceil_div(kAll, kSteps);
    RingCursor<SLOTS> cursor{int(threadIdx.x / 64), 0};
    float sums[32], made[32] = {};
    Left left[2];
    int last = -1;
    ROLL for (int unit = blockIdx.x; unit < units; unit += blocks) {
      ring.wait_until_full(cursor);
      const u32 slab = ring.at(cursor.slot);
      UNROLL for (int part = 0; part < kParts; ++part) {
        const int first = part * kSteps;
        load_left(left[part % 2], slab, first, kAll - first);
        open_products();
        UNROLL for (int s = 0; s < kSteps; ++s) {
          const u64 right = operand(memory + (first + s) / 4 * (BP * 128)) + (first + s) % 4 * 2;
          if (first + s < kAll) Wgmma<float, BP>::multiply(sums, left[part % 2][s], right, first + s > 0);
        }
        commit_products();
        if (part == 0 && last >= 0) store_x(made, last);
        wait_for_products<1>();
      }
      release(cursor.slot);
      cursor.skip(2);
      wait_for_products<0>();
      touch(sums);
      UNROLL for (int i = 0; i < 32; ++i) made[i] = sums[i];
      last = unit;
    }
    if (last >= 0) store_x(made, last);
  }

  using Sums = float[Q / 2];
  DEVICE void store_sums(const Sums& sums) const {
    const int t = threadIdx.x % 4, p = first_p + threadIdx.x % 128 / 64 * 32 + own_place();
    float* to = static_cast<float*>(params.sums) + (blockIdx.x * kSums + i64(group) * Q * P + p);
    UNROLL for (int i = 0; i < Q / 4; ++i) {
      const int q = i / 2 * 8 + t * 2 + i % 2, at = i / 2 * 4 + i % 2;
      const u32 words[2] = {__float_as_uint(sums[at]), __float_as_uint(sums[at + 2])};
      if (p < P) store_global<8>(to + i64(q) * P, words);
    }
  }
  DEVICE void make_weight() const {
    Sums sums;
    Left left[2];
    RingCursor<SLOTS> cursor{0, 0};
    const int half = threadIdx.x % 128 / 64;
    int last = -1;
    ROLL for (int unit = blockIdx.x; unit < units; unit += blocks) {
      UNROLL for (int slab = 0; slab < 2; ++slab) {
        ring.wait_until_full(cursor);
        const u32 from = ring.at(cursor.slot);
        load_left(left[slab], from + kLeft + half * 4096, 0, kSteps);
        open_products();
        UNROLL for (int s = 0; s < kSteps; ++s)
          Wgmma<float, Q>::multiply(sums, left[slab][s], operand(from) + s * 2, last >= 0 || s > 0);
        commit_products();
        if (last >= 0) {
          wait_for_products<1>();
          release(last);
        }
        last = cursor.slot;
        cursor.skip(1);
      }
    }
    wait_for_products<0>();
    touch(sums);
    store_sums(sums);
  }

  DEVICE void run() const {
    if (int(blockIdx.x) >= blocks) return;
    ring.init(1, 2 + 4);
    fence_copy_engine();
    __syncthreads();
    if (threadIdx.x < kConsumers)
      take_registers<Pass::MORE>(), consume();
    else
      give_registers<Pass::FEWER>(), produce();
  }
  DEVICE void consume() const {
    put_weights();
    fence_copy_engine();
    sync_consumers<kConsumers>();
    if (threadIdx.x < 128)
      make_x();
    else
      make_weight();
  }
};
