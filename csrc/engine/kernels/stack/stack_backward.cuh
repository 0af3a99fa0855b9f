// All gradients of dense layers one behind another at one visit, of any widths: from x and grad_y of a tile of samples,
//
//     S[0] = x,  S[i+1] = act(Z[i]),  Z[i] = W[i] S[i] + b[i];     G[n] = grad_y act'(Z[n-1]),
//     dW[i] += G[i+1] S[i]',  db[i] += G[i+1] 1',  G[i] = (W[i]' G[i+1]) act'(Z[i-1]),  grad_x = W[0]' G[1]
//
// It is a ChainBackward (kernels/chain_backward.cuh) whose stages are by rows, each with a bias and an activation behind it. States
// lie in rows padded to a multiple of 8, with a column of ones behind the features that a layer with a bias reads: so a weight's
// gradient has that of the bias as one more column. G[i] takes the place of S[i], whose numbers tell the slopes of most
// activations as they are overwritten; of others slopes are kept in places of their own. A weight lies in shared memory once: both
// ways read it.
//
// Pass:  what ChainBackward's has, but walk(), which calls forward(), steepen(), learn() and back(), and store_sums(), which calls
//        store_layer(); ROW_X, ROW_G (elements of a row of x's and of grad_y's slots), InputEnd, OutputEnd (what they hold);
//        prepare_states(), which calls pad() for what lies between. kWeightBytes has room for the columns that a tile reads beyond the
//        last weight; biases lie behind all groups.
// End, of a layer: what chain.cuh's has, and of the state that it makes ONES, whether a column of ones is behind its features;
//        KEEPS, whether slopes are kept; Slope (of what is activated), Gradient (that times the gradient of the result), Back (the
//        same from the result).
#pragma once
#include "kernels/chain_backward.cuh"

