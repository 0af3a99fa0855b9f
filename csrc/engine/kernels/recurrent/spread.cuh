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
//       of the state, HANDED at once; PAIRED, whether pairs of features are always whole; ROW, elements from a row of states to the next in
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
  static constexpr int kLanes = 4;  // that add up what warps have summed of two features, and the first of which goes on with them
  static constexpr int kCodes = 4, kOfSequence = Pass::OWN / 2, kPairs = Pass::UNITS * kOfSequence;
  static constexpr int kRounds = ceil_div(kPairs * kLanes, kBlock);
  static constexpr int kRowBytes = Pass::HIDDEN * kSize;
  static constexpr int kPiece = kRowBytes % 16 == 0 ? 16 : kRowBytes % 8 == 0 ? 8 : kRowBytes % 4 == 0 ? 4 : 2;  // bytes at once
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

  // Whether some number is not there yet: of 16 bits, two neighbours come by one store.
  DEVICE static bool is_missing(const u32 (&words)[kWords]) {
    bool missing = false;
    if constexpr (kSize == 8)
      UNROLL for (int i = 0; i < kWords; i += 2) missing |= (words[i] & words[i + 1]) == ~0u;
    else if constexpr (kSize == 4 || Pass::PAIRED)
      UNROLL for (int i = 0; i < kWords; ++i) missing |= words[i] == ~0u;
    else
      missing = (words[0] & 0xffff) == 0xffff;
    return missing;
  }
  // Rows of COUNT tensors that blocks hand on, to shared memory, some of them by each warp; from(tensor, sequence) is where one begins,
  // or null, and handed_on(sequence) whether it may not be there yet.
  template <int COUNT = Pass::HANDED, class From, class HandedOn>
  DEVICE void gather(const From& from, const HandedOn& handed_on) const {
    constexpr int kAll = COUNT * Pass::UNITS, kOfLane = ceil_div(kOfRow, 32), kMost = kWords > 2 ? 12 : 16;
    constexpr int kAtOnce = kOfLane < kMost ? kMost / kOfLane : 1, kSome = kOfLane < kMost ? kOfLane : kMost;
    ROLL for (int begin = warp; begin < kAll; begin += kAtOnce * Pass::WARPS) {
      ROLL for (int piece = lane.index; piece < kOfRow; piece += kSome * 32) {
        const Element* at[kAtOnce] = {};
        u32 words[kAtOnce][kSome][kWords];
        const auto is_there = [&](int i) { return kOfRow % 32 == 0 && kOfLane % kSome == 0 ? true : piece + i * 32 < kOfRow; };
        const auto load = [&](int r, int i) { load_now<kPiece>(at[r] + i * 32 * (kPiece / kSize), words[r][i]); };
        UNROLL for (int r = 0; r < kAtOnce; ++r) {
          const int row = begin + r * Pass::WARPS;
          at[r] = row < kAll ? from(row / Pass::UNITS, row % Pass::UNITS) : nullptr;
          if (!at[r]) continue;
          at[r] += piece * (kPiece / kSize);
          UNROLL for (int i = 0; i < kSome; ++i)
            if (is_there(i)) load(r, i);
        }
        UNROLL for (int r = 0; r < kAtOnce; ++r) {
          const int row = begin + r * Pass::WARPS;
          if (!at[r]) continue;
          for (bool again = handed_on(row % Pass::UNITS); again;) {
            again = false;
            UNROLL for (int i = 0; i < kSome; ++i)
              if (is_there(i) && is_missing(words[r][i])) load(r, i), again = true;
          }
          const u32 to = states(0) + row * Pass::ROW * kSize + piece * kPiece;
          UNROLL for (int i = 0; i < kSome; ++i)
            if (is_there(i)) keep(to + i * 32 * kPiece, words[r][i]);
        }
      }
    }
  }
  DEVICE static void keep(u32 to, const u32 (&words)[kWords]) {
    if constexpr (kPiece == 16)
      store_u32x4(to, words);
    else if constexpr (kPiece == 2)
      store_shared(to, static_cast<unsigned short>(words[0]));
    else
      UNROLL for (int w = 0; w < kWords; ++w) store_shared(to + w * 4, words[w]);
  }

  static constexpr int kSumsOfWarp = Pass::SUMMED * Pass::UNITS * Pass::OWN * int(sizeof(Real)) + 64;  // bytes, in other banks each
  DEVICE u32 sums_address(int warp, int gate, int unit, int feature) const {
    return shared + Pass::kSumsAt + warp * kSumsOfWarp + ((gate * Pass::UNITS + unit) * Pass::OWN + feature) * int(sizeof(Real));
  }
  // A warp's slice of the products, step by step of gates from FIRST up to END, so that none waits for its own last one. All have the
  // same state, or each the next one, of several; gates may be summed together.
  template <int FIRST = 0, int END = kGates> DEVICE void multiply_slice() const {
    constexpr int kSummed = Pass::SUMMED == 1 ? 1 : END - FIRST;
    const u32 behind = warp * S::P * kSize;
    UNROLL for (int tile = 0; tile < S::TILES; ++tile) {
      Sums<S> y[END - FIRST] = {};
      products<FIRST>(y, tile, behind);
      if constexpr (Pass::SUMMED == 1)
        UNROLL for (int gate = 1; gate < END - FIRST; ++gate) add_sums(y[0], y[gate]);
      const auto [row, o, i] = Base::template corner<S>(tile);
      UNROLL for (int gate = 0; gate < kSummed; ++gate)
        UNROLL for (int h = 0; h < 2 * S::MT; ++h)
          UNROLL for (int n = 0; n < S::NT; ++n) {
            const int unit = row + h * 8 + lane.g, feature = i + n * 8 + lane.t * 2;
            const auto& four = y[gate][h / 2][n];
            if (unit < Pass::UNITS && feature < Pass::OWN)
              store_shared(sums_address(warp, Pass::SUMMED == 1 ? 0 : FIRST + gate, unit, feature), Pair<Real>(four[h % 2 * 2], four[h % 2 * 2 + 1]));
          }
    }
  }
  template <int FIRST, int COUNT> DEVICE void products(Sums<S> (&y)[COUNT], int tile, u32 behind) const {
    const auto state = [&](int gate) { return states(Pass::HANDED > 1 && COUNT > 1 ? gate : 0) + behind; };
    const auto weight = [&](int gate) { return Base::template weight_address<S>(FIRST + gate) + behind; };
    const auto [row, o, i] = Base::template corner<S>(tile);
    constexpr int kSteps = S::PP / Math::kStep, kFlush = Math::kFlush > 0 ? Math::kFlush : kSteps;
    static_assert(S::PP % Math::kStep == 0);
    u32 a[COUNT], b[COUNT][S::NT];
    UNROLL for (int g = 0; g < COUNT; ++g) {
      a[g] = state(g) + row * S::In::ROW * kSize + Math::template lane_row_a<S::In::ROW>(lane);
      b[g][0] = weight(g) + i * S::W_STRIDE * kSize + Math::template lane_row_b<S::W_STRIDE>(lane);
    }
    UNROLL_BY(kFlush < 4 ? 2 : 1) for (int begin = 0; begin < kSteps; begin += kFlush) {
      Sums<S> part[COUNT] = {};
      UNROLL_BY(kFlush <= 8 ? kFlush : 4) for (int k = 0; k < kFlush; ++k)
        if (kSteps % kFlush == 0 || begin + k < kSteps)
          UNROLL for (int g = 0; g < COUNT; ++g)
            Base::template step<S, Math::kStep, S::In::ROW>(part[g], a[g], b[g], (begin + k) * Math::kStep);
      UNROLL for (int g = 0; g < COUNT; ++g) add_sums(y[g], part[g]);
    }
    if constexpr (Math::kRepairs)
      UNROLL for (int g = 0; g < COUNT; ++g) Base::template repair<S>(y[g], tile, state(g), weight(g));
  }
  // Of what each of kLanes neighbouring lanes has a part; all of a warp's lanes have to be here.
  DEVICE void added_up(int gate, int unit, int feature, Real (&sums)[2]) const {
    sums[0] = sums[1] = 0;
    UNROLL for (int w = 0; w < Pass::WARPS; w += kLanes) {
      Real more[2];
      load_two<Real>(sums_address(w + lane.index % kLanes, gate, unit, feature), more);
      UNROLL for (int i = 0; i < 2; ++i) sums[i] += more[i];
    }
    UNROLL for (int by = 1; by < kLanes; by *= 2)
      UNROLL for (int i = 0; i < 2; ++i) sums[i] += of_lane(sums[i], by);
  }

  // Two features of a sequence, which lanes have in one of their rounds, and the first of them goes on with
  struct Two {
    int unit, feature;  // of the block's
    bool first, second;
  };
  DEVICE Two two(int round, i64 begin) const {
    const int all = threadIdx.x / kLanes + round * (kBlock / kLanes), pair = kPairs % (kBlock / kLanes) == 0 || all < kPairs ? all : 0;
    const int unit = pair / kOfSequence, feature = pair % kOfSequence * 2;
    const bool there = threadIdx.x % kLanes == 0 && pair == all && begin + unit < units && part + feature < Pass::HIDDEN;
    return {unit, feature, there, there && part + feature + 1 < Pass::HIDDEN};
  }
  // go(round, two, row) of each of a lane's rounds at a step
  template <class Go> DEVICE void each_of_step(u32 step, i64 begin, const Go& go) const {
    UNROLL for (int round = 0; round < kRounds; ++round) {
      const Two two = this->two(round, begin);
      go(round, two, rows().of(step, two.unit));
    }
  }
  // Two numbers as they have been asked for: whoever takes them waits for them.
  struct Asked {
    static constexpr int kEach = kSize < 4 ? 1 : kSize / 4;  // words of one
    u32 words[Pass::PAIRED ? 2 * kSize / 4 : 2 * kEach];
    DEVICE Real number(int i) const {
      return Pass::PAIRED ? number_of<Element>(words, i) : number_of<Element>(words + i * kEach, 0);
    }
  };
  DEVICE void ask(const Element* from, const Two& two, Asked& asked) const {
    if constexpr (Pass::PAIRED) {
      load_global<2 * kSize>(from, asked.words, two.first);
    } else {
      UNROLL for (int i = 0; i < 2; ++i) {
        u32 words[Asked::kEach];
        load_global<kSize>(from + i, words, i == 0 ? two.first : two.second);
        UNROLL for (int w = 0; w < Asked::kEach; ++w) asked.words[i * Asked::kEach + w] = words[w];
      }
    }
  }
  DEVICE void read(const Element* from, const Two& two, Real (&x)[2]) const {
    Asked asked;
    ask(from, two, asked);
    UNROLL for (int i = 0; i < 2; ++i) x[i] = asked.number(i);
  }
  DEVICE void give(Element* to, const Two& two, Real first, Real second) const {
    store_two<Pass::PAIRED>(to, first, second, two.second);
  }

  // Blocks along x take groups of sequences one after another: each from its first step to its last one. begin_group(first sequence)
  // and then step(number, first sequence, its threads' rows).
  template <class Begin, class Go, class End> DEVICE void walk(const Begin& begin_group, const Go& go, const End& end) const {
    for (int at = threadIdx.x * 16; at < Pass::kSumsAt - Pass::kStatesAt; at += kBlock * 16) store_u32x4(states(0) + at, {0, 0, 0, 0});
    Base::hold_weights(*this);
    const Walk walk(params, Pass::kWalk);
    ROLL for (i64 begin = i64(blockIdx.x) * Pass::UNITS; begin < units; begin += i64(gridDim.x) * Pass::UNITS) {
      const u32 steps = walk.longest(begin, Pass::UNITS, units);
      const bool reads_rows = threadIdx.x < Pass::UNITS, warps_read_rows = warp < ceil_div(Pass::UNITS, 32);
      Ahead<Pass::DOWN> ahead(walk, begin + threadIdx.x, reads_rows && begin + threadIdx.x < units);
      ahead.advance(0);
      __syncthreads();  // nobody reads the rows of the group before
      for (u32 step = 0; step < kCodes - 1; ++step)
        if (const Row row = ahead.advance(step + 1); reads_rows) rows().publish(step, threadIdx.x, row);
      __syncthreads();
      begin_group(begin);
      ROLL for (u32 step = 0; step < steps; ++step)
        go(step, begin, [&] {
          if (!warps_read_rows) return;
          if (const Row row = ahead.advance(step + kCodes); reads_rows) rows().publish(step + kCodes - 1, threadIdx.x, row);
        });
      end(begin);
    }
  }
};
