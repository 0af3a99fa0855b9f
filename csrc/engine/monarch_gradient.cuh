// The gradients of both weights of a Monarch layer whose groups are small and many, in one pass: of x [K][P], weights
// [K][RHO][L][P] and [L][S][K * RHO], and grad_y turned, [L][S]. Neither the state nor its gradient is seen by memory.
//
// A unit is four of the RHO numbers of a k. A block has 4 * WK units and 4 * WL l's: their weights in shared memory, and
// their sums, for all samples that it takes, in registers, those of four units and four l's in a warp. Rows of its products
// are numbers of the state and columns samples, so that sums are, rounded, operand A of products over samples as they
// stand. The state is made by units, sixteen rows for four l's, and multiplied with grad_y by l's, sixteen rows for four
// units; its gradient goes the other way. Four rows of unit i and l lie at place i ^ l of sixteen in either tile: each
// lane has what it needs, and only takes registers of one tile or of its neighbour.
//
// GROUPS of warps share a block's samples, CHUNK at a time, and add up their sums in the end. factorlayer/monarch_backward.py
// writes the constants:
//
// Pass:  Math, Element, FIRST, SECOND and GRAD (the parameters that the weights and grad_y are), OF_0 and OF_1 (where their
//        gradients begin), K, P, L, S, RHO, WK, WL, GROUPS, CHUNK, STAGES
#pragma once
#include "mma.cuh"
#include "params.cuh"
#include "sums.cuh"

