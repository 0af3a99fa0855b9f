// The gradient of one contraction's weight, as gradient.cuh makes it, in tf32 and 16 bits, of tensors that the copy engine reads
// by maps:
//
//     dW[q, p] = sum_{r, i} G[r, q, i] X[r, p, i]      r: samples (of tied weights: samples and outer), i: behind the mode
//
// What lies behind the mode is summed over and contiguous, as the matrix unit wants its operands: a slab has 128 bytes of it, of one
// row. Where nothing lies there, in 16 bits, a slab has 64 columns of 64 rows, which the matrix unit turns. The engine rounds to
// tf32 what it brings of floats, and writes zeros for what lies outside of a tensor, so that sizes need not be whole slabs.
//
// A block has a tile of q x p of one group, or of one term of a sum of products, and every gridDim.x-th chunk of slabs that are
// multiplied at once. One thread asks for them; each of CONSUMERS warpgroups has 64 q's, or twice as many (PARTS), and N p's.
// Blocks with the same tile write their sums side by side, for Reduction; where there is but one, it writes elements.
// kernels/product/mapped_gradient.py writes the constants:
//
// Pass:  Element, Result (what is written), P, Q, INNER, ROWS (of a sample), GROUPS, TERMS, X_TERMS and G_TERMS (whether X and G
//        have a state for each term), CONSUMERS, PARTS, N, SLOTS, MORE and FEWER (registers of consumers and producers)
#pragma once
#include "types/params.cuh"
#include "multiply/wgmma.cuh"
#include "finish/tile.cuh"
#include "move/ring.cuh"

struct Maps { TensorMap x, grad; };

