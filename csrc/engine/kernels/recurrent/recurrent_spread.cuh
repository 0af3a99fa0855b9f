// A gated recurrent unit with a dense recurrent matrix that no multiprocessor holds, over all steps of its sequences: spread.cuh's
// blocks hand on states in the output. recurrent.cuh has the formulas. With RESET_BEFORE the product, a step hands on twice: r * h, too,
// in a tensor like the output, which nobody needs behind the last step.
//
// Pass: what spread.cuh asks for; Gate and Candidate, of which Activation is the function; HAS_BIAS; the tensors behind the weights are
//       as recurrent.cuh has them, and, RESET_BEFORE, the one for r * h (kOutputs).
#pragma once
#include "kernels/recurrent/spread.cuh"

template <class Pass> struct RecurrentSpread : Spread<Pass> {
  using Base = Spread<Pass>;
  using typename Base::Element, typename Base::Real, typename Base::Two;
  using Base::kRounds, Base::params, Base::part;
  DEVICE explicit RecurrentSpread(const Params& p) : Base(p) {}

  DEVICE void run() const {
    const i64 input_row = number_at(params, Pass::kWalk + 8);
    const Streams<Element, kGates> inputs(params, Pass::kInputs, part);
    const Element* const initial = tensor_at<Element>(params, Pass::kInputs + 2);
    const Element* const bias = static_cast<const Element*>(params.bias) + part;  // maybe of nothing
    Element* const output = static_cast<Element*>(params.y);
    Element* const reset_states = Pass::RESET_BEFORE ? tensor_at<Element>(params, Pass::kOutputs) : nullptr;
    const typename Pass::Gate::Activation gate(params);
    const typename Pass::Candidate::Activation candidate(params);

    Real h[kRounds][2], own_bias[kRounds][2];
    typename Base::Asked next[kRounds][kGates];
    const auto read_inputs = [&](u32 step, i64 begin) {
      Base::each_of_step(step, begin, [&](int round, const Two& two, const Row& row) {
        UNROLL for (int g = 0; g < kGates; ++g)
          if (two.first && row.there()) Base::ask(inputs[g] + row.at(input_row) + two.feature, two, next[round][g]);
      });
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
    // The new state of two features: to memory, and, unless the sequence begins again, to the next step
    const auto end = [&](u32 step, i64 begin, const Row& row, const Two& two, int round, const Real(&made)[2]) {
      Base::give(output + row.at(Pass::HIDDEN) + part + two.feature, two, made[0], made[1]);
      h[round][0] = made[0], h[round][1] = made[1];
      if (Base::rows().of(step + 1, two.unit).starts())
        Base::read(initial + (begin + two.unit) * Pass::HIDDEN + part + two.feature, two, h[round]);
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
          if constexpr (Pass::RESET_BEFORE) {
            Real update[kRounds][2];
            Base::template multiply_slice<0, 2>();
            __syncthreads();
            Base::each_of_step(step, begin, [&](int round, const Two& two, const Row& row) {
              Real sums[2][2], reset[2];
              UNROLL for (int g = 0; g < 2; ++g) Base::added_up(g, two.unit, two.feature, sums[g]);
              if (!two.first || !row.there()) return;
              UNROLL for (int i = 0; i < 2; ++i) {
                reset[i] = gate.of(x[round][0][i] + sums[0][i]) * h[round][i];
                update[round][i] = gate.of(x[round][1][i] + sums[1][i]);
              }
              Base::give(reset_states + row.at(Pass::HIDDEN) + part + two.feature, two, reset[0], reset[1]);
            });
            Base::gather(
                [&](int, int unit) -> const Element* {
                  const Row row = Base::rows().of(step, unit);
                  return row.there() ? reset_states + row.at(Pass::HIDDEN) : nullptr;
                },
                [](int) { return true; });
            __syncthreads();
            Base::template multiply_slice<2, 3>();
            __syncthreads();
            Base::each_of_step(step, begin, [&](int round, const Two& two, const Row& row) {
              Real sums[2], made[2];
              Base::added_up(2, two.unit, two.feature, sums);
              if (!two.first || !row.there()) return;
              UNROLL for (int i = 0; i < 2; ++i) {
                made[i] = candidate.of(x[round][2][i] + sums[i]);
                made[i] += update[round][i] * (h[round][i] - made[i]);
              }
              end(step, begin, row, two, round, made);
            });
          } else {
            Base::multiply_slice();
            __syncthreads();
            Base::each_of_step(step, begin, [&](int round, const Two& two, const Row& row) {
              Real sums[kGates][2], made[2];
              UNROLL for (int g = 0; g < kGates; ++g) Base::added_up(g, two.unit, two.feature, sums[g]);
              if (!two.first || !row.there()) return;
              UNROLL for (int i = 0; i < 2; ++i) {
                Real product = sums[2][i];
                if constexpr (Pass::HAS_BIAS) product += own_bias[round][i];
                const Real r = gate.of(x[round][0][i] + sums[0][i]), z = gate.of(x[round][1][i] + sums[1][i]);
                made[i] = candidate.of(x[round][2][i] + r * product);
                made[i] += z * (h[round][i] - made[i]);
              }
              end(step, begin, row, two, round, made);
            });
          }
          read_rows();
        },
        [](i64) {});
  }
};
