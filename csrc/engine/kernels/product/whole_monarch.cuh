// A Monarch layer as one dense weight, for dense products: W[(q, l), (k, p)] = sum_r W1[l][q, (k, r)] W0[k][(r, l), p], where
// groups k have p's and (r, l)'s, and groups l (k, r)'s and q's. And the gradients of both weights, from that of the dense one:
//
//   dW0[k][(r, l), p] = sum_q W1[l][q, (k, r)] dW[(q, l), (k, p)]      dW1[l][q, (k, r)] = sum_p dW[(q, l), (k, p)] W0[k][(r, l), p]
//
// For each k and l these are products of matrices, of which a block has those of some groups: operands come to shared memory,
// padded with zeros, and warps have tiles of the sums. All are summed in one order, and rounded once. Nothing here depends on
// samples. In half precision, where products may be too small or too large, the dense weight is multiplied by a power of two, which
// the largest of each weight tells, and whoever takes the samples divides by it. Its gradient, whose sums may be beyond half
// precision, is multiplied as tf32.
//
// kernels/product/whole_monarch.py writes the constants:
//
// Pass:  Math, Element, WEIGHT_0 and WEIGHT_1 (which parameters the weights are), K, P, L, Q, R, AT_K (groups k of a block), PIECE_0 and
//        PIECE_1 (numbers of weights that are loaded at once); of MonarchWeight Sums (a block's Tile, of q's and p's), AT_L (its groups
//        l), DEPTH (r's at once), TURNED (whether the dense weight is [in][out]), STORE (bytes at once), in half precision SCALED and
//        LARGEST (floats in what is prepared: the power of two and what takes it back, and what each of BLOCKS blocks of
//        MonarchLargest has found), else -1; of MonarchGradients First and Second (Tiles of r's and p's, and of q's and r's), DEPTH
//        (q's or p's at once), PIECE (numbers of dW), OF_0 and OF_1 (where gradients begin)
#pragma once
#include "kernels/operands.cuh"
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

constexpr int kThreads = 256, kWarps = kThreads / 32;

// GROUPS matrices of sums, M x N each, in tiles of 16 MT x 8 NT, which a block's warps have in turn.
template <int GROUPS_, int M_, int N_, int MT_, int NT_> struct Tile {
  static constexpr int GROUPS = GROUPS_, M = M_, N = N_, MT = MT_, NT = NT_, kM = round_up(M, 16 * MT), kN = round_up(N, 8 * NT);
  static constexpr int kDown = kM / (16 * MT), kAll = GROUPS * kDown * (kN / (8 * NT)), kEach = ceil_div(kAll, kWarps);
};
template <class Math, class T, class Tile> struct TileSums {
  using Real = Sum<T>;
  using Tensors = Operands<Math, T, kThreads>;
  Real sums[Tile::kEach][Tile::MT][Tile::NT][4] = {};
  // what(sums, group, m, n) of each of the warp's tiles, which begins there
  template <class What> DEVICE void each(const What& what) {
    const int warp = uniform(threadIdx.x / 32);
    UNROLL for (int i = 0; i < Tile::kEach; ++i) {
      const int at = warp + i * kWarps;
      if (Tile::kAll % kWarps == 0 || at < Tile::kAll)
        what(sums[i], at % Tile::GROUPS, at / Tile::GROUPS % Tile::kDown * (16 * Tile::MT), at / (Tile::GROUPS * Tile::kDown) * (8 * Tile::NT));
    }
  }
  // The same of neighbours in a row, which may both be beyond it: what(group, row, column, x, y)
  template <class What> DEVICE void each_two(const What& what) {
    const Lane lane;
    each([&](const auto& some, int group, int m, int n) {
      UNROLL for (int i = 0; i < Tile::MT * 2; ++i)
        UNROLL for (int j = 0; j < Tile::NT; ++j)
          what(group, m + i * 8 + lane.g, n + j * 8 + lane.t * 2, some[i / 2][j][i % 2 * 2], some[i / 2][j][i % 2 * 2 + 1]);
    });
  }
  // sums += left(group, m) x right(group, n)
  template <int STEPS, class Left, class Right> DEVICE void multiply(const Left& left, const Right& right) {
    each([&](auto& some, int group, int m, int n) { Tensors::template multiply<STEPS>(some, left(group, m), right(group, n)); });
  }
};

