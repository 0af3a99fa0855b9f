// The backward pass of dense layers one behind another, on sm_90a in tf32: all gradients at one visit of x and grad_y.
//
// As dense_backward.cuh, but of 32 bits the matrix unit takes only operands in which what is summed over lies side by
// side. So weights lie in shared memory twice, by inputs and by outputs. What a layer reads, and the gradient of its sums,
// are left operands in registers, and for the weight's gradient are put into shared memory turned: a row of a slab for
// each feature, 32 samples along it. Where in a row a sample lies, and which row is whose, is free. A thread's two samples
// lie side by side, and rows are in the order of sums' columns (dense.cuh): then its stores of 8 bytes meet in no bank.
//
// Pass: as DenseGradients has it, N in whole steps for all layers; run(c), turn_weights(c) and tile(c, x, grad_y, sums, tile,
//       next), which call each layer; GRAD_Y (parameter); in bytes ones_at, own_at, own_bytes (a warpgroup's), behind_at and
//       behind_bytes (two gradients, among its own). Layer: also Slope, back_at (the weight by outputs), state_at and
//       slope_at among a warpgroup's bytes.
#pragma once
#include "kernels/stack/dense_gradients.cuh"

template <class Pass> struct DenseBackward32 : DenseGradients<Pass> {
  using Layers = Dense<Pass>;
  using Base = DenseGradients<Pass>;
  using typename Layers::Element;
  using typename Layers::First;
  using typename Layers::Last;
  template <class L> using Sums = typename Base::template Sums<L>;
  using Layers::group, Layers::lane, Layers::memory, Layers::params, Layers::row, Base::sync;
  static_assert(sizeof(Element) == 4);
  // Bytes of one of two slabs of what a layer reads, and of the gradient of its sums: of 64 rows, if it is a left operand
  template <class L> static constexpr int kSlabX = round_up(L::K, L::TURNED ? 64 : 8) * 128;
  template <class L> static constexpr int kSlabG = round_up(L::N, !L::TURNED || L::BIAS >= 0 ? 64 : 8) * 128;
  using X = u32[First::K / 8][4];
  using G = u32[Last::N / 8][4];

  DEVICE DenseBackward32(const Params& given) : Base(given) {}

  DEVICE u32 own() const { return memory + Pass::own_at + group * Pass::own_bytes; }
  DEVICE void load_x(i64 tile, X& x) const { this->template load<First::P>(params.x, tile, x); }
  DEVICE void load_grad_y(i64 tile, G& g) const { this->template load<Last::Q>(params.weights[Pass::GRAD_Y], tile, g); }
  template <int STEPS> static DEVICE void round(u32 (&a)[STEPS][4]) {
    UNROLL for (int s = 0; s < STEPS; ++s)
      UNROLL for (int i = 0; i < 4; ++i) a[s][i] = tf32_of(a[s][i]);
  }

  // Left operands of 64 samples to two slabs, turned
  template <int SLAB, int STEPS> DEVICE void put(u32 to, const u32 (&a)[STEPS][4]) const {
    const int piece = row % 32 / 16 * 4 + lane.g / 2;
    to += row / 32 * SLAB + lane.g % 2 * 8;
    UNROLL for (int s = 0; s < STEPS; ++s)
      UNROLL for (int i = 0; i < 2; ++i)
        store_f32x2(to + s * 1024 + swizzled(lane.t * 2 + i, piece), __uint_as_float(a[s][i * 2]),
                    __uint_as_float(a[s][i * 2 + 1]));
  }

  // From a lane's first row to the end of the batch, behind which slopes may be anything
  DEVICE int rows_left(i64 tile) const { return int(min(params.batch - tile * 64, i64(64))) - row; }
  // grad_y times the last layer's slopes, as left operand; zero where the layer has no such column.
  DEVICE void steepen_last(const float (&z)[Last::N / 2], G& g, i64 tile) const {
    const int left = rows_left(tile);
    UNROLL for (int s = 0; s < Last::N / 8; ++s)
      UNROLL for (int i = 0; i < 4; ++i) {
        const int h = i % 2, column = i / 2;
        const float steep = __uint_as_float(g[s][i]) * Last::Slope::of(z[s * 4 + h * 2 + column]);
        const bool is_there = h * 8 < left && Layers::template inside<Last>(s, lane.t * 2 + column);
        g[s][i] = tf32_of(__float_as_uint(is_there ? steep : 0.f));
      }
  }
  // Those of a layer before, for the way back; in this lane's words, which only it reads.
  template <class L> DEVICE u32 slopes() const { return own() + L::slope_at + threadIdx.x % 128 * 16; }
  template <class L> DEVICE void keep_slopes(const float (&z)[L::N / 2], i64 tile) const {
    const int left = rows_left(tile);
    UNROLL for (int s = 0; s < L::N / 8; ++s) {
      u32 word[4];
      UNROLL for (int i = 0; i < 4; ++i) word[i] = __float_as_uint(i / 2 * 8 < left ? L::Slope::of(z[s * 4 + i]) : 0.f);
      store_u32x4(slopes<L>() + s * 2048, word);
    }
  }
  template <class L> DEVICE void steepen(const float (&d)[L::N / 2], u32 (&g)[L::N / 8][4]) const {
    UNROLL for (int s = 0; s < L::N / 8; ++s) {
      u32 word[4];
      load_u32x4(slopes<L>() + s * 2048, word);
      UNROLL for (int i = 0; i < 4; ++i) {
        const float steep = d[s * 4 + i] * __uint_as_float(word[i]);
        g[s][i % 2 * 2 + i / 2] =
            tf32_of(__float_as_uint(Layers::template inside<L>(s, lane.t * 2 + i % 2) ? steep : 0.f));
      }
    }
  }
  // The same where the slopes are 1. What padding makes of an infinite gradient, 0 times that, would go into all sums.
  template <class L> DEVICE void narrowed(const float (&d)[L::N / 2], u32 (&g)[L::N / 8][4]) const {
    UNROLL for (int s = 0; s < L::N / 8; ++s)
      UNROLL for (int i = 0; i < 4; ++i)
        g[s][i % 2 * 2 + i / 2] =
            tf32_of(__float_as_uint(Layers::template inside<L>(s, lane.t * 2 + i % 2) ? d[s * 4 + i] : 0.f));
  }

  // The gradient of what a layer reads, of a warpgroup's own samples
  template <class L> DEVICE void multiply_back(const u32 (&g)[L::N / 8][4], float (&d)[L::K / 2]) const {
    UNROLL for (int s = 0; s < L::N / 8; ++s)
      Wgmma<Element, L::K>::multiply(d, g[s], operand(memory + L::back_at + s / 4 * (L::K * 128)) + s % 4 * 2, s > 0);
    commit_products();
  }
  // Of the weight and the bias, from slabs: 64 rows from number `at` on
  template <class L> DEVICE void multiply_sums(Sums<L>& sums, u32 x, u32 g, int at = 0) const {
    const u32 left = L::TURNED ? x : g, right = L::TURNED ? g : x;
    constexpr int kSlabLeft = L::TURNED ? kSlabX<L> : kSlabG<L>, kSlabRight = L::TURNED ? kSlabG<L> : kSlabX<L>;
    UNROLL for (int s = 0; s < 8; ++s) {
      const int slab = s / 4, step = s % 4 * 2;
      UNROLL for (int m = 0; m < Base::template kOwn<L>; ++m)
        Wgmma<Element, Base::template kRight<L>>::multiply(sums.weight[m], operand(left + slab * kSlabLeft + (at + m) * 8192) + step,
                                            operand(right + slab * kSlabRight) + step);
      if constexpr (L::BIAS >= 0)
        UNROLL for (int m = 0; m < Base::template kOwnBias<L>; ++m)
          Wgmma<Element, 8>::multiply(sums.bias[m],
                                      operand(g + slab * kSlabG<L> + (L::N > 64 ? at + m : 0) * 8192) + step,
                                      operand(memory + Pass::ones_at));
    }
    commit_products();
  }
  template <class L> static DEVICE void finish(Sums<L>& sums) {
    wait_for_products<0>();
    Base::template touch_sums<L>(sums);
  }

  // What a layer reads, for its weight's gradient
  template <class L> DEVICE void keep(const u32 (&a)[L::K / 8][4]) const { put<kSlabX<L>>(own() + L::state_at, a); }
  // Begins with a layer's gradients, and makes those of what it reads.
  template <class L> DEVICE void layer(u32 (&g)[L::N / 8][4], Sums<L>& sums, float (&d)[L::K / 2], int turn) const {
    const u32 behind = own() + Pass::behind_at + turn * Pass::behind_bytes;
    put<kSlabG<L>>(behind, g);
    fence_copy_engine();
    sync();
    UNROLL for (int s = 0; s < L::N / 8; ++s) settle(g[s]);
    open_products();
    multiply_back<L>(g, d);
    multiply_sums<L>(sums, own() + L::state_at, behind);
    wait_for_products<1>();
    touch(d);
  }

  // The weight by outputs
  template <class L> DEVICE void turn_weight() const {
    const auto place = [](int rows, int r, int k) {
      const int at = (k / 8 * 8 + k % 2 * 4 + k % 8 / 2) * 4;
      return at / 128 * (rows * 128) + swizzled(r, at % 128 / 16) + at % 16;
    };
    constexpr int kAll = L::N * L::K;
    move_together<kAll, Layers::kThreads, 8>(
        [&](int j) { return j < kAll ? load_u32(memory + L::weight_at + place(L::N, j % L::N, j / L::N)) : 0; },
        [&](int j, u32 x) {
          if (j < kAll) store_shared(memory + L::back_at + place(L::K, j / L::N, j % L::N), x);
        });
  }

  DEVICE void prepare() const {
    Pass::load_weights(*this);
    for (int at = threadIdx.x * 4; at < 1024; at += Layers::kThreads * 4) store_shared(memory + Pass::ones_at + at, 1.f);
    __syncthreads();
    Pass::turn_weights(*this);
    fence_copy_engine();
    __syncthreads();
  }
  DEVICE void run() const {
    prepare();
    Pass::run(*this);
  }
  template <class AllSums> DEVICE void all_tiles(AllSums& sums) const {
    const i64 tiles = (params.batch + 63) / 64, step = i64(gridDim.x) * Pass::GROUPS;
    i64 tile = i64(group) * gridDim.x + blockIdx.x;
    X x;
    G g;
    load_x(tile, x);
    load_grad_y(tile, g);
    ROLL for (; tile < tiles; tile += step) {
      round(x);
      sync();  // the samples before have been read
      Pass::tile(*this, x, g, sums, tile, tile + step);
    }
    Base::meet(tile, tiles);
  }

};
