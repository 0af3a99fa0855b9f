// The backward pass of one tied contraction: dW += G X' and dX = W' G, at one visit of X and G.
//
// A unit is, BY_COLUMNS, X [p, SPAN] and G [q, SPAN] of a state [outer, p, inner]: SPAN columns of inner, whose rows are INNER
// apart; or else SPAN rows of [outer, p], X [SPAN, p] and G [SPAN, q], where dW += G' X and dX = G W. A group of warps takes unit
// after unit, ROWS times PARTS of them: 16 rows of dX each, and a part of its columns. Sums of dW stay in registers for all
// units of a block, and what a unit adds is summed apart, as the matrix unit truncates what it adds to.
//
// Pass: Math, Element, P, Q, BY_COLUMNS, SPAN, INNER, UNITS_PER_SAMPLE; ROWS, PARTS, GROUPS, SLOTS, AT_ONCE (most tiles of 8
//       columns that a warp makes at once), GRAD (the parameter that G is)
#pragma once
#include "kernels/grouped.cuh"

template <class Pass> struct SingleBackward : Grouped<Pass> {
  using Math = typename Pass::Math;
  using Base = Grouped<Pass>;
  using typename Base::A;
  using typename Base::B;
  using typename Base::Element;
  using typename Base::Real;
  using Base::stride, Base::kBlock, Base::kPairs, Base::kSize, Base::kStep, Base::kThreads;
  using Base::ROWS, Base::PARTS, Base::WARPS, Base::GROUPS, Base::SLOTS;
  using Base::params, Base::lane, Base::group, Base::part, Base::first, Base::units;
  static constexpr int P = Pass::P, Q = Pass::Q, SPAN = Pass::SPAN, INNER = Pass::INNER;
  static constexpr bool kByColumns = Pass::BY_COLUMNS;
  static constexpr bool kHolds = kByColumns && !Math::kRepairs;  // the weight, in registers: split, it would need too many

  // Columns of dX as a part's pieces, of some tiles of 8 each, of which 2 make a step in 16 bits.
  static constexpr int kWidth = kByColumns ? SPAN : P, kHeight = kByColumns ? P : SPAN;
  static constexpr int kPieces = ceil_div(ceil_div(kWidth, 8 * PARTS), Pass::AT_ONCE);
  static constexpr int kTiles = round_up(ceil_div(ceil_div(kWidth, 8 * PARTS), kPieces), kStep == 16 ? 2 : 1);
  static constexpr int kPart = kPieces * kTiles * 8, kColumns = PARTS * kPart, kRows = ROWS * 16;
  static constexpr int kQ = round_up(Q, 16), kTurns = ceil_div(kQ / 16, ROWS);  // of dW's rows, for a warp
  static_assert(kRows >= kHeight && (kByColumns ? kColumns == SPAN && INNER % SPAN == 0 : kRows == SPAN));

  // Shared memory: the weight, [q, p]; of each group slots with X and G, and what dX leaves through.
  static constexpr int kX = stride(kColumns), kG = kByColumns ? kX : stride(kQ), kW = stride(kByColumns ? kRows : kColumns);
  static constexpr int kBytesX = kRows * kX * kSize, kSlot = kBytesX + (kByColumns ? kQ : kRows) * kG * kSize;
  static constexpr int kStaged = kSize == 2 ? 16 * (kTiles * 8 + 8) * kSize : 0;  // bytes of a warp
  static constexpr int kGroup = SLOTS * kSlot + WARPS * kStaged, kWeight = kQ * kW * kSize;

  const u32 weight, memory;

  DEVICE SingleBackward(const Params& given)
      : Base(given), weight(shared_address(shared_memory)), memory(weight + kWeight + group * kGroup) {}

  // Where a unit begins in a state whose contracted mode has n's.
  static DEVICE i64 place_of(i64 unit, int n) {
    if constexpr (kByColumns) return unit / (INNER / SPAN) * (i64(n) * INNER) + unit % (INNER / SPAN) * SPAN;
    return unit * (i64(n) * SPAN);
  }
  DEVICE void load(i64 unit, u32 slot) const {
    if (unit < units) {
      const Element* x = static_cast<const Element*>(params.x) + place_of(unit, P);
      const Element* g = static_cast<const Element*>(params.weights[Pass::GRAD]) + place_of(unit, Q);
      if constexpr (kByColumns) {
        Base::template copy<P, SPAN, kX, kThreads, INNER>(x, slot);
        Base::template copy<Q, SPAN, kG, kThreads, INNER>(g, slot + kBytesX);
      } else {
        Base::template copy<SPAN, P, kX>(x, slot);
        Base::template copy<SPAN, Q, kG>(g, slot + kBytesX);
      }
    }
    commit_copies();
  }
  DEVICE void clear_slots() const {
    UNROLL for (int s = 0; s < SLOTS; ++s) {
      const u32 x = memory + s * kSlot, g = x + kBytesX;
      if constexpr (kByColumns) {
        Base::template clear_padding<P, SPAN, kRows, kColumns, kX>(x), Base::template clear_padding<Q, SPAN, kQ, kColumns, kG>(g);
      } else {
        Base::template clear_padding<SPAN, P, kRows, kColumns, kX>(x), Base::template clear_padding<SPAN, Q, kRows, kQ, kG>(g);
      }
    }
  }
  DEVICE void round_slot(u32 x) const {
    if constexpr (!Math::kRounds) return;
    if constexpr (kByColumns)
      Base::template round_copies<P, SPAN, kX>(x), Base::template round_copies<Q, SPAN, kG>(x + kBytesX);
    else
      Base::template round_copies<SPAN, P, kX>(x), Base::template round_copies<SPAN, Q, kG>(x + kBytesX);
  }
  // By rows, of 32 bits: G is read by rows, so that its k's come in order; the weight's lie so that pairs of them do, too.
  static constexpr DEVICE int row_of(int q) { return kPairs && !kByColumns ? q / 8 * 8 + q % 4 * 2 + q / 4 % 2 : q; }
  DEVICE void load_weight() const {
    constexpr int kWide = kByColumns ? kRows : kColumns;
    const Element* from = static_cast<const Element*>(params.weights[0]);
    make_weight<Element, Q, P, kQ, kWide, kBlock, 8>(
        [&](int q, int p) { return narrow<Element>(Math::rounded(widen(from[q * P + p]))); },
        [&](int q, int p, Element x) { store_shared(weight + (row_of(q) * kW + p) * kSize, x); });
  }

  using Held = A[kHolds ? kQ / kStep : 1];
  using Sums = Real[kByColumns ? kQ / 16 : kTurns * kPieces][kByColumns ? 2 : kTiles][4];

  DEVICE void run() {
    const i64 step = i64(gridDim.x) * GROUPS;
    i64 unit = i64(group) * gridDim.x + blockIdx.x;
    const auto load_unit = [&](i64 unit, u32 slot) { load(unit, slot); };
    Base::template begin<kSlot>(unit, step, memory, load_unit);
    load_weight();
    if (unit < units) clear_slots();
    __syncthreads();
    Held held;
    if constexpr (kHolds)
      UNROLL for (int s = 0; s < kQ / kStep; ++s) columns_of_weight()(held[s], s);
    Sums sums = {};
    Base::template each_unit<kSlot, 0>(unit, step, memory, load_unit, [&](u32 x) { round_slot(x); }, [&](i64 unit, u32 x) {
      add(sums, x, x + kBytesX);
      back(held, x + kBytesX, static_cast<Element*>(params.y) + place_of(unit, P));
    });
    store(sums);
  }

  DEVICE auto columns_of_weight() const {
    return Base::template by_m<kW>(weight + first * kSize + Math::template lane_a_by_m<kW, kPairs>(lane));
  }

  // By columns: all of dW's rows, and 16 of its columns; or else some of its rows.
  DEVICE void add(Sums& sums, u32 x, u32 g) const {
    if constexpr (kByColumns) {
      ROLL for (int piece = 0; piece < kPieces; ++piece) {
        const int column = part * kPart + piece * kTiles * 8;
        constexpr int kSteps = kTiles * 8 / kStep;
        B right[kSteps][2];
        const auto columns = Base::template by_k<kX>(x + (first * kX + column) * kSize + Math::template lane_row_b<kX>(lane));
        UNROLL for (int s = 0; s < kSteps; ++s) columns(right[s], 0, s);
        UNROLL for (int m = 0; m < kQ / 16; ++m) {
          const u32 left = g + (m * 16 * kG + column) * kSize + Math::template lane_row_a<kG>(lane);
          Base::template accumulate<2, kSteps, kSteps>(
              sums[m], Base::template by_rows<kG>(left),
              [&](B(&some)[2], int, int s) { some[0] = right[s][0], some[1] = right[s][1]; });
        }
      }
    } else {
      UNROLL for (int k = 0; k < kTurns; ++k) {
        const int m = k * 16 * ROWS + first;
        if (kQ / 16 % ROWS && m >= kQ) break;
        const auto left = Base::template by_m<kG>(g + m * kSize + Math::template lane_a_by_m<kG, kPairs>(lane));
        UNROLL for (int piece = 0; piece < kPieces; ++piece) {
          const int column = part * kPart + piece * kTiles * 8;
          const u32 right = x + column * kSize + Math::template lane_b_by_n<kX, kPairs>(lane);
          Base::template accumulate<kTiles, kRows / kStep>(
              sums[k * kPieces + piece], left, Base::template by_n<kX>(right, lane.index));
        }
      }
    }
  }

  // dX
  DEVICE void back(const Held& held, u32 g, Element* to) const {
    const u32 staged = memory + SLOTS * kSlot + threadIdx.x % kThreads / 32 * kStaged;
    ROLL for (int piece = 0; piece < kPieces; ++piece) {
      const int column = part * kPart + piece * kTiles * 8;
      Real y[kTiles][4] = {};
      const u32 from = (kByColumns ? g : weight) + column * kSize + Math::template lane_b_by_n<kByColumns ? kG : kW, kPairs>(lane);
      const auto right = Base::template by_n<kByColumns ? kG : kW>(from, lane.index);
      if constexpr (kHolds) {
        Base::template multiply<kTiles, kQ / kStep, kQ>(y, [&](A& a, int s) { a = held[s]; }, right);
      } else if constexpr (kByColumns) {
        Base::template multiply<kTiles, kQ / kStep>(y, columns_of_weight(), right);
      } else {
        const auto left = Base::template by_rows<kG>(g + first * kG * kSize + Math::template lane_row_a<kG>(lane));
        Base::template multiply<kTiles, kQ / kStep>(y, left, right);
      }
      constexpr bool kWhole = kHeight == kRows && kWidth == kColumns;
      Base::template store_tile<kHeight, kWidth, kByColumns ? INNER : P, kWhole>(y, first, column, to, staged, lane);
    }
  }

  // All groups' sums, and by columns all parts', to where this block's belong.
  DEVICE void store(const Sums& sums) const {
    constexpr int kMembers = kByColumns ? ROWS * 32 : kThreads, kEach = kByColumns ? 2 : kPart / 8;
    constexpr int kShared = kWeight + GROUPS * kGroup;
    Real* to = static_cast<Real*>(params.sums) + i64(blockIdx.x) * (Q * P);
    add_up<sizeof(Sums) / sizeof(Real) / 4, kBlock, kMembers, kShared, Real>(
        weight,
        [&](int n) -> const Real(&)[4] {
          return kByColumns ? sums[n / 2][n % 2] : sums[n / kEach * kPieces + n % kEach / kTiles][n % kTiles];
        },
        [&](int n, int index, const Real(&sum)[4]) {
          const Lane at(index % 32);
          const int warp = index / 32;
          const int row = kByColumns ? n / 2 * 16 : (n / kEach * ROWS + warp % ROWS) * 16;
          const int p = (kByColumns ? warp * 16 + n % 2 * 8 : warp / ROWS * kPart + n % kEach * 8) + at.t * 2;
          UNROLL for (int i = 0; i < 2; ++i) {
            const int q = row + at.g + i * 8;
            if (q < Q && p < P) store_two<P % 2 == 0>(to + q * P + p, sum[i * 2], sum[i * 2 + 1], p + 1 < P);
          }
        });
  }
};
