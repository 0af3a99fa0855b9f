// What is the same, forward and back, of a gated recurrent unit whose recurrent matrices are Kronecker products of two
// factors, U X = A X B', and whose state X the blocks of a cluster share out. A block has some rows of it, or some columns, at
// every step the other of the two:
//     own rows of X    -[B]-> own rows of X B'   -(to whose columns they are)-> own columns of X B' -[A]-> own columns of A X B'
//     own columns of X -[A]-> own columns of A X -(to whose rows they are)->    own rows of A X     -[B]-> own rows of A X B'
// So a step hands on once, of all gates, and what is kept of a state beside the products goes with that, not rounded. Where it
// comes to, a barrier counts its bytes: nobody waits for anybody's last step. The next step but one comes to the same place, but
// not before all others have had what this block makes of this one, which it does when it has read its own.
//
// Weights are operand A of both contractions, 16 rows for a warp, of all gates, so that a feature's sums lie in one lane.
//
// Pass: what recurrent_walk.cuh asks for; Rows and Columns, the Sides; HIDDEN, features of a state
#pragma once
#include "kernels/recurrent/recurrent_walk.cuh"

// A state that blocks share out by one of its modes, of which each has OWN (the last one maybe fewer) of OTHER, and all WHOLE of
// the other one, which is contracted first. BY_ROWS: the one that is shared out is the first of the two. NT: 8 columns of a warp
// at once.
//
// With it come HELD, whether weights stay in registers; W_STRIDE and WEIGHT, as chain.cuh's stages have them; in elements,
// STATE_STEP from one of WHOLE to the next in a state, STREAM_ROW in streams from a line that lies together in memory to the next;
// in bytes, STATE_AT, GATHERED_AT, KEPT_AT, OUT_AT, BARRIER_AT, and kStateBytes and kGatheredBytes of one gate.
template <int WHOLE_, int OTHER_, int OWN_, int UNITS, bool BY_ROWS_, int NT_> struct Side {
  static constexpr int WHOLE = WHOLE_, OTHER = OTHER_, OWN = OWN_, NT = NT_;
  static constexpr bool BY_ROWS = BY_ROWS_, FROM_SUMS = true;
  static constexpr int P = WHOLE, Q = WHOLE, PP = round_up(WHOLE, 8), W_ROWS = round_up(WHOLE, 16);  // of the weight
  static constexpr int WIDE = round_up(OWN, 8), COLUMNS = UNITS * WIDE;                              // of all sequences
  static constexpr int M_TILES = W_ROWS / 16, TILES = M_TILES * ceil_div(COLUMNS, 8 * NT);
  static constexpr bool kWholeM = WHOLE % 16 == 0, kWholeN = OTHER % OWN == 0 && OWN % 8 == 0 && COLUMNS % (8 * NT) == 0;
};

// Two neighbours as memory has them
template <class Element> struct alignas(2 * sizeof(Element)) Numbers {
  static constexpr int kSize = sizeof(Element), kEach = kSize < 4 ? 1 : kSize / 4;  // words of one, or of two of 16 bits
  static constexpr int kWords = kSize == 2 ? 1 : 2 * kEach;
  u32 words[kWords];
  DEVICE Numbers() {}
  DEVICE Numbers(Sum<Element> first, Sum<Element> second) {
    const Pair<Element> pair(first, second);
    UNROLL for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const u32*>(&pair)[i];
  }
  DEVICE void load(u32 from) {
    if constexpr (kWords == 1)
      words[0] = load_u32(from);
    else if constexpr (kWords == 2)
      load_u32x2(from, words);
    else
      load_u32x4(from, words);
  }
  DEVICE Sum<Element> of(int i) const { return number_of<Element>(words, i); }
};

