// A pass of one tied contraction with something behind its mode, in 16 bits on sm_90a, of a state that the copy engine reads by a
// map:
//
//     Y[r, q, i] = activation(sum_p W[q, p] X[r, p, i] + bias)      r: samples and outer, i: behind the mode
//
// The weight is operand A, k contiguous, and stays in shared memory for all tiles of a block, padded with zeros. X is B as it lies:
// what is behind the mode goes along its rows, which the matrix unit turns. The engine writes zeros for p's and columns that there
// are not. One thread asks for tiles, all p's of N columns of one row r, which GROUPS of DOWN warpgroups take in turns: one group
// multiplies while another one stores. Each warpgroup has 64 q's, or several times as many (PARTS). Sums leave by way of shared
// memory, a warp's 16 q's by 64 columns at once.
//
// Of a sum of products either a block has all terms' weights, and adds up what these make of the states of a tile, or makes a state
// of each; or it has one term. Blocks along y share q's, and terms where each has one. kernels/product/mapped_columns.py writes the
// constants:
//
// Pass:  Element, Activation, BIAS, P, Q, INNER, OUTER, N, GROUPS, DOWN, PARTS, SLOTS, MORE and FEWER (registers of consumers and
//        producers); RANK and TERMS (of the sum, and those that a block has), SUMMED (it adds these up), X_TERMS and Y_TERMS (whether
//        X and Y have a state for each term); weight_w(params, q, p, term), TURNED if that takes p and q the other way round,
//        FACTOR_W (the parameter that it is, or -1 where it is a product) and normal_w (what such a product is multiplied by)
#pragma once
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "multiply/wgmma.cuh"
#include "multiply/mma.cuh"
#include "move/ring.cuh"

struct Maps { TensorMap x; };