template <class Pass> struct StackBackward : ChainBackward<Pass> {
  using Base = ChainBackward<Pass>;
  using typename Base::Element;
  using Base::group, Base::kBlock, Base::kFlush, Base::kSize, Base::kSplit, Base::kStep, Base::kThreads, Base::lane, Base::params,
      Base::sync, Base::thread, Base::units, Base::warp, Base::weights;
  using Math = typename Pass::Math;
  using Real = Sum<Element>;
  template <class S> using Sums = typename Chain<Pass>::template Sums<S>;

  DEVICE StackBackward(const Params& p) : Base(p) {}

  // What stands behind the features of a state's rows
  template <class End> static DEVICE Real behind(int column) { return End::ONES && column == End::Q ? 1 : 0; }
  template <class End, int ROW> DEVICE void pad(u32 state) const {
    for (int row = thread; row < Pass::UNITS; row += kThreads)
      UNROLL for (int c = End::Q; c < ROW; ++c) store_shared(state + (row * ROW + c) * kSize, narrow<Element>(behind<End>(c)));
  }
  // What lies between a weight's rows, and behind them
  template <class S> DEVICE void fill_gaps() const {
    const u32 weight = Base::template weight_address<S>(0);
    for (int row = threadIdx.x; row < S::W_ROWS; row += kBlock)
      Base::template zeros<S::W_STRIDE - S::PP>(weight + (row * S::W_STRIDE + S::PP) * kSize);
  }
  DEVICE void fill_behind(int begin) const {
    for (int at = begin + threadIdx.x * 16; at < Pass::kWeightBytes; at += kBlock * 16) store_u32x4(weights + at, {0, 0, 0, 0});
  }

  // of(m, n, h, row, column, place) of each two neighbours of a warp tile's sums, y[m][n][2 h] and the next.
  template <class S, class Of> DEVICE void each_two(int tile, Of of) const {
    const auto [begin, o, i] = Base::template corner<S>(tile);
    const int row = begin + lane.g, column = i + lane.t * 2, place = (row * S::Out::ROW + column) * kSize;
    UNROLL for (int h = 0; h < 2 * S::MT; ++h)
      UNROLL for (int n = 0; n < S::NT; ++n)
        if (S::Q % S::WIDE == 0 || i + n * 8 < S::Q)
          of(h / 2, n, h % 2, row + h * 8, column + n * 8, place + (h * 8 * S::Out::ROW + n * 8) * kSize);
  }
  static DEVICE void put(u32 to, const Real (&two)[2]) { store_shared(to, Pair<Element>(two[0], two[1])); }

  // What a layer activates, of a warp tile
  template <class S> DEVICE void sum_up(Sums<S>& z, int tile, u32 state) const {
    using End = typename S::End;
    Base::template accumulate<S>(z, tile, 0, state);
    if constexpr (End::BIAS) {
      const u32 biases = Base::template bias_address<S>(0) + (Base::template corner<S>(tile).i + lane.t * 2) * kSize;
      UNROLL for (int n = 0; n < S::NT; ++n) {
        Real bias[2];
        load_two<Element>(biases + n * 8 * kSize, bias);
        UNROLL for (int m = 0; m < S::MT; ++m)
          UNROLL for (int i = 0; i < 4; ++i) z[m][n][i] += bias[i % 2];
      }
    }
  }

  // A layer forward, and its slopes, if they are kept. Samples that are not there have states of zeros.
  template <class S> DEVICE void forward(u32 from, u32 to, u32 slopes, int present) const {
    using End = typename S::End;
    const typename End::Activation activation(params);
    ROLL for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
      Sums<S> z = {};
      sum_up<S>(z, tile, from);
      each_two<S>(tile, [&](int m, int n, int h, int row, int column, int place) {
        Real made[2], slope[2];
        UNROLL for (int i = 0; i < 2; ++i) {
          const Real x = z[m][n][h * 2 + i];
          if constexpr (End::KEEPS) slope[i] = End::Slope::of(x);
          const Real y = row < present ? activation.of(x) : Real(0);
          made[i] = S::Q == End::Q || column + i < End::Q ? Math::rounded(y) : behind<End>(column + i);
        }
        put(to + place, made);
        if constexpr (End::KEEPS) put(slopes + place, slope);
      });
    }
    sync();
  }

  // The gradient of what the last layer makes, back through its activation
  template <class S> DEVICE void steepen(u32 from, u32 g, int present) const {
    using End = typename S::End;
    ROLL for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
      Sums<S> z = {};
      sum_up<S>(z, tile, from);
      each_two<S>(tile, [&](int m, int n, int h, int row, int column, int place) {
        Real two[2];
        load_two<Element>(g + place, two);
        UNROLL for (int i = 0; i < 2; ++i) {
          const bool here = (S::Q == End::Q || column + i < End::Q) && row < present;
          two[i] = here ? Math::rounded(End::Gradient::of(z[m][n][h * 2 + i], two[i])) : Real(0);
        }
        put(g + place, two);
      });
    }
    sync();
  }

  // The gradient of a state, in its place, and back through the activation that made it. S goes from a layer's outputs to its
  // inputs, by rows of the weight that lie along these.
  template <class S> DEVICE void back(u32 from, u32 to, u32 slopes, int present) const {
    using End = typename S::End;
    ROLL for (int tile = warp; tile < S::TILES; tile += Pass::WARPS) {
      Sums<S> y = {};
      multiply_back<S>(y, tile, from);
      each_two<S>(tile, [&](int m, int n, int h, int row, int column, int place) {
        Real two[2] = {y[m][n][h * 2], y[m][n][h * 2 + 1]};
        if constexpr (End::KEEPS) {
          Real slope[2];
          load_two<Element>(slopes + place, slope);
          UNROLL for (int i = 0; i < 2; ++i) two[i] *= slope[i];
        } else if constexpr (!is_same<typename End::Activation, identity>) {
          Real result[2];
          load_two<Element>(to + place, result);
          UNROLL for (int i = 0; i < 2; ++i) two[i] = End::Back::of(two[i], result[i]);
        }
        UNROLL for (int i = 0; i < 2; ++i) {
          if constexpr (!is_same<End, typename Pass::InputEnd>) two[i] = row < present ? Math::rounded(two[i]) : Real(0);
          if (S::Q != End::Q && column + i >= End::Q) two[i] = behind<End>(column + i);
        }
        put(to + place, two);
      });
    }
    sync();
  }

  template <class S> DEVICE void multiply_back(Sums<S>& y, int tile, u32 state) const {
    const auto [row, o, column] = Base::template corner<S>(tile);
    const u32 weight = Base::template weight_address<S>(0);
    const u32 a = state + row * S::In::ROW * kSize + Math::template lane_row_a<S::In::ROW>(lane);
    const u32 b = weight + column * kSize + Math::template lane_b_by_n<S::W_STRIDE>(lane);
    constexpr int kSteps = ceil_div(S::P, kStep), kWhole = S::P / kStep;
    if constexpr (kSplit) {
      UNROLL_BY(2) for (int k = 0; k < kSteps; k += kFlush) {
        Sums<S> part = {};
        UNROLL for (int j = 0; j < kFlush; ++j)
          if (kSteps % kFlush == 0 || k + j < kSteps) step_back<S, kStep>(part, a, b, (k + j) * kStep);
        add_sums(y, part);
      }
      repair_back<S>(y, row, column, state, weight);
    } else {
      UNROLL_BY(kSteps <= 8 ? kSteps : 4) for (int k = 0; k < kWhole; ++k) step_back<S, kStep>(y, a, b, k * kStep);
      if constexpr (kWhole < kSteps) step_back<S, 8>(y, a, b, kWhole * kStep);
    }
  }
  template <class S, int K> DEVICE void step_back(Sums<S>& y, u32 a_from, u32 b_from, int k) const {
    typename Math::A a[S::MT];
    typename Math::B b[S::NT];
    u32 from[S::NT];
    UNROLL for (int m = 0; m < S::MT; ++m)
      Math::template load_row_a<K, S::In::ROW, Base::template kRaw<S>>(a[m], a_from + (m * 16 * S::In::ROW + k) * kSize);
    UNROLL for (int n = 0; n < S::NT; ++n) from[n] = b_from + (k * S::W_STRIDE + n * 8) * kSize;
    Math::template load_b_by_n<K, S::W_STRIDE, S::NT, 8, false>(b, from, lane.index);
    UNROLL for (int m = 0; m < S::MT; ++m)
      UNROLL for (int n = 0; n < S::NT; ++n) Math::template multiply<K>(y[m][n], a[m], b[n]);
  }
  template <class S> DEVICE void repair_back(Sums<S>& y, int row, int column, u32 state, u32 weight) const {
    repair_sums<S::P>(y, [&](int m, int n, int i) {
      const int r = row + m * 16 + i / 2 * 8 + lane.g, c = column + n * 8 + lane.t * 2 + i % 2;
      return [=](int q) {
        return __uint_as_float(load_u32(state + (r * S::In::ROW + q) * kSize)) *
               __uint_as_float(load_u32(weight + (q * S::W_STRIDE + c) * kSize));
      };
    });
  }

  // A block's sums of a layer to where they belong: its weight's, [Q, P], and those of its bias, the last column, behind them.
  template <class D, bool BIAS> DEVICE void store_layer(const typename Base::template Tiles<D>& sums) const {
    Real* to = static_cast<Real*>(params.sums) + i64(blockIdx.x) * Pass::COUNT + D::BEGIN;
    constexpr int kOf = D::MT * D::NT, kP = D::P - BIAS;
    add_up<D::COUNT * kOf, kBlock, 32 * D::SHARE, Pass::GROUPS * Pass::kGroupBytes, Real>(
        weights + Pass::kWeightBytes,
        [&](int n) -> const Real(&)[4] { return sums[0][n / kOf][n % kOf / D::NT][n % D::NT]; },
        [&](int n, int member, const Real(&sum)[4]) {
          const Lane at(member % 32);
          const int tile = member / 32 + n / kOf * D::SHARE;
          const int q = (tile % D::M_TILES * D::MT + n % kOf / D::NT) * 16 + at.g;
          const int p = (tile / D::M_TILES * D::NT + n % D::NT) * 8 + at.t * 2;
          UNROLL for (int i = 0; i < 4; ++i) {
            const int row = q + i / 2 * 8, column = p + i % 2;
            if (tile < D::TILES && row < D::Q && column < D::P)
              store_global(to + (BIAS && column == kP ? D::Q * kP + row : row * kP + column), sum[i]);
          }
        });
  }

  DEVICE void run() const {
    const i64 tiles = (units + Pass::UNITS - 1) / Pass::UNITS, step = i64(gridDim.x) * Pass::GROUPS;
    const i64 first = i64(group) * gridDim.x + blockIdx.x;  // few tiles are one for each block
    UNROLL for (int slot = 0; slot < Pass::SLOTS; ++slot) {
      pad<typename Pass::InputEnd, Pass::ROW_X>(Base::slot_of(slot));
      pad<typename Pass::OutputEnd, Pass::ROW_G>(Base::slot_of(slot) + Pass::kStateBytes);
      Base::load(first + slot * step, tiles, slot);
    }
    Pass::prepare_states(*this);
    Base::hold_weights(*this);
    typename Pass::template AllSums<StackBackward> sums;
    int slot = 0;
    i64 tile = first;
    ROLL for (; tile < tiles; tile += step) {
      wait_for_copies<Pass::SLOTS - 1>();
      sync();
      const u32 x = Base::slot_of(slot);
      Pass::walk(*this, sums, x, x + Pass::kStateBytes, Base::present(tile * Pass::UNITS));
      Base::template store_pieces<typename Pass::Input, typename Pass::X, Pass::COPY_X>(tile * Pass::UNITS, x,
                                                                                        static_cast<Element*>(params.y));
      sync();  // its result has left
      Base::load(tile + Pass::SLOTS * step, tiles, slot);
      if (++slot == Pass::SLOTS) slot = 0;
    }
    wait_for_copies<0>();
    Base::meet(tile, tiles);
    __syncthreads();
    Pass::store_sums(*this, sums);
  }
};
