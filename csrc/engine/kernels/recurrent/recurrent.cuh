// A gated recurrent unit over all steps of its sequences:
//     r = sigmoid(x_r + U_r h), z = sigmoid(x_z + U_z h)
//     n = act(x_n + r * (U_n h + b)), or, RESET_BEFORE the product, act(x_n + U_n (r * h))
//     h' = (1 - z) * n + z * h
// h stays in registers, and, rounded, in shared memory, where the products' first contraction reads it: in one of STATES places in
// turn, so that no step waits for another's reading. RESET_BEFORE, r * h lies in the second.
//
// Pass: what recurrent_steps.cuh asks for; Gate and Candidate, of which Activation is the function; the tensors behind the weights
//       are inputs of the second and the third gate (kInputs), the initial state, then the walk, then between rows of inputs.
#pragma once
#include "kernels/recurrent/recurrent_steps.cuh"

template <class Pass> struct Recurrent : RecurrentSteps<Pass> {
  using Base = RecurrentSteps<Pass>;
  using typename Base::Corners, typename Base::Element, typename Base::Last, typename Base::Real, typename Base::State,
      typename Base::Two;
  using Base::begin, Base::kWhole, Base::memory, Base::params;
  template <class S> using Sums = typename Base::template Sums<S>;
  DEVICE Recurrent(const Params& p) : Base(p) {}

  DEVICE u32 state_of(u32 step) const { return memory + (Pass::STATES > 1 && !Pass::RESET_BEFORE ? (step & 1) * Pass::kStateBytes : 0); }

  DEVICE void run() const {
    const i64 part = i64(blockIdx.y) * Pass::HIDDEN, input_row = number_at(params, Pass::kWalk + 8);
    const Element* const inputs[] = {static_cast<const Element*>(params.x) + part,
                                     tensor_at<Element>(params, Pass::kInputs) + part,
                                     tensor_at<Element>(params, Pass::kInputs + 1) + part};
    const Element* const initial = tensor_at<Element>(params, Pass::kInputs + 2) + part;
    const Element* const bias = static_cast<const Element*>(params.bias) + part;  // maybe of nothing
    Element* const output = static_cast<Element*>(params.y) + part;
    const typename Pass::Gate::Activation gate(params);
    const typename Pass::Candidate::Activation candidate(params);
    const Corners corners = Base::corners();
    const auto first_state = [&](const Two& two, Real(&x)[2]) {
      const Element* const from = initial + (begin + two.unit()) * kWhole + two.feature();
      UNROLL for (int i = 0; i < 2; ++i)
        x[i] = begin + two.unit() < Base::units && (i == 0 || two.second) ? widen(from[i]) : Real(0);
    };

    State h, update, own_bias;
    const auto ready = [&] {
      Base::each(corners, [&](int round, int k, int n, const Two& two) {
        if constexpr (Pass::HAS_BIAS)
          UNROLL for (int i = 0; i < 2; ++i)
            own_bias[round][k][n][i] = i == 0 || two.second ? widen(bias[two.feature() + i]) : Real(0);
        Real(&mine)[2] = h[round][k][n];
        first_state(two, mine);
        Base::give_state(state_of(0), two, mine[0], mine[1]);
      });
    };
    const auto loader = [&](int thread) {
      const typename Base::Pieces pieces(thread);
      return [=, &inputs](u32 to, int stream, const Row& row, int unit) {
        Base::load_stream(to, inputs[stream] + row.at(input_row), unit, pieces);
      };
    };
    // What a gate's sums and input are together
    const auto add_input = [&](u32 step, int g, const Two& two, int k, int n, const Sums<Last>& y, Real(&x)[2]) {
      Base::take(step, g, two, x);
      UNROLL for (int i = 0; i < 2; ++i) x[i] += y[k / 2][n][k % 2 * 2 + i];
    };
    // The new state of two features: to memory, and, unless the sequence begins again, to the next step
    const auto end = [&](u32 step, const Row& row, const Row& next, const Two& two, Real(&mine)[2], const Real(&z)[2],
                         const Real(&made)[2]) {
      UNROLL for (int i = 0; i < 2; ++i) mine[i] = made[i] + z[i] * (mine[i] - made[i]);
      Base::give(output + row.at(kWhole) + two.feature(), two, mine[0], mine[1]);
      if ((Pass::UNITS == 1 ? next : Base::row(step + 1, two.unit())).starts()) first_state(two, mine);
      Base::give_state(state_of(step + 1), two, mine[0], mine[1]);
    };

    Base::walk(loader, ready, [&](u32 step) {
      const Row next = Base::row(step + 1, 0);
      if constexpr (Pass::RESET_BEFORE) {
        const u32 reset_state = memory + Pass::kStateBytes;
        Base::template contract_last<0, 2>(
            Pass::template before_last<0, 2>(*this, memory, 0), [&](int round, const Sums<Last>(&y)[2]) {
              Base::each_of_step(corners, round, step, [&](int k, int n, const Two& two, const Row&) {
                Real r[2], z[2];
                add_input(step, 0, two, k, n, y[0], r), add_input(step, 1, two, k, n, y[1], z);
                UNROLL for (int i = 0; i < 2; ++i)
                  update[round][k][n][i] = gate.of(z[i]), r[i] = gate.of(r[i]) * h[round][k][n][i];
                Base::give_state(reset_state, two, r[0], r[1]);
              });
            });
        __syncthreads();
        Base::template contract_last<2, 3>(
            Pass::template before_last<2, 3>(*this, reset_state, 0), [&](int round, const Sums<Last>(&y)[1]) {
              Base::each_of_step(corners, round, step, [&](int k, int n, const Two& two, const Row& row) {
                Real made[2];
                add_input(step, 2, two, k, n, y[0], made);
                UNROLL for (int i = 0; i < 2; ++i) made[i] = candidate.of(made[i]);
                end(step, row, next, two, h[round][k][n], update[round][k][n], made);
              });
            });
      } else {
        Base::template contract_last<0, 3>(
            Pass::template before_last<0, 3>(*this, state_of(step), 0), [&](int round, const Sums<Last>(&y)[3]) {
              Base::each_of_step(corners, round, step, [&](int k, int n, const Two& two, const Row& row) {
                Real r[2], z[2], made[2];
                add_input(step, 0, two, k, n, y[0], r), add_input(step, 1, two, k, n, y[1], z);
                Base::take(step, 2, two, made);
                UNROLL for (int i = 0; i < 2; ++i) {
                  Real product = y[2][k / 2][n][k % 2 * 2 + i];
                  if constexpr (Pass::HAS_BIAS) product += own_bias[round][k][n][i];
                  made[i] = candidate.of(made[i] + gate.of(r[i]) * product), z[i] = gate.of(z[i]);
                }
                end(step, row, next, two, h[round][k][n], z, made);
              });
            });
      }
      __syncthreads();
    });
  }
};
