// A gated recurrent unit with a dense recurrent matrix that no multiprocessor holds, over all steps of its sequences: spread.cuh's
// blocks hand on states in the output.
//     r = sigmoid(x_r + U_r h), z = sigmoid(x_z + U_z h), n = act(x_n + r * (U_n h + b)), h' = (1 - z) * n + z * h
//
// Pass: what spread.cuh asks for; Gate and Candidate, of which Activation is the function; HAS_BIAS; the tensors behind the weights are
//       as recurrent.cuh has them.
#pragma once
#include "kernels/recurrent/spread.cuh"

template <class Pass> struct RecurrentSpread : Spread<Pass> {
  using Base = Spread<Pass>;
  using typename Base::Element, typename Base::Real, typename Base::Two;
  using Base::kRounds, Base::params, Base::part;
  DEVICE explicit RecurrentSpread(const Params& p) : Base(p) {}

  DEVICE void run() const {
    const i64 input_row = number_at(params, Pass::kWalk + 8);
    const Element* const inputs[] = {static_cast<const Element*>(params.x) + part, tensor_at<Element>(params, Pass::kInputs) + part,
                                     tensor_at<Element>(params, Pass::kInputs + 1) + part};
    const Element* const initial = tensor_at<Element>(params, Pass::kInputs + 2);
    const Element* const bias = static_cast<const Element*>(params.bias) + part;  // maybe of nothing
    Element* const output = static_cast<Element*>(params.y);
    const typename Pass::Gate::Activation gate(params);
    const typename Pass::Candidate::Activation candidate(params);

    Real h[kRounds][2], own_bias[kRounds][2];
    typename Base::Asked next[kRounds][kGates];
    const auto read_inputs = [&](u32 step, i64 begin) {
      UNROLL for (int round = 0; round < kRounds; ++round) {
        const Two two = Base::two(round, begin);
        const Row row = Base::rows().of(step, two.unit);
        UNROLL for (int g = 0; g < kGates; ++g)
          if (two.first && row.there()) Base::ask(inputs[g] + row.at(input_row) + two.feature, two, next[round][g]);
      }
    };
    const auto begin_group = [&](i64 begin) {
      UNROLL for (int round = 0; round < kRounds; ++round) {
        const Two two = Base::two(round, begin);
        h[round][0] = h[round][1] = 0;
        if (two.first) Base::read(initial + (begin + two.unit) * Pass::HIDDEN + part + two.feature, two, h[round]);
        if (Pass::HAS_BIAS && two.first) Base::read(bias + two.feature, two, own_bias[round]);
      }
      read_inputs(0, begin);
    };
    Base::walk(
        begin_group,
        [&](u32 step, i64 begin, const auto& read_rows) {
          // The states before the step: of the step before, or where a sequence begins
          const auto begins = [&](int unit) { return step == 0 || Base::rows().of(step, unit).starts(); };
          Base::gather(
              [&](int, int unit) -> const Element* {
                if (!Base::rows().of(step, unit).there()) return nullptr;
                return begins(unit) ? initial + (begin + unit) * Pass::HIDDEN : output + Base::rows().of(step - 1, unit).at(Pass::HIDDEN);
              },
              [&](int unit) { return !begins(unit); });
          Real x[kRounds][kGates][2];
          UNROLL for (int round = 0; round < kRounds; ++round)
            UNROLL for (int g = 0; g < kGates; ++g)
              UNROLL for (int i = 0; i < 2; ++i) x[round][g][i] = next[round][g].number(i);
          read_inputs(step + 1, begin);
          __syncthreads();
          Base::multiply_slice();
          __syncthreads();
          UNROLL for (int round = 0; round < kRounds; ++round) {
            const Two two = Base::two(round, begin);
            const Row row = Base::rows().of(step, two.unit);
            Real sums[kGates][2], made[2];
            UNROLL for (int g = 0; g < kGates; ++g) Base::added_up(g, two.unit, two.feature, sums[g]);
            if (!two.first || !row.there()) continue;
            UNROLL for (int i = 0; i < 2; ++i) {
              Real product = sums[2][i];
              if constexpr (Pass::HAS_BIAS) product += own_bias[round][i];
              const Real r = gate.of(x[round][0][i] + sums[0][i]), z = gate.of(x[round][1][i] + sums[1][i]);
              made[i] = candidate.of(x[round][2][i] + r * product);
              made[i] += z * (h[round][i] - made[i]);
            }
            Base::give(output + row.at(Pass::HIDDEN) + part + two.feature, two, made[0], made[1]);
            h[round][0] = made[0], h[round][1] = made[1];
            if (Base::rows().of(step + 1, two.unit).starts())
              Base::read(initial + (begin + two.unit) * Pass::HIDDEN + part + two.feature, two, h[round]);
          }
          read_rows();
        },
        [](i64) {});
  }
};
