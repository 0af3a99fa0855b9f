// What is the same, forward and back, of a gated recurrent unit with a dense recurrent matrix that several blocks share: along y of
// the grid each has OWN features of the state and their rows of the matrix, of all gates, in shared memory. All blocks are on the GPU
// at once.
//
// At every step a block needs what the others have made of the whole state. They hand it on in the tensors themselves that a step
// writes (HANDED of them): each number has all bits set until it is there, which no number that is computed has (NaNs that
// instructions make have others), and a reader asks again until none is left. So a step waits for no barrier of the grid, and as every
// step has rows of its own, nobody has to know what others have read.
//
// A warp has a slice of the matrix's columns and sums for all gates and own features; then threads add up what warps have, of two
// features each, whose state they keep from step to step.
//
// Pass: what chain.cuh asks for, whose UNITS are the sequences of a block, and Slice, the contraction of a warp; HIDDEN, OWN, PARTS
//       of the state, HANDED; PAIRED, whether pairs of features are always whole; ROW, elements from a row of states to the next in
//       shared memory; SUMMED, gates that are summed apart; kWalk (recurrent_rows.cuh), kRowsAt, kStatesAt, kSumsAt; DOWN; TURNED,
//       whether weights are turned
#pragma once
#include "kernels/chain.cuh"
#include "kernels/recurrent/recurrent_rows.cuh"

