// Both contractions of a Monarch layer in one pass, whose state stays in registers: x [K][P] by weights [K][RHO][L][P] to
// [K][RHO][L], and that, for each group l of L, by weights [L][S][K * RHO] to y [S][L].
//
// A block has the second weights of GROUPS l's in shared memory and takes tiles of samples, of which x comes by chunks of CK
// k's through a ring of STAGES, with the first weights of these k's. A warp has 16 * MT samples and two l's. Eight columns of
// its first product, a unit, are four of the RHO of a k, for both l's: column 2 t + i is number t for the i-th l. So lane
// (g, t) holds number t, of both, and the sums of four units (two in 32 bits) are, rounded, operand A of one step of each l's
// second product, with the k's of its weights in that order: unit by unit number t, for t = 0, 1, 2, 3.
//
// Results of one l lie far apart in y, those of neighbours side by side: they meet in shared memory, some columns of all S
// at once. With CLUSTER, a second block has the next GROUPS, so that what is stored are whole sectors of L2: of each 16 rows
// the first one stores the upper eight, and the other one the rest. factorlayer/monarch.py writes the constants:
//
// Pass:  Math, Element, Activation, BIAS, FIRST and SECOND (the parameters that weights are), K, P, L, S, RHO, GROUPS, MT,
//        WARPS_M (warps along the samples), CK, STAGES, ROUNDS (in which results are stored), STORE (bytes of one access),
//        CLUSTER
#pragma once
#include "mma.cuh"
#include "params.cuh"
#include "pointwise.cuh"

