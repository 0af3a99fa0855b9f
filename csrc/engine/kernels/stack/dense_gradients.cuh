// What the backward passes of dense layers have in common: the sums of a layer's gradients, which stay in registers for all
// samples of a block, and how warpgroups add them up in the end. TURNED, those of the weight are its transpose.
//
// Pass: as Dense has it; TOGETHER (warpgroups have 64 rows of the same sums each, instead of sums of their own), SUMS of a
//       block, all (bytes of shared memory for adding up). Layer: also TURNED, sums_at and bias_sums_at among sums.
#pragma once
#include "kernels/stack/dense.cuh"
#include "finish/sums.cuh"

template <class Pass> struct DenseGradients : Dense<Pass> {
  using Layers = Dense<Pass>;
  // Columns of the weight's sums, and 64s of rows, of these and of the bias's, that a warpgroup has
  template <class L> static constexpr int kRight = L::TURNED ? L::N : L::K;
  template <class L> static constexpr int kOwn = Pass::TOGETHER ? 1 : ceil_div(L::TURNED ? L::K : L::N, 64);
  template <class L> static constexpr int kOwnBias = Pass::TOGETHER ? 1 : ceil_div(L::N, 64);
  template <class L> struct Sums {
    float weight[kOwn<L>][kRight<L> / 2], bias[kOwnBias<L>][4];
  };

  DEVICE DenseGradients(const Params& given) : Layers(given) {}

  DEVICE void sync() const { sync_warpgroup(this->group); }
  // Where this group has no tile: as for one, before it and in each of its layers
  DEVICE void meet(i64 tile, i64 tiles) const {
    meet_as_others<Pass::GROUPS>(tile - i64(this->group) * gridDim.x, tiles, 1 + Pass::LAYERS, [&] { sync(); });
  }
  template <class L> static DEVICE void touch_sums(Sums<L>& sums) {
    UNROLL for (auto& some : sums.weight) touch(some);
    if constexpr (L::BIAS >= 0)
      UNROLL for (auto& some : sums.bias) touch(some);
  }

  // All warpgroups' sums of the same places, or each one's, to where this block's belong.
  template <class L> DEVICE void store_sums(const Sums<L>& sums) const {
    constexpr int kFours = kRight<L> / 8, kMembers = Pass::TOGETHER ? Layers::kThreads : 128;
    float* to = static_cast<float*>(this->params.sums) + i64(blockIdx.x) * Pass::SUMS;
    add_up<kOwn<L> * kFours, Layers::kThreads, kMembers, Pass::all, float>(
        this->memory, [&](int f) -> const float(&)[4] {
          return reinterpret_cast<const float(&)[4]>(sums.weight[f / kFours][f % kFours * 4]);
        },
        [&](int f, int member, const float(&sum)[4]) {
          const Lane at(member % 32);
          UNROLL for (int j = 0; j < 4; ++j) {
            const int left = f / kFours * 64 + member / 32 * 16 + at.g + j / 2 * 8, right = f % kFours * 8 + at.t * 2 + j % 2;
            const int n = L::TURNED ? right : left, k = L::TURNED ? left : right;
            const int q = n < L::N ? Layers::template feature_out<L>(n) : L::Q;
            const int p = k < L::K ? Layers::template feature_in<L>(k) : L::P;
            if (q < L::Q && p < L::P) store_global(to + L::sums_at + q * L::P + p, sum[j]);
          }
        });
    if constexpr (L::BIAS >= 0)
      add_up<kOwnBias<L>, Layers::kThreads, kMembers, Pass::all, float>(
          this->memory, [&](int m) -> const float(&)[4] { return sums.bias[m]; },
          [&](int m, int member, const float(&sum)[4]) {
            const Lane at(member % 32);
            UNROLL for (int h = 0; h < 2; ++h) {
              const int n = m * 64 + member / 32 * 16 + at.g + h * 8;
              const int q = n < L::N ? Layers::template feature_out<L>(n) : L::Q;
              if (at.t == 0 && q < L::Q) store_global(to + L::bias_sums_at + q, sum[h * 2]);
            }
          });
  }
};
