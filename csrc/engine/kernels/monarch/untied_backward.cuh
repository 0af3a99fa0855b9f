// Both gradients of an untied contraction at one visit, on sm_90a in 16 bits, where a block can have all of a group's sums, or
// those of some p's:
//
//     dW[q, p] = sum_r G[r, q] X[r, p]        dX[r, p] = sum_q G[r, q] W[q, p]        r: samples, for each group
//
// A block keeps the weights of TOGETHER groups, of N WN p's each, in shared memory, and their sums in registers, while chunks
// of 64 rows go by: the copy engine, which reads by maps, fills a ring of SLOTS with G and X, in slabs of 64 columns as they lie
// in memory. The matrix unit takes them either way: G's rows are those of dX, its columns those of dW. A group's WM x WN
// warpgroups have 64 HEIGHT q's and N p's of dW each, and share dX by columns, or, IN_TURNS, by chunks: so each reads less of
// shared memory, and others multiply while it stores. dX goes from registers to memory while the products of dW are made. Blocks
// write their sums side by side, for Reduction.
//
// With PAIRED, two blocks of a cluster give each other half of their sums once both have seen all their chunks, so that half as
// many are written. Or they have neighbouring p's of the same chunks: SHARED, each brings half of G's rows for both.
//
// Rows of X, G and dX are [groups][features]; those of dX may be another contraction's: runs of RUN p's, of which INNER
// groups take turns. q's may come in the order in which that contraction has made them: [columns][rows], which weights and
// their gradients do not have. kernels/monarch/untied_backward.py writes the constants:
//
// Pass:  Element, P, Q, GROUPS, INNER, RUN, MIXED_ROWS and MIXED_COLUMNS (Q and 1: q's are in order), TOGETHER, WM, WN, HEIGHT,
//        N, SLOTS, IN_TURNS, PAIRED, SHARED, PARTS (of so many p's as a block has: sizes of x's map; one: of all), MOST (blocks
//        for a tile), MORE and FEWER (registers of consumers and producers; 0: as they are)
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"

struct Maps { TensorMap x, grad; };

