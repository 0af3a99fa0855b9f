// A pass of four or five small square factors in float, a sample's state at a time: FMA, which such factors are too small to
// give to the matrix unit. A thread has what two modes have, for one index of all others, in registers:
//
//     memory -> [a, b] of each (c, d, e) -> shared memory -> [d, e] of each (a, b, c) -> c -> bias, activation -> memory
//
// so the state passes through shared memory twice. There it is rows (a, b, c) of all (d, e), padded by 16 bytes. A warp's rows
// have all c of their (a, b): behind [a, b] a warp needs no other. Threads ask for the next unit before they store this one.
//
// Pass: A, B, C (1: there is no such mode), D, E; FIRST (the weight of a), UNITS_PER_SAMPLE, THREADS; BIAS, Activation
#pragma once
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "finish/sums.cuh"

template <int N> DEVICE void load_row(u32 from, float (&x)[N]) {
  UNROLL for (int i = 0; i < N; i += 4) {
    u32 word[4];
    load_u32x4(from + i * 4, word);
    UNROLL for (int j = 0; j < 4; ++j) x[i + j] = __uint_as_float(word[j]);
  }
}
template <int N> DEVICE void store_row(u32 to, const float (&x)[N]) {
  UNROLL for (int i = 0; i < N; i += 4)
    store_u32x4(to + i * 4, {__float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                             __float_as_uint(x[i + 3])});
}

// Y += w x', y = w X and y = X w of what registers hold.
template <int M, int N> DEVICE void add_outer(float (&y)[M][N], const float (&w)[M], const float (&x)[N]) {
  UNROLL for (int m = 0; m < M; ++m)
    UNROLL for (int n = 0; n < N; ++n) y[m][n] += w[m] * x[n];
}
template <int M, int N> DEVICE void left_times(float (&y)[N], const float (&w)[M], const float (&x)[M][N]) {
  UNROLL for (int n = 0; n < N; ++n) y[n] = w[0] * x[0][n];
  UNROLL for (int m = 1; m < M; ++m)
    UNROLL for (int n = 0; n < N; ++n) y[n] += w[m] * x[m][n];
}
template <int M, int N> DEVICE void times_right(float (&y)[M], const float (&x)[M][N], const float (&w)[N]) {
  UNROLL for (int m = 0; m < M; ++m) y[m] = x[m][0] * w[0];
  UNROLL for (int n = 1; n < N; ++n)
    UNROLL for (int m = 0; m < M; ++m) y[m] += x[m][n] * w[n];
}

// What the passes forward and backward have in common: where weights and states lie, and what makes the states.
template <class Pass> struct SmallFloatState {
  static constexpr int A = Pass::A, B = Pass::B, C = Pass::C, D = Pass::D, E = Pass::E;
  static constexpr int kOuter = A * B, kInner = D * E, kColumns = C * kInner, kRows = kOuter * C, kSize = kOuter * kColumns;
  static constexpr int kRow = (kInner + 4) * 4, kSlab = C * kRow;  // bytes of a row, and of all rows of an (a, b)
  static constexpr int kSlabs = 32 / C, kLanes = kInner / 4;       // of a warp; that read a row
  static_assert(B % 4 == 0 && D % 4 == 0 && E % 4 == 0 && A % 4 == 0 && 32 % C == 0 && (C == 1 || C % 4 == 0));
  static_assert(kRow / 16 % 2 && 32 % kLanes == 0 && kSlabs % (32 / kLanes) == 0);

  // Weights lie as they are, and turned behind that.
  static constexpr u32 kA = 0, kB = kA + A * A * 8, kC = kB + B * B * 8, kD = kC + (C > 1 ? C * C * 8 : 0), kE = kD + D * D * 8;
  static constexpr u32 kWeights = kE + E * E * 8;

  const Params& params;
  const int warp, lane;
  const u32 weights, state;
  const i64 units;

  DEVICE SmallFloatState(const Params& given)
      : params(given), warp(threadIdx.x / 32), lane(threadIdx.x % 32), weights(shared_address(shared_memory)),
        state(weights + kWeights), units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  template <int N, u32 AT> DEVICE void weight(int q, float (&w)[N]) const { load_row(weights + AT + q * N * 4, w); }
  template <int N, u32 AT> DEVICE void turned(int p, float (&w)[N]) const { weight<N, AT + N * N * 4>(p, w); }

  DEVICE void load_weights() const {
    constexpr int kBehind = Pass::FIRST + (C > 1 ? 3 : 2);
    load_weight<A, kA>(Pass::FIRST), load_weight<B, kB>(Pass::FIRST + 1);
    if constexpr (C > 1) load_weight<C, kC>(Pass::FIRST + 2);
    load_weight<D, kD>(kBehind), load_weight<E, kE>(kBehind + 1);
  }
  template <int N, u32 AT> DEVICE void load_weight(int parameter) const {
    const float* from = static_cast<const float*>(params.weights[parameter]);
    ROLL for (int j = threadIdx.x; j < N * N; j += Pass::THREADS) {
      const float x = from[j];
      store_shared(weights + AT + j * 4, x);
      store_shared(weights + AT + (N * N + j % N * N + j / N) * 4, x);
    }
  }

  // [a, b] of a column (c, d, e). Behind the last unit zeros: what x was before must not stay in registers until here.
  DEVICE void load(float (&x)[A][B], i64 unit, int column) const {
    const float* from = static_cast<const float*>(params.x) + unit * kSize + column;
    UNROLL for (int i = 0; i < kOuter; ++i) x[i / B][i % B] = 0;
    if (unit < units)
      UNROLL for (int i = 0; i < kOuter; ++i) x[i / B][i % B] = from[i * kColumns];
  }
  static DEVICE u32 place(int column) { return column / kInner * kRow + column % kInner * 4; }  // of its first element
  // b of a column, to shared memory
  DEVICE void put_column(const float (&x)[A][B], int column) const {
    const u32 to = state + place(column);
    UNROLL_BY(2) for (int q = 0; q < B; ++q) {
      float w[B], y[A];
      weight<B, kB>(q, w);
      times_right(y, x, w);
      UNROLL for (int a = 0; a < A; ++a) store_shared(to + (a * B + q) * kSlab, y[a]);
    }
  }

  // d of a row, of shared memory
  DEVICE void contract_d(float (&y)[D][E], u32 row) const {
    UNROLL for (int q = 0; q < D; ++q)
      UNROLL for (int e = 0; e < E; ++e) y[q][e] = 0;
    UNROLL_BY(2) for (int p = 0; p < D; ++p) {
      float w[D], x[E];
      turned<D, kD>(p, w);
      load_row(row + p * E * 4, x);
      add_outer(y, w, x);
    }
  }
  // e of a row, to shared memory
  DEVICE void put_row(const float (&x)[D][E], u32 row) const {
    ROLL for (int first = 0; first < E; first += 4) {
      float y[4][D];
      UNROLL for (int q = 0; q < 4; ++q) {
        float w[E];
        weight<E, kE>(first + q, w);
        times_right(y[q], x, w);
      }
      UNROLL for (int d = 0; d < D; ++d) store_row(row + (d * E + first) * 4, {y[0][d], y[1][d], y[2][d], y[3][d]});
    }
  }
};

