// The gradient of one contraction's weight, as gradient.cuh makes it, where nothing lies behind the mode: on the
// warpgroup instructions of sm_90a,
//
//     dW[q, p] = sum_r G[r, q] X[r, p]      r: samples (of tied weights: samples and outer)
//
// A block has a tile of q x p of one group, and every gridDim.x-th chunk of rows. A warpgroup of producers fills a ring of
// SLOTS chunks, in slabs of 64 columns; WM x WN consumers have 64 HEIGHT q's and N p's each. Blocks with the same tile
// write their sums side by side, for Reduction; where there is but one, it writes elements.
//
// In 16 bits, both operands lie in shared memory as they do in memory, 64 rows below each other: the matrix unit turns
// them. Of 32 bits it takes none that are turned. Chunks have 32 rows, which producers load into registers, HELD chunks
// ahead, and store the other way, rounded to tf32 or split. In tf32 they do so with X alone: G is copied as it is, and
// consumers take operand A, which may come from registers, out of it.
//
// Rows that 16 bytes do not divide: those EVERY rows behind one another begin at the same place in a piece of 16 bytes. A
// block has such rows alone, by whole pieces; its tile begins where its first piece does, and what its columns have of
// other rows or groups makes sums that nobody stores. So there are EVERY sums for each weight and block along x.
//
// Of a sum of products TERMS have weights of their own, one behind another, each made by blocks of its own.
//
// With BIAS (one group, nothing split) the sums of G's columns are made as well, and lie behind those of the weight: in 16
// bits as products with ones, in tf32 by consumers, who add what they have loaded before they round it.
// kernels/product/wide_gradient.py writes the constants:
//
// Pass:  Element, Result (what is written), WEIGHT (the parameter that G is), P, Q, GROUPS, TERMS, X_TERM and G_TERM (a sample's
//        features where X or G has a state for each term, one behind the other, or 0), ROWS (of a sample), WM, WN,
//        HEIGHT, N, MIXED_ROWS and MIXED_COLUMNS (as untied_backward.cuh has them), SLOTS, EVERY, HELD, BIAS, MORE and FEWER
//        (registers of consumers and producers; 0: as they are), SPLIT (float as three products of tf32)
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "multiply/wgmma.cuh"
#include "finish/tile.cuh"
#include "move/ring.cuh"

