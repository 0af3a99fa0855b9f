// The backward pass of four or five small square factors in float, in one: for each unit the states forward once more, then
// all weights' gradients and that of x on the way back, as small_float.cuh has states and registers.
//
//     x, by columns: a, b -> shared memory; by a warp's rows: d, e, [c], dC, back, dE, back, dD, back -> shared memory;
//     x once more, by columns: a, dB, back, dA, back -> memory
//
// A thread's sums of a weight lie in a row of the warp's scratch memory, as soon as they are there; then each lane adds up
// four of them over the rows, and keeps these through all units: in the same order every time.
//
// Pass: A, B, C (1: there is no such mode), D, E; FIRST (the weight of a), UNITS_PER_SAMPLE; THREADS, which have a column and
//       a row after the other; GRAD (the parameter that G is)
#pragma once
#include "kernels/kronecker/small_float.cuh"

template <class Pass> struct SmallFloatBackward : SmallFloatState<Pass> {
  using Base = SmallFloatState<Pass>;
  using Base::A, Base::B, Base::C, Base::D, Base::E, Base::kInner, Base::kLanes, Base::kColumns, Base::kRow, Base::kSlab;
  using Base::kA, Base::kB, Base::kC, Base::kD, Base::kE;
  using Base::kSize, Base::params, Base::warp, Base::lane, Base::state, Base::units;
  static constexpr int kThreads = Pass::THREADS, kItems = kColumns / kThreads;  // columns and rows of a thread
  static constexpr int kAtOnce = 32 / kLanes;  // (a, b)'s that a warp reads at once
  static constexpr int kSteps = Base::kSlabs / kAtOnce, kModes = C > 1 ? 5 : 4;
  static constexpr int kSums = A * A + B * B + (C > 1 ? C * C : 0) + D * D + E * E;
  static_assert(Base::kRows == kColumns && kColumns % kThreads == 0);
  static_assert(A * A <= kInner && B * B <= kInner && C * C <= kInner && D * D <= kInner && E * E <= kInner);

  const u32 scratch, own;  // the warp's, and the lane's row of it
  DEVICE SmallFloatBackward(const Params& given)
      : Base(given), scratch(state + (Base::kRows + warp * 32) * kRow), own(scratch + lane * kRow) {}

  DEVICE void run() const {
    float x[A][B], sums[kModes][4] = {};
    i64 unit = blockIdx.x;
    Base::load(x, unit, column_of(0));
    Base::load_weights();
    __syncthreads();
    ROLL for (; unit < units; unit += gridDim.x) {
      ROLL for (int item = 0; item < kItems; ++item) {
        float y[A][B];
        contract_a(y, x);
        if (item + 1 < kItems) Base::load(x, unit, column_of(item + 1));
        Base::put_column(y, column_of(item));
      }
      ask_for(unit + gridDim.x);
      __syncthreads();
      ROLL for (int item = 0; item < kItems; ++item) back_by_row(unit, item * kThreads + warp * 32, sums);
      Base::load(x, unit, column_of(0));
      __syncthreads();
      ROLL for (int item = 0; item < kItems; ++item) {
        const bool more = item + 1 < kItems;
        back_by_column(x, unit, column_of(item), more ? unit : unit + gridDim.x, column_of(more ? item + 1 : 0), sums);
      }
      __syncthreads();
    }
    store(sums);
  }

  static DEVICE int column_of(int item) { return item * kThreads + threadIdx.x; }

  // The next unit, on its way to L2
  DEVICE void ask_for(i64 unit) const {
    if (unit >= units) return;
    const float* x = static_cast<const float*>(params.x) + unit * kSize;
    const float* grad = static_cast<const float*>(params.weights[Pass::GRAD]) + unit * kSize;
    ROLL for (int at = threadIdx.x * 32; at < kSize; at += kThreads * 32) prefetch(x + at), prefetch(grad + at);
  }

  DEVICE void contract_a(float (&y)[A][B], const float (&x)[A][B]) const {
    UNROLL for (int q = 0; q < A; ++q)
      UNROLL for (int b = 0; b < B; ++b) y[q][b] = 0;
    UNROLL for (int p = 0; p < A; ++p) {
      float w[A];
      Base::template turned<A, kA>(p, w);
      add_outer(y, w, x[p]);
    }
  }

  // Of all lanes' sums for a weight, which lie in the warp's rows, this lane's four: with those of other lanes in `store`.
  template <int N> DEVICE void add_up(float (&sums)[4]) const {
    __syncwarp();
    constexpr int kFours = N * N / 4;
    float sum[4] = {};
    UNROLL_BY(8) for (int i = 0; i < kFours; ++i) {
      float more[4];
      load_row(scratch + (lane / kFours + i * (32 / kFours)) * kRow + lane % kFours * 16, more);
      UNROLL for (int j = 0; j < 4; ++j) sum[j] += more[j];
    }
    UNROLL for (int i = 0; i < 4; ++i) sums[i] += sum[i];
    __syncwarp();
  }

  // From the state behind a and b to the gradient of that, in its place: rows `first` and following, one for each lane.
  DEVICE void back_by_row(i64 unit, int first, float (&sums)[kModes][4]) const {
    const u32 row = state + (first + lane) * kRow;
    const int column = lane % kLanes * 4;
    const float* grad = static_cast<const float*>(params.weights[Pass::GRAD]) + unit * kSize +
                        i64(first / C + lane / kLanes) * kColumns + column;
    float g[kSteps][C][4];
    if constexpr (C > 1) load_grad(g, grad);
    float t[D][E];
    Base::contract_d(t, row);
    if constexpr (C > 1) {
      Base::put_row(t, own);
      __syncwarp();
      float d_c[C][C] = {};
      const u32 from = scratch + lane / kLanes * kSlab + column * 4;
      UNROLL for (int step = 0; step < kSteps; ++step) {
        UNROLL for (int p = 0; p < C; ++p) {
          const u32 at = from + step * kAtOnce * kSlab + p * kRow;
          float x[4], w[C], y[4];
          load_row(at, x);
          Base::template turned<C, kC>(p, w);
          UNROLL for (int i = 0; i < 4; ++i)
            UNROLL for (int q = 0; q < C; ++q) d_c[q][p] += g[step][q][i] * x[i];
          left_times(y, w, g[step]);
          store_row(at, y);
        }
      }
      __syncwarp();
      float u[D][E];
      load_rows(u, own);
      __syncwarp();
      UNROLL for (int q = 0; q < C; ++q) store_row(own + q * C * 4, d_c[q]);
      add_up<C>(sums[2]);
      back_by_row(u, t, row, sums);
    } else {
      float u[D][E];
      const float* from = static_cast<const float*>(params.weights[Pass::GRAD]) + unit * kSize + i64(first + lane) * kInner;
      UNROLL for (int d = 0; d < D; ++d)
        UNROLL for (int e = 0; e < E; e += 4) {
          u32 word[4];
          load_global(from + d * E + e, word);
          UNROLL for (int i = 0; i < 4; ++i) u[d][e + i] = __uint_as_float(word[i]);
        }
      back_by_row(u, t, row, sums);
    }
  }
  DEVICE void load_grad(float (&g)[kSteps][C][4], const float* from) const {
    UNROLL for (int step = 0; step < kSteps; ++step)
      UNROLL for (int c = 0; c < C; ++c) {
        u32 word[4];
        load_global(from + step * kAtOnce * kColumns + c * kInner, word);
        UNROLL for (int i = 0; i < 4; ++i) g[step][c][i] = __uint_as_float(word[i]);
      }
  }
  static DEVICE void load_rows(float (&x)[D][E], u32 from) {
    UNROLL for (int d = 0; d < D; ++d) load_row(from + d * E * 4, x[d]);
  }
  // e and d: from what d has made, `t`, and the gradient behind e, `u`.
  DEVICE void back_by_row(const float (&u)[D][E], const float (&t)[D][E], u32 row, float (&sums)[kModes][4]) const {
    float h[D][E] = {};
    UNROLL for (int q = 0; q < E; ++q) {
      float g[D], w[E], sum[E];
      UNROLL for (int d = 0; d < D; ++d) g[d] = u[d][q];
      Base::template weight<E, kE>(q, w);
      add_outer(h, g, w);
      left_times(sum, g, t);
      store_row(own + q * E * 4, sum);
    }
    add_up<E>(sums[kModes - 1]);
    UNROLL_BY(2) for (int p = 0; p < D; ++p) {
      float x[E], w[D], y[E], sum[D];
      load_row(row + p * E * 4, x);
      Base::template turned<D, kD>(p, w);
      left_times(y, w, h);
      times_right(sum, h, x);
      store_row(row + p * E * 4, y);
      store_row(own + p * D * 4, sum);
    }
    add_up<D>(sums[kModes - 2]);
  }

  // b and a, and the next column of x in place of this.
  DEVICE void back_by_column(float (&x)[A][B], i64 unit, int column, i64 next_unit, int next, float (&sums)[kModes][4]) const {
    float t[A][B], h[A][B] = {};
    contract_a(t, x);
    const u32 from = state + Base::place(column);
    UNROLL_BY(2) for (int q = 0; q < B; ++q) {
      float g[A], w[B], sum[B];
      UNROLL for (int a = 0; a < A; ++a) g[a] = __uint_as_float(load_u32(from + (a * B + q) * kSlab));
      Base::template weight<B, kB>(q, w);
      add_outer(h, g, w);
      left_times(sum, g, t);
      store_row(own + q * B * 4, sum);
    }
    add_up<B>(sums[1]);
    float* to = static_cast<float*>(params.y) + unit * kSize + column;
    const float* ahead = static_cast<const float*>(params.x) + next_unit * kSize + next;
    UNROLL for (int p = 0; p < A; ++p) {
      float w[A], y[B], sum[A];
      Base::template turned<A, kA>(p, w);
      left_times(y, w, h);
      UNROLL for (int b = 0; b < B; ++b) store_global(to + (p * B + b) * kColumns, y[b]);
      times_right(sum, h, x[p]);
      store_row(own + p * A * 4, sum);
      UNROLL for (int b = 0; b < B; ++b) {
        u32 word[1];
        load_global<4>(ahead + (p * B + b) * kColumns, word, next_unit < units);
        x[p][b] = __uint_as_float(word[0]);
      }
    }
    add_up<A>(sums[0]);
  }

  // All warps' sums, to where this block's belong. Those of a and d are turned.
  DEVICE void store(const float (&sums)[kModes][4]) const {
    UNROLL for (int mode = 0; mode < kModes; ++mode)
      store_row(state + (mode * kThreads + threadIdx.x) * 16, sums[mode]);
    __syncthreads();
    store_weight<A, 0, 0, true>(), store_weight<B, 1, A * A, false>();
    if constexpr (C > 1) store_weight<C, 2, A * A + B * B, false>();
    store_weight<D, kModes - 2, kSums - E * E - D * D, true>(), store_weight<E, kModes - 1, kSums - E * E, false>();
  }
  template <int N, int MODE, int AT, bool TURNED> DEVICE void store_weight() const {
    constexpr int kFours = N * N / 4;
    if (threadIdx.x >= kFours) return;
    float sum[4] = {};
    UNROLL_BY(4) for (int thread = threadIdx.x; thread < kThreads; thread += kFours) {
      float more[4];
      load_row(state + (MODE * kThreads + thread) * 16, more);
      UNROLL for (int i = 0; i < 4; ++i) sum[i] += more[i];
    }
    float* to = static_cast<float*>(params.sums) + i64(blockIdx.x) * kSums + AT;
    UNROLL for (int i = 0; i < 4; ++i) {
      const int at = threadIdx.x * 4 + i;
      store_global(to + (TURNED ? at % N * N + at / N : at), sum[i]);
    }
  }
};
