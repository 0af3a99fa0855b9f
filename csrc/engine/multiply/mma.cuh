// Matrix products of a warp, 16 x 8 tiles: Y[16, 8] += A[16, k] B[k, 8], one struct for each arithmetic.
//
// Lane l = 4 g + t holds rows g and g + 8, columns 2t and 2t + 1 of the sum: {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}.
// Operands come from shared memory. `row` loaders: A, or B by its columns, with k contiguous and STRIDE elements between
// rows, an odd multiple of 16 bytes (32 for doubles), so that no two lanes of an access meet in a bank. `b_by_n`, `a_by_m`: B
// with n, A with m contiguous, k's STRIDE elements apart, an odd multiple of 8 (of 4 for doubles). lane_* is where a lane's
// part of a tile begins, in bytes; what follows differs by constants. ROUND: to tf32, where memory holds whole floats. PAIRS: of
// 32 and 64 bits by n or m, a lane takes k's 2t and 2t + 1 for t and t + 4, so that strides may be odd multiples of 4.
#pragma once
#include "move/memory.cuh"

struct Lane {
  int index, g, t;
  DEVICE explicit Lane(int index) : index(index), g(index >> 2), t(index & 3) {}
  DEVICE Lane() : Lane(threadIdx.x & 31) {}
};

// Rows of 16 bytes as operands: 8 k's of 16 bits or 4 of 32, in their order, by one access for a whole tile. Rows are an
// odd multiple of 16 bytes apart.
template <int SIZE> struct Rows16 {
  static constexpr DEVICE int place_of(int k, bool) { return k; }
  template <int STRIDE> static DEVICE int lane_row_a(Lane l) { return (l.index & 15) * STRIDE * SIZE + (l.index >> 4) * 16; }
  template <int STRIDE> static DEVICE int lane_row_b(Lane l) {
    return ((l.index & 7) + (l.index >> 4) * 8) * STRIDE * SIZE + (l.index >> 3 & 1) * 16;
  }
  template <int STRIDE> static DEVICE void load_row_a(u32 (&a)[4], u32 from) { load_matrices<false>(a, from); }
  template <int STRIDE, int NT> static DEVICE void load_row_b(u32 (&b)[NT][2], u32 from) {
    UNROLL for (int n = 0; n + 2 <= NT; n += 2) {
      u32 r[4];
      load_matrices<false>(r, from + n * 8 * STRIDE * SIZE);
      b[n][0] = r[0], b[n][1] = r[1], b[n + 1][0] = r[2], b[n + 1][1] = r[3];
    }
    if constexpr (NT % 2) load_matrices<false>(b[NT - 1], from + (NT - 1) * 8 * STRIDE * SIZE);
  }
};

