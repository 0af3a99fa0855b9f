// The gradients of both weights of a Monarch layer whose groups are small and many, in one pass: of x [K][P], weights
// [K][RHO][L][P] and [L][S][K * RHO], and grad_y turned, [L][S], as monarch_back.cuh has left it. Neither the state nor its
// gradient is seen by memory.
//
// A unit is four of the RHO numbers of a k. A block has 4 * WK units and 4 * WL l's: their weights in shared memory, and
// their sums, for all samples that it takes, in registers, those of four units and four l's in a warp. Rows of its products
// are numbers of the state and columns samples, so that sums are, rounded, operand A of products over samples as they
// stand. The state is made by units, sixteen rows for four l's, and multiplied with grad_y by l's, sixteen rows for four
// units; its gradient goes the other way. Four rows of unit i and l lie at place i ^ l of sixteen in either tile: each
// lane has what it needs, and only takes registers of one tile or of its neighbour.
//
// GROUPS of warps take turns at a block's samples, CHUNK at a time, and add up their sums in the end. Four more warps
// copy. kernels/monarch/monarch_backward.py writes the constants:
//
// Pass:  Math, Element, FIRST and SECOND (the parameters that the weights are), OF_0 and OF_1 (where their gradients
//        begin), K, P, L, S, RHO, WK, WL, GROUPS, CHUNK, SLOTS, WGMMA (on sm_90a, of 16 bits: the products with grad_y
//        are warpgroups')
#pragma once
#include "multiply/mma.cuh"
#include "kernels/monarch/monarch_order.cuh"
#include "types/params.cuh"
#include "finish/sums.cuh"
#include "move/ring.cuh"
#include "multiply/wgmma.cuh"

