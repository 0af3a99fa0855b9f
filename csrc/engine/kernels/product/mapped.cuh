// A pass of one contraction as a matrix product for each group, as wide.cuh makes it, in tf32 and 16 bits, of tensors that the
// copy engine reads by maps:
//
//     Y[m, j] = sum_k X[m, k] W[j, k]      m: samples (of tied weights: samples and outer), j: q in some order
//
// The engine rounds to tf32 what it brings of floats, writes zeros for what lies outside of a tensor, and puts the rows of a weight
// into the order in which threads store their sums. So one thread asks for all that a block reads; x is operand A and the
// weights are B, both from shared memory. Of a cluster's two blocks, ACROSS have the same rows of x, or DOWN the same columns:
// each reads a part of what is the same, for both.
//
// Each of CONSUMERS warpgroups has 64 rows, or twice as many (PARTS), and N columns of sums, for HELD neighbouring groups, one group
// after the other. Where groups take turns in y, element by element, they are held until the last one's sums are there: a thread
// has 16 bytes side by side, and neighbouring threads have whole sectors of L2. By SLABS of 32 samples, in which a feature's lie
// side by side, eight lanes have a sector of L2. kernels/product/mapped.py writes the constants:
//
// Pass:  Element, Activation, BIAS, BIAS_INNER, P, Q, OUTER, INNER, GROUPS, FAST, NEXT, B, X_SAMPLE, Y_SAMPLE as in streamed.cuh,
//        SLABS, SPAN (tiles of rows whose blocks run side by side), FROM_LAST (the last tiles come first), CONSUMERS, PARTS, N,
//        HELD, EACH (columns side by side that neighbouring products' sums are), ACROSS, DOWN, SLOTS, ROUND_Y (to tf32), MORE and FEWER
//        (registers of consumers and producers), SCALED (floats in params.sums before what a prepared weight is multiplied by
//        and what takes it back, or -1), and of the weights' map: RUN columns side by side are its two sizes behind k, LINE
//        runs the next one, of which a box has BOX; the last size counts rows of the weight, LINE_STEP from one line's first
//        to the next one's. APART: all of a group's columns lie side by side, and its last tile begins where it ends with them
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"

struct Maps { TensorMap x, weight; };

