// Dense layers one behind another on sm_90a: y = act(x W' + b) for each, 64 samples at a time for a warpgroup.
//
// A layer's sums, activated and rounded, are as they stand the left operand of the next layer's products. So states stay
// in registers; weights and biases stay in shared memory for all samples of a block, and no warpgroup waits for another.
// In which order k's are summed is free: those of x are taken as 16 bytes of a row lie in memory, and the last layer's
// columns are so dealt to sums that a lane's lie side by side. Weights are put where that wants them.
//
// Pass: Math, Element, GROUPS (warpgroups), First and Last (layers), layers(c, a, tile), which calls each layer, and
//       load_weights(c). Layer: P, Q, N (columns of the sums), WEIGHT, BIAS (parameters; -1 without a bias), FIRST, LAST,
//       Activation, weight_at, bias_at (bytes).
#pragma once
#include "mma.cuh"
#include "params.cuh"
#include "pointwise.cuh"
#include "wgmma.cuh"

template <class Pass> struct DenseLayers {
  using Element = typename Pass::Element;
  using First = typename Pass::First;
  using Last = typename Pass::Last;
  static constexpr int kSize = sizeof(Element), kStep = 32 / kSize, kEach = 16 / kSize;  // k's of a product; of 16 bytes
  static constexpr int kThreads = Pass::GROUPS * 128;
  template <class L> static constexpr int kSteps = ceil_div(L::P, kStep);
  static constexpr int kTiles = Last::N / 8;

  const Params& params;
  const Lane lane;
  const int group, row;  // of a tile of 64: this lane's first, the other is 8 behind it
  const u32 memory;

  DEVICE DenseLayers(const Params& given)
      : params(given), group(uniform(threadIdx.x / 128)), row(threadIdx.x / 32 % 4 * 16 + lane.g),
        memory(shared_address(shared_memory)) {}

  // Where a weight's k lies among its row's k's. Of x, a lane has the next kEach k's in two steps, or half as many in the
  // last of an odd number of steps; of sums, 2t and 2t + 1 of each 8.
  template <class L> static DEVICE int place_of(int k) {
    if constexpr (L::FIRST) {
      constexpr int kWhole = kSteps<L> / 2 * 2 * kStep;
      const bool lone = k >= kWhole;
      const int run = lone ? kEach / 2 : kEach, i = k % run, t = k / run % 4;
      const int step = lone ? kSteps<L> - 1 : k / (2 * kStep) * 2 + i / (kEach / 2);
      if constexpr (kSize == 2)
        return step * kStep + i / 2 % 2 * 8 + t * 2 + i % 2;
      else
        return step * kStep + i % 2 * 4 + t;
    } else if constexpr (kSize == 2) {
      return k;
    } else {
      return k / 8 * 8 + k % 2 * 4 + k % 8 / 2;
    }
  }
  // Tiles of 8 columns whose columns are dealt together, and the first of them: as many as make 16 bytes of a lane, then two.
  static constexpr int kDealt = kEach / 2, kWholeDealt = kTiles / kDealt * kDealt;
  static constexpr DEVICE bool in_two(int tile) { return kDealt == 4 && kTiles - kWholeDealt >= 2 && tile < kWholeDealt + 2; }
  static constexpr DEVICE int dealt(int tile) { return tile < kWholeDealt ? kDealt : in_two(tile) ? 2 : 1; }
  static constexpr DEVICE int dealt_from(int tile) {
    return tile < kWholeDealt ? tile / kDealt * kDealt : in_two(tile) ? kWholeDealt : tile;
  }
  // The column of the result that a column of the sums is.
  template <class L> static DEVICE int column_of(int n) {
    if constexpr (!L::LAST) return n;
    const int tile = n / 8, t = n % 8 / 2, count = dealt(tile), first = dealt_from(tile);
    return first * 8 + t * 2 * count + (tile - first) * 2 + n % 2;
  }

  template <class L> DEVICE void load_layer() const {
    const Element* weight = static_cast<const Element*>(params.weights[L::WEIGHT]);
    constexpr int kRow = kSteps<L> * kStep;
#pragma unroll 8
    for (int j = threadIdx.x; j < L::N * kRow; j += kThreads) {
      const int n = j / kRow, k = j % kRow, q = column_of<L>(n), at = place_of<L>(k) * kSize;
      const bool present = q < L::Q && k < L::P;
      const u32 to = memory + L::weight_at + at / 128 * (L::N * 128) + swizzled(n, at % 128 / 16) + at % 16;
      const Element w = present ? weight[q * L::P + k] : Element{};
      if constexpr (kSize == 4)
        store_shared(to, tf32_of(__float_as_uint(w)));
      else
        store_shared(to, w);
    }
    if constexpr (L::BIAS >= 0) {
      const Element* bias = static_cast<const Element*>(params.weights[L::BIAS]);
      for (int n = threadIdx.x; n < L::N; n += kThreads) {
        const int q = column_of<L>(n);
        store_shared(memory + L::bias_at + (n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2) * 4, q < L::Q ? widen(bias[q]) : 0.f);
      }
    }
  }

  // A lane's part of rows of x as left operands; what lies outside is zero.
  using X = u32[kSteps<First>][4];
  DEVICE void load(i64 tile, X& x) const {
    constexpr int kSteps0 = kSteps<First>;
#pragma unroll
    for (int s = 0; s < kSteps0; s += 2) {
      constexpr int kWords = 4;
      const bool lone = s + 1 == kSteps0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i64 sample = tile * 64 + row + h * 8;
        const int k = s * kStep + lane.t * (lone ? kEach / 2 : kEach);
        u32 word[kWords] = {};
        if (sample < params.batch) load_words_of(static_cast<const Element*>(params.x) + sample * First::P + k, k, lone, word);
#pragma unroll
        for (int i = 0; i < (lone ? 2 : 4); ++i) x[s + i / 2][i % 2 * 2 + h] = word[i];
      }
    }
  }
  // 16 bytes of a row, or 8, by accesses as wide as rows are aligned.
  static DEVICE void load_words_of(const Element* from, int k, bool lone, u32 (&word)[4]) {
    constexpr int kRow = First::P * kSize, kWide = kRow % 16 == 0 ? 16 : kRow % 8 == 0 ? 8 : kRow % 4 == 0 ? 4 : 2;
    if constexpr (kWide == 16) {
      if (!lone) {
        if (k < First::P) load_global(from, word);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (lone && i >= 2) break;
      const int at = i * 4 / kSize;
      if constexpr (kWide >= 4) {
        if (k + at < First::P) word[i] = *reinterpret_cast<const u32*>(from + at);
      } else {
        if (k + at < First::P) word[i] = from[at].bits;
        if (k + at + 1 < First::P) word[i] |= u32(from[at + 1].bits) << 16;
      }
    }
  }

  // z = x W' + b
  template <class L> DEVICE void multiply(u32 (&a)[kSteps<L>][4], float (&d)[L::N / 2]) const {
    if constexpr (L::BIAS >= 0) {
#pragma unroll
      for (int n = 0; n < L::N / 8; n += 2) {
        u32 bias[4];  // of this lane's columns in two tiles
        load_u32x4(memory + L::bias_at + n * 32 + lane.t * 16, bias);
#pragma unroll
        for (int i = 0; i < (n + 1 < L::N / 8 ? 8 : 4); ++i) d[n * 4 + i] = __uint_as_float(bias[i / 4 * 2 + i % 2]);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps<L>; ++s) settle(a[s]);
    if constexpr (L::BIAS >= 0) touch(d);
    open_products();
#pragma unroll
    for (int s = 0; s < kSteps<L>; ++s)
      Wgmma<Element, L::N>::multiply(d, a[s], operand(memory + L::weight_at + s / 4 * (L::N * 128)) + s % 4 * 2,
                                     L::BIAS >= 0 || s > 0);
    commit_products();
    wait_for_products<0>();
    touch(d);
  }
  // What follows the products, and zero where there is no such column: an activation of 0 may be anything.
  template <class L> DEVICE float finished(float z, int tile, int column) const {
    const float y = L::Activation::of(z);
    return tile * 8 + 8 <= L::Q || tile * 8 + column < L::Q ? y : 0.f;
  }
  // Sums as the next layer's left operands
  template <class L, class NEXT> DEVICE void hand_on(const float (&d)[L::N / 2], u32 (&a)[kSteps<NEXT>][4]) const {
#pragma unroll
    for (int s = 0; s < kSteps<NEXT>; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSize == 2) {
          const int at = s * 8 + i * 2, tile = s * 2 + i / 2;
          a[s][i] = Pair<Element>(finished<L>(d[at], tile, lane.t * 2), finished<L>(d[at + 1], tile, lane.t * 2 + 1)).bits;
        } else {
          const int at = s * 4 + i % 2 * 2 + i / 2;
          a[s][i] = tf32_of(__float_as_uint(finished<L>(d[at], s, lane.t * 2 + i / 2)));
        }
      }
  }

  DEVICE void store(const float (&d)[Last::N / 2], i64 tile) const {
    constexpr int kRow = Last::Q * kSize, kWide = kRow % 16 == 0 ? 16 : kRow % 8 == 0 ? 8 : kRow % 4 == 0 ? 4 : 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 sample = tile * 64 + row + h * 8;
      if (sample >= params.batch) continue;
      Element* to = static_cast<Element*>(params.y) + sample * Last::Q;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (dealt_from(n) != n) continue;
        const int column = n * 8 + lane.t * 2 * dealt(n);
        u32 word[4];
#pragma unroll
        for (int i = 0; i < dealt(n); ++i) {
          const float x = Last::Activation::of(d[(n + i) * 4 + h * 2]), y = Last::Activation::of(d[(n + i) * 4 + h * 2 + 1]);
          if constexpr (kSize == 2)
            word[i] = Pair<Element>(x, y).bits;
          else
            word[i * 2] = __float_as_uint(x), word[i * 2 + 1] = __float_as_uint(y);
        }
        store_run_of<kWide>(to + column, column, word, dealt(n) * 2 * kSize);
      }
    }
  }
  // `bytes` of a row, by accesses as wide as rows are aligned
  template <int WIDE> static DEVICE void store_run_of(Element* to, int column, const u32 (&word)[4], int bytes) {
    if constexpr (WIDE == 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i * 2 < bytes && column + i < Last::Q) store_global(to + i, Element{u16(word[i / 2] >> i % 2 * 16)});
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i * 4 >= bytes) break;
        const int at = i * 4 / kSize;
        if (WIDE == 16 && bytes == 16) {
          if (i == 0 && column < Last::Q) store_global<16>(to, word);
        } else if (WIDE >= 8 && bytes >= 8) {
          if (i % 2 == 0 && column + at < Last::Q) store_global<8>(to + at, word + i);
        } else if (column + at < Last::Q) {
          store_global<4>(to + at, word + i);
        }
      }
    }
  }

  DEVICE void run() const {
    Pass::load_weights(*this);
    fence_copy_engine();
    __syncthreads();
    const i64 tiles = (params.batch + 63) / 64, step = i64(gridDim.x) * Pass::GROUPS;
    i64 tile = i64(group) * gridDim.x + blockIdx.x;
    X next;
    load(tile, next);
#pragma unroll 1
    for (; tile < tiles; tile += step) {
      X x;
#pragma unroll
      for (int s = 0; s < kSteps<First>; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[s][i] = kSize == 4 ? tf32_of(next[s][i]) : next[s][i];
      load(tile + step, next);
      Pass::layers(*this, x, tile);
    }
  }
};
