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
// consumers take operand A, which may come from registers, out of it. Rows that 16 bytes do not divide are copied as the
// pieces they lie in (pieces.cuh), AHEAD chunks before producers take them apart; of 32 bits then those of both states.
//
// With BIAS (one group, nothing split) the sums of G's columns are made as well, as products with ones, and lie behind those
// of the weight. kernels/product/wide_gradient.py writes the constants:
//
// Pass:  Element, Result (what is written), WEIGHT (the parameter that G is), P, Q, GROUPS, ROWS (of a sample), WM, WN,
//        HEIGHT, N, MIXED_ROWS and MIXED_COLUMNS (as untied_backward.cuh has them), SLOTS, AHEAD (0: rows are whole pieces), HELD, BIAS, MORE and FEWER (registers of consumers and
//        producers; 0: as they are), SPLIT (float as three products of tf32)
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "move/pieces.cuh"
#include "multiply/wgmma.cuh"
#include "move/ring.cuh"

template <class Pass> struct WideGradient {
  using Element = typename Pass::Element;
  using Result = typename Pass::Result;
  static constexpr bool kTurns = sizeof(Element) == 2;  // the matrix unit, not the producers
  static_assert(kTurns || sizeof(Element) == 4);
  static constexpr int P = Pass::P, Q = Pass::Q, WM = Pass::WM, WN = Pass::WN, HEIGHT = Pass::HEIGHT, N = Pass::N;
  static constexpr int kConsumers = 128 * WM * WN, kChunk = 128 / sizeof(Element), kSlab = 64 * 128;
  static constexpr int kPiece = 16 / sizeof(Element);
  static constexpr int kLeft = WM * HEIGHT, kRight = ceil_div(WN * N, 64);  // slabs
  static constexpr int BM = kLeft * 64, BN = WN * N, kTilesQ = ceil_div(Q, BM), kTilesP = ceil_div(P, BN);
  static constexpr int kLow = (kLeft + kRight) * kSlab;  // what high parts leave out of float, behind them
  static constexpr int kSlotBytes = Pass::SPLIT ? 2 * kLow : kLow;
  static constexpr i64 kRowG = i64(Q) * Pass::GROUPS, kRowX = i64(P) * Pass::GROUPS;
  using PiecesG = Pieces<Element, Q, kRowG, kLeft, kChunk>;
  using PiecesX = Pieces<Element, P, kRowX, kRight, kChunk>;
  // Whole pieces that the matrix unit turns need no taking apart: they are copied to where they belong.
  static constexpr bool kTakes = Pass::AHEAD > 0;
  static constexpr bool kTakesG = kTakes && !(kTurns && PiecesG::kWhole), kTakesX = kTakes && !(kTurns && PiecesX::kWhole);
  static constexpr bool kCopies = kTakesG != kTakesX;
  static constexpr bool kLoadsLeft = !kTurns && !Pass::SPLIT && !kTakes;  // consumers, from rows of G
  static constexpr int kBytesG = kTakesG ? PiecesG::kBytes : 0, kBytesX = kTakesX ? PiecesX::kBytes : 0;
  // Behind the slots ones, of which 16 rows of 128 bytes are more than a right operand of eight columns has, pieces, and
  // barriers
  static constexpr int kOnes = Pass::SLOTS * kSlotBytes, kOnesBytes = Pass::BIAS ? 2048 : 0;
  static constexpr int kPieces = kOnes + kOnesBytes, kPiecesBytes = kBytesG + kBytesX;
  static constexpr int kFull = kPieces + (kTakes ? Pass::AHEAD + 1 : 0) * kPiecesBytes;
  static constexpr i64 kWeights = i64(P) * Q * Pass::GROUPS;
  static constexpr i64 kPart = kWeights + (Pass::BIAS ? Q : 0);  // sums that a block's are among
  static constexpr bool kSideBySide = P % 4 == 0 && kPart % 4 == 0;  // sums are stored by four
  static_assert(!Pass::BIAS || (Pass::GROUPS == 1 && !Pass::SPLIT));
  static_assert(kTakes || (P % kPiece == 0 && Q % kPiece == 0), "rows of whole pieces");
  static_assert(!kCopies || Pass::SLOTS > Pass::AHEAD + 1, "copies to a slot that is not waited for");
  static_assert(N % (kTurns ? 16 : 32) == 0, "sums that change places or lie in their order");
  static_assert(kTilesP == 1 || BN % 64 == 0, "slabs belong to one tile");
  static_assert(WN == 1 || !kTurns || N % 64 == 0, "slabs belong to one warpgroup");

  const Params& params;
  const u32 memory;
  const Ring<Pass::SLOTS, kSlotBytes> slots;
  const int warpgroup;
  const i64 rows;
  const int chunks;

  DEVICE WideGradient(const Params& given)
      : params(given), memory(shared_address(shared_memory) + 1023 & ~1023u), slots(memory, memory + kFull),
        warpgroup(uniform(threadIdx.x / 128)),
        rows(given.batch * Pass::ROWS), chunks(int((rows + kChunk - 1) / kChunk)) {}

  // From the last rows on: L2 still has of G what the kernel before has made or read last, and leaves the first ones there
  // for the next.
  DEVICE i64 first_row(int chunk) const { return i64(chunks - 1 - chunk) * kChunk; }

  struct Tile { int q, p, group; };
  static DEVICE Tile tile() {
    const int n = blockIdx.y;
    return {n % kTilesQ * BM, n / kTilesQ % kTilesP * BN, n / (kTilesQ * kTilesP)};
  }

  // Eight threads take the pieces of a row, and each of them every 16th row. `from` is a thread's first piece, `rows_left` and
  // `left` count from there; what is not there is zero.
  template <int SLABS, i64 ROW> DEVICE void copy(u32 to, const Element* from, int rows_left, int left) const {
    UNROLL for (int slab = 0; slab < SLABS; ++slab)
      UNROLL for (int i = 0; i < kChunk / 16; ++i)
        copy_async<16>(to + slab * kSlab + i * 2048, from + slab * 64 + i * 16 * ROW, i * 16 < rows_left && slab * 64 < left);
  }
  DEVICE void copy_chunks(int thread) const {
    const int row = thread / 8, piece = thread % 8;
    const u32 place = memory + swizzled(row, piece);
    const auto [q, p, group] = tile();
    const Element* g = static_cast<const Element*>(params.weights[Pass::WEIGHT]) + (row * kRowG + i64(group) * Q + q + piece * 8);
    const Element* x = static_cast<const Element*>(params.x) + (row * kRowX + i64(group) * P + p + piece * 8);
    int left_q = Q - q - piece * 8, left_p = P - p - piece * 8;
    RingCursor<Pass::SLOTS> cursor{0, 1};
    ROLL for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      const i64 first = first_row(chunk);
      const int rows_left = int(min(rows - first, i64(kChunk))) - row;
      const u32 to = place + cursor.slot * kSlotBytes;
      stay_here(left_q, left_p);
      slots.wait_until_empty(cursor);
      copy<kLeft, kRowG>(to, g + first * kRowG, rows_left, left_q);
      copy<kRight, kRowX>(to + kLeft * kSlab, x + first * kRowX, rows_left, left_p);
      arrive_with_copies(slots.full(cursor.slot));
      cursor.next();
    }
  }

  // Of 32 bits a thread has four rows' pieces of each slab, and stores the four columns in them as rows of shared memory.
  // Column 4 i + j of 32 is row i + 8 j: eight threads side by side load 128 bytes, and meet in no bank.
  using Square = u32[4][4];
  template <i64 ROW> DEVICE void load(Square& x, const Element* from, int rows_left) const {
    UNROLL for (int i = 0; i < 4; ++i) load_global(from + i * ROW, x[i], i < rows_left);
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
  DEVICE void copy_left(u32 to, const Element* from, int rows_left, int left) const {
    UNROLL for (int slab = 0; slab < kLeft; ++slab)
      UNROLL for (int i = 0; i < kChunk / 8; ++i)
        copy_async<16>(to + slab * kSlab + i * 2048, from + slab * 64 + i * 8 * kRowG, i * 8 < rows_left && slab * 64 < left);
  }
  // While a chunk is stored, square by square, the one HELD further is loaded to where it was.
  static constexpr int kHeldLeft = kLoadsLeft ? 0 : kLeft;  // slabs
  DEVICE void turn_chunks(int thread) const {
    const int row = thread / 8 % 8 * 4, half = thread / 64 * 32, column = half + thread % 8 * 4;
    const u32 place = memory + swizzled(half + thread % 8, row / 4);
    const auto [q, p, group] = tile();
    const Element* g = static_cast<const Element*>(params.weights[Pass::WEIGHT]) + (i64(group) * Q + q);
    const Element* x = static_cast<const Element*>(params.x) + (row * kRowX + i64(group) * P + p + column);
    const int row_g = kLoadsLeft ? thread / 16 : row, column_g = kLoadsLeft ? thread % 16 * kPiece : column;
    g += row_g * kRowG + column_g;
    int left_q = Q - q - column_g, left_p = P - p - column;
    Square held[Pass::HELD][kHeldLeft + kRight];
    const auto load_slab = [&](Square& to, int slab, int chunk) {
      const i64 first = first_row(chunk);
      const int rows_left = chunk < chunks ? int(min(rows - first, i64(kChunk))) - row : 0, right = slab - kHeldLeft;
      if (right < 0)
        load<kRowG>(to, g + (first * kRowG + slab * 64), slab * 64 < left_q ? rows_left : 0);
      else
        load<kRowX>(to, x + (first * kRowX + right * 64), right * 64 < left_p ? rows_left : 0);
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
        copy_left(memory + left_place(row_g, thread % 16) + to, g + first * kRowG,
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

  template <class Rows, bool TAKES>
  DEVICE void copy_rows(const void* state, i64 first, i64 column, int left, u32 slabs, u32 pieces, int thread) const {
    const int there = int(min(rows - first, i64(kChunk))), row = thread / 8, piece = thread % 8;
    if constexpr (TAKES)
      Rows::template copy<128>(pieces, Rows::first_row(state, first, column, rows), there, left, thread);
    else
      copy<Rows::kSlabs, Rows::kStep>(
          slabs + swizzled(row, piece),
          static_cast<const Element*>(state) + ((first + row) * Rows::kStep + column + piece * 8), there - row,
          left - piece * 8);
  }
  // Eight threads side by side have a piece each of eight rows or, of 32 bits, a column of all 32: then row i + 8 j is the
  // j-th of piece i. IN_ORDER: columns are, too, and not as above.
  template <class Rows, bool IN_ORDER>
  DEVICE void take_rows(const void* state, i64 first, i64 column, int begin, u32 slabs, u32 pieces, int thread) const {
    const FirstRow row = Rows::first_row(state, first, column, rows);
    const int there = int(min(rows - first, i64(kChunk)));
    if constexpr (kTurns) {
      const int own = thread % 8 + thread / 64 * 8, piece = thread / 8 % 8;
      UNROLL for (int slab = 0; slab < Rows::kSlabs; ++slab) {
        u32 words[4][4] = {};
        UNROLL for (int i = 0; i < 4; ++i) {
          const int r = own + i * 16;
          Rows::take(Rows::row_at(pieces, row, r), begin, slab * 64 + piece * 8, r < there, words[i]);
        }
        UNROLL for (int i = 0; i < 4; ++i)
          store_u32x4(slabs + slab * kSlab + i * 2048 + swizzled(own, piece), words[i]);
      }
    } else {
      const int own = thread % 8;
      u32 from[4];
      UNROLL for (int j = 0; j < 4; ++j) from[j] = Rows::row_at(pieces, row, own + j * 8);
      UNROLL for (int slab = 0; slab < Rows::kSlabs; ++slab) {
        u32 words[4][4] = {};
        UNROLL for (int i = 0; i < 16; ++i) {
          const int c = slab * 64 + i / 4 * 16 + thread / 8, j = i % 4;
          if (own + j * 8 < there && begin + c < Rows::kFeatures) words[i / 4][j] = load_u32(from[j] + c * 4);
        }
        UNROLL for (int i = 0; i < 4; ++i) {
          const int c = i * 16 + thread / 8, place = IN_ORDER ? c : c / 32 * 32 + c % 32 / 4 + c % 4 * 8;
          put_rows(words[i], slabs + slab * kSlab + swizzled(place, own));
        }
      }
    }
  }
  DEVICE void take_chunks(int thread) const {
    const Tile at = tile();
    const i64 column_g = i64(at.group) * Q + at.q, column_x = i64(at.group) * P + at.p;
    const void *g = params.weights[Pass::WEIGHT], *x = params.x;
    RingCursor<Pass::SLOTS> copied{0, 1}, taken{0, 1};
    int to = 0, from = 0;  // among pieces of chunks
    const auto copy_next = [&](int chunk) {
      if (chunk < chunks) {
        if constexpr (kCopies) slots.wait_until_empty(copied);
        const u32 slabs = slots.at(copied.slot), pieces = memory + kPieces + to * kPiecesBytes;
        const i64 first = first_row(chunk);
        copy_rows<PiecesG, kTakesG>(g, first, column_g, Q - at.q, slabs, pieces, thread);
        copy_rows<PiecesX, kTakesX>(x, first, column_x, P - at.p, slabs + kLeft * kSlab, pieces + kBytesG, thread);
      }
      commit_copies();
      copied.next();
      to = to == Pass::AHEAD ? 0 : to + 1;
    };
    ROLL for (int i = 0; i < Pass::AHEAD; ++i) copy_next(blockIdx.x + i * gridDim.x);
    ROLL for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      wait_for_copies<Pass::AHEAD - 1>();
      sync_warpgroup(WM * WN);  // this chunk's copies are there, and what the next ones overwrite has been taken
      copy_next(chunk + Pass::AHEAD * gridDim.x);
      if constexpr (!kCopies) slots.wait_until_empty(taken);
      const u32 slabs = slots.at(taken.slot), pieces = memory + kPieces + from * kPiecesBytes;
      const i64 first = first_row(chunk);
      if constexpr (kTakesG) take_rows<PiecesG, false>(g, first, column_g, at.q, slabs, pieces, thread);
      if constexpr (kTakesX)
        take_rows<PiecesX, !kSideBySide>(x, first, column_x, at.p, slabs + kLeft * kSlab, pieces + kBytesG, thread);
      arrive(slots.full(taken.slot));
      taken.next();
      from = from == Pass::AHEAD ? 0 : from + 1;
    }
  }

  using Sums = float[HEIGHT][N / 2];
  static DEVICE u64 slabs(u32 first) {
    if constexpr (kTurns) return turned_operand(first, kSlab);
    return operand(first);
  }
  DEVICE u64 right_operand(u32 slot) const { return slabs(slot + kLeft * kSlab + warpgroup / WM * (N * 128)); }
  using ColumnSums = float[HEIGHT][4];  // eight times the same
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
        if constexpr (BIAS) add_columns(columns[h], slab + step * (kTurns ? 128 : 2), add || step > 0);
      }
    commit_products();
  }
  static DEVICE u32 ones() {
    if constexpr (kTurns)
      return Pair<Element>(1.f, 1.f).bits;
    else
      return __float_as_uint(1.f);
  }
  template <class Left> DEVICE void add_columns(float (&columns)[4], const Left& left, bool add) const {
    const u64 ones = slabs(memory + kOnes);  // of any k
    if constexpr (kTurns)
      Wgmma<Element, 8>::multiply_turned(columns, left, ones, add);
    else
      Wgmma<Element, 8>::multiply(columns, left, ones, add);
  }

  // Operand A from rows of G, of 8 k's for each step. A thread loads what lies side by side: two q's, its rows of one
  // product, or four, those of two.
  static constexpr bool kFours = HEIGHT % 2 == 0;
  static constexpr int kSteps = HEIGHT > 2 ? 1 : 2, kParts = 4 / kSteps;  // loaded at once, of a chunk
  using Left = u32[kSteps][HEIGHT][4];
  DEVICE void load_left(Left& left, u32 slot, int part) const {
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
            UNROLL for (int i = 0; i < 4; ++i) left[step][h + i / 2][half * 2 + i % 2] = tf32_of(x[i]);
          } else {
            u32 x[2];
            load_u32x2(at, x);
            left[step][h][half * 2] = tf32_of(x[0]), left[step][h][half * 2 + 1] = tf32_of(x[1]);
          }
        }
      UNROLL for (int h = 0; h < HEIGHT; ++h) settle(left[step][h]);
    }
  }
  template <bool BIAS>
  DEVICE void multiply_left(Sums& sums, ColumnSums& columns, const Left& left, u64 right, int part, bool add) const {
    open_products();
    UNROLL for (int step = 0; step < kSteps; ++step)
      UNROLL for (int h = 0; h < HEIGHT; ++h) {
        Wgmma<Element, N>::multiply(sums[h], left[step][h], right + (part * kSteps + step) * 2, add || step > 0);
        if constexpr (BIAS) add_columns(columns[h], left[step][h], add || step > 0);
      }
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
  template <bool BIAS> DEVICE void consume() const {
    Sums sums;
    ColumnSums columns;
    Left left[2];  // in turns: the products before still read theirs
    int last = -1;
    RingCursor<Pass::SLOTS> cursor{0, 0};
    if constexpr (Pass::SPLIT) {
      UNROLL for (auto& some : sums)
        UNROLL for (float& sum : some) sum = 0;
    }
    ROLL for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      slots.wait_until_full(cursor);
      fence_copy_engine();
      if constexpr (Pass::SPLIT) {
        multiply_split(sums, slots.at(cursor.slot));
        release(cursor.slot);
      } else if constexpr (kLoadsLeft) {
        const u32 from = slots.at(cursor.slot);
        UNROLL for (int part = 0; part < kParts; ++part) {
          load_left(left[part % 2], from, part);
          multiply_left<BIAS>(sums, columns, left[part % 2], right_operand(from), part, part > 0 || last >= 0);
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
    if constexpr (BIAS) {
      UNROLL for (auto& some : columns) touch(some);
      store(columns);
    }
    store(sums);
  }

  // The first q of a thread, in the tile, and how far below it that of another of its rows is.
  DEVICE int own_q() const {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, first = warpgroup % WM * HEIGHT * 64;
    if constexpr (kLoadsLeft) return first + (kFours ? warp * 32 + g * 4 : warp * 16 + g * 2);
    return first + (kTurns ? warp * 16 + g : warp / 2 * 32 + g * 4 + warp % 2 * 2);
  }
  static constexpr DEVICE int down(int h, int half) {
    return kLoadsLeft && kFours ? h / 2 * 128 + h % 2 * 2 + half : h * 64 + half * (kTurns ? 8 : 1);
  }
  // Where a q of G, in whatever order, comes among those of the weight.
  static DEVICE int in_order(int q) { return q % Pass::MIXED_ROWS * Pass::MIXED_COLUMNS + q / Pass::MIXED_ROWS; }
  DEVICE void store(const ColumnSums& columns) const {
    if (threadIdx.x % 4) return;
    const int q = tile().q + own_q();
    Result* to = static_cast<Result*>(params.y) + (blockIdx.x * kPart + kWeights + q);
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int half = 0; half < 2; ++half) {
        if (q + down(h, half) < Q) store_global(to + down(h, half), narrow<Result>(columns[h][half * 2]));
      }
  }

  // Sums fill whole sectors of L2, as elements of 32 bits do; those of 16, once neighbours have exchanged two of four.
  DEVICE void store(const Sums& sums) const {
    const Tile at = tile();
    const int t = threadIdx.x % 4, q = at.q + own_q(), p = at.p + warpgroup / WM * N;
    Result* to = static_cast<Result*>(params.y) + (blockIdx.x * kPart + i64(at.group) * Q * P);
    UNROLL for (int h = 0; h < HEIGHT; ++h)
      UNROLL for (int half = 0; half < 2; ++half) {
        const int end = q + down(h, half) < Q ? P : 0;  // all of a warp exchange, whose rows may end between
        store_row(sums[h], half, to + i64(in_order(q + down(h, half))) * P, p, t, end);
      }
  }
  DEVICE void store_row(const float (&sums)[N / 2], int half, Result* to, int p, int t, int end) const {
    if constexpr (!kSideBySide) {
      UNROLL for (int n = 0; n < N / 8; ++n)
        UNROLL for (int i = 0; i < 2; ++i) {
          const int c = p + n * 8 + t * 2 + i;
          if (c < end) store_global(to + c, narrow<Result>(sums[n * 4 + half * 2 + i]));
        }
    } else if constexpr (!kTurns) {
      UNROLL for (int n = 0; n < N / 8; n += 4)
        UNROLL for (int i = 0; i < 2; ++i) {
          u32 words[4];
          UNROLL for (int j = 0; j < 4; ++j) words[j] = __float_as_uint(sums[(n + j) * 4 + half * 2 + i]);
          const int c = p + n * 8 + t * 8 + i * 4;
          if (c < end) store_global<16>(to + c, words);
        }
    } else if constexpr (is_same<Result, Element>) {
      const int odd = t & 1;
      UNROLL for (int n = 0; n < N / 8; n += 2) {
        const float* near = &sums[n * 4 + half * 2];
        const u32 first = Pair<Element>(near[0], near[1]).bits, second = Pair<Element>(near[4], near[5]).bits;
        const u32 given = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
        const u32 words[2] = {odd ? given : first, odd ? second : given};
        const int c = p + (n + odd) * 8 + t / 2 * 4;
        if (c < end) store_global<8>(to + c, words);
      }
    } else {
      UNROLL for (int n = 0; n < N / 8; n += 2) {
        u32 words[4];
        four_columns(&sums[n * 4 + half * 2], words);
        const int c = p + (n + t % 2) * 8 + t / 2 * 4;
        if (c < end) store_global<16>(to + c, words);
      }
    }
  }

  DEVICE void run() const {
    slots.init(kLoadsLeft ? 256 : 128, WM * WN * 4);  // what is stored, and what is copied
    for (int at = threadIdx.x * 4; at < kOnesBytes; at += (kConsumers + 128) * 4)
      store_shared(memory + kOnes + at, ones());
    if constexpr (Pass::BIAS) fence_copy_engine();
    __syncthreads();
    if (threadIdx.x < kConsumers) {
      take_registers<Pass::MORE>();
      if (Pass::BIAS && warpgroup < WM && tile().p == 0)
        consume<Pass::BIAS>();
      else
        consume<false>();
    } else {
      give_registers<Pass::FEWER>();
      if constexpr (kTakes)
        take_chunks(threadIdx.x - kConsumers);
      else if constexpr (kTurns)
        copy_chunks(threadIdx.x - kConsumers);
      else
        turn_chunks(threadIdx.x - kConsumers);
    }
  }
};
