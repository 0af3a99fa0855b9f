// Operands of tensor products in shared memory, for a group of THREADS: copied there, read from there, and results of it to
// memory. What is called a lane's place is where it begins to read, in the first tile of an operand.
#pragma once
#include "finish/sums.cuh"

template <class Math, class T, int THREADS> struct Operands {
  using Element = T;
  using A = typename Math::A;
  using B = typename Math::B;
  using Real = Sum<Element>;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kUnroll = Math::kRepairs ? 1 : 2;
  static constexpr int kAtOnce = Math::kRepairs || kSize == 8 ? 2 : 16;  // steps whose operands are asked for at once, of few samples
  static constexpr bool kPairs = kSize == 4;  // k's by n and m
  static constexpr int stride(int n) { return n + (kSize == 2 ? 8 : 4); }  // of rows of n elements

  // Where column j of 8 is among k's, if a lane's two are to be its second operand's, and the lane that reads it.
  static constexpr DEVICE int place(int j) { return kSize == 2 ? j : j % 2 * 4 + j / 2; }
  static DEVICE Lane in_order(Lane lane) {
    lane.index = lane.index / 8 * 8 + place(lane.index % 8), lane.g = place(lane.g);
    return lane;
  }
  static constexpr DEVICE int access(int n) { return n * kSize % 16 == 0 ? 16 : n * kSize % 8 == 0 ? 8 : 4; }
  // LENGTH rows of COLUMNS elements, which are FROM_STEP apart where they come from, or in several tensors.
  template <int LENGTH, int COLUMNS, int STRIDE, int EACH = THREADS, int FROM_STEP = COLUMNS, class From>
  static DEVICE void copy(const From& from, u32 to) {
    constexpr int kBytes = access(COLUMNS), kEach = kBytes / kSize, kRow = COLUMNS / kEach;
    UNROLL_BY(4) for (int j = threadIdx.x % EACH; j < LENGTH * kRow; j += EACH) {
      const i64 at = FROM_STEP == COLUMNS ? j * kEach : i64(j / kRow) * FROM_STEP + j % kRow * kEach;
      copy_async<kBytes>(to + (j / kRow * STRIDE + j % kRow * kEach) * kSize, from + at, true);
    }
  }
  // What copies leave of HEIGHT x WIDTH: columns behind theirs, and whole rows.
  template <int LENGTH, int COLUMNS, int HEIGHT, int WIDTH, int STRIDE, int EACH = THREADS>
  static DEVICE void clear_padding(u32 at) {
    constexpr int kWords = (WIDTH - COLUMNS) * kSize / 4;
    if constexpr (kWords > 0)
      for (int j = threadIdx.x % EACH; j < LENGTH * kWords; j += EACH)
        store_shared(at + (j / kWords * STRIDE + COLUMNS) * kSize + j % kWords * 4, 0u);
    for (int j = threadIdx.x % EACH; j < (HEIGHT - LENGTH) * STRIDE * kSize / 16; j += EACH)
      store_u32x4(at + LENGTH * STRIDE * kSize + j * 16, {});
  }
  // To tf32, where a thread's own copies have landed.
  template <int LENGTH, int COLUMNS, int STRIDE, int EACH = THREADS> static DEVICE void round_copies(u32 at) {
    constexpr int kBytes = access(COLUMNS), kEach = kBytes / kSize, kRow = COLUMNS / kEach;
    UNROLL_BY(4) for (int j = threadIdx.x % EACH; j < LENGTH * kRow; j += EACH) {
      const u32 here = at + (j / kRow * STRIDE + j % kRow * kEach) * kSize;
      if constexpr (kEach == 4) {
        u32 x[4];
        load_u32x4(here, x);
        UNROLL for (u32& word : x) word = tf32_of(word);
        store_u32x4(here, x);
      } else {
        UNROLL for (int i = 0; i < kEach; ++i) store_shared(here + i * 4, tf32_of(load_u32(here + i * 4)));
      }
    }
  }
  // sum_of(m, n) += left x right, MT tiles of 16 rows by NT of 8 columns: operand A of a tile and a step, and B of some tiles of a
  // step, MOST at once. float: products of high parts start from zero every few steps; the others, which infinities make NaN, do
  // not count then.
  template <int MT, int NT, int STEPS, int TIMES, int MOST = Math::kRepairs ? 2 : 4, class SumOf, class Left, class Right>
  static DEVICE void multiply_tiles(const SumOf& sum_of, const Left& left, const Right& right) {
    constexpr int kTogether = NT % MOST == 0 ? MOST : NT % 2 == 0 ? 2 : 1;
    if constexpr (Math::kRepairs) {
      constexpr int kFlush = Math::kFlush;
      float low[MT][NT][4] = {};
      UNROLL_BY(TIMES) for (int s = 0; s < STEPS; s += kFlush) {
        A a[kFlush][MT];
        UNROLL for (int j = 0; j < kFlush; ++j)
          UNROLL for (int m = 0; m < MT; ++m)
            if (s + j < STEPS) left(a[j][m], m, s + j);
        UNROLL for (int n = 0; n < NT; n += kTogether) {
          float high[MT][kTogether][4] = {};
          UNROLL for (int j = 0; j < kFlush; ++j) {
            if (s + j >= STEPS) break;
            B some[kTogether];
            right(some, n, s + j);
            UNROLL for (int m = 0; m < MT; ++m)
              UNROLL for (int i = 0; i < kTogether; ++i)
                Math::multiply_apart(high[m][i], low[m][n + i], a[j][m], some[i]);
          }
          UNROLL for (int m = 0; m < MT; ++m)
            UNROLL for (int i = 0; i < kTogether; ++i) add_sums(sum_of(m, n + i), high[m][i]);
        }
      }
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int n = 0; n < NT; ++n)
          UNROLL for (int j = 0; j < 4; ++j) sum_of(m, n)[j] += or_zero(low[m][n][j]);
    } else {
      UNROLL_BY(TIMES) for (int s = 0; s < STEPS; ++s) {
        A a[MT];
        UNROLL for (int m = 0; m < MT; ++m) left(a[m], m, s);
        UNROLL for (int n = 0; n < NT; n += kTogether) {
          B some[kTogether];
          right(some, n, s);
          UNROLL for (int m = 0; m < MT; ++m)
            UNROLL for (int i = 0; i < kTogether; ++i) Math::template multiply<kStep>(sum_of(m, n + i), a[m], some[i]);
        }
      }
    }
  }
  template <int NT, int STEPS, int TIMES = kUnroll, class Left, class Right>
  static DEVICE void multiply(Real (&sums)[NT][4], const Left& left, const Right& right) {
    multiply_tiles<1, NT, STEPS, TIMES>([&](int, int n) -> Real(&)[4] { return sums[n]; },
                                         [&](A& a, int, int s) { left(a, s); }, right);
  }
  template <int STEPS, int TIMES = kUnroll, int MT, int NT, class Left, class Right>
  static DEVICE void multiply(Real (&sums)[MT][NT][4], const Left& left, const Right& right) {
    multiply_tiles<MT, NT, STEPS, TIMES>([&](int m, int n) -> Real(&)[4] { return sums[m][n]; }, left, right);
  }
  // Operands in shared memory, from a lane's place in their first tile on: rows of 16 with k or m contiguous, columns with k
  // or n contiguous.
  template <int STRIDE> static DEVICE auto by_rows(u32 from) {
    return [=](A& a, int s) { Math::template load_row_a<kStep, STRIDE, false>(a, from + s * kStep * kSize); };
  }
  template <int STRIDE> static DEVICE auto by_m(u32 from) {
    return [=](A& a, int s) { Math::template load_a_by_m<STRIDE, kPairs, false>(a, from + s * kStep * STRIDE * kSize); };
  }
  // Of several tiles of rows, and rounded if what lies there is not.
  template <int STRIDE, bool ROUND> static DEVICE auto tiles_by_rows(u32 from) {
    return [=](A& a, int m, int s) {
      Math::template load_row_a<kStep, STRIDE, ROUND>(a, from + (m * 16 * STRIDE + s * kStep) * kSize);
    };
  }
  template <int STRIDE, bool ROUND> static DEVICE auto tiles_by_m(u32 from) {
    return [=](A& a, int m, int s) {
      Math::template load_a_by_m<STRIDE, kPairs, ROUND>(a, from + (s * kStep * STRIDE + m * 16) * kSize);
    };
  }
  template <int STRIDE, bool ROUND = false> static DEVICE auto by_k(u32 from) {
    return [=](auto& some, int n, int s) {
      load_by_k<STRIDE, ROUND>(some, from + (n * 8 * STRIDE + s * kStep) * kSize);
    };
  }
  template <int STRIDE, bool ROUND = false> static DEVICE auto by_n(u32 from, int index) {
    return [=](auto& some, int n, int s) {
      load_by_n<STRIDE, ROUND>(some, from + (s * kStep * STRIDE + n * 8) * kSize, index);
    };
  }
  template <int STRIDE, bool ROUND, int NT> static DEVICE void load_by_k(B (&some)[NT], u32 from) {
    Math::template load_row_b<kStep, STRIDE, NT, ROUND>(some, from);
  }
  template <int STRIDE, bool ROUND, int NT> static DEVICE void load_by_n(B (&some)[NT], u32 from, int index) {
    u32 columns[NT];
    UNROLL for (int i = 0; i < NT; ++i) columns[i] = from + i * 8 * kSize;
    Math::template load_b_by_n<kStep, STRIDE, NT, 8, ROUND, kPairs>(some, columns, index);
  }
  // The same for sums over units
  template <int NT, int STEPS, int TIMES = kUnroll, class Left, class Right>
  static DEVICE void accumulate(Real (&sums)[NT][4], const Left& left, const Right& right) {
    if constexpr (kSize == 8) {
      multiply<NT, STEPS, TIMES>(sums, left, right);
    } else {
      Real more[NT][4] = {};
      multiply<NT, STEPS, TIMES>(more, left, right);
      add_sums(sums, more);
    }
  }

  // Sums, rounded, as an operand in shared memory: a lane's two of a row go to places that are `apart`.
  template <int STRIDE, int MT, int NT> static DEVICE void put_rounded(const Real (&sums)[MT][NT][4], u32 to, int apart) {
    UNROLL for (int m = 0; m < MT; ++m)
      UNROLL for (int n = 0; n < NT; ++n)
        UNROLL for (int i = 0; i < 2; ++i) {
          const u32 here = to + ((m * 16 + i * 8) * STRIDE + n * 8) * kSize;
          const Real first = Math::rounded(sums[m][n][i * 2]), second = Math::rounded(sums[m][n][i * 2 + 1]);
          if (apart == 1)
            store_shared(here, Pair<Element>(first, second));
          else
            store_shared(here, narrow<Element>(first)), store_shared(here + apart * kSize, narrow<Element>(second));
        }
  }

  // 16 rows of sums to rows that are STEP apart; of a tile that is not WHOLE, those before ROWS, and columns before COLUMNS.
  template <int ROWS, int COLUMNS, int STEP, bool WHOLE, int NT, class To>
  static DEVICE void store_sums(const Real (&sums)[NT][4], int first, int column, const To& to, Lane lane) {
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 2; ++i) {
        const int row = first + lane.g + i * 8, c = column + n * 8 + lane.t * 2;
        if (WHOLE || (row < ROWS && c < COLUMNS))
          store_two<COLUMNS % 2 == 0>(to + (i64(row) * STEP + c), sums[n][i * 2], sums[n][i * 2 + 1], c + 1 < COLUMNS);
      }
  }
  // The same by whole pieces, through the warp's own 16 rows at `staged`
  template <int ROWS, int COLUMNS, int STEP, bool WHOLE, int NT, class To>
  static DEVICE void store_pieces(const Real (&sums)[NT][4], int first, int column, const To& to, u32 staged, Lane lane) {
    constexpr int kStaged = NT * 8 + 8;
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 2; ++i)
        store_shared(staged + ((lane.g + i * 8) * kStaged + n * 8 + lane.t * 2) * kSize,
                     Pair<Element>(sums[n][i * 2], sums[n][i * 2 + 1]));
    __syncwarp();
    constexpr int kBytes = access(COLUMNS), kEach = kBytes / kSize, kRow = NT * 8 / kEach;
    UNROLL_BY(4) for (int j = lane.index; j < 16 * kRow; j += 32) {
      const int row = j / kRow, c = j % kRow * kEach;
      if (WHOLE || (first + row < ROWS && column + c < COLUMNS))
        store_words<kBytes>(to + (i64(first + row) * STEP + column + c),
                            load_words<kBytes>(staged + (row * kStaged + c) * kSize));
    }
    __syncwarp();
  }
  // Of 16 bits, by whole pieces; of others, four lanes' sums are 32 bytes and more of a row.
  template <int ROWS, int COLUMNS, int STEP, bool WHOLE, int NT, class To>
  static DEVICE void store_tile(const Real (&sums)[NT][4], int first, int column, const To& to, u32 staged, Lane lane) {
    if constexpr (kSize == 2)
      store_pieces<ROWS, COLUMNS, STEP, WHOLE>(sums, first, column, to, staged, lane);
    else
      store_sums<ROWS, COLUMNS, STEP, WHOLE>(sums, first, column, to, lane);
  }
};