template <class Pass> struct WideGradient {
  using Element = typename Pass::Element;
  using Result = typename Pass::Result;
  static constexpr bool kTurns = sizeof(Element) == 2;  // the matrix unit, not the producers
  static_assert(kTurns || sizeof(Element) == 4);
  static constexpr int P = Pass::P, Q = Pass::Q, WM = Pass::WM, WN = Pass::WN, HEIGHT = Pass::HEIGHT, N = Pass::N, EVERY = Pass::EVERY;
  static constexpr int kConsumers = 128 * WM * WN, kChunk = 128 / sizeof(Element), kSlab = 64 * 128;
  static constexpr int kPiece = 16 / sizeof(Element);
  static constexpr int kLeft = WM * HEIGHT, kRight = ceil_div(WN * N, 64);  // slabs
  static constexpr bool kShifted = P % kPiece || Q % kPiece;
  // How far behind a tile's first piece a row may begin
  static constexpr int most_shift(int features) { return (features & -features) < kPiece ? kPiece - (features & -features) : 0; }
  static constexpr int BM = kLeft * 64, BN = WN * N, kTilesQ = ceil_div(Q + most_shift(Q), BM), kTilesP = ceil_div(P + most_shift(P), BN);
  static constexpr int kLow = (kLeft + kRight) * kSlab;  // what high parts leave out of float, behind them
  static constexpr int kSlotBytes = Pass::SPLIT ? 2 * kLow : kLow;
  static constexpr i64 kRowG = i64(Q) * Pass::GROUPS, kRowX = i64(P) * Pass::GROUPS, kStepG = EVERY * kRowG, kStepX = EVERY * kRowX;
  static constexpr bool kLoadsLeft = !kTurns && !Pass::SPLIT;  // consumers, from rows of G
  // Behind the slots ones, of which 16 rows of 128 bytes are more than a right operand of eight columns has, and barriers
  static constexpr int kOnes = Pass::SLOTS * kSlotBytes, kOnesBytes = Pass::BIAS && kTurns ? 2048 : 0;
  static constexpr int kFull = kOnes + kOnesBytes;
  static constexpr i64 kWeights = i64(P) * Q * Pass::GROUPS * Pass::TERMS;
  static constexpr i64 kPart = kWeights + (Pass::BIAS ? Q : 0);  // sums that a block's are among
  static constexpr bool kSideBySide = P % 4 == 0 && kPart % 4 == 0;  // sums are stored by four
  static_assert(!Pass::BIAS || (Pass::GROUPS == 1 && Pass::TERMS == 1 && !Pass::SPLIT));
  static_assert(Pass::TERMS == 1 || (Pass::GROUPS == 1 && !kShifted), "where a term begins, the number of samples says");
  static_assert(kStepX % kPiece == 0 && kStepG % kPiece == 0, "rows of a block begin at one place of a piece");
  static_assert(N % (kTurns ? 16 : 32) == 0, "sums that change places or lie in their order");
  static_assert(kTilesP == 1 || BN % 64 == 0, "slabs belong to one tile");
  static_assert(WN == 1 || !kTurns || N % 64 == 0, "slabs belong to one warpgroup");

  const Params& params;
  const u32 memory;
  const Ring<Pass::SLOTS, kSlotBytes> slots;
  const int warpgroup;
  const i64 rows;  // of the block's
  const int chunks;

  DEVICE WideGradient(const Params& given)
      : params(given), memory(shared_address(shared_memory) + 1023 & ~1023u), slots(memory, memory + kFull),
        warpgroup(uniform(threadIdx.x / 128)),
        rows((given.batch * Pass::ROWS - tile().first + EVERY - 1) / EVERY), chunks(int((rows + kChunk - 1) / kChunk)) {}

  // From the last rows on: L2 still has of G what the kernel before has made or read last, and leaves the first ones there
  // for the next.
  DEVICE i64 first_row(int chunk) const { return i64(chunks - 1 - chunk) * kChunk; }

  struct Tile { int q, p, group, first; };  // columns, from the first piece on, and the first row
  static DEVICE int shift(i64 element) { return kShifted ? int(element % kPiece) : 0; }
  static DEVICE Tile tile() {
    constexpr int kGroups = Pass::GROUPS * Pass::TERMS;  // terms are groups of the weights', but not of rows
    const int n = blockIdx.y, group = n / (kTilesQ * kTilesP) % kGroups, first = n / (kTilesQ * kTilesP * kGroups);
    if constexpr (Pass::TERMS > 1) return {n % kTilesQ * BM, n / kTilesQ % kTilesP * BN, group, first};
    return {n % kTilesQ * BM - shift(first * kRowG + i64(group) * Q),
            n / kTilesQ % kTilesP * BN - shift(first * kRowX + i64(group) * P), group, first};
  }
  // Where the block's first row has the tile's first column
  DEVICE const Element* begin_g(const Tile& at) const {
    const i64 group = Pass::TERMS > 1 ? at.group * params.batch * Pass::G_TERM : i64(at.group) * Q;
    return static_cast<const Element*>(params.weights[Pass::WEIGHT]) + (at.first * kRowG + group + at.q);
  }
  DEVICE const Element* begin_x(const Tile& at) const {
    const i64 group = Pass::TERMS > 1 ? at.group * params.batch * Pass::X_TERM : i64(at.group) * P;
    return static_cast<const Element*>(params.x) + (at.first * kRowX + group + at.p);
  }

  // Eight threads take the pieces of a row, and each of them every 16th row. `from` is a thread's first piece, `rows_left` and
  // `left` count from there; what is not there is zero, and nothing behind a row is read.
  template <int SLABS, int EACH, i64 STEP> DEVICE void copy(u32 to, const Element* from, int rows_left, int left) const {
    UNROLL for (int slab = 0; slab < SLABS; ++slab) {
      const int there = left - slab * 64, bytes = there > 0 ? min(there, kPiece) * int(sizeof(Element)) : 0;
      UNROLL for (int i = 0; i < kChunk / EACH; ++i) {
        const u32 place = to + slab * kSlab + i * 2048;
        const Element* piece = from + slab * 64 + i * EACH * STEP;
        if constexpr (!kShifted)
          copy_async<16>(place, piece, i * EACH < rows_left && there > 0);
        else
          copy_bytes(place, piece, i * EACH < rows_left ? bytes : 0);
      }
    }
  }
  DEVICE void copy_chunks(int thread) const {
    const int row = thread / 8, piece = thread % 8;
    const u32 place = memory + swizzled(row, piece);
    const Tile at = tile();
    const Element *g = begin_g(at) + (row * kStepG + piece * 8), *x = begin_x(at) + (row * kStepX + piece * 8);
    int left_q = Q - at.q - piece * 8, left_p = P - at.p - piece * 8;
    RingCursor<Pass::SLOTS> cursor{0, 1};
    ROLL for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      const i64 first = first_row(chunk);
      const int rows_left = int(min(rows - first, i64(kChunk))) - row;
      const u32 to = place + cursor.slot * kSlotBytes;
      stay_here(left_q, left_p);
      slots.wait_until_empty(cursor);
      copy<kLeft, 16, kStepG>(to, g + first * kStepG, rows_left, left_q);
      copy<kRight, 16, kStepX>(to + kLeft * kSlab, x + first * kStepX, rows_left, left_p);
      arrive_with_copies(slots.full(cursor.slot));
      cursor.next();
    }
  }

  // Of 32 bits a thread has four rows' pieces of each slab, and stores the four columns in them as rows of shared memory.
  // Column 4 i + j of 32 is row i + 8 j: eight threads side by side load 128 bytes, and meet in no bank.
  using Square = u32[4][4];
  // Of the last row, if `ends`, nothing behind it is read, not even of a piece that begins in it.
  template <i64 STEP> DEVICE void load(Square& x, const Element* from, int rows_left, int left, bool ends) const {
    const int there = left > 0 ? rows_left : 0, whole = kShifted && ends && left < kPiece ? there - 1 : there;
    UNROLL for (int i = 0; i < 4; ++i) load_global(from + i * STEP, x[i], i < whole);
    if constexpr (kShifted) {
      if (whole < there && whole < 4)
        UNROLL for (int i = 0; i < 4; ++i)
          UNROLL for (int j = 0; j < kPiece - 1; ++j)
            if (i == whole && j < left) x[i][j] = reinterpret_cast<const u32*>(from + i * STEP)[j];
    }
  }
  DEVICE void put(const Square& x, u32 to) const {
    UNROLL for (int j = 0; j < 4; ++j) put_rows({x[0][j], x[1][j], x[2][j], x[3][j]}, to + j * 1024);
  }
  DEVICE void put_rows(const u32 (&x)[4], u32 to) const {
    u32 high[4], low[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      if constexpr (Pass::SPLIT)
        Split3::split(x[i], high[i], low[i]);
      else
        high[i] = tf32_of(x[i]);
    }
    store_u32x4(to, high);
    if constexpr (Pass::SPLIT) store_u32x4(to + kLow, low);
  }
  // Rows of G for consumers: sixteen threads have the pieces of a row of a slab. Those of four rows change places, so that
  // threads who read four rows at once meet in no bank.
  static DEVICE u32 left_place(int row, int piece) { return row * 256 + ((piece ^ (row & 3) << 1) << 4); }
  // While a chunk is stored, square by square, the one HELD further is loaded to where it was.
  static constexpr int kHeldLeft = kLoadsLeft ? 0 : kLeft;  // slabs
  DEVICE void turn_chunks(int thread) const {
    const int row = thread / 8 % 8 * 4, half = thread / 64 * 32, column = half + thread % 8 * 4;
    const u32 place = memory + swizzled(half + thread % 8, row / 4);
    const Tile at = tile();
    const int row_g = kLoadsLeft ? thread / 16 : row, column_g = kLoadsLeft ? thread % 16 * kPiece : column;
    const Element *g = begin_g(at) + (row_g * kStepG + column_g), *x = begin_x(at) + (row * kStepX + column);
    int left_q = Q - at.q - column_g, left_p = P - at.p - column;
    const bool ends = (params.batch * Pass::ROWS - 1) % EVERY == at.first;  // the tensors end with the block's last row
    Square held[Pass::HELD][kHeldLeft + kRight];
    const auto load_slab = [&](Square& to, int slab, int chunk) {
      const i64 first = first_row(chunk);
      const int there = chunk < chunks ? int(min(rows - first, i64(kChunk))) : 0, right = slab - kHeldLeft;
      const bool is_last = ends && first + there == rows;
      if (right < 0)
        load<kStepG>(to, g + (first * kStepG + slab * 64), there - row, left_q - slab * 64, is_last);
      else
        load<kStepX>(to, x + (first * kStepX + right * 64), there - row, left_p - right * 64, is_last);
    };
    UNROLL for (int i = 0; i < Pass::HELD; ++i)
      UNROLL for (int slab = 0; slab < kHeldLeft + kRight; ++slab)
        load_slab(held[i][slab], slab, blockIdx.x + i * gridDim.x);
    RingCursor<Pass::SLOTS> cursor{0, 1};
    const auto give = [&](Square (&held)[kHeldLeft + kRight], int chunk) {
      const u32 to = cursor.slot * kSlotBytes;
      stay_here(left_q, left_p);
      slots.wait_until_empty(cursor);
      if constexpr (kLoadsLeft) {
        const i64 first = first_row(chunk);
        copy<kLeft, 8, kStepG>(memory + left_place(row_g, thread % 16) + to, g + first * kStepG,
                               int(min(rows - first, i64(kChunk))) - row_g, left_q);
        arrive_with_copies(slots.full(cursor.slot));
      }
      UNROLL for (int slab = 0; slab < kHeldLeft + kRight; ++slab) {
        put(held[slab], place + to + (kLeft - kHeldLeft + slab) * kSlab);
        load_slab(held[slab], slab, chunk + Pass::HELD * gridDim.x);
      }
      arrive(slots.full(cursor.slot));
      cursor.next();
    };
    ROLL for (int chunk = blockIdx.x; chunk < chunks; chunk += Pass::HELD * gridDim.x) {
      give(held[0], chunk);
      if constexpr (Pass::HELD == 2)
        if (chunk + gridDim.x < chunks) give(held[1], chunk + gridDim.x);
    }
  }

  using Sums = float[HEIGHT][N / 2];
  static DEVICE u64 slabs(u32 first) {
    if constexpr (kTurns) return turned_operand(first, kSlab);
    return operand(first);
  }
  DEVICE u64 right_operand(u32 slot) const { return slabs(slot + kLeft * kSlab + warpgroup / WM * (N * 128)); }
  // Of 16 bits eight times the same; of tf32 the first and the third are what a thread has added of its rows
  using ColumnSums = float[HEIGHT][4];
  // And G's columns, if these are wanted.
  template <bool BIAS> DEVICE void multiply(Sums& sums, ColumnSums& columns, u32 slot, bool add) const {
    const u64 left = slabs(slot + warpgroup % WM * HEIGHT * kSlab);
    const u64 right = right_operand(slot);
    open_products();
    UNROLL for (int step = 0; step < 4; ++step)
      UNROLL for (int h = 0; h < HEIGHT; ++h) {
        const u64 slab = left + h * (kSlab / 16);
        if constexpr (kTurns)
          Wgmma<Element, N>::multiply_turned(sums[h], slab + step * 128, right + step * 128, add || step > 0);
        else
          Wgmma<Element, N>::multiply(sums[h], slab + step * 2, right + step * 2, add || step > 0);
        if constexpr (BIAS)  // ones of any k
          Wgmma<Element, 8>::multiply_turned(columns[h], slab + step * 128, slabs(memory + kOnes), add || step > 0);
      }
    commit_products();
  }

  // Operand A from rows of G, of 8 k's for each step. A thread loads what lies side by side: two q's, its rows of one
  // product, or four, those of two.
  static constexpr bool kFours = HEIGHT % 2 == 0;
  static constexpr int kSteps = HEIGHT > 2 ? 1 : 2, kParts = 4 / kSteps;  // loaded at once, of a chunk
  using Left = u32[kSteps][HEIGHT][4];
  template <bool BIAS> DEVICE void load_left(Left& left, ColumnSums& columns, u32 slot, int part) const {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 from = slot + warpgroup % WM * HEIGHT * kSlab + part * kSteps * 2048 +
                     (kFours ? warp / 2 * kSlab + left_place(t, warp % 2 * 8 + g)
                             : left_place(t, warp * 4 + g / 2) + g % 2 * 8);
    UNROLL for (int step = 0; step < kSteps; ++step) {
      UNROLL for (int h = 0; h < HEIGHT; h += kFours ? 2 : 1)
        UNROLL for (int half = 0; half < 2; ++half) {
          const u32 at = from + step * 2048 + half * 1024 + h * kSlab;
          if constexpr (kFours) {
            u32 x[4];
            load_u32x4(at, x);
            UNROLL for (int i = 0; i < 4; ++i) {
              left[step][h + i / 2][half * 2 + i % 2] = tf32_of(x[i]);
              if constexpr (BIAS) columns[h + i / 2][i % 2 * 2] += __uint_as_float(x[i]);
            }
          } else {
            u32 x[2];
            load_u32x2(at, x);
            UNROLL for (int i = 0; i < 2; ++i) {
              left[step][h][half * 2 + i] = tf32_of(x[i]);
              if constexpr (BIAS) columns[h][i * 2] += __uint_as_float(x[i]);
            }
          }
        }
      UNROLL for (int h = 0; h < HEIGHT; ++h) settle(left[step][h]);
    }
  }
  DEVICE void multiply_left(Sums& sums, const Left& left, u64 right, int part, bool add) const {
    open_products();
    UNROLL for (int step = 0; step < kSteps; ++step)
      UNROLL for (int h = 0; h < HEIGHT; ++h)
        Wgmma<Element, N>::multiply(sums[h], left[step][h], right + (part * kSteps + step) * 2, add || step > 0);
    commit_products();
  }
  // As exact as FMA (mma.cuh, Split3): products start from zero in each chunk, since the matrix unit truncates what it adds
  // to, those of high parts apart from the others, which infinities make NaN: then they do not count.
  DEVICE void multiply_split(Sums& sums, u32 slot) const {
    const u64 left = operand(slot + warpgroup % WM * HEIGHT * kSlab);
    const u64 right = operand(slot + (kLeft + warpgroup / WM * (N / 64)) * kSlab);
    constexpr u64 low = kLow / 16;
    Sums some;
    open_products();
    UNROLL for (int step = 0; step < 4; ++step)
      UNROLL for (int h = 0; h < HEIGHT; ++h) {
        const u64 slab = left + h * (kSlab / 16) + step * 2;
        Wgmma<Element, N>::multiply(some[h], slab + low, right + step * 2, step > 0);
        Wgmma<Element, N>::multiply(some[h], slab, right + low + step * 2);
      }
    commit_products();
    wait_for_products<0>();
    UNROLL for (int h = 0; h < HEIGHT; ++h) {
      touch(some[h]);
      UNROLL for (int i = 0; i < N / 2; ++i) sums[h][i] += or_zero(some[h][i]);
    }
    ColumnSums none;
    multiply<false>(some, none, slot, false);
    wait_for_products<0>();
    UNROLL for (int h = 0; h < HEIGHT; ++h) {
      touch(some[h]);
      UNROLL for (int i = 0; i < N / 2; ++i) sums[h][i] += some[h][i];
    }
  }
  // One thread says that its warp's products have read a chunk.
  DEVICE void release(int slot) const {
    if constexpr (kLoadsLeft) __syncwarp();
    slots.release(slot);
  }
  template <int COUNT> static DEVICE void set_to_zero(float (&sums)[HEIGHT][COUNT]) {
    UNROLL for (auto& some : sums)
      UNROLL for (float& sum : some) sum = 0;
  }
  template <bool BIAS> DEVICE void consume() const {
    Sums sums;
    ColumnSums columns;
    Left left[2];  // in turns: the products before still read theirs
    int last = -1;
    RingCursor<Pass::SLOTS> cursor{0, 0};
    if constexpr (Pass::SPLIT) set_to_zero(sums);
    if constexpr (BIAS && kLoadsLeft) set_to_zero(columns);
    ROLL for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      slots.wait_until_full(cursor);
      fence_copy_engine();
      if constexpr (Pass::SPLIT) {
        multiply_split(sums, slots.at(cursor.slot));
        release(cursor.slot);
      } else if constexpr (kLoadsLeft) {
        const u32 from = slots.at(cursor.slot);
        UNROLL for (int part = 0; part < kParts; ++part) {
          load_left<BIAS>(left[part % 2], columns, from, part);
          multiply_left(sums, left[part % 2], right_operand(from), part, part > 0 || last >= 0);
          wait_for_products<1>();
          if (part == 0 && last >= 0) release(last);
        }
        last = cursor.slot;
      } else {
        multiply<BIAS>(sums, columns, slots.at(cursor.slot), last >= 0);
        wait_for_products<1>();
        if (last >= 0) release(last);
        last = cursor.slot;
      }
      cursor.next();
    }
    wait_for_products<0>();
    UNROLL for (auto& some : sums) touch(some);
    const bool none = EVERY > 1 && !Pass::SPLIT && last < 0;  // the block has no rows
    if (none) set_to_zero(sums);
    if constexpr (BIAS) {
      if constexpr (kTurns) {
        UNROLL for (auto& some : columns) touch(some);
        if (none) set_to_zero(columns);
      } else {
        UNROLL for (auto& some : columns)  // four lanes have a row's columns
          UNROLL for (int half = 0; half < 2; ++half)
            UNROLL for (int by = 1; by < 4; by *= 2)
              some[half * 2] += of_lane(some[half * 2], by);
      }
      store(columns);
    }
    if constexpr (kStaged)
      store_staged(sums);
    else
      store(sums);
  }

  // The first q of a thread, in the tile, by which of its warp's rows it has, and how far below it that of another is.
  DEVICE int own_q() const { return own_q(threadIdx.x % 32 / 4); }
  DEVICE int own_q(int g) const {
    const int warp = threadIdx.x % 128 / 32, first = warpgroup % WM * HEIGHT * 64;
    if constexpr (kLoadsLeft) return first + (kFours ? warp * 32 + g * 4 : warp * 16 + g * 2);
    return first + (kTurns ? warp * 16 + g : warp / 2 * 32 + g * 4 + warp % 2 * 2);
  }
  static constexpr DEVICE int down(int h, int half) {
    return kLoadsLeft && kFours ? h / 2 * 128 + h % 2 * 2 + half : h * 64 + half * (kTurns ? 8 : 1);
  }
  // Where a q of G, in whatever order, comes among those of the weight.
  static DEVICE int in_order(int q) { return q % Pass::MIXED_ROWS * Pass::MIXED_COLUMNS + q / Pass::MIXED_ROWS; }
  // Where a block's sums are
  DEVICE Result* part(const Tile& at) const {
    return static_cast<Result*>(params.y) + (i64(blockIdx.x) * EVERY + at.first) * kPart;
  }
  DEVICE void store(const ColumnSums& columns) const {
    if (threadIdx.x % 4) return;
    const Tile at = tile();
    const int q = at.q + own_q();
    Result* to = part(at) + kWeights + q;
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int half = 0; half < 2; ++half) {
        if (unsigned(q + down(h, half)) < Q) store_global(to + down(h, half), narrow<Result>(columns[h][half * 2]));
      }
  }

  // Rows that begin within 16 bytes go through shared memory, where nobody reads slots any more, for a warp to store runs
  // of them: they fill sectors of L2, but at their ends.
  static constexpr bool kStaged = kShifted || !kSideBySide;
  using Staged = StagedRows<N>;
  static_assert(!kStaged || kConsumers / 32 * Staged::kBytes <= Pass::SLOTS * kSlotBytes, "room for sums");
  DEVICE void store_staged(const Sums& sums) const {
    const Tile at = tile();
    const int lane = threadIdx.x % 32, p = at.p + warpgroup / WM * N;
    const Staged staged(memory + threadIdx.x / 32 * Staged::kBytes);
    Result* to = part(at) + (i64(at.group) * Q * P + p);
    sync_consumers<kConsumers>();
    UNROLL for (int h = 0; h < HEIGHT; ++h) {
      if constexpr (kTurns)
        staged.put(sums[h]);
      else
        UNROLL for (int half = 0; half < 2; ++half) stage(sums[h], half, staged.at(lane / 4 + half * 8, 0));
      __syncwarp();
      staged.template store<Result>(-p, P - p, [&](int row) {
        const int q = at.q + own_q(row % 8) + down(h, row / 8);
        return unsigned(q) < Q ? to + i64(in_order(q)) * P : nullptr;
      });
      __syncwarp();
    }
  }
  static DEVICE void stage(const float (&sums)[N / 2], int half, u32 row) {
    const int t = threadIdx.x % 4;
    UNROLL for (int n = 0; n < N / 8; n += 4)
      UNROLL for (int i = 0; i < 2; ++i) {
        u32 words[4];
        UNROLL for (int j = 0; j < 4; ++j) words[j] = __float_as_uint(sums[(n + j) * 4 + half * 2 + i]);
        store_u32x4(row + (n * 8 + t * 8 + i * 4) * 4, words);
      }
  }

  // Sums fill whole sectors of L2, as elements of 32 bits do; those of 16, once neighbours have exchanged two of four.
  DEVICE void store(const Sums& sums) const {
    const Tile at = tile();
    const int t = threadIdx.x % 4, q = at.q + own_q(), p = at.p + warpgroup / WM * N;
    Result* to = part(at) + i64(at.group) * Q * P;
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int half = 0; half < 2; ++half) {
        const int end = q + down(h, half) < Q ? P : 0;  // all of a warp exchange, whose rows may end between
        store_row(sums[h], half, to + i64(in_order(q + down(h, half))) * P, p, t, end);
      }
  }
  DEVICE void store_row(const float (&sums)[N / 2], int half, Result* to, int p, int t, int end) const {
    if constexpr (kTurns)
      ::store_row(sums, half, to, p, end);
    else
      UNROLL for (int n = 0; n < N / 8; n += 4)
        UNROLL for (int i = 0; i < 2; ++i) {
          u32 words[4];
          UNROLL for (int j = 0; j < 4; ++j) words[j] = __float_as_uint(sums[(n + j) * 4 + half * 2 + i]);
          const int c = p + n * 8 + t * 8 + i * 4;
          if (c < end) store_global<16>(to + c, words);
        }
  }

  DEVICE void run() const {
    slots.init(kLoadsLeft ? 256 : 128, WM * WN * 4);  // what is stored, and what is copied
    if constexpr (kOnesBytes > 0) {
      for (int at = threadIdx.x * 4; at < kOnesBytes; at += (kConsumers + 128) * 4)
        store_shared(memory + kOnes + at, Pair<Element>(1.f, 1.f).bits);
      fence_copy_engine();
    }
    __syncthreads();
    if (threadIdx.x < kConsumers) {
      take_registers<Pass::MORE>();
      if (Pass::BIAS && warpgroup < WM && tile().p <= 0)
        consume<Pass::BIAS>();
      else
        consume<false>();
    } else {
      give_registers<Pass::FEWER>();
      if constexpr (kTurns)
        copy_chunks(threadIdx.x - kConsumers);
      else
        turn_chunks(threadIdx.x - kConsumers);
    }
  }
};