// LINES of so many PIECES of BYTES, by neighbouring threads, up to 128 bytes: get(line, piece), also of places beyond, and
// put(line, piece, x). A thread has some 64 bytes on their way at once, and at most 12 pieces.
template <int BYTES, int LINES, int PIECES, class Get, class Put> DEVICE void move_lines(const Get& get, const Put& put) {
  constexpr int kMost = BYTES < 4 ? 32 : 128 / BYTES, kPower = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : PIECES > 2 ? 4 : PIECES;
  constexpr int kAcross = kPower < kMost ? kPower : kMost, TOGETHER = BYTES == 16 ? 4 : BYTES == 8 ? 6 : 12;
  constexpr int kDown = kThreads / kAcross, kAlong = ceil_div(PIECES, kAcross), kRounds = ceil_div(LINES, kDown);
  constexpr int kSome = TOGETHER / kAlong < 1 ? 1 : TOGETHER / kAlong, kLines = kSome < kRounds ? kSome : kRounds;
  const int first = threadIdx.x % kAcross;
  ROLL for (int line = threadIdx.x / kAcross; line < LINES; line += kLines * kDown) {
    decltype(get(0, 0)) x[kLines][kAlong];
    UNROLL for (int i = 0; i < kLines; ++i)
      UNROLL for (int j = 0; j < kAlong; ++j) x[i][j] = get(line + i * kDown, first + j * kAcross);
    UNROLL for (int i = 0; i < kLines; ++i)
      UNROLL for (int j = 0; j < kAlong; ++j)
        if (line + i * kDown < LINES && (PIECES % kAcross == 0 || first + j * kAcross < PIECES))
          put(line + i * kDown, first + j * kAcross, x[i][j]);
  }
}

