// A pass of one untied contraction of 16 bits, on sm_90a: what wide.cuh makes group by group, with a block's columns of one
// group's weight in shared memory for good. Only rows of x go by, 64 at a time and all their k's, which the copy engine reads by
// a map, into a ring. Warpgroups take turns at them: one stores its results while another one multiplies.
//
// Pass: what wide.cuh has, of groups held one by one, with one consumer of 64 rows; WARPGROUPS that multiply
#pragma once
#include "wide.cuh"

struct Maps {
  TensorMap x;
};

template <class Pass> struct MappedResident : Wide<Pass> {
  using Base = Wide<Pass>;
  using typename Base::Element;
  using typename Base::Tile;
  using Base::params, Base::memory, Base::warpgroup, Base::rows, Base::FAST;
  static constexpr int P = Pass::P, Q = Pass::Q, N = Pass::N, STAGES = Pass::STAGES, WARPGROUPS = Pass::WARPGROUPS;
  static constexpr int kSlabs = ceil_div(P, 64), kRow = kSlabs * 8, kSteps = ceil_div(P, 16);  // pieces of 16 bytes; of k
  static constexpr int kWeights = kSlabs * N * 128, kStage = kSlabs * 64 * 128, kBarriers = kWeights + STAGES * kStage;
  static constexpr int kParts = ceil_div(Q, N), kThreads = WARPGROUPS * 128;
  static_assert(Base::kPacked && Pass::CONSUMERS == 1 && Pass::HELD == 1 && Pass::OUTER == 1 && Pass::BESIDE < 0);
  static_assert(Pass::TERMS == 1 && Pass::TERM_BLOCKS == 1 && Pass::MIXED < 0 && STAGES >= WARPGROUPS);

  const Maps& maps;
  const int group, first_column;  // which counts (slow, fast)

  DEVICE MappedResident(const Params& given, const Maps& m)
      : Base(given), maps(m), group(blockIdx.y / kParts), first_column(blockIdx.y % kParts * N) {}

  DEVICE u32 full(u32 stage) const { return memory + kBarriers + stage * 8; }
  DEVICE u32 empty(u32 stage) const { return memory + kBarriers + (STAGES + stage) * 8; }
  DEVICE u32 stage(u32 stage) const { return memory + kWeights + stage * kStage; }
  DEVICE i64 chunks() const { return (rows() + 63) / 64; }
  DEVICE i64 first_row(u32 position) const {
    const i64 chunk = blockIdx.x + i64(position) * gridDim.x;
    return (Pass::FROM_LAST ? chunks() - 1 - chunk : chunk) * 64;
  }
  DEVICE Tile tile_at(i64 first) const { return {first, first_column, group % FAST, group / FAST, 0}; }

  DEVICE void run() const {
    if (threadIdx.x < STAGES) {
      init_barrier(full(threadIdx.x), 1);
      init_barrier(empty(threadIdx.x), 4);
    }
    fence_copy_engine();
    __syncthreads();
    const u32 count = u32((chunks() + gridDim.x - 1 - blockIdx.x) / gridDim.x);
    if (warpgroup < WARPGROUPS) {
      take_registers<Pass::MORE>();
      load_weight();
      consume(count);
    } else {
      give_registers<Pass::FEWER>();
      if (threadIdx.x == kThreads) produce(count);
    }
  }

  DEVICE void load_weight() const {
    const Element* weight = static_cast<const Element*>(params.weights[Pass::WEIGHT]);
    weight += i64(Base::weight_of(tile_at(0), group % FAST)) * (i64(Q) * P);
#pragma unroll 8
    for (int j = threadIdx.x; j < N * kRow; j += kThreads) {
      const int r = j / kRow, piece = j % kRow, column = first_column + Base::column_of(r);
      copy_async<16>(memory + piece / 8 * (N * 128) + swizzled(r, piece % 8),
                     weight + i64(Base::weight_row(column)) * P + piece * 8, column < Q && (P % 64 == 0 || piece * 8 < P));
    }
    commit_copies();
    wait_for_copies<0>();
    fence_copy_engine();
    sync_threads<kThreads>(1);
  }

  DEVICE void produce(u32 count) const {
    const int of_x = Base::weight_of(tile_at(0), group % FAST);
#pragma unroll 1
    for (u32 position = 0; position < count; ++position) {
      const u32 at = position % STAGES;
      const int first = int(first_row(position));
      wait_for_bytes(empty(at), (position / STAGES & 1) ^ 1);
      expect_bytes(full(at), kStage);
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        const int box[5] = {slab * 64, of_x, first, 0, 0};
        load_box(stage(at) + slab * 8192, maps.x, box, full(at));
      }
    }
  }

  DEVICE void consume(u32 count) const {
#pragma unroll 1
    for (u32 position = warpgroup; position < count; position += WARPGROUPS) {
      const u32 at = position % STAGES;
      float sum[N / 2];
      wait_for_bytes(full(at), position / STAGES & 1);
      const u64 left = operand(stage(at)), right = operand(memory);
      open_products();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        Wgmma<Element, N>::multiply(sum, left + step / 4 * (8192 / 16) + step % 4 * 2,
                                    right + step / 4 * (N * 128 / 16) + step % 4 * 2, step > 0);
      commit_products();
      wait_for_products<0>();
      touch(sum);
      if (threadIdx.x % 32 == 0) arrive(empty(at));
      // Rows of sums are counted by threads of the whole block.
      const Tile tile = tile_at(first_row(position) - warpgroup * 64);
      typename Base::Held held;
      Base::finish(sum, held[0], tile, 0);
      Base::store(held, tile);
    }
  }
};
