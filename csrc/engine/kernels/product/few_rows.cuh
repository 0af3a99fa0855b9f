// A weight's rows times few samples: Y[q, n] = sum_p W[q, p] X[p, n], of states with p's side by side.
#pragma once
#include "finish/totals.cuh"
#include "kernels/product/few_tiles.cuh"
#include "kernels/product/few_words.cuh"

// HEIGHT times 16 rows of a weight, [.., P], times TILES times 8 samples, X_SAMPLE apart; one of WAYS warps has every WAYS-th
// chunk of p's, a ROUNDS-th of these at once in registers. Rows come by accesses of LOAD bytes.
template <class Math, int P, int HEIGHT, int TILES, int WAYS, int ROUNDS, int LOAD, i64 X_SAMPLE, bool BY_SAMPLES>
struct FewRows : FewMath<Math> {
  using Base = FewMath<Math>;
  using Element = typename Base::Element;
  static constexpr int kPiece = Base::kPiece, kChunk = Base::kChunk, kStep = WAYS * kChunk, kMost = (LOAD == 2 ? 8 : 16) / TILES;
  static constexpr int kHeld = few_held(ceil_div(ceil_div(ceil_div(P, kChunk), WAYS), ROUNDS), kMost), kRounds = ROUNDS;
  static constexpr int kAhead = few_ahead(kHeld, kMost);
  static constexpr bool kAllSamples = TILES * 8 >= kMostOfFew;
  using Sums = typename Base::Sums[HEIGHT][TILES];
  using Totals = WarpTotals<typename Base::Total, HEIGHT * 16, TILES * 8, WAYS, BY_SAMPLES, 0>;
  const int way;
  const Lane lane;
  FewPiece<Math, LOAD> weight[kHeld][HEIGHT * 2], x[kAhead][TILES];
  const Element *rows[HEIGHT * 2], *states;
  int left, present, asked;  // p's from this lane's first chunk on; samples: to multiply, to ask for
  bool here;
  static constexpr int kWhole = P / kStep;  // chunks that all of a row's p's are there of
  DEVICE FewRows(int way) : way(way), left(P - from()) {}
  DEVICE int from() const { return way * kChunk + lane.t * kPiece; }
  // row(i) is where one of HEIGHT times 16 begins; nothing is read where the tile is not `there`.
  template <class Row> DEVICE void to_weight(const Row& row, bool there = true) {
    here = there;
    UNROLL for (int h = 0; h < HEIGHT * 2; ++h) rows[h] = row(h * 8 + lane.g) + from();
  }
  DEVICE void ask_weight(int i, int chunk) {
    UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
      const Element* at = rows[h] + chunk * kStep;
      if (chunk < kWhole)
        weight[i][h].template ask_some<false>(at, here ? kPiece : 0);
      else
        weight[i][h].template ask<false>(at, here ? left - chunk * kStep : 0);
    }
  }
  // The first of so many samples
  DEVICE void to_states(const Element* x, int samples) { states = x + (lane.g * X_SAMPLE + from()), asked = samples - lane.g; }
  DEVICE void ask(int slot, int chunk) {
    const Element* at = states + chunk * kStep;
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (chunk < kWhole)
        x[slot][n].template ask_some<true>(at + n * 8 * X_SAMPLE, n * 8 < asked ? kPiece : 0);
      else
        x[slot][n].template ask<true>(at + n * 8 * X_SAMPLE, n * 8 < asked ? left - chunk * kStep : 0);
    }
  }
  DEVICE void at(int first, int batch) { present = batch - first; }
  DEVICE bool is_behind(int n) const { return n > 0 && n % 2 == 0 && n * 8 >= present; }
  DEVICE void multiply(Sums& y, int i, int slot) const {
    typename Base::A a[HEIGHT][Base::kSteps];
    UNROLL for (int h = 0; h < HEIGHT; ++h) {
      const auto &u = weight[i][h * 2], &l = weight[i][h * 2 + 1];
      UNROLL for (int s = 0; s < Base::kSteps; ++s)
        a[h][s] = Base::left(u.word(s * 2), l.word(s * 2), u.word(s * 2 + 1), l.word(s * 2 + 1));
    }
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (is_behind(n)) break;
      typename Base::B b[Base::kSteps];
      UNROLL for (int s = 0; s < Base::kSteps; ++s) b[s] = Base::right(x[slot][n].word(s * 2), x[slot][n].word(s * 2 + 1));
      UNROLL for (int h = 0; h < HEIGHT; ++h) Base::multiply(y[h][n], a[h], b);
    }
  }
  DEVICE void put(const Totals& totals, const Sums& y) const {
    UNROLL for (int n = 0; n < TILES; ++n) {
      if (is_behind(n)) break;
      UNROLL for (int h = 0; h < HEIGHT * 2; ++h) {
        const int row = h * 8 + lane.g, sample = n * 8 + lane.t * 2;
        const typename Base::Total sums[2] = {Base::total(y[h / 2][n], h % 2 * 2), Base::total(y[h / 2][n], h % 2 * 2 + 1)};
        if constexpr (BY_SAMPLES) {
          totals.put(way, row, sample, sums);
        } else {
          totals.template put<1>(way, row, sample, {sums[0]});
          totals.template put<1>(way, row, sample + 1, {sums[1]});
        }
      }
    }
  }
};
