// The backward pass of three tied contractions of 16 bits on sm_90a, a small one of up to 8 before two of up to 64 x 64, at one
// visit: of X [p][p0, p1] and G [q][q0, q1] of each unit
//
//     Z = M X,  of each q as in unit_products.cuh, of Z and G: dA, dB, dZ,  dM += dZ X',  dX = M' dZ
//
// X as it comes from memory and Z stay in shared memory, where each dZ takes the place of its Z. The warps that multiply mix
// rows of 64 columns (mixing.cuh), each the same ones in both directions: a row's dX leaves through where its dZ's were, and the
// next unit's Z takes their place. So they meet twice for each unit, when all Z's and when all dZ's are there. X's go by chunks of
// 16 rows of all p through a ring that has room for some of the next unit's: one thread asks the copy engine for them. Three
// warps fill another one with G's.
//
// So that no ldmatrix or stmatrix meets itself in a bank, X's are an odd multiple of 16 bytes apart, and Z's 128 bytes more
// than they are long.
//
// Pass: what pair16_backward.cuh has of A and B, and of their sizes, with SLOTS for G's alone; CHUNKS of X that there is room for;
//       P, Q, and weight_m() and normal_m() of the small mode
#pragma once
#include "multiply/mixing.cuh"
#include "finish/sums.cuh"
#include "move/ring.cuh"
#include "multiply/unit_products.cuh"