// bf16 and f16: k = 16, and 8 for what is left
template <class T> struct Half : Rows16<2> {
  using Element = T;
  static constexpr int kStep = 16, kFlush = 0;
  static constexpr bool kRepairs = false, kRounds = false;
  static DEVICE float rounded(float x) { return x; }
  struct A { u32 r[4]; };
  struct B { u32 r[2]; };
  template <bool, class Operand> static DEVICE void put(Operand& x, int i, u32 word) { x.r[i] = word; }

  template <int STRIDE, bool = false> static DEVICE int lane_b_by_n(Lane l) { return (l.index & 15) * STRIDE * 2; }
  template <int STRIDE, bool = false> static DEVICE int lane_a_by_m(Lane l) {
    return (((l.index & 7) + (l.index >> 4) * 8) * STRIDE + (l.index & 8)) * 2;
  }
  template <int STRIDE, bool = false, bool = true> static DEVICE void load_a_by_m(A& a, u32 from) {
    load_matrices<true>(a.r, from);
  }

  // K is the number of k's left: 8 or at least 16.
  template <int K, int STRIDE, bool = true> static DEVICE void load_row_a(A& a, u32 from) {
    if constexpr (K >= 16) {
      load_matrices<false>(a.r, from);
    } else {
      u32 r[2];
      load_matrices<false>(r, from);
      a.r[0] = r[0], a.r[1] = r[1], a.r[2] = a.r[3] = 0;
    }
  }
  template <int K, int STRIDE, int NT, bool = true> static DEVICE void load_row_b(B (&b)[NT], u32 from) {
    if constexpr (K < 16) from -= (threadIdx.x & 8) * 2;  // the second 8 k's are not there: the first again
    u32 r[NT][2];
    Rows16<2>::load_row_b<STRIDE>(r, from);
    UNROLL for (int n = 0; n < NT; ++n) b[n].r[0] = r[n][0], b[n].r[1] = r[n][1];
  }
  // Lanes 16-31 name the rows of the second tile of a pair: STEP elements behind the first's.
  template <int K, int STRIDE, int NT, int STEP, bool = true, bool = false>
  static DEVICE void load_b_by_n(B (&b)[NT], const u32 (&column)[NT], int lane) {
    if constexpr (K < 16) {
      UNROLL for (int n = 0; n < NT; ++n) {
        u32 r[2];
        load_matrices<true>(r, column[n] - (lane & 8 ? 8 * STRIDE * 2 : 0));
        b[n].r[0] = r[0], b[n].r[1] = 0;
      }
    } else if constexpr (STEP > 0) {
      UNROLL for (int n = 0; n + 2 <= NT; n += 2) {
        u32 r[4];
        load_matrices<true>(r, column[n] + (lane >> 4) * STEP * 2);
        b[n].r[0] = r[0], b[n].r[1] = r[1], b[n + 1].r[0] = r[2], b[n + 1].r[1] = r[3];
      }
      if constexpr (NT % 2) load_matrices<true>(b[NT - 1].r, column[NT - 1]);
    } else {
      UNROLL for (int n = 0; n < NT; ++n) load_matrices<true>(b[n].r, column[n]);
    }
  }

  // Sums of 16 x 16 as operand A of the next product
  static DEVICE void as_a(A& a, const float (*y)[4]) {
    UNROLL for (int i = 0; i < 4; ++i) a.r[i] = Pair<T>(y[i / 2][i % 2 * 2], y[i / 2][i % 2 * 2 + 1]).bits;
  }
  // Their upper or lower 8 rows as operand B, whose columns these are
  static DEVICE void as_b(B& b, const float (*y)[4], int lower) {
    UNROLL for (int i = 0; i < 2; ++i) b.r[i] = Pair<T>(y[i][lower * 2], y[i][lower * 2 + 1]).bits;
  }
  template <int K> static DEVICE void multiply(float (&y)[4], const A& a, const B& b) {
    if constexpr (K >= 16)
      multiply_16<T>(y, a.r, b.r);
    else
      multiply_8<T>(y, a.r, b.r);
  }
};

