// A pass of one tied contraction of 16 bits as a matrix product, where k's are few, on sm_90a: what wide.cuh makes, with a
// block's columns of the weight in shared memory for good. Only rows of x go by, 64 at a time and all their k's, through a ring.
// Warpgroups take turns at them: one stores its results while another one multiplies.
//
// Pass: what wide.cuh has, of one group, with one consumer of 64 rows; GROUPS of warpgroups that multiply
#pragma once
#include "kernels/product/wide.cuh"
#include "move/ring.cuh"

template <class Pass> struct WideResident : Wide<Pass> {
  using Base = Wide<Pass>;
  using typename Base::Element;
  using Base::params, Base::memory, Base::warpgroup, Base::rows;
  static constexpr int P = Pass::P, Q = Pass::Q, N = Pass::N, SLOTS = Pass::SLOTS, GROUPS = Pass::GROUPS_OF_WARPS;
  static constexpr int kSlabs = ceil_div(P, 64), kRow = kSlabs * 8, kSteps = ceil_div(P, 16);  // pieces of 16 bytes; of k
  static constexpr int kWeights = kSlabs * N * 128, kSlot = kSlabs * 64 * 128, kBarriers = kWeights + SLOTS * kSlot;
  static_assert(Base::kPacked && Pass::CONSUMERS == 1 && Pass::HELD == 1 && Pass::GROUPS == 1 && Pass::TERM_BLOCKS == 1);
  static_assert(SLOTS >= GROUPS && Pass::AHEAD < SLOTS && Pass::BESIDE < 0);

  const Ring<SLOTS, kSlot> ring;

  DEVICE WideResident(const Params& given)
      : Base(given), ring(memory + kWeights, memory + kBarriers) {}

  DEVICE i64 first_row(u32 position) const { return (blockIdx.x + i64(position) * gridDim.x) * 64; }
  static DEVICE int first_column() { return blockIdx.y * N; }

  DEVICE void run() const {
    ring.init(128, 4);
    __syncthreads();
    const u32 count = u32(((rows() + 63) / 64 + gridDim.x - 1 - blockIdx.x) / gridDim.x);
    if (warpgroup < GROUPS)
      take_registers<Pass::MORE>(), consume(count);
    else
      give_registers<Pass::FEWER>(), produce(count, threadIdx.x - GROUPS * 128);
  }

  DEVICE void load_weight() const {
    const Element* weight = static_cast<const Element*>(params.weights[Pass::WEIGHT]);
    UNROLL_BY(8) for (int j = threadIdx.x; j < N * kRow; j += GROUPS * 128) {
      const int r = j / kRow, piece = j % kRow, column = first_column() + Base::column_of(r);
      copy_async<16>(memory + piece / 8 * (N * 128) + swizzled(r, piece % 8),
                     weight + i64(Base::weight_row(column)) * P + piece * 8, column < Q && (P % 64 == 0 || piece * 8 < P));
    }
    commit_copies();
    wait_for_copies<0>();
    fence_copy_engine();
    sync_threads<GROUPS * 128>(2);
  }

  DEVICE void produce(u32 count, int thread) const {
    const u32 weights = Base::mixing(params);
    ROLL for (u32 position = 0; position < count + Pass::AHEAD; ++position) {
      if (position < count) {
        const u32 at = position % SLOTS;
        const i64 first = first_row(position);
        const Element* from = static_cast<const Element*>(params.x) + first * Base::kXRow;
        const int left = int(min(rows() - first, i64(64)));
        ring.wait_until_empty(position);
        UNROLL_BY(4) for (int j = thread; j < 64 * kRow; j += 128) {
          const int row = j / kRow, piece = j % kRow;
          copy_async<16>(ring.at(at) + piece / 8 * 8192 + swizzled(row, piece % 8), from + row * Base::kXRow + piece * 8,
                         row < left && (P % 64 == 0 || piece * 8 < P));
        }
      }
      commit_copies();
      if (position < Pass::AHEAD) continue;
      wait_for_copies<Pass::AHEAD>();
      const u32 at = (position - Pass::AHEAD) % SLOTS;
      if constexpr (Base::kMixes) {
        sync_threads<128>(1);
        ROLL for (int slab = 0; slab < kSlabs; ++slab) Base::mix_rows(ring.at(at) + slab * 8192, weights, thread);
      }
      fence_copy_engine();
      arrive(ring.full(at));
    }
  }

  DEVICE void consume(u32 count) const {
    load_weight();
    ROLL for (u32 position = warpgroup; position < count; position += GROUPS) {
      const u32 at = position % SLOTS;
      float sum[N / 2];
      ring.wait_until_full(position);
      const u64 left = operand(ring.at(at)), right = operand(memory);
      make_products<kSteps>(sum, [&](int step) {
        Wgmma<Element, N>::multiply(sum, left + step / 4 * (8192 / 16) + step % 4 * 2,
                                    right + step / 4 * (N * 128 / 16) + step % 4 * 2, step > 0);
      });
      ring.release(at);
      // Rows of sums are counted by threads of the whole block.
      const typename Base::Tile tile = {first_row(position) - warpgroup * 64, first_column(), 0, 0, 0};
      typename Base::Held held;
      Base::finish(sum, held[0], tile, 0);
      Base::store(held, tile);
    }
  }
};