// Numbers of a row from this one on, as many as are there
template <class T> struct Run {
  using Element = T;
  const Element* from;
  int count;
};
// GROUPS matrices of ROWS x COLUMNS in shared memory, as operands, whose rows are STRIDE apart
template <class Math, class T, int GROUPS, int ROWS, int COLUMNS, int STRIDE> struct Matrices {
  using Tensors = Operands<Math, T, kThreads>;
  static constexpr int kSize = sizeof(T), kBytes = GROUPS * ROWS * STRIDE * kSize;
  static DEVICE u32 place(int group, int row, int column) { return ((group * ROWS + row) * STRIDE + column) * kSize; }
  // Pieces of runs, which have so many numbers, or none: run(group, row) is what is there of a row.
  template <int PIECE, class Of> static DEVICE void load(u32 to, const Of& run) {
    using Element = typename decltype(run(0, 0))::Element;
    constexpr int kPiece = PIECE * int(sizeof(Element)), kWords = kPiece < 4 ? 1 : kPiece / 4;
    struct Some { u32 words[kWords]; };
    move_lines<kPiece, GROUPS * ROWS, COLUMNS / PIECE>(
        [&](int line, int piece) {
          const Run<Element> row = run(line / ROWS, line % ROWS);
          Some x;
          load_made<kPiece>(row.from + piece * PIECE, x.words, piece * PIECE < row.count);
          return x;
        },
        [&](int line, int piece, const Some& x) { put<Element, PIECE>(to + (line * STRIDE + piece * PIECE) * kSize, x.words); });
  }
  // As they are, or widened and rounded
  template <class Element, int PIECE, int WORDS> static DEVICE void put(u32 to, const u32 (&words)[WORDS]) {
    if constexpr (is_same<Element, T> && !Math::kRounds) {
      put_words<PIECE * kSize>(to, words);
    } else {
      constexpr int kAtOnce = PIECE < 4 ? PIECE : 4;
      UNROLL for (int i = 0; i < PIECE; i += kAtOnce) {
        u32 x[kAtOnce];
        UNROLL for (int j = 0; j < kAtOnce; ++j) {
          if constexpr (sizeof(Element) == 2)
            x[j] = __float_as_uint(number_of<Element>(words, i + j));
          else
            x[j] = __float_as_uint(Math::rounded(__uint_as_float(words[i + j])));
        }
        put_words<kAtOnce * 4>(to + i * 4, x);
      }
    }
  }
  // Of a group, from row or column `at` on: rows of a left operand, and of a right one, whose columns these are
  static DEVICE auto by_rows(u32 from, int group, int at, Lane lane) {
    return Tensors::template tiles_by_rows<STRIDE, false>(from + place(group, at, 0) + Math::template lane_row_a<STRIDE>(lane));
  }
  static DEVICE auto by_k(u32 from, int group, int at, Lane lane) {
    return Tensors::template by_k<STRIDE>(from + place(group, at, 0) + Math::template lane_row_b<STRIDE>(lane));
  }
  // The same of what lies turned, both of one product
  static DEVICE auto by_m(u32 from, int group, int at, Lane lane) {
    return Tensors::template tiles_by_m<STRIDE, false>(from + place(group, 0, at) +
                                                       Math::template lane_a_by_m<STRIDE, Tensors::kPairs>(lane));
  }
  static DEVICE auto by_n(u32 from, int group, int at, Lane lane) {
    return Tensors::template by_n<STRIDE>(from + place(group, 0, at) + Math::template lane_b_by_n<STRIDE, Tensors::kPairs>(lane), lane.index);
  }
  // A right operand that lies turned, beside a left one by rows: k's in their order
  struct InOrder {
    const u32 from;
    const int lane;
    template <int NT> DEVICE void operator()(typename Math::B (&some)[NT], int n, int s) const {
      u32 columns[NT];
      UNROLL for (int i = 0; i < NT; ++i) columns[i] = from + (s * Math::kStep * STRIDE + (n + i) * 8) * kSize;
      Math::template load_b_by_n<Math::kStep, STRIDE, NT, 8, false>(some, columns, lane);
    }
  };
  static DEVICE InOrder in_order(u32 from, int group, int at, Lane lane) {
    return {from + place(group, 0, at) + Math::template lane_b_by_n<STRIDE>(lane), lane.index};
  }
  template <int BYTES, int WORDS> static DEVICE void put_words(u32 to, const u32 (&x)[WORDS]) {
    if constexpr (BYTES == 16) store_u32x4(to, x);
    else if constexpr (BYTES == 8) store_f32x2(to, __uint_as_float(x[0]), __uint_as_float(x[1]));
    else if constexpr (BYTES == 4) store_shared(to, x[0]);
    else store_shared(to, u16(x[0]));
  }
};

// What both passes have in common
template <class Pass> struct OfBoth {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, Q = Pass::Q, R = Pass::R, AT_K = Pass::AT_K, DEPTH = Pass::DEPTH;
  static constexpr int kIn = K * P, kOut = Q * L, kStep = Math::kStep, kSteps = ceil_div(DEPTH, kStep), kDepth = kSteps * kStep;
  const Params& params;
  const u32 memory;
  const Lane lane;
  DEVICE OfBoth(const Params& given) : params(given), memory(shared_address(shared_memory)) {}
  // From r of a row on, or from a p on; none of a place that is beyond
  DEVICE Run<Element> first(int k, int r, int l, int p) const {
    const bool here = k < K && r < R && l < L;
    return {static_cast<const Element*>(params.weights[Pass::WEIGHT_0]) + (here ? ((i64(k) * R + r) * L + l) * P + p : 0), here ? P - p : 0};
  }
  DEVICE Run<Element> second(int l, int q, int k, int r) const {
    const bool here = l < L && q < Q && k < K;
    return {static_cast<const Element*>(params.weights[Pass::WEIGHT_1]) + (here ? ((i64(l) * Q + q) * K + k) * R + r : 0), here ? R - r : 0};
  }
};