// float and double: k = 8. What a word becomes as register i of an operand, Self says: put<ROUND>(operand, i, word).
template <class T, class Self> struct Words8 {
  using Element = T;
  using Word = typename WordOf<T>::type;
  static constexpr int kStep = 8, kFlush = 0, kSize = sizeof(T);
  static constexpr bool kRepairs = false, kRounds = false;
  static DEVICE T rounded(T x) { return x; }
  template <int STRIDE, bool PAIRS = false> static DEVICE int lane_b_by_n(Lane l) {
    return ((PAIRS ? 2 : 1) * l.t * STRIDE + l.g) * kSize;
  }
  template <int STRIDE, bool PAIRS = false> static DEVICE int lane_a_by_m(Lane l) { return lane_b_by_n<STRIDE, PAIRS>(l); }
  // From a lane's first k to its second one, and where register i of operand A lies behind the first.
  template <int STRIDE, bool PAIRS> static constexpr int kSecond = (PAIRS ? 1 : 4) * STRIDE * kSize;
  template <int STRIDE, bool PAIRS> static constexpr DEVICE int behind_by_m(int i) {
    return i % 2 * 8 * kSize + i / 2 * kSecond<STRIDE, PAIRS>;
  }
  static DEVICE Word load(u32 from) {
    if constexpr (kSize == 8)
      return load_f64(from);
    else
      return load_u32(from);
  }
  static DEVICE Word word(T x) {
    if constexpr (kSize == 8)
      return x;
    else
      return __float_as_uint(x);
  }

  template <int K, int STRIDE, int NT, int STEP, bool ROUND = true, bool PAIRS = false, class B>
  static DEVICE void load_b_by_n(B (&b)[NT], const u32 (&column)[NT], int) {
    UNROLL for (int n = 0; n < NT; ++n) {
      Self::template put<ROUND>(b[n], 0, load(column[n]));
      Self::template put<ROUND>(b[n], 1, load(column[n] + kSecond<STRIDE, PAIRS>));
    }
  }
  template <int STRIDE, bool PAIRS = false, bool ROUND = true, class A> static DEVICE void load_a_by_m(A& a, u32 from) {
    UNROLL for (int i = 0; i < 4; ++i) Self::template put<ROUND>(a, i, load(from + behind_by_m<STRIDE, PAIRS>(i)));
  }
  // Sums of 16 x 8 as operand A: a lane's columns 2t, 2t + 1 are the k's that it is to have. And their upper or lower 8 rows as
  // operand B.
  template <class A> static DEVICE void as_a(A& a, const T (*y)[4]) {
    UNROLL for (int i = 0; i < 4; ++i) Self::template put<true>(a, i, word(y[0][i % 2 * 2 + i / 2]));
  }
  template <class B> static DEVICE void as_b(B& b, const T (*y)[4], int lower) {
    UNROLL for (int i = 0; i < 2; ++i) Self::template put<true>(b, i, word(y[0][lower * 2 + i]));
  }
};

// 32-bit rows. Where the other operand is sums, a lane's k's are 2t and 2t + 1: then the weights lie so that these are
// what it gets for t and t + 4.
template <class Self> struct Floats : Words8<float, Self>, Rows16<4> {
  static constexpr DEVICE int place_of(int k, bool from_sums) {
    return from_sums ? k / 8 * 8 + k % 2 * 4 + k % 8 / 2 : k;
  }
  template <int K, int STRIDE, bool ROUND = true, class A> static DEVICE void load_row_a(A& a, u32 from) {
    u32 x[4];
    Rows16<4>::load_row_a<STRIDE>(x, from);
    UNROLL for (int i = 0; i < 4; ++i) Self::template put<ROUND>(a, i, x[i]);
  }
  template <int K, int STRIDE, int NT, bool ROUND = true, class B> static DEVICE void load_row_b(B (&b)[NT], u32 from) {
    u32 x[NT][2];
    Rows16<4>::load_row_b<STRIDE>(x, from);
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 2; ++i) Self::template put<ROUND>(b[n], i, x[n][i]);
  }
};

// float through single tf32 products, as PyTorch's own switch allows
struct Tf32 : Floats<Tf32> {
  static constexpr bool kRounds = true;
  static DEVICE float rounded(float x) { return __uint_as_float(tf32_of(__float_as_uint(x))); }
  struct A { u32 r[4]; };
  struct B { u32 r[2]; };
  template <bool ROUND, class Operand> static DEVICE void put(Operand& x, int i, u32 word) {
    x.r[i] = ROUND ? tf32_of(word) : word;
  }
  template <int K> static DEVICE void multiply(float (&y)[4], const A& a, const B& b) { multiply_tf32(y, a.r, b.r); }
};

// float as exact as FMA: each operand is high + low, both tf32, and three of the four products count. The matrix unit
// truncates what it adds to, so every kFlush steps start from zero and are added rounded to nearest.
struct Split3 : Floats<Split3> {
  static constexpr bool kRepairs = true;
  static constexpr int kFlush = 2;
  struct A { u32 high[4], low[4]; };
  struct B { u32 high[2], low[2]; };
  static DEVICE void split(u32 x, u32& high, u32& low) {
    high = tf32_of(x);
    low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
  }
  template <bool, class Operand> static DEVICE void put(Operand& x, int i, u32 word) { split(word, x.high[i], x.low[i]); }
  // Products of high parts summed apart from the others, which infinities make NaN: those do not count then (or_zero).
  static DEVICE void multiply_apart(float (&high)[4], float (&low)[4], const A& a, const B& b) {
    multiply_tf32(low, a.low, b.high);
    multiply_tf32(low, a.high, b.low);
    multiply_tf32(high, a.high, b.high);
  }
  template <int K> static DEVICE void multiply(float (&y)[4], const A& a, const B& b) { multiply_apart(y, y, a, b); }
};

