// Contractions of a state whose groups have weights of their own, as a Monarch matrix' have: by rows, each of a unit's OUTER rows has
// one, by columns, each of what lies behind the mode in it. A warp's tile is chain.cuh's, and what it has of the state is one operand
// of the matrix unit, as if all of it had one weight. It is multiplied by the weight of each of its groups, one after another, and
// of those products only the group's own rows, or its own column, count:
//     by rows:    state [16, p] -[weight of row r]-> row r of 8 q's         by columns: weight of column c [16, p], state [p, 8] -> column c
// So a weight is read once for a tile, states lie as they do for tied weights, and so do sums.
#pragma once
#include "kernels/chain.cuh"

// S, the stage by tiles. SHARE groups of those of a tile, of its 16 rows or 8 columns, are a warp's, all or a part.
// Weights lie one behind another, without padding between them: of what is multiplied beyond the last q nothing is kept.
// EVENLY: q's of a row lie in the next state at one distance from each other.
template <class S, int OUTER_, int SHARE_, bool EVENLY_> struct Untied : S {
  static constexpr bool TIED = false, EVENLY = EVENLY_;
  static constexpr int OUTER = OUTER_, SHARE = SHARE_;
  static constexpr int MOST = S::BY_ROWS ? 16 : 8, THERE = S::BY_ROWS ? OUTER : round_up(S::I, 2);
  static constexpr int OF_TILE = THERE < MOST ? THERE : MOST, PARTS = ceil_div(OF_TILE, SHARE);
  static constexpr int TILES = S::TILES * PARTS, W_ROWS = (OUTER * S::I - 1) * S::Q + S::W_ROWS;
  static_assert(S::BY_ROWS ? S::MT == 1 : S::NT == 1 && SHARE % 2 == 0);
  // Whether a row of a tile, or a column of eight and its neighbour, is of a part
  static constexpr DEVICE bool has(int part, int place) { return PARTS == 1 || place % OF_TILE / SHARE == part; }
  static constexpr DEVICE int group(int row, int i) { return row % OUTER * S::I + i; }
};