template <class Pass> struct MappedColumns {
  using Element = typename Pass::Element;
  static constexpr int P = Pass::P, Q = Pass::Q, INNER = Pass::INNER, N = Pass::N, PARTS = Pass::PARTS, TERMS = Pass::TERMS;
  static constexpr int GROUPS = Pass::GROUPS, DOWN = Pass::DOWN, kConsumers = 128 * GROUPS * DOWN, kThreads = kConsumers + 128;
  static constexpr int kP = round_up(P, 16), kChunks = ceil_div(INNER, N);
  static constexpr int kColumns = kP * 128, kSlotBytes = ceil_div(N, 64) * kColumns;  // of 64 columns, and of a tile
  static constexpr int M = 64 * DOWN * PARTS, kTilesQ = ceil_div(Q, M);
  // A slab has the q's that there are: sums of others are of whatever lies behind it, and stored nowhere.
  static constexpr int kRows = M < Q ? M : round_up(Q, 8), kSlab = kRows * 128, kWeight = (ceil_div(P, 64) - 1) * kSlab + M * 128;
  static constexpr int kHeld = Pass::X_TERMS ? TERMS : 1;  // slots of a tile
  static constexpr int kScaleBytes = round_up(TERMS * 4, 16), kStagedBytes = 16 * 128;  // of all terms, and of a warp
  static constexpr bool kOneTerm = Pass::RANK > TERMS;
  static constexpr bool kScaled = Pass::FACTOR_W < 0 && is_same<Element, f16>;
  static_assert(N % 64 == 0 || kChunks == 1);
  static_assert(Pass::SLOTS % (GROUPS * kHeld) == 0, "a group has slots of its own: others may be full before those ahead of them");
  using Slots = Ring<Pass::SLOTS, kSlotBytes>;
  using Cursor = typename Slots::Cursor;
  using Sums = float[PARTS][N / 2];

  struct Tile {
    i64 row;
    int column;
  };

  const Params& params;
  const Maps& maps;
  const u32 weights;
  const Slots ring;
  const u32 scales, staged;  // of each term's weight, and where a warp puts sums down
  const int q, term;  // a block's first ones
  const i64 rows, tiles;

  DEVICE MappedColumns(const Params& p, const Maps& m)
      : params(p), maps(m), weights(shared_address(shared_memory) + 1023 & ~1023u), ring(weights + TERMS * kWeight),
        scales(ring.at(Pass::SLOTS) + Slots::kBarrierBytes), staged(scales + kScaleBytes + threadIdx.x / 32 * kStagedBytes),
        q(blockIdx.y % kTilesQ * M), term(kOneTerm ? blockIdx.y / kTilesQ : 0), rows(p.batch * Pass::OUTER), tiles(rows * kChunks) {}

  DEVICE Tile tile_of(i64 tile) const { return {tile / kChunks, int(tile % kChunks) * N}; }

  // To shared memory, by all threads
  DEVICE void load_weight(int t) const {
    const u32 to = weights + t * kWeight;
    const auto place = [&](int row, int p) { return to + p / 64 * kSlab + swizzled(row, p % 64 / 8) + p % 8 * 2; };
    if constexpr (Pass::FACTOR_W >= 0 && !Pass::TURNED && P % 8 == 0) {
      const Element* weight = static_cast<const Element*>(params.weights[Pass::FACTOR_W]) + (term + t) * (Q * P);
      constexpr int kPieces = kP / 8;
      UNROLL_BY(4) for (int j = threadIdx.x; j < kRows * kPieces; j += kThreads) {
        const int row = j / kPieces, p = j % kPieces * 8;
        const bool present = q + row < Q && p < P;
        copy_async<16>(place(row, p), weight + (present ? (q + row) * P + p : 0), present);
      }
    } else {
      float scale = 1;
      if constexpr (kScaled) {
        scale = Pass::normal_w(params, term + t);
        if (threadIdx.x == 0) store_shared(scales + t * 4, scale);
      }
      const auto at = [&](int row, int p) {
        const int of = min(q + row, Q - 1);
        return narrow<Element>(scale * (Pass::TURNED ? Pass::weight_w(params, p, of, term + t) : Pass::weight_w(params, of, p, term + t)));
      };
      make_weight<Element, kRows, P, kRows, kP, kThreads, 16, Pass::TURNED>(
          at, [&](int row, int p, Element x) { store_shared(place(row, p), q + row < Q ? x : Element{}); });
    }
  }

  // What a product of weights in fp16 has been multiplied by, a power of two
  DEVICE float scale_of(int t) const { return __uint_as_float(load_u32(scales + t * 4)); }

  // One thread
  DEVICE void produce() const {
    if (threadIdx.x != kConsumers) return;
    Cursor cursor{0, 1};
    ROLL for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const auto [row, column] = tile_of(tile);
      ROLL for (int t = 0; t < kHeld; ++t) {
        const u32 to = ring.at(cursor.slot), full = ring.begin_to_fill(cursor);
        const i64 of = row + (Pass::X_TERMS ? (term + t) * rows : 0);
        UNROLL for (int c = 0; c < N; c += 64) {
          const int at[5] = {column + c, 0, int(of), 0, 0};
          load_box(to + c / 64 * kColumns, maps.x, at, full);
        }
        cursor.next();
      }
    }
  }

  // Of a warpgroup's q's, with a tile in a slot and term t's weight
  DEVICE void multiply(Sums& sums, u32 slot, int down, int t, bool add) const {
    const u32 left = weights + t * kWeight + down * 8192;
    ask_for_products<kP / 16>([&](int step) {
      UNROLL for (int part = 0; part < PARTS; ++part)
        Wgmma<Element, N>::multiply_right_turned(sums[part], operand(left + part * (DOWN * 8192) + step / 4 * kSlab) + step % 4 * 2,
                                                 turned_operand(slot, kColumns) + 128 * step, add || step > 0);
    });
    wait_for_products<0>();
    UNROLL for (int part = 0; part < PARTS; ++part) touch(sums[part]);
  }

  // A lane's four pieces of 16 bytes of 16 q's by 64 columns: where each is put down and belongs in a state, and whether it is there
  template <class Do> DEVICE void each_piece(int first, int column, const Do& act) const {
    UNROLL for (int j = 0; j < 4; ++j) {
      const int behind = j * 4 + threadIdx.x % 32 / 8, piece = threadIdx.x % 8, at = column + piece * 8;
      act(j, staged + swizzled(behind, piece), (first + behind) * INNER + at, first + behind < Q && at < INNER);
    }
  }
  // The sums of 16 q's from `first` on, of N columns from `column` on; those of one state are `t`'s.
  DEVICE void store(const float (&sums)[N / 2], i64 row, int first, int column, int t) const {
    const typename Pass::Activation activation(params);
    const u32 row_of_lane = threadIdx.x % 16;  // of what matrices are put down by
    const float back = kScaled ? 1 / scale_of(t) : 1.f;
    const Element* const bias = static_cast<const Element*>(params.bias) + row % Pass::OUTER * (Q * INNER);
    Element* const y = static_cast<Element*>(params.y) + ((Pass::Y_TERMS ? (term + t) * rows : 0) + row) * i64(Q * INNER);
    UNROLL for (int c = 0; c < N; c += 64) {
      constexpr int kEights = N / 8;
      u32 beside[8][2] = {};
      if constexpr (Pass::BIAS) {  // as memory has it to where sums will be, which hands it out as sums are
        u32 words[4][4];
        each_piece(first, column + c, [&](int j, u32, int place, bool present) {
          load_global(bias + (present ? place : 0), words[j], present);
        });
        each_piece(first, column + c, [&](int j, u32 to, int, bool) { store_u32x4(to, words[j]); });
        __syncwarp();
        UNROLL for (int n = 0; n < 8 && c / 8 + n < kEights; ++n)
          load_matrices<false>(beside[n], staged + swizzled(row_of_lane, n));
        __syncwarp();
      }
      UNROLL for (int n = c / 8; n < min(c / 8 + 8, kEights); ++n) {
        u32 words[2];
        UNROLL for (int half = 0; half < 2; ++half) {
          float x[2] = {sums[n * 4 + half * 2], sums[n * 4 + half * 2 + 1]};
          if constexpr (kScaled) x[0] *= back, x[1] *= back;
          if constexpr (Pass::BIAS)
            UNROLL for (int i = 0; i < 2; ++i) x[i] += number_of<Element>(&beside[n % 8][half], i);
          words[half] = Pair<Element>(activation.of(x[0]), activation.of(x[1])).bits;
        }
        store_matrices<false>(staged + swizzled(row_of_lane, n % 8), words);
      }
      __syncwarp();
      each_piece(first, column + c, [&](int, u32 from, int place, bool present) {
        if (present) store_words<16>(y + place, load_words<16>(from));
      });
      __syncwarp();
    }
  }

  DEVICE void consume() const {
    const int warpgroup = uniform(threadIdx.x / 128), down = warpgroup % DOWN, group = warpgroup / DOWN;
    const int first = q + down * 64 + threadIdx.x % 128 / 32 * 16;
    Cursor cursor{group * kHeld, 0};
    Sums sums;
    ROLL for (i64 tile = blockIdx.x + i64(group) * gridDim.x; tile < tiles; tile += i64(GROUPS) * gridDim.x) {
      const auto [row, column] = tile_of(tile);
      ROLL for (int t = 0; t < TERMS; ++t) {
        const bool last = t == TERMS - 1;
        if (t == 0 || kHeld > 1) ring.wait_until_full(cursor);
        if constexpr (Pass::SUMMED && kScaled)
          if (t > 0) UNROLL for (int part = 0; part < PARTS; ++part) scale_sums(sums[part], scale_of(t) / scale_of(t - 1));
        multiply(sums, ring.at(cursor.slot), down, t, Pass::SUMMED && t > 0);
        if (last || kHeld > 1) {
          ring.release(cursor.slot);
          cursor.next();
        }
        if (last || !Pass::SUMMED)
          UNROLL for (int part = 0; part < PARTS; ++part)
            store(sums[part], row, first + part * (DOWN * 64), column, t);
      }
      cursor.skip((GROUPS - 1) * kHeld);
    }
  }

  DEVICE void run() const {
    ring.init(1, DOWN * 4);
    ROLL for (int t = 0; t < TERMS; ++t) load_weight(t);
    commit_copies();
    wait_for_copies<0>();
    fence_copy_engine();
    __syncthreads();
    part_ways<kConsumers, Pass::MORE, Pass::FEWER>([&] { consume(); }, [&] { produce(); });
  }
};
