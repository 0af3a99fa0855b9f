// Back through a gated recurrent unit with a dense recurrent matrix that no multiprocessor holds, by slopes: recurrent_backward.cuh has
// the formulas, and names the tensors. spread.cuh's blocks hand on what comes back to the products of the three gates, in the gradients
// of reset and update, and in that of the candidate's product. RESET_BEFORE the product they hand on twice, all in the gradients of
// gates: that of the candidate first, of which that of reset is made.
#pragma once
#include "kernels/recurrent/spread.cuh"

template <class Pass> struct RecurrentSpreadBackward : Spread<Pass> {
  using Base = Spread<Pass>;
  using typename Base::Element, typename Base::Real, typename Base::Two;
  using Base::kRounds, Base::params, Base::part;
  DEVICE explicit RecurrentSpreadBackward(const Params& p) : Base(p) {}

  enum { grad_y, of_reset, of_update, of_candidate, reset, kept, STREAMS };

  DEVICE void run() const {
    const i64 gate_row = number_at(params, Pass::kWalk + 8);
    const Streams<Element, STREAMS> streams(params, Pass::kInputs, part);
    Element* const gates[] = {static_cast<Element*>(params.y), tensor_at<Element>(params, Pass::kOutputs),
                              tensor_at<Element>(params, Pass::kOutputs + 1)};
    Element* const product = tensor_at<Element>(params, Pass::kOutputs + 2);
    Element* const grad_initial = tensor_at<Element>(params, Pass::kOutputs + 3 - Pass::RESET_BEFORE);

    Real g[kRounds][2], of_initial[kRounds][2];
    typename Base::Asked next[kRounds][STREAMS];
    const auto read_streams = [&](u32 step, i64 begin) {
      Base::each_of_step(step, begin, [&](int round, const Two& two, const Row& row) {
        UNROLL for (int i = 0; i < STREAMS; ++i)
          if (two.first && row.there()) Base::ask(streams[i] + row.at(Pass::HIDDEN) + two.feature, two, next[round][i]);
      });
    };
    const auto give_gate = [&](int gate, const Row& row, const Two& two, const Real(&a)[2]) {
      Base::give(gates[gate] + row.at(gate_row) + part + two.feature, two, a[0], a[1]);
    };
    const auto begin_group = [&](i64 begin) {
      UNROLL for (int round = 0; round < kRounds; ++round)
        UNROLL for (int i = 0; i < 2; ++i) g[round][i] = of_initial[round][i] = 0;
      read_streams(0, begin);
    };
    Base::walk(
        begin_group,
        [&](u32 step, i64 begin, const auto& read_rows) {
          Base::each_of_step(step, begin, [&](int round, const Two& two, const Row& row) {
            if (!two.first || !row.there()) return;
            Real grad[2], a[2];
            const auto& x = next[round];
            UNROLL for (int i = 0; i < 2; ++i) grad[i] = x[grad_y].number(i) + g[round][i], g[round][i] = grad[i] - x[kept].number(i) * grad[i];
            UNROLL for (int gate = kGates - 1; gate >= Pass::RESET_BEFORE; --gate) {
              UNROLL for (int i = 0; i < 2; ++i) a[i] = x[of_reset + gate].number(i) * grad[i];
              give_gate(gate, row, two, a);
              if (gate < 2 || Pass::RESET_BEFORE) continue;
              UNROLL for (int i = 0; i < 2; ++i) a[i] *= x[reset].number(i);
              Base::give(product + row.at(Pass::HIDDEN) + part + two.feature, two, a[0], a[1]);
            }
          });
          const auto handed_on = [&](int gate, int unit) -> const Element* {
            const Row row = Base::rows().of(step, unit);
            if (!row.there()) return nullptr;
            return gate < 2 || Pass::RESET_BEFORE ? gates[gate] + row.at(gate_row) : product + row.at(Pass::HIDDEN);
          };
          if constexpr (Pass::RESET_BEFORE) {
            Base::template gather<1>([&](int, int unit) { return handed_on(2, unit); }, [](int) { return true; });
            __syncthreads();
            Base::template multiply_slice<2, 3>();
            __syncthreads();
            Base::each_of_step(step, begin, [&](int round, const Two& two, const Row& row) {
              Real v[2];
              Base::added_up(0, two.unit, two.feature, v);
              if (!two.first || !row.there()) return;
              const auto& x = next[round];
              UNROLL for (int i = 0; i < 2; ++i) g[round][i] += x[reset].number(i) * v[i], v[i] *= x[of_reset].number(i);
              give_gate(0, row, two, v);
            });
          }
          read_streams(step + 1, begin);
          Base::gather(handed_on, [](int) { return true; });
          __syncthreads();
          Base::template multiply_slice<0, Pass::RESET_BEFORE ? 2 : kGates>();
          __syncthreads();
          Base::each_of_step(step, begin, [&](int round, const Two& two, const Row& row) {
            Real sums[2];
            Base::added_up(0, two.unit, two.feature, sums);
            if (!two.first || !row.there()) return;
            UNROLL for (int i = 0; i < 2; ++i) {
              g[round][i] += sums[i];
              if (row.starts()) of_initial[round][i] += g[round][i], g[round][i] = 0;
            }
          });
          read_rows();
        },
        [&](i64 begin) {
          UNROLL for (int round = 0; round < kRounds; ++round) {
            const Two two = Base::two(round, begin);
            if (two.first)
              Base::give(grad_initial + (begin + two.unit) * Pass::HIDDEN + part + two.feature, two, g[round][0] + of_initial[round][0],
                         g[round][1] + of_initial[round][1]);
          }
        });
  }
};