template <class Pass> struct SmallFloat : SmallFloatState<Pass> {
  using Base = SmallFloatState<Pass>;
  using Base::A, Base::B, Base::C, Base::kRow, Base::kSlab, Base::kSlabs, Base::kLanes, Base::kInner, Base::kColumns, Base::kSize;
  using Base::params, Base::warp, Base::lane, Base::state, Base::units;
  static_assert(kColumns == Base::kRows && Base::kRows == Pass::THREADS);

  DEVICE SmallFloat(const Params& given) : Base(given) {}

  DEVICE void run() const {
    float x[A][B];
    i64 unit = blockIdx.x;
    Base::load(x, unit, threadIdx.x);
    Base::load_weights();
    __syncthreads();
    ROLL for (; unit < units; unit += gridDim.x) {
      contract_a(x);
      Base::put_column(x, threadIdx.x);
      __syncthreads();
      {
        const u32 row = state + threadIdx.x * kRow;
        float y[Base::D][Base::E];
        Base::contract_d(y, row);
        Base::put_row(y, row);
      }
      __syncwarp();
      Base::load(x, unit + gridDim.x, threadIdx.x);
      store(unit);
    }
  }

  // Where it lies, four columns at a time. Registers have no room for the whole weight: behind a barrier it is read again.
  DEVICE void contract_a(float (&x)[A][B]) const {
    UNROLL for (int first = 0; first < B; first += 4) {
      if (first + 4 == B) __syncthreads();  // the last unit has been read
      float some[A][4], y[A][4];
      UNROLL for (int a = 0; a < A; ++a)
        UNROLL for (int i = 0; i < 4; ++i) some[a][i] = x[a][first + i];
      UNROLL for (int q = 0; q < A; ++q) {
        float w[A];
        Base::template weight<A, Base::kA>(q, w);
        left_times(y[q], w, some);
      }
      UNROLL for (int a = 0; a < A; ++a)
        UNROLL for (int i = 0; i < 4; ++i) x[a][first + i] = y[a][i];
    }
  }

  // c of the warp's rows, four columns of a lane at a time, and what comes behind it
  DEVICE void store(i64 unit) const {
    const typename Pass::Activation activation(params);
    const int column = lane % kLanes * 4;
    const float* biases = static_cast<const float*>(params.bias) + unit % Pass::UNITS_PER_SAMPLE * kSize + column;
    float* y_of_unit = static_cast<float*>(params.y) + unit * kSize + column;
    ROLL for (int slab = warp * kSlabs + lane / kLanes; slab < (warp + 1) * kSlabs; slab += 32 / kLanes) {
      const u32 from = state + slab * kSlab + column * 4;
      float y[C][4] = {};
      if constexpr (C == 1) {
        load_row(from, y[0]);
      } else {
        UNROLL_BY(2) for (int p = 0; p < C; ++p) {
          float w[C], x[4];
          Base::template turned<C, Base::kC>(p, w);
          load_row(from + p * kRow, x);
          add_outer(y, w, x);
        }
      }
      const float* bias = biases + i64(slab) * kColumns;
      float* to = y_of_unit + i64(slab) * kColumns;
      UNROLL for (int q = 0; q < C; ++q) {
        u32 word[4], more[4] = {};
        if constexpr (Pass::BIAS) load_global(bias + q * kInner, more);
        UNROLL for (int i = 0; i < 4; ++i)
          word[i] = __float_as_uint(activation.of(Pass::BIAS ? y[q][i] + __uint_as_float(more[i]) : y[q][i]));
        store_global<16>(to + q * kInner, word);
      }
    }
  }
};
