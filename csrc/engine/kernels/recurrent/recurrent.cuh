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
  using typename Base::Element, typename Base::Last, typename Base::Real, typename Base::State, typename Base::Two;
  using Base::begin, Base::kHalves, Base::kRounds, Base::memory, Base::params, Base::place_of;
  template <class S> using Sums = typename Base::template Sums<S>;
  DEVICE Recurrent(const Params& p) : Base(p) {}

  DEVICE u32 state_of(i64 step) const { return memory + (Pass::STATES > 1 && !Pass::RESET_BEFORE ? int(step & 1) * Pass::kStateBytes : 0); }

  DEVICE void run() const {
    Base::prepare();
    const i64 part = i64(blockIdx.y) * Pass::HIDDEN, whole = i64(Pass::HIDDEN) * Pass::PARTS, input_row = Base::number(Pass::kWalk + 8);
    const Element* const inputs[] = {static_cast<const Element*>(params.x), Base::template tensor<Element>(Pass::kInputs),
                                     Base::template tensor<Element>(Pass::kInputs + 1)};
    const Element* const initial = Base::template tensor<Element>(Pass::kInputs + 2);
    const Element* const bias = static_cast<const Element*>(params.bias) + part;  // maybe of nothing
    Element* const output = static_cast<Element*>(params.y) + part;
    const typename Pass::Gate::Activation gate(params);
    const typename Pass::Candidate::Activation candidate(params);
    const auto first_state = [&](const Two& two, int i) {
      return widen(initial[(begin + two.unit()) * whole + part + two.feature() + i]);
    };

    State h, update;
    Base::each([&](int round, int k, int n, const Two& two) {
      const bool there = begin + two.unit() < Base::units;
      Real(&mine)[2] = h[round][k][n];
      mine[0] = there ? first_state(two, 0) : Real(0);
      mine[1] = there && two.second ? first_state(two, 1) : Real(0);
      Base::give_state(state_of(0), two, mine[0], mine[1]);
    });
    const auto ask = [&](i64 step) {
      Base::each([&](int round, int k, int n, const Two& two) {
        const i64 code = Base::code(step, two.unit());
        if (code)
          UNROLL for (int g = 0; g < kGates; ++g)
            Base::ask(step, g, place_of(round, k, n), inputs[g] + (code / 2 - 1) * input_row + part + two.feature(), two);
      });
    };
    // What a gate's sums and input are together
    const auto summed = [&](i64 step, int g, int round, int k, int n, const Sums<Last>& y, Real(&x)[2]) {
      Base::template take<Element>(step, g, place_of(round, k, n), x);
      UNROLL for (int i = 0; i < 2; ++i) x[i] += y[k / 2][n][k % 2 * 2 + i];
    };
    // The new state of two features: to memory, and, unless the sequence begins again, to the next step
    const auto end = [&](i64 step, i64 code, int round, int k, int n, const Two& two, const Real(&z)[2], const Real(&made)[2]) {
      Real(&mine)[2] = h[round][k][n];
      UNROLL for (int i = 0; i < 2; ++i) mine[i] = made[i] + z[i] * (mine[i] - made[i]);
      Base::give(output + (code / 2 - 1) * whole + two.feature(), two, mine[0], mine[1]);
      if (Base::code(step + 1, two.unit()) & 1) mine[0] = first_state(two, 0), mine[1] = two.second ? first_state(two, 1) : Real(0);
      Base::give_state(state_of(step + 1), two, mine[0], mine[1]);
    };

    Base::walk(ask, [&](i64 step) {
      if constexpr (Pass::RESET_BEFORE) {
        const u32 reset_state = memory + Pass::kStateBytes;
        const auto [from, apart] = Pass::template before_last<0, 2>(*this, memory, 0);
        UNROLL for (int round = 0; round < kRounds; ++round) {
          const int tile = Base::warp + round * Pass::WARPS;
          if (Last::TILES % Pass::WARPS && tile >= Last::TILES) break;
          Sums<Last> y[2] = {};
          UNROLL for (int g = 0; g < 2; ++g) Base::template add_product<Last>(y[g], tile, g, from + g * apart);
          Base::each_of(round, [&](int, int k, int n, const Two& two) {
            if (!Base::code(step, two.unit())) return;
            Real r[2], z[2];
            summed(step, 0, round, k, n, y[0], r), summed(step, 1, round, k, n, y[1], z);
            UNROLL for (int i = 0; i < 2; ++i) update[round][k][n][i] = gate.of(z[i]), r[i] = gate.of(r[i]) * h[round][k][n][i];
            Base::give_state(reset_state, two, r[0], r[1]);
          });
        }
        __syncthreads();
        const auto [reset_from, reset_apart] = Pass::template before_last<2, 3>(*this, reset_state, 0);
        UNROLL for (int round = 0; round < kRounds; ++round) {
          const int tile = Base::warp + round * Pass::WARPS;
          if (Last::TILES % Pass::WARPS && tile >= Last::TILES) break;
          Sums<Last> y = {};
          Base::template add_product<Last>(y, tile, 2, reset_from + 2 * reset_apart);
          Base::each_of(round, [&](int, int k, int n, const Two& two) {
            const i64 code = Base::code(step, two.unit());
            if (!code) return;
            Real made[2];
            summed(step, 2, round, k, n, y, made);
            UNROLL for (int i = 0; i < 2; ++i) made[i] = candidate.of(made[i]);
            end(step, code, round, k, n, two, update[round][k][n], made);
          });
        }
      } else {
        const auto [from, apart] = Pass::template before_last<0, 3>(*this, state_of(step), 0);
        UNROLL for (int round = 0; round < kRounds; ++round) {
          const int tile = Base::warp + round * Pass::WARPS;
          if (Last::TILES % Pass::WARPS && tile >= Last::TILES) break;
          Sums<Last> y[kGates] = {};
          UNROLL for (int g = 0; g < kGates; ++g) Base::template add_product<Last>(y[g], tile, g, from + g * apart);
          Base::each_of(round, [&](int, int k, int n, const Two& two) {
            const i64 code = Base::code(step, two.unit());
            if (!code) return;
            Real r[2], z[2], made[2];
            summed(step, 0, round, k, n, y[0], r), summed(step, 1, round, k, n, y[1], z);
            Base::template take<Element>(step, 2, place_of(round, k, n), made);
            UNROLL for (int i = 0; i < 2; ++i) {
              Real product = y[2][k / 2][n][k % 2 * 2 + i];
              if (Pass::HAS_BIAS && (i == 0 || two.second)) product += widen(bias[two.feature() + i]);
              made[i] = candidate.of(made[i] + gate.of(r[i]) * product), z[i] = gate.of(z[i]);
            }
            end(step, code, round, k, n, two, z, made);
          });
        }
      }
    });
  }
};
