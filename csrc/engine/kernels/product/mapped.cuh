// A pass of one contraction as a matrix product for each group, as wide.cuh makes it, in tf32, of tensors that the copy engine
// reads by maps:
//
//     Y[m, j] = sum_k X[m, k] W[j, k]      m: samples (of tied weights: samples and outer), j: q in some order
//
// The engine rounds to tf32 what it brings, writes zeros for what lies outside of a tensor, and puts the rows of a weight
// into the order in which threads store their sums. So one thread asks for all that a block reads; x is operand A and the
// weights are B, both from shared memory. The BLOCKS of a cluster, one or two, have the same rows of x: each reads a part of
// them, for all.
//
// Each of two warpgroups has 64 rows and N columns of sums, for HELD neighbouring groups, one group after the other. Where
// groups take turns in y, element by element, they are held until the last one's sums are there: a thread has 16 bytes side
// by side, and neighbouring threads have whole sectors of L2. kernels/product/mapped.py writes the constants:
//
// By SLABS of 32 samples, in which a feature's lie side by side, eight lanes have a sector of L2.
//
// Pass:  Activation, BIAS, BIAS_INNER, P, Q, OUTER, INNER, GROUPS, FAST, NEXT, B, X_SAMPLE, Y_SAMPLE as in streamed.cuh,
//        SLABS, SPAN (tiles of rows whose blocks run side by side), N, HELD, BLOCKS, SLOTS, ROUND_Y (to tf32), MORE and FEWER (registers of
//        consumers and producers), and of the weights' map: RUN columns side by side are its two sizes behind k, LINE runs
//        the next one, of which a box has BOX; the last size counts rows of the weight, LINE_STEP from one line's first to
//        the next one's
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"

struct Maps { TensorMap x, weight; };