// A block has tiles of q's and p's of AT_K groups k and AT_L groups l, some of these groups at once. Results meet in shared memory as
// they lie together in a row of the dense weight, of [out] or, TURNED, of [in], where groups l take turns.
template <class Pass> struct MonarchWeight : OfBoth<Pass> {
  using Base = OfBoth<Pass>;
  using typename Base::Element, typename Base::Math;
  using Base::K, Base::P, Base::L, Base::Q, Base::R, Base::AT_K, Base::DEPTH, Base::kIn, Base::kOut, Base::kSteps, Base::kDepth;
  using Base::params, Base::memory, Base::lane;
  using Sums = typename Pass::Sums;
  using Real = Sum<Element>;
  static constexpr bool TURNED = Pass::TURNED;
  static constexpr int kSize = sizeof(Element), AT_L = Pass::AT_L, kGroups = AT_K * AT_L, TILE_Q = Sums::M, TILE_P = Sums::N;
  static constexpr int kTilesK = ceil_div(K, AT_K), kTilesP = ceil_div(P, TILE_P), kTilesL = ceil_div(L, AT_L);
  static constexpr int kTiles = kTilesK * kTilesP * kTilesL * ceil_div(Q, TILE_Q);
  using Left = Matrices<Math, Element, Sums::GROUPS, Sums::kM, kDepth, Operands<Math, Element, kThreads>::stride(kDepth)>;
  static constexpr int kRightStride = kSize == 8 ? Sums::kN + 4 : round_up(Sums::kN, 16) + 8;
  using Right = Matrices<Math, Element, Sums::GROUPS, kDepth, Sums::kN, kRightStride>;
  // Lines of results: runs of what lies side by side, SOME of them one behind another
  static constexpr bool kParts = TURNED && AT_L < L;
  static constexpr int kRun = !TURNED ? AT_K * TILE_P : kParts ? AT_L : TILE_Q * L, kSome = kParts ? TILE_Q : 1;
  static constexpr int kLines = TURNED ? AT_K * TILE_P : TILE_Q, kOdd = 16 / kSize;
  static constexpr int kLine = (ceil_div(kRun * kSome, kOdd) | 1) * kOdd;  // an odd multiple of 16 bytes
  static constexpr bool kAtOnce = Sums::GROUPS == kGroups;                 // results lie where operands were
  const u32 results;
  DEVICE MonarchWeight(const Params& given) : Base(given), results(memory + (kAtOnce ? 0 : Left::kBytes + Right::kBytes)) {}

  // What the dense weight is multiplied by
  DEVICE Real scale() const {
    if constexpr (Pass::LARGEST >= 0) {
      static_assert(Pass::BLOCKS <= kThreads);
      const int thread = threadIdx.x;
      const float* largest = static_cast<const float*>(params.sums) + Pass::LARGEST;
      float most[2] = {};
      if (thread < Pass::BLOCKS) most[0] = largest[thread * 2], most[1] = largest[thread * 2 + 1];
      most_of<32>(most);
      if (thread % 32 == 0) store_shared(memory + thread / 32 * 8, Pair<float>(most[0], most[1]));
      __syncthreads();
      for (int warp = 0; warp < kWarps; ++warp)
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
  // Two neighbours of p
  DEVICE void put(int group, int q, int p, Real x, Real y) const {
    const int k = group / AT_L, l = group % AT_L;
    if (q >= TILE_Q || p >= TILE_P) return;
    if constexpr (TURNED) {
      const u32 to = results + ((k * TILE_P + p) * kLine + q * AT_L + l) * kSize;
      store_shared(to, narrow<Element>(x));
      if (TILE_P % 2 == 0 || p + 1 < TILE_P) store_shared(to + kLine * kSize, narrow<Element>(y));
    } else {
      const u32 to = results + (q * kLine + k * TILE_P + p) * kSize;
      if constexpr (TILE_P % 2 == 0)
        store_shared(to, Pair<Element>(x, y));
      else {
        store_shared(to, narrow<Element>(x));
        if (p + 1 < TILE_P) store_shared(to + kSize, narrow<Element>(y));
      }
    }
  }
  DEVICE void store(int k, int l, int q, int p) const {
    constexpr int kPiece = Pass::STORE / kSize;
    Element* y = static_cast<Element*>(params.y);
    const int column = k * P + p, lines = AT_K > 1 ? kIn - column : P - p;
    const int count = !TURNED ? lines : kParts ? L - l : (Q - q) * L;
    move_lines<Pass::STORE, kLines * kSome, kRun / kPiece>(
        [&](int line, int piece) {
          const bool here = line < kLines * kSome && piece < kRun / kPiece;
          return load_words<Pass::STORE>(results + (here ? line / kSome * kLine + line % kSome * kRun + piece * kPiece : 0) * kSize);
        },
        [&](int line, int piece, const Words<Pass::STORE>& x) {
          const int first = line / kSome, of_q = q + (TURNED ? line % kSome : first);
          const i64 from = TURNED ? i64(column + first) * kOut + of_q * L + l : (i64(of_q) * L + l) * kIn + column;
          if (of_q < Q && (!TURNED || first < lines) && piece * kPiece < count) store_words<Pass::STORE>(y + from + piece * kPiece, x);
        });
  }
  DEVICE void tile(int k, int l, int q, int p, Real scale) const {
    const u32 right = memory + Left::kBytes;
    ROLL for (int group = 0; group < kGroups; group += Sums::GROUPS) {
      TileSums<Math, Element, Sums> sums;
      const auto of_k = [&](int i) { return k + (group + i) / AT_L; };
      const auto of_l = [&](int i) { return l + (group + i) % AT_L; };
      ROLL for (int r = 0; r < R; r += DEPTH) {
        Left::template load<Pass::PIECE_1>(memory, [&](int i, int row) { return Base::second(of_l(i), q + row, of_k(i), r); });
        Right::template load<Pass::PIECE_0>(right, [&](int i, int row) { return Base::first(of_k(i), r + row, of_l(i), p); });
        __syncthreads();
        sums.template multiply<kSteps>([&](int i, int m) { return Left::by_rows(memory, i, m, lane); },
                                       [&](int i, int n) { return Right::in_order(right, i, n, lane); });
        __syncthreads();
      }
      sums.each_two([&](int i, int row, int column, Real x, Real y) {
        if (kGroups % Sums::GROUPS == 0 || group + i < kGroups) put(group + i, row, column, x * scale, y * scale);
      });
    }
    __syncthreads();
    store(k, l, q, p);
    __syncthreads();
  }
  DEVICE void run() const {
    const Real scale = this->scale();
    constexpr int kColumns = kTilesK * kTilesP, kRows = ceil_div(Q, TILE_Q);
    ROLL for (int at = blockIdx.y; at < kTiles; at += gridDim.y) {
      // What lies side by side, by blocks that run side by side
      const int l = TURNED ? at % kTilesL : at / kColumns % kTilesL, column = TURNED ? at / (kTilesL * kRows) : at % kColumns;
      const int q = TURNED ? at / kTilesL % kRows : at / (kColumns * kTilesL);
      tile(column / kTilesP * AT_K, l * AT_L, q * TILE_Q, column % kTilesP * TILE_P, scale);
    }
  }
};

// Of dW, [out][in], as sums. A block has the gradients that one of both weights has of some of its numbers and AT_K groups k, and goes
// through q's, or p's. Blocks that read the same of dW follow each other.
template <class Pass> struct MonarchGradients : OfBoth<Pass> {
  using Base = OfBoth<Pass>;
  using typename Base::Element, typename Base::Math;
  using Base::K, Base::P, Base::L, Base::Q, Base::R, Base::AT_K, Base::DEPTH, Base::kIn, Base::kOut, Base::kSteps, Base::kDepth;
  using Base::params, Base::memory, Base::lane;
  using Real = Sum<Element>;
  using First = typename Pass::First;
  using Second = typename Pass::Second;
  using Tensors = Operands<Math, Real, kThreads>;
  static constexpr int kTilesR = ceil_div(R, First::M), kOfFirst = kTilesR * ceil_div(P, First::N);
  static constexpr int kTilesQ = ceil_div(Q, Second::M), kOfBoth = kOfFirst + kTilesQ * ceil_div(R, Second::N);
  static constexpr int kTilesK = ceil_div(K, AT_K);
  static_assert(First::GROUPS == AT_K && Second::GROUPS == AT_K && kDepth == DEPTH);
  DEVICE MonarchGradients(const Params& given) : Base(given) {}
  DEVICE Run<Real> gradient(int q, int l, int k, int p) const {
    const bool here = q < Q && k < K;
    return {static_cast<const Real*>(params.x) + (here ? (i64(q) * L + l) * kIn + k * P + p : 0), here ? P - p : 0};
  }
  template <bool PAIRED> DEVICE void store(i64 at, Real x, Real y, bool second) const {
    store_two<PAIRED>(static_cast<Element*>(params.y) + at, x, y, second);
  }

  DEVICE void of_first(int k, int l, int r, int p) const {
    using Left = Matrices<Math, Real, AT_K, DEPTH, First::kM, Tensors::stride(First::kM)>;
    using Right = Matrices<Math, Real, AT_K, DEPTH, First::kN, Tensors::stride(First::kN)>;
    const u32 right = memory + Left::kBytes;
    TileSums<Math, Real, First> sums;
    ROLL for (int q = 0; q < Q; q += DEPTH) {
      Right::template load<Pass::PIECE>(right, [&](int i, int row) { return gradient(q + row, l, k + i, p); });
      Left::template load<Pass::PIECE_1>(memory, [&](int i, int row) { return Base::second(l, q + row, k + i, r); });
      __syncthreads();
      sums.template multiply<kSteps>([&](int i, int m) { return Left::by_m(memory, i, m, lane); },
                                     [&](int i, int n) { return Right::by_n(right, i, n, lane); });
      __syncthreads();
    }
    sums.each_two([&](int i, int row, int column, Real x, Real y) {
      const int of_r = r + row, of_p = p + column;
      if (row < First::M && column < First::N && k + i < K && of_r < R && of_p < P)
        store<P % 2 == 0 && Pass::OF_0 % 2 == 0>(Pass::OF_0 + ((i64(k + i) * R + of_r) * L + l) * P + of_p, x, y, of_p + 1 < P);
    });
  }
  DEVICE void of_second(int k, int l, int q, int r) const {
    using Left = Matrices<Math, Real, AT_K, Second::kM, DEPTH, Tensors::stride(DEPTH)>;
    using Right = Matrices<Math, Real, AT_K, Second::kN, DEPTH, Tensors::stride(DEPTH)>;
    const u32 right = memory + Left::kBytes;
    TileSums<Math, Real, Second> sums;
    ROLL for (int p = 0; p < P; p += DEPTH) {
      Left::template load<Pass::PIECE>(memory, [&](int i, int row) { return gradient(q + row, l, k + i, p); });
      Right::template load<Pass::PIECE_0>(right, [&](int i, int row) { return Base::first(k + i, r + row, l, p); });
      __syncthreads();
      sums.template multiply<kSteps>([&](int i, int m) { return Left::by_rows(memory, i, m, lane); },
                                     [&](int i, int n) { return Right::by_k(right, i, n, lane); });
      __syncthreads();
    }
    sums.each_two([&](int i, int row, int column, Real x, Real y) {
      const int of_q = q + row, of_r = r + column;
      if (row < Second::M && column < Second::N && k + i < K && of_q < Q && of_r < R)
        store<R % 2 == 0 && Pass::OF_1 % 2 == 0>(Pass::OF_1 + ((i64(l) * Q + of_q) * K + k + i) * R + of_r, x, y, of_r + 1 < R);
    });
  }
  DEVICE void run() const {
    ROLL for (int at = blockIdx.y; at < kOfBoth * kTilesK * L; at += gridDim.y) {
      const int tile = at % kOfBoth, k = at / kOfBoth % kTilesK * AT_K, l = at / (kOfBoth * kTilesK);
      if (tile < kOfFirst)
        of_first(k, l, tile % kTilesR * First::M, tile / kTilesR * First::N);
      else
        of_second(k, l, (tile - kOfFirst) % kTilesQ * Second::M, (tile - kOfFirst) / kTilesQ * Second::N);
    }
  }
};
