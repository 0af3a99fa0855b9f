// What recurrent kernels share, forward and back: a block takes UNITS sequences through all their steps, with the recurrent
// weights of all gates in shared memory. What a sequence's state is multiplied by at every step are contractions as chain.cuh has
// them; the sums of the last one stay with the lanes that made them, which keep the state of the same features from step to step.
//
// Pass: what recurrent_walk.cuh asks for; HIDDEN, features of this block's part of a state, PARTS of them; PAIRED, whether two
//       neighbouring features are always one lane's and lie together; Last, the last contraction, RESULT, how what it makes, and
//       streams, lie, and before_last(), all contractions but the last; LAYOUT, how the first one reads the state, kStateBytes of
//       one, and EVEN, whether a lane's features lie in it at constants behind its first
#pragma once
#include "kernels/recurrent/recurrent_walk.cuh"
#include "kernels/recurrent/untied.cuh"

// Where the last contraction of a step reads what others have made for it: of the first gate, and from one gate to the next
struct Gathered {
  u32 at;
  int apart;
};

template <class Pass> struct RecurrentSteps : UntiedProducts<RecurrentWalk<Pass>> {
  using Base = UntiedProducts<RecurrentWalk<Pass>>;
  using typename Base::Element, typename Base::Math;
  using Base::kSize, Base::lane, Base::multiplies, Base::row, Base::shared, Base::stream_address, Base::warp;
  using Real = Sum<Element>;
  using Last = typename Pass::Last;
  using Result = typename Pass::RESULT;
  template <class S> using Sums = typename Base::template Sums<S>;
  static constexpr int kRounds = ceil_div(Last::TILES, Pass::WARPS), kHalves = 2 * Last::MT;
  static constexpr i64 kWhole = i64(Pass::HIDDEN) * Pass::PARTS;
  using State = Real[kRounds][kHalves][Last::NT][2];  // a lane's features, as its sums of the last contraction lie
  DEVICE RecurrentSteps(const Params& p) : Base(p) {}

  // Two neighbouring features of a lane: the place of the first among those of the tile, where its stream and its state lie, and
  // whether they are there. Those of a warp tile lie at constants behind its first ones.
  struct Two {
    int element, of_stream, of_state;
    bool first, second;
    DEVICE int unit() const { return Pass::UNITS == 1 ? 0 : element / Pass::HIDDEN; }
    DEVICE int feature() const { return Pass::UNITS == 1 ? element : element % Pass::HIDDEN; }
  };
  // The first of a round's features, and what is asked of their places: kept, as the compiler would make them again at every step
  struct Corner {
    int r, c, o, element, of_stream, of_state;
  };
  struct Corners {
    Corner of[kRounds];
  };
  DEVICE Corners corners() const {
    Corners made;
    UNROLL for (int round = 0; round < kRounds; ++round) {
      auto [row, o, i] = Base::template corner<Last>(warp + round * Pass::WARPS);
      row += lane.g, i += lane.t * 2;
      Corner& corner = made.of[round];
      const int element = Last::BY_ROWS ? row * Last::Q + i : (o * Last::Q + row) * Last::I + i;
      corner = {row, i, o, element, Last::BY_ROWS ? row * Result::ROW + i : o * Result::ROW + row * Result::STEP + i,
                Pass::EVEN ? Pass::LAYOUT::at(element) : 0};
      stay_here(corner.element, corner.of_stream), stay_here(corner.of_state, corner.r);
    }
    return made;
  }
  DEVICE Two two(const Corner& corner, int h, int n) const {
    constexpr bool kAllM = Last::M % (Last::MT * 16) == 0;
    const int r = corner.r + h * 8;
    if constexpr (Last::BY_ROWS) {
      const int behind = h * 8 * Last::Q + n * 8, c = corner.c + n * 8;
      const bool there = kAllM || r < Last::M;
      return {corner.element + behind, corner.of_stream + h * 8 * Result::ROW + n * 8, state_place(corner, behind),
              there && (Last::Q % Last::WIDE == 0 || c < Last::Q), there && (Last::Q % Last::WIDE == 0 || c + 1 < Last::Q)};
    } else {
      const int down = Last::DOWN > 1 ? n * 8 / Last::IP : 0, c = corner.c + n * 8 - down * Last::IP;
      const int behind = down * Last::Q * Last::I + h * 8 * Last::I + n * 8 - down * Last::IP;
      const bool there = (kAllM || r < Last::M) && (Last::ROWS % Last::DOWN == 0 || corner.o + down < Last::ROWS);
      constexpr bool kAllN = Last::I == Last::ACROSS * Last::WIDE / Last::DOWN;
      return {corner.element + behind,
              corner.of_stream + down * Result::ROW + h * 8 * Result::STEP + n * 8 - down * Last::IP, state_place(corner, behind),
              there && (kAllN || c < Last::I), there && (kAllN || c + 1 < Last::I)};
    }
  }
  DEVICE static int state_place(const Corner& corner, int behind) {
    return Pass::EVEN ? corner.of_state + Pass::LAYOUT::at(behind) : Pass::LAYOUT::at(corner.element + behind);
  }
  // go(round, h, n, its two features) for all of a lane, or those of one round
  template <class Go> DEVICE void each_of(const Corners& corners, int round, const Go& go) const {
    if (Last::TILES % Pass::WARPS && warp + round * Pass::WARPS >= Last::TILES) return;
    UNROLL for (int h = 0; h < kHalves; ++h)
      UNROLL for (int n = 0; n < Last::NT; ++n) {
        const Two two = this->two(corners.of[round], h, n);
        if (two.first) go(round, h, n, two);
      }
  }
  template <class Go> DEVICE void each(const Corners& corners, const Go& go) const {
    UNROLL for (int round = 0; round < kRounds; ++round) each_of(corners, round, go);
  }
  // The same with what the step is to each one's sequence, for those that have it. Of one sequence it is read once.
  template <class Go> DEVICE void each_of_step(const Corners& corners, int round, u32 step, const Go& go) const {
    if (!multiplies()) return;
    const Row only = row(step, 0);
    if (Pass::UNITS == 1 && !only.there()) return;
    each_of(corners, round, [&](int, int h, int n, const Two& two) {
      const Row mine = Pass::UNITS == 1 ? only : row(step, two.unit());
      if (Pass::UNITS == 1 || mine.there()) go(h, n, two, mine);
    });
  }

  // What is read at each step: in a slot of shared memory a stream lies as the result of the last contraction would
  DEVICE void take(u32 step, int stream, const Two& two, Real (&x)[2]) const {
    const u32 from = stream_address(step, stream) + two.of_stream * kSize;
    if constexpr (Pass::PAIRED)
      load_two<Element>(from, x);
    else
      UNROLL for (int i = 0; i < 2; ++i) x[i] = i == 0 || two.second ? Base::number(from + i * kSize) : Real(0);
  }
  // How its threads bring a row of a stream: pieces of BYTES, which no row of its layout cuts, in steps of STEP elements.
  struct Pieces {
    static constexpr int kRun = Last::BY_ROWS ? Last::Q : Last::I, kThreads = 32, kBytesOfRun = kRun * kSize;
    static constexpr int BYTES = kBytesOfRun % 16 == 0 ? 16 : kBytesOfRun % 8 == 0 ? 8 : kBytesOfRun % 4 == 0 ? 4 : 2;
    static constexpr int EACH = BYTES < kSize ? 1 : BYTES / kSize, STEP = kThreads * EACH, COUNT = ceil_div(Pass::HIDDEN, STEP);
    static constexpr bool EVEN = STEP % kRun == 0 || kRun % STEP == 0;  // a thread's pieces lie at constants behind its first
    static constexpr int behind(int j) { return Result::at(j * STEP); }
    int first, place;  // of a thread
    DEVICE explicit Pieces(int thread) : first(thread * EACH), place(Result::at(first)) { stay_here(first, place); }
  };
  DEVICE static void load_stream(u32 to, const Element* from, int unit, const Pieces& pieces) {
    using P = Pieces;
    to += Result::at(Pass::HIDDEN) * unit * kSize;
    if constexpr (P::BYTES >= 4) {
      UNROLL_BY(P::COUNT <= 16 ? P::COUNT : 8) for (int j = 0; j < P::COUNT; ++j) {
        const int i = pieces.first + j * P::STEP, place = P::EVEN ? pieces.place + P::behind(j) : Result::at(i);
        if (Pass::HIDDEN % P::STEP == 0 || i < Pass::HIDDEN) copy_async<P::BYTES>(to + place * kSize, from + i, true);
      }
    } else {
      Base::template by_registers<Pass::HIDDEN, P::kThreads>(
          pieces.first, [&](int i) { return from[i]; }, [&](int i) { return to + Result::at(i) * kSize; });
    }
  }

  // Two numbers to memory, or to where the first contraction reads a state
  DEVICE void give(Element* to, const Two& two, Real first, Real second) const {
    store_two<Pass::PAIRED>(to, first, second, two.second);
  }
  DEVICE void give_state(u32 state, const Two& two, Real first, Real second) const {
    const u32 to = state + two.of_state * kSize;
    first = Math::rounded(first), second = Math::rounded(second);
    if constexpr (Pass::PAIRED) {
      store_shared(to, Pair<Element>(first, second));
    } else {
      store_shared(to, narrow<Element>(first));
      if (two.second) store_shared(state + Pass::LAYOUT::at(two.element + 1) * kSize, narrow<Element>(second));
    }
  }

  template <class S> DEVICE void add_product(Sums<S>& y, int tile, int part, int gate, u32 state) const {
    const u32 weight = Base::template weight_address<S>(gate);
    if constexpr (S::TIED)
      Base::template multiply<S, true>(y, tile, state, weight);
    else
      Base::template multiply_untied<S>(y, tile, part, state, weight);
    if constexpr (Math::kRepairs) Base::template repair<S>(y, tile, state, weight);
  }
  // One contraction of the states of gates from FIRST up to END, which lie `apart` bytes from each other, or are all the same.
  template <class S, int FIRST, int END> DEVICE void contract(u32 from, int apart, u32 to, int to_apart) const {
    ROLL for (int j = multiplies() ? warp : S::TILES * (END - FIRST); j < S::TILES * (END - FIRST); j += Pass::WARPS) {
      const int gate = FIRST + j % (END - FIRST), tile = j / (END - FIRST) / S::PARTS, part = j / (END - FIRST) % S::PARTS;
      Sums<S> y = {};
      add_product<S>(y, tile, part, gate, from + gate * apart);
      Base::template write<S, false>(y, tile, to + gate * to_apart, 0, 0, part);
    }
    __syncthreads();
  }
  // take_sums(round, its sums of each gate from FIRST up to END) of the last contraction
  template <int FIRST, int END, class Go> DEVICE void contract_last(const Gathered& from, const Go& take_sums) const {
    if (!multiplies()) return;
    UNROLL for (int round = 0; round < kRounds; ++round) {
      const int tile = warp + round * Pass::WARPS;
      if (Last::TILES % Pass::WARPS && tile >= Last::TILES) break;
      Sums<Last> y[END - FIRST] = {};
      UNROLL for (int g = FIRST; g < END; ++g) add_product<Last>(y[g - FIRST], tile, 0, g, from.at + g * from.apart);
      take_sums(round, y);
    }
  }
};