struct Fp64 : Words8<double, Fp64> {
  struct A { double r[4]; };
  struct B { double r[2]; };
  template <bool, class Operand> static DEVICE void put(Operand& x, int i, double word) { x.r[i] = word; }
  // Two neighbouring k's at once: of A, and of B by k. Rows are an odd multiple of 8 apart, or turned against each other.
  template <int STRIDE> static DEVICE int lane_a(Lane l) { return (l.g * STRIDE + l.t * 2) * 8; }
  template <int STRIDE> static DEVICE int lane_b_by_k(Lane l) { return (l.g * STRIDE + l.t * 2) * 8; }
  template <int K, int STRIDE, bool ROUND = true> static DEVICE void load_a(A& a, u32 from) {
    load_f64x2(from, a.r[0], a.r[2]);
    load_f64x2(from + 8 * STRIDE * 8, a.r[1], a.r[3]);
  }
  template <int K, int STRIDE, int NT, bool ROUND = true> static DEVICE void load_b_by_k(B (&b)[NT], u32 from) {
    UNROLL for (int n = 0; n < NT; ++n) load_f64x2(from + n * 8 * STRIDE * 8, b[n].r[0], b[n].r[1]);
  }
  // In the order of k, each double by itself: rows are an odd multiple of 4 apart.
  static constexpr DEVICE int place_of(int k, bool from_sums) { return Tf32::place_of(k, from_sums); }
  template <int STRIDE> static DEVICE int lane_row_a(Lane l) { return (l.g * STRIDE + l.t) * 8; }
  template <int STRIDE> static DEVICE int lane_row_b(Lane l) { return (l.g * STRIDE + l.t) * 8; }
  template <int K, int STRIDE, bool = true> static DEVICE void load_row_a(A& a, u32 from) {
    UNROLL for (int i = 0; i < 4; ++i) a.r[i] = load_f64(from + (i % 2 * 8 * STRIDE + i / 2 * 4) * 8);
  }
  template <int K, int STRIDE, int NT, bool = true> static DEVICE void load_row_b(B (&b)[NT], u32 from) {
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 2; ++i) b[n].r[i] = load_f64(from + (n * 8 * STRIDE + i * 4) * 8);
  }
  template <int K> static DEVICE void multiply(double (&y)[4], const A& a, const B& b) { multiply_f64(y, a.r, b.r); }
};

// Sums of the same places, added
DEVICE void add_sums(float& sum, float more) { sum += more; }
DEVICE void add_sums(double& sum, double more) { sum += more; }
template <class T, int N> DEVICE void add_sums(T (&sum)[N], const T (&more)[N]) {
  UNROLL for (int i = 0; i < N; ++i) add_sums(sum[i], more[i]);
}

// Infinities and NaNs are not what they should be once an operand is split: such sums of a warp are made again, one by one, of COUNT
// products each: products_of(m, n, i) gives number k of sum i of a tile.
template <int COUNT, int MT, int NT, class Of> DEVICE void repair_sums(float (&y)[MT][NT][4], const Of& products_of) {
  bool finite = true;
  UNROLL for (auto& row : y)
    UNROLL for (auto& four : row)
      UNROLL for (float value : four) finite &= is_finite(value);
  if (__all_sync(~0u, finite)) return;
  UNROLL for (int m = 0; m < MT; ++m)
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 4; ++i) {
        if (is_finite(y[m][n][i])) continue;
        const auto product = products_of(m, n, i);
        float sum = 0;
        ROLL for (int k = 0; k < COUNT; ++k) sum += product(k);
        y[m][n][i] = sum;
      }
}
