// The backward pass of two tied contractions, of the last two modes, in one: for each unit, X [p0, p1] and G [q0, q1] give
//
//     T = X B',  dA += G T',  dT = A' G,  dB += dT' X,  dX = dT B
//
// A group of warps takes unit after unit, ROWS times PARTS of them: 16 rows of p0 (or none, but some of dB's, if there are more
// of these), and a part of the columns of T, dT and dX.
// A warp's sums of T are the right operand of dA as they stand; dT passes through shared memory. Sums of dA and dB stay in
// registers for all units of a block, and what a unit adds is summed apart, as the matrix unit truncates what it adds to.
//
// Of 32 and 64 bits, sums are an operand with their k's turned: 2t and 2t + 1 for t and t + 4. So T is made with its columns
// turned, and of 32 bits all that is read by n or m takes k's in pairs: every stride may be an odd multiple of 16 bytes.
//
// Pass: Math, Element, P0, P1, Q0, Q1, UNITS_PER_SAMPLE; ROWS, PARTS, GROUPS, SLOTS, AT_ONCE (most tiles of 8 columns that a
//       warp makes at once); weight_a(), weight_b(), what they are multiplied by, normal_a() and normal_b(); FACTOR_A, FACTOR_B:
//       the parameter that these are, or -1 where they are products; GRAD (the parameter that G is); Source and Sink: void, or
//       Several, the tensors that X and dX are
#pragma once
#include "kernels/grouped.cuh"
#include "move/several.cuh"

