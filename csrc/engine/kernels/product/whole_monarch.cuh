// A Monarch layer as one dense weight, for dense products: W[(q, l), (k, p)] = sum_r W1[l][q, (k, r)] W0[k][(r, l), p], where
// groups k have p's and (r, l)'s, and groups l (k, r)'s and q's. And the gradients of both weights, from that of the dense one:
//
//   dW0[k][(r, l), p] = sum_q W1[l][q, (k, r)] dW[(q, l), (k, p)]      dW1[l][q, (k, r)] = sum_p dW[(q, l), (k, p)] W0[k][(r, l), p]
//
// All sums are made by FMA in one order, and rounded once. Nothing here depends on samples. In half precision, where products may
// be too small or too large, the dense weight is multiplied by a power of two, which the largest of each weight tells, and whoever
// takes the samples divides by it.
//
// Pass:  Element, WEIGHT_0 and WEIGHT_1 (which parameters the weights are), K, P, L, Q, R; HEIGHT (sums of a thread), WAYS; of MonarchWeight
//        TURNED (whether the dense weight is [in][out]); of MonarchGradients OF_0 and OF_1 (where gradients begin), ACROSS and
//        DOWN (threads of neighbouring r's, and q's), MINE (q's of a thread), LONG (p's at once), HELD (q's at once); in half precision SCALED and LARGEST (floats in what is prepared: the power of two and what takes it
//        back, and what each of BLOCKS blocks of MonarchLargest has found), else -1
#pragma once
#include "move/memory.cuh"
#include "types/halves.cuh"
#include "types/params.cuh"

// The largest finite number of each weight, by blocks.
template <class Pass> struct MonarchLargest {
  using Element = typename Pass::Element;
  static constexpr int kThreads = 256, kEach = 16 / int(sizeof(Element));
  const Params& params;
  DEVICE MonarchLargest(const Params& given) : params(given) {}
  static DEVICE float larger(float most, Element x) {
    const float size = fabsf(widen(x));
    return size <= kLargestFloat ? fmaxf(most, size) : most;
  }
  DEVICE float of(int which, i64 count) const {
    const Element* weight = static_cast<const Element*>(params.weights[which]);
    const i64 first = i64(blockIdx.y) * kThreads + threadIdx.x, step = i64(gridDim.y) * kThreads, whole = count / kEach;
    float most = 0;
    UNROLL_BY(4) for (i64 i = first; i < whole; i += step) {
      u32 words[4];
      load_global(weight + i * kEach, words);
      UNROLL for (u32 word : words) most = larger(larger(most, Element{u16(word)}), Element{u16(word >> 16)});
    }
    if (whole * kEach + first < count) most = larger(most, weight[whole * kEach + first]);
    return most;
  }
  DEVICE void run() const {
    const u32 memory = shared_address(shared_memory);
    float most[2] = {of(Pass::WEIGHT_0, Pass::COUNT_0), of(Pass::WEIGHT_1, Pass::COUNT_1)};
    most_of<32>(most);
    if (threadIdx.x % 32 == 0) store_shared(memory + threadIdx.x / 32 * 8, Pair<float>(most[0], most[1]));
    __syncthreads();
    if (threadIdx.x > 1) return;
    float all = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) all = fmaxf(all, load_sum(memory + warp * 8 + threadIdx.x * 4, 0.f));
    store_global(static_cast<float*>(params.y) + Pass::LARGEST + blockIdx.y * 2 + threadIdx.x, all);
  }
};

// What both have in common: columns (k, p) of the dense weight, with WAYS of a block's 256 threads for each.
template <class Pass> struct OfBoth {
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, Q = Pass::Q, R = Pass::R, HEIGHT = Pass::HEIGHT;
  static constexpr int kThreads = 256, kWays = Pass::WAYS, kColumns = kThreads / kWays, kIn = K * P, kOut = Q * L;
  static constexpr int kAcross = ceil_div(kIn, kColumns);
  static constexpr int kGroups = ceil_div(kColumns - 1, P) + 1 < K ? ceil_div(kColumns - 1, P) + 1 : K;  // that columns are of
  static constexpr int kSize = sizeof(Real), kRow = HEIGHT * kSize;
  const Params& params;
  const int thread;
  const u32 memory;
  DEVICE OfBoth(const Params& given) : params(given), thread(threadIdx.x), memory(shared_address(shared_memory)) {}
  DEVICE const Element* weight(int which) const { return static_cast<const Element*>(params.weights[which]); }
  DEVICE const Element* first(int k, int r, int l) const {
    return weight(Pass::WEIGHT_0) + ((i64(k) * R + r) * L + l) * P;
  }
  DEVICE const Element* second(int l, int q, int k) const {
    return weight(Pass::WEIGHT_1) + ((i64(l) * Q + q) * K + k) * R;
  }
  // sums[j] += factor * [j] of a row in shared memory
  static DEVICE void add(Real (&sums)[HEIGHT], Real factor, u32 row) {
    UNROLL for (int j = 0; j < HEIGHT; j += 16 / kSize) {
      const auto words = load_words<16>(row + j * kSize);
      UNROLL for (int i = 0; i < 16 / kSize; ++i) sums[j + i] += factor * reinterpret_cast<const Real*>(&words)[i];
    }
  }
};

