// The backward pass of one dense layer with its activation, on sm_90a in tf32, whose weight's sums are too many for a
// warpgroup: two warpgroups have 64 rows of them each.
//
// They take 64 samples as dense_backward32.cuh does. What the layer reads has a place for each of them; gradients of its
// sums are put into one place in turn, and both make their rows of each other's.
//
// Pass: as DenseBackward32 has it, of one layer, TOGETHER; in bytes slabs_at, barriers_at.
#pragma once
#include "kernels/stack/dense_backward32.cuh"
#include "move/ring.cuh"

template <class Pass> struct LayerBackward32 : DenseBackward32<Pass> {
  using Base = DenseBackward32<Pass>;
  using typename Base::Element;
  using typename Base::G;
  using typename Base::X;
  using L = typename Pass::First;
  using Sums = typename Base::template Sums<L>;
  using Base::group;
  using Base::memory;
  using Base::params;
  static_assert(Pass::TOGETHER && Pass::GROUPS == 2 && (L::TURNED ? L::K : L::N) > 64);
  static constexpr bool kLinear = is_same<typename L::Activation, identity>;
  static constexpr int kSlabX = Base::template kSlabX<L>;

  DEVICE LayerBackward32(const Params& given) : Base(given) {}

  // Two slabs of x for each warpgroup, and behind these two of the gradient for both
  DEVICE u32 slabs_x(int of_group) const { return memory + Pass::slabs_at + of_group * 2 * kSlabX; }
  DEVICE u32 slabs_g() const { return slabs_x(2); }
  DEVICE void multiply_sums(Sums& sums, int of_group) const {
    Base::template multiply_sums<L>(sums, slabs_x(of_group), slabs_g(), group);
  }

  // 64 rows of FEATURES, which a warpgroup loads next
  template <int FEATURES> DEVICE void fetch(const void* from, i64 tile) const {
    constexpr int kRow = FEATURES * sizeof(Element);
    const int bytes = int(min(params.batch - tile * 64, i64(64))) * kRow;
    UNROLL for (int i = 0; i < ceil_div(64 * kRow, 128 * 128); ++i) {
      const int at = (i * 128 + threadIdx.x % 128) * 128;
      if (at < bytes) prefetch(static_cast<const char*>(from) + tile * 64 * kRow + at);
    }
  }
  DEVICE void fetch_both(i64 tile) const {
    if (tile * 64 >= params.batch) return;
    fetch<L::P>(params.x, tile);
    fetch<L::Q>(params.weights[Pass::GRAD_Y], tile);
  }

  // A block's first and third, ... 64 samples are the first warpgroup's, those between the second one's. While a warpgroup
  // gets its samples ready, those before, the other one's, are in the slabs.
  DEVICE Barriers<1> samples() const { return Barriers<1>(memory + Pass::barriers_at); }
  DEVICE void all_tiles(Sums& sums) const {
    const i64 tiles = (params.batch + 63) / 64;
    const int rounds = int((tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
    ROLL for (int before = group - 1; before < rounds; before += 2) {
      const i64 tile = blockIdx.x + i64(before + 1) * gridDim.x;
      const bool has_own = before + 1 < rounds;
      X x;
      G g;
      if (has_own) {
        this->load_x(tile, x);
        Base::round(x);
        if constexpr (kLinear) {
          put_x(x, before);
          this->load_grad_y(tile, g);
          Base::round(g);
        } else {
          float z[L::N / 2];
          this->template multiply<L>(x, z);
          put_x(x, before);
          this->load_grad_y(tile, g);
          this->steepen_last(z, g, tile);
        }
      }
      if (before >= 0) {
        wait_for_bytes(samples().full(0), before & 1);
        open_products();
        multiply_sums(sums, group ^ 1);
        wait_for_products<0>();
        Base::template touch_sums<L>(sums);
        arrive(samples().empty(0));
      }
      if (has_own) {
        wait_for_bytes(samples().empty(0), before & 1);
        this->template put<Base::template kSlabG<L>>(slabs_g(), g);
        fence_copy_engine();
        arrive(samples().full(0));
        fetch_both(tile + 2 * i64(gridDim.x));
        wait_for_bytes(samples().full(0), before + 1 & 1);
        float d[L::K / 2];
        UNROLL for (int s = 0; s < L::N / 8; ++s) settle(g[s]);
        open_products();
        multiply_sums(sums, group);
        this->template multiply_back<L>(g, d);
        wait_for_products<1>();
        Base::template touch_sums<L>(sums);
        arrive(samples().empty(0));
        wait_for_products<0>();
        touch(d);
        this->template store<L::P, identity>(params.y, d, tile);
      }
    }
  }
  // Once both warpgroups have read the samples that were there, a round before the other one's last ones
  DEVICE void put_x(const X& x, int before) const {
    if (before > 0) wait_for_bytes(samples().empty(0), before - 1 & 1);
    this->template put<kSlabX>(slabs_x(group), x);
  }

  DEVICE void run() const {
    samples().init(128, 256);
    this->prepare();
    Sums sums = {};
    all_tiles(sums);
    this->template store_sums<L>(sums);
  }
};