template <class Pass> struct PairMixedBackward : UnitProducts<Pass> {
  using Products = UnitProducts<Pass>;
  using typename Products::Element;
  using Products::P0, Products::P1, Products::Q0, Products::Q1, Products::kSlab, Products::kConsumers;
  using Products::params, Products::lane, Products::warpgroup, Products::first, Products::d_t;
  static constexpr int P = Pass::P, Q = Pass::Q, SLOTS = Pass::SLOTS, GROUPS = Pass::GROUPS;
  static constexpr int kBarrierBytes = 1024, kZeros = 512, kThreads = kConsumers + 128, kCopiers = 96;
  static constexpr int kRow = P1 / 8, kChunk = 16, kChunks = ceil_div(P0, kChunk);  // pieces; rows
  static constexpr int kPitch = (kChunk * kRow | 1) * 16, kChunkBytes = P * kPitch;  // from an X to the next
  static constexpr int kWarps = kConsumers / 32, kRows = ceil_div(kChunk, kWarps);   // of a chunk, for a warp
  static constexpr int kMixed = 8 * (kSlab + 128), kSums = Q * P + Q0 * P0 + Q1 * P1;
  static constexpr int kX = P * P0 * P1;  // elements of a unit
  static_assert(P <= 8 && Q <= 8 && SLOTS >= GROUPS && Pass::CHUNKS >= kChunks);
  static_assert(Pass::COPY_REGISTERS + GROUPS * Pass::REGISTERS <= kAllRegisters<GROUPS + 1>);

  const u32 memory, mixed;
  const Ring<SLOTS, kSlab> ring;  // of G's
  const Ring<Pass::CHUNKS, kChunkBytes> chunks;  // of X's
  const u32 units;  // of this block

  DEVICE PairMixedBackward(const Params& given)
      : Products(given, shared_address(shared_memory) + kBarrierBytes), memory(shared_address(shared_memory)),
        mixed(memory + kBarrierBytes + (2 + GROUPS) * kSlab), ring{mixed + kMixed, memory},
        chunks{ring.at(SLOTS), ring.full(2 * SLOTS)},
        units(u32((given.batch * Pass::UNITS_PER_SAMPLE + gridDim.x - 1 - blockIdx.x) / gridDim.x)) {}

  DEVICE i64 unit(u32 position) const { return blockIdx.x + i64(position) * gridDim.x; }
  static DEVICE int rows_of(int chunk) { return min(kChunk, P0 - chunk * kChunk); }
  // A piece of X, and of Z, dZ or dX, whose slab begins as many rows behind a multiple of 1024 as there are before it.
  DEVICE u32 place_of_x(u32 chunk, int p, int row, int piece) const {
    return chunks.at(chunk) + p * kPitch + (row * kRow + piece) * 16;
  }
  DEVICE u32 place_of_z(int q, int row, int piece) const { return mixed + q * kSlab + swizzled(row + q, piece); }

  DEVICE void run() {
    ring.init(kCopiers, 4);
    chunks.init(1, kWarps);
    if (threadIdx.x < 4) store_shared(memory + kZeros + threadIdx.x * 4, 0u);
    for (int at = threadIdx.x * 16; at < kMixed; at += kThreads * 16) store_u32x4(mixed + at, {});
    ROLL for (int slot = 0; slot < SLOTS; ++slot) Products::template clear_padding<Q0, Q1, kThreads>(ring.at(slot));
    fence_copy_engine();
    __syncthreads();
    part_ways<GROUPS, Pass::REGISTERS, Pass::COPY_REGISTERS>(warpgroup, [&] { consume(); }, [&] { produce(); });
  }
  DEVICE void produce() const {
    if (threadIdx.x >= kConsumers + 32)
      copy_g();
    else if (threadIdx.x == kConsumers)
      copy_x();
  }

  DEVICE void copy_x() const {
    ROLL for (u32 number = 0; number < units * kChunks; ++number) {
      const int chunk = number % kChunks, at = number % Pass::CHUNKS;
      const u32 bytes = rows_of(chunk) * P1 * 2;
      const Element* from = static_cast<const Element*>(params.x) + unit(number / kChunks) * kX + chunk * (kChunk * P1);
      chunks.wait_until_empty(number);
      expect_bytes(chunks.full(at), P * bytes);
      ROLL for (int p = 0; p < P; ++p) load_run(place_of_x(at, p, 0, 0), from + p * (P0 * P1), bytes, chunks.full(at));
    }
  }
  DEVICE void copy_g() const {
    const auto* g = static_cast<const Element*>(params.weights[Pass::GRAD]);
    ROLL for (u32 position = 0; position < units * Q; ++position) {
      const u32 slot = position % SLOTS;
      ring.wait_until_empty(position);
      Products::template copy<Q0, Q1, kCopiers>(
          g + (unit(position / Q) * Q + position % Q) * (Q0 * Q1), ring.at(slot));
      arrive_with_copies(ring.full(slot));
    }
  }

  DEVICE void consume() {
    const float normal_a = Pass::normal_a(params), normal_b = Pass::normal_b(params), normal_m = Pass::normal_m(params);
    Products::load_weights(normal_a, normal_b);
    const float scale_a = 1 / normal_a, scale_b = 1 / normal_b;
    typename Products::SumsA d_a[1] = {};
    typename Products::SumsB d_b[1] = {};
    float d_m[1][4] = {};
    ROLL for (u32 position = 0; position < units; ++position) {
      settle_places();
      mix(position, normal_m);
      fence_copy_engine();
      sync_consumers<kConsumers>();
      int q = warpgroup;
      ROLL for (; q < Q; q += GROUPS) {
        settle_places();
        const u32 number = position * Q + q, slot = number % SLOTS;
        ring.wait_until_full(number);
        fence_copy_engine();
        typename Products::SumsB d_z;
        Products::visit(mixed + q * (kSlab + 128), ring.at(slot), scale_a, scale_b, d_a, d_b, d_z);
        ring.release(slot, lane.index);
        sync_warpgroup(warpgroup);  // dT and Z have been read
        UNROLL for (int j = 0; j < Products::kP1 / 2; j += 2) {
          const int row = first + lane.g + j / 2 % 2 * 8;
          if ((P0 == 64 || row < P0) && j / 4 < kRow)
            store_shared(place_of_z(q, row, j / 4) + lane.t * 4, Pair<Element>(d_z[j], d_z[j + 1]).bits);
        }
      }
      meet_as_others<Q % GROUPS ? GROUPS : 1>(q - warpgroup, Q, 2, [&] { sync_warpgroup(warpgroup); });
      settle_places();
      sync_consumers<kConsumers>();
      give_back(position, d_m[0], normal_m);
    }
    float* sums = static_cast<float*>(params.sums) + i64(blockIdx.x) * kSums;
    add_up<1, kConsumers, 32, kMixed, float>(
        mixed, [&](int n) -> const float(&)[4] { return d_m[n]; },
        [&](int, int index, const float(&sum)[4]) {
          const Lane at(index);
          UNROLL for (int i = 0; i < 2; ++i)
            if (at.g < Q && at.t * 2 + i < P) store_global(sums + at.g * P + at.t * 2 + i, sum[i]);
        },
        [] { sync_consumers<kConsumers>(); });
    store_sums<Pass, kConsumers, kMixed>(mixed, {sums + Q * P, 0}, d_a[0], d_b[0]);
  }

  // Or all places are kept from unit to unit, and spilled.
  DEVICE void settle_places() {
    stay_here(lane.index, first), stay_here(d_t, first);
    lane = Lane(lane.index);
  }
  // Not kept from unit to unit: sums and operands of products fill the registers.
  DEVICE float weight(int q, int p, float normal_m) const {
    return q < Q && p < P ? normal_m * Pass::weight_m(params, q, p) : 0.f;
  }
  // Whether there is that row of a chunk
  static DEVICE bool has(int chunk, int row) {
    return (kChunk % kWarps == 0 || row < kChunk) && (P0 % kChunk == 0 || chunk * kChunk + row < P0);
  }
  // A piece of X of the lane's state: zeros where there is none, and behind a row's end.
  DEVICE u32 x_or_zeros(u32 at, int row, int piece) const {
    const int p = lane.index % 8;
    return (P == 8 || p < P) && (kRow == 8 || piece < kRow) ? place_of_x(at, p, row, piece) : memory + kZeros;
  }
  // A warp's rows of X mixed.
  DEVICE void mix(u32 position, float normal_m) const {
    const u32 weights = mixing_weights<Element>(lane, [&](int q, int p) { return weight(q, p, normal_m); });
    const int warp = threadIdx.x / 32;
    ROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
      const u32 number = position * kChunks + chunk, at = number % Pass::CHUNKS;
      chunks.wait_until_full(number);
      u32 columns[kRows][2][4], mixtures[4];
      UNROLL for (int i = 0; i < kRows; ++i)
        UNROLL for (int half = 0; half < 2; ++half)
          if (has(chunk, warp + i * kWarps))
            load_matrices<true>(columns[i][half], x_or_zeros(at, warp + i * kWarps, half * 4 + lane.index / 8));
      UNROLL for (int i = 0; i < kRows; ++i)
        UNROLL for (int half = 0; half < 2; ++half)
          if (has(chunk, warp + i * kWarps)) {
            mix_columns<Element>(mixtures, columns[i][half], weights, 1 / normal_m);
            store_matrices_transposed(
                place_of_z(lane.index % 8, chunk * kChunk + warp + i * kWarps, half * 4 + lane.index / 8), mixtures);
          }
    }
  }
  // Those rows of dZ: with X to the sums of dM, and mixed the other way to memory.
  DEVICE void give_back(u32 position, float (&d_m)[4], float normal_m) const {
    const u32 weights = mixing_weights<Element>(lane, [&](int p, int q) { return weight(q, p, normal_m); });
    const int warp = threadIdx.x / 32, state = lane.index % 8;
    Element* to = static_cast<Element*>(params.y) + unit(position) * kX;
    ROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
      const u32 at = (position * kChunks + chunk) % Pass::CHUNKS;
      u32 columns[kRows][2][4], mixtures[4];
      float sums[kRows][4] = {};
      UNROLL for (int i = 0; i < kRows; ++i)
        if (has(chunk, warp + i * kWarps))
          UNROLL for (int half = 0; half < 2; ++half) {
            const int piece = half * 4 + lane.index / 8;
            const bool here = (Q == 8 || state < Q) && (kRow == 8 || piece < kRow);
            const u32 from = here ? place_of_z(state, chunk * kChunk + warp + i * kWarps, piece) : memory + kZeros;
            u32 left[4], right[4];
            load_matrices<false>(left, from);
            load_matrices<false>(right, x_or_zeros(at, warp + i * kWarps, piece));
            load_matrices<true>(columns[i][half], from);
            UNROLL for (int k = 0; k < 4; k += 2) {
              const u32 rows[4] = {left[k], 0, left[k + 1], 0}, with[2] = {right[k], right[k + 1]};
              multiply_16<Element>(sums[i], rows, with);
            }
          }
      __syncwarp();
      chunks.release(at, lane.index);
      UNROLL for (int i = 0; i < kRows; ++i)
        if (has(chunk, warp + i * kWarps))
          UNROLL for (int half = 0; half < 2; ++half) {
            mix_columns<Element>(mixtures, columns[i][half], weights, 1 / normal_m);
            store_matrices_transposed(
                place_of_z(state, chunk * kChunk + warp + i * kWarps, half * 4 + lane.index / 8), mixtures);
          }
      __syncwarp();
      UNROLL for (int i = 0; i < kRows; ++i) {
        const int row = chunk * kChunk + warp + i * kWarps;
        d_m[0] += sums[i][0], d_m[1] += sums[i][1];
        if (has(chunk, warp + i * kWarps))
          UNROLL for (int j = lane.index; j < P * kRow; j += 32)
            store_words<16>(to + j / kRow * (P0 * P1) + row * P1 + j % kRow * 8,
                            load_words<16>(place_of_z(j / kRow, row, j % kRow)));
      }
      __syncwarp();
    }
  }
};
