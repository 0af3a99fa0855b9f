// Back through a gated recurrent unit as recurrent_backward.cuh has it, reset behind the product, with a Kronecker product of two
// factors, by a cluster of blocks (sides.cuh). What a step multiplies is known as it begins; the part of the gradient that goes
// past the products is kept for the other side.
//
// Pass: what side_streams.cuh asks for; the tensors behind the weights are slopes of reset, update and candidate, r, and 1 - z
//       (kInputs), then the walk, then between rows of gradients; and behind those (kOutputs) gradients of the second and the third gate,
//       r * a_n, and the gradient of the initial state.
#pragma once
#include "kernels/recurrent/side_streams.cuh"

template <class Pass> struct RecurrentClusterBackward : SideStreams<Pass> {
  using Base = SideStreams<Pass>;
  using typename Base::Both, typename Base::Element, typename Base::Real, typename Base::Two;
  using Rows = typename Pass::Rows;
  using Columns = typename Pass::Columns;
  using Base::begin, Base::params, Base::warp;
  template <class S> using Sums = typename Base::template Sums<S>;
  static constexpr int kMost = Rows::NT > Columns::NT ? Rows::NT : Columns::NT;
  using Grad = Real[2][kMost][2];              // of a lane's features, on either side
  using Read = Both[Pass::STREAMS][2][kMost];  // of the next step, while others still work at one
  const i64 gate_row;
  Element *const gates[kGates], *const beside, *const grad_initial;

  DEVICE RecurrentClusterBackward(const Params& p)
      : Base(p), gate_row(number_at(p, Pass::kWalk + 8)),
        gates{static_cast<Element*>(p.y), tensor_at<Element>(p, Pass::kOutputs), tensor_at<Element>(p, Pass::kOutputs + 1)},
        beside(tensor_at<Element>(p, Pass::kOutputs + 2)), grad_initial(tensor_at<Element>(p, Pass::kOutputs + 3)) {}

  enum { grad_y, of_reset, of_update, of_candidate, reset, kept };  // streams

  // What a lane has of side S at every other step: that of the weight, where its numbers go, a part of the initial state's gradient
  template <class S> struct Own {
    typename Base::template Held<S> held;
    typename Base::template Way<S> way;
    typename Base::template Pieces<S, kGates + 1> leaves;
    Real of_initial[2][S::NT][2] = {};
  };

  DEVICE void run() const {
    const Streams<Element, Pass::STREAMS> inputs(params, Pass::kInputs);
    Own<Rows> by_rows;
    Own<Columns> by_columns;
    Grad g = {};
    Read read;
    const auto hold = [&] { Base::template hold<Rows>(by_rows.held), Base::template hold<Columns>(by_columns.held); };
    const auto ready = [&](u32 steps) {
      by_rows.way = Base::template way<Rows, Columns>(), by_columns.way = Base::template way<Columns, Rows>();
      const Element* const outputs[] = {gates[0], gates[1], gates[2], beside};
      if constexpr (Base::template kStaged<Rows>) Base::find_all(outputs, by_rows.leaves);
      if constexpr (Base::template kStaged<Columns>) Base::find_all(outputs, by_columns.leaves);
      if (threadIdx.x > 0) return;
      Base::make_barriers();
      Base::template expect<Columns>(steps > 0, true), Base::template expect<Rows>(steps > 1, true);
    };
    const auto loader = [&] {
      typename Base::template Pieces<Rows> of_rows;
      typename Base::template Pieces<Columns> of_columns;
      Base::find_all(inputs.of, of_rows), Base::find_all(inputs.of, of_columns);
      return [=, &inputs](u32 slot, u32 step, const Row& row, int unit) {
        if (step % 2 == 0)
          Base::load(inputs.of, of_rows, slot, row.at(i64(Pass::HIDDEN)), unit);
        else
          Base::load(inputs.of, of_columns, slot, row.at(i64(Pass::HIDDEN)), unit);
      };
    };
    const u32 steps =
        Base::template walk_together<Pass::SLOTS>(hold, loader, ready, [&](u32 step, u32 steps, const auto& meanwhile) {
          if (step % 2 == 0)
            go(step, steps, by_rows, by_columns, g, read, meanwhile);
          else
            go(step, steps, by_columns, by_rows, g, read, meanwhile);
        });
    if (steps % 2 == 0)
      end(steps, by_rows, by_columns, g);
    else
      end(steps, by_columns, by_rows, g);
    Base::leave();
  }

  template <class S, class O, class Meanwhile>
  DEVICE void go(u32 step, u32 steps, const Own<S>& from, Own<O>& to, Grad& g, Read& read, const Meanwhile& meanwhile) const {
    const bool has_tile = Base::template has_tile<S>(warp);
    Row rows[Base::template kSequences<S>];
    Both made[kGates + 1][2][S::NT];  // gradients of the gates' inputs, and what comes to the candidate's product
    if (has_tile) {
      if (step == 0) Base::template take_all<S>(step, read);
      Base::template read_rows<S>(step, rows);
      Base::template each<S>([&](int h, int n, const Two& two) {
        Real(&mine)[2] = g[h][n];
        Real a[kGates + 1][2];
        const bool there = rows[n % Base::template kSequences<S>].there();
        UNROLL for (int i = 0; i < 2; ++i) {
          const Real grad = read[grad_y][h][n].of(i) + mine[i];
          UNROLL for (int gate = 0; gate < kGates; ++gate) a[gate][i] = there ? read[of_reset + gate][h][n].of(i) * grad : Real(0);
          a[kGates][i] = there ? a[2][i] * read[reset][h][n].of(i) : Real(0);
          mine[i] = there ? grad - read[kept][h][n].of(i) * grad : mine[i];
        }
        UNROLL for (int i = 0; i <= kGates; ++i) made[i][h][n] = Both(a[i][0], a[i][1]);
        UNROLL for (int gate = 0; gate < kGates; ++gate)
          Base::template give_state<S>(gate, two, a[gate < 2 ? gate : kGates][0], a[gate < 2 ? gate : kGates][1]);
        Base::template keep<S>(from.way, h, n, mine[0], mine[1]);
      });
      if constexpr (Base::template kStaged<S>)
        UNROLL for (int tensor = 0; tensor <= kGates; ++tensor)
          UNROLL for (int n = 0; n < S::NT; ++n) Base::template stage<S>(tensor, n, made[tensor][0][n], made[tensor][1][n]);
    }
    Base::next_is_there();
    if (has_tile) {
      Sums<S> y[kGates] = {};
      Base::template multiply<S, kGates>(y, from.held);
      Base::template hand_on<S, O>(y, from.way);
    }
    give_made(step, from, rows, made);
    Row ended[Base::template kSequences<O>];
    if (Base::template has_tile<O>(warp)) {
      Base::template read_rows<O>(step, ended);
      Base::template take_all<O>(step + 1, read);
    }
    meanwhile();
    if (!Base::template has_tile<O>(warp)) return;
    Base::template wait<O>(step);
    if (threadIdx.x == 0) Base::template expect<O>(step + 2 < steps, true);
    Sums<O> y[kGates] = {};
    Base::template multiply_handed_on<O>(y, to.held);
    Real past[2][O::NT][2];
    Base::template read_kept<O>(past);
    Base::template each<O>([&](int h, int n, const Two&) {
      const Row row = ended[n % Base::template kSequences<O>];
      UNROLL for (int i = 0; i < 2; ++i) {
        Real& mine = g[h][n][i];
        const Real sums = y[0][n][h * 2 + i] + y[1][n][h * 2 + i] + y[2][n][h * 2 + i];
        mine = past[h][n][i];
        mine = row.there() ? mine + sums : mine;
        if (row.starts()) to.of_initial[h][n][i] += mine, mine = 0;
      }
    });
  }
  // Gradients of a step to memory, while others are waited for
  template <class S>
  DEVICE void give_made(u32 step, const Own<S>& own, const Row (&rows)[Base::template kSequences<S>],
                        const Both (&made)[kGates + 1][2][S::NT]) const {
    if constexpr (Base::template kStaged<S>) {
      const Row row = Base::row(step, 0);
      const i64 of_gate = row.at(gate_row), of_beside = row.at(Pass::HIDDEN);
      if (row.there()) Base::give_staged(own.leaves, [&](int tensor) { return tensor < kGates ? of_gate : of_beside; });
    } else {
      Base::template each<S>([&](int h, int n, const Two& two) {
        const Row row = rows[n % Base::template kSequences<S>];
        if (!row.there()) return;
        const i64 of_gate = row.at(gate_row) + Base::template feature<S>(two);
        UNROLL for (int gate = 0; gate < kGates; ++gate)
          Base::template give<S>(gates[gate] + of_gate, made[gate][h][n]);
        Base::template give<S>(beside + row.at(Pass::HIDDEN) + Base::template feature<S>(two), made[kGates][h][n]);
      });
    }
  }
  // The parts of the initial state's gradient come together on the other side.
  template <class S, class O> DEVICE void end(u32 steps, const Own<S>& from, const Own<O>& to, const Grad& g) const {
    Base::template each<S>([&](int h, int n, const Two& two) {
      Base::template keep<S>(from.way, h, n, g[h][n][0] + from.of_initial[h][n][0], g[h][n][1] + from.of_initial[h][n][1]);
    });
    if (!Base::template has_tile<O>(warp)) return;
    Base::template wait<O>(steps);
    Real past[2][O::NT][2];
    Base::template read_kept<O>(past);
    Base::template each<O>([&](int h, int n, const Two& two) {
      const i64 sequence = begin + two.unit;
      if (sequence >= Base::units) return;
      Real sums[2];
      UNROLL for (int i = 0; i < 2; ++i) sums[i] = past[h][n][i] + to.of_initial[h][n][i];
      Base::template give<O>(grad_initial + sequence * Pass::HIDDEN + Base::template feature<O>(two), Both(sums[0], sums[1]));
    });
  }
};