template <class Pass> struct Monarch {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using A = typename Math::A;
  using B = typename Math::B;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kPiece = 16 / kSize;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO, GROUPS = Pass::GROUPS;
  static constexpr int MT = Pass::MT, CK = Pass::CK, STAGES = Pass::STAGES;
  static constexpr int kWarpsL = GROUPS / 2, kMembers = 32 * kWarpsL, kThreads = kMembers * Pass::WARPS_M;
  static constexpr int kSamples = 16 * MT * Pass::WARPS_M;
  static constexpr int kPadded = round_up(P, 8), kWhole = kPadded / kStep * kStep;
  static constexpr int kTiles = ceil_div(RHO, 4), kUnits = CK * kTiles;  // of a k, and of a chunk
  static constexpr int kPairs = kStep / 8;                               // of units, in a step
  static constexpr int kChunks = ceil_div(K, CK), kSteps = kUnits / (2 * kPairs), kDepth = kChunks * kSteps * kStep;
  static constexpr int NT = ceil_div(S, 8), kTogether = NT % 2 ? 1 : 2;
  static_assert(kUnits % (2 * kPairs) == 0 && GROUPS % 2 == 0 && L % 2 == 0);

  // Rows, an odd multiple of 16 bytes apart
  static constexpr int stride(int n) { return (ceil_div(n, kPiece) | 1) * kPiece; }
  static constexpr int kXStride = stride(CK * kPadded), kFirstStride = stride(kPadded);
  static constexpr int kSecondStride = stride(kDepth), kFirstRows = kWarpsL * kUnits * 8;
  static constexpr int kFirst = kSamples * kXStride * kSize, kStageBytes = kFirst + kFirstRows * kFirstStride * kSize;
  static constexpr int kStages = GROUPS * NT * 8 * kSecondStride * kSize;  // behind the second weights

  // Results: of a row and column the GROUPS of one block or two, by units of two.
  static constexpr int kBlocks = Pass::CLUSTER ? 2 : 1, kNow = ceil_div(NT, Pass::ROUNDS), kColumns = kNow * 8;
  static constexpr int kUnitBytes = 2 * kSize, kCellUnits = kWarpsL * kBlocks, kCell = kCellUnits * kUnitBytes;
  static constexpr int kMask = (kCellUnits & -kCellUnits) - 1;
  static constexpr int kRows = 16 * MT / kBlocks;  // of the warps that share samples, in one block
  static constexpr int kResult = kStages + STAGES * kStageBytes, kResultBytes = kRows * kColumns * kCell;
  static constexpr int kFull = kResult + Pass::WARPS_M * kResultBytes, kFree = kFull + 8 * Pass::WARPS_M;

  using Sums = float[MT][2][NT][4];

  const Params& params;
  const u32 memory;
  const Lane lane;
  const int warp, along_l, along_m, rank, first_l;

  DEVICE Monarch(const Params& p)
      : params(p), memory(shared_address(shared_memory)), warp(uniform(threadIdx.x / 32)), along_l(warp % kWarpsL),
        along_m(warp / kWarpsL), rank(blockIdx.y % kBlocks), first_l(blockIdx.y * GROUPS) {}

  DEVICE i64 tiles() const { return (params.batch + kSamples - 1) / kSamples; }

  // The second weights: eight neighbours of a row, four numbers of two units, change their order where a thread has copied
  // them, or, of 32 bits, are rounded there.
  static constexpr int kRow = K * RHO;
  static constexpr bool kInPlace = RHO % 4 == 0 && kRow % kPiece == 0;
  static constexpr int kRowPieces = kDepth / kPiece, kPieces = GROUPS * NT * 8 * kRowPieces;
  DEVICE const Element* second(int row) const {
    return static_cast<const Element*>(params.weights[Pass::SECOND]) + (i64(first_l + row / (NT * 8)) * S + row % (NT * 8)) * kRow;
  }
  DEVICE bool has_second(int row) const { return first_l + row / (NT * 8) < L && row % (NT * 8) < S; }
  static constexpr DEVICE int place_of(int unit, int number) {
    return kSize == 2 ? unit / 2 * 8 + number * 2 + unit % 2 : unit * 4 + number;
  }
  DEVICE void copy_second() const {
    if constexpr (kInPlace) {
#pragma unroll 4
      for (int j = threadIdx.x; j < kPieces; j += kThreads) {
        const int row = j / kRowPieces, piece = j % kRowPieces;
        copy_async<16>(memory + row * kSecondStride * kSize + piece * 16, second(row) + piece * kPiece,
                       piece * kPiece < kRow && has_second(row));
      }
    } else {
#pragma unroll 4
      for (int j = threadIdx.x; j < GROUPS * NT * 8 * kDepth; j += kThreads) {
        const int row = j / kDepth, unit = j % kDepth / 4, number = j % 4, r = unit % kTiles * 4 + number;
        const bool here = unit / kTiles < K && r < RHO && has_second(row);
        const Element x = here ? second(row)[unit / kTiles * RHO + r] : narrow<Element>(0.f);
        store_shared(memory + (row * kSecondStride + place_of(unit, number)) * kSize, rounded(x));
      }
    }
  }
  DEVICE void order_second() const {
    if constexpr (kInPlace) {
#pragma unroll 4
      for (int j = threadIdx.x; j < kPieces; j += kThreads) {
        const u32 here = memory + j / kRowPieces * kSecondStride * kSize + j % kRowPieces * 16;
        u32 x[4];
        load_u32x4(here, x);
        if constexpr (kSize == 2)
          store_u32x4(here, {x[0] & 0xffff | x[2] << 16, x[0] >> 16 | x[2] & 0xffff0000, x[1] & 0xffff | x[3] << 16,
                             x[1] >> 16 | x[3] & 0xffff0000});
        else
          store_u32x4(here, {tf32_of(x[0]), tf32_of(x[1]), tf32_of(x[2]), tf32_of(x[3])});
      }
    }
  }
  static DEVICE Element rounded(Element x) {
    if constexpr (kSize == 4) return Math::rounded(x);
    else return x;
  }

  // A chunk of x and of the first weights, whose rows lie in the order of a unit's columns.
  static constexpr int kBytes = P * kSize % 16 == 0 ? 16 : P * kSize % 8 == 0 ? 8 : 4, kEach = kBytes / kSize, kRun = P / kEach;
  DEVICE void copy_chunk(i64 tile, int chunk, u32 to) const {
    const Element* x = static_cast<const Element*>(params.x) + (tile * kSamples * K + chunk * CK) * P;
    const int rows = int(min(params.batch - tile * kSamples, i64(kSamples)));
    constexpr int kXPieces = CK * kRun;
#pragma unroll
    for (int i = 0; i < ceil_div(kSamples * kXPieces, kThreads); ++i) {
      const int j = i * kThreads + threadIdx.x, row = j / kXPieces, k = j % kXPieces / kRun, p = j % kRun * kEach;
      if (kSamples * kXPieces % kThreads == 0 || row < kSamples)
        copy_async<kBytes>(to + (row * kXStride + k * kPadded + p) * kSize, x + i64(row) * (K * P) + k * P + p,
                           row < rows && (K % CK == 0 || chunk * CK + k < K));
    }
    const Element* weight = static_cast<const Element*>(params.weights[Pass::FIRST]) + (i64(chunk) * CK * RHO * L + first_l) * P;
#pragma unroll
    for (int i = 0; i < ceil_div(kFirstRows * kRun, kThreads); ++i) {
      const int j = i * kThreads + threadIdx.x, row = j / kRun, p = j % kRun * kEach;
      const int l = row / (kUnits * 8) * 2 + row % 2, unit = row / 8 % kUnits, k = unit / kTiles;
      const int r = unit % kTiles * 4 + row % 8 / 2;
      const bool here = (RHO % 4 == 0 || r < RHO) && (K % CK == 0 || chunk * CK + k < K) && first_l + l < L;
      if (kFirstRows * kRun % kThreads == 0 || row < kFirstRows)
        copy_async<kBytes>(to + kFirst + (row * kFirstStride + p) * kSize, weight + ((k * RHO + r) * L + l) * P + p, here);
    }
  }
  // Columns that no copy writes
  DEVICE void clear_padding() const {
    if constexpr (kPadded > P) {
      constexpr int kRest = kPadded - P;
      for (int j = threadIdx.x; j < STAGES * kSamples * CK * kRest; j += kThreads) {
        const int row = j / (CK * kRest), k = j / kRest % CK;
        store_shared(memory + kStages + row / kSamples * kStageBytes +
                         (row % kSamples * kXStride + k * kPadded + P + j % kRest) * kSize, narrow<Element>(0.f));
      }
      for (int j = threadIdx.x; j < STAGES * kFirstRows * kRest; j += kThreads) {
        const int row = j / kRest;
        store_shared(memory + kStages + row / kFirstRows * kStageBytes + kFirst +
                         (row % kFirstRows * kFirstStride + P + j % kRest) * kSize, narrow<Element>(0.f));
      }
    }
  }

  // Two units: sums of 16 * MT rows by four numbers of both l's.
  DEVICE void make_units(float (&unit)[2][MT][4], u32 x, u32 weight, int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) unit[i][m][j] = 0;
#pragma unroll
    for (int p = 0; p < kWhole; p += kStep) add_products<kStep>(unit, x + p * kSize, weight + p * kSize, first);
    if constexpr (kWhole < kPadded) add_products<8>(unit, x + kWhole * kSize, weight + kWhole * kSize, first);
    if constexpr (RHO % 4 > 0) {  // what no k has: an infinite x would make it NaN
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if ((first + i) % kTiles == kTiles - 1 && lane.t >= RHO % 4) {
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < 4; ++j) unit[i][m][j] = 0;
        }
    }
  }
  template <int LENGTH> DEVICE void add_products(float (&unit)[2][MT][4], u32 x, u32 weight, int first) const {
    B b[2];
    Math::template load_row_b<LENGTH, kFirstStride>(b, weight + first * 8 * kFirstStride * kSize);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      A a;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = (first + i) / kTiles;
        if (i == 0 || k != first / kTiles)
          Math::template load_row_a<LENGTH, kXStride>(a, x + (m * 16 * kXStride + k * kPadded) * kSize);
        Math::template multiply<LENGTH>(unit[i][m], a, b[i]);
      }
    }
  }
  // Numbers of two units, of rows g and g + 8, to operand A of l.
  static DEVICE void as_a(A& a, const float (&first)[4], const float (&second)[4], int pair, int l) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kSize == 2) {
        a.r[pair * 2 + half] = Pair<Element>(first[half * 2 + l], second[half * 2 + l]).bits;
      } else {
        a.r[half] = tf32_of(__float_as_uint(first[half * 2 + l]));
        a.r[2 + half] = tf32_of(__float_as_uint(second[half * 2 + l]));
      }
    }
  }
  DEVICE void add_chunk(Sums& sums, u32 stage, int chunk) const {
    const u32 x = stage + along_m * (16 * MT * kXStride * kSize) + Math::template lane_row_a<kXStride>(lane);
    const u32 first = stage + kFirst + along_l * (kUnits * 8 * kFirstStride * kSize) +
                      Math::template lane_row_b<kFirstStride>(lane);
    const u32 second = memory + along_l * (2 * NT * 8 * kSecondStride * kSize) + chunk * (kSteps * kStep * kSize) +
                       Math::template lane_row_b<kSecondStride>(lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      A a[MT][2];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        float unit[2][MT][4];
        make_units(unit, x, first, (step * kPairs + pair) * 2);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int l = 0; l < 2; ++l) as_a(a[m][l], unit[0][m], unit[1][m], pair, l);
      }
