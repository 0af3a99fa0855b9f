// The backward pass of dense layers one behind another, on sm_90a in 16 bits: all gradients at one visit of x and grad_y.
//
// A warpgroup takes 64 samples forward again as dense.cuh does, and leaves each layer's input and the slope of its
// activation in shared memory. Then back: the gradient of a layer's sums, as a left operand in registers, times the weight
// is the gradient behind the layer before, and, in shared memory as well, times the layer's input that of the weight.
// There the samples are what is summed over: operands lie with samples as rows, which the matrix unit transposes. Sums for
// the weights stay in registers for all samples of a block.
//
// Pass: as DenseGradients has it, N in whole steps for all layers; run(c) and tile(c, x, y, sums, tile, turn), which call each
//       layer; GRAD_Y (parameter); in bytes packed_y, own_at, own_bytes (a warpgroup's), among these behind_at and behind_bytes
//       (two gradients behind a layer), and ones_at. Layer: also Slope, state_at and slope_at among a warpgroup's bytes.
#pragma once
#include "kernels/stack/dense_gradients.cuh"

template <class Pass> struct DenseBackward : DenseGradients<Pass> {
  using Layers = Dense<Pass>;
  using Base = DenseGradients<Pass>;
  using typename Layers::Element;
  using typename Layers::First;
  using typename Layers::Last;
  template <class L> using Sums = typename Base::template Sums<L>;
  using Layers::lane, Layers::memory, Layers::params, Layers::row, Base::sync;
  static_assert(sizeof(Element) == 2);
  static constexpr int kTile = 64 * 128;  // bytes of a slab: 64 samples of 64 features
  const u32 own;  // this warpgroup's

  DEVICE DenseBackward(const Params& given) : Base(given), own(memory + Pass::own_at + this->group * Pass::own_bytes) {}

  // Left operands of 64 samples to shared memory, samples as rows.
  template <int STEPS> DEVICE void put(u32 to, const u32 (&a)[STEPS][4]) const {
    UNROLL for (int s = 0; s < STEPS; ++s)
      UNROLL for (int i = 0; i < 4; ++i) {
        const int piece = s * 2 + i / 2;
        store_shared(to + piece / 8 * kTile + swizzled(row + i % 2 * 8, piece % 8) + lane.t * 4, a[s][i]);
      }
  }

  // What layer L's sums become, and what its slopes are, for the way back; in this lane's words, which only it reads.
  template <class L> DEVICE u32 slopes() const { return own + L::slope_at + threadIdx.x % 128 * 16; }
  template <class L> DEVICE void keep_slopes(const float (&z)[L::N / 2]) const {
    UNROLL for (int n = 0; n < L::N / 8; n += 2) {
      u32 word[4];
      UNROLL for (int i = 0; i < 4; ++i)
        word[i] = Pair<Element>(L::Slope::of(z[n * 4 + i * 2]), L::Slope::of(z[n * 4 + i * 2 + 1])).bits;
      store_u32x4(slopes<L>() + n / 2 * 2048, word);
    }
  }
  // Sums, times layer L's slopes, or where these are 1, as left operands; zero where the layer has no such column. What padding
  // makes of an infinite gradient, 0 times that, would go into all sums.
  template <class L> DEVICE void steepen(const float (&d)[L::N / 2], u32 (&g)[L::N / 16][4]) const { put_back<L, true>(d, g); }
  template <class L> DEVICE void narrowed(const float (&d)[L::N / 2], u32 (&g)[L::N / 16][4]) const { put_back<L, false>(d, g); }
  template <class L, bool SLOPES> DEVICE void put_back(const float (&d)[L::N / 2], u32 (&g)[L::N / 16][4]) const {
    UNROLL for (int s = 0; s < L::N / 16; ++s) {
      u32 word[4];
      if constexpr (SLOPES) load_u32x4(slopes<L>() + s * 2048, word);
      UNROLL for (int i = 0; i < 4; ++i) {
        const int at = s * 8 + i * 2, tile = s * 2 + i / 2;
        const float x = SLOPES ? d[at] * widen(Element{u16(word[i])}) : d[at];
        const float y = SLOPES ? d[at + 1] * widen(Element{u16(word[i] >> 16)}) : d[at + 1];
        g[s][i] = Pair<Element>(Layers::template inside<L>(tile, lane.t * 2) ? x : 0.f,
                                Layers::template inside<L>(tile, lane.t * 2 + 1) ? y : 0.f).bits;
      }
    }
  }

  // Adds a layer's gradients, and makes those of what it reads.
  template <class L> DEVICE void layer(u32 (&g)[L::N / 16][4], Sums<L>& sums, float (&d)[L::K / 2], int& turn) const {
    const u32 behind = own + Pass::behind_at + turn * Pass::behind_bytes, state = own + L::state_at;
    turn ^= 1;
    put(behind, g);
    fence_copy_engine();
    sync();
    const u32 left = L::TURNED ? state : behind, right = L::TURNED ? behind : state;
    UNROLL for (int s = 0; s < L::N / 16; ++s) settle(g[s]);
    open_products();
    UNROLL for (int m = 0; m < Base::template kOwn<L>; ++m)
      UNROLL for (int s = 0; s < 4; ++s)
        Wgmma<Element, Base::template kRight<L>>::multiply_turned(sums.weight[m], turned_operand(left + m * kTile, kTile) + s * 128,
                                                   turned_operand(right, kTile) + s * 128);
    if constexpr (L::BIAS >= 0)
      UNROLL for (int m = 0; m < Base::template kOwnBias<L>; ++m)
        UNROLL for (int s = 0; s < 4; ++s)
          Wgmma<Element, 8>::multiply_turned(sums.bias[m], turned_operand(behind + m * kTile, kTile) + s * 128,
                                             turned_operand(memory + Pass::ones_at, kTile) + s * 128);
    UNROLL for (int s = 0; s < L::N / 16; ++s)
      Wgmma<Element, L::K>::multiply_turned(d, g[s], turned_operand(memory + L::weight_at, L::N * 128) + s * 128, s > 0);
    commit_products();
    wait_for_products<0>();
    touch(d);
    Base::template touch_sums<L>(sums);
  }

  DEVICE void run() const {
    Pass::load_weights(*this);
    // Ones for the sums of biases. What padding leaves in a slab is multiplied, but not looked at: any will do.
    for (int at = threadIdx.x * 4; at < kTile; at += Layers::kThreads * 4)
      store_shared(memory + Pass::ones_at + at, Pair<Element>(1.f, 1.f).bits);
    fence_copy_engine();
    __syncthreads();
    Pass::run(*this);
  }

  template <class AllSums> DEVICE void all_tiles(AllSums& sums) const {
    const i64 tiles = (params.batch + 63) / 64, step = i64(gridDim.x) * Pass::GROUPS;
    const void* grad_y = params.weights[Pass::GRAD_Y];
    i64 tile = i64(this->group) * gridDim.x + blockIdx.x;
    const u32 packed_x = this->packed() + Pass::packed_x, packed_y = this->packed() + Pass::packed_y;
    u32 next_x[First::K / 16][4], next_y[Last::N / 16][4];
    this->template begin_rows<First::P>(params.x, tile, packed_x, next_x);
    this->template begin_rows<Last::Q>(grad_y, tile, packed_y, next_y);
    int turn = 0;
    ROLL for (; tile < tiles; tile += step) {
      u32 x[First::K / 16][4], y[Last::N / 16][4];
      this->template end_rows<First::P>(packed_x, next_x, x);
      this->template end_rows<Last::Q>(packed_y, next_y, y);
      this->template begin_rows<First::P>(params.x, tile + step, packed_x, next_x);
      this->template begin_rows<Last::Q>(grad_y, tile + step, packed_y, next_y);
      sync();  // products of the tile before have read its states
      Pass::tile(*this, x, y, sums, tile, turn);
    }
    Base::meet(tile, tiles);
  }
  // Left operands as sums of the same places
  template <int STEPS> static DEVICE void widened(const u32 (&g)[STEPS][4], float (&d)[STEPS * 8]) {
    UNROLL for (int s = 0; s < STEPS; ++s)
      UNROLL for (int i = 0; i < 4; ++i)
        d[s * 8 + i * 2] = widen(Element{u16(g[s][i])}), d[s * 8 + i * 2 + 1] = widen(Element{u16(g[s][i] >> 16)});
  }

};
