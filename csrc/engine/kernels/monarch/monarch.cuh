// Both contractions of a Monarch layer in one pass, whose state stays in registers: x [K][P] by weights [K][RHO][L][P]
// to [K][RHO][L], and that, for each group l of L, by weights [L][S][K * RHO] to y [S][L].
//
// A block has the second weights of GROUPS l's in shared memory and takes tiles of samples, of which x comes by chunks of
// CK k's through a ring of SLOTS, with the first weights of these k's. A warp has 16 * MT samples and two l's. Eight
// columns of its first product, a unit, are four of the RHO numbers of a k, for both l's: column 2 t + i is number t for
// the i-th l. So lane (g, t) holds number t, of both, and the sums of four units (two in 32 bits) are, rounded, operand A
// of one step of each l's second product, whose weights have their k's in that order. The second product of a step is
// made beside the first one of the next, which does not depend on it.
//
// Results of one l lie far apart in y, those of neighbours side by side: they meet in shared memory, some columns of S at
// once. With CLUSTER, a second block has the next GROUPS, so that what is stored are whole sectors of L2: of each 16 rows
// the first one stores the upper eight, and the other one the rest, and the copy engine brings each what the other one
// has of them, while that one finishes its own. kernels/monarch/monarch.py writes the constants:
//
// With LOADERS, four more warps copy the chunks of all TEAMS, which are warps that take tiles by themselves.
//
// Pass:  Math, Element, Activation, BIAS, FIRST and SECOND (the parameters that weights are), K, P, L, S, RHO, GROUPS,
//        MT, WARPS_M (warps along the samples), TEAMS, CK, SLOTS, ROUNDS (in which results are stored), STORE (bytes
//        of one access), CLUSTER, LOADERS
#pragma once
#include "multiply/mma.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"
#include "finish/sums.cuh"
#include "move/ring.cuh"

