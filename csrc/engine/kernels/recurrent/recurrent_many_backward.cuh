// Back through a gated recurrent unit with a dense recurrent matrix and many sequences, by slopes: recurrent_backward.cuh has the
// formulas, of a reset behind the product, and names the tensors. many.cuh's warpgroups hand on what comes back to the products of the
// three gates.
//
// Pass: what many.cuh asks for; kInputs and kOutputs, the tensors behind the weights
#pragma once
#include "kernels/recurrent/many.cuh"

template <class Pass> struct RecurrentManyBackward : Many<Pass> {
  using Base = Many<Pass>;
  using typename Base::Asked, typename Base::Cursor, typename Base::Element, typename Base::Run;
  using Base::HIDDEN, Base::kHalves, Base::kRun, Base::kRuns, Base::params, Base::part;
  DEVICE explicit RecurrentManyBackward(const Params& p) : Base(p) {}

  enum { grad_y, of_reset, of_update, of_candidate, reset, kept, STREAMS };

  DEVICE void run() const {
    Base::go([&](int warpgroup) { walk(warpgroup); });
  }
  DEVICE void walk(int warpgroup) const {
    const i64 gate_row = number_at(params, Pass::kWalk + 8);
    const Streams<Element, STREAMS> streams(params, Pass::kInputs, part);
    Element* const gates[] = {static_cast<Element*>(params.y) + part, tensor_at<Element>(params, Pass::kOutputs) + part,
                              tensor_at<Element>(params, Pass::kOutputs + 1) + part};
    Element* const product = tensor_at<Element>(params, Pass::kOutputs + 2) + part;
    Element* const grad_initial = tensor_at<Element>(params, Pass::kOutputs + 3) + part;
    const auto rows = Base::rows(warpgroup);
    const auto known = Base::known(warpgroup);
    Cursor cursor{0, 0};
    u32 times = 0;
    Base::each_group(warpgroup, [&](i64 begin, u32 steps, u32 first_rows) {
      bool all[kHalves];
      Base::sequences(begin, all);
      float g[kHalves][kRuns][kRun] = {}, of_initial[kHalves][kRuns][kRun] = {};
      Row row[kHalves];
      bool there[kHalves];
      Asked asked[kHalves][kRuns][STREAMS];
      const auto ask = [&](u32 step) {
        known.wait_until_full(first_rows + step);
        UNROLL for (int half = 0; half < kHalves; ++half)
          row[half] = rows.of(first_rows + step, Base::unit(half)), there[half] = row[half].there();
        arrive(known.empty((first_rows + step) % Base::kCodes));
        Base::each_run(there, [&](int half, int n, const Run& run) {
          UNROLL for (int i = 0; i < STREAMS; ++i) Base::ask(streams[i] + row[half].at(HIDDEN), run, asked[half][n][i]);
        });
      };
      ask(0);
      ROLL for (u32 step = 0; step < steps; ++step) {
        char* const to = Base::handed(warpgroup, times++);
        // Of a sequence without this step all that is asked for is zero, and nothing is changed.
        Base::each_run(there, [&](int half, int n, const Run& run) {
          float a[kGates][kRun], of_product[kRun];
          UNROLL for (int i = 0; i < kRun; ++i) {
            const auto x = [&](int stream) { return asked[half][n][stream].number(i); };
            const float grad = x(grad_y) + g[half][n][i];
            g[half][n][i] = grad - x(kept) * grad;
            UNROLL for (int gate = 0; gate < kGates; ++gate) a[gate][i] = x(of_reset + gate) * grad;
            of_product[i] = a[kGates - 1][i] * x(reset);
          }
          UNROLL for (int gate = 0; gate < kGates; ++gate) Base::give(gates[gate] + row[half].at(gate_row), run, a[gate]);
          Base::give(product + row[half].at(HIDDEN), run, of_product);
          UNROLL for (int gate = 0; gate < kGates; ++gate) Base::hand_on(to, gate, run, gate < kGates - 1 ? a[gate] : of_product);
        });
        Base::have_handed_on(warpgroup);
        bool starts[kHalves];
        UNROLL for (int half = 0; half < kHalves; ++half) starts[half] = row[half].starts();
        ask(step + 1);
        float sums[Base::N / 2];
        Base::multiply(sums, warpgroup, cursor);
        Base::each_run(all, [&](int half, int n, const Run&) {
          UNROLL for (int i = 0; i < kRun; ++i) g[half][n][i] += sums[Base::sum_of(0, half, n, i)];
        });
        if (starts[0] || starts[1])
          Base::each_run(all, [&](int half, int n, const Run&) {
            if (starts[half]) UNROLL for (int i = 0; i < kRun; ++i) of_initial[half][n][i] += g[half][n][i], g[half][n][i] = 0;
          });
      }
      Base::each_run(all, [&](int half, int n, const Run& run) {
        float sum[kRun];
        UNROLL for (int i = 0; i < kRun; ++i) sum[i] = g[half][n][i] + of_initial[half][n][i];
        Base::give(grad_initial + (begin + run.unit) * HIDDEN, run, sum);
      });
    });
  }
};
