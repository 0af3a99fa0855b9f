// A gated recurrent unit with a dense recurrent matrix and many sequences, over all of their steps: many.cuh's warpgroups hand on
// states. recurrent.cuh has the formulas, of a reset behind the product.
//
// Pass: what many.cuh asks for; Gate and Candidate, of which Activation is the function; HAS_BIAS; kInputs: the tensors behind the weights
//       are as recurrent.cuh has them.
#pragma once
#include "finish/pointwise.cuh"
#include "kernels/recurrent/many.cuh"

template <class Pass> struct RecurrentMany : Many<Pass> {
  using Base = Many<Pass>;
  using typename Base::Asked, typename Base::Cursor, typename Base::Element, typename Base::Run;
  using Base::HIDDEN, Base::kHalves, Base::kRun, Base::kRuns, Base::params, Base::part;
  DEVICE explicit RecurrentMany(const Params& p) : Base(p) {}

  DEVICE void run() const {
    Base::go([&](int warpgroup) { walk(warpgroup); });
  }
  DEVICE void walk(int warpgroup) const {
    const i64 input_row = number_at(params, Pass::kWalk + 8);
    const Streams<Element, kGates> inputs(params, Pass::kInputs, part);
    const Element* const initial = tensor_at<Element>(params, Pass::kInputs + 2) + part;
    const Element* const bias = static_cast<const Element*>(params.bias) + part;  // maybe of nothing
    Element* const output = static_cast<Element*>(params.y) + part;
    const typename Pass::Gate::Activation gate(params);
    const typename Pass::Candidate::Activation candidate(params);
    const auto rows = Base::rows(warpgroup);
    const auto known = Base::known(warpgroup);
    Cursor cursor{0, 0};
    u32 times = 0;
    Base::each_group(warpgroup, [&](i64 begin, u32 steps, u32 first_rows) {
      known.wait_until_full(first_rows);
      bool all[kHalves];
      Base::sequences(begin, all);
      float h[kHalves][kRuns][kRun];
      const auto read_initial = [&](const Run& run, float(&state)[kRun]) {
        Asked asked;
        Base::ask(initial + (begin + run.unit) * HIDDEN, run, asked);
        UNROLL for (int i = 0; i < kRun; ++i) state[i] = asked.number(i);
      };
      Base::each_run(all, [&](int half, int n, const Run& run) { read_initial(run, h[half][n]); });
      // What a step begins with: the states, or, of sequences that begin `again`, the initial ones
      const auto hand_on = [&](const bool(&again)[kHalves]) {
        char* const to = Base::handed(warpgroup, times++);
        Base::each_run(all, [&](int half, int n, const Run& run) { Base::hand_on(to, 0, run, h[half][n]); });
        if (again[0] || again[1])
          Base::each_run(all, [&](int half, int, const Run& run) {
            float state[kRun];
            read_initial(run, state);
            if (again[half]) Base::hand_on(to, 0, run, state);
          });
        Base::have_handed_on(warpgroup);
      };
      if (steps) hand_on({});
      ROLL for (u32 step = 0; step < steps; ++step) {
        Row row[kHalves];
        bool there[kHalves], again[kHalves];
        known.wait_until_full(first_rows + step + 1);
        UNROLL for (int half = 0; half < kHalves; ++half) {
          row[half] = rows.of(first_rows + step, Base::unit(half)), there[half] = row[half].there();
          again[half] = rows.of(first_rows + step + 1, Base::unit(half)).starts();
        }
        arrive(known.empty((first_rows + step) % Base::kCodes));
        Asked asked[kHalves][kRuns][kGates];
        Base::each_run(there, [&](int half, int n, const Run& run) {
          UNROLL for (int g = 0; g < kGates; ++g) Base::ask(inputs[g] + row[half].at(input_row), run, asked[half][n][g]);
        });
        float sums[Base::N / 2];
        Base::multiply(sums, warpgroup, cursor);
        Base::each_run(there, [&](int half, int n, const Run& run) {
          Asked own_bias{};
          if constexpr (Pass::HAS_BIAS) Base::ask(bias, run, own_bias);
          UNROLL for (int i = 0; i < kRun; ++i) {
            const auto sum = [&](int g) { return sums[Base::sum_of(g, half, n, i)]; };
            const auto input = [&](int g) { return asked[half][n][g].number(i); };
            const float r = gate.of(input(0) + sum(0)), z = gate.of(input(1) + sum(1));
            const float made = candidate.of(input(2) + r * (sum(2) + own_bias.number(i)));
            h[half][n][i] = made + z * (h[half][n][i] - made);
          }
        });
        if (step + 1 < steps) hand_on(again);
        Base::each_run(there, [&](int half, int n, const Run& run) { Base::give(output + row[half].at(HIDDEN), run, h[half][n]); });
        if (again[0] || again[1])
          Base::each_run(all, [&](int half, int n, const Run& run) {
            if (again[half]) read_initial(run, h[half][n]);
          });
      }
      arrive(known.empty((first_rows + steps) % Base::kCodes));
    });
  }
};
