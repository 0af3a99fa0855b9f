// The backward pass of one dense layer with its activation, on sm_90a in 16 bits, whose weight's sums are too many for a
// warpgroup: two warpgroups have 64 rows of them each, for the samples of both.
//
// Samples lie in shared memory as dense_backward.cuh has them, features in their order, where asynchronous copies put them
// while those before are worked on. Rows that copies of 8 bytes do not fit land packed (packed.cuh), where others have the
// slabs of the next samples, and are taken apart once the slabs before have been read. A warpgroup makes the gradient of its
// 64 samples' sums, over grad_y and in its place; then each makes its rows of the weight's gradient of all 128, and what its
// own samples' x gets.
//
// Pass: as DenseGradients has it, of one layer, which is neither FIRST nor LAST, TOGETHER; GRAD_Y (parameter); in bytes
//       dealt_at (the weight again), ones_at, slabs_at. Layer: also Slope.
#pragma once
#include "kernels/stack/dense_gradients.cuh"

template <class Pass> struct LayerBackward : DenseGradients<Pass> {
  using Layers = Dense<Pass>;
  using Base = DenseGradients<Pass>;
  using typename Layers::Element;
  using L = typename Pass::First;
  using Sums = typename Base::template Sums<L>;
  using Layers::group, Layers::lane, Layers::memory, Layers::params, Layers::row;
  static_assert(sizeof(Element) == 2 && Pass::GROUPS == 2 && L::N > 64 && L::N <= 128);
  static constexpr bool kLinear = is_same<typename L::Activation, identity>;
  static constexpr int kTile = 64 * 128;  // bytes of a slab: 64 samples of 64 features
  static constexpr int kState = ceil_div(L::K, 64) * kTile, kBoth = kState + ceil_div(L::N, 64) * kTile;

  DEVICE LayerBackward(const Params& given) : Base(given) {}

  template <int FEATURES> static constexpr bool kLands = FEATURES % 4 != 0;  // packed, in place of the second stage

  // A group's 64 samples of x, with grad_y's behind them.
  DEVICE u32 slabs(int stage, int of_group) const { return memory + Pass::slabs_at + (stage * 2 + of_group) * kBoth; }
  DEVICE u32 x_slabs(int stage, int of_group) const { return slabs(kLands<L::P> ? 0 : stage, of_group); }
  DEVICE u32 y_slabs(int stage, int of_group) const { return slabs(kLands<L::Q> ? 0 : stage, of_group) + kState; }
  static DEVICE u32 in_slabs(int sample, int at) { return at / 128 * kTile + swizzled(sample, at % 128 / 16) + at % 16; }

  // 64 rows of FEATURES to shared memory; what lies outside is zero.
  template <int FEATURES> DEVICE void fetch(const void* given, i64 tile, u32 to) const {
    const Element* from = static_cast<const Element*>(given) + tile * 64 * FEATURES;
    int samples = int(min(i64(64), params.batch - tile * 64)), thread = threadIdx.x % 128;
    stay_here(samples, thread);  // or all places would be kept from one tile to the next
    if constexpr (kLands<FEATURES>) {
      fetch_run<64 * FEATURES * 2, 128>(to, from, samples * FEATURES * 2, thread);
    } else {
      constexpr int kBytes = FEATURES % 8 == 0 ? 16 : 8, kPieces = FEATURES * 2 / kBytes;
      UNROLL for (int i = 0; i < ceil_div(kPieces, 2); ++i) {
        const int j = i * 128 + thread, sample = j / kPieces, at = j % kPieces * kBytes;
        if (kPieces % 2 == 0 || sample < 64)
          copy_async<kBytes>(to + in_slabs(sample, at), from + sample * FEATURES + at / 2, sample < samples);
      }
    }
  }
  DEVICE void fetch_both(i64 tile, int stage) const {
    fetch<L::P>(params.x, tile, slabs(kLands<L::P> ? 1 : stage, group));
    fetch<L::Q>(params.weights[Pass::GRAD_Y], tile, slabs(kLands<L::Q> ? 1 : stage, group) + kState);
    commit_copies();
  }
  // Half of a group's threads have a row of x each, the others one of grad_y. Rows lie so that lanes meet in a bank by twos.
  DEVICE void take_apart() const {
    const int thread = threadIdx.x % 128;
    if (kLands<L::P> && thread < 64) take_row<L::P>(slabs(1, group), slabs(0, group), thread);
    if (kLands<L::Q> && thread >= 64) take_row<L::Q>(slabs(1, group) + kState, slabs(0, group) + kState, thread - 64);
  }
  template <int FEATURES> static DEVICE void take_row(u32 from, u32 to, int row) {
    constexpr int kPieces = ceil_div(FEATURES, 8), kAtOnce = 4;
    UNROLL for (int first = 0; first < kPieces; first += kAtOnce) {
      u32 word[kAtOnce][4] = {};
      UNROLL for (int i = 0; i < kAtOnce && first + i < kPieces; ++i) {
        const int feature = (first + i) * 8;
        take_words<Element, FEATURES>(from + row * FEATURES * 2, feature, feature + 8 <= FEATURES, 4, word[i]);
      }
      UNROLL for (int i = 0; i < kAtOnce && first + i < kPieces; ++i)
        store_u32x4(to + in_slabs(row, (first + i) * 16), word[i]);
    }
  }

  // grad_y times the slopes, in its place; zero where the layer has no such column.
  DEVICE void steepen(u32 state, u32 behind) const {
    float z[L::N / 2];
    this->template begin<L>(z);
    touch(z);
    make_products<L::K / 16>(z, [&](int s) {
      Wgmma<Element, L::N>::multiply(z, operand(state + s / 4 * kTile) + s % 4 * 2,
                                     operand(memory + L::weight_at + s / 4 * (L::N * 128)) + s % 4 * 2, L::BIAS >= 0 || s > 0);
    });
    UNROLL for (int n = 0; n < L::N / 8; n += 2) {
      u32 at[4], word[4];  // of two tiles
      UNROLL for (int i = 0; i < 4; ++i) {
        at[i] = behind + (n + i / 2) / 8 * kTile + swizzled(row + i % 2 * 8, (n + i / 2) % 8) + lane.t * 4;
        word[i] = load_u32(at[i]);
      }
      UNROLL for (int i = 0; i < 4; ++i) {
        const int of = n * 4 + i * 2, tile = n + i / 2;
        const float x = widen(Element{u16(word[i])}) * L::Slope::of(z[of]);
        const float y = widen(Element{u16(word[i] >> 16)}) * L::Slope::of(z[of + 1]);
        store_shared(at[i], Pair<Element>(Layers::template inside<L>(tile, lane.t * 2) ? x : 0.f,
                                          Layers::template inside<L>(tile, lane.t * 2 + 1) ? y : 0.f).bits);
      }
    }
  }

  DEVICE void gradients(i64 tile, int stage, Sums& sums) const {
    float d[L::K / 2];
    const u32 own = y_slabs(stage, group);
    ask_for_products<L::N / 16>([&](int s) {
      Wgmma<Element, L::K>::multiply_right_turned(d, operand(own + s / 4 * kTile) + s % 4 * 2,
                                                  turned_operand(memory + Pass::dealt_at, L::N * 128) + s * 128, s > 0);
    });
    UNROLL for (int of_group = 0; of_group < 2; ++of_group) {
      const u32 state = x_slabs(stage, of_group), left = y_slabs(stage, of_group) + group * kTile;
      UNROLL for (int s = 0; s < 4; ++s) {
        Wgmma<Element, L::K>::multiply_turned(sums.weight[0], turned_operand(left, kTile) + s * 128,
                                              turned_operand(state, kTile) + s * 128);
        if constexpr (L::BIAS >= 0)
          Wgmma<Element, 8>::multiply_turned(sums.bias[0], turned_operand(left, kTile) + s * 128,
                                             turned_operand(memory + Pass::ones_at, kTile));
      }
    }
    commit_products();
    wait_for_products<1>();
    touch(d);
    this->template store<L::P, identity>(params.y, d, tile);
    wait_for_products<0>();
    Base::template touch_sums<L>(sums);
  }

  // Columns of what x gets are dealt to sums as `store` wants them.
  DEVICE void deal_weight() const {
    const auto place = [](int n, int k) { return k / 64 * (L::N * 128) + swizzled(n, k % 64 / 8) + k % 8 * 2; };
    for (int j = threadIdx.x; j < L::N * L::K / 2; j += Layers::kThreads) {
      const int n = j / (L::K / 2), k = j % (L::K / 2) * 2, from = place(n, Layers::template dealt_feature<L::K / 8>(k));
      store_shared(memory + Pass::dealt_at + place(n, k), load_u32(memory + L::weight_at + from));
    }
  }

  DEVICE void run() const {
    if constexpr (L::P != L::K || L::Q != L::N) {  // what copies leave out
      for (int at = threadIdx.x * 16; at < 4 * kBoth; at += Layers::kThreads * 16)
        store_u32x4(memory + Pass::slabs_at + at, {0, 0, 0, 0});
      __syncthreads();
    }
    const i64 pairs = (params.batch + 127) / 128;
    i64 pair = blockIdx.x;
    fetch_both(pair * 2 + group, 0);
    Pass::load_weights(*this);
    for (int at = threadIdx.x * 4; at < 16 * 128; at += Layers::kThreads * 4)
      store_shared(memory + Pass::ones_at + at, Pair<Element>(1.f, 1.f).bits);
    __syncthreads();
    deal_weight();
    Sums sums = {};
    ROLL for (int stage = 0; pair < pairs; stage ^= 1, pair += gridDim.x) {
      wait_for_copies<0>();
      fence_copy_engine();
      __syncthreads();  // samples of both groups are there, and those before have been read
      if constexpr (kLands<L::P> || kLands<L::Q>) {
        take_apart();
        fence_copy_engine();
        __syncthreads();
      }
      if (pair + gridDim.x < pairs) fetch_both((pair + gridDim.x) * 2 + group, stage ^ 1);
      if constexpr (!kLinear) {
        steepen(x_slabs(stage, group), y_slabs(stage, group));
        fence_copy_engine();
        __syncthreads();
      }
      gradients(pair * 2 + group, stage, sums);
    }
    this->template store_sums<L>(sums);
  }

};
