// The gradient of x of a Monarch layer whose groups are small and many, back through both contractions in one pass: grad_y
// turned, [L][S], by weights [L][S][K * RHO] to the gradient of the state, which stays in registers, and that by weights
// [K][RHO][L][P] to [K][P].
//
// A unit is four of the RHO numbers of a k. A block has 4 * WK units and takes tiles of samples, of which grad_y comes by
// chunks of CL l's through a ring of STAGES, with both weights of these. A warp has 16 * MT samples and four units. Eight
// columns of its first product are two units for one l, of odd l's in the other order (of 16 bits, once lanes have exchanged
// them): of two l's, lanes with t < 2 have one unit of either, the others the other one, which is operand A of the second
// product as it stands, but for which register is whose. The rows of a unit's second weights lie in that order. Eight more
// warps copy. factorlayer/monarch_backward.py writes the constants:
//
// Pass:  Math, Element, FIRST, SECOND and GRAD (the parameters that the weights and grad_y are), K, P, L, S, RHO, WK, WM
//        (warps along the samples), MT, CL, STAGES
#pragma once
#include "mma.cuh"
#include "params.cuh"
#include "sums.cuh"

template <class Pass> struct MonarchBack {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using A = typename Math::A;
  using B = typename Math::B;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kPiece = 16 / kSize;
  static constexpr bool kPairs = kSize == 4;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO;
  static constexpr int WK = Pass::WK, WM = Pass::WM, MT = Pass::MT, CL = Pass::CL, STAGES = Pass::STAGES;
  static constexpr int kConsumers = 32 * WK * WM, kLoaders = 256, kSamples = 16 * MT * WM, kChunks = L / CL;
  static constexpr int kCopyRegisters = 40, kRegisters = 216;
  static constexpr int kOfK = RHO / 4, kUnits = 4 * WK, kOfStep = kStep / 4, kSteps = CL / kOfStep;  // l's of a step
  static_assert(RHO % 4 == 0 && 4 % kOfK == 0 && K * kOfK % kUnits == 0 && L % CL == 0 && CL % kOfStep == 0);
  static_assert(P % kPiece == 0 && P % 8 == 0 && S % kStep == 0);

  // Rows, an odd multiple of 16 bytes apart: of grad_y by l's and samples, of the second weights by l's and s's, and of the
  // first ones by units and l's. In 32 bits, words of the second weights are read by columns.
  static constexpr int stride(int n) { return (ceil_div(n, kPiece) | 1) * kPiece; }
  static constexpr int kGStride = stride(S), kSecondStride = kUnits * 4 + 8, kFirstStride = stride(P);
  static constexpr int kSecond = CL * kSamples * kGStride * kSize, kFirst = kSecond + CL * S * kSecondStride * kSize;
  static constexpr int kStageBytes = kFirst + kUnits * CL * 4 * kFirstStride * kSize;

  using Sums = float[MT][4 / kOfK][P / 8][4];

  const Params& params;
  const u32 memory;
  Lane lane;
  const int warp, along_k, along_m, first_unit;

  DEVICE MonarchBack(const Params& given)
      : params(given), memory(shared_address(shared_memory)), warp(uniform(threadIdx.x / 32)), along_k(warp % WK),
        along_m(warp / WK), first_unit(blockIdx.y * kUnits) {}

  DEVICE const Element* weight(int which) const { return static_cast<const Element*>(params.weights[which]); }
  DEVICE i64 tiles() const { return (params.batch + kSamples - 1) / kSamples; }

  DEVICE u32 full(int stage) const { return memory + STAGES * kStageBytes + stage * 8; }
  DEVICE u32 empty(int stage) const { return memory + STAGES * kStageBytes + (STAGES + stage) * 8; }
  // Of ROWS, RUN pieces each, this loader's
  template <int ROWS, int RUN, class One> static DEVICE void each(const One& one) {
    const int thread = threadIdx.x - kConsumers;
    if constexpr (kLoaders % RUN == 0) {
#pragma unroll 8
      for (int row = thread / RUN; row < ROWS; row += kLoaders / RUN) one(row, thread % RUN);
    } else {
#pragma unroll 4
      for (int j = thread; j < ROWS * RUN; j += kLoaders) one(j / RUN, j % RUN);
    }
  }
  DEVICE void copy_chunk(i64 tile, int chunk, u32 to) const {
    const int first_l = chunk * CL, left = int(min(params.batch - tile * kSamples, i64(kSamples)));
    const Element* g = weight(Pass::GRAD) + tile * (i64(kSamples) * L * S) + first_l * S;
    constexpr int kGPieces = S / kPiece, kPPieces = P / kPiece, kCell = kSize == 2 ? 8 : 4, kCells = kUnits * 4 / kCell;
    each<kSamples, CL * kGPieces>([&](int row, int run) {
      const u32 at = to + (row * kGStride + (run / kGPieces * kSamples * kGStride + run % kGPieces * kPiece)) * kSize;
      copy_async<16>(at, g + row * (L * S) + run * kPiece, row < left);
    });
    // Of 32 bits a unit is 16 bytes.
    const Element* second = weight(Pass::SECOND) + i64(first_l) * (S * K * RHO) + first_unit * 4;
    each<CL * S, kCells>([&](int row, int run) {
      const int place = kSize == 2 ? run : run ^ row / S % 2;
      const u32 at = to + kSecond + (row * kSecondStride + place * kCell) * kSize;
      copy_async<16>(at, second + row * (K * RHO) + run * kCell, true);
    });
    const Element* first = weight(Pass::FIRST) + (i64(first_unit) * 4 * L + first_l) * P;
    each<kUnits * 4, CL * kPPieces>([&](int number, int run) {
      const int l = run / kPPieces, row = (number / 4 * CL + (l ^ number / 4 % 2)) * 4 + number % 4;
      const u32 at = to + kFirst + (row * kFirstStride + run % kPPieces * kPiece) * kSize;
      copy_async<16>(at, first + number * (L * P) + run * kPiece, true);
    });
  }
  // By the loaders
  DEVICE void produce() const {
    int stage = 0;
    u32 phase = 1;
#pragma unroll 1
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x)
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        wait_for_bytes(empty(stage), phase);
        copy_chunk(tile, chunk, memory + stage * kStageBytes);
        arrive_with_copies(full(stage));
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    wait_for_copies<0>();
  }

  // Two columns of both l's, of two units: to operands A, of which this is the pair-th part.
  DEVICE void as_a(A& even, A& odd, const float (&e)[4], const float (&o)[4], int pair) const {
    const bool first = lane.t < 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kSize == 2) {
        const u32 x = Pair<Element>(e[half * 2], e[half * 2 + 1]).bits;
        const u32 y = __shfl_xor_sync(0xffffffff, Pair<Element>(o[half * 2], o[half * 2 + 1]).bits, 2);
        even.r[half + pair * 2] = first ? x : y;
        odd.r[half + pair * 2] = first ? y : x;
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 x = tf32_of(__float_as_uint(e[half * 2 + i])), y = tf32_of(__float_as_uint(o[half * 2 + i]));
          even.r[half + i * 2] = first ? x : y;
          odd.r[half + i * 2] = first ? y : x;
        }
      }
    }
  }
  DEVICE void add_chunk(Sums& sums, u32 stage) const {
    const u32 g = stage + along_m * (16 * MT * kGStride * kSize) + Math::template lane_row_a<kGStride>(lane);
    const u32 second = stage + kSecond + along_k * (16 * kSize) + Math::template lane_b_by_n<kSecondStride>(lane);
    const u32 first = stage + kFirst + along_k * (16 * CL * kFirstStride * kSize) +
                      Math::template lane_b_by_n<kFirstStride, kPairs>(lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      A left[4][MT];
#pragma unroll
      for (int pair = 0; pair < kOfStep / 2; ++pair) {
        float z[2][2][MT][4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int l = step * kOfStep + pair * 2 + i;
#pragma unroll
          for (int s = 0; s < S; s += kStep) {
            const u32 from = second + (l * S + s) * (kSecondStride * kSize), columns[2] = {from, from + 8 * kSize};
            B b[2];
            Math::template load_b_by_n<kStep, kSecondStride, 2, 8>(b, columns, lane.index);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
              A a;
              Math::template load_row_a<kStep, kGStride, false>(a, g + ((l * kSamples + m * 16) * kGStride + s) * kSize);
#pragma unroll
              for (int v = 0; v < 2; ++v) Math::template multiply<kStep>(z[i][v][m], a, b[v]);
            }
          }
        }
#pragma unroll
        for (int v = 0; v < 2; ++v)
#pragma unroll
          for (int m = 0; m < MT; ++m) as_a(left[v * 2][m], left[v * 2 + 1][m], z[0][v][m], z[1][v][m], pair);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 columns[P / 8];
#pragma unroll
        for (int n = 0; n < P / 8; ++n) columns[n] = first + ((i * CL + step * kOfStep) * 4 * kFirstStride + n * 8) * kSize;
        B b[P / 8];
        Math::template load_b_by_n<kStep, kFirstStride, P / 8, 8, true, kPairs>(b, columns, lane.index);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int n = 0; n < P / 8; ++n) Math::template multiply<kStep>(sums[m][i / kOfK][n], left[i][m], b[n]);
      }
    }
  }
  DEVICE void store(const Sums& sums, i64 tile) const {
    Element* y = static_cast<Element*>(params.y) + (first_unit + along_k * 4) / kOfK * P;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 sample = tile * kSamples + (along_m * MT + m) * 16 + half * 8 + lane.g;
        if (sample >= params.batch) continue;
#pragma unroll
        for (int k = 0; k < 4 / kOfK; ++k)
#pragma unroll
          for (int n = 0; n < P / 8; ++n)
            store_two<true, Element>(y + sample * (K * P) + k * P + n * 8 + lane.t * 2, sums[m][k][n][half * 2],
                                     sums[m][k][n][half * 2 + 1], true);
      }
  }

  DEVICE void run() const {
    if (threadIdx.x < STAGES) {
      init_barrier(full(threadIdx.x), kLoaders);
      init_barrier(empty(threadIdx.x), kConsumers / 32);
    }
    __syncthreads();
    if (warp >= kConsumers / 32) {
      give_registers<kCopyRegisters>();
      produce();
    } else {
      take_registers<kRegisters>();
      consume();
    }
  }
  DEVICE void consume() const {
    int stage = 0;
    u32 phase = 0;
#pragma unroll 1
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      Sums sums = {};
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        wait_for_bytes(full(stage), phase);
        add_chunk(sums, memory + stage * kStageBytes);
        __syncwarp();
        if (lane.index == 0) arrive(empty(stage));
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
      store(sums, tile);
    }
  }
};