template <class Pass> struct PairBackward : Grouped<Pass> {
  using Math = typename Pass::Math;
  using Base = Grouped<Pass>;
  using typename Base::A;
  using typename Base::B;
  using typename Base::Element;
  using typename Base::Real;
  using Base::in_order, Base::place, Base::stride, Base::kBlock, Base::kFirst, Base::kPairs, Base::kSize, Base::kStep, Base::kThreads;
  using Base::ROWS, Base::PARTS, Base::WARPS, Base::GROUPS, Base::SLOTS;
  using Base::params, Base::lane, Base::group, Base::part, Base::first, Base::units, Base::sync;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr bool kHolds = !Math::kRepairs;  // A, in registers: split, it would need too many

  // Columns of n as a part's pieces, of some tiles of 8 each, of which 2 make a step in 16 bits, or 16 rows.
  static constexpr int pieces(int n) { return ceil_div(ceil_div(n, 8 * PARTS), Pass::AT_ONCE); }
  static constexpr int tiles(int n) {
    return round_up(ceil_div(ceil_div(n, 8 * PARTS), pieces(n)), kStep == 16 || PARTS % 2 ? 2 : 1);
  }
  static constexpr int kPieces1 = pieces(P1), kTiles1 = tiles(P1), kPart1 = kPieces1 * kTiles1 * 8, kP1 = PARTS * kPart1;
  static constexpr int kPieces = pieces(Q1), kTiles = tiles(Q1), kPart = kPieces * kTiles * 8, kQ1 = PARTS * kPart;
  static constexpr int kP0 = ROWS * 16, kQ0 = round_up(Q0, 16), kTurns = ceil_div(kQ1 / 16, ROWS);  // of dB's rows, for a warp
  static_assert(kP0 >= P0);

  // Strides in shared memory: of X, B and dX; of G and dT; of A, which lies at the end of the groups' until registers have it.
  static constexpr int kX = stride(kP1), kG = stride(kQ1), kA = stride(kP0);
  static constexpr int kBytesX = kP0 * kX * kSize, kSlot = kBytesX + kQ0 * kG * kSize, kBytesT = kP0 * kG * kSize;
  static constexpr int kStaged = kSize == 2 ? kTiles1 * 8 + 8 : 0;  // stride of what leaves by whole pieces
  static constexpr int kGroup = SLOTS * kSlot + kBytesT + WARPS * 16 * kStaged * kSize;  // slots, dT, dX
  static constexpr int kBytesA = kQ0 * kA * kSize, kBytesB = kQ1 * kX * kSize, kGroups = GROUPS * kGroup;
  static constexpr int kShared = kBytesB + (kHolds ? kBytesA > kGroups ? kBytesA : kGroups : kBytesA + kGroups);
  static constexpr bool kAhead = !kHolds || kBytesA <= kGroup - kFirst * kSlot;  // they may be filled while A is there
  static constexpr int kSums = Q0 * P0 + Q1 * P1;  // of a block

  Lane turned;
  const int thread;
  const u32 b, memory, d_t;

  DEVICE PairBackward(const Params& given)
      : Base(given), turned(in_order(lane)), thread(threadIdx.x % kThreads), b(shared_address(shared_memory)),
        memory(b + kBytesB + (kHolds ? 0 : kBytesA) + group * kGroup), d_t(memory + SLOTS * kSlot) {}

  DEVICE void load(i64 unit, u32 slot) const {
    if (unit < units) {
      Base::template copy<P0, P1, kX>(source_of<typename Pass::Source, Element>(params) + unit * (P0 * P1), slot);
      const auto* grad_y = static_cast<const Element*>(params.weights[Pass::GRAD]);
      Base::template copy<Q0, Q1, kG>(grad_y + unit * (Q0 * Q1), slot + kBytesX);
    }
    commit_copies();
  }
  // A weight, padded with zeros: copied, or made, several elements at a time on their way.
  template <int FACTOR, int P> static constexpr bool kCopied = FACTOR >= 0 && P * kSize % 4 == 0;
  template <int FACTOR, int Q, int P, int HEIGHT, int WIDTH, int STRIDE, class At>
  DEVICE void load_weight(u32 to, At at) const {
    if constexpr (kCopied<FACTOR, P>) {
      Base::template copy<Q, P, STRIDE, kBlock>(static_cast<const Element*>(params.weights[FACTOR]), to);
      Base::template clear_padding<Q, P, HEIGHT, WIDTH, STRIDE, kBlock>(to);
    } else {
      make_weight<Element, Q, P, HEIGHT, WIDTH, kBlock, 16>(
          [&](int q, int p) { return narrow<Element>(Math::rounded(at(q, p))); },
          [&](int q, int p, Element x) { store_shared(to + (q * STRIDE + p) * kSize, x); });
    }
  }
  template <int FACTOR, int Q, int P, int STRIDE> DEVICE void round_weight(u32 at) const {
    if constexpr (Math::kRounds && kCopied<FACTOR, P>) Base::template round_copies<Q, P, STRIDE, kBlock>(at);
  }

  DEVICE u32 a() const { return b + kBytesB + (kHolds && kGroups > kBytesA ? kGroups - kBytesA : 0); }
  DEVICE auto columns_of_a() const {
    return Base::template by_m<kA>(a() + first * kSize + Math::template lane_a_by_m<kA, kPairs>(lane));
  }

  using SumsA = Real[kQ0 / 16][2][4];
  using SumsB = Real[kTurns][kPieces1][kTiles1][4];

  DEVICE void run() {
    const Real normal_a = Pass::normal_a(params), normal_b = Pass::normal_b(params);
    load_weight<Pass::FACTOR_B, Q1, P1, kQ1, kP1, kX>(
        b, [&](int q, int p) { return normal_b * Pass::weight_b(params, q, p); });
    load_weight<Pass::FACTOR_A, Q0, P0, kQ0, kP0, kA>(
        a(), [&](int q, int p) { return normal_a * Pass::weight_a(params, q, p); });
    commit_copies();
    const i64 step = i64(gridDim.x) * GROUPS;
    i64 unit = i64(group) * gridDim.x + blockIdx.x;
    const auto load_unit = [&](i64 unit, u32 slot) { load(unit, slot); };
    if constexpr (kAhead) Base::template begin<kSlot>(unit, step, memory, load_unit);
    wait_for_copies<(kAhead ? kFirst : 0)>();
    round_weight<Pass::FACTOR_B, Q1, P1, kX>(b), round_weight<Pass::FACTOR_A, Q0, P0, kA>(a());
    __syncthreads();
    A transposed[kHolds ? kQ0 / kStep : 1];
    if constexpr (kHolds) {
      UNROLL for (int s = 0; s < kQ0 / kStep; ++s) columns_of_a()(transposed[s], s);
      __syncthreads();
    }
    if constexpr (!kAhead) Base::template begin<kSlot>(unit, step, memory, load_unit);
    if (unit < units) clear_slots();
    const Real scale_a = 1 / normal_a, scale_b = 1 / normal_b;
    SumsA d_a = {};
    SumsB d_b = {};
    Base::template each_unit<kSlot, 1>(unit, step, memory, load_unit, [&](u32 x) {
      turned = in_order(lane);
      if constexpr (Math::kRounds)
        Base::template round_copies<P0, P1, kX>(x), Base::template round_copies<Q0, Q1, kG>(x + kBytesX);
    }, [&](i64 unit, u32 x) {
      forward(d_a, x, x + kBytesX, scale_b);
      back(transposed, x + kBytesX, scale_a);
      sync();
      second(d_b, x);
      store(sink_of<typename Pass::Sink, Element>(params) + unit * (P0 * P1), scale_b);
    });
    store(d_a, d_b);
  }

  DEVICE void clear_slots() const {
    UNROLL for (int s = 0; s < SLOTS; ++s) {
      Base::template clear_padding<P0, P1, kP0, kP1, kX>(memory + s * kSlot);
      Base::template clear_padding<Q0, Q1, kQ0, kQ1, kG>(memory + s * kSlot + kBytesX);
    }
  }

  // T, and what it adds to dA
  DEVICE void forward(SumsA& d_a, u32 x, u32 g, Real scale) const {
    const auto rows = Base::template by_rows<kX>(x + first * kX * kSize + Math::template lane_row_a<kX>(lane));
    ROLL for (int piece = 0; piece < kPieces; ++piece) {
      const int column = part * kPart + piece * kTiles * 8;
      Real t[kTiles][4] = {};
      const auto columns = Base::template by_k<kX>(b + column * kX * kSize + Math::template lane_row_b<kX>(turned));
      Base::template multiply<kTiles, kP1 / kStep>(t, rows, columns);
      B right[kTiles * 8 / kStep][2];
      UNROLL for (int n = 0; n < kTiles; ++n)
        UNROLL for (int i = 0; i < 4; ++i)
          t[n][i] = kQ1 == Q1 || column + n * 8 + place(lane.t * 2 + i % 2) < Q1 ? t[n][i] * scale : 0;
      UNROLL for (int s = 0; s < kTiles * 8 / kStep; ++s)
        UNROLL for (int i = 0; i < 2; ++i) Math::as_b(right[s][i], &t[s * kStep / 8], i);
      UNROLL for (int m = 0; m < kQ0 / 16; ++m) {
        Base::template accumulate<2, kTiles * 8 / kStep, kTiles>(
            d_a[m], Base::template by_rows<kG>(g + (m * 16 * kG + column) * kSize + Math::template lane_row_a<kG>(lane)),
            [&](B(&some)[2], int, int s) { some[0] = right[s][0], some[1] = right[s][1]; });
      }
    }
  }

  // dT, to shared memory
  DEVICE void back(const A (&transposed)[kHolds ? kQ0 / kStep : 1], u32 g, Real scale) const {
    ROLL for (int piece = 0; piece < kPieces; ++piece) {
      const int column = part * kPart + piece * kTiles * 8;
      Real sums[kTiles][4] = {};
      const auto right = Base::template by_n<kG>(g + column * kSize + Math::template lane_b_by_n<kG, kPairs>(lane), lane.index);
      if constexpr (kHolds)
        Base::template multiply<kTiles, kQ0 / kStep, kQ0>(sums, [&](A& a, int s) { a = transposed[s]; }, right);
      else
        Base::template multiply<kTiles, kQ0 / kStep>(sums, columns_of_a(), right);
      UNROLL for (int n = 0; n < kTiles; ++n)
        UNROLL for (int i = 0; i < 2; ++i) {
          const int row = first + lane.g + i * 8, c = column + n * 8, j = lane.t * 2;
          const auto at = [&](int k) {
            const bool there = (kP0 == P0 || row < P0) && (kQ1 == Q1 || c + j + k < Q1);
            return there ? Math::rounded(sums[n][i * 2 + k] * scale) : Real(0);
          };
          const u32 to = d_t + (row * kG + c) * kSize;
          if constexpr (kPairs)
            store_shared(to + place(j) * kSize, at(0)), store_shared(to + place(j + 1) * kSize, at(1));
          else
            store_shared(to + j * kSize, Pair<Element>(at(0), at(1)));
        }
    }
  }

  // What dT adds to dB
  DEVICE void second(SumsB& d_b, u32 x) const {
    UNROLL for (int k = 0; k < kTurns; ++k) {
      const int m = k * 16 * ROWS + first;
      if (kQ1 / 16 % ROWS && m >= kQ1) break;
      const Lane by = kPairs ? turned : lane;
      const auto left = Base::template by_m<kG>(d_t + m * kSize + Math::template lane_a_by_m<kG, kPairs>(by));
      UNROLL for (int piece = 0; piece < kPieces1; ++piece) {
        const int column = part * kPart1 + piece * kTiles1 * 8;
        const u32 right = x + column * kSize + Math::template lane_b_by_n<kX, kPairs>(lane);
        Base::template accumulate<kTiles1, kP0 / kStep>(d_b[k][piece], left, Base::template by_n<kX>(right, lane.index));
      }
    }
  }

  // dX
  template <class To> DEVICE void store(const To& to, Real scale) const {
    const auto left = Base::template by_rows<kG>(d_t + first * kG * kSize + Math::template lane_row_a<kG>(lane));
    ROLL for (int piece = 0; piece < kPieces1; ++piece) {
      const int column = part * kPart1 + piece * kTiles1 * 8;
      Real sums[kTiles1][4] = {};
      const u32 right = b + column * kSize + Math::template lane_b_by_n<kX, kPairs>(lane);
      Base::template multiply<kTiles1, kQ1 / kStep>(sums, left, Base::template by_n<kX>(right, lane.index));
      UNROLL for (auto& four : sums)
        UNROLL for (Real& sum : four) sum *= scale;
      Base::template store_tile<P0, P1, P1, kP0 == P0 && kP1 == P1>(
          sums, first, column, to, d_t + kBytesT + thread / 32 * 16 * kStaged * kSize, lane);
    }
  }
  // All groups' sums, of dA all parts' as well, to where this block's belong.
  DEVICE void store(const SumsA& d_a, const SumsB& d_b) const {
    constexpr bool kPaired = P0 % 2 == 0 && P1 % 2 == 0;
    Real* to = static_cast<Real*>(params.sums) + i64(blockIdx.x) * kSums;
    add_up<kQ0 / 16 * 2, kBlock, ROWS * 32, kShared, Real>(
        b, [&](int n) -> const Real(&)[4] { return d_a[n / 2][n % 2]; },
        [&](int n, int index, const Real(&sum)[4]) {
          const Lane at(index % 32);
          const int p = index / 32 * 16 + n % 2 * 8 + at.t * 2;
          UNROLL for (int i = 0; i < 2; ++i) {
            const int q = n / 2 * 16 + at.g + i * 8;
            if (q < Q0 && p < P0) store_two<kPaired>(to + q * P0 + p, sum[i * 2], sum[i * 2 + 1], p + 1 < P0);
          }
        });
    to += Q0 * P0;
    constexpr int kTilesB = kPart1 / 8;
    add_up<kTurns * kTilesB, kBlock, kThreads, kShared, Real>(
        b, [&](int n) -> const Real(&)[4] { return d_b[n / kTilesB][n % kTilesB / kTiles1][n % kTiles1]; },
        [&](int n, int index, const Real(&sum)[4]) {
          const Lane at(index % 32);
          const int warp = index / 32, p = warp / ROWS * kPart1 + n % kTilesB * 8 + at.t * 2;
          UNROLL for (int i = 0; i < 2; ++i) {
            const int q = (n / kTilesB * ROWS + warp % ROWS) * 16 + at.g + i * 8;
            if (q < Q1 && p < P1) store_two<kPaired>(to + q * P1 + p, sum[i * 2], sum[i * 2 + 1], p + 1 < P1);
          }
        });
  }
};
