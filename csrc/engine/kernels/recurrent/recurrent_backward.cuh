// Back through a gated recurrent unit, from each sequence's last step to its first one: with the slopes of a step, which another
// kernel has made of all steps at once (recurrent_slopes.cuh), it is linear. Of g, the gradient of the state behind a step:
//     a_r = s_r * g, a_z = s_z * g, a_n = s_n * g                           gradients of the gates' inputs
//     g' = z * g + U_r' a_r + U_z' a_z + U_n' (r * a_n)                     that of the state before it
// or, where the state is reset before the product, with v = U_n' a_n:
//     a_r = s_r * v,  g' = z * g + r * v + U_r' a_r + U_z' a_z
// The contractions are those of the layer with its weights turned.
//
// Pass: what recurrent_steps.cuh asks for; the tensors behind the weights are slopes of reset, update and candidate, reset, and
//       update, of Reals (kInputs), then the walk, then between rows of gradients; and behind those (kOutputs) gradients of the second
//       and the third gate, r * a_n unless RESET_BEFORE, and the gradient of the initial state. STATES: places of three states each.
#pragma once
#include "kernels/recurrent/recurrent_steps.cuh"

template <class Pass> struct RecurrentBackward : RecurrentSteps<Pass> {
  using Base = RecurrentSteps<Pass>;
  using typename Base::Element, typename Base::Last, typename Base::Real, typename Base::State, typename Base::Two;
  using Base::begin, Base::kHalves, Base::kRounds, Base::memory, Base::params, Base::place_of;
  template <class S> using Sums = typename Base::template Sums<S>;
  DEVICE RecurrentBackward(const Params& p) : Base(p) {}

  enum { grad_y, of_reset, of_update, of_candidate, reset, update };  // streams

  // Adds the last contraction of some gates' states to what is kept.
  template <int FIRST, int END, class Add> DEVICE void add_last(u32 from, int apart, const Add& add) const {
    UNROLL for (int round = 0; round < kRounds; ++round) {
      const int tile = Base::warp + round * Pass::WARPS;
      if (Last::TILES % Pass::WARPS && tile >= Last::TILES) break;
      Sums<Last> y = {};
      UNROLL for (int g = FIRST; g < END; ++g) {
        Sums<Last> of_gate = {};
        Base::template add_product<Last>(of_gate, tile, g, from + g * apart);
        add_sums(y, of_gate);
      }
      Base::each_of(round, [&](int, int k, int n, const Two& two) {
        Real sums[2];
        UNROLL for (int i = 0; i < 2; ++i) sums[i] = y[k / 2][n][k % 2 * 2 + i];
        add(round, k, n, two, sums);
      });
    }
  }

  DEVICE void run() const {
    Base::prepare();
    const i64 part = i64(blockIdx.y) * Pass::HIDDEN, whole = i64(Pass::HIDDEN) * Pass::PARTS, gate_row = Base::number(Pass::kWalk + 8);
    const Element* const inputs[] = {static_cast<const Element*>(params.x), Base::template tensor<Element>(Pass::kInputs),
                                     Base::template tensor<Element>(Pass::kInputs + 1),
                                     Base::template tensor<Element>(Pass::kInputs + 2),
                                     Base::template tensor<Element>(Pass::kInputs + 3)};
    const Real* const updates = Base::template tensor<Real>(Pass::kInputs + 4);
    Element* const gates[] = {static_cast<Element*>(params.y) + part, Base::template tensor<Element>(Pass::kOutputs) + part,
                              Base::template tensor<Element>(Pass::kOutputs + 1) + part};
    Element* const beside = Base::template tensor<Element>(Pass::kOutputs + 2);
    Element* const grad_initial = Base::template tensor<Element>(Pass::kOutputs + 3 - Pass::RESET_BEFORE);

    State g, of_initial;
    Base::each([&](int round, int k, int n, const Two&) {
      UNROLL for (int i = 0; i < 2; ++i) g[round][k][n][i] = of_initial[round][k][n][i] = 0;
    });
    const auto ask = [&](i64 step) {
      Base::each([&](int round, int k, int n, const Two& two) {
        const i64 code = Base::code(step, two.unit());
        if (!code) return;
        const i64 at = (code / 2 - 1) * whole + part + two.feature();
        const int pair = place_of(round, k, n);
        UNROLL for (int i = 0; i < update; ++i) Base::ask(step, i, pair, inputs[i] + at, two);
        Base::ask(step, update, pair, updates + at, two);
      });
    };
    const auto take = [&](i64 step, int stream, int round, int k, int n, Real(&x)[2]) {
      Base::template take<Element>(step, stream, place_of(round, k, n), x);
    };
    const auto give_gate = [&](int gate, i64 code, const Two& two, const Real(&x)[2]) {
      Base::give(gates[gate] + (code / 2 - 1) * gate_row + two.feature(), two, x[0], x[1]);
    };
    // The gradient of the state before a step, as a sequence begins there again, or not
    const auto end = [&](i64 step, int round, int k, int n, const Two& two, const Real(&sums)[2]) {
      const i64 code = Base::code(step, two.unit());
      if (!code) return;
      UNROLL for (int i = 0; i < 2; ++i) {
        Real& mine = g[round][k][n][i];
        mine += sums[i];
        if (code & 1) of_initial[round][k][n][i] += mine, mine = 0;
      }
    };

    Base::walk(ask, [&](i64 step) {
      const u32 state = memory + (Pass::STATES > 1 ? int(step & 1) * kGates * Pass::kStateBytes : 0);
      const auto state_of = [&](int gate) { return state + gate * Pass::kStateBytes; };
      Base::each([&](int round, int k, int n, const Two& two) {
        const i64 code = Base::code(step, two.unit());
        if (!code) return;
        Real(&mine)[2] = g[round][k][n];
        Real grad[2], s[3][2], r[2], z[2], a[2];
        take(step, grad_y, round, k, n, grad), take(step, of_update, round, k, n, s[1]), take(step, of_candidate, round, k, n, s[2]);
        Base::template take<Real>(step, update, place_of(round, k, n), z);
        if constexpr (!Pass::RESET_BEFORE) take(step, of_reset, round, k, n, s[0]), take(step, reset, round, k, n, r);
        UNROLL for (int i = 0; i < 2; ++i) {
          if (i == 1 && !two.second) grad[i] = 0;
          grad[i] += mine[i], mine[i] = z[i] * grad[i];
        }
        const auto through = [&](int gate) {
          UNROLL for (int i = 0; i < 2; ++i) a[i] = s[gate][i] * grad[i];
          give_gate(gate, code, two, a);
        };
        through(1), Base::give_state(state_of(1), two, a[0], a[1]);
        if constexpr (!Pass::RESET_BEFORE) through(0), Base::give_state(state_of(0), two, a[0], a[1]);
        through(2);
        if constexpr (!Pass::RESET_BEFORE) {
          UNROLL for (int i = 0; i < 2; ++i) a[i] *= r[i];
          Base::give(beside + (code / 2 - 1) * whole + part + two.feature(), two, a[0], a[1]);
        }
        Base::give_state(state_of(2), two, a[0], a[1]);
      });
      __syncthreads();
      if constexpr (Pass::RESET_BEFORE) {
        const auto [from, apart] = Pass::template before_last<2, 3>(*this, state, Pass::kStateBytes);
        add_last<2, 3>(from, apart, [&](int round, int k, int n, const Two& two, Real(&v)[2]) {
          const i64 code = Base::code(step, two.unit());
          if (!code) return;
          Real s[2], r[2];
          take(step, of_reset, round, k, n, s), take(step, reset, round, k, n, r);
          UNROLL for (int i = 0; i < 2; ++i) g[round][k][n][i] += r[i] * v[i], v[i] *= s[i];
          give_gate(0, code, two, v);
          Base::give_state(state_of(0), two, v[0], v[1]);
        });
        __syncthreads();
      }
      constexpr int kLeft = Pass::RESET_BEFORE ? 2 : kGates;
      const auto [from, apart] = Pass::template before_last<0, kLeft>(*this, state, Pass::kStateBytes);
      add_last<0, kLeft>(from, apart, [&](int round, int k, int n, const Two& two, const Real(&sums)[2]) {
        end(step, round, k, n, two, sums);
      });
    });
    Base::each([&](int round, int k, int n, const Two& two) {
      if (begin + two.unit() >= Base::units) return;
      Real sums[2];
      UNROLL for (int i = 0; i < 2; ++i) sums[i] = g[round][k][n][i] + of_initial[round][k][n][i];
      Base::give(grad_initial + (begin + two.unit()) * whole + part + two.feature(), two, sums[0], sums[1]);
    });
  }
};