template <class Pass> struct MonarchGradient {
  using Math = typename Pass::Math;
  using Element = typename Pass::Element;
  using A = typename Math::A;
  using B = typename Math::B;
  using Order = MonarchOrder<Pass>;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kPiece = 16 / kSize;
  static constexpr bool kPairs = kSize == 4;
  static constexpr int K = Pass::K, P = Pass::P, L = Pass::L, S = Pass::S, RHO = Pass::RHO;
  static constexpr int WK = Pass::WK, WL = Pass::WL, CHUNK = Pass::CHUNK, SLOTS = Pass::SLOTS;
  static constexpr int kMembers = 32 * WK * WL, kConsumers = kMembers * Pass::GROUPS, kLoaders = 128;
  static constexpr int kCopyRegisters = Pass::WGMMA ? 24 : 40, kRegisters = Pass::WGMMA ? 240 : 232;
  static constexpr int kOfK = RHO / 4, kUnits = 4 * WK, kLs = 4 * WL, kSets = K * kOfK / kUnits;  // of units
  static constexpr int kColumns = kUnits / kOfK * P, kAcross = 2, kParts = 16 / kStep;  // of a step, of 16 samples
  static constexpr int kAtOnce = P % kStep ? 2 : 1;  // units whose state is made
  static_assert(RHO % 4 == 0 && kUnits % kOfK == 0 && L % kLs == 0 && K * kOfK % kUnits == 0);
  static_assert(P % kPiece == 0 && P % 8 == 0 && S % kStep == 0 && CHUNK % 16 == 0 && Order::kTile % CHUNK == 0);

  // Rows, an odd multiple of 16 bytes apart: of the second weights by l's, fours of units and places, of grad_y by l's and
  // samples, of x by samples, of the first weights by units, fours of l's and places. What WGMMA reads, the second
  // weights and grad_y, are rows of slabs.
  static constexpr bool kWgmma = Pass::WGMMA;
  static constexpr int kHalves = kWgmma && CHUNK % 32 == 0 ? 2 : 1;  // of a step, 16 samples each
  static constexpr int stride(int n) { return (ceil_div(n, kPiece) | 1) * kPiece; }
  static constexpr int kFirstStride = stride(P), kXStride = stride(kColumns), kGStride = kWgmma ? 64 : stride(S);
  static constexpr int kSlots = kLs * WK * 16 * kGStride * kSize;  // behind the second weights
  static constexpr int kX = kLs * CHUNK * kGStride * kSize;
  static constexpr int kSlotBytes = round_up(kX + CHUNK * kXStride * kSize, kWgmma ? 1024 : 16);
  static constexpr int kFirst = kSlots + SLOTS * kSlotBytes, kShared = kFirst + kUnits * WL * 16 * kFirstStride * kSize;
  static_assert(!kWgmma || (WK % 4 == 0 && S <= 64 && kSize == 2 && Pass::GROUPS == 1));

  using SumsFirst = float[4][P / 8][4];
  using SumsSecond = float[4][S / 2];

  const Params& params;
  const u32 memory;
  const Ring<SLOTS, kSlotBytes> ring;
  Lane lane;
  const int warp, along_k, along_l, group, first_unit, first_l;

  DEVICE MonarchGradient(const Params& given)
      : params(given), memory(shared_address(shared_memory)), ring(memory + kSlots, memory + kShared), warp(uniform(threadIdx.x / 32)), along_k(warp % WK),
        along_l(warp / WK % WL), group(warp / (WK * WL)), first_unit(blockIdx.y % kSets * kUnits),
        first_l(blockIdx.y / kSets * kLs) {}

  DEVICE const Element* weight(int which) const { return static_cast<const Element*>(params.weights[which]); }

  static constexpr int kFirstPieces = P / kPiece, kFirstItems = kUnits * WL * 16 * kFirstPieces;
  static DEVICE u32 place_of_first(int row, int piece) { return (row * kFirstStride + piece * kPiece) * kSize; }
  DEVICE void copy_first() const {
    UNROLL_BY(4) for (int j = threadIdx.x; j < kFirstItems; j += kConsumers) {
      const int row = j / kFirstPieces, piece = j % kFirstPieces, unit = row / (16 * WL);
      const int number = (first_unit + unit) * 4 + row % 4, l = first_l + row / 16 % WL * 4 + (row / 4 % 4 ^ unit % 4);
      const Element* from = weight(Pass::FIRST) + (i64(number) * L + l) * P + piece * kPiece;
      copy_async<16>(memory + kFirst + place_of_first(row, piece), from, true);
    }
  }
  DEVICE void round_first() const {
    if constexpr (Math::kRounds) {
      ROLL for (int j = threadIdx.x; j < kFirstItems; j += kConsumers) {
        const u32 here = memory + kFirst + place_of_first(j / kFirstPieces, j % kFirstPieces);
        u32 x[4];
        load_u32x4(here, x);
        store_u32x4(here, {tf32_of(x[0]), tf32_of(x[1]), tf32_of(x[2]), tf32_of(x[3])});
      }
    }
  }
  // Of a row of the second weights or grad_y, 16 bytes
  static DEVICE u32 place_of_run(int row, int piece) {
    return kWgmma ? swizzled(row, piece) : u32(row * kGStride + piece * kPiece) * kSize;
  }
  // The second weights turned: a block's columns side by side to rows. Lanes have rows, 16 bytes of each, and all that a
  // thread loads is on its way at once.
  DEVICE void load_second() const {
    constexpr int kAcross = kUnits * 4 / kPiece, kAll = kLs * S * kAcross, kTogether = 16;
    const Element* from = weight(Pass::SECOND) + i64(first_l) * S * (K * RHO) + first_unit * 4;
    ROLL for (int begin = threadIdx.x; begin < kAll; begin += kTogether * kConsumers) {
      u32 x[kTogether][4];
      UNROLL for (int i = 0; i < kTogether; ++i) {
        const int j = begin + i * kConsumers, row = j % 32 + j / (32 * kAcross) * 32, piece = j / 32 % kAcross;
        load_global(from + row * (K * RHO) + piece * kPiece, x[i], j < kAll);
      }
      UNROLL for (int i = 0; i < kTogether; ++i) {
        const int j = begin + i * kConsumers, row = j % 32 + j / (32 * kAcross) * 32, piece = j / 32 % kAcross;
        const int l = row / S, s = Order::place_of(row % S);
        if (j >= kAll) continue;
        UNROLL for (int e = 0; e < kPiece; ++e) {
          const int unit = piece * kPiece / 4 + e / 4, to = (l * WK + unit / 4) * 16 + (unit % 4 ^ l % 4) * 4 + e % 4;
          const u32 there = memory + place_of_run(to, s / kPiece) + s % kPiece * kSize;
          if constexpr (kSize == 2) store_shared(there, u16(x[i][e / 2] >> e % 2 * 16));
          else store_shared(there, tf32_of(x[i][e]));
        }
      }
    }
  }

  DEVICE i64 chunks() const { return (params.batch + CHUNK - 1) / CHUNK; }
  // Of ROWS, RUN pieces each, this loader's
  template <int ROWS, int RUN, class One> static DEVICE void each(const One& one) {
    const int thread = threadIdx.x - kConsumers;
    if constexpr (kLoaders % RUN == 0) {
      UNROLL_BY(kWgmma ? 1 : 8) for (int row = thread / RUN; row < ROWS; row += kLoaders / RUN) one(row, thread % RUN);
    } else {
      UNROLL_BY(kWgmma ? 2 : 4) for (int j = thread; j < ROWS * RUN; j += kLoaders) one(j / RUN, j % RUN);
    }
  }
  DEVICE void copy_chunk(i64 chunk, u32 to, u32 barrier) const {
    const i64 first = chunk * CHUNK;
    const int left = int(min(params.batch - first, i64(CHUNK)));
    constexpr int kXPieces = kColumns / kPiece, kGPieces = S / kPiece;
    const Element* x = static_cast<const Element*>(params.x) + first * (K * P) + first_unit / kOfK * P;
    // Of a tile, rows of an l follow one another, as they are to lie in a slab.
    const i64 tile = first / Order::kTile * Order::kTile;
    const int begin = int(first - tile), rows = int(min(params.batch - tile, i64(Order::kTile)));
    const char* g = static_cast<const char*>(params.y) + Order::turned_at(tile);
    each<CHUNK, kXPieces>([&](int row, int run) {
      copy_async<16>(to + kX + (row * kXStride + run * kPiece) * kSize, x + row * (K * P) + run * kPiece, row < left);
    });
    if (kWgmma && left == CHUNK) {
      const int l = threadIdx.x - kConsumers;
      if (l == 0) expect_bytes(barrier, kLs * CHUNK * 128);
      if (l < kLs) load_run(to + l * (CHUNK * 128), g + Order::turned_row(first_l + l, 0, begin, rows, 0), CHUNK * 128, barrier);
      return;
    }
    if (threadIdx.x == kConsumers) arrive(barrier);
    each<CHUNK, kLs * kGPieces>([&](int row, int run) {
      const int l = run / kGPieces, piece = run % kGPieces;
      const u32 from = Order::turned_row(first_l + l, piece / 8, begin + row, rows, piece % 8);
      copy_async<16>(to + place_of_run(l * CHUNK + row, piece), g + from, row < left);
    });
  }
  // By the loaders
  DEVICE void produce() const {
    RingCursor<SLOTS> cursor{0, 1};
    ROLL for (i64 chunk = blockIdx.x; chunk < chunks(); chunk += gridDim.x, cursor.next()) {
      ring.wait_until_empty(cursor);
      copy_chunk(chunk, ring.at(cursor.slot), ring.full(cursor.slot));
      arrive_with_copies(ring.full(cursor.slot));
    }
    wait_for_copies<0>();
  }

  using Tiles = A[kParts][4];
  // Of tiles by units those by l's, or the other way.
  DEVICE void exchange(Tiles& tiles) const {
    UNROLL for (int part = 0; part < kParts; ++part)
      UNROLL for (int r = 0; r < 4; ++r) {
        A(&of)[4] = tiles[part];
        const u32 given[4] = {of[0].r[r], of[1].r[r], of[2].r[r], of[3].r[r]};
        UNROLL for (int i = 0; i < 4; ++i) of[i].r[r] = lane.g < 4 ? given[i ^ r % 2 * 2] : given[i ^ r % 2 * 2 ^ 1];
      }
  }
  // Where there is no sample, an infinite weight would make a NaN. Tiles that a branch parts are made one after another: in
  // 16 bits all four are cleared at once, of 32 bits there are not registers for that.
  DEVICE void as_tile(Tiles& tiles, int i, float (&sums)[kAcross][4], int left) const {
    if (kPairs && left < 16) {
      UNROLL for (int n = 0; n < kAcross; ++n)
        UNROLL for (int j = 0; j < 4; ++j)
          if (n * 8 + lane.t * 2 + j % 2 >= left) sums[n][j] = 0;
    }
    UNROLL for (int part = 0; part < kParts; ++part) Math::as_a(tiles[part][i], sums + part);
  }
  DEVICE void clear(Tiles& tiles, int left) const {
    if constexpr (!kPairs) {
      if (left >= 16) return;
      UNROLL for (int r = 0; r < 4; ++r) {
        const int there = left - lane.t * 2 - r / 2 * 8;
        const u32 kept = there <= 0 ? 0 : there == 1 ? 0xffff : ~0u;
        UNROLL for (int i = 0; i < 4; ++i) tiles[0][i].r[r] &= kept;
      }
    }
  }
  DEVICE void add_state(float (&sums)[kAcross][4], u32 weight, u32 x) const {
    A a;
    B b[kAcross];
    Math::template load_row_a<kStep, kFirstStride, false>(a, weight);
    Math::template load_row_b<kStep, kXStride, kAcross>(b, x);
    UNROLL for (int n = 0; n < kAcross; ++n) Math::template multiply<kStep>(sums[n], a, b[n]);
  }
  // Of two units, the last 8 P's: both units' in one access.
  DEVICE void add_tails(float (&sums)[2][kAcross][4], u32 weight, u32 x) const {
    u32 a[4], b[4];
    load_matrices<false>(a, weight + (lane.index >> 4) * (WL * 16 * kFirstStride * kSize - 16));
    load_matrices<false>(b, x + (lane.index >> 3 & 1) * ((kOfK == 1 ? P * kSize : 0) - 16));
    UNROLL for (int unit = 0; unit < 2; ++unit)
      UNROLL for (int n = 0; n < kAcross; ++n) {
        const A left{{a[unit * 2], a[unit * 2 + 1]}};
        Math::template multiply<8>(sums[unit][n], left, B{{b[n * 2 + unit]}});
      }
  }
  // A step of samples; x and g are where the warp's columns and l's begin. The state, by l's
  DEVICE void make_state(Tiles& tiles, u32 x, int left) const {
    const u32 first = memory + kFirst + along_l * (16 * kFirstStride * kSize) +
                      Math::template lane_row_a<kFirstStride>(lane);
    const u32 rows = x + Math::template lane_row_b<kXStride>(lane);
    UNROLL for (int unit = 0; unit < 4; unit += kAtOnce) {
      constexpr int kWhole = P / kStep * kStep, kUnit = WL * 16 * kFirstStride * kSize;
      const u32 weight = first + (along_k * 4 + unit) * kUnit, from = rows + unit / kOfK * (P * kSize);
      float sums[kAtOnce][kAcross][4] = {};
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        UNROLL for (int p = 0; p < kWhole; p += kStep)
          add_state(sums[i], weight + i * kUnit + p * kSize, from + i / kOfK * (P * kSize) + p * kSize);
      if constexpr (kWhole < P) add_tails(sums, weight + kWhole * kSize, from + kWhole * kSize);
      UNROLL for (int i = 0; i < kAtOnce; ++i) as_tile(tiles, unit + i, sums[i], left);
    }
    clear(tiles, left);
    exchange(tiles);
  }
  // What its gradient, by l's, adds to that of the first weights
  DEVICE void add_first(SumsFirst& of_first, Tiles& tiles, u32 x) const {
    exchange(tiles);
    UNROLL for (int part = 0; part < kParts; ++part) {
      const u32 from = x + part * (kStep * kXStride * kSize) + Math::template lane_b_by_n<kXStride, kPairs>(lane);
      B b[P / 8];
      UNROLL for (int i = 0; i < 4; ++i) {
        u32 columns[P / 8];
        UNROLL for (int n = 0; n < P / 8; ++n) columns[n] = from + (i / kOfK * P + n * 8) * kSize;
        if (i % kOfK == 0) Math::template load_b_by_n<kStep, kXStride, P / 8, 8, true, kPairs>(b, columns, lane.index);
        UNROLL for (int n = 0; n < P / 8; ++n) Math::template multiply<kStep>(of_first[i][n], tiles[part][i], b[n]);
      }
    }
  }
  DEVICE void add_step(SumsFirst& of_first, SumsSecond& of_second, u32 x, u32 g, int left) const {
    Tiles tiles;
    make_state(tiles, x, left);
    const u32 by_n = g + Math::template lane_b_by_n<kGStride, kPairs>(lane);
    UNROLL for (int l = 0; l < 4; ++l) {
      UNROLL for (int j = 0; j < kParts * S / 8; j += 2) {
        const int part = j / (S / 8), n = j % (S / 8);
        const u32 from = by_n + ((l * CHUNK + part * kStep) * kGStride + n * 8) * kSize;
        const u32 columns[2] = {from, from + 8 * kSize};
        B b[2];
        Math::template load_b_by_n<kStep, kGStride, 2, 8, false, kPairs>(b, columns, lane.index);
        UNROLL for (int i = 0; i < 2; ++i)
          Math::template multiply<kStep>(reinterpret_cast<float(&)[4]>(of_second[l][(n + i) * 4]), tiles[part][l], b[i]);
      }
    }
    const u32 second = memory + (along_l * 4 * WK + along_k) * (16 * kGStride * kSize) +
                       Math::template lane_row_a<kGStride>(lane);
    const u32 rows = g + Math::template lane_row_b<kGStride>(lane);
    UNROLL for (int l = 0; l < 4; ++l) {
      float sums[kAcross][4] = {};
      UNROLL for (int s = 0; s < S; s += kStep) {
        A a;
        B b[kAcross];
        Math::template load_row_a<kStep, kGStride, false>(a, second + (l * WK * 16 * kGStride + s) * kSize);
        Math::template load_row_b<kStep, kGStride, kAcross, false>(b, rows + (l * CHUNK * kGStride + s) * kSize);
        UNROLL for (int n = 0; n < kAcross; ++n) Math::template multiply<kStep>(sums[n], a, b[n]);
      }
      as_tile(tiles, l, sums, left);
    }
    clear(tiles, left);
    add_first(of_first, tiles, x);
  }
  // What is asked of two l's, for all samples of a step
  DEVICE void ask_for_back(float (&back)[2][8 * kHalves], int first, u32 g) const {
    open_products();
    UNROLL for (int l = 0; l < 2; ++l) {
      const u64 second = operand(memory + ((along_l * 4 + first + l) * WK + along_k / 4 * 4) * 2048);
      const u64 grad = operand(g + (first + l) * CHUNK * 128);
      UNROLL for (int s = 0; s < S / 16; ++s)
        Wgmma<Element, 16 * kHalves>::multiply(back[l], second + s * 2, grad + s * 2, s > 0);
    }
    commit_products();
  }
  DEVICE void take_back(Tiles (&of_back)[kHalves], float (&back)[2][8 * kHalves], int first) const {
    UNROLL for (int l = 0; l < 2; ++l) {
      touch(back[l]);
      UNROLL for (int half = 0; half < kHalves; ++half)
        as_tile(of_back[half], first + l, reinterpret_cast<float(&)[2][4]>(back[l][half * 8]), 16);
    }
  }
  DEVICE void ask_for_second(SumsSecond& of_second, Tiles& tiles, u32 g) const {
    UNROLL for (int l = 0; l < 4; ++l) settle(tiles[0][l].r);
    ask_for_products<4>([&](int l) {
      Wgmma<Element, S>::multiply_turned(of_second[l], tiles[0][l].r, turned_operand(g + l * CHUNK * 128, CHUNK * 128));
    });
  }
  // The same with products of a warpgroup, of which each warp's rows are its own: it has four fours of units. The second
  // weights are read once for 32 samples, by two l's, as registers hold no more.
  DEVICE void add_step_of_warpgroups(SumsFirst& of_first, SumsSecond& of_second, u32 x, u32 g, int left) const {
    if constexpr (kWgmma) {
      Tiles tiles, of_back[kHalves];
      float back[2][8 * kHalves];
      make_state(tiles, x, left);
      ask_for_back(back, 0, g);
      ask_for_second(of_second, tiles, g);
      wait_for_products<1>();
      take_back(of_back, back, 0);
      wait_for_products<0>();
      UNROLL for (int l = 0; l < 4; ++l) touch(of_second[l]);
      ask_for_back(back, 2, g);
      wait_for_products<0>();
      take_back(of_back, back, 2);
      UNROLL for (int half = 0; half < kHalves; ++half) {
        clear(of_back[half], left - half * 16);
        add_first(of_first, of_back[half], x + half * (16 * kXStride * kSize));
      }
      if (kHalves == 2 && left > 16) {
        make_state(tiles, x + 16 * kXStride * kSize, left - 16);
        ask_for_second(of_second, tiles, g + 16 * 128);
        wait_for_products<0>();
        UNROLL for (int l = 0; l < 4; ++l) touch(of_second[l]);
      }
    }
  }

  struct Meet {
    DEVICE void operator()() const { sync_threads<kConsumers>(1); }
  };
  DEVICE void run() {
    ring.init(kLoaders + 1, kMembers / 32);
    fence_copy_engine();
    __syncthreads();
    if (warp >= kConsumers / 32)
      give_registers<kCopyRegisters>(), produce();
    else
      take_registers<kRegisters>(), consume();
  }
  DEVICE void consume() {
    copy_first();
    commit_copies();
    load_second();
    wait_for_copies<0>();
    round_first();
    Meet()();
    SumsFirst of_first = {};
    SumsSecond of_second = {};
    u32 position = group;  // of a chunk
    ROLL for (i64 chunk = blockIdx.x + i64(group) * gridDim.x; chunk < chunks();
              chunk += i64(gridDim.x) * Pass::GROUPS) {
      const u32 slot = position % SLOTS, here = ring.at(slot);
      int left = int(min(params.batch - chunk * CHUNK, i64(CHUNK)));
      ring.wait_until_full(position);
      if constexpr (kWgmma) fence_copy_engine();
      ROLL for (int step = 0; step < CHUNK; step += 16 * kHalves) {
        stay_here(lane.index, left);  // or the places of all operands are kept from step to step, and spilled
        lane = Lane(lane.index);
        const u32 x = here + kX + (step * kXStride + along_k * 4 / kOfK * P) * kSize;
        const u32 g = here + (along_l * 4 * CHUNK + step) * (kGStride * kSize);
        if constexpr (kWgmma)
          add_step_of_warpgroups(of_first, of_second, x, uniform(g), left - step);
        else
          add_step(of_first, of_second, x, g, left - step);
      }
      // An arrival overtakes what has been asked of shared memory, if nothing has waited for what is made of it.
      if constexpr (kWgmma && kHalves == 1) fence_copy_engine();
      __syncwarp();
      ring.release(slot, lane.index);
      position += Pass::GROUPS;
    }
    Meet()();  // the loaders have written all
    store(of_first, of_second);
  }
  DEVICE void store(const SumsFirst& of_first, const SumsSecond& of_second) const {
    constexpr int kAll = K * RHO * L * (P + S);
    float* to = static_cast<float*>(params.sums) + i64(blockIdx.x) * kAll;
    // Row g or g + 8 of a tile: four of another, and which of these.
    const auto other = [](const Lane& at, int i, int half) { return i ^ half * 2 ^ at.g / 4; };
    add_up<4 * (P / 8), kConsumers, kMembers, kShared, float>(
        memory, [&](int n) -> const float(&)[4] { return of_first[n / (P / 8)][n % (P / 8)]; },
        [&](int n, int member, const float(&sum)[4]) {
          const Lane at(member % 32);
          const int i = n / (P / 8), p = n % (P / 8) * 8 + at.t * 2, u = first_unit + member / 32 % WK * 4 + i;
          UNROLL for (int half = 0; half < 2; ++half) {
            const int l = first_l + member / 32 / WK * 4 + other(at, i, half);
            float* here = to + Pass::OF_0 + (i64(u * 4 + at.g % 4) * L + l) * P + p;
            store_two<true, float>(here, sum[half * 2], sum[half * 2 + 1], true);
          }
        },
        Meet());
    add_up<4 * (S / 8), kConsumers, kMembers, kShared, float>(
        memory, [&](int n) -> const float(&)[4] { 
          return reinterpret_cast<const float(&)[4]>(of_second[n / (S / 8)][n % (S / 8) * 4]);
        },
        [&](int n, int member, const float(&sum)[4]) {
          const Lane at(member % 32);
          const int i = n / (S / 8), s = Order::s_at(n % (S / 8) * 8 + at.t * 2), l = first_l + member / 32 / WK * 4 + i;
          UNROLL for (int half = 0; half < 2; ++half) {
            const int unit = first_unit + member / 32 % WK * 4 + other(at, i, half);
            float* here = to + Pass::OF_1 + (i64(l) * S + s) * (K * RHO) + unit * 4 + at.g % 4;
            store_global(here, sum[half * 2]), store_global(here + Order::kRun * (K * RHO), sum[half * 2 + 1]);
          }
        },
        Meet());
  }
};