template <class Pass> struct MappedGradient {
  using Element = typename Pass::Element;
  using Result = typename Pass::Result;
  static constexpr int P = Pass::P, Q = Pass::Q, N = Pass::N, INNER = Pass::INNER, PARTS = Pass::PARTS;
  static constexpr int kSize = sizeof(Element), BK = 128 / kSize, kSlab = 64 * 128;
  static constexpr bool kTurned = INNER == 1;
  static_assert(!kTurned || (kSize == 2 && Pass::TERMS == 1), "32 bits are not turned, nor told from the next term's rows");
  static constexpr int kConsumers = 128 * Pass::CONSUMERS, kPart = 64 * Pass::CONSUMERS, M = kPart * PARTS;
  static constexpr int kRight = kTurned ? ceil_div(N, 64) * 64 : N;  // rows of 128 bytes of X in a slot, behind M of G
  static constexpr int kSlotBytes = (M + kRight) * 128;
  static constexpr int kSlabs = kTurned ? 1 : ceil_div(INNER, BK);                                      // of a row
  static constexpr int kLastSteps = kTurned ? 4 : ceil_div((INNER - (kSlabs - 1) * BK) * kSize, 32);  // of 4 of a slab
  static constexpr int kTilesQ = ceil_div(Q, M), kTilesP = ceil_div(P, N);
  static constexpr i64 kWeights = i64(P) * Q * Pass::GROUPS * Pass::TERMS;
  using Slots = Ring<Pass::SLOTS, kSlotBytes>;
  using Cursor = typename Slots::Cursor;
  using Sums = float[PARTS][N / 2];

  const Params& params;
  const Maps& maps;
  const Slots ring;
  const int warpgroup, q, p, group;  // the first of its tile, and whose weight it is: a group's or a term's
  const i64 rows, chunks;

  DEVICE MappedGradient(const Params& given, const Maps& m)
      : params(given), maps(m), ring(shared_address(shared_memory) + 1023 & ~1023u), warpgroup(uniform(threadIdx.x / 128)),
        q(blockIdx.y % kTilesQ * M), p(blockIdx.y / kTilesQ % kTilesP * N), group(blockIdx.y / (kTilesQ * kTilesP)),
        rows(given.batch * Pass::ROWS), chunks(kTurned ? (rows + 63) / 64 : rows * kSlabs) {}

  // From the last rows on: L2 still has of G what the kernel before has made or read last.
  DEVICE i64 number(i64 chunk) const { return chunks - 1 - chunk; }

  // ROWS_128 rows of 128 bytes of a state, from one of its columns on
  template <int ROWS_128> DEVICE void load(u32 to, const TensorMap& map, int column, i64 chunk, bool of_terms, u32 full) const {
    if constexpr (kTurned) {
      ROLL for (int c = 0; c < ROWS_128; c += 64) {
        const int at[5] = {column + c, Pass::GROUPS > 1 ? group : 0, int(chunk * 64), 0, 0};
        load_box(to + c * 128, map, at, full);
      }
    } else {
      const i64 row = chunk / kSlabs + (Pass::TERMS > 1 && of_terms ? group * rows : 0);
      const int at[5] = {int(chunk % kSlabs) * BK, column, int(row), 0, 0};
      load_box(to, map, at, full);
    }
  }
  // One thread
  DEVICE void produce() const {
    if (threadIdx.x != kConsumers) return;
    Cursor cursor{0, 1};
    ROLL for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      const u32 to = ring.at(cursor.slot), full = ring.begin_to_fill(cursor);
      load<M>(to, maps.grad, q, number(chunk), Pass::G_TERMS, full);
      load<kRight>(to + M * 128, maps.x, p, number(chunk), Pass::X_TERMS, full);
      cursor.next();
    }
  }

  template <int STEPS> DEVICE void multiply(Sums& sums, u32 from, bool add) const {
    const u32 left_slab = from + warpgroup * kSlab, right_slab = from + M * 128;
    ask_for_products<STEPS>([&](int step) {
      UNROLL for (int part = 0; part < PARTS; ++part) {
        if constexpr (kTurned)
          Wgmma<Element, N>::multiply_turned(sums[part], turned_operand(left_slab + part * (kPart * 128), kSlab) + 128 * step,
                                             turned_operand(right_slab, kSlab) + 128 * step, add || step > 0);
        else
          Wgmma<Element, N>::multiply(sums[part], operand(left_slab + part * (kPart * 128)) + 2 * step,
                                      operand(right_slab) + 2 * step, add || step > 0);
      }
    });
  }
  DEVICE void consume() const {
    Cursor cursor{0, 0};
    Sums sums;
    int last = -1;  // the slot taken before, which is free when the next one's products are asked for
    ROLL for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      ring.wait_until_full(cursor);
      if (kLastSteps == 4 || number(chunk) % kSlabs < kSlabs - 1)
        multiply<4>(sums, ring.at(cursor.slot), last >= 0);
      else
        multiply<kLastSteps>(sums, ring.at(cursor.slot), last >= 0);
      wait_for_products<1>();
      if (last >= 0) ring.release(last);
      last = cursor.slot;
      cursor.next();
    }
    wait_for_products<0>();
    UNROLL for (int part = 0; part < PARTS; ++part) touch(sums[part]);
    store(sums);
  }

  // A warp has rows g and g + 8 of 16. By whole sectors, or by way of shared memory, where no one reads slots any more.
  static constexpr int kStagedBytes = StagedRows<N>::kBytes;  // of a warp
  static_assert(P % 4 == 0 || kConsumers / 32 * kStagedBytes <= Pass::SLOTS * kSlotBytes, "room for sums");
  DEVICE void store(const Sums& sums) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = q + warp * 16;
    Result* to = static_cast<Result*>(params.y) + (i64(blockIdx.x) * kWeights + i64(group) * Q * P);
    if constexpr (P % 4 == 0) {
      UNROLL for (int part = 0; part < PARTS; ++part)
        UNROLL for (int half = 0; half < 2; ++half) {
          const int row = first + part * kPart + half * 8 + lane / 4;
          store_row(sums[part], half, to + i64(row) * P, p, row < Q ? P : 0);  // all of a warp exchange, whose rows may end between
        }
    } else {
      const StagedRows<N> staged(ring.at(0) + warp * kStagedBytes);
      sync_consumers<kConsumers>();
      UNROLL for (int part = 0; part < PARTS; ++part) {
        staged.put(sums[part]);
        __syncwarp();
        staged.template store<Result>(0, P - p, [&](int row) {
          const int at = first + part * kPart + row;
          return at < Q ? to + (i64(at) * P + p) : nullptr;
        });
        __syncwarp();
      }
    }
  }

  DEVICE void run() const {
    ring.init(1, kConsumers / 32);
    fence_copy_engine();
    __syncthreads();
    part_ways<kConsumers, Pass::MORE, Pass::FEWER>([&] { consume(); }, [&] { produce(); });
  }
};
