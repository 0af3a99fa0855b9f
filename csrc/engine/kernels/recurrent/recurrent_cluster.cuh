// A gated recurrent unit as recurrent.cuh has it, reset behind the product, with a Kronecker product of two factors, by a cluster
// of blocks (sides.cuh). At each step the sums of all gates end up on the other side, where the state before it has been kept.
//
// Pass: what side_streams.cuh asks for; Gate and Candidate, of which Activation is the function; HAS_BIAS; the tensors behind the
//       weights are inputs of the second and the third gate (kInputs), the initial state, then the walk, then between rows of inputs.
#pragma once
#include "kernels/recurrent/side_streams.cuh"

template <class Pass> struct RecurrentCluster : SideStreams<Pass> {
  using Base = SideStreams<Pass>;
  using typename Base::Both, typename Base::Element, typename Base::Real, typename Base::Two;
  using Rows = typename Pass::Rows;
  using Columns = typename Pass::Columns;
  using Base::begin, Base::memory, Base::params, Base::warp;
  template <class S> using Sums = typename Base::template Sums<S>;
  const Element *const initial, *const bias;
  Element* const output;
  const typename Pass::Gate::Activation gate;
  const typename Pass::Candidate::Activation candidate;

  DEVICE RecurrentCluster(const Params& p)
      : Base(p), initial(tensor_at<Element>(p, Pass::kInputs + 2)), bias(static_cast<const Element*>(p.bias)),
        output(static_cast<Element*>(p.y)), gate(p), candidate(p) {}

  // What a lane has of side S at every other step: that of the weight, where its numbers go, and its own bias
  template <class S> struct Own {
    typename Base::template Held<S> held;
    typename Base::template Way<S> way;
    typename Base::template Pieces<S, 1> leaves;
    Real bias[2][S::NT][2];
  };
  template <class S, class O> DEVICE void prepare(Own<S>& own) const {
    own.way = Base::template way<S, O>();
    const Element* const outputs[] = {output};
    if constexpr (Base::template kStaged<S>) Base::find_all(outputs, own.leaves);
    if constexpr (Pass::HAS_BIAS)
      Base::template each<S>([&](int h, int n, const Two& two) {
        UNROLL for (int i = 0; i < 2; ++i)
          own.bias[h][n][i] = widen(bias[Base::template feature<S>(two) + i * Base::template kApart<S>]);
      });
  }
  template <class S> DEVICE void first_state(const Two& two, Real (&x)[2]) const {
    const i64 sequence = begin + two.unit;
    const Element* const from = initial + sequence * Pass::HIDDEN + Base::template feature<S>(two);
    UNROLL for (int i = 0; i < 2; ++i) x[i] = sequence < Base::units ? widen(from[i * Base::template kApart<S>]) : Real(0);
  }

  DEVICE void run() const {
    const i64 input_row = number_at(params, Pass::kWalk + 8);
    const Streams<Element, kGates> inputs(params, Pass::kInputs);
    Own<Rows> by_rows;
    Own<Columns> by_columns;
    const auto hold = [&] { Base::template hold<Rows>(by_rows.held), Base::template hold<Columns>(by_columns.held); };
    const auto ready = [&](u32) {
      prepare<Rows, Columns>(by_rows), prepare<Columns, Rows>(by_columns);
      Base::template each<Rows>([&](int, int, const Two& two) {
        Real x[2];
        first_state<Rows>(two, x);
        Base::template give_state<Rows>(0, two, x[0], x[1]);
      });
      Base::template each<Columns>([&](int, int, const Two& two) {
        Real x[2];
        first_state<Columns>(two, x);
        Base::template keep_here<Columns>(two, x);
      });
      if (threadIdx.x > 0) return;
      Base::make_barriers();
      Base::template expect<Columns>(true, false), Base::template expect<Rows>(true, true);
    };
    const auto loader = [&] {
      typename Base::template Pieces<Rows> of_rows;
      typename Base::template Pieces<Columns> of_columns;
      Base::find_all(inputs.of, of_rows), Base::find_all(inputs.of, of_columns);
      return [=, &inputs](u32 slot, u32 step, const Row& row, int unit) {
        if (step % 2 == 1)
          Base::load(inputs.of, of_rows, slot, row.at(input_row), unit);
        else
          Base::load(inputs.of, of_columns, slot, row.at(input_row), unit);
      };
    };
    Made made;
    const u32 steps =
        Base::template walk_together<Pass::SLOTS - 1>(hold, loader, ready, [&](u32 step, u32 steps, const auto& meanwhile) {
          if (step % 2 == 0)
            go(step, step + 1 == steps, by_rows, by_columns, made, meanwhile);
          else
            go(step, step + 1 == steps, by_columns, by_rows, made, meanwhile);
        });
    if (steps % 2 == 0)
      give_made(by_rows, made);
    else
      give_made(by_columns, made);
    Base::leave();
  }

  // What a step has made of a lane's features, on either side, until it is on its way to memory: while others are waited for
  static constexpr int kMost = Rows::NT > Columns::NT ? Rows::NT : Columns::NT;
  struct Made {
    Both of[2][kMost];
    Row rows[Base::kOne ? 1 : kMost] = {};
  };
  template <class S> DEVICE void give_made(const Own<S>& own, const Made& made) const {
    if constexpr (Base::template kStaged<S>) {
      if (made.rows[0].there()) Base::give_staged(own.leaves, [&](int) { return made.rows[0].at(Pass::HIDDEN); });
      return;
    }
    Base::template each<S>([&](int h, int n, const Two& two) {
      const Row row = made.rows[n % Base::template kSequences<S>];
      if (row.there()) Base::template give<S>(output + row.at(Pass::HIDDEN) + Base::template feature<S>(two), made.of[h][n]);
    });
  }

  template <class S, class O, class Meanwhile>
  DEVICE void go(u32 step, bool is_last, const Own<S>& from, const Own<O>& to, Made& made, const Meanwhile& meanwhile) const {
    if (Base::template has_tile<S>(warp)) {
      Sums<S> y[kGates] = {};
      Base::template multiply<S, 1>(y, from.held);
      Base::template hand_on<S, O>(y, from.way);
    }
    give_made(from, made);
    Both x[kGates][2][O::NT];
    Row next[Base::template kSequences<O>];
    UNROLL for (int n = 0; n < Base::template kSequences<O>; ++n)
      made.rows[n] = Base::template row_of<O>(step, n), next[n] = Base::template row_of<O>(step + 1, n);
    if (Base::template has_tile<O>(warp)) {
      Base::template take_all<O>(step, x);
    }
    meanwhile();
    if (Base::template has_tile<O>(warp)) end(step, is_last, to, x, made, next);
    Base::next_is_there();
  }
  // The sums of all gates, and the new state
  template <class O>
  DEVICE void end(u32 step, bool is_last, const Own<O>& to, const Both (&x)[kGates][2][O::NT], Made& made,
                  const Row (&next)[Base::template kSequences<O>]) const {
    Base::template wait<O>(step);
    if (threadIdx.x == 0) Base::template expect<O>(true, true);
    Sums<O> y[kGates] = {};
    Base::template multiply_handed_on<O>(y, to.held);
    Real state[2][O::NT][2];
    Base::template read_kept<O>(state);
    Base::template each<O>([&](int h, int n, const Two&) {
      const bool there = made.rows[n % Base::template kSequences<O>].there();
      UNROLL for (int i = 0; i < 2; ++i) {
        Real product = y[2][n][h * 2 + i];
        if constexpr (Pass::HAS_BIAS) product += to.bias[h][n][i];
        const Real r = gate.of(x[0][h][n].of(i) + y[0][n][h * 2 + i]), z = gate.of(x[1][h][n].of(i) + y[1][n][h * 2 + i]);
        const Real given = candidate.of(x[2][h][n].of(i) + r * product);
        state[h][n][i] = there ? given + z * (state[h][n][i] - given) : state[h][n][i];
      }
      made.of[h][n] = Both(state[h][n][0], state[h][n][1]);
    });
    if constexpr (Base::template kStaged<O>)
      UNROLL for (int n = 0; n < O::NT; ++n) Base::template stage<O>(0, n, made.of[0][n], made.of[1][n]);
    Base::template each<O>([&](int h, int n, const Two& two) {
      if (next[n % Base::template kSequences<O>].starts()) first_state<O>(two, state[h][n]);
    });
    Base::template each<O>([&](int h, int n, const Two& two) {
      const Real(&x)[2] = state[h][n];
      Base::template give_state<O>(0, two, x[0], x[1]);
      if (!is_last) Base::template keep<O>(to.way, h, n, x[0], x[1]);
    });
  }
};