template <class Pass> struct Monarch {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using A = typename Math::A;
  using B = typename Math::B;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kPiece = 16 / kSize;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO, GROUPS = Pass::GROUPS;
  static constexpr int MT = Pass::MT, CK = Pass::CK, SLOTS = Pass::SLOTS;
  static constexpr int kWarpsL = GROUPS / 2, kMembers = 32 * kWarpsL, kThreads = kMembers * Pass::WARPS_M;
  static constexpr int kTeam = kThreads / Pass::TEAMS, kTeamM = Pass::WARPS_M / Pass::TEAMS, kSamples = 16 * MT * kTeamM;
  static constexpr int kLoaders = Pass::LOADERS ? 128 : 0, kCopiers = Pass::LOADERS ? kLoaders : kTeam;
  static constexpr int kCopyRegisters = 40, kRegisters = 232;
  static constexpr int kPadded = round_up(P, 8), kWhole = kPadded / kStep * kStep;
  static constexpr int kTiles = ceil_div(RHO, 4), kUnits = CK * kTiles;  // of a k, and of a chunk
  static constexpr int kPairs = kStep / 8;                               // of units, in a step
  static constexpr int kChunks = ceil_div(K, CK), kSteps = kUnits / (2 * kPairs), kDepth = kChunks * kSteps * kStep;
  static constexpr int NT = ceil_div(S, 8), kTogether = NT % 2 ? 1 : 2;
  static_assert(kUnits % (2 * kPairs) == 0 && GROUPS % 2 == 0 && L % 2 == 0);

  // Rows, an odd multiple of 16 bytes apart, or whole lines, of which pieces change places by row
  static constexpr int stride(int n) { return (ceil_div(n, kPiece) | 1) * kPiece; }
  static constexpr int kXStride = stride(CK * kPadded), kFirstStride = stride(kPadded);
  static constexpr bool kTurned = kDepth * kSize % 128 == 0;
  static constexpr int kSecondStride = kTurned ? kDepth : stride(kDepth), kFirstRows = kWarpsL * kUnits * 8;
  static constexpr int kFirst = kSamples * kXStride * kSize, kSlotBytes = kFirst + kFirstRows * kFirstStride * kSize;
  static constexpr int kSlots = GROUPS * NT * 8 * kSecondStride * kSize;  // behind the second weights

  // Results: units of two l's, each with the rows and columns of a round. What a block stores itself comes first, then what
  // the other one has for its rows, and what it has for the other one's.
  static constexpr int kBlocks = Pass::CLUSTER ? 2 : 1, kNow = ceil_div(NT, Pass::ROUNDS), kColumns = kNow * 8;
  static constexpr int kUnitBytes = 2 * kSize, kCell = kWarpsL * kBlocks * kUnitBytes;
  static constexpr int kRows = 16 * MT / kBlocks;  // of the warps that share samples
  static constexpr int kUnitStep = kRows * kColumns * kUnitBytes + 16, kRegion = kWarpsL * kUnitStep;
  static constexpr int kResult = kSlots + Pass::TEAMS * SLOTS * kSlotBytes, kResultBytes = (Pass::CLUSTER ? 3 : 1) * kRegion;
  static constexpr int kFull = kResult + Pass::WARPS_M * kResultBytes, kFree = kFull + 8 * Pass::WARPS_M;
  static constexpr int kLoaded = kFree + 8 * Pass::WARPS_M;  // of each team's slots, and that they are free again

  using Sums = float[MT][2][NT][4];
  using Left = A[MT][2];

  const Params& params;
  const u32 memory;
  const Lane lane;
  const int warp, along_l, along_m, team, member, rank, first_l;

  DEVICE Monarch(const Params& p)
      : params(p), memory(shared_address(shared_memory)), warp(uniform(threadIdx.x / 32)), along_l(warp % kWarpsL),
        along_m(warp / kWarpsL), team(along_m / kTeamM), member(threadIdx.x % kCopiers), rank(blockIdx.y % kBlocks), first_l(blockIdx.y * GROUPS) {}

  DEVICE i64 tiles() const { return (params.batch + kSamples - 1) / kSamples; }

  // The second weights: eight neighbours of a row, four numbers of two units, change their order where a thread has copied
  // them, or, of 32 bits, are rounded there.
  static constexpr int kRow = K * RHO;
  static constexpr bool kInPlace = RHO % 4 == 0 && kRow % kPiece == 0;
  static constexpr int kRowPieces = kDepth / kPiece, kPieces = GROUPS * NT * 8 * kRowPieces;
  DEVICE const Element* second(int row) const {
    const Element* weight = static_cast<const Element*>(params.weights[Pass::SECOND]);
    return weight + (i64(first_l + row / (NT * 8)) * S + row % (NT * 8)) * kRow;
  }
  DEVICE bool has_second(int row) const { return first_l + row / (NT * 8) < L && row % (NT * 8) < S; }
  // Where a piece, or a number of a unit, lies
  DEVICE u32 place_of(int row, int piece) const {
    return memory + row * kSecondStride * kSize + (kTurned ? piece ^ row % 8 : piece) * 16;
  }
  DEVICE u32 place_of(int row, int unit, int number) const {
    if constexpr (kSize == 2) return place_of(row, unit / 2) + (number * 2 + unit % 2) * kSize;
    return place_of(row, unit) + number * kSize;
  }
  DEVICE void copy_second() const {
    if constexpr (kInPlace) {
      UNROLL_BY(4) for (int j = threadIdx.x; j < kPieces; j += kThreads) {
        const int row = j / kRowPieces, piece = j % kRowPieces;
        copy_async<16>(place_of(row, piece), second(row) + piece * kPiece, piece * kPiece < kRow && has_second(row));
      }
    } else {
      UNROLL_BY(4) for (int j = threadIdx.x; j < GROUPS * NT * 8 * kDepth; j += kThreads) {
        const int row = j / kDepth, unit = j % kDepth / 4, number = j % 4, r = unit % kTiles * 4 + number;
        const bool here = unit / kTiles < K && r < RHO && has_second(row);
        const Element x = here ? second(row)[unit / kTiles * RHO + r] : narrow<Element>(0.f);
        store_shared(place_of(row, unit, number), rounded(x));
      }
    }
  }
  DEVICE void order_second() const {
    if constexpr (kInPlace) {
      UNROLL_BY(4) for (int j = threadIdx.x; j < kPieces; j += kThreads) {
        const u32 here = place_of(j / kRowPieces, j % kRowPieces);
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

  // A chunk of x and of the first weights, whose rows lie in the order of a unit's columns. Neighbouring threads take
  // neighbouring pieces, whole lines of 128 bytes if they can: a warp's access costs about two cycles for every line.
  static constexpr int kBytes = P * kSize % 16 == 0 ? 16 : P * kSize % 8 == 0 ? 8 : 4, kEach = kBytes / kSize;
  static constexpr int kRun = P / kEach, kXPieces = CK * kRun, kWPieces = GROUPS * kRun;  // of a sample, of a number
  static constexpr int together(int pieces) {
    for (int n = 1; n < 8; n *= 2)
      if (pieces <= n) return n;
    return pieces % 8 && pieces % 4 == 0 ? 4 : 8;
  }
  static constexpr int kTogetherX = together(kXPieces), kDownX = kCopiers / kTogetherX;
  static constexpr int kTogetherW = together(kWPieces), kWTurns = ceil_div(kWPieces, kTogetherW);
  // Of what is copied next: this thread's first piece of x, and rows from there on.
  struct Cursor {
    i64 tile;
    int chunk, left;
    const Element* x;
  };
  DEVICE void begin_tile(Cursor& at) const {
    const int row = member / kTogetherX, piece = member % kTogetherX * kEach;
    at.chunk = 0;
    at.x = static_cast<const Element*>(params.x) + (at.tile * kSamples + row) * (K * P) + piece;
    at.left = int(min(params.batch - at.tile * kSamples, i64(kSamples))) - row;
  }
  DEVICE void advance(Cursor& at) const {
    at.x += CK * P;
    if (++at.chunk < kChunks) return;
    at.tile += gridDim.x * Pass::TEAMS;
    begin_tile(at);
  }
  DEVICE int place_x() const {
    return (member / kTogetherX * kXStride + (kPadded == P ? member % kTogetherX * kEach : 0)) * kSize;
  }
  DEVICE void copy_chunk(const Cursor& at, u32 to, int place) const {
    const int left_k = K - at.chunk * CK;
    UNROLL for (int down = 0; down < kSamples; down += kDownX) {
      const bool is_row = kSamples % kDownX == 0 || member / kTogetherX + down < kSamples;
      UNROLL for (int i = 0; i < kXPieces; i += kTogetherX) {
        const int j = i + member % kTogetherX, k = j / kRun;
        const int piece = kPadded == P ? i * kEach : k * kPadded + j % kRun * kEach;
        copy_async_if<kBytes>(to + place + (down * kXStride + piece) * kSize, at.x + (i64(down) * (K * P) + i * kEach),
                              down < at.left && (K % CK == 0 || k < left_k),
                              is_row && (kXPieces % kTogetherX == 0 || j < kXPieces));
      }
    }
    // What a number has of all l's lies side by side.
    const Element* weight = static_cast<const Element*>(params.weights[Pass::FIRST]);
    weight += (i64(at.chunk) * (CK * RHO * L) + first_l) * P;
    constexpr int kItems = kUnits * 4 * kWTurns * kTogetherW;
    UNROLL for (int first = 0; first < kItems; first += kCopiers) {
      const int item = (first + member) / kTogetherW, j = item % kWTurns * kTogetherW + member % kTogetherW;
      const int unit = item / kWTurns / 4, number = item / kWTurns % 4, l = j / kRun, p = j % kRun * kEach;
      const int k = unit / kTiles, r = unit % kTiles * 4 + number, row = (l / 2 * kUnits + unit) * 8 + number * 2 + l % 2;
      const bool here = (RHO % 4 == 0 || r < RHO) && (K % CK == 0 || k < left_k) &&
                        (L % (GROUPS * kBlocks) == 0 || first_l + l < L);
      copy_async_if<kBytes>(to + kFirst + (row * kFirstStride + p) * kSize, weight + ((k * RHO + r) * L * P + j * kEach), here,
                            (kItems % kCopiers == 0 || first + member < kItems) &&
                                (kWPieces % kTogetherW == 0 || j < kWPieces));
    }
  }
  // Columns that no copy writes
  DEVICE void clear_padding() const {
    if constexpr (kPadded > P) {
      constexpr int kRest = kPadded - P;
      for (int j = threadIdx.x; j < Pass::TEAMS * SLOTS * kSamples * CK * kRest; j += kThreads) {
        const int row = j / (CK * kRest), k = j / kRest % CK;
        store_shared(memory + kSlots + row / kSamples * kSlotBytes +
                         (row % kSamples * kXStride + k * kPadded + P + j % kRest) * kSize, narrow<Element>(0.f));
      }
      for (int j = threadIdx.x; j < Pass::TEAMS * SLOTS * kFirstRows * kRest; j += kThreads) {
        const int row = j / kRest;
        store_shared(memory + kSlots + row / kFirstRows * kSlotBytes + kFirst +
                         (row % kFirstRows * kFirstStride + P + j % kRest) * kSize, narrow<Element>(0.f));
      }
    }
  }

  // Two units: sums of 16 * MT rows by four numbers of both l's.
  DEVICE void make_units(float (&unit)[2][MT][4], u32 x, u32 weight, int first) const {
    UNROLL for (int i = 0; i < 2; ++i)
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int j = 0; j < 4; ++j) unit[i][m][j] = 0;
    UNROLL for (int p = 0; p < kWhole; p += kStep) add_products<kStep>(unit, x + p * kSize, weight + p * kSize, first);
    if constexpr (kWhole < kPadded) add_products<8>(unit, x + kWhole * kSize, weight + kWhole * kSize, first);
    if constexpr (RHO % 4 > 0) {  // what no k has: an infinite x would make it NaN
      UNROLL for (int i = 0; i < 2; ++i)
        if ((first + i) % kTiles == kTiles - 1 && lane.t >= RHO % 4) {
          UNROLL for (int m = 0; m < MT; ++m)
            UNROLL for (int j = 0; j < 4; ++j) unit[i][m][j] = 0;
        }
    }
  }
  template <int LENGTH> DEVICE void add_products(float (&unit)[2][MT][4], u32 x, u32 weight, int first) const {
    B b[2];
    Math::template load_row_b<LENGTH, kFirstStride>(b, weight + first * 8 * kFirstStride * kSize);
    UNROLL for (int m = 0; m < MT; ++m) {
      A a;
      UNROLL for (int i = 0; i < 2; ++i) {
        const int k = (first + i) / kTiles;
        if (i == 0 || k != first / kTiles)
          Math::template load_row_a<LENGTH, kXStride>(a, x + (m * 16 * kXStride + k * kPadded) * kSize);
        Math::template multiply<LENGTH>(unit[i][m], a, b[i]);
      }
    }
  }
  // Numbers of two units, of rows g and g + 8, to operand A of l.
  static DEVICE void as_a(A& a, const float (&first)[4], const float (&second)[4], int pair, int l) {
    UNROLL for (int half = 0; half < 2; ++half) {
      if constexpr (kSize == 2) {
        a.r[pair * 2 + half] = Pair<Element>(first[half * 2 + l], second[half * 2 + l]).bits;
      } else {
        a.r[half] = tf32_of(__float_as_uint(first[half * 2 + l]));
        a.r[2 + half] = tf32_of(__float_as_uint(second[half * 2 + l]));
      }
    }
  }
  // Of a chunk: operands A of both l's for a step, and what they add to the sums.
  DEVICE void make_step(Left& left, u32 slot, int step) const {
    const u32 x = slot + along_m % kTeamM * (16 * MT * kXStride * kSize) + Math::template lane_row_a<kXStride>(lane);
    const u32 weight = slot + kFirst + along_l * (kUnits * 8 * kFirstStride * kSize) +
                       Math::template lane_row_b<kFirstStride>(lane);
    UNROLL for (int pair = 0; pair < kPairs; ++pair) {
      float unit[2][MT][4];
      make_units(unit, x, weight, (step * kPairs + pair) * 2);
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int l = 0; l < 2; ++l) as_a(left[m][l], unit[0][m], unit[1][m], pair, l);
    }
  }
  DEVICE void add_step(Sums& sums, const Left& left, int step) const {
    const int begin = lane.index >> 3 & 1 ^ (kTurned ? lane.index & 7 : 0);  // a step has two pieces
    const int row = along_l * (2 * NT * 8) + (lane.index & 7) + (lane.index >> 4) * 8;
    const u32 weight = memory + row * kSecondStride * kSize + (kTurned ? begin ^ step * 2 : begin + step * 2) * 16;
    UNROLL for (int l = 0; l < 2; ++l) {
      UNROLL for (int n = 0; n < NT; n += kTogether) {
        B b[kTogether];
        Math::template load_row_b<kStep, kSecondStride, kTogether, false>(
            b, weight + (l * NT + n) * 8 * kSecondStride * kSize);
        UNROLL for (int i = 0; i < kTogether; ++i)
          UNROLL for (int m = 0; m < MT; ++m) Math::template multiply<kStep>(sums[m][l][n + i], left[m][l], b[i]);
      }
    }
  }
  // `left` is the last step's of the chunk before.
  template <bool BEGINS> DEVICE void add_chunk(Sums& sums, Left& left, u32 slot, int chunk) const {
    UNROLL for (int step = 0; step < kSteps; ++step) {
      Left next;
      make_step(next, slot, step);
      if (!BEGINS || step > 0) add_step(sums, left, chunk * kSteps + step - 1);
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int l = 0; l < 2; ++l) left[m][l] = next[m][l];
    }
  }

  // A team, and the warps that share samples
  DEVICE void meet_team() const {
    if constexpr (Pass::TEAMS == 1 && !Pass::LOADERS)
      __syncthreads();
    else
      sync_threads<kTeam>(1 + team);
  }
  DEVICE void meet() const {
    if constexpr (kTeamM == 1)
      meet_team();
    else
      sync_threads<kMembers>(1 + Pass::TEAMS + along_m);
  }
  // Where the n-th eight columns of a round lie in row g of eight: no two lanes that store at once meet in a bank.
  static constexpr int kInLine = 128 / (8 * kUnitBytes), kShift = kNow < kInLine ? kInLine / kNow / 2 : 0;
  static constexpr int kMask = (kNow & kNow - 1) > 0 ? 0 : (kNow < kInLine ? kNow : kInLine) - 1;
  static DEVICE int turned(int n, int g) { return n ^ (g >> kShift & kMask); }
  // Sums with bias and activation, rounded: with CLUSTER of the rows that this block stores, or of the others.
  template <bool OWN> DEVICE void put(const Sums& sums, int round) const {
    const typename Pass::Activation activation(params);
    const bool upper = (rank == 0) == OWN;
    const u32 to = memory + kResult + along_m * kResultBytes + (OWN ? 0 : 2 * kRegion) + along_l * kUnitStep;
    const int l = first_l + along_l * 2;
    UNROLL for (int n = 0; n < NT; ++n) {
      if (n / kNow != round) continue;
      float bias[2][2] = {};
      if constexpr (Pass::BIAS) {
        UNROLL for (int i = 0; i < 2; ++i) {
          const int j = n * 8 + lane.t * 2 + i;
          u32 words[kUnitBytes / 4];
          load_global<kUnitBytes>(static_cast<const Element*>(params.bias) + j * L + l, words, j < S && l < L);
          if constexpr (kSize == 2)
            bias[i][0] = widen(Element{u16(words[0])}), bias[i][1] = widen(Element{u16(words[0] >> 16)});
          else
            bias[i][0] = __uint_as_float(words[0]), bias[i][1] = __uint_as_float(words[1]);
        }
      }
      UNROLL for (int m = 0; m < MT; ++m) {
        UNROLL for (int half = 0; half < 2 / kBlocks; ++half) {
          float y[4];
          UNROLL for (int i = 0; i < 4; ++i) {
            const float(&sum)[4] = sums[m][i % 2][n];
            const float x = Pass::CLUSTER ? (upper ? sum[i / 2] : sum[2 + i / 2]) : sum[half * 2 + i / 2];
            y[i] = activation.of(x + bias[i / 2][i % 2]);
          }
          const int row = (Pass::CLUSTER ? m : m * 2 + half) * 8 + lane.g;
          const u32 at = to + (row * kColumns + turned(n % kNow, lane.g) * 8 + lane.t * 2) * kUnitBytes;
          if constexpr (kSize == 2)
            store_f32x2(at, __uint_as_float(Pair<Element>(y[0], y[1]).bits),
                        __uint_as_float(Pair<Element>(y[2], y[3]).bits));
          else
            put_sums(at, y);
        }
      }
    }
  }
  DEVICE void store(i64 tile, int round) const {
    constexpr int kBytes = Pass::STORE, kVectors = kCell / kBytes, kEach = kBytes / kUnitBytes, kWords = kUnitBytes / 4;
    const u32 from = memory + kResult + along_m * kResultBytes;
    const i64 first = tile * kSamples + along_m % kTeamM * (16 * MT);
    const int l0 = first_l - rank * GROUPS;
    Element* y = static_cast<Element*>(params.y) + l0;
    UNROLL_BY(4) for (int v = threadIdx.x % kMembers; v < kRows * kColumns * kVectors; v += kMembers) {
      const int cell = v / kVectors, unit = v % kVectors * kEach, row = cell / kColumns, column = cell % kColumns;
      const int j = (round * kNow + turned(column / 8, row % 8)) * 8 + column % 8;
      u32 x[kBytes / 4];
      UNROLL for (int i = 0; i < kEach; ++i) {
        const int there = (unit + i) / kWarpsL != rank ? kRegion : 0;
        UNROLL for (int word = 0; word < kWords; ++word)
          x[i * kWords + word] = load_u32(from + there + (unit + i) % kWarpsL * kUnitStep + cell * kUnitBytes + word * 4);
      }
      const i64 sample = first + (Pass::CLUSTER ? row / 8 * 16 + rank * 8 + row % 8 : row);
      if (sample < params.batch && j < S && (L % (GROUPS * kBlocks) == 0 || l0 + unit * 2 < L))
        store_global<kBytes>(y + sample * (S * L) + j * L + unit * 2, x);
    }
  }
  DEVICE void finish(const Sums& sums, i64 tile, u32& phase) const {
    const u32 full = memory + kFull + along_m * 8, free = memory + kFree + along_m * 8;
    const u32 here = memory + kResult + along_m * kResultBytes;
    UNROLL for (int round = 0; round < Pass::ROUNDS; ++round) {
      if constexpr (Pass::CLUSTER) {
        wait_for_bytes(free, phase ^ 1);
        put<false>(sums, round);
        fence_copy_engine();
        meet();
        if (threadIdx.x % kMembers == 0) {
          expect_bytes(full, kRegion);
          send_run(in_other_block(here + kRegion), here + 2 * kRegion, kRegion, in_other_block(full));
        }
        put<true>(sums, round);
        meet();
        wait_for_bytes(full, phase);
        store(tile, round);
        __syncwarp();
        if (lane.index == 0) free_in_other_block(in_other_block(free));
        phase ^= 1;
      } else {
        meet();
        put<true>(sums, round);
        meet();
        store(tile, round);
      }
    }
  }

  DEVICE auto loaded(int of) const { return Ring<SLOTS, kSlotBytes>(slots(of), memory + kLoaded + of * SLOTS * 16); }
  DEVICE u32 slots(int of) const { return memory + kSlots + of * (SLOTS * kSlotBytes); }
  // By the loaders: teams' chunks in turn, of which the first one's are most.
  DEVICE void load() const {
    Cursor ahead[Pass::TEAMS];
    UNROLL for (int i = 0; i < Pass::TEAMS; ++i)
      ahead[i].tile = i64(blockIdx.x) * Pass::TEAMS + i, begin_tile(ahead[i]);
    RingCursor<SLOTS> cursor{0, 1};
    ROLL while (ahead[0].tile < tiles()) {
      UNROLL for (int i = 0; i < Pass::TEAMS; ++i) {
        if (ahead[i].tile >= tiles()) break;
        loaded(i).wait_until_empty(cursor);
        copy_chunk(ahead[i], loaded(i).at(cursor.slot), place_x());
        arrive_with_copies(loaded(i).full(cursor.slot));
        advance(ahead[i]);
      }
      cursor.next();
    }
    wait_for_copies<0>();
  }
  DEVICE void compute() const {
    copy_second();
    commit_copies();
    clear_padding();
    wait_for_copies<0>();
    order_second();
    sync_threads<kThreads>(15);
    const auto chunks = loaded(team);
    RingCursor<SLOTS> cursor{0, 0};
    u32 phase = 0;
    const auto release = [&] {
      __syncwarp();
      chunks.release(cursor.slot, lane.index);
      cursor.next();
    };
    for (i64 tile = i64(blockIdx.x) * Pass::TEAMS + team; tile < tiles(); tile += gridDim.x * Pass::TEAMS) {
      Sums sums = {};
      Left left;
      chunks.wait_until_full(cursor);
      add_chunk<true>(sums, left, chunks.at(cursor.slot), 0);
      release();
      ROLL for (int chunk = 1; chunk < kChunks; ++chunk) {
        chunks.wait_until_full(cursor);
        add_chunk<false>(sums, left, chunks.at(cursor.slot), chunk);
        release();
      }
      add_step(sums, left, kChunks * kSteps - 1);
      finish(sums, tile, phase);
    }
  }

  DEVICE void run() const {
    if constexpr (Pass::CLUSTER) {
      if (threadIdx.x < Pass::WARPS_M) {
        init_barrier(memory + kFull + threadIdx.x * 8, 1);
        init_barrier(memory + kFree + threadIdx.x * 8, kWarpsL);
        fence_copy_engine();
      }
      sync_cluster();
    }
    if constexpr (Pass::LOADERS) {
      for (int i = 0; i < Pass::TEAMS; ++i) loaded(i).init(kLoaders, kTeam / 32);
      __syncthreads();
      if (warp >= kThreads / 32) {
        give_registers<kCopyRegisters>(), load();
      } else {
        take_registers<kRegisters>(), compute();
      }
      if constexpr (Pass::CLUSTER) sync_cluster();  // the other block may still give
    } else {
      load_and_compute();
    }
  }
  DEVICE void load_and_compute() const {
    const int place = place_x();
    const i64 first_tile = i64(blockIdx.x) * Pass::TEAMS + team;
    Cursor ahead;
    ahead.tile = first_tile;
    begin_tile(ahead);
    const auto copy_next = [&](int slot) {
      if (ahead.tile < tiles()) copy_chunk(ahead, slots(team) + slot * kSlotBytes, place);
      commit_copies();
      advance(ahead);
    };
    copy_second();
    commit_copies();
    UNROLL for (int slot = 0; slot < SLOTS - 1; ++slot) copy_next(slot);
    clear_padding();
    wait_for_copies<SLOTS - 1>();
    order_second();
    __syncthreads();
    int slot = 0;
    u32 phase = 0;
    for (i64 tile = first_tile; tile < tiles(); tile += gridDim.x * Pass::TEAMS) {
      Sums sums = {};
      Left left;
      const auto next_stage = [&] {
        wait_for_copies<SLOTS - 2>();
        meet_team();
        copy_next(slot ? slot - 1 : SLOTS - 1);
        const u32 here = slots(team) + slot * kSlotBytes;
        if (++slot == SLOTS) slot = 0;
        return here;
      };
      add_chunk<true>(sums, left, next_stage(), 0);
      ROLL for (int chunk = 1; chunk < kChunks; ++chunk) add_chunk<false>(sums, left, next_stage(), chunk);
      add_step(sums, left, kChunks * kSteps - 1);
      finish(sums, tile, phase);
    }
    wait_for_copies<0>();
    if constexpr (Pass::CLUSTER) sync_cluster();  // the other block may still give
  }
};