// A block has some columns and WAYS times HEIGHT q's of a group l, whose second weights it holds as [k, r][q]. Turned, where groups
// take turns in a row of the dense weight, it has HEIGHT q's of WAYS groups: results lie side by side, and leave by shared memory.
template <class Pass> struct MonarchWeight : OfBoth<Pass> {
  using Base = OfBoth<Pass>;
  using typename Base::Element, typename Base::Real;
  using Base::K, Base::P, Base::L, Base::Q, Base::R, Base::HEIGHT, Base::kThreads, Base::kWays, Base::kIn, Base::kOut;
  using Base::kAcross, Base::kColumns, Base::kGroups, Base::kSize, Base::kRow, Base::params, Base::thread, Base::memory;
  static constexpr bool kApart = Pass::TURNED && L > 1;
  static constexpr int kRows = kWays * HEIGHT, kTileQ = kApart ? HEIGHT : kRows, kTileL = kApart ? kWays : 1;
  static constexpr int kTilesL = ceil_div(L, kTileL), kTiles = kAcross * kTilesL * ceil_div(Q, kTileQ);
  static constexpr int kLine = (kRows + 16 / kSize) * kSize;  // bytes: four (k, r)'s are in different banks
  static constexpr int kTogether = R <= 24 ? R : 16;          // r's whose first weights are on their way
  DEVICE MonarchWeight(const Params& given) : Base(given) {}

  DEVICE void hold(int l, int q, int k) const {
    constexpr int kHeld = kGroups * R;
    move_together<kRows * kHeld, kThreads, 8>(
        [&](int i) {
          const int row = i / kHeld, kr = i % kHeld, of_l = l + (kApart ? row / HEIGHT : 0), of_q = q + row % kTileQ;
          const bool here = row < kRows && of_l < L && of_q < Q && kr < (K - k) * R;
          return here ? Base::second(of_l, of_q, k)[kr] : Element{};
        },
        [&](int i, Element x) {
          if (i < kRows * kHeld) store_shared(memory + i % kHeld * kLine + i / kHeld * kSize, widen(x));
        });
  }
  // What the dense weight is multiplied by
  DEVICE Real scale() const {
    if constexpr (Pass::LARGEST >= 0) {
      static_assert(Pass::BLOCKS <= kThreads);
      const float* largest = static_cast<const float*>(params.sums) + Pass::LARGEST;
      float most[2] = {};
      if (thread < Pass::BLOCKS) most[0] = largest[thread * 2], most[1] = largest[thread * 2 + 1];
      most_of<32>(most);
      if (thread % 32 == 0) store_shared(memory + thread / 32 * 8, Pair<float>(most[0], most[1]));
      __syncthreads();
      for (int warp = 0; warp < kThreads / 32; ++warp)
        UNROLL for (int i = 0; i < 2; ++i) most[i] = fmaxf(most[i], load_sum(memory + warp * 8 + i * 4, 0.f));
      __syncthreads();
      constexpr float kLeast = 1.f / (1ll << 48);  // of a product of two numbers that are not zero
      const Scale found(fmaxf(most[0] * most[1] * R, kLeast));
      float* to = static_cast<float*>(params.y) + Pass::SCALED;
      if (blockIdx.y == 0 && thread == 0) store_global(to, found.there), store_global(to + 1, found.back);
      return found.there;
    }
    return 1;
  }
  DEVICE void tile(int l, int q, int column, Real scale) const {
    const int from_k = column / P, c = column + thread % kColumns, way = thread / kColumns, k = c / P;
    const int of_l = kApart ? min(l + way, L - 1) : l;
    const Element* factors = Base::first(c < kIn ? k : 0, 0, of_l) + c % P;
    Element of_r[kTogether];
    const auto ask = [&](int r) {
      UNROLL for (int i = 0; i < kTogether; ++i)
        of_r[i] = c < kIn && r + i < R ? factors[i64(r + i) * L * P] : Element{};
    };
    ask(0);
    hold(l, q, from_k);
    __syncthreads();
    Real sums[HEIGHT] = {};
    if (c < kIn) {
      u32 row = memory + (k - from_k) * R * kLine + way * kRow;
      ROLL for (int r = 0; r < R; r += kTogether) {
        if (r > 0) ask(r);
        UNROLL for (int i = 0; i < kTogether; ++i, row += kLine)
          if (R % kTogether == 0 || r + i < R) Base::add(sums, widen(of_r[i]), row);
      }
    }
    Element made[HEIGHT];
    UNROLL for (int j = 0; j < HEIGHT; ++j) made[j] = narrow<Element>(Pass::LARGEST >= 0 ? sums[j] * scale : sums[j]);
    if constexpr (kApart) {
      store_apart(made, l, q, column);
    } else if (c < kIn) {
      Element* y = static_cast<Element*>(params.y);
      UNROLL for (int j = 0; j < HEIGHT; ++j) {
        const int at = q + way * HEIGHT + j;
        if (at < Q) store_global(y + (Pass::TURNED ? i64(c) * kOut + at : (i64(at) * L + l) * kIn + c), made[j]);
      }
    }
    __syncthreads();
  }
  // Of each column what lies together there, by neighbouring threads
  DEVICE void store_apart(const Element (&made)[HEIGHT], int l, int q, int column) const {
    constexpr int kBytes = int(sizeof(Element)), kEach = kRows * kBytes + (kBytes < 4 ? 4 : kBytes);  // columns begin in different banks
    __syncthreads();  // all have read what is held
    UNROLL for (int j = 0; j < HEIGHT; ++j)
      store_shared(memory + thread % kColumns * kEach + (j * kWays + thread / kColumns) * kBytes, made[j]);
    __syncthreads();
    Element* y = static_cast<Element*>(params.y);
    UNROLL_BY(4) for (int i = thread; i < kColumns * kRows; i += kThreads) {
      const int c = i / kRows, row = i % kRows, of_q = q + row / kWays, of_l = l + row % kWays;
      if (column + c < kIn && of_q < Q && of_l < L)
        store_words<kBytes>(y + i64(column + c) * kOut + of_q * L + of_l,
                            load_words<kBytes>(memory + c * kEach + row * kBytes));
    }
  }
  DEVICE void run() const {
    const Real scale = this->scale();
    ROLL for (int at = blockIdx.y; at < kTiles; at += gridDim.y)
      tile(at / kAcross % kTilesL * kTileL, at / (kAcross * kTilesL) * kTileQ, at % kAcross * kColumns, scale);
  }
};

