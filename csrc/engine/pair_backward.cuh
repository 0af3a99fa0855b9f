// The backward pass of two tied contractions, of the last two modes, in one: for each unit, X [p0, p1] and G [q0, q1] give
//
//     T = X B',  dA += G T',  dT = A' G,  dX = dT B,  dB += dT' X
//
// A group of warps takes unit after unit, each warp 16 rows of p0: its sums of T are the right operand of dA as they stand,
// and those of dT the left operand of dX. Only dT passes through shared memory, for dB, of which a warp has rows of q1.
// Sums of dA and dB stay in registers for all units of a block.
//
// Pass: Math, Element (16 bits), P0, P1, Q0, Q1, UNITS_PER_SAMPLE; WARPS (16 p0's each), GROUPS, SLOTS, COPY (bytes of a copy),
//       STORE. Weights of the parameters are A, B and G.
#pragma once
#include "mma.cuh"
#include "params.cuh"

template <class Pass> struct PairBackward {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), WARPS = Pass::WARPS, GROUPS = Pass::GROUPS, SLOTS = Pass::SLOTS;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int kP0 = WARPS * 16, kP1 = round_up(P1, 16), kQ0 = round_up(Q0, 16), kQ1 = round_up(Q1, 16);
  static_assert(kP0 >= P0 && kP0 - P0 < 16);
  static constexpr int kX = kP1 + 8, kG = kQ1 + 8, kA = kP0 + 8;  // strides in shared memory: of X, B and dX; of G and dT; of A
  static constexpr int kBytesX = kP0 * kX * kSize, kSlot = kBytesX + kQ0 * kG * kSize, kBytesT = kP0 * kG * kSize;
  static constexpr int kGroup = SLOTS * kSlot + kBytesT + kP0 * kX * kSize;  // slots, dT, dX
  static constexpr int kThreads = WARPS * 32, kBlock = kThreads * GROUPS;
  static constexpr int kWeights = kQ1 * kX * kSize;  // B; A lies where the slots are, until registers have it
  static constexpr int kTiles = ceil_div(kQ1 / 16, WARPS);  // of dB's rows, for a warp

  const Params& params;
  const Lane lane;
  const int group, warp, thread;
  const u32 b, memory;
  const i64 units;

  DEVICE PairBackward(const Params& given)
      : params(given), group(threadIdx.x / kThreads), warp(threadIdx.x / 32 % WARPS), thread(threadIdx.x % kThreads),
        b(shared_address(shared_memory)), memory(b + kWeights + group * kGroup), units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  DEVICE void sync() const { sync_group<WARPS, GROUPS>(group + 1); }  // the block's own barrier is for the end

  template <int ROWS, int COLUMNS, int STRIDE> DEVICE void copy(const Element* from, u32 to) const {
    constexpr int kEach = Pass::COPY / kSize, kRow = COLUMNS / kEach;
#pragma unroll 4
    for (int j = thread; j < ROWS * kRow; j += kThreads)
      copy_async<Pass::COPY>(to + (j / kRow * STRIDE + j % kRow * kEach) * kSize, from + j * kEach, true);
  }
  DEVICE void load(i64 unit, u32 slot) const {
    if (unit < units) {
      copy<P0, P1, kX>(static_cast<const Element*>(params.x) + unit * (P0 * P1), slot);
      copy<Q0, Q1, kG>(static_cast<const Element*>(params.weights[2]) + unit * (Q0 * Q1), slot + kBytesX);
    }
    commit_copies();
  }
  template <int ROWS, int COLUMNS, int WIDTH, int STRIDE> DEVICE void load_weight(int factor, u32 to) const {
    const Element* weight = static_cast<const Element*>(params.weights[factor]);
    for (int j = threadIdx.x; j < round_up(ROWS, 16) * WIDTH; j += kBlock) {
      const int q = j / WIDTH, p = j % WIDTH;
      store_shared(to + (q * STRIDE + p) * kSize, q < ROWS && p < COLUMNS ? weight[q * COLUMNS + p] : Element{});
    }
  }

  using A = typename Math::A;
  using B = typename Math::B;
  // sums[n] += left x right for all columns, of right operands with k (or n) contiguous in shared memory.
  template <bool BY_N, int STRIDE, int NT> DEVICE void multiply(float (*sums)[4], const A& left, u32 right) const {
    constexpr int kTogether = NT % 4 ? 2 : 4;  // tiles of 8 columns that are loaded at once
#pragma unroll
    for (int n = 0; n < NT; n += kTogether) {
      B some[kTogether];
      if constexpr (BY_N) {
        u32 columns[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) columns[i] = right + (n + i) * 8 * kSize;
        Math::template load_b_by_n<16, STRIDE, kTogether, 8>(some, columns, lane.index);
      } else {
        Math::template load_row_b<16, STRIDE>(some, right + n * 8 * STRIDE * kSize);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) Math::template multiply<16>(sums[n + i], left, some[i]);
    }
  }

  DEVICE void run() const {
    const int first = warp * 16;
    const u32 d_t = memory + SLOTS * kSlot, d_x = d_t + kBytesT + first * kX * kSize;
    // A to where a slot will be, from there to registers; then all is zero where copies leave padding.
    const u32 a = b + kWeights;
    load_weight<Q1, P1, kP1, kX>(1, b);
    load_weight<Q0, P0, kP0, kA>(0, a);
    __syncthreads();
    A transposed[kQ0 / 16];
#pragma unroll
    for (int s = 0; s < kQ0 / 16; ++s)
      Math::template load_a_by_m<kA>(transposed[s], a + (s * 16 * kA + first) * kSize + Math::template lane_a_by_m<kA>(lane));
    __syncthreads();
    for (int at = thread * 4; at < SLOTS * kSlot; at += kThreads * 4) store_shared(memory + at, 0u);
    sync();
    float d_a[kQ0 / 16][2][4] = {}, d_b[kTiles][kP1 / 8][4] = {};
    const i64 step = i64(gridDim.x) * GROUPS;
    i64 unit = i64(group) * gridDim.x + blockIdx.x;
#pragma unroll
    for (int s = 0; s + 1 < SLOTS; ++s) load(unit + s * step, memory + s * kSlot);
    int slot = 0;
#pragma unroll 1
    for (; unit < units; unit += step) {
      wait_for_copies<SLOTS - 2>();
      sync();
      const u32 x = memory + slot * kSlot, g = x + kBytesX;
      load(unit + (SLOTS - 1) * step, memory + (slot ? slot - 1 : SLOTS - 1) * kSlot);
      slot = slot + 1 == SLOTS ? 0 : slot + 1;
      {
        float t[kQ1 / 8][4] = {};
#pragma unroll
        for (int s = 0; s < kP1 / 16; ++s) {
          A left;
          Math::template load_row_a<16, kX>(left, x + (first * kX + s * 16) * kSize + Math::template lane_row_a<kX>(lane));
          multiply<false, kX, kQ1 / 8>(t, left, b + s * 16 * kSize + Math::template lane_row_b<kX>(lane));
        }
#pragma unroll
        for (int s = 0; s < kQ1 / 16; ++s) {
          B right[2];  // 8 rows of T each
#pragma unroll
          for (int i = 0; i < 4; ++i)
            right[i / 2].r[i % 2] = Pair<Element>(t[2 * s + i % 2][i / 2 * 2], t[2 * s + i % 2][i / 2 * 2 + 1]).bits;
#pragma unroll
          for (int m = 0; m < kQ0 / 16; ++m) {
            A left;
            Math::template load_row_a<16, kG>(left, g + (m * 16 * kG + s * 16) * kSize + Math::template lane_row_a<kG>(lane));
#pragma unroll
            for (int i = 0; i < 2; ++i) Math::template multiply<16>(d_a[m][i], left, right[i]);
          }
        }
      }
      float back[kQ1 / 8][4] = {};
#pragma unroll
      for (int s = 0; s < kQ0 / 16; ++s)
        multiply<true, kG, kQ1 / 8>(back, transposed[s], g + s * 16 * kG * kSize + Math::template lane_b_by_n<kG>(lane));
      float sums[kP1 / 8][4] = {};
#pragma unroll
      for (int s = 0; s < kQ1 / 16; ++s) {
        A left;
        Math::as_a(left, &back[2 * s]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          store_shared(d_t + ((first + lane.g + i % 2 * 8) * kG + s * 16 + i / 2 * 8 + lane.t * 2) * kSize, left.r[i]);
        multiply<true, kX, kP1 / 8>(sums, left, b + s * 16 * kX * kSize + Math::template lane_b_by_n<kX>(lane));
      }
      sync();
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
        const int m = k * WARPS + warp;
        if (kQ1 / 16 % WARPS && m >= kQ1 / 16) break;
#pragma unroll
        for (int s = 0; s < kP0 / 16; ++s) {
          A left;
          Math::template load_a_by_m<kG>(left, d_t + (s * 16 * kG + m * 16) * kSize + Math::template lane_a_by_m<kG>(lane));
          multiply<true, kX, kP1 / 8>(d_b[k], left, x + s * 16 * kX * kSize + Math::template lane_b_by_n<kX>(lane));
        }
      }
      store(sums, d_x, static_cast<Element*>(params.y) + unit * (P0 * P1), first);
    }
    wait_for_copies<0>();
    add_up(d_a, d_b, first);
  }

  // A warp's rows of dX, by whole pieces through shared memory.
  DEVICE void store(const float (&sums)[kP1 / 8][4], u32 staged, Element* to, int first) const {
#pragma unroll
    for (int n = 0; n < kP1 / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared(staged + ((lane.g + i * 8) * kX + n * 8 + lane.t * 2) * kSize,
                     Pair<Element>(sums[n][i * 2], sums[n][i * 2 + 1]).bits);
    __syncwarp();
    constexpr int kEach = Pass::STORE / kSize, kRow = P1 / kEach;
#pragma unroll 4
    for (int j = lane.index; j < 16 * kRow; j += 32) {
      const int row = j / kRow, column = j % kRow * kEach;
      if (P0 % 16 == 0 || first + row < P0)
        store_words<Pass::STORE>(to + (first + row) * P1 + column, load_words<Pass::STORE>(staged + (row * kX + column) * kSize));
    }
    __syncwarp();
  }

  // The groups' sums, one group's after the other's, to where this block's belong.
  DEVICE void add_up(const float (&d_a)[kQ0 / 16][2][4], const float (&d_b)[kTiles][kP1 / 8][4], int first) const {
    constexpr int kSums = Q0 * P0 + Q1 * P1;
    const u32 sums = b;
    static_assert(kSums * 4 <= kWeights + GROUPS * kGroup);
    __syncthreads();
    for (int turn = 0; turn < GROUPS; ++turn) {
      if (turn == group) {
        const auto add = [&](int at, float x) {
          const u32 to = sums + at * 4;
          store_shared(to, turn ? __uint_as_float(load_u32(to)) + x : x);
        };
#pragma unroll
        for (int m = 0; m < kQ0 / 16; ++m)
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int q = m * 16 + lane.g + i % 4 / 2 * 8, p = first + i / 4 * 8 + lane.t * 2 + i % 2;
            if (q < Q0 && p < P0) add(q * P0 + p, d_a[m][i / 4][i % 4]);
          }
#pragma unroll
        for (int k = 0; k < kTiles; ++k)
#pragma unroll
          for (int n = 0; n < kP1 / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int q = (k * WARPS + warp) * 16 + lane.g + i / 2 * 8, p = n * 8 + lane.t * 2 + i % 2;
              if (q < Q1 && p < P1) add(Q0 * P0 + q * P1 + p, d_b[k][n][i]);
            }
      }
      __syncthreads();
    }
    float* to = static_cast<float*>(params.sums) + i64(blockIdx.x) * kSums;
    for (int j = threadIdx.x; j < kSums; j += kBlock) store_global(to + j, __uint_as_float(load_u32(sums + j * 4)));
  }
};