template <class Pass> struct Mapped {
  static constexpr int P = Pass::P, Q = Pass::Q, N = Pass::N, HELD = Pass::HELD, B = Pass::B, FAST = Pass::FAST;
  static constexpr int BLOCKS = Pass::BLOCKS, M = 128, kConsumers = 256, kSlabs = ceil_div(P, 32);
  static constexpr int kColumnTiles = ceil_div(Q, N * BLOCKS);
  static constexpr int kTiles = FAST / HELD * kColumnTiles * (Pass::GROUPS / FAST);  // of a cluster, for its rows
  static constexpr int kSlotBytes = (M + N) * 128, kWeight = M * 128;
  using Slots = Ring<Pass::SLOTS, kSlotBytes, BLOCKS>;
  using Cursor = typename Slots::Cursor;
  static constexpr int kSteps = kSlabs == 1 ? ceil_div(P, 8) : 4;  // of a slab

  struct Tile {
    i64 first;  // row
    int q, fast, slow;
  };

  const Params& params;
  const Maps& maps;
  const Slots ring;
  i64 tiles;

  DEVICE Mapped(const Params& p, const Maps& m)
      : params(p), maps(m), ring(shared_address(shared_memory) + 1023 & ~1023u) {
    tiles = (rows() + M - 1) / M * kTiles;
  }

  DEVICE i64 rows() const { return params.batch * Pass::OUTER; }
  static DEVICE int rank() { return blockIdx.y; }
  // All tiles of SPAN tiles of rows, then of the next.
  DEVICE Tile tile_of(i64 n) const {
    const i64 row_tiles = tiles / kTiles, from = n / (Pass::SPAN * kTiles) * Pass::SPAN;
    const int span = int(min(i64(Pass::SPAN), row_tiles - from)), rest = int(n - from * kTiles), tile = rest / span;
    const int further = tile / kColumnTiles;
    return {(from + rest % span) * M, (tile % kColumnTiles * BLOCKS + rank()) * N, further % (FAST / HELD) * HELD,
            further / (FAST / HELD)};
  }
  // The weight of a group, which counts (outer, inner).
  static DEVICE int weight_of(const Tile& tile, int fast) {
    if constexpr (Pass::GROUPS == 1) return 0;
    return (tile.slow * Pass::NEXT + fast % Pass::NEXT) * (FAST / Pass::NEXT) + fast / Pass::NEXT;
  }

  DEVICE void load_x(u32 to, int k, int group, i64 first, u32 full) const {
    const int part = rank() * (M / BLOCKS);
    const int at[5] = {k, group, int(first) + part, 0, 0};
    load_box_of<BLOCKS>(to + (BLOCKS > 1 ? part * 128 : 0), maps.x, at, full);
  }
  DEVICE void load_weight(u32 to, int k, int group, int q, u32 full) const {
    constexpr int kBox = Pass::RUN * Pass::BOX, kLine = Pass::RUN * Pass::LINE;
    ROLL for (int j = 0; j < N; j += kBox) {
      const int column = q + j;
      const bool here = column < Q;  // of what no line has, zeros
      const int at[5] = {k, 0, 0, here ? column % kLine / Pass::RUN : Pass::LINE,
                         group * Q + (here ? column / kLine * Pass::LINE_STEP : 0)};
      load_box(to + j * 128, maps.weight, at, full);
    }
  }
  // One thread
  DEVICE void produce() const {
    if (threadIdx.x != kConsumers) return;
    Cursor cursor{0, 1};
    for (i64 n = blockIdx.x; n < tiles; n += gridDim.x) {
      const Tile tile = tile_of(n);
      ROLL for (int h = 0; h < HELD; ++h) {
        const int group = weight_of(tile, tile.fast + h);
        ROLL for (int k = 0; k < P; k += 32) {
          const u32 to = ring.at(cursor.slot), full = ring.begin_to_fill(cursor);
          load_x(to, k, group, tile.first, full);
          load_weight(to + kWeight, k, group, tile.q, full);
          cursor.next();
        }
      }
    }
  }

  // The sums of a group.
  DEVICE void add_up(float (&sum)[N / 2], Cursor& cursor) const {
    const int warpgroup = uniform(threadIdx.x / 128);
    int last = 0;
    ROLL for (int slab = 0; slab < kSlabs; ++slab) {
      ring.wait_until_full(cursor);
      const u32 from = ring.at(cursor.slot);
      const u64 left = operand(from + warpgroup * 8192), right = operand(from + kWeight);
      ask_for_products<kSteps>([&](int step) {
        Wgmma<float, N>::multiply(sum, left + 2 * step, right + 2 * step, slab > 0 || step > 0);
      });
      if (slab > 0) {
        wait_for_products<1>();
        ring.release(last);
      }
      last = cursor.slot;
      cursor.next();
    }
    wait_for_products<0>();
    touch(sum);
    ring.release(last);
  }

  // Row and column of this thread's i-th sum of a tile: what the weights' map makes of column 8 n + 2 t + e of the products.
  static DEVICE int row(int half) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8; }
  static DEVICE int column(int i) {
    const int t = threadIdx.x % 4, n = i / 4, e = i % 2;
    if constexpr (HELD == 1) return n / 2 * 16 + t * 4 + e * 2 + n % 2;
    return HELD == 2 ? n * 8 + t * 2 + e : n * 8 + e * 4 + t;
  }
  // Feature of a result, without OUTER.
  static DEVICE i64 feature(const Tile& tile, int j, int fast) {
    if constexpr (FAST == 1) return i64(tile.slow) * Q + j;
    return i64(tile.slow) * FAST * Q + (i64(j / B) * FAST + fast) * B + j % B;
  }
  static DEVICE i64 place(i64 row) {
    if constexpr (Pass::OUTER == 1) return row * Pass::Y_SAMPLE;
    return row * Q;
  }
  static_assert(!Pass::SLABS || (HELD == 1 && FAST == 1 && Pass::OUTER == 1));
  static_assert(Pass::OUTER == 1 || Pass::Y_SAMPLE == i64(Pass::OUTER) * Q, "rows of y lie evenly");

  // A sum with bias and activation, rounded.
  DEVICE u32 finished(float sum, const Tile& tile, i64 r, int j, int fast) const {
    const typename Pass::Activation activation(params);
    if constexpr (Pass::BIAS) {
      constexpr int kInner = Pass::BIAS_INNER;
      const i64 at = kInner > 1 ? (i64(fast) / kInner * Q + j) * kInner + fast % kInner
                                : r % Pass::OUTER * Q + feature(tile, j, fast);
      if (j < Q) sum += static_cast<const float*>(params.bias)[at];
    }
    const u32 y = __float_as_uint(activation.of(sum));
    return Pass::ROUND_Y ? tf32_of(y) : y;
  }
  // 16 bytes that lie side by side in y, of a row: those of sum i's column and, if it has more of them, the ones behind it.
  DEVICE void cell(u32 (&words)[4], const float (&sum)[HELD][N / 2], const Tile& tile, i64 r, int i, int group) const {
    UNROLL for (int w = 0; w < 4; ++w) {
      const int at = HELD == 1 ? i + w % 2 * 4 + w / 2 : HELD == 2 ? i + w / 2 : i;
      const int h = HELD == 1 ? 0 : HELD == 2 ? w % 2 : group + w;
      words[w] = finished(sum[h][at], tile, r, tile.q + column(at), tile.fast + h);
    }
  }
  // What lies side by side in y from sum i's column on, of row r.
  DEVICE void store_cells(const float (&sum)[HELD][N / 2], const Tile& tile, i64 r, int i) const {
    float* y = static_cast<float*>(params.y) + place(r);
    const int j = tile.q + column(i);
    const bool here = r < rows() && (Q % (N * BLOCKS) == 0 || j < Q);
    u32 words[4];
    cell(words, sum, tile, r, i, 0);
    if constexpr (Pass::SLABS) {
      const i64 feature = i64(tile.slow / Pass::INNER * Q + j) * Pass::INNER + tile.slow % Pass::INNER;
      float* to = static_cast<float*>(params.y) + (r / 32 * Pass::Y_SAMPLE + feature) * 32 + r % 32;
      UNROLL for (int w = 0; w < 4; ++w)
        if (here) store_global(to + w * (Pass::INNER * 32), __uint_as_float(words[w]));
    } else if constexpr (HELD == 8) {
      // Two cells, which make a sector: neighbours store one of them together, and then the other.
      const int odd = threadIdx.x & 1;
      u32 further[4];
      cell(further, sum, tile, r, i, 4);
      UNROLL for (int w = 0; w < 4; ++w) {
        const u32 given = __shfl_xor_sync(0xffffffff, odd ? words[w] : further[w], 1);
        words[w] = odd ? given : words[w];
        further[w] = odd ? further[w] : given;
      }
      if (here) store_global<16>(y + feature(tile, j - odd + 1, tile.fast + odd * 4), further);
      if (here) store_global<16>(y + feature(tile, j - odd, tile.fast + odd * 4), words);
    } else {
      if (here) store_global<16>(y + feature(tile, j, tile.fast), words);
    }
  }
  // Of eight sums 0, 1, 4 and 5 are one row's, and the others that of the row 8 below: they are in one cell, two or four.
  DEVICE void store(const float (&sum)[HELD][N / 2], const Tile& tile) const {
    UNROLL for (int n = 0; n < N / 2; n += HELD == 1 ? 8 : 4) {
      UNROLL for (int e = 0; e < (HELD > 2 ? 2 : 1); ++e) {
        store_cells(sum, tile, tile.first + row(0), n + e);
        store_cells(sum, tile, tile.first + row(1), n + e + 2);
      }
    }
  }

  DEVICE void consume() const {
    Cursor cursor{0, 0};
    float sum[HELD][N / 2];
    for (i64 n = blockIdx.x; n < tiles; n += gridDim.x) {
      UNROLL for (int h = 0; h < HELD; ++h) add_up(sum[h], cursor);
      store(sum, tile_of(n));
    }
  }

  DEVICE void run() const {
    ring.init(1, kConsumers / 32 * BLOCKS);
    fence_copy_engine();
    __syncthreads();
    if constexpr (BLOCKS > 1) sync_cluster();
    part_ways<kConsumers, Pass::MORE, Pass::FEWER>([&] { consume(); }, [&] { produce(); });
    if constexpr (BLOCKS > 1) sync_cluster();  // the others may still tell this one's producer, or write here
  }
};