template <class Pass> struct Sides : RecurrentWalk<Pass> {
  using Base = RecurrentWalk<Pass>;
  using typename Base::Element, typename Base::Math;
  using Base::begin, Base::kSize, Base::lane, Base::memory, Base::params, Base::shared, Base::units, Base::warp;
  using Real = Sum<Element>;
  using Both = Numbers<Element>;
  static constexpr bool kOne = Pass::UNITS == 1;
  const int rank;

  DEVICE explicit Sides(const Params& p) : Base(p), rank(blockIdx.y) {}

  template <class S> using Sums = Real[S::NT][4];
  template <class S> DEVICE int first() const { return rank * S::OWN; }  // of the mode that is shared out
  template <class S> DEVICE int mine() const { return S::OTHER % S::OWN == 0 ? S::OWN : min(S::OWN, S::OTHER - first<S>()); }

  // Two numbers of a lane: of which sequence, which of WHOLE, and which of the block's own is the first
  struct Two {
    int unit, m, n;
    bool there;
  };
  template <class S> DEVICE Two two(int h, int n) const {
    const int m = warp % S::M_TILES * 16 + lane.g + h * 8, column = (warp / S::M_TILES * S::NT + n) * 8;
    const int unit = kOne ? 0 : column / S::WIDE, own = column - unit * S::WIDE + lane.t * 2;
    return {unit, m, own, (S::kWholeM || m < S::WHOLE) && (S::kWholeN || (unit < Pass::UNITS && own < mine<S>()))};
  }
  template <class S> DEVICE static bool has_tile(int warp) { return S::TILES % Pass::WARPS == 0 || warp < S::TILES; }
  // go(h, n, two) for all that a lane has
  template <class S, class Go> DEVICE void each(const Go& go) const {
    if (!has_tile<S>(warp)) return;
    UNROLL for (int h = 0; h < 2; ++h)
      UNROLL for (int n = 0; n < S::NT; ++n)
        if (const Two two = this->template two<S>(h, n); two.there) go(h, n, two);
  }
  // What a step is to a lane's sequences
  template <class S> static constexpr int kSequences = kOne ? 1 : S::NT;
  template <class S> DEVICE Row row_of(u32 step, int n) const {
    return Base::row(step, min(two<S>(0, n).unit, Pass::UNITS - 1));
  }
  template <class S> DEVICE void read_rows(u32 step, Row (&rows)[kSequences<S>]) const {
    UNROLL for (int n = 0; n < kSequences<S>; ++n) rows[n] = row_of<S>(step, n);
  }
  // Where the first of two is in a tensor's row, and how far the second one is behind it
  template <class S> static constexpr int kApart = S::BY_ROWS ? S::WHOLE : 1;
  template <class S> DEVICE int feature(const Two& two) const {
    return S::BY_ROWS ? (first<S>() + two.n) * S::WHOLE + two.m : two.m * S::OTHER + first<S>() + two.n;
  }

  // Weights

  template <class S> struct Held {
    static constexpr int kSteps = S::HELD ? ceil_div(S::PP, Math::kStep) : 0;
    typename Math::A of[kGates][kSteps > 0 ? kSteps : 1];
  };
  template <class S> DEVICE u32 weight_rows(int gate) const {
    return Base::template weight_address<S>(gate) + warp % S::M_TILES * 16 * S::W_STRIDE * kSize +
           Math::template lane_row_a<S::W_STRIDE>(lane);
  }
  template <int K, class S> DEVICE void load_rows(typename Math::A& a, int gate, int k) const {
    Math::template load_row_a<K, S::W_STRIDE, S::HELD>(a, weight_rows<S>(gate) + k * kSize);
  }
  template <class S> DEVICE void hold(Held<S>& held) const {
    if constexpr (S::HELD)
      UNROLL for (int gate = 0; gate < kGates; ++gate)
        UNROLL for (int i = 0; i < Held<S>::kSteps; ++i)
          if ((i + 1) * Math::kStep <= S::PP)
            load_rows<Math::kStep, S>(held.of[gate][i], gate, i * Math::kStep);
          else
            load_rows<8, S>(held.of[gate][i], gate, i * Math::kStep);
  }

  // Products of a warp's rows of all gates' weights with own columns of STATES states

  template <class S> static constexpr int kSteps = ceil_div(S::PP, Math::kStep);
  template <class S> static constexpr int kWholeSteps = S::PP / Math::kStep;
  template <class S, int STATES> DEVICE void multiply(Sums<S> (&y)[kGates], const Held<S>& held) const {
    // Of 16 bits, operands of two steps come at once, where a warp has 8 columns.
    constexpr bool kTwoSteps = kSize == 2 && S::NT == 1 && S::PP % 32 == 0;
    const int of_lane = kTwoSteps ? lane.index * S::STATE_STEP * kSize : Math::template lane_b_by_n<S::STATE_STEP>(lane);
    const u32 from = memory + S::STATE_AT + warp / S::M_TILES * S::NT * 8 * kSize + of_lane;
    if constexpr (kTwoSteps) {
      UNROLL_BY(S::HELD || kSteps<S> <= 8 ? kSteps<S> / 2 : 2) for (int k = 0; k < kSteps<S>; k += 2) {
        typename Math::B b[STATES][2][1];
        UNROLL for (int state = 0; state < STATES; ++state) {
          u32 four[4];
          load_matrices<true>(four, from + state * S::kStateBytes + k * Math::kStep * S::STATE_STEP * kSize);
          UNROLL for (int i = 0; i < 4; ++i) Math::template put<false>(b[state][i / 2][0], i % 2, four[i]);
        }
        UNROLL for (int i = 0; i < 2; ++i)
          UNROLL for (int gate = 0; gate < kGates; ++gate)
            add_products<Math::kStep, S>(y[gate], y[gate], held, gate, k + i, b[STATES > 1 ? gate : 0][i]);
      }
    } else if constexpr (Math::kFlush > 0) {
      UNROLL_BY(kSteps<S> <= 8 ? 8 : 2) for (int k = 0; k < kSteps<S>; k += Math::kFlush) {
        Parts<S> parts;
        UNROLL for (int j = 0; j < Math::kFlush; ++j)
          if (kSteps<S> % Math::kFlush == 0 || k + j < kSteps<S>)
            step<Math::kStep, S, STATES>(parts.of, held, from, k + j, parts.low);
        parts.add_to(y);
      }
      repair<S, false, STATES>(y);
    } else {
      UNROLL_BY(S::HELD || kSteps<S> <= 8 ? kSteps<S> : 4) for (int k = 0; k < kWholeSteps<S>; ++k)
        step<Math::kStep, S, STATES>(y, held, from, k, y);
      if constexpr (kWholeSteps<S> < kSteps<S>) step<8, S, STATES>(y, held, from, kWholeSteps<S>, y);
    }
  }
  // Sums of some steps, which begin with zero; of split floats what low parts add lies apart, so that products wait for fewer
  template <class S> struct Parts {
    Sums<S> of[kGates] = {}, low[kGates] = {};
    DEVICE void add_to(Sums<S> (&y)[kGates]) const {
      UNROLL for (int gate = 0; gate < kGates; ++gate) {
        add_sums(y[gate], of[gate]);
        if constexpr (Math::kRepairs) add_sums(y[gate], low[gate]);
      }
    }
  };
  template <int K, class S, int STATES>
  DEVICE void step(Sums<S> (&y)[kGates], const Held<S>& held, u32 from, int k, Sums<S> (&low)[kGates]) const {
    typename Math::B b[S::NT];
    UNROLL for (int gate = 0; gate < kGates; ++gate) {
      if (gate < STATES) {
        u32 columns[S::NT];
        UNROLL for (int n = 0; n < S::NT; ++n)
          columns[n] = from + gate * S::kStateBytes + (k * Math::kStep * S::STATE_STEP + n * 8) * kSize;
        Math::template load_b_by_n<K, S::STATE_STEP, S::NT, 8, false>(b, columns, lane.index);
      }
      add_products<K, S>(y[gate], low[gate], held, gate, k, b);
    }
  }
  template <int K, class S>
  DEVICE void add_products(Sums<S>& y, Sums<S>& low, const Held<S>& held, int gate, int k,
                           const typename Math::B (&b)[S::NT]) const {
    typename Math::A a;
    if constexpr (!S::HELD) load_rows<K, S>(a, gate, k * Math::kStep);
    UNROLL for (int n = 0; n < S::NT; ++n) {
      if constexpr (S::HELD)
        Math::template multiply<K>(y[n], held.of[gate][k], b[n]);
      else if constexpr (Math::kRepairs)
        Math::multiply_apart(y[n], low[n], a, b[n]);
      else
        Math::template multiply<K>(y[n], a, b[n]);
    }
  }

  // The same with what others hand on, of all gates. It lies in pairs along WHOLE as operand B has them in its registers: pairs of
  // 8 x 8 numbers together, a lane's one behind another's. So it leaves a warp, and comes to one, in lines.
  template <class S> DEVICE static int pair_of(int column, int k) {
    return (column / 8 * (S::PP / 8) + k / 8) * 32 + column % 8 * 4 + k % 8 / 2;
  }
  template <class S> DEVICE void multiply_handed_on(Sums<S> (&y)[kGates], const Held<S>& held) const {
    constexpr int kOfStep = kGates * S::NT * Math::kStep / 8 * Both::kWords, kFlush = Math::kFlush > 0 ? Math::kFlush : 1;
    constexpr int kFit = MOST_WORDS / kOfStep / kFlush * kFlush, kAtOnce = kFit < kFlush ? kFlush : kFit;
    constexpr int kLeft = kSteps<S> % kAtOnce, kRest = kLeft > 0 ? kLeft : kAtOnce;
    UNROLL_BY(S::HELD ? kSteps<S> : 1) for (int k = 0; k + kRest < kSteps<S>; k += kAtOnce) add_handed_on<kAtOnce, S>(y, held, k);
    add_handed_on<kRest, S>(y, held, kSteps<S> - kRest);
    if constexpr (Math::kRepairs) repair<S, true, kGates>(y);
  }
  static constexpr int MOST_WORDS = 32;  // that a lane asks for at once
  template <int COUNT, class S> DEVICE void add_handed_on(Sums<S> (&y)[kGates], const Held<S>& held, int first) const {
    constexpr int kTiles = COUNT * Math::kStep / 8;
    const u32 from = memory + S::GATHERED_AT + (warp / S::M_TILES * S::NT * S::PP / 8 * 32 + lane.index) * int(sizeof(Both));
    Both both[kGates][S::NT][kTiles];
    UNROLL for (int gate = 0; gate < kGates; ++gate)
      UNROLL for (int n = 0; n < S::NT; ++n)
        UNROLL for (int i = 0; i < kTiles; ++i) {
          const int tile = first * (Math::kStep / 8) + i;
          const u32 at = from + gate * S::kGatheredBytes + (n * (S::PP / 8) + tile) * 32 * int(sizeof(Both));
          if (S::PP % Math::kStep == 0 || tile < S::PP / 8)
            both[gate][n][i].load(at);
          else
            both[gate][n][i] = Both(0, 0);
        }
    const auto add = [&](Sums<S> (&y)[kGates], Sums<S> (&low)[kGates], int begin, int end) {
      UNROLL for (int j = begin; j < end && j < COUNT; ++j)
        UNROLL for (int gate = 0; gate < kGates; ++gate) {
          typename Math::B b[S::NT];
          UNROLL for (int n = 0; n < S::NT; ++n) as_operand(b[n], both[gate][n], j);
          if (S::PP % Math::kStep && first + j == kWholeSteps<S>)
            add_products<8, S>(y[gate], low[gate], held, gate, first + j, b);
          else
            add_products<Math::kStep, S>(y[gate], low[gate], held, gate, first + j, b);
        }
    };
    if constexpr (Math::kFlush > 0) {
      UNROLL for (int k = 0; k < COUNT; k += Math::kFlush) {
        Parts<S> parts;
        add(parts.of, parts.low, k, k + Math::kFlush);
        parts.add_to(y);
      }
    } else {
      add(y, y, 0, COUNT);
    }
  }
  template <int COUNT> DEVICE static void as_operand(typename Math::B& b, const Both (&both)[COUNT], int k) {
    if constexpr (kSize == 2)
      UNROLL for (int i = 0; i < 2; ++i) Math::template put<false>(b, i, both[2 * k + i].words[0]);
    else if constexpr (kSize == 4)
      UNROLL for (int i = 0; i < 2; ++i) Math::template put<false>(b, i, both[k].words[i]);
    else
      UNROLL for (int i = 0; i < 2; ++i) Math::template put<false>(b, i, both[k].of(i));
  }
  template <class S, bool GATHERED, int STATES> DEVICE void repair(Sums<S> (&y)[kGates]) const {
    repair_sums<S::WHOLE>(y, [&](int gate, int n, int i) {
      const int m = warp % S::M_TILES * 16 + lane.g + i / 2 * 8;
      const int column = (warp / S::M_TILES * S::NT + n) * 8 + lane.t * 2 + i % 2;
      const int apart = GATHERED ? S::kGatheredBytes : S::kStateBytes;
      const u32 state = memory + (GATHERED ? S::GATHERED_AT : S::STATE_AT) + (STATES > 1 ? gate : 0) * apart;
      return [=](int k) {
        const int at = Math::place_of(k, true);
        const int x = GATHERED ? pair_of<S>(column, k) * 2 + k % 2 : at * S::STATE_STEP + column;
        return __uint_as_float(load_u32(state + x * kSize)) *
               __uint_as_float(load_u32(Base::template weight_address<S>(gate) + (m * S::W_STRIDE + at) * kSize));
      };
    });
  }
  // Two of them to the state that the next first contraction reads
  template <class S> DEVICE void give_state(int state, const Two& two, Real first, Real second) const {
    const int place = Math::place_of(two.m, true) * S::STATE_STEP + two.unit * S::WIDE + two.n;
    store_shared(memory + S::STATE_AT + state * S::kStateBytes + place * kSize,
                 Pair<Element>(Math::rounded(first), Math::rounded(second)));
  }

  // Handing on

  // Where pairs of a lane go that has them on side S: to the block that has row m as its own on the other side, O, and the barrier
  // there. 0 is nowhere.
  template <class S> struct Way {
    u32 sums[2][S::NT], kept[2][S::NT], barrier[2];
  };
  template <class S, class O> DEVICE Way<S> way() const {
    Way<S> made;
    UNROLL for (int h = 0; h < 2; ++h)
      UNROLL for (int n = 0; n < S::NT; ++n) {
        const Two two = this->template two<S>(h, n);
        const int m = S::kWholeM ? two.m : min(two.m, S::WHOLE - 1), owner = m / O::OWN;
        const int pair = pair_of<O>(two.unit * O::WIDE + m - owner * O::OWN, first<S>() + two.n);
        made.barrier[h] = in_block(shared + O::BARRIER_AT, owner);
        made.sums[h][n] = two.there ? in_block(memory + O::GATHERED_AT + pair * int(sizeof(Both)), owner) : 0;
        made.kept[h][n] = two.there ? in_block(memory + O::KEPT_AT + pair * int(sizeof(Numbers<Real>)), owner) : 0;
      }
    return made;
  }
  template <class S, class O> DEVICE void hand_on(const Sums<S> (&y)[kGates], const Way<S>& way) const {
    UNROLL for (int gate = 0; gate < kGates; ++gate)
      UNROLL for (int h = 0; h < 2; ++h)
        UNROLL for (int n = 0; n < S::NT; ++n)
          if ((S::kWholeM && S::kWholeN) || way.sums[h][n]) {
            const Both both(Math::rounded(y[gate][n][h * 2]), Math::rounded(y[gate][n][h * 2 + 1]));
            send_words(way.sums[h][n] + gate * O::kGatheredBytes, both.words, way.barrier[h]);
          }
  }
  // Two numbers as they are
  template <class S> DEVICE void keep(const Way<S>& way, int h, int n, Real first, Real second) const {
    send_words(way.kept[h][n], Numbers<Real>(first, second).words, way.barrier[h]);
  }
  template <class O> DEVICE u32 kept_at(const Two& two, int i) const {
    return memory + O::KEPT_AT + (pair_of<O>(two.unit * O::WIDE + two.n + i, two.m) * 2 + two.m % 2) * int(sizeof(Real));
  }
  // The same of a lane's own, for itself
  template <class O> DEVICE void keep_here(const Two& two, const Real (&x)[2]) const {
    UNROLL for (int i = 0; i < 2; ++i) store_shared(kept_at<O>(two, i), x[i]);
  }
  template <class O> DEVICE void read_kept(Real (&x)[2][O::NT][2]) const {
    each<O>([&](int h, int n, const Two& two) {
      UNROLL for (int i = 0; i < 2; ++i) x[h][n][i] = load_sum(kept_at<O>(two, i), Real());
    });
  }

  // What comes to this block when it is to have side O, counted in bytes
  template <class O> DEVICE void expect(bool sums, bool kept) const {
    const int of_feature = (sums ? kGates * kSize : 0) + (kept ? int(sizeof(Real)) : 0);
    expect_bytes(shared + O::BARRIER_AT, Pass::UNITS * mine<O>() * O::WHOLE * of_feature);
  }
  template <class O> DEVICE void wait(u32 step) const { wait_for_bytes(shared + O::BARRIER_AT, step / 2 & 1); }
  // Before others begin
  DEVICE void make_barriers() const {
    init_barrier(shared + Pass::Rows::BARRIER_AT, 1), init_barrier(shared + Pass::Columns::BARRIER_AT, 1);
    fence_copy_engine();
  }

  // Nobody leaves while others may still send to it
  DEVICE void leave() const { sync_cluster(); }
};
