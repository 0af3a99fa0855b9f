// Back through a gated recurrent unit, from each sequence's last step to its first one: with the slopes of a step, which another
// kernel has made of all steps at once (recurrent_slopes.cuh), it is linear. Of g, the gradient of the state behind a step:
//     a_r = s_r * g, a_z = s_z * g, a_n = s_n * g                           gradients of the gates' inputs
//     g' = z * g + U_r' a_r + U_z' a_z + U_n' (r * a_n)                     that of the state before it
// or, where the state is reset before the product, with v = U_n' a_n:
//     a_r = s_r * v,  g' = z * g + r * v + U_r' a_r + U_z' a_z
// The contractions are those of the layer with its weights turned.
//
// Pass: what recurrent_steps.cuh asks for; the tensors behind the weights are slopes of reset, update and candidate, r, and
//       1 - z (kInputs), then the walk, then between rows of gradients; and behind those (kOutputs) gradients of the second
//       and the third gate, r * a_n unless RESET_BEFORE, and the gradient of the initial state. STATES: places of three states each.
#pragma once
#include "kernels/recurrent/recurrent_steps.cuh"

template <class Pass> struct RecurrentBackward : RecurrentSteps<Pass> {
  using Base = RecurrentSteps<Pass>;
  using typename Base::Corners, typename Base::Element, typename Base::Last, typename Base::Real, typename Base::State,
      typename Base::Two;
  using Base::begin, Base::kWhole, Base::memory, Base::params;
  template <class S> using Sums = typename Base::template Sums<S>;
  DEVICE RecurrentBackward(const Params& p) : Base(p) {}

  enum { grad_y, of_reset, of_update, of_candidate, reset, kept };  // streams

  // The last contraction's sums of some gates together
  template <int COUNT> DEVICE static void sum(const Sums<Last> (&y)[COUNT], int k, int n, Real (&sums)[2]) {
    UNROLL for (int i = 0; i < 2; ++i) {
      sums[i] = y[0][k / 2][n][k % 2 * 2 + i];
      UNROLL for (int g = 1; g < COUNT; ++g) sums[i] += y[g][k / 2][n][k % 2 * 2 + i];
    }
  }

  DEVICE void run() const {
    const i64 part = i64(blockIdx.y) * Pass::HIDDEN, gate_row = number_at(params, Pass::kWalk + 8);
    const Element* const inputs[] = {static_cast<const Element*>(params.x) + part,
                                     tensor_at<Element>(params, Pass::kInputs) + part,
                                     tensor_at<Element>(params, Pass::kInputs + 1) + part,
                                     tensor_at<Element>(params, Pass::kInputs + 2) + part,
                                     tensor_at<Element>(params, Pass::kInputs + 3) + part,
                                     tensor_at<Element>(params, Pass::kInputs + 4) + part};
    Element* const gates[] = {static_cast<Element*>(params.y) + part, tensor_at<Element>(params, Pass::kOutputs) + part,
                              tensor_at<Element>(params, Pass::kOutputs + 1) + part};
    Element* const beside = tensor_at<Element>(params, Pass::kOutputs + 2) + part;
    Element* const grad_initial = tensor_at<Element>(params, Pass::kOutputs + 3 - Pass::RESET_BEFORE) + part;
    const Corners corners = Base::corners();

    State g, of_initial;
    const auto ready = [&] {
      Base::each(corners, [&](int round, int k, int n, const Two&) {
        UNROLL for (int i = 0; i < 2; ++i) g[round][k][n][i] = of_initial[round][k][n][i] = 0;
      });
    };
    const auto loader = [&](int thread) {
      const typename Base::Pieces pieces(thread);
      return [=, &inputs](u32 to, int stream, const Row& row, int unit) {
        Base::load_stream(to, inputs[stream] + row.at(kWhole), unit, pieces);
      };
    };
    const auto give_gate = [&](int gate, const Row& row, const Two& two, const Real(&x)[2]) {
      Base::give(gates[gate] + row.at(gate_row) + two.feature(), two, x[0], x[1]);
    };

    Base::walk(loader, ready, [&](u32 step) {
      const u32 state = memory + (Pass::STATES > 1 ? (step & 1) * kGates * Pass::kStateBytes : 0);
      const auto give_state = [&](int gate, const Two& two, const Real(&x)[2]) {
        Base::give_state(state + gate * Pass::kStateBytes, two, x[0], x[1]);
      };
      UNROLL for (int round = 0; round < Base::kRounds; ++round)
        Base::each_of_step(corners, round, step, [&](int k, int n, const Two& two, const Row& row) {
          Real(&mine)[2] = g[round][k][n];
          Real grad[2], s[3][2], r[2], u[2], a[2];
          Base::take(step, grad_y, two, grad);
          UNROLL for (int gate = Pass::RESET_BEFORE; gate < kGates; ++gate)
            Base::take(step, of_reset + gate, two, s[gate]);
          Base::take(step, kept, two, u);
          UNROLL for (int i = 0; i < 2; ++i) grad[i] += mine[i], mine[i] = grad[i] - u[i] * grad[i];
          UNROLL for (int gate = Pass::RESET_BEFORE; gate < kGates; ++gate) {
            UNROLL for (int i = 0; i < 2; ++i) a[i] = s[gate][i] * grad[i];
            give_gate(gate, row, two, a);
            if (gate == 2 && !Pass::RESET_BEFORE) {
              Base::take(step, reset, two, r);
              UNROLL for (int i = 0; i < 2; ++i) a[i] *= r[i];
              Base::give(beside + row.at(kWhole) + two.feature(), two, a[0], a[1]);
            }
            give_state(gate, two, a);
          }
        });
      __syncthreads();
      if constexpr (Pass::RESET_BEFORE) {
        Base::template contract_last<2, 3>(
            Pass::template before_last<2, 3>(*this, state, Pass::kStateBytes), [&](int round, const Sums<Last>(&y)[1]) {
              Base::each_of_step(corners, round, step, [&](int k, int n, const Two& two, const Row& row) {
                Real s[2], r[2], v[2];
                Base::take(step, of_reset, two, s), Base::take(step, reset, two, r);
                sum(y, k, n, v);
                UNROLL for (int i = 0; i < 2; ++i) g[round][k][n][i] += r[i] * v[i], v[i] *= s[i];
                give_gate(0, row, two, v);
                give_state(0, two, v);
              });
            });
        __syncthreads();
      }
      constexpr int kLeft = Pass::RESET_BEFORE ? 2 : kGates;
      Base::template contract_last<0, kLeft>(
          Pass::template before_last<0, kLeft>(*this, state, Pass::kStateBytes), [&](int round, const Sums<Last>(&y)[kLeft]) {
            Base::each_of_step(corners, round, step, [&](int k, int n, const Two& two, const Row& row) {
              Real sums[2];
              sum(y, k, n, sums);
              UNROLL for (int i = 0; i < 2; ++i) {
                Real& mine = g[round][k][n][i];
                mine += sums[i];
                if (row.starts()) of_initial[round][k][n][i] += mine, mine = 0;
              }
            });
          });
    });
    if (!Base::multiplies()) return;
    Base::each(corners, [&](int round, int k, int n, const Two& two) {
      if (begin + two.unit() >= Base::units) return;
      Real sums[2];
      UNROLL for (int i = 0; i < 2; ++i) sums[i] = g[round][k][n][i] + of_initial[round][k][n][i];
      Base::give(grad_initial + (begin + two.unit()) * kWhole + two.feature(), two, sums[0], sums[1]);
    });
  }
};