// Of dW, [out][in], as sums. Blocks for dW0 have 64 columns and HEIGHT r's of a group l; their four threads for a column take every
// fourth q. Blocks for dW1 have q's and r's of a group l and some neighbouring groups k, and go through chunks of p's.
template <class Pass> struct MonarchGradients : OfBoth<Pass> {
  using Base = OfBoth<Pass>;
  using typename Base::Element, typename Base::Real;
  using Base::K, Base::P, Base::L, Base::Q, Base::R, Base::HEIGHT, Base::kThreads, Base::kWays, Base::kIn;
  using Base::kAcross, Base::kColumns, Base::kGroups, Base::kSize, Base::kRow, Base::params, Base::thread, Base::memory;
  static constexpr int kHeld = Pass::HELD;  // q's at once
  static constexpr int kTilesR = ceil_div(R, HEIGHT), kOfFirst = kAcross * L * kTilesR;
  static constexpr int ACROSS = Pass::ACROSS, DOWN = Pass::DOWN, MINE = Pass::MINE, LONG = Pass::LONG;
  static constexpr int kSide = kThreads / (ACROSS * DOWN), kMineR = R > ACROSS ? 2 : 1;  // groups k, and r's of a thread
  static constexpr int kTileR = ACROSS * kMineR, kTileQ = DOWN * MINE, kLine = LONG + 1;
  static constexpr int kSides = ceil_div(K, kSide), kTilesQ = ceil_div(Q, kTileQ), kOfSecond = kSides * L * kTilesQ * ceil_div(R, kTileR);
  DEVICE MonarchGradients(const Params& given) : Base(given) {}
  DEVICE const Real* gradient(int q, int l) const { return static_cast<const Real*>(params.x) + (i64(q) * L + l) * kIn; }
  DEVICE Element* result(i64 at) const { return static_cast<Element*>(params.y) + at; }
  DEVICE Real held(u32 at) const { return load_sum(memory + at * kSize, Real(0)); }

  // [q][k][r]: what the second weight has there
  DEVICE void hold(int l, int q, int k, int r) const {
    constexpr int kAll = kHeld * kGroups * HEIGHT;
    move_together<kAll, kThreads, 4>(
        [&](int i) {
          const int row = i / (kGroups * HEIGHT), of_k = i / HEIGHT % kGroups, j = r + i % HEIGHT;
          const bool here = row < kHeld && q + row < Q && k + of_k < K && j < R;
          return here ? Base::second(l, q + row, k + of_k)[j] : Element{};
        },
        [&](int i, Element x) {
          if (i < kAll) store_shared(memory + i * kSize, widen(x));
        });
  }
  DEVICE void of_first(int l, int r, int column) const {
    const int from_k = column / P, c = column + thread % kColumns, way = thread / kColumns, k = c / P;
    Real sums[HEIGHT] = {};
    ROLL for (int q = 0; q < Q; q += kHeld) {
      Real g[kHeld / kWays];
      UNROLL for (int i = 0; i < kHeld / kWays; ++i) {
        const int at = q + i * kWays + way;
        g[i] = at < Q && c < kIn ? gradient(at, l)[c] : Real(0);
      }
      hold(l, q, from_k, r);
      __syncthreads();
      if (c < kIn) {
        UNROLL for (int i = 0; i < kHeld / kWays; ++i)
          if (q + i * kWays + way < Q)
            Base::add(sums, g[i], memory + ((i * kWays + way) * kGroups + k - from_k) * kRow);
      }
      __syncthreads();
    }
    // The other threads' sums, in order
    UNROLL for (int j = 0; j < HEIGHT; ++j) store_shared(memory + (j * kThreads + thread) * kSize, sums[j]);
    __syncthreads();
    ROLL for (int j = way; j < HEIGHT; j += kWays) {
      if (c >= kIn || r + j >= R) continue;
      Real sum = 0;
      UNROLL for (int other = 0; other < kWays; ++other)
        sum += held(j * kThreads + other * kColumns + thread % kColumns);
      store_global(result(Pass::OF_0 + ((i64(k) * R + r + j) * L + l) * P + c % P), narrow<Element>(sum));
    }
    __syncthreads();
  }

  DEVICE void of_second(int from_k, int l, int q, int r) const {
    constexpr int kRows = kTileQ + kTileR, kLoads = ceil_div(kSide * kRows * LONG, kThreads), kTogether = kLoads < 12 ? kLoads : 12;
    const int across = thread % ACROSS, down = thread / ACROSS % DOWN, side = thread / (ACROSS * DOWN), k = from_k + side;
    Real sums[MINE][kMineR] = {};
    ROLL for (int p = 0; p < P; p += LONG) {
      move_together<kSide * kRows * LONG, kThreads, kTogether>(
          [&](int i) {
            const int row = i / LONG % kRows, of_k = from_k + i / (LONG * kRows), at = p + i % LONG, of_r = r + row - kTileQ;
            Real x = 0;
            if (of_k < K && at < P) {
              if (row < kTileQ && q + row < Q) x = gradient(q + row, l)[of_k * P + at];
              if (row >= kTileQ && of_r < R) x = widen(Base::first(of_k, of_r, l)[at]);
            }
            return x;
          },
          [&](int i, Real x) {
            if (i < kSide * kRows * LONG) store_shared(memory + (i / LONG * kLine + i % LONG) * kSize, x);
          });
      __syncthreads();
      const int count = min(LONG, P - p), left = side * kRows + down, right = side * kRows + kTileQ + across;
      UNROLL_BY(4) for (int i = 0; i < count; ++i) {
        Real of_q[MINE], of_r[kMineR];
        UNROLL for (int m = 0; m < MINE; ++m) of_q[m] = held((left + m * DOWN) * kLine + i);
        UNROLL for (int n = 0; n < kMineR; ++n) of_r[n] = held((right + n * ACROSS) * kLine + i);
        UNROLL for (int m = 0; m < MINE; ++m)
          UNROLL for (int n = 0; n < kMineR; ++n) sums[m][n] += of_q[m] * of_r[n];
      }
      __syncthreads();
    }
    UNROLL for (int m = 0; m < MINE; ++m)
      UNROLL for (int n = 0; n < kMineR; ++n) {
        const int row = q + down + m * DOWN, column = r + across + n * ACROSS;
        if (k < K && row < Q && column < R)
          store_global(result(Pass::OF_1 + ((i64(l) * Q + row) * K + k) * R + column), narrow<Element>(sums[m][n]));
      }
  }
  DEVICE void run() const {
    ROLL for (int at = blockIdx.y; at < kOfFirst + kOfSecond; at += gridDim.y) {
      const int tile = at - kOfFirst;
      if (tile < 0)
        of_first(at / kAcross % L, at / (kAcross * L) * HEIGHT, at % kAcross * kColumns);
      else
        of_second(tile % kSides * kSide, tile / kSides % L, tile / (kSides * L) % kTilesQ * kTileQ,
                  tile / (kSides * L * kTilesQ) * kTileR);
    }
  }
};
