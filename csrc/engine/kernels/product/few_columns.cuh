// A weight's columns times few samples: Y[p, n] = sum_q W[q, p] X[q, n], of states with samples side by side. A lane's pieces lie
// in the rows q that are its own, and the p's of a piece are rows of as many tiles, so that nothing of a weight is turned.
#pragma once
#include "finish/totals.cuh"
#include "kernels/product/few_tiles.cuh"
#include "kernels/product/few_words.cuh"

// Columns of a weight, [Q, P], 8 * kEach of them, times TILES times 8 samples, which lie side by side in states, [Q][samples]:
// WORDS of a lane in each of its rows, by accesses of LOAD bytes, a ROUNDS-th at once in registers. A lane's run of samples has
// one of each of as many tiles.
template <class Math, int P, int Q, int WORDS, int TILES, int WAYS, int ROUNDS, int LOAD, bool BY_SAMPLES>
struct FewColumns : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  using Total = typename Base::Total;
  static constexpr int kSize = Base::kSize, kPiece = Base::kPiece, kChunk = Base::kChunk, kStep = WAYS * kChunk;
  static constexpr int kEach = WORDS * 4 / kSize, kTall = kEach / 2, kColumns = 8 * kEach, kMost = 16 / TILES;
  static constexpr int kHeld = few_held(ceil_div(ceil_div(ceil_div(Q, kChunk), WAYS), ROUNDS), kMost), kRounds = ROUNDS;
  static constexpr int kAhead = few_ahead(kHeld, kMost), kRun = TILES < kPiece ? TILES : kPiece, kRuns = TILES / kRun;
  static constexpr bool kAllSamples = TILES * 8 >= kMostOfFew;
  using Sums = typename Base::Sums[kTall][TILES];
  using Totals = WarpTotals<Total, kColumns, TILES * 8, WAYS, BY_SAMPLES, 2 * kRun < kPiece ? kPiece : 2 * kRun>;
  const int way;
  const Lane lane;
  FewPiece<Math, LOAD, WORDS * 4> weight[kHeld][kPiece];
  FewPiece<Math, kRun * kSize, kRun * kSize> x[kAhead][kPiece][kRuns];
  const Element *rows, *states;
  const int samples;       // of a row of states
  int left, first, asked;  // columns from this lane's first one on; samples: to multiply, to ask for
  static constexpr int kWhole = Q / kStep;  // chunks that all rows are there of
  DEVICE FewColumns(int way, int samples) : way(way), samples(samples) {}
  DEVICE int from() const { return way * kChunk + lane.t * kPiece; }
  DEVICE void to_weight(const Element* group, int column) {
    rows = group + i64(from()) * P + column + lane.g * kEach, left = P - column - lane.g * kEach;
  }
  // Rows of q's that are there, of those of this lane's piece in a chunk
  DEVICE int there(int chunk) const { return Q - chunk * kStep - from(); }
  DEVICE void ask_weight(int i, int chunk) {
    UNROLL for (int r = 0; r < kPiece; ++r) {
      const Element* at = rows + i64(chunk * kStep + r) * P;
      if (chunk < kWhole)
        weight[i][r].template ask_some<false>(at, left);
      else
        weight[i][r].template ask<false>(at, r < there(chunk) ? left : 0);
    }
  }
  DEVICE void to_states(const Element* x, int sample) {
    states = x + (from() * samples + sample + lane.g * kRun), asked = sample + lane.g * kRun;
  }
  DEVICE void ask(int slot, int chunk) {
    UNROLL for (int r = 0; r < kPiece; ++r)
      UNROLL for (int v = 0; v < kRuns; ++v) {
        const Element* at = states + ((chunk * kStep + r) * samples + v * 8 * kRun);
        const bool here = v * 8 * kRun < samples - asked;
        if (chunk < kWhole)
          x[slot][r][v].template ask_some<true>(at, here ? kRun : 0);
        else
          x[slot][r][v].template ask<true>(at, here && r < there(chunk) ? kRun : 0);
      }
  }
  // The left operand of step s: rows of tile m are p's 2m and 2m + 1 of each lane's piece.
  DEVICE typename Base::A left_of(int i, int s, int m) const {
    if constexpr (kSize >= 4) {
      const auto &w = weight[i][s * 2], &v = weight[i][s * 2 + 1];
      return Base::left(w.word(m * 2), w.word(m * 2 + 1), v.word(m * 2), v.word(m * 2 + 1));
    } else {
      const u32 w0 = weight[i][s * 4].word(m), w1 = weight[i][s * 4 + 1].word(m);
      const u32 w2 = weight[i][s * 4 + 2].word(m), w3 = weight[i][s * 4 + 3].word(m);
      return Base::left(lower_halves(w0, w1), upper_halves(w0, w1), lower_halves(w2, w3), upper_halves(w2, w3));
    }
  }
  // The right one, of tile n
  DEVICE typename Base::B right_of(int slot, int s, int n) const {
    const int v = n / kRun, e = n % kRun;
    if constexpr (kSize >= 4) {
      return Base::right(x[slot][s * 2][v].word(e), x[slot][s * 2 + 1][v].word(e));
    } else {
      const u32 w0 = x[slot][s * 4][v].word(e / 2), w1 = x[slot][s * 4 + 1][v].word(e / 2);
      const u32 w2 = x[slot][s * 4 + 2][v].word(e / 2), w3 = x[slot][s * 4 + 3][v].word(e / 2);
      if (e % 2) return Base::right(upper_halves(w0, w1), upper_halves(w2, w3));
      return Base::right(lower_halves(w0, w1), lower_halves(w2, w3));
    }
  }
  DEVICE void at(int sample, int) { first = sample; }
  DEVICE bool is_behind(int n) const { return n > 0 && n % kRun == 0 && first + n * 8 >= samples; }
  DEVICE void multiply(Sums& y, int i, int slot) const {
    typename Base::A a[kTall][Base::kSteps];
    UNROLL for (int m = 0; m < kTall; ++m)
      UNROLL for (int s = 0; s < Base::kSteps; ++s) a[m][s] = left_of(i, s, m);
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (is_behind(n)) break;
      typename Base::B b[Base::kSteps];
      UNROLL for (int s = 0; s < Base::kSteps; ++s) b[s] = right_of(slot, s, n);
      UNROLL for (int m = 0; m < kTall; ++m) Base::multiply(y[m][n], a[m], b);
    }
  }
  // Of a lane's columns c of the products, 2t and 2t + 1, as many runs of samples
  DEVICE Total total(const Sums& y, int row, int v, int sample) const {
    return Base::total(y[row / 2][v * kRun + sample % kRun], row % 2 * 2 + sample / kRun);
  }
  DEVICE void put(const Totals& totals, const Sums& y) const {
    UNROLL for (int v = 0; v < kRuns; ++v) {
      if (is_behind(v * kRun)) break;
      const int row = lane.g * kEach, sample = v * 8 * kRun + lane.t * 2 * kRun;
      if constexpr (BY_SAMPLES) {
        UNROLL for (int i = 0; i < kEach; ++i) {
          Total sums[2 * kRun];
          UNROLL for (int e = 0; e < 2 * kRun; ++e) sums[e] = total(y, i, v, e);
          totals.put(way, row + i, sample, sums);
        }
      } else {
        UNROLL for (int e = 0; e < 2 * kRun; ++e) {
          Total sums[kEach];
          UNROLL for (int i = 0; i < kEach; ++i) sums[i] = total(y, i, v, e);
          totals.put(way, row, sample + e, sums);
        }
      }
    }
  }
};
