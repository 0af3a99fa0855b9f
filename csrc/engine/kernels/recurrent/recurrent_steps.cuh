// What recurrent kernels share, forward and back: a block takes UNITS sequences through all their steps, with the recurrent
// weights of all gates in shared memory. What a sequence's state is multiplied by at every step are contractions as chain.cuh has
// them; the sums of the last one stay with the lanes that made them, which keep the state of the same features from step to step.
//
// Pass: what chain.cuh asks for, and HIDDEN, features of this block's part of a state, PARTS of them; STREAMS, tensors with a row
//       for each step that a lane reads its features of, SLOTS steps before they are needed; PAIRED, whether two neighbouring
//       features are always one lane's and lie together; Last, the last contraction, and before_last(), all others; LAYOUT,
//       how the first one reads the state, kStateBytes of one; kWalk, the weight's place behind which is where rows lie (Walk below);
//       kRowsAt and kStreamsAt in shared memory; DOWN, whether steps are walked from a sequence's last one to its first one
#pragma once
#include "kernels/chain.cuh"

constexpr int kGates = 3;  // reset, update, candidate

// Where the last contraction of a step reads what others have made for it: of the first gate, and from one gate to the next
struct Gathered {
  u32 at;
  int apart;
};

template <class Pass> struct RecurrentSteps : Chain<Pass> {
  using Base = Chain<Pass>;
  using typename Base::Element, typename Base::Math;
  using Base::kBlock, Base::kSize, Base::lane, Base::memory, Base::params, Base::units, Base::warp;
  using Real = Sum<Element>;
  using Last = typename Pass::Last;
  template <class S> using Sums = typename Base::template Sums<S>;
  static constexpr int kRounds = ceil_div(Last::TILES, Pass::WARPS), kHalves = 2 * Last::MT, kPairs = kRounds * kHalves * Last::NT;
  static constexpr int kPairBytes = 2 * kSize, kCodes = Pass::SLOTS + 2;
  using State = Real[kRounds][kHalves][Last::NT][2];  // a lane's features, as its sums of the last contraction lie
  const u32 shared;
  const i64 begin;  // the block's first sequence

  DEVICE RecurrentSteps(const Params& p)
      : Base(p), shared(shared_address(shared_memory)), begin(i64(blockIdx.x) * Pass::UNITS) {}

  // Tensors and numbers in the places behind the weights
  template <class T> DEVICE T* tensor(int i) const { return static_cast<T*>(const_cast<void*>(params.weights[i])); }
  DEVICE i64 number(int i) const { return reinterpret_cast<i64>(params.weights[i]); }

  // Where the rows of sequences lie: maths/steps.py's Walk, and whether a sequence begins again at a row. What these say of rows
  // that tensors have not is left out.
  struct Walk {
    const unsigned char* starts;
    const i64 *first, *lengths, *offsets;
    i64 steps, of_sequence, of_step, rows;
    DEVICE explicit Walk(const RecurrentSteps& r)
        : starts(r.tensor<unsigned char>(Pass::kWalk)), first(r.tensor<i64>(Pass::kWalk + 1)), lengths(r.tensor<i64>(Pass::kWalk + 2)),
          offsets(r.tensor<i64>(Pass::kWalk + 3)), steps(r.number(Pass::kWalk + 4)), of_sequence(r.number(Pass::kWalk + 5)),
          of_step(r.number(Pass::kWalk + 6)), rows(r.number(Pass::kWalk + 7)) {}
    DEVICE i64 length(i64 sequence) const { return lengths && lengths[sequence] < steps ? lengths[sequence] : steps; }
    DEVICE i64 offset(i64 step) const { return offsets ? offsets[step] : step * of_step; }
  };

  // The rows of one sequence, which a thread reads ahead: an offset, what begins at its row, and a code of both, step after step.
  // A code is 0 behind the last step, or twice the row, and 2, with a bit more where the sequence begins again.
  struct Ahead {
    const Walk& walk;
    i64 length, first, offset, code = 0;
    unsigned char starts = 0;
    DEVICE Ahead(const Walk& walk, i64 sequence, bool there)
        : walk(walk), length(there ? walk.length(sequence) : 0),
          first(there && walk.first ? walk.first[sequence] : sequence * walk.of_sequence), offset(offset_of(0)) {}
    DEVICE i64 offset_of(i64 step) const { return step < length ? walk.offset(Pass::DOWN ? length - 1 - step : step) : 0; }
    // What is known of the step before `step` is handed on, and what is to be known of `step` asked for.
    DEVICE i64 advance(i64 step) {
      const i64 known = code + (starts != 0), row = first + offset;
      const bool there = step < length && row >= 0 && row < walk.rows;
      code = there ? 2 * row + 2 : 0;
      starts = there && walk.starts ? walk.starts[row] : 0;
      offset = offset_of(step + 1);
      return known;
    }
  };
  DEVICE u32 code_address(i64 step, int unit) const { return shared + Pass::kRowsAt + (int(step % kCodes) * Pass::UNITS + unit) * 8; }
  DEVICE void publish(i64 step, int unit, i64 code) const {
    UNROLL for (int i = 0; i < 2; ++i) store_shared(code_address(step, unit) + i * 4, u32(code >> i * 32));
  }
  DEVICE i64 code(i64 step, int unit) const {
    u32 words[2];
    load_u32x2(code_address(step, unit), words);
    return i64(u64(words[1]) << 32 | words[0]);
  }

  // Two neighbouring features of a lane: which of the tile's they are, and whether they are there.
  struct Two {
    int element;
    bool first, second;
    DEVICE int unit() const { return Pass::UNITS == 1 ? 0 : element / Pass::HIDDEN; }
    DEVICE int feature() const { return Pass::UNITS == 1 ? element : element % Pass::HIDDEN; }
  };
  DEVICE Two two(int tile, int h, int n) const {
    const auto [row, o, i] = Base::template corner<Last>(tile);
    const int r = row + h * 8 + lane.g;
    if constexpr (Last::BY_ROWS) {
      const int c = i + lane.t * 2 + n * 8;
      return {r * Last::Q + c, r < Last::ROWS && c < Last::Q, r < Last::ROWS && c + 1 < Last::Q};
    } else {
      const int down = Last::DOWN > 1 ? n * 8 / Last::IP : 0, c = i + lane.t * 2 + n * 8 - down * Last::IP;
      const bool there = r < Last::Q && o + down < Last::ROWS;
      return {((o + down) * Last::Q + r) * Last::I + c, there && c < Last::I, there && c + 1 < Last::I};
    }
  }
  // go(round, h, n, its two features) for all of a lane, or those of one round
  template <class Go> DEVICE void each_of(int round, const Go& go) const {
    const int tile = warp + round * Pass::WARPS;
    if (Last::TILES % Pass::WARPS && tile >= Last::TILES) return;
    UNROLL for (int h = 0; h < kHalves; ++h)
      UNROLL for (int n = 0; n < Last::NT; ++n) {
        const Two two = this->two(tile, h, n);
        if (two.first) go(round, h, n, two);
      }
  }
  template <class Go> DEVICE void each(const Go& go) const {
    UNROLL for (int round = 0; round < kRounds; ++round) each_of(round, go);
  }

  // What a lane reads of tensors step by step: of each its two features, in slots of shared memory that are its own.
  // `rows` apart from each other in memory are a stream's rows, `wide` says that its numbers are Reals.
  DEVICE static constexpr int place_of(int round, int h, int n) { return (round * kHalves + h) * Last::NT + n; }
  DEVICE u32 stream_address(i64 step, int at, int bytes, int pair) const {
    return shared + Pass::kStreamsAt + int(step % Pass::SLOTS) * Pass::kSlotBytes + (at * kPairs + pair * (bytes / kSize)) * kPairBytes * kBlock +
           threadIdx.x * 2 * bytes;
  }
  template <class T> DEVICE void ask(i64 step, int at, int pair, const T* from, const Two& two) const {
    const u32 to = stream_address(step, at, sizeof(T), pair);
    if constexpr (Pass::PAIRED) {
      copy_async<2 * sizeof(T)>(to, from, true);
    } else {
      store_shared(to, *from);
      if (two.second) store_shared(to + sizeof(T), from[1]);
    }
  }
  template <class T> DEVICE void take(i64 step, int at, int pair, Real (&x)[2]) const {
    const u32 from = stream_address(step, at, sizeof(T), pair);
    if constexpr (sizeof(T) == kSize) {
      Base::two_numbers(from, x);
    } else {
      u32 words[2];
      load_u32x2(from, words);
      UNROLL for (int i = 0; i < 2; ++i) x[i] = __uint_as_float(words[i]);
    }
  }

  // Two numbers to memory, or to where the first contraction reads a state
  DEVICE void give(Element* to, const Two& two, Real first, Real second) const {
    if constexpr (Pass::PAIRED) {
      const Pair<Element> pair(first, second);
      store_words<kPairBytes>(to, *reinterpret_cast<const Words<kPairBytes>*>(&pair));
    } else {
      store_global(to, narrow<Element>(first));
      if (two.second) store_global(to + 1, narrow<Element>(second));
    }
  }
  DEVICE void give_state(u32 state, const Two& two, Real first, Real second) const {
    using L = typename Pass::LAYOUT;
    const u32 to = state + L::at(two.element) * kSize;
    first = Math::rounded(first), second = Math::rounded(second);
    if constexpr (Pass::PAIRED) {
      store_shared(to, Pair<Element>(first, second));
    } else {
      store_shared(to, narrow<Element>(first));
      if (two.second) store_shared(state + L::at(two.element + 1) * kSize, narrow<Element>(second));
    }
  }

  template <class S> DEVICE void add_product(Sums<S>& y, int tile, int gate, u32 state) const {
    const u32 weight = Base::template weight_address<S>(gate);
    Base::template multiply<S>(y, tile, state, weight);
    if constexpr (Math::kRepairs) Base::template repair<S>(y, tile, state, weight);
  }
  // One contraction of the states of gates from FIRST up to END, which lie `apart` bytes from each other, or are all the same.
  template <class S, int FIRST, int END> DEVICE void contract(u32 from, int apart, u32 to, int to_apart) const {
    ROLL for (int j = warp; j < S::TILES * (END - FIRST); j += Pass::WARPS) {
      const int gate = FIRST + j % (END - FIRST), tile = j / (END - FIRST);
      Sums<S> y = {};
      add_product<S>(y, tile, gate, from + gate * apart);
      Base::template write<S, false>(y, tile, to + gate * to_apart, 0);
    }
    __syncthreads();
  }

  // The weights of all gates; zeros where states lie, for what their layouts pad.
  DEVICE void prepare() const {
    for (int at = threadIdx.x * 16; at < Pass::kGroupBytes; at += kBlock * 16) store_u32x4(memory + at, {0, 0, 0, 0});
    Base::hold_weights(*this);
  }
  // Steps of the longest of the block's sequences
  DEVICE i64 longest(const Walk& walk) const {
    i64 most = 0;
    for (int unit = 0; unit < Pass::UNITS && begin + unit < units; ++unit) {
      const i64 length = walk.length(begin + unit);
      if (length > most) most = length;
    }
    return most;
  }

  // One step after another: ask(step) begins what the step reads, go(step) makes it, and ends where all may go on.
  template <class Ask, class Go> DEVICE void walk(const Ask& ask, const Go& go) const {
    const Walk walk(*this);
    const i64 steps = longest(walk);
    const int unit = threadIdx.x;
    const bool reads_rows = unit < Pass::UNITS;
    Ahead ahead(walk, begin + unit, reads_rows && begin + unit < units);
    ahead.advance(0);
    for (int step = 0; step <= Pass::SLOTS; ++step)
      if (const i64 code = ahead.advance(step + 1); reads_rows) publish(step, unit, code);
    __syncthreads();
    for (int step = 0; step < Pass::SLOTS; ++step) ask(step), commit_copies();
    ROLL for (i64 step = 0; step < steps; ++step) {
      wait_for_copies<Pass::SLOTS - 1>();
      go(step);
      if (reads_rows) publish(step + Pass::SLOTS + 1, unit, ahead.advance(step + Pass::SLOTS + 2));
      ask(step + Pass::SLOTS);
      commit_copies();
      __syncthreads();
    }
    wait_for_copies<0>();
  }
};
