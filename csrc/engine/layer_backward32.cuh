// The backward pass of one dense layer with its activation, on sm_90a in tf32: all gradients at one visit of x and grad_y.
//
// Of 32 bits the matrix unit takes only operands in which what is summed over lies side by side. So the weight lies in
// shared memory twice, by inputs and by outputs. x, and the gradient of the layer's sums, are left operands in registers,
// and for the weight's gradient are put into shared memory turned: a row of a slab for each feature, 32 samples along it.
// Where in a row a sample lies, and which row is whose, is free. A thread's two samples lie side by side, and rows are in
// the order of sums' columns (dense.cuh): then its stores of 8 bytes meet in no bank.
//
// A warpgroup has samples and sums of its own. Where all sums of the weight are too many for its registers, two have 64
// rows of them each, TOGETHER: they put gradients into the same place in turn, and both make their rows of each's.
//
// Pass: as DenseLayers has it, of one layer, which is FIRST and LAST; TOGETHER, GRAD_Y (parameter), SUMS of a block; in
//       bytes back_at (the weight by outputs), ones_at, slabs_at, barriers_at, all. Layer: also Slope, TURNED (sums of the
//       weight's gradient are its transpose).
#pragma once
#include "dense.cuh"
#include "sums.cuh"

template <class Pass> struct LayerBackward32 : DenseLayers<Pass> {
  using Layers = DenseLayers<Pass>;
  using typename Layers::Element;
  using L = typename Pass::First;
  using Layers::group;
  using Layers::lane;
  using Layers::memory;
  using Layers::params;
  using Layers::row;
  static_assert(sizeof(Element) == 4);
  static constexpr bool kLinear = is_same<typename L::Activation, identity>;
  // Rows of a slab of x, and of the gradient of the layer's sums; bytes of one of two slabs of each
  static constexpr int kRowsX = round_up(L::K, 64), kRowsG = round_up(L::N, 64), kSlabX = kRowsX * 128, kSlabG = kRowsG * 128;
  static constexpr int kLeft = (L::TURNED ? kRowsX : kRowsG) / 64, kRight = L::TURNED ? L::N : L::K;
  static_assert(!Pass::TOGETHER || (Pass::GROUPS == 2 && kLeft == 2));
  // Sums of a warpgroup: of the weight, 64 x kRight for every 64 rows that it has, and of the bias, 64 x 8
  struct Sums {
    float weight[Pass::TOGETHER ? 1 : kLeft][kRight / 2];
    float bias[Pass::TOGETHER ? 1 : kRowsG / 64][4];
  };
  using X = u32[L::K / 8][4];
  using G = u32[L::N / 8][4];

  DEVICE LayerBackward32(const Params& given) : Layers(given) {}

  // Two slabs of x for each warpgroup, and behind all of these two for the gradient: for each, or for both together.
  DEVICE u32 slabs_x(int of_group) const { return memory + Pass::slabs_at + of_group * 2 * kSlabX; }
  DEVICE u32 slabs_g() const { return slabs_x(Pass::GROUPS) + (Pass::TOGETHER ? 0 : group * 2 * kSlabG); }

  DEVICE void load_x(i64 tile, X& x) const { this->template load<L::P>(params.x, tile, x); }
  DEVICE void load_grad_y(i64 tile, G& g) const { this->template load<L::Q>(params.weights[Pass::GRAD_Y], tile, g); }
  // 64 rows of FEATURES, which a warpgroup loads next
  template <int FEATURES> DEVICE void fetch(const void* from, i64 tile) const {
    constexpr int kRow = FEATURES * sizeof(Element);
    const int bytes = int(min(params.batch - tile * 64, i64(64))) * kRow;
#pragma unroll
    for (int i = 0; i < ceil_div(64 * kRow, 128 * 128); ++i) {
      const int at = (i * 128 + threadIdx.x % 128) * 128;
      if (at < bytes) prefetch(static_cast<const char*>(from) + tile * 64 * kRow + at);
    }
  }
  DEVICE void fetch_both(i64 tile) const {
    if (tile * 64 >= params.batch) return;
    fetch<L::P>(params.x, tile);
    fetch<L::Q>(params.weights[Pass::GRAD_Y], tile);
  }
  template <int STEPS> static DEVICE void round(u32 (&a)[STEPS][4]) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[s][i] = tf32_of(a[s][i]);
  }

  // Left operands of 64 samples to two slabs, turned
  template <int SLAB, int STEPS> DEVICE void put(u32 to, const u32 (&a)[STEPS][4]) const {
    const int piece = row % 32 / 16 * 4 + lane.g / 2;
    to += row / 32 * SLAB + lane.g % 2 * 8;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_f32x2(to + s * 1024 + swizzled(lane.t * 2 + i, piece), __uint_as_float(a[s][i * 2]),
                    __uint_as_float(a[s][i * 2 + 1]));
  }

  // grad_y times the slopes, as left operand: zero where the layer has no such column, and behind the last sample.
  DEVICE void steepen(const float (&z)[L::N / 2], G& g, i64 tile) const {
    const int left = int(min(params.batch - tile * 64, i64(64))) - row;
#pragma unroll
    for (int s = 0; s < L::N / 8; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i % 2, column = i / 2;
        const float steep = __uint_as_float(g[s][i]) * L::Slope::of(z[s * 4 + h * 2 + column]);
        const bool is_there = h * 8 < left && Layers::template inside<L>(s, lane.t * 2 + column);
        g[s][i] = tf32_of(__float_as_uint(is_there ? steep : 0.f));
      }
  }

  // What x gets, of a warpgroup's own samples
  DEVICE void multiply_back(const G& g, float (&d)[L::K / 2]) const {
#pragma unroll
    for (int s = 0; s < L::N / 8; ++s)
      Wgmma<Element, L::K>::multiply(d, g[s], operand(memory + Pass::back_at + s / 4 * (L::K * 128)) + s % 4 * 2, s > 0);
    commit_products();
  }
  // Of the samples in the slabs
  DEVICE void multiply_sums(Sums& sums, int of_group) const {
    const u32 x = slabs_x(of_group), g = slabs_g(), left = L::TURNED ? x : g, right = L::TURNED ? g : x;
    constexpr int kSlabLeft = L::TURNED ? kSlabX : kSlabG, kSlabRight = L::TURNED ? kSlabG : kSlabX;
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const int slab = s / 4, step = s % 4 * 2;
#pragma unroll
      for (int m = 0; m < (Pass::TOGETHER ? 1 : kLeft); ++m)
        Wgmma<Element, kRight>::multiply(sums.weight[m],
                                         operand(left + slab * kSlabLeft + (Pass::TOGETHER ? group : m) * 8192) + step,
                                         operand(right + slab * kSlabRight) + step);
      if constexpr (L::BIAS >= 0)
#pragma unroll
        for (int m = 0; m < (Pass::TOGETHER ? 1 : kRowsG / 64); ++m)
          Wgmma<Element, 8>::multiply(sums.bias[m],
                                      operand(g + slab * kSlabG + (Pass::TOGETHER ? bias_rows() : m) * 8192) + step,
                                      operand(memory + Pass::ones_at));
    }
    commit_products();
  }
  // Of two warpgroups TOGETHER, the second one has none of its own if there are no more than 64.
  DEVICE int bias_rows() const { return kRowsG > 64 ? group : 0; }
  static DEVICE void touch_sums(Sums& sums) {
#pragma unroll
    for (auto& some : sums.weight) touch(some);
    if constexpr (L::BIAS >= 0)
#pragma unroll
      for (auto& some : sums.bias) touch(some);
  }

  DEVICE void alone(Sums& sums) const {
    const i64 tiles = (params.batch + 63) / 64, step = i64(gridDim.x) * Pass::GROUPS;
    i64 tile = i64(group) * gridDim.x + blockIdx.x;
    X x;
    G g;
    load_x(tile, x);
    load_grad_y(tile, g);
#pragma unroll 1
    for (; tile < tiles; tile += step) {
      round(x);
      sync_group<4, 16>(group + 1);  // the samples before have been read
      put<kSlabX>(slabs_x(group), x);
      if constexpr (kLinear) {
        round(g);
      } else {
        float z[L::N / 2];
        this->template multiply<L>(x, z);
        steepen(z, g, tile);
      }
      put<kSlabG>(slabs_g(), g);
      fence_copy_engine();
      sync_group<4, 16>(group + 1);
      float d[L::K / 2];
#pragma unroll
      for (int s = 0; s < L::N / 8; ++s) settle(g[s]);
      open_products();
      multiply_back(g, d);
      multiply_sums(sums, group);
      wait_for_products<1>();
      touch(d);
      load_x(tile + step, x);
      load_grad_y(tile + step, g);
      this->template store<L::P, identity>(params.y, d, tile);
      wait_for_products<0>();
      touch_sums(sums);
    }
  }

  // A block's first and third, ... 64 samples are the first warpgroup's, those between the second one's. While a warpgroup
  // gets its samples ready, those before, the other one's, are in the slabs.
  DEVICE u32 full() const { return memory + Pass::barriers_at; }
  DEVICE u32 free() const { return memory + Pass::barriers_at + 8; }
  DEVICE void together(Sums& sums) const {
    const i64 tiles = (params.batch + 63) / 64;
    const int rounds = int((tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
#pragma unroll 1
    for (int before = group - 1; before < rounds; before += 2) {
      const i64 tile = blockIdx.x + i64(before + 1) * gridDim.x;
      const bool has_own = before + 1 < rounds;
      X x;
      G g;
      if (has_own) {
        load_x(tile, x);
        round(x);
        if constexpr (kLinear) {
          put_x(x, before);
          load_grad_y(tile, g);
          round(g);
        } else {
          float z[L::N / 2];
          this->template multiply<L>(x, z);
          put_x(x, before);
          load_grad_y(tile, g);
          steepen(z, g, tile);
        }
      }
      if (before >= 0) {
        wait_for_bytes(full(), before & 1);
        open_products();
        multiply_sums(sums, group ^ 1);
        wait_for_products<0>();
        touch_sums(sums);
        arrive(free());
      }
      if (has_own) {
        wait_for_bytes(free(), before & 1);
        put<kSlabG>(slabs_g(), g);
        fence_copy_engine();
        arrive(full());
        fetch_both(tile + 2 * i64(gridDim.x));
        wait_for_bytes(full(), before + 1 & 1);
        float d[L::K / 2];
#pragma unroll
        for (int s = 0; s < L::N / 8; ++s) settle(g[s]);
        open_products();
        multiply_sums(sums, group);
        multiply_back(g, d);
        wait_for_products<1>();
        touch_sums(sums);
        arrive(free());
        wait_for_products<0>();
        touch(d);
        this->template store<L::P, identity>(params.y, d, tile);
      }
    }
  }
  // Once both warpgroups have read the samples that were there, a round before the other one's last ones
  DEVICE void put_x(const X& x, int before) const {
    if (before > 0) wait_for_bytes(free(), before - 1 & 1);
    put<kSlabX>(slabs_x(group), x);
  }

  // The weight by outputs
  DEVICE void turn_weight() const {
    const auto place = [](int rows, int r, int k) {
      const int at = (k / 8 * 8 + k % 2 * 4 + k % 8 / 2) * 4;
      return at / 128 * (rows * 128) + swizzled(r, at % 128 / 16) + at % 16;
    };
    constexpr int kTogether = 8;
#pragma unroll 1
    for (int first = threadIdx.x; first < L::N * L::K; first += kTogether * Layers::kThreads) {
      u32 w[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int j = first + i * Layers::kThreads;
        w[i] = j < L::N * L::K ? load_u32(memory + L::weight_at + place(L::N, j % L::N, j / L::N)) : 0;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int j = first + i * Layers::kThreads;
        if (j < L::N * L::K) store_shared(memory + Pass::back_at + place(L::K, j / L::N, j % L::N), w[i]);
      }
    }
  }

  DEVICE void run() const {
    Pass::load_weights(*this);
    for (int at = threadIdx.x * 4; at < 1024; at += Layers::kThreads * 4) store_shared(memory + Pass::ones_at + at, 1.f);
    if constexpr (Pass::TOGETHER)
      if (threadIdx.x == 0) init_barrier(full(), 128), init_barrier(free(), 256);
    __syncthreads();
    turn_weight();
    fence_copy_engine();
    __syncthreads();
    Sums sums = {};
    if constexpr (Pass::TOGETHER)
      together(sums);
    else
      alone(sums);
    store_sums(sums);
  }

  // All warpgroups' sums of the same places, or each one's, to where this block's belong.
  DEVICE void store_sums(const Sums& sums) const {
    constexpr int kFours = kRight / 8, kMembers = Pass::TOGETHER ? Layers::kThreads : 128;
    float* to = static_cast<float*>(params.sums) + i64(blockIdx.x) * Pass::SUMS;
    add_up<(Pass::TOGETHER ? 1 : kLeft) * kFours, Layers::kThreads, kMembers, Pass::all, float>(
        memory, [&](int f) -> const float(&)[4] {
          return reinterpret_cast<const float(&)[4]>(sums.weight[f / kFours][f % kFours * 4]);
        },
        [&](int f, int member, const float(&sum)[4]) {
          const Lane at(member % 32);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int left = (f / kFours * 4 + member / 32) * 16 + at.g + j / 2 * 8, right = f % kFours * 8 + at.t * 2 + j % 2;
            const int n = L::TURNED ? right : left, k = L::TURNED ? left : right;
            const int q = n < L::N ? Layers::template feature_out<L>(n) : L::Q;
            const int p = k < L::K ? Layers::template feature_in<L>(k) : L::P;
            if (q < L::Q && p < L::P) store_global(to + q * L::P + p, sum[j]);
          }
        });
    if constexpr (L::BIAS >= 0)
      add_up<Pass::TOGETHER ? 1 : kRowsG / 64, Layers::kThreads, kMembers, Pass::all, float>(
          memory, [&](int m) -> const float(&)[4] { return sums.bias[m]; },
          [&](int m, int member, const float(&sum)[4]) {
            const Lane at(member % 32);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int n = (m * 4 + member / 32) * 16 + at.g + h * 8;
              const int q = n < L::N ? Layers::template feature_out<L>(n) : L::Q;
              if (at.t == 0 && q < L::Q) store_global(to + L::Q * L::P + q, sum[h * 2]);
            }
          });
  }
};
