// Dense layers one behind another on sm_90a: y = act(x W' + b) for each, 64 samples at a time for a warpgroup.
//
// A layer's sums, activated and rounded, are as they stand the left operand of the next layer's products. So states stay
// in registers; weights and biases stay in shared memory for all samples of a block, and no warpgroup waits for another.
// In which order k's are summed is free: those of x are taken as 16 bytes of a row lie in memory, and the last layer's
// columns are so dealt to sums that a lane's lie side by side. Weights are put where that wants them. Rows that accesses of
// 8 bytes do not fit pass through shared memory (packed.cuh), where each warp has room for its own.
//
// Pass: Math, Element, GROUPS (warpgroups), First and Last (layers), layers(c, a, tile), which calls each layer, and
//       load_weights(c); in bytes packed_at, packed_bytes (a warp's, or 0: none pass through it), and among these packed_x.
//       Layer: P, Q, K and N (these in whole steps and tiles), WEIGHT, BIAS (parameters; -1 without a bias), FIRST, LAST
//       (whether memory has what it reads, and what it makes), Activation, weight_at, bias_at (bytes).
#pragma once
#include "multiply/mma.cuh"
#include "move/packed.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "multiply/wgmma.cuh"

template <class Pass> struct Dense {
  using Element = typename Pass::Element;
  using First = typename Pass::First;
  using Last = typename Pass::Last;
  static constexpr int kSize = sizeof(Element), kStep = 32 / kSize, kEach = 16 / kSize;  // k's of a product; of 16 bytes
  static constexpr int kThreads = Pass::GROUPS * 128;
  template <class L> static constexpr int kSteps = L::K / kStep;

  const Params& params;
  const Lane lane;
  const int group, row;  // of a tile of 64: this lane's first, the other is 8 behind it
  const u32 memory;

  DEVICE Dense(const Params& given)
      : params(given), group(uniform(threadIdx.x / 128)), row(threadIdx.x / 32 % 4 * 16 + lane.g),
        memory(shared_address(shared_memory)) {}

  // Features of x and of y are dealt to columns of operands and sums, TILES of 8: 16 bytes of a lane go to as many tiles as
  // they have pairs, or fewer at the end. How many a tile is dealt with, and the first of them:
  template <int TILES> static constexpr int kWhole = TILES / (kEach / 2) * (kEach / 2);
  template <int TILES> static constexpr DEVICE bool in_two(int tile) {
    return kEach == 8 && TILES - kWhole<TILES> >= 2 && tile < kWhole<TILES> + 2;
  }
  template <int TILES> static constexpr DEVICE int dealt(int tile) {
    return tile < kWhole<TILES> ? kEach / 2 : in_two<TILES>(tile) ? 2 : 1;
  }
  template <int TILES> static constexpr DEVICE int dealt_from(int tile) {
    return tile < kWhole<TILES> ? tile / (kEach / 2) * (kEach / 2) : in_two<TILES>(tile) ? kWhole<TILES> : tile;
  }
  // The feature that a column is.
  template <int TILES> static DEVICE int dealt_feature(int column) {
    const int tile = column / 8, first = dealt_from<TILES>(tile);
    return first * 8 + column % 8 / 2 * 2 * dealt<TILES>(tile) + (tile - first) * 2 + column % 2;
  }
  template <class L> static DEVICE int feature_in(int k) { return L::FIRST ? dealt_feature<L::K / 8>(k) : k; }
  template <class L> static DEVICE int feature_out(int n) { return L::LAST ? dealt_feature<L::N / 8>(n) : n; }

  // A layer's weight comes by 32 bytes of its rows, a lane an element of each; kAtOnce rounds of rows are on their way.
  static constexpr int kRowsAtOnce = kThreads / kStep;
  template <class L> static constexpr int kRounds = ceil_div(L::N, kRowsAtOnce);
  template <class L> static constexpr int kAtOnce = kRounds<L> * kSteps<L> < 64 ? kRounds<L> : ceil_div(64, kSteps<L>);
  template <class L> struct Coming {
    Element weight[kAtOnce<L>][kSteps<L>];
    Element bias[ceil_div(L::N, kThreads)];
  };
  template <class L> DEVICE void take_weight(Coming<L>& coming, int first) const {
    const Element* weight = static_cast<const Element*>(params.weights[L::WEIGHT]);
    UNROLL for (int i = 0; i < kAtOnce<L>; ++i) {
      const int n = (first + i) * kRowsAtOnce + threadIdx.x / kStep, q = feature_out<L>(n);
      const bool row = (L::N % (kAtOnce<L> * kRowsAtOnce) == 0 || n < L::N) && (L::Q == L::N || q < L::Q);
      UNROLL for (int s = 0; s < kSteps<L>; ++s) {
        const int p = feature_in<L>(s * kStep + threadIdx.x % kStep);
        coming.weight[i][s] = row && (L::P == L::K || p < L::P) ? weight[q * L::P + p] : Element{};
      }
    }
  }
  template <class L> DEVICE void put_weight(const Coming<L>& coming, int first) const {
    // Of 32 bits, a lane's k's are t and t + 4, where its sums were 2t and 2t + 1.
    const int k = threadIdx.x % kStep, at = (kSize == 2 ? k : k % 2 * 4 + k / 2) * kSize;
    UNROLL for (int i = 0; i < kAtOnce<L>; ++i) {
      const int n = (first + i) * kRowsAtOnce + threadIdx.x / kStep;
      if (L::N % (kAtOnce<L> * kRowsAtOnce) != 0 && n >= L::N) break;
      UNROLL for (int s = 0; s < kSteps<L>; ++s) {
        const u32 to = memory + L::weight_at + s / 4 * (L::N * 128) + swizzled(n, s % 4 * 2 + at / 16) + at % 16;
        if constexpr (kSize == 4)
          store_shared(to, tf32_of(__float_as_uint(coming.weight[i][s])));
        else
          store_shared(to, coming.weight[i][s]);
      }
    }
  }
  template <class L> DEVICE void begin_layer(Coming<L>& coming) const {
    take_weight<L>(coming, 0);
    if constexpr (L::BIAS >= 0) {
      const Element* bias = static_cast<const Element*>(params.weights[L::BIAS]);
      UNROLL for (int i = 0; i < ceil_div(L::N, kThreads); ++i) {
        const int n = i * kThreads + threadIdx.x, q = feature_out<L>(n);
        coming.bias[i] = n < L::N && q < L::Q ? bias[q] : Element{};
      }
    }
  }
  template <class L> DEVICE void end_layer(Coming<L>& coming) const {
    put_weight<L>(coming, 0);
    if constexpr (L::BIAS >= 0) {
      UNROLL for (int i = 0; i < ceil_div(L::N, kThreads); ++i) {
        const int n = i * kThreads + threadIdx.x;
        const int at = n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2;  // a lane's of two tiles together
        if (n < L::N) store_shared(memory + L::bias_at + at * 4, widen(coming.bias[i]));
      }
    }
    ROLL for (int first = kAtOnce<L>; first < kRounds<L>; first += kAtOnce<L>) {
      take_weight<L>(coming, first);
      put_weight<L>(coming, first);
    }
  }

  // Shorter rows than a lane takes lie side by side for lanes as they are.
  template <int FEATURES>
  static constexpr bool kPacked = Pass::packed_bytes > 0 && FEATURES * kSize % 8 != 0 && FEATURES * kSize > 16;
  // This warp's rows: where half of a tile's lie packed on their way to memory, and how many bytes of ROWS there are.
  DEVICE u32 packed() const { return memory + Pass::packed_at + threadIdx.x / 32 * Pass::packed_bytes; }
  template <int FEATURES, int ROWS> DEVICE int bytes_of(i64 first) const {
    return first < params.batch ? int(min(i64(ROWS), params.batch - first)) * (FEATURES * kSize) : 0;
  }

  // Rows of a tile to come, asynchronously: to `next`, or packed to shared memory. Then they are taken from there.
  template <int FEATURES, int STEPS>
  DEVICE void begin_rows(const void* from, i64 tile, u32 to, u32 (&next)[STEPS][4]) const {
    if constexpr (kPacked<FEATURES>) {
      if (tile * 64 >= params.batch) return;
      const i64 first = tile * 64 + threadIdx.x / 32 % 4 * 16;
      fetch_run<16 * FEATURES * kSize, 32>(to, static_cast<const Element*>(from) + first * FEATURES,
                                           bytes_of<FEATURES, 16>(first), lane.index);
      commit_copies();
    } else {
      load<FEATURES>(from, tile, next);
    }
  }
  template <int FEATURES, int STEPS>
  DEVICE void end_rows(u32 from, const u32 (&next)[STEPS][4], u32 (&x)[STEPS][4]) const {
    if constexpr (kPacked<FEATURES>) {
      wait_for_copies<0>();
      __syncwarp();
      UNROLL for (int s = 0; s < STEPS; s += 2) {
        const bool lone = s + 1 == STEPS;
        UNROLL for (int h = 0; h < 2; ++h) {
          const int feature = s * kStep + lane.t * (lone ? kEach / 2 : kEach);
          u32 word[4] = {};
          take_words<Element, FEATURES>(from + (lane.g + h * 8) * (FEATURES * kSize), feature,
                                        (s + (lone ? 1 : 2)) * kStep <= FEATURES, lone ? 2 : 4, word);
          UNROLL for (int i = 0; i < (lone ? 2 : 4); ++i) x[s + i / 2][i % 2 * 2 + h] = word[i];
        }
      }
      __syncwarp();
    } else {
      UNROLL for (int s = 0; s < STEPS; ++s)
        UNROLL for (int i = 0; i < 4; ++i) x[s][i] = next[s][i];
    }
  }
  template <int FEATURES> DEVICE void send(void* y, i64 tile, int half) const {
    const i64 first = tile * 64 + threadIdx.x / 32 % 4 * 16 + half * 8;
    __syncwarp();
    send_run<8 * FEATURES * kSize, 32>(static_cast<Element*>(y) + first * FEATURES, packed(), bytes_of<FEATURES, 8>(first),
                                       lane.index);
    __syncwarp();
  }

  // A lane's part of rows of FEATURES as left operands; what lies outside is zero.
  template <int FEATURES, int STEPS> DEVICE void load(const void* from, i64 tile, u32 (&x)[STEPS][4]) const {
    UNROLL for (int s = 0; s < STEPS; s += 2) {
      const bool lone = s + 1 == STEPS;
      UNROLL for (int h = 0; h < 2; ++h) {
        const i64 sample = tile * 64 + row + h * 8;
        const int feature = s * kStep + lane.t * (lone ? kEach / 2 : kEach);
        u32 word[4] = {};
        if (sample < params.batch)
          load_words_of<FEATURES>(static_cast<const Element*>(from) + sample * FEATURES + feature, feature, lone, word);
        UNROLL for (int i = 0; i < (lone ? 2 : 4); ++i) x[s + i / 2][i % 2 * 2 + h] = word[i];
      }
    }
  }
  // 16 bytes of a row, or 8, by accesses as wide as rows are aligned.
  template <int FEATURES> static DEVICE void load_words_of(const Element* from, int feature, bool lone, u32 (&word)[4]) {
    constexpr int kRow = FEATURES * kSize, kWide = kRow % 16 == 0 ? 16 : kRow % 4 == 0 ? 4 : 2;
    if (kWide == 16 && !lone) {
      if (feature < FEATURES) load_global(from, word);
      return;
    }
    UNROLL for (int i = 0; i < (lone ? 2 : 4); ++i) {
      const int at = i * 4 / kSize;
      if constexpr (kWide >= 4) {
        if (feature + at < FEATURES) word[i] = *reinterpret_cast<const u32*>(from + at);
      } else {
        if (feature + at < FEATURES) word[i] = from[at].bits;
        if (feature + at + 1 < FEATURES) word[i] |= u32(from[at + 1].bits) << 16;
      }
    }
  }

  // What sums begin with, if the layer has a bias
  template <class L> DEVICE void begin(float (&d)[L::N / 2]) const {
    if constexpr (L::BIAS >= 0) {
      UNROLL for (int n = 0; n < L::N / 8; n += 2) {
        u32 bias[4];  // of this lane's columns in two tiles
        load_u32x4(memory + L::bias_at + n * 32 + lane.t * 16, bias);
        UNROLL for (int i = 0; i < (n + 1 < L::N / 8 ? 8 : 4); ++i)
          d[n * 4 + i] = __uint_as_float(bias[i / 4 * 2 + i % 2]);
      }
    }
  }
  // The other way: what `load` would read; of 32 bits as the next layer multiplies it, rounded, so that a backward pass that
  // reads it finds the same sums.
  template <int FEATURES, int STEPS> DEVICE void save(const void* given, const u32 (&x)[STEPS][4], i64 tile) const {
    void* y = const_cast<void*>(given);
    int first = row, t = lane.t;
    stay_here(first, t);  // or places are kept from state to state, in registers that products need
    UNROLL for (int h = 0; h < 2; ++h) {
      UNROLL for (int s = 0; s < STEPS; s += 2) {
        const bool lone = s + 1 == STEPS;
        const int feature = s * kStep + t * (lone ? kEach / 2 : kEach);
        u32 word[4] = {};
        UNROLL for (int i = 0; i < (lone ? 2 : 4); ++i) word[i] = x[s + i / 2][i % 2 * 2 + h];
        store_part<FEATURES>(y, tile * 64 + first + h * 8, feature, (s + (lone ? 1 : 2)) * kStep, word, lone ? 8 : 16);
      }
      if constexpr (kPacked<FEATURES>) send<FEATURES>(y, tile, h);
    }
  }
  // `bytes` of a sample's row from `feature` on, of which no lane's reach beyond `end`; packed, if `send` follows.
  template <int FEATURES>
  DEVICE void store_part(void* y, i64 sample, int feature, int end, const u32 (&word)[4], int bytes) const {
    constexpr int kRow = FEATURES * kSize, kWide = kRow % 16 == 0 ? 16 : kRow % 8 == 0 ? 8 : kRow % 4 == 0 ? 4 : 2;
    if constexpr (kPacked<FEATURES>)
      put_words<Element, FEATURES>(packed() + lane.g * kRow, feature, end <= FEATURES, bytes / 4, word);
    else if (sample < params.batch)
      store_words_of<FEATURES, kWide>(static_cast<Element*>(y) + sample * FEATURES + feature, feature, word, bytes);
  }

  // z = x W' + b
  template <class L> DEVICE void multiply(u32 (&a)[L::K / kStep][4], float (&d)[L::N / 2]) const {
    begin<L>(d);
    UNROLL for (int s = 0; s < kSteps<L>; ++s) settle(a[s]);
    if constexpr (L::BIAS >= 0) touch(d);
    make_products<kSteps<L>>(d, [&](int s) {
      Wgmma<Element, L::N>::multiply(d, a[s], operand(memory + L::weight_at + s / 4 * (L::N * 128)) + s % 4 * 2,
                                     L::BIAS >= 0 || s > 0);
    });
  }
  // Whether the layer has such a column: an activation of 0, which padding has, may be anything.
  template <class L> static DEVICE bool inside(int tile, int column) {
    return L::Q % L::N == 0 || (!L::LAST && tile * 8 + 8 <= L::Q) || feature_out<L>(tile * 8 + column) < L::Q;
  }
  template <class L> DEVICE float finished(const typename L::Activation& activation, float z, int tile, int column) const {
    const float y = activation.of(z);
    return inside<L>(tile, column) ? y : 0.f;
  }
  // Sums as the next layer's left operands
  template <class L, class NEXT> DEVICE void hand_on(const float (&d)[L::N / 2], u32 (&a)[NEXT::K / kStep][4]) const {
    const typename L::Activation activation(params);  // which takes no registers while products are made
    UNROLL for (int s = 0; s < kSteps<NEXT>; ++s)
      UNROLL for (int i = 0; i < 4; ++i) {
        if constexpr (kSize == 2) {
          const int at = s * 8 + i * 2, tile = s * 2 + i / 2;
          a[s][i] = Pair<Element>(finished<L>(activation, d[at], tile, lane.t * 2),
                                  finished<L>(activation, d[at + 1], tile, lane.t * 2 + 1)).bits;
        } else {
          const int at = s * 4 + i % 2 * 2 + i / 2;
          a[s][i] = tf32_of(__float_as_uint(finished<L>(activation, d[at], s, lane.t * 2 + i / 2)));
        }
      }
  }

  // Sums of rows of FEATURES to memory, by what becomes of them
  template <int FEATURES, class Activation, int SUMS> DEVICE void store(void* y, const float (&d)[SUMS], i64 tile) const {
    constexpr int TILES = SUMS / 4;
    const Activation activation(params);
    UNROLL for (int h = 0; h < 2; ++h) {
      const i64 sample = tile * 64 + row + h * 8;
      if (!kPacked<FEATURES> && sample >= params.batch) continue;
      UNROLL for (int n = 0; n < TILES; ++n) {
        if (dealt_from<TILES>(n) != n) continue;
        const int feature = n * 8 + lane.t * 2 * dealt<TILES>(n);
        u32 word[4];
        UNROLL for (int i = 0; i < dealt<TILES>(n); ++i) {
          const float a = activation.of(d[(n + i) * 4 + h * 2]), b = activation.of(d[(n + i) * 4 + h * 2 + 1]);
          if constexpr (kSize == 2)
            word[i] = Pair<Element>(a, b).bits;
          else
            word[i * 2] = __float_as_uint(a), word[i * 2 + 1] = __float_as_uint(b);
        }
        store_part<FEATURES>(y, sample, feature, (n + dealt<TILES>(n)) * 8, word, dealt<TILES>(n) * 2 * kSize);
      }
      if constexpr (kPacked<FEATURES>) send<FEATURES>(y, tile, h);
    }
  }
  // `bytes` of a row, by accesses as wide as rows are aligned
  template <int FEATURES, int WIDE>
  static DEVICE void store_words_of(Element* to, int feature, const u32 (&word)[4], int bytes) {
    if constexpr (WIDE == 2) {
      UNROLL for (int i = 0; i < 8; ++i)
        if (i * 2 < bytes && feature + i < FEATURES) store_global(to + i, Element{u16(word[i / 2] >> i % 2 * 16)});
    } else {
      UNROLL for (int i = 0; i < 4; ++i) {
        if (i * 4 >= bytes) break;
        const int at = i * 4 / kSize;
        if (WIDE == 16 && bytes == 16) {
          if (i == 0 && feature < FEATURES) store_global<16>(to, word);
        } else if (WIDE >= 8 && bytes >= 8) {
          if (i % 2 == 0 && feature + at < FEATURES) store_global<8>(to + at, word + i);
        } else if (feature + at < FEATURES) {
          store_global<4>(to + at, word + i);
        }
      }
    }
  }

  DEVICE void run() const {
    const i64 tiles = (params.batch + 63) / 64, step = i64(gridDim.x) * Pass::GROUPS;
    i64 tile = i64(group) * gridDim.x + blockIdx.x;
    const u32 packed_x = packed() + Pass::packed_x;
    u32 next[kSteps<First>][4];
    begin_rows<First::P>(params.x, tile, packed_x, next);
    Pass::load_weights(*this);
    fence_copy_engine();
    __syncthreads();
    ROLL for (; tile < tiles; tile += step) {
      u32 x[kSteps<First>][4];
      end_rows<First::P>(packed_x, next, x);
      begin_rows<First::P>(params.x, tile + step, packed_x, next);
      UNROLL for (int s = 0; s < kSteps<First>; ++s)
        UNROLL for (int i = 0; i < 4; ++i) x[s][i] = kSize == 4 ? tf32_of(x[s][i]) : x[s][i];
      Pass::layers(*this, x, tile);
    }
  }
};