#pragma unroll
      for (int l = 0; l < 2; ++l) {
#pragma unroll
        for (int n = 0; n < NT; n += kTogether) {
          B b[kTogether];
          Math::template load_row_b<kStep, kSecondStride, kTogether, false>(
              b, second + ((l * NT + n) * 8 * kSecondStride + step * kStep) * kSize);
#pragma unroll
          for (int i = 0; i < kTogether; ++i)
#pragma unroll
            for (int m = 0; m < MT; ++m) Math::template multiply<kStep>(sums[m][l][n + i], a[m][l], b[i]);
        }
      }
    }
  }

  // Those of the warps that share samples, in both blocks.
  DEVICE void say(int barrier) const {
    const u32 at = memory + barrier + along_m * 8;
    __syncwarp();
    if (lane.index == 0) arrive(at), arrive_in_other_block(in_other_block(at));
  }
  DEVICE void hear(int barrier, u32 phase) const { wait_for_cluster(memory + barrier + along_m * 8, phase); }
  DEVICE void meet() const {
    if constexpr (Pass::WARPS_M == 1) __syncthreads();
    else sync_threads<kMembers>(1 + along_m);
  }
  // Columns of 8 as 2 t + i lie in the order of i: so four lanes' cells lie side by side, and units of a cell are exchanged
  // by row, so that no two lanes meet in a bank.
  DEVICE void put(const Sums& sums, int round) const {
    const typename Pass::Activation activation(params);
    const u32 here = memory + kResult + along_m * kResultBytes;
    const u32 at = (lane.g * kColumns + lane.t) * kCell + ((rank * kWarpsL + along_l) ^ lane.g & kMask) * kUnitBytes;
    u32 there = here;
    if constexpr (Pass::CLUSTER) there = in_other_block(here);
    const int l = first_l + along_l * 2;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (n / kNow != round) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float bias[2] = {};
        if constexpr (Pass::BIAS) {
          const int j = n * 8 + lane.t * 2 + i;
          u32 words[kUnitBytes / 4];
          load_global<kUnitBytes>(static_cast<const Element*>(params.bias) + j * L + l, words, j < S && l < L);
          if constexpr (kSize == 2)
            bias[0] = widen(Element{u16(words[0])}), bias[1] = widen(Element{u16(words[0] >> 16)});
          else
            bias[0] = __uint_as_float(words[0]), bias[1] = __uint_as_float(words[1]);
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const Pair<Element> two(activation.of(sums[m][0][n][half * 2 + i] + bias[0]),
                                    activation.of(sums[m][1][n][half * 2 + i] + bias[1]));
            const int row = Pass::CLUSTER ? m * 8 : m * 16 + half * 8;
            const u32 to = at + (row * kColumns + n % kNow * 8 + i * 4) * kCell;
            if (!Pass::CLUSTER || half == rank)
              store_shared(here + to, two);
            else
              put_there(there + to, two);
          }
      }
    }
  }
  static DEVICE void put_there(u32 to, const Pair<Element>& two) {
    if constexpr (kSize == 2)
      store_in_other_block(to, two.bits);
    else
      store_in_other_block(to, two.x, two.y);
  }
  DEVICE void store(i64 tile, int round) const {
    constexpr int kBytes = Pass::STORE, kWords = kBytes / 4, kVectors = kCell / kBytes, kUnitsOf = kBytes / kUnitBytes;
    const u32 from = memory + kResult + along_m * kResultBytes;
    const i64 first = tile * kSamples + along_m * (16 * MT);
    Element* y = static_cast<Element*>(params.y) + (first_l - rank * GROUPS);
#pragma unroll 4
    for (int v = threadIdx.x % kMembers; v < kRows * kColumns * kVectors; v += kMembers) {
      const int cell = v / kVectors, row = cell / kColumns, column = cell % kColumns;
      const int turned = row & kMask, l = (v % kVectors ^ turned / kUnitsOf) * (kUnitsOf * 2);
      const int j = (round * kNow + column / 8) * 8 + column % 4 * 2 + column / 4 % 2;
      u32 x[kWords];
      load_unit_words(from + v * kBytes, x);
      exchange<kUnitsOf>(x, turned % kUnitsOf);
      const i64 sample = first + (Pass::CLUSTER ? row / 8 * 16 + rank * 8 + row % 8 : row);
      if (sample < params.batch && j < S && (L % (GROUPS * kBlocks) == 0 || first_l - rank * GROUPS + l < L))
        store_global<kBytes>(y + sample * (S * L) + j * L + l, x);
    }
  }
  template <int WORDS> static DEVICE void load_unit_words(u32 from, u32 (&x)[WORDS]) {
    if constexpr (WORDS == 4) {
      load_u32x4(from, x);
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) x[i] = load_u32(from + i * 4);
    }
  }
  // COUNT units: the one at i was i ^ by.
  template <int COUNT, int WORDS> static DEVICE void exchange(u32 (&x)[WORDS], int by) {
#pragma unroll
    for (int bit = 1; bit < COUNT; bit *= 2)
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        constexpr int kEach = WORDS / COUNT;
        const int other = i + bit * kEach;
        if (i / kEach & bit) continue;
        const u32 lower = x[i];
        x[i] = by & bit ? x[other] : lower;
        x[other] = by & bit ? lower : x[other];
      }
  }
  DEVICE void finish(const Sums& sums, i64 tile, u32& phase) const {
#pragma unroll
    for (int round = 0; round < Pass::ROUNDS; ++round) {
      if constexpr (Pass::CLUSTER)
        hear(kFree, phase ^ 1);
      else
        meet();
      put(sums, round);
      if constexpr (Pass::CLUSTER)
        say(kFull), hear(kFull, phase);
      else
        meet();
      store(tile, round);
      if constexpr (Pass::CLUSTER) say(kFree);
      phase ^= 1;
    }
  }

  DEVICE void run() const {
    if constexpr (Pass::CLUSTER) {
      if (threadIdx.x < 2 * Pass::WARPS_M) init_barrier(memory + kFull + threadIdx.x * 8, 2 * kWarpsL);
      sync_cluster();
    }
    i64 ahead = blockIdx.x;
    int ahead_chunk = 0;
    const auto copy_next = [&](int stage) {
      if (ahead < tiles()) copy_chunk(ahead, ahead_chunk, memory + kStages + stage * kStageBytes);
      commit_copies();
      if (++ahead_chunk == kChunks) ahead_chunk = 0, ahead += gridDim.x;
    };
    copy_second();
    commit_copies();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copy_next(stage);
    clear_padding();
    wait_for_copies<STAGES - 1>();
    order_second();
    int stage = 0;
    u32 phase = 0;
    for (i64 tile = blockIdx.x; tile < tiles(); tile += gridDim.x) {
      Sums sums = {};
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        copy_next(stage ? stage - 1 : STAGES - 1);
        add_chunk(sums, memory + kStages + stage * kStageBytes, chunk);
        if (++stage == STAGES) stage = 0;
      }
      finish(sums, tile, phase);
    }
    wait_for_copies<0>();
    if constexpr (Pass::CLUSTER) sync_cluster();  // the other block may still give
  }
};