template <class Pass> struct MonarchGradient {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using A = typename Math::A;
  using B = typename Math::B;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kPiece = 16 / kSize;
  static constexpr bool kPairs = kSize == 4;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO;
  static constexpr int WK = Pass::WK, WL = Pass::WL, CHUNK = Pass::CHUNK, STAGES = Pass::STAGES;
  static constexpr int kMembers = 32 * WK * WL, kThreads = kMembers * Pass::GROUPS;
  static constexpr int kOfK = RHO / 4, kUnits = 4 * WK, kLs = 4 * WL, kSets = K * kOfK / kUnits;  // of units
  static constexpr int kColumns = kUnits / kOfK * P, kSteps = CHUNK / kStep, kAcross = kStep / 8;
  static_assert(RHO % 4 == 0 && kUnits % kOfK == 0 && L % kLs == 0 && K * kOfK % kUnits == 0);
  static_assert(P % kPiece == 0 && P % 8 == 0 && S % kStep == 0 && kSteps % Pass::GROUPS == 0);

  // Rows, an odd multiple of 16 bytes apart: of the first weights by units, fours of l's and places, of the second ones by
  // l's, fours of units and places; of samples, and of grad_y's for each l.
  static constexpr int stride(int n) { return (ceil_div(n, kPiece) | 1) * kPiece; }
  static constexpr int kFirstStride = stride(P), kSecondStride = stride(S), kXStride = stride(kColumns), kGStride = stride(S);
  static constexpr int kSecond = kUnits * WL * 16 * kFirstStride * kSize;
  static constexpr int kStages = kSecond + kLs * WK * 16 * kSecondStride * kSize;
  static constexpr int kG = CHUNK * kXStride * kSize, kStageBytes = kG + kLs * CHUNK * kGStride * kSize;

  using SumsFirst = float[4][P / 8][4];
  using SumsSecond = float[4][S / 8][4];

  const Params& params;
  const u32 memory;
  Lane lane;
  const int warp, along_k, along_l, group, first_unit, first_l;

  DEVICE MonarchGradient(const Params& given)
      : params(given), memory(shared_address(shared_memory)), warp(uniform(threadIdx.x / 32)), along_k(warp % WK),
        along_l(warp / WK % WL), group(warp / (WK * WL)), first_unit(blockIdx.y % kSets * kUnits),
        first_l(blockIdx.y / kSets * kLs) {}

  DEVICE const Element* weight(int which) const { return static_cast<const Element*>(params.weights[which]); }

  static constexpr int kFirstPieces = P / kPiece, kFirstItems = kUnits * WL * 16 * kFirstPieces;
  static DEVICE u32 place_of_first(int row, int piece) { return (row * kFirstStride + piece * kPiece) * kSize; }
  DEVICE void copy_first() const {
#pragma unroll 4
    for (int j = threadIdx.x; j < kFirstItems; j += kThreads) {
      const int row = j / kFirstPieces, piece = j % kFirstPieces, unit = row / (16 * WL);
      const int number = (first_unit + unit) * 4 + row % 4, l = first_l + row / 16 % WL * 4 + (row / 4 % 4 ^ unit % 4);
      const Element* from = weight(Pass::FIRST) + (i64(number) * L + l) * P + piece * kPiece;
      copy_async<16>(memory + place_of_first(row, piece), from, true);
    }
  }
  DEVICE void round_first() const {
    if constexpr (Math::kRounds) {
#pragma unroll 1
      for (int j = threadIdx.x; j < kFirstItems; j += kThreads) {
        const u32 here = memory + place_of_first(j / kFirstPieces, j % kFirstPieces);
        u32 x[4];
        load_u32x4(here, x);
        store_u32x4(here, {tf32_of(x[0]), tf32_of(x[1]), tf32_of(x[2]), tf32_of(x[3])});
      }
    }
  }
  // The second weights turned: a block's columns side by side to rows
  DEVICE void load_second() const {
    constexpr int kAll = kLs * S * kUnits * 4, kTogether = 16;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < kAll; begin += kTogether * kThreads) {
      Element x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int j = begin + i * kThreads, row = j / (kUnits * 4), column = j % (kUnits * 4);
        x[i] = Element{};
        if (j < kAll) x[i] = weight(Pass::SECOND)[(i64(first_l) * S + row) * (K * RHO) + first_unit * 4 + column];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int j = begin + i * kThreads, s = j / (kUnits * 4) % S, l = j / (kUnits * 4) / S;
        const int unit = j / 4 % kUnits, row = (l * WK + unit / 4) * 16 + (unit % 4 ^ l % 4) * 4 + j % 4;
        if (j < kAll) store_shared(memory + kSecond + (row * kSecondStride + s) * kSize, rounded(x[i]));
      }
    }
  }
  static DEVICE Element rounded(Element x) {
    if constexpr (kSize == 4) return Math::rounded(x);
    else return x;
  }

  DEVICE i64 chunks() const { return (params.batch + CHUNK - 1) / CHUNK; }
  DEVICE void copy_chunk(i64 chunk, u32 to) const {
    const i64 first = chunk * CHUNK;
    const int left = int(min(params.batch - first, i64(CHUNK)));
    const auto copy = [&](int items, const auto& one) {
#pragma unroll
      for (int begin = 0; begin < items; begin += kThreads) one(begin + int(threadIdx.x), begin + int(threadIdx.x) < items);
    };
    constexpr int kXPieces = kColumns / kPiece, kGPieces = S / kPiece;
    const Element* x = static_cast<const Element*>(params.x) + first * (K * P) + first_unit / kOfK * P;
    copy(CHUNK * kXPieces, [&](int j, bool wanted) {
      const int row = j / kXPieces, piece = j % kXPieces * kPiece;
      copy_async_if<16>(to + (row * kXStride + piece) * kSize, x + row * (K * P) + piece, row < left, wanted);
    });
    const Element* g = weight(Pass::GRAD) + first * (L * S) + first_l * S;
    copy(CHUNK * kLs * kGPieces, [&](int j, bool wanted) {
      const int row = j / (kLs * kGPieces), run = j % (kLs * kGPieces), l = run / kGPieces, piece = run % kGPieces * kPiece;
      copy_async_if<16>(to + kG + ((l * CHUNK + row) * kGStride + piece) * kSize, g + row * (L * S) + run * kPiece,
                        row < left, wanted);
    });
  }

  // Of tiles by units those by l's, or the other way.
  DEVICE void exchange(A (&tiles)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const u32 given[4] = {tiles[0].r[r], tiles[1].r[r], tiles[2].r[r], tiles[3].r[r]};
#pragma unroll
      for (int i = 0; i < 4; ++i) tiles[i].r[r] = lane.g < 4 ? given[i ^ r % 2 * 2] : given[i ^ r % 2 * 2 ^ 1];
    }
  }
  // Where there is no sample, an infinite weight would make a NaN.
  DEVICE void as_tile(A& tile, float (&sums)[kAcross][4], int left) const {
    if (left < kStep) {
#pragma unroll
      for (int n = 0; n < kAcross; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (n * 8 + lane.t * 2 + i % 2 >= left) sums[n][i] = 0;
    }
    Math::as_a(tile, sums);
  }
  template <int LENGTH> DEVICE void add_state(float (&sums)[kAcross][4], u32 weight, u32 x) const {
    A a;
    B b[kAcross];
    Math::template load_row_a<LENGTH, kFirstStride, false>(a, weight);
    Math::template load_row_b<LENGTH, kXStride, kAcross>(b, x);
#pragma unroll
    for (int n = 0; n < kAcross; ++n) Math::template multiply<LENGTH>(sums[n], a, b[n]);
  }
  // A step of samples; x and g are where the warp's columns and l's begin.
  DEVICE void add_step(SumsFirst& of_first, SumsSecond& of_second, u32 x, u32 g, int left) const {
    A tiles[4];
    const u32 first = memory + along_l * (16 * kFirstStride * kSize) + Math::template lane_row_a<kFirstStride>(lane);
    const u32 rows_x = x + Math::template lane_row_b<kXStride>(lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int kWhole = P / kStep * kStep;
      const u32 weight = first + (along_k * 4 + i) * (WL * 16 * kFirstStride * kSize), from = rows_x + i / kOfK * (P * kSize);
      float sums[kAcross][4] = {};
#pragma unroll
      for (int p = 0; p < kWhole; p += kStep) add_state<kStep>(sums, weight + p * kSize, from + p * kSize);
      if constexpr (kWhole < P) add_state<8>(sums, weight + kWhole * kSize, from + kWhole * kSize);
      as_tile(tiles[i], sums, left);
    }
    exchange(tiles);
    const u32 by_n = g + Math::template lane_b_by_n<kGStride, kPairs>(lane);
#pragma unroll
    for (int l = 0; l < 4; ++l) {
#pragma unroll
      for (int n = 0; n < S / 8; n += 2) {
        const u32 from = by_n + (l * CHUNK * kGStride + n * 8) * kSize, columns[2] = {from, from + 8 * kSize};
        B b[2];
        Math::template load_b_by_n<kStep, kGStride, 2, 8, false, kPairs>(b, columns, lane.index);
        Math::template multiply<kStep>(of_second[l][n], tiles[l], b[0]);
        Math::template multiply<kStep>(of_second[l][n + 1], tiles[l], b[1]);
      }
    }
    const u32 second = memory + kSecond + (along_l * 4 * WK + along_k) * (16 * kSecondStride * kSize) +
                       Math::template lane_row_a<kSecondStride>(lane);
    const u32 rows_g = g + Math::template lane_row_b<kGStride>(lane);
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      float sums[kAcross][4] = {};
#pragma unroll
      for (int s = 0; s < S; s += kStep) {
        A a;
        B b[kAcross];
        Math::template load_row_a<kStep, kSecondStride, false>(a, second + (l * WK * 16 * kSecondStride + s) * kSize);
        Math::template load_row_b<kStep, kGStride, kAcross, false>(b, rows_g + (l * CHUNK * kGStride + s) * kSize);
#pragma unroll
        for (int n = 0; n < kAcross; ++n) Math::template multiply<kStep>(sums[n], a, b[n]);
      }
      as_tile(tiles[l], sums, left);
    }
    exchange(tiles);
    const u32 columns_x = x + Math::template lane_b_by_n<kXStride, kPairs>(lane);
    B b[P / 8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 columns[P / 8];
#pragma unroll
      for (int n = 0; n < P / 8; ++n) columns[n] = columns_x + (i / kOfK * P + n * 8) * kSize;
      if (i % kOfK == 0) Math::template load_b_by_n<kStep, kXStride, P / 8, 8, true, kPairs>(b, columns, lane.index);
#pragma unroll
      for (int n = 0; n < P / 8; ++n) Math::template multiply<kStep>(of_first[i][n], tiles[i], b[n]);
    }
  }

  DEVICE void run() {
    copy_first();
    commit_copies();
    const u32 stages = memory + kStages;
    i64 ahead = blockIdx.x;
    const auto copy_next = [&](int stage) {
      if (ahead < chunks()) copy_chunk(ahead, stages + stage * kStageBytes);
      commit_copies();
      ahead += gridDim.x;
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copy_next(stage);
    load_second();
    wait_for_copies<STAGES - 1>();
    round_first();
    SumsFirst of_first = {};
    SumsSecond of_second = {};
    int stage = 0;
#pragma unroll 1
    for (i64 chunk = blockIdx.x; chunk < chunks(); chunk += gridDim.x) {
      wait_for_copies<STAGES - 2>();
      __syncthreads();
      copy_next(stage ? stage - 1 : STAGES - 1);
      const u32 here = stages + stage * kStageBytes;
      if (++stage == STAGES) stage = 0;
      const int left = int(min(params.batch - chunk * CHUNK, i64(CHUNK)));
#pragma unroll 1
      for (int step = group; step < kSteps; step += Pass::GROUPS) {
        const u32 x = here + (step * kStep * kXStride + along_k * 4 / kOfK * P) * kSize;
        const u32 g = here + kG + (along_l * 4 * CHUNK + step * kStep) * (kGStride * kSize);
        add_step(of_first, of_second, x, g, left - step * kStep);
      }
    }
    wait_for_copies<0>();
    store(of_first, of_second);
  }
  DEVICE void store(const SumsFirst& of_first, const SumsSecond& of_second) const {
    constexpr int kAll = K * RHO * L * (P + S), kShared = kStages + STAGES * kStageBytes;
    float* to = static_cast<float*>(params.sums) + i64(blockIdx.x) * kAll;
    // Row g or g + 8 of a tile: four of another, and which of these.
    const auto other = [](const Lane& at, int i, int half) { return i ^ half * 2 ^ at.g / 4; };
    add_up<4 * (P / 8), kThreads, kMembers, kShared, float>(
        memory, [&](int n) -> const float(&)[4] { return of_first[n / (P / 8)][n % (P / 8)]; },
        [&](int n, int member, const float(&sum)[4]) {
          const Lane at(member % 32);
          const int i = n / (P / 8), p = n % (P / 8) * 8 + at.t * 2, u = first_unit + member / 32 % WK * 4 + i;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int l = first_l + member / 32 / WK * 4 + other(at, i, half);
            float* here = to + Pass::OF_0 + (i64(u * 4 + at.g % 4) * L + l) * P + p;
            store_two<true, float>(here, sum[half * 2], sum[half * 2 + 1], true);
          }
        });
    add_up<4 * (S / 8), kThreads, kMembers, kShared, float>(
        memory, [&](int n) -> const float(&)[4] { return of_second[n / (S / 8)][n % (S / 8)]; },
        [&](int n, int member, const float(&sum)[4]) {
          const Lane at(member % 32);
          const int i = n / (S / 8), s = n % (S / 8) * 8 + at.t * 2, l = first_l + member / 32 / WK * 4 + i;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int unit = first_unit + member / 32 % WK * 4 + other(at, i, half);
            float* here = to + Pass::OF_1 + (i64(l) * S + s) * (K * RHO) + unit * 4 + at.g % 4;
            store_global(here, sum[half * 2]), store_global(here + K * RHO, sum[half * 2 + 1]);
          }
        });
  }
};