template <class Pass> struct UntiedBackward {
  using Element = typename Pass::Element;
  static constexpr int P = Pass::P, Q = Pass::Q, GROUPS = Pass::GROUPS, TOGETHER = Pass::TOGETHER;
  static constexpr int WM = Pass::WM, WN = Pass::WN, HEIGHT = Pass::HEIGHT, N = Pass::N, SLOTS = Pass::SLOTS;
  static constexpr int kShares = WM * WN, kConsumers = 128 * TOGETHER * kShares, kSlab = 64 * 128;
  static constexpr int kLeft = WM * HEIGHT, kRight = ceil_div(WN * N, 64);  // slabs of a group
  static constexpr int BP = WN * N, kTiles = ceil_div(P, BP), kShare = Pass::IN_TURNS ? BP : BP / kShares;  // columns of dX
  static constexpr int kGroup = (kLeft + kRight) * kSlab, kSlotBytes = TOGETHER * kGroup;
  static constexpr int kWeights = kLeft * kSlab;  // bytes of 64 p's
  static constexpr int kPair = Pass::PAIRED ? 2 : 1, kGiven = HEIGHT * N / 16;  // accesses of a thread
  static constexpr int kSharing = Pass::SHARED ? 2 : 1;  // blocks that have the same rows
  using Slots = Ring<SLOTS, kSlotBytes, kSharing>;
  static constexpr bool kInPairs = Pass::PAIRED || Pass::SHARED;
  static_assert(!Pass::SHARED || (!Pass::PAIRED && kTiles % 2 == 0));
  static_assert(!Pass::PAIRED || (N % 32 == 0 && kGiven * 16 * kConsumers <= SLOTS * kSlotBytes));
  static constexpr i64 kRowX = i64(P) * GROUPS, kSums = i64(GROUPS) * Q * P;
  static_assert(sizeof(Element) == 2 && Q <= kLeft * 64 && P % 8 == 0 && Q % 8 == 0 && GROUPS % TOGETHER == 0);
  static_assert(N % 16 == 0 && (WN == 1 || N % 64 == 0), "slabs belong to one warpgroup");
  static_assert(kShare % 32 == 0 && (kShare == BP || kShare == 32 || kShare % 64 == 0), "tiles by four, within slabs");
  static_assert(Pass::RUN % 16 == 0 || Pass::RUN == P, "whole sectors");

  const Params& params;
  const Maps& maps;
  const u32 memory;
  const Slots ring;
  const u32 done, got;  // of a pair: its sums may come, and are there
  const int warpgroup, chunks, blocks, block, tile, first_p, first_group;

  DEVICE UntiedBackward(const Params& given, const Maps& m)
      : params(given), maps(m), memory(shared_address(shared_memory) + 1023 & ~1023u),
        ring(memory + TOGETHER * kRight * kWeights), done(ring.full(2 * SLOTS)), got(done + 8), warpgroup(uniform(threadIdx.x / 128)),
        chunks(int((given.batch + 63) / 64)), blocks(min(int(gridDim.x), Pass::MOST) * kPair),
        block(blockIdx.x * kPair + blockIdx.y % kPair), tile(blockIdx.y / kPair), first_p(tile % kTiles * BP),
        first_group(tile / kTiles * TOGETHER) {}

  DEVICE int columns() const { return min(P - first_p, BP); }

  // From the last rows on, of which L2 still has some (wide_gradient.cuh)
  DEVICE i64 first_row(int chunk) const { return i64(chunks - 1 - chunk) * 64; }

  // Where q comes among those of a weight.
  static DEVICE int in_order(int q) { return q % Pass::MIXED_ROWS * Pass::MIXED_COLUMNS + q / Pass::MIXED_ROWS; }

  // Eight threads take the pieces of a row.
  DEVICE void copy_weights() const {
    const int row = threadIdx.x / 8, piece = threadIdx.x % 8 * 8;
    const Element* weights = static_cast<const Element*>(params.weights[0]) + first_p + piece;
    ROLL for (int group = 0; group < TOGETHER; ++group)
      UNROLL_BY(4) for (int q = row; q < kLeft * 64; q += kConsumers / 8) {
        const Element* from = weights + (i64(first_group + group) * Q + in_order(q)) * P;
        UNROLL for (int slab = 0; slab < kRight; ++slab)
          copy_async<16>(memory + (group * kRight + slab) * kWeights + swizzled(q, threadIdx.x % 8), from + slab * 64,
                         q < Q && slab * 64 + piece < columns());
      }
    commit_copies();
    wait_for_copies<0>();
    fence_copy_engine();
    sync_consumers<kConsumers>();
  }
  // One thread
  DEVICE void produce() const {
    constexpr int kRows = 64 / kSharing;
    const int rank = blockIdx.y % kSharing, part = first_p / BP;
    RingCursor<SLOTS> cursor{0, 1};
    ROLL for (int chunk = block; chunk < chunks; chunk += blocks) {
      const int row = int(first_row(chunk));
      const u32 full = ring.begin_to_fill(cursor);
      ROLL for (int group = 0; group < TOGETHER; ++group) {
        const u32 to = ring.at(cursor.slot) + group * kGroup;
        UNROLL for (int slab = 0; slab < kLeft; ++slab) {
          const int at[5] = {slab * 64, first_group + group, row + rank * kRows, 0, 0};
          load_box_of<kSharing>(to + slab * kSlab + rank * (kRows * 128), maps.grad, at, full);
        }
        UNROLL for (int slab = 0; slab < kRight; ++slab) {
          const int at[5] = {(Pass::PARTS > 1 ? 0 : first_p) + slab * 64, Pass::PARTS > 1 ? part : 0, row, first_group + group, 0};
          load_box(to + (kLeft + slab) * kSlab, maps.x, at, full);
        }
      }
      cursor.next();
    }
  }

  using Sums = float[HEIGHT][N / 2];
  using Back = float[kShare / 2];
  DEVICE int share() const { return warpgroup % kShares; }
  DEVICE int group() const { return warpgroup / kShares; }
  DEVICE int first_column() const { return Pass::IN_TURNS ? 0 : share() * kShare; }  // of dX
  DEVICE void multiply(Back& back, u32 slot) const {
    const u32 g = slot + group() * kGroup;
    const u32 weights = memory + (group() * kRight + first_column() / 64) * kWeights + first_column() % 64 * 2;
    UNROLL for (int step = 0; step < ceil_div(Q, 16); ++step)
      Wgmma<Element, kShare>::multiply_right_turned(back, operand(g + step / 4 * kSlab) + step % 4 * 2,
                                                    turned_operand(weights, kWeights) + step * 128, step > 0);
    commit_products();
  }
  DEVICE void multiply(Sums& sums, u32 slot, bool add) const {
    const int share = this->share();
    const u32 g = slot + group() * kGroup, x = g + kLeft * kSlab + share / WM * (N * 128);
    UNROLL for (int step = 0; step < 4; ++step)
      UNROLL for (int h = 0; h < HEIGHT; ++h)
        Wgmma<Element, N>::multiply_turned(sums[h], turned_operand(g + (share % WM * HEIGHT + h) * kSlab, kSlab) + step * 128,
                                           turned_operand(x, kSlab) + step * 128, add || step > 0);
    commit_products();
  }

  // Where a group's p lies in a row of dX.
  static DEVICE int place(int group, int p) {
    const int k = group / Pass::INNER * P + p;
    return (k / Pass::RUN * Pass::INNER + group % Pass::INNER) * Pass::RUN + k % Pass::RUN;
  }
  DEVICE void store(const Back& back, int chunk) const {
    const i64 row = first_row(chunk) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int p = first_p + first_column() + threadIdx.x % 4 * 8, group = first_group + this->group();
    Element* y = static_cast<Element*>(params.y) + row * kRowX;
    UNROLL for (int n = 0; n < kShare / 8; n += 4) {
      const int at = place(group, p + n * 8);
      UNROLL for (int half = 0; half < 2; ++half) {
        u32 words[4];
        UNROLL for (int i = 0; i < 4; ++i)
          words[i] = Pair<Element>(back[(n + i) * 4 + half * 2], back[(n + i) * 4 + half * 2 + 1]).bits;
        exchange_words<4>(words);  // of two columns of each of four tiles, a tile
        if (row + half * 8 < params.batch && p + n * 8 < P) store_global<16>(y + half * 8 * kRowX + at, words);
      }
    }
  }
  // The first COUNT of each row, of the columns from `column` on
  template <int COUNT> DEVICE void store(const Sums& sums, int column) const {
    const int t = threadIdx.x % 4, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int p = first_p + share() / WM * N + column + t / 2 * 4 + t % 2 * 8;
    float* to = static_cast<float*>(params.sums) + (blockIdx.x * kSums + i64(first_group + group()) * Q * P + p);
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int half = 0; half < 2; ++half) {
        const int q = (share() % WM * HEIGHT + h) * 64 + row + half * 8;
        float* at = to + i64(in_order(q)) * P;
        UNROLL for (int n = 0; n < COUNT / 4; n += 2) {
          u32 words[4];
          four_columns(&sums[h][n * 4 + half * 2], words);
          if (q < Q && p + n * 8 < P) store_global<16>(at + n * 8, words);
        }
      }
  }

  DEVICE void store_paired(Sums& sums) const {
    const int rank = blockIdx.y % 2;
    const u32 mine = ring.slots + threadIdx.x * 16, theirs = in_other_block(mine), got_there = in_other_block(got);
    if (threadIdx.x % 32 == 0) free_in_other_block(in_other_block(done));  // no slot is read any more
    wait_for_bytes(done, 0);
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int n = 0; n < N / 4; n += 4) {
        u32 given[4];
        UNROLL for (int i = 0; i < 4; ++i) {
          const float first = sums[h][n + i], second = sums[h][N / 4 + n + i];
          given[i] = __float_as_uint(rank ? first : second);
          sums[h][n + i] = rank ? second : first;
        }
        send_words(theirs + (h * (N / 16) + n / 4) * (kConsumers * 16), given, got_there);
      }
    wait_for_cluster(got, 0);
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int n = 0; n < N / 4; n += 4) {
        u32 given[4];
        load_u32x4(mine + (h * (N / 16) + n / 4) * (kConsumers * 16), given);
        UNROLL for (int i = 0; i < 4; ++i) sums[h][n + i] += __uint_as_float(given[i]);
      }
    store<N / 4>(sums, rank * (N / 2));
  }

  DEVICE void consume() const {
    Sums sums;
    if (Pass::PAIRED && block >= chunks)
      UNROLL for (auto& some : sums)
        UNROLL for (float& x : some) x = 0;
    RingCursor<SLOTS> cursor{0, 0};
    int chunks_to_mine = Pass::IN_TURNS ? share() : 0;  // of dX
    copy_weights();
    if constexpr (kInPairs) wait_at_cluster();  // the other one has begun
    ROLL for (int chunk = block; chunk < chunks; chunk += blocks) {
      const u32 from = ring.at(cursor.slot);
      ring.wait_until_full(cursor);
      if (chunks_to_mine == 0) {
        Back back;
        open_products();
        multiply(back, from);
        multiply(sums, from, chunk != block);
        wait_for_products<1>();
        touch(back);
        store(back, chunk);
        chunks_to_mine = Pass::IN_TURNS ? kShares : 0;
      } else {
        open_products();
        multiply(sums, from, chunk != block);
      }
      if constexpr (Pass::IN_TURNS) --chunks_to_mine;
      wait_for_products<0>();
      UNROLL for (auto& some : sums) touch(some);
      ring.release(cursor.slot);
      cursor.next();
    }
    if constexpr (Pass::SHARED) arrive_at_cluster();
    if constexpr (Pass::PAIRED)
      store_paired(sums);
    else
      store<N / 2>(sums, 0);
  }

  DEVICE void run() const {
    if (block >= blocks) return;
    ring.init(1, kConsumers / 32 * kSharing);
    if (Pass::PAIRED && threadIdx.x == 0) {
      init_barrier(done, kConsumers / 32);
      init_barrier(got, 1);
      expect_bytes(got, kGiven * 16 * kConsumers);
    }
    fence_copy_engine();
    __syncthreads();
    if constexpr (kInPairs) arrive_at_cluster();
    if (threadIdx.x == kConsumers) prefetch_map(maps.x), prefetch_map(maps.grad);
    wait_for_kernel_before();
    if (threadIdx.x < kConsumers) {
      take_registers<Pass::MORE>(), consume();
    } else {
      give_registers<Pass::FEWER>();
      if constexpr (kInPairs) wait_at_cluster();
      if (threadIdx.x == kConsumers) produce();
      if constexpr (Pass::SHARED) arrive_at_cluster();
    }
    if constexpr (Pass::SHARED) wait_at_cluster();  // the other one may still say that it has read, or write here
  }
};