template <class Pass> struct Spread : Chain<Pass> {
  using Base = Chain<Pass>;
  using typename Base::Element, typename Base::Math;
  using Base::kBlock, Base::kSize, Base::lane, Base::params, Base::units, Base::warp;
  using Real = Sum<Element>;
  using S = typename Pass::Slice;
  template <class Stage> using Sums = typename Base::template Sums<Stage>;
  static constexpr int kCodes = 4, kOfSequence = Pass::OWN / 2, kPairs = Pass::UNITS * kOfSequence, kRounds = ceil_div(kPairs, kBlock);
  static constexpr int kRowBytes = Pass::HIDDEN * kSize;
  static constexpr int kPiece = kRowBytes % 16 == 0 ? 16 : kRowBytes % 8 == 0 ? 8 : kRowBytes % 4 == 0 ? 4 : 2;
  static constexpr int kWords = kPiece < 4 ? 1 : kPiece / 4, kOfRow = kRowBytes / kPiece;
  const u32 shared;
  const int part;  // the first of the block's features

  DEVICE explicit Spread(const Params& p) : Base(p), shared(shared_address(shared_memory)), part(blockIdx.y * Pass::OWN) {}

  DEVICE Rows<Pass::UNITS, kCodes> rows() const { return {shared + Pass::kRowsAt}; }
  DEVICE u32 states(int handed) const { return shared + Pass::kStatesAt + handed * Pass::UNITS * Pass::ROW * kSize; }

  // Own rows of each gate's matrix, or columns
  DEVICE void load_own() const {
    constexpr int kLength = Pass::WARPS * S::P;
    for (int gate = 0; gate < kGates; ++gate) {
      const Element* const from = static_cast<const Element*>(params.weights[gate]);
      const u32 to = Base::template weight_address<S>(gate);
      const auto q_of = [](int j) { return Pass::TURNED ? j % Pass::OWN : j / kLength; };
      const auto p_of = [](int j) { return Pass::TURNED ? j / Pass::OWN : j % kLength; };
      Base::template by_registers<Pass::OWN * kLength, kBlock>(
          threadIdx.x,
          [&](int j) {
            const i64 q = part + q_of(j), p = p_of(j);
            if (q >= Pass::HIDDEN || p >= Pass::HIDDEN) return Element{};
            return Pass::TURNED ? from[p * Pass::HIDDEN + q] : from[q * Pass::HIDDEN + p];
          },
          [&](int j) { return to + (q_of(j) * S::W_STRIDE + Math::place_of(p_of(j), false)) * kSize; });
    }
  }

  DEVICE static bool is_missing(const u32 (&words)[kWords]) {
    if constexpr (kSize == 8) {
      bool missing = false;
      UNROLL for (int i = 0; i < kWords; i += 2) missing |= (words[i] & words[i + 1]) == ~0u;
      return missing;
    } else if constexpr (kSize == 4) {
      bool missing = false;
      UNROLL for (int i = 0; i < kWords; ++i) missing |= words[i] == ~0u;
      return missing;
    } else {
      bool missing = false;
      UNROLL for (int i = 0; i < kWords; ++i) missing |= words[i] >= 0xffff0000u || (kPiece >= 4 && (words[i] & 0xffff) == 0xffff);
      if (kPiece < 4) missing = (words[0] & 0xffff) == 0xffff;
      return missing;
    }
  }
  // Rows that blocks hand on, to shared memory; from(tensor, sequence) is where one begins, or null, and handed_on(sequence) whether
  // it may not be there yet.
  template <class From, class HandedOn> DEVICE void gather(const From& from, const HandedOn& handed_on) const {
    constexpr int kAll = Pass::HANDED * Pass::UNITS * kOfRow, kTogether = ceil_div(kAll, kBlock) < 8 ? ceil_div(kAll, kBlock) : 8;
    ROLL for (int begin = threadIdx.x; begin < kAll; begin += kTogether * kBlock) {
      const Element* at[kTogether];
      u32 to[kTogether], words[kTogether][kWords];
      bool waits[kTogether];
      UNROLL for (int i = 0; i < kTogether; ++i) {
        const int j = begin + i * kBlock, row = j / kOfRow, piece = j % kOfRow, unit = row % Pass::UNITS;
        at[i] = j < kAll ? from(row / Pass::UNITS, unit) : nullptr;
        waits[i] = at[i] && handed_on(unit);
        if (at[i]) at[i] += piece * (kPiece / kSize);
        to[i] = states(0) + row * Pass::ROW * kSize + piece * kPiece;
      }
      UNROLL for (int i = 0; i < kTogether; ++i)
        if (at[i]) load_now<kPiece>(at[i], words[i]);
      for (bool again = true; again;) {
        again = false;
        UNROLL for (int i = 0; i < kTogether; ++i)
          if (waits[i] && is_missing(words[i])) load_now<kPiece>(at[i], words[i]), again = true;
      }
      UNROLL for (int i = 0; i < kTogether; ++i)
        if (at[i]) {
          if constexpr (kPiece == 2)
            store_shared(to[i], static_cast<unsigned short>(words[i][0]));
          else
            UNROLL for (int w = 0; w < kWords; ++w) store_shared(to[i] + w * 4, words[i][w]);
        }
    }
  }

  DEVICE u32 sums_address(int warp, int gate, int unit, int feature) const {
    return shared + Pass::kSumsAt + (((warp * Pass::SUMMED + gate) * Pass::UNITS + unit) * Pass::OWN + feature) * int(sizeof(Real));
  }
  // A warp's slice of the products, of all gates, which may be summed together
  DEVICE void multiply_slice() const {
    const u32 behind = warp * S::P * kSize;
    UNROLL for (int tile = 0; tile < S::TILES; ++tile) {
      Sums<S> y[Pass::SUMMED] = {};
      UNROLL for (int gate = 0; gate < kGates; ++gate) {
        Sums<S> made = {};
        const u32 state = states(Pass::HANDED > 1 ? gate : 0) + behind, weight = Base::template weight_address<S>(gate) + behind;
        Base::template multiply<S>(made, tile, state, weight);
        if constexpr (Math::kRepairs) Base::template repair<S>(made, tile, state, weight);
        add_sums(y[gate % Pass::SUMMED], made);
      }
      const auto [row, o, i] = Base::template corner<S>(tile);
      UNROLL for (int gate = 0; gate < Pass::SUMMED; ++gate)
        UNROLL for (int h = 0; h < 2 * S::MT; ++h)
          UNROLL for (int n = 0; n < S::NT; ++n) {
            const int unit = row + h * 8 + lane.g, feature = i + n * 8 + lane.t * 2;
            const auto& four = y[gate][h / 2][n];
            if (unit < Pass::UNITS && feature < Pass::OWN)
              store_shared(sums_address(warp, gate, unit, feature), Pair<Real>(four[h % 2 * 2], four[h % 2 * 2 + 1]));
          }
    }
  }
  DEVICE void added_up(int gate, int unit, int feature, Real (&sums)[2]) const {
    sums[0] = sums[1] = 0;
    UNROLL for (int w = 0; w < Pass::WARPS; ++w) {
      const u32 from = sums_address(w, gate, unit, feature);
      UNROLL for (int i = 0; i < 2; ++i) sums[i] += load_sum(from + i * int(sizeof(Real)), Real());
    }
  }

  // Two features of a sequence, which a thread has in one of its rounds
  struct Two {
    int unit, feature;  // of the block's
    bool first, second;
  };
  DEVICE Two two(int round, i64 begin) const {
    const int pair = threadIdx.x + round * kBlock, unit = pair / kOfSequence, feature = pair % kOfSequence * 2;
    const bool there = pair < kPairs && begin + unit < units && part + feature < Pass::HIDDEN;
    return {unit, feature, there, there && part + feature + 1 < Pass::HIDDEN};
  }
  DEVICE void read(const Element* from, const Two& two, Real (&x)[2]) const {
    if constexpr (Pass::PAIRED) {
      u32 words[2 * kSize / 4];
      load_global<2 * kSize>(from, words, two.first);
      UNROLL for (int i = 0; i < 2; ++i) {
        if constexpr (kSize == 8)
          x[i] = double_of(words[i * 2], words[i * 2 + 1]);
        else if constexpr (kSize == 4)
          x[i] = __uint_as_float(words[i]);
        else
          x[i] = widen(Element{static_cast<unsigned short>(words[0] >> i * 16)});
      }
    } else {
      UNROLL for (int i = 0; i < 2; ++i) x[i] = (i == 0 ? two.first : two.second) ? widen(from[i]) : Real(0);
    }
  }
  DEVICE void give(Element* to, const Two& two, Real first, Real second) const {
    if constexpr (Pass::PAIRED) {
      const Pair<Element> pair(first, second);
      store_words<2 * kSize>(to, *reinterpret_cast<const Words<2 * kSize>*>(&pair));
    } else {
      store_global(to, narrow<Element>(first));
      if (two.second) store_global(to + 1, narrow<Element>(second));
    }
  }

  // Blocks along x take groups of sequences one after another: each from its first step to its last one. begin_group(first sequence)
  // and then step(number, first sequence, its threads' rows).
  template <class Begin, class Go, class End> DEVICE void walk(const Begin& begin_group, const Go& go, const End& end) const {
    for (int at = threadIdx.x * 16; at < Pass::kSumsAt - Pass::kStatesAt; at += kBlock * 16) store_u32x4(states(0) + at, {0, 0, 0, 0});
    Base::hold_weights(*this);
    const Walk walk(params, Pass::kWalk);
    ROLL for (i64 begin = i64(blockIdx.x) * Pass::UNITS; begin < units; begin += i64(gridDim.x) * Pass::UNITS) {
      const u32 steps = walk.longest(begin, Pass::UNITS, units);
      const bool reads_rows = threadIdx.x < Pass::UNITS;
      Ahead<Pass::DOWN> ahead(walk, begin + threadIdx.x, reads_rows && begin + threadIdx.x < units);
      ahead.advance(0);
      __syncthreads();  // nobody reads the rows of the group before
      for (u32 step = 0; step < kCodes - 1; ++step)
        if (const Row row = ahead.advance(step + 1); reads_rows) rows().publish(step, threadIdx.x, row);
      __syncthreads();
      begin_group(begin);
      ROLL for (u32 step = 0; step < steps; ++step)
        go(step, begin, [&] {
          if (const Row row = ahead.advance(step + kCodes); reads_rows) rows().publish(step + kCodes - 1, threadIdx.x, row);
        });
      end(begin);
    }
  }
};