template <class Base_> struct UntiedProducts : Base_ {
  using Base = Base_;
  using typename Base::Element, typename Base::Math;
  using Base::kSize, Base::lane;
  template <class S> using Sums = typename Base::template Sums<S>;
  using Base::Base;

  // Groups whose sums a lane has at once: products of each wait for one another, those of several do not
  template <class S> static constexpr int kBeside = S::BY_ROWS ? S::NT : S::MT;  // sums of a group
  template <class S> static constexpr int kFit = (kSize == 8 ? 2 : Math::kFlush > 0 ? 4 : 8) / kBeside<S>;
  template <class S> static constexpr int kSome = kFit<S> < 1 ? 1 : kFit<S> < S::SHARE ? kFit<S> : S::SHARE;
  template <class S> using Several = Sum<Element>[kSome<S>][kBeside<S>][4];

  // A part of a warp tile's sums
  template <class S> DEVICE void multiply_untied(Sums<S>& y, int tile, int part, u32 state, u32 weight) const {
    const typename Base::Corner corner = Base::template corner<S>(tile);
    const int row = corner.row, o = corner.o, i = corner.i;
    if constexpr (S::BY_ROWS) {
      const u32 x = state + row * S::In::ROW * kSize + Math::template lane_row_a<S::In::ROW>(lane);
      const u32 w = weight + i * S::W_STRIDE * kSize + Math::template lane_row_b<S::W_STRIDE>(lane);
      const int first = row % S::OUTER;
      by_groups<S>(part, x, [&](int c) { return w + group_of_row<S>(first, c) * S::Q * S::W_STRIDE * kSize; },
                   [&](int, int c, const auto& sums) {
                     UNROLL for (int h = 0; h < 2; ++h) {
                       const bool mine = (lane.g + h * 8) % S::OF_TILE == c;
                       UNROLL for (int n = 0; n < S::NT; ++n)
                         UNROLL for (int e = h * 2; e < h * 2 + 2; ++e) y[0][n][e] = mine ? sums[n][e] : y[0][n][e];
                     }
                   });
    } else {
      const u32 x = state + (o * S::In::ROW + i) * kSize + Math::template lane_b_by_n<S::In::STEP>(lane);
      const u32 w = weight + row * S::W_STRIDE * kSize + Math::template lane_row_a<S::W_STRIDE>(lane);
      constexpr bool kAll = S::I % (S::I < 8 ? S::SHARE : 8) == 0;
      const int first = S::group(o, i), left = S::I - i;
      by_groups<S>(part, x, [&](int c) { return w + (first + (kAll || c < left ? c : left - 1)) * S::Q * S::W_STRIDE * kSize; },
                   [&](int e, int c, const auto& sums) {
                     const bool mine = lane.t == c / 2 && (kAll || c < left);
                     UNROLL for (int m = 0; m < S::MT; ++m)
                       UNROLL for (int k = e; k < 4; k += 2) y[m][0][k] = mine ? sums[m][k] : y[m][0][k];
                   });
    }
  }

private:
  // Of the c-th of a tile's rows, the first of which has the weight `first`, and which may go on with the next unit's
  template <class S> DEVICE static int group_of_row(int first, int c) {
    constexpr bool kGoesOn = S::M > 16 && 16 % S::OUTER && S::OUTER % 16;
    if (S::OF_TILE % S::SHARE && c >= S::OF_TILE) c = S::OF_TILE - 1;
    return kGoesOn && first + c >= S::OUTER ? first + c - S::OUTER : first + c;
  }

  // take(0 for an even one or 1, c, its sums) of each of a part's groups, whose weight is at weight_of(c)
  template <class S, class Weight, class Take>
  DEVICE void by_groups(int part, u32 x, const Weight& weight_of, const Take& take) const {
    static_assert(S::SHARE % kSome<S> == 0);
    ROLL for (int some = 0; some < S::SHARE; some += kSome<S>) {
      u32 w[kSome<S>];
      UNROLL for (int j = 0; j < kSome<S>; ++j) w[j] = weight_of(part * S::SHARE + some + j);
      Several<S> sums = {};
      add_all<S>(sums, x, w);
      UNROLL for (int j = 0; j < kSome<S>; ++j) take((some + j) % 2, part * S::SHARE + some + j, sums[j]);
    }
  }
  template <class S> DEVICE void add_all(Several<S>& y, u32 x, const u32 (&w)[kSome<S>]) const {
    constexpr int kSteps = ceil_div(S::PP, Math::kStep), kWhole = S::PP / Math::kStep;
    if constexpr (Math::kFlush > 0) {
      UNROLL_BY(2) for (int k = 0; k < kSteps; k += Math::kFlush) {
        Several<S> part = {};
        UNROLL for (int j = 0; j < Math::kFlush; ++j)
          if (kSteps % Math::kFlush == 0 || k + j < kSteps) add_step<S, Math::kStep>(part, x, w, (k + j) * Math::kStep);
        add_sums(y, part);
      }
    } else {
      UNROLL_BY(kSteps <= 8 ? kSteps : 4) for (int k = 0; k < kWhole; ++k) add_step<S, Math::kStep>(y, x, w, k * Math::kStep);
      if constexpr (kWhole < kSteps) add_step<S, 8>(y, x, w, kWhole * Math::kStep);
    }
  }
  template <class S, int K> DEVICE void add_step(Several<S>& y, u32 x, const u32 (&w)[kSome<S>], int k) const {
    if constexpr (S::BY_ROWS) {
      typename Math::A a;
      Math::template load_row_a<K, S::In::ROW, false>(a, x + k * kSize);
      UNROLL for (int j = 0; j < kSome<S>; ++j) {
        typename Math::B b[S::NT];
        Math::template load_row_b<K, S::W_STRIDE, S::NT, false>(b, w[j] + k * kSize);
        UNROLL for (int n = 0; n < S::NT; ++n) Math::template multiply<K>(y[j][n], a, b[n]);
      }
    } else {
      typename Math::B b[1];
      const u32 columns[] = {x + k * S::In::STEP * kSize};
      Math::template load_b_by_n<K, S::In::STEP, 1, 0, false>(b, columns, lane.index);
      UNROLL for (int j = 0; j < kSome<S>; ++j)
        UNROLL for (int m = 0; m < S::MT; ++m) {
          typename Math::A a;
          Math::template load_row_a<K, S::W_STRIDE, false>(a, w[j] + (m * 16 * S::W_STRIDE + k) * kSize);
          Math::template multiply<K>(y[j][m], a, b[0]);
        }
    }
  }
};