template <class Pass> struct Mapped {
  static constexpr int P = Pass::P, Q = Pass::Q, N = Pass::N, HELD = Pass::HELD, B = Pass::B, FAST = Pass::FAST;
  using Element = typename Pass::Element;
  static constexpr int kSize = sizeof(Element), EACH = Pass::EACH, BK = 128 / kSize;
  static constexpr int ACROSS = Pass::ACROSS, DOWN = Pass::DOWN, BLOCKS = ACROSS * DOWN, PARTS = Pass::PARTS;
  static constexpr int kConsumers = 128 * Pass::CONSUMERS, kPart = 64 * Pass::CONSUMERS, M = kPart * PARTS, kSlabs = ceil_div(P, BK);
  static constexpr int kColumnTiles = ceil_div(Q, N * ACROSS);
  static constexpr int kTiles = FAST / HELD * kColumnTiles * (Pass::GROUPS / FAST);  // of a cluster, for its rows
  static constexpr int kSlotBytes = (M + N) * 128, kWeight = M * 128;
  using Slots = Ring<Pass::SLOTS, kSlotBytes, BLOCKS>;
  using Cursor = typename Slots::Cursor;
  static constexpr int kLastSteps = ceil_div((P - (kSlabs - 1) * BK) * kSize, 32);  // of 4 of a slab

  struct Tile {
    i64 first;  // row
    int own, q, fast, slow;  // the first column that is its own, and that it has
  };

  const Params& params;
  const Maps& maps;
  const Slots ring;
  i64 tiles;

  DEVICE Mapped(const Params& p, const Maps& m)
      : params(p), maps(m), ring(shared_address(shared_memory) + 1023 & ~1023u) {
    tiles = (rows() + M * DOWN - 1) / (M * DOWN) * kTiles;
  }

  DEVICE i64 rows() const { return params.batch * Pass::OUTER; }
  static DEVICE int rank() { return blockIdx.y; }
  // All tiles of SPAN tiles of rows, then of the next.
  DEVICE Tile tile_of(i64 number) const {
    const i64 n = Pass::FROM_LAST ? tiles - 1 - number : number;  // L2 still has what the pass before has made last
    const i64 row_tiles = tiles / kTiles, from = n / (Pass::SPAN * kTiles) * Pass::SPAN;
    const int span = int(min(i64(Pass::SPAN), row_tiles - from)), rest = int(n - from * kTiles), tile = rest / span;
    const int further = tile / kColumnTiles, q = (tile % kColumnTiles * ACROSS + (ACROSS > 1 ? rank() : 0)) * N;
    return {((from + rest % span) * DOWN + (DOWN > 1 ? rank() : 0)) * M, q, Pass::APART ? min(q, Q - N) : q, further % (FAST / HELD) * HELD,
            further / (FAST / HELD)};
  }
  // The weight of a group, which counts (outer, inner).
  static DEVICE int weight_of(const Tile& tile, int fast) {
    if constexpr (Pass::GROUPS == 1) return 0;
    return (tile.slow * Pass::NEXT + fast % Pass::NEXT) * (FAST / Pass::NEXT) + fast / Pass::NEXT;
  }

  DEVICE void load_x(u32 to, int k, int group, i64 first, u32 full) const {
    const int part = ACROSS > 1 ? rank() * (M / ACROSS) : 0;
    const int at[5] = {k, group, int(first) + part, 0, 0};
    load_box_of<ACROSS>(to + part * 128, maps.x, at, full);
  }
  DEVICE void load_weight(u32 to, int k, int group, int q, u32 full) const {
    if constexpr (Pass::APART) {
      const int part = DOWN > 1 ? rank() * (N / DOWN) : 0;
      const int at[5] = {k, 0, 0, part / Pass::RUN, group * Q + q};
      load_box_of<DOWN>(to + part * 128, maps.weight, at, full);
    } else {
      constexpr int kBox = Pass::RUN * Pass::BOX, kLine = Pass::RUN * Pass::LINE;
      ROLL for (int j = 0; j < N; j += kBox) {
        const int column = q + j;
        const bool here = column < Q;  // of what no line has, zeros
        const int at[5] = {k, 0, 0, here ? column % kLine / Pass::RUN : Pass::LINE,
                           group * Q + (here ? column / kLine * Pass::LINE_STEP : 0)};
        load_box(to + j * 128, maps.weight, at, full);
      }
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
        ROLL for (int k = 0; k < P; k += BK) {
          const u32 to = ring.at(cursor.slot), full = ring.begin_to_fill(cursor);
          load_x(to, k, group, tile.first, full);
          load_weight(to + kWeight, k, group, tile.q, full);
          cursor.next();
        }
      }
    }
  }

  // Products of the next slab; the one taken before is free when they are asked for.
  using Sums = float[PARTS][HELD][N / 2];
  template <int STEPS> DEVICE void take_slab(Sums& sums, int held, Cursor& cursor, int& last, bool add) const {
    ring.wait_until_full(cursor);
    const u32 from = ring.at(cursor.slot);
    const u64 left = operand(from + uniform(threadIdx.x / 128) * 8192), right = operand(from + kWeight);
    ask_for_products<STEPS>([&](int step) {
      UNROLL for (int part = 0; part < PARTS; ++part)
        Wgmma<Element, N>::multiply(sums[part][held], left + part * (kPart * 8) + 2 * step, right + 2 * step, add || step > 0);
    });
    if (add) {
      wait_for_products<1>();
      ring.release(last);
    }
    last = cursor.slot;
    cursor.next();
  }
  // The sums of a group.
  DEVICE void add_up(Sums& sums, int held, Cursor& cursor) const {
    int last = 0;
    ROLL for (int slab = 0; slab < kSlabs - 1; ++slab) take_slab<4>(sums, held, cursor, last, slab > 0);
    take_slab<kLastSteps>(sums, held, cursor, last, kSlabs > 1);
    wait_for_products<0>();
    UNROLL for (int part = 0; part < PARTS; ++part) touch(sums[part][held]);
    ring.release(last);
    if constexpr (Pass::SCALED >= 0)
      UNROLL for (int part = 0; part < PARTS; ++part)
        scale_sums(sums[part][held], static_cast<const float*>(params.sums)[Pass::SCALED + 1]);
  }

  // Row and column of this thread's i-th sum of a tile: what the weights' map makes of column 8 n + 2 t + e of the products.
  static DEVICE int row(int half) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8; }
  static DEVICE int column(int i) {
    const int t = threadIdx.x % 4, n = i / 4, e = i % 2;
    if constexpr (HELD == 1) return n / EACH * (8 * EACH) + (t * 2 + e) * EACH + n % EACH;
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

  // What lies side by side in y, of a row: the number at sum i's column, and those behind it, in 16 bytes, or 8.
  static constexpr int kNumbers = 2 * EACH, kWords = kNumbers * kSize / 4;
  // Of number c, which of HELD groups' sums it is, and where among these
  static constexpr DEVICE int group_of(int c) { return HELD == 1 ? 0 : HELD == 2 ? c % 2 : c; }
  static constexpr DEVICE int sum_of(int c) { return HELD == 1 ? c % EACH * 4 + c / EACH : HELD == 2 ? c / 2 : 0; }
  // With bias and activation, rounded
  DEVICE void cell(u32 (&words)[kWords], const float (&sum)[HELD][N / 2], const Tile& tile, i64 r, int i, int group) const {
    const typename Pass::Activation activation(params);
    const int j = tile.q + column(i), fast = tile.fast + group;
    float y[kNumbers];
    UNROLL for (int c = 0; c < kNumbers; ++c) y[c] = sum[group + group_of(c)][i + sum_of(c)];
    if constexpr (Pass::BIAS) {
      const Element* bias = static_cast<const Element*>(params.bias);
      u32 word[kWords];
      if constexpr (Pass::BIAS_INNER > 1) {  // groups take turns in it, though not in y
        static_assert(HELD == 1);
        bias += fast / Pass::BIAS_INNER * Q * Pass::BIAS_INNER + fast % Pass::BIAS_INNER;
        UNROLL for (int c = 0; c < kNumbers; ++c) {
          u32 one[1];
          load_global<kSize>(bias + (j + c) * Pass::BIAS_INNER, one, j < Q);
          y[c] += number_of<Element>(one, 0);
        }
      } else {
        load_global<kWords * 4>(bias + r % Pass::OUTER * Q + feature(tile, j, fast), word, j < Q);
        UNROLL for (int c = 0; c < kNumbers; ++c) y[c] += number_of<Element>(word, c);
      }
    }
    UNROLL for (float& x : y) x = activation.of(x);
    UNROLL for (int w = 0; w < kWords; ++w) {
      if constexpr (kSize == 2)
        words[w] = Pair<Element>(y[2 * w], y[2 * w + 1]).bits;
      else
        words[w] = Pass::ROUND_Y ? tf32_of(__float_as_uint(y[w])) : __float_as_uint(y[w]);
    }
  }
  // What lies side by side in y from sum i's column on, of row r.
  DEVICE void store_cells(const float (&sum)[HELD][N / 2], const Tile& tile, i64 r, int i) const {
    Element* y = static_cast<Element*>(params.y) + place(r);
    const int j = tile.q + column(i);
    const bool here = r < rows() && (Q % (N * ACROSS) == 0 || (Pass::APART ? j >= tile.own : j < Q));
    u32 words[kWords];
    cell(words, sum, tile, r, i, 0);
    if constexpr (Pass::SLABS) {
      const i64 feature = i64(tile.slow / Pass::INNER * Q + j) * Pass::INNER + tile.slow % Pass::INNER;
      float* to = static_cast<float*>(params.y) + (r / 32 * Pass::Y_SAMPLE + feature) * 32 + r % 32;
      UNROLL for (int w = 0; w < 4; ++w)
        if (here) store_global(to + w * (Pass::INNER * 32), __uint_as_float(words[w]));
    } else if constexpr (HELD == 8) {
      // Two cells, which make a sector: neighbours store one of them together, and then the other.
      const int odd = threadIdx.x & 1;
      u32 further[kWords];
      cell(further, sum, tile, r, i, 4);
      UNROLL for (int w = 0; w < kWords; ++w) {
        const u32 given = __shfl_xor_sync(0xffffffff, odd ? words[w] : further[w], 1);
        words[w] = odd ? given : words[w];
        further[w] = odd ? further[w] : given;
      }
      if (here) store_global<16>(y + feature(tile, j - odd + 1, tile.fast + odd * 4), further);
      if (here) store_global<16>(y + feature(tile, j - odd, tile.fast + odd * 4), words);
    } else {
      if (here) store_global<kWords * 4>(y + feature(tile, j, tile.fast), words);
    }
  }
  // Of each product's four sums the first two are one row's, and the others that of the row 8 below.
  DEVICE void store(const float (&sum)[HELD][N / 2], const Tile& tile, i64 first) const {
    UNROLL for (int n = 0; n < N / 2; n += HELD == 1 ? 4 * EACH : 4) {
      UNROLL for (int e = 0; e < (HELD > 2 ? 2 : 1); ++e) {
        store_cells(sum, tile, first + row(0), n + e);
        store_cells(sum, tile, first + row(1), n + e + 2);
      }
    }
  }

  DEVICE void consume() const {
    Cursor cursor{0, 0};
    Sums sums;
    for (i64 n = blockIdx.x; n < tiles; n += gridDim.x) {
      UNROLL for (int h = 0; h < HELD; ++h) add_up(sums, h, cursor);
      const Tile tile = tile_of(n);
      UNROLL for (int part = 0; part < PARTS; ++part) store(sums[part], tile, tile.first + part * kPart);
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
