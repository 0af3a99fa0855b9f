// The backward pass of two tied contractions, of the last two modes, where samples are so few that the blocks of a
// cluster take all of them, and add up their sums in each other's shared memory:
//
//     dA = G (X B')',  dB = (A' G)' X,  dX = (A' G) B
//
// A cluster makes one strip, SPAN wide, of one of these, each two products behind one another: of dA its columns, of dB
// and of dX rows. A' G is made twice, so that no gradient waits for another one. Groups of warps take the units in
// turn, PARTS of them at once; what a group has summed it sends, piece by piece, to the blocks that own the pieces, and
// those add them up in the order of the groups. Sizes are multiples of 16. A bias's gradient, the sums of G, is that of
// another cluster, and that of x is left out if nobody wants it.
//
// Of 32 bits what is read by n or m takes k's in pairs, and what is read by rows takes them in order: so the columns of
// A' G lie as dX wants them.
//
// Pass: Math, Element, P0, P1, Q0, Q1, UNITS (of a sample), SPAN, CLUSTER (blocks), GROUPS (of a block), WARPS (of a
//       group), SLOTS (for a group's units, 2 and more), GRAD (the parameter that G is; the weights' gradients go to
//       the one behind it), BIAS (whether its gradient is made, behind those); Source and Sink: void, or Several, the tensors that
//       X and dX are
#pragma once
#include "kernels/product/columns.cuh"
#include "kernels/operands.cuh"
#include "types/params.cuh"
#include "move/several.cuh"

template <class Pass> struct PairClusterBackward : Operands<typename Pass::Math, typename Pass::Element, Pass::WARPS * 32> {
  using Math = typename Pass::Math;
  static constexpr int WARPS = Pass::WARPS, GROUPS = Pass::GROUPS, CLUSTER = Pass::CLUSTER, PARTS = CLUSTER * GROUPS;
  static constexpr int kGroup = WARPS * 32, kThreads = GROUPS * kGroup, SLOTS = Pass::SLOTS, SPAN = Pass::SPAN;
  using Base = Operands<Math, typename Pass::Element, kGroup>;
  using typename Base::Element;
  using typename Base::Real;
  using Base::stride, Base::kAtOnce, Base::kPairs, Base::kSize, Base::kStep;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int kOfA = P0 / SPAN, kOfB = Q1 / SPAN, kOfX = P0 / SPAN;  // clusters
  static_assert(P0 % SPAN == 0 && Q1 % SPAN == 0 && SPAN % 16 == 0 && P1 % 16 == 0 && Q0 % 16 == 0);

  // Shared memory: weights; slots with a unit's X and G, or strips of them; a state for each group; and what parts
  // send. Of each what the largest kind of strip needs.
  static constexpr int most(int x, int y) { return x > y ? x : y; }
  static constexpr int kX = stride(P1), kG = stride(Q1), kA = stride(P0), kS = stride(SPAN);  // strides
  static constexpr int kWeights = most(Q1 * kX + Q0 * kS, Q0 * kA) * kSize;
  static constexpr int kSlot = most(SPAN * kX + Q0 * kG, P0 * kX + Q0 * kS) * kSize;
  static constexpr int kState = most(SPAN * kG, P0 * kS) * kSize;

  // Tiles of 16 rows by NT of 8 columns, up to 4, few enough for all warps of a group to have one.
  template <int ROWS, int COLUMNS> struct Tiles {
    static constexpr int kRows = ROWS / 16, kColumns = COLUMNS / 8;
    static constexpr int wide(int n) {
      return n > 1 && (kColumns % n || kRows * (kColumns / n) < WARPS) ? wide(n / 2) : n;
    }
    static constexpr int NT = wide(4), kCount = kRows * (kColumns / NT), kTurns = ceil_div(kCount, WARPS);
    using Sums = Real[1][NT][4];
    static DEVICE int row(int task) { return task % kRows * 16; }
    static DEVICE int column(int task) { return task / kRows * (NT * 8); }
  };

  const Params& params;
  const Lane lane;
  const int group, warp, rank, part;
  const i64 units;
  const u32 weights, slots, state, received;
  const Element *a, *b, *g;
  DEVICE PairClusterBackward(const Params& given)
      : params(given), group(threadIdx.x / kGroup), warp(threadIdx.x / 32 % WARPS), rank(blockIdx.y % CLUSTER),
        part(group * CLUSTER + rank), units(given.batch * Pass::UNITS), weights(shared_address(shared_memory)),
        slots(weights + kWeights + group * SLOTS * kSlot),
        state(weights + kWeights + GROUPS * SLOTS * kSlot + group * kState),
        received(weights + kWeights + GROUPS * (SLOTS * kSlot + kState)),
        a(static_cast<const Element*>(given.weights[0])), b(static_cast<const Element*>(given.weights[1])),
        g(static_cast<const Element*>(given.weights[Pass::GRAD])) {}

  DEVICE void run() const {
    const int strip = blockIdx.y / CLUSTER;
    if (strip < kOfA)
      of_a(strip * SPAN);
    else if (strip < kOfA + kOfB)
      of_b((strip - kOfA) * SPAN);
    else if (strip < kOfA + kOfB + kOfX)
      params.y ? of_x((strip - kOfA - kOfB) * SPAN) : void();
    else if constexpr (Pass::BIAS)
      of_bias();
  }

  DEVICE void sync() const { sync_group<WARPS, GROUPS>(group); }
  // The group's units, each once it is there: load(unit, slot), make(unit, slot). Weights are on their way.
  template <class Load, class Make> DEVICE void each_unit(const Load& load, const Make& make) const {
    const auto load_next = [&](i64 unit, int turn) {
      if (unit < units) load(unit, slots + turn % SLOTS * kSlot);
      commit_copies();
    };
    UNROLL for (int turn = 0; turn < SLOTS; ++turn) load_next(part + turn * PARTS, turn);
    wait_for_copies<SLOTS - 1>();
    __syncthreads();  // the weights are there, and the first unit
    int turn = 0;
    ROLL for (i64 unit = part; unit < units; unit += PARTS, ++turn) {
      if (turn > 0) {
        wait_for_copies<SLOTS - 2>();
        sync();  // the unit is there, and the last one and its state are read
        load_next(unit + (SLOTS - 1) * PARTS, turn + SLOTS - 1);
      }
      make(unit, slots + turn % SLOTS * kSlot);
    }
  }

  // The first product, left x right, as the second one's operand. A lane's two of a row go to places that are APART.
  template <int ROWS, int COLUMNS, int STEPS, int STRIDE, class Left, class Right>
  DEVICE void make_state(const Left& left, const Right& right, int second, int apart) const {
    using Task = Tiles<ROWS, COLUMNS>;
    ROLL for (int task = warp; task < Task::kCount; task += WARPS) {
      const int row = Task::row(task), column = Task::column(task);
      typename Task::Sums sums = {};
      Base::template multiply<STEPS, kAtOnce>(sums, left(row), right(column));
      Base::template put_rounded<STRIDE>(sums, state + ((row + lane.g) * STRIDE + column + second) * kSize, apart);
    }
    sync();
  }

  // The group's sums of ROWS x COLUMNS over its units
  template <int ROWS, int COLUMNS> struct Total : Tiles<ROWS, COLUMNS> {
    Real of[Tiles<ROWS, COLUMNS>::kTurns][Tiles<ROWS, COLUMNS>::NT][4] = {};
  };
  template <int STEPS, int ROWS, int COLUMNS, class Left, class Right>
  DEVICE void add(Total<ROWS, COLUMNS>& total, const Left& left, const Right& right) const {
    using Task = Tiles<ROWS, COLUMNS>;
    UNROLL for (int turn = 0; turn < Task::kTurns; ++turn) {
      const int task = turn * WARPS + warp;
      if (Task::kCount % WARPS && task >= Task::kCount) break;
      typename Task::Sums more = {};
      Base::template multiply<STEPS, kAtOnce>(more, left(Task::row(task)), right(Task::column(task)));
      add_sums(total.of[turn], more[0]);
    }
  }
  // Sent to their owners, added up, and stored at `to`, whose rows are STEP apart.
  template <int STEP, int ROWS, int COLUMNS>
  DEVICE void add_parts(const Total<ROWS, COLUMNS>& total, Element* to) const {
    using Task = Tiles<ROWS, COLUMNS>;
    constexpr int kShare = ROWS * COLUMNS / CLUSTER;
    static_assert(ROWS * COLUMNS % CLUSTER == 0 && kShare % 2 == 0);
    wait_at_cluster();  // all have begun
    if (part < units)
      UNROLL for (int turn = 0; turn < Task::kTurns; ++turn) {
        const int task = turn * WARPS + warp;
        if (Task::kCount % WARPS && task >= Task::kCount) break;
        UNROLL for (int n = 0; n < Task::NT; ++n)
          UNROLL for (int i = 0; i < 2; ++i) {
            const int at = (Task::row(task) + lane.g + i * 8) * COLUMNS + Task::column(task) + n * 8 + lane.t * 2;
            const u32 place = received + (part * kShare + at % kShare) * sizeof(Real);
            store_in_block(in_block(place, at / kShare), total.of[turn][n][i * 2], total.of[turn][n][i * 2 + 1]);
          }
      }
    sync_cluster();
    const int parts = units < PARTS ? int(units) : PARTS;
    ROLL for (int j = threadIdx.x; j < kShare; j += kThreads) {
      Real sum = 0;
      UNROLL_BY(8) for (int from = 0; from < parts; ++from)
        sum += load_sum(received + (from * kShare + j) * sizeof(Real), sum);
      const int at = rank * kShare + j;
      store_global(to + at / COLUMNS * STEP + at % COLUMNS, narrow<Element>(sum));
    }
  }
  DEVICE Element* made() const { return static_cast<Element*>(const_cast<void*>(params.weights[Pass::GRAD + 1])); }

  DEVICE void of_a(int first) const {
    arrive_at_cluster();
    Base::template copy<Q1, P1, kX, kThreads>(b, weights);
    constexpr int kBehind = SPAN * kX * kSize;  // G in a slot
    Total<Q0, SPAN> total;
    each_unit([&](i64 unit, u32 slot) {
      Base::template copy<SPAN, P1, kX>(source_of<typename Pass::Source, Element>(params) + (unit * P0 + first) * P1, slot);
      Base::template copy<Q0, Q1, kG>(g + unit * (Q0 * Q1), slot + kBehind);
    }, [&](i64, u32 slot) {
      make_state<SPAN, Q1, P1 / kStep, kG>([&](int row) {
        return Base::template tiles_by_rows<kX, true>(slot + row * kX * kSize + Math::template lane_row_a<kX>(lane));
      }, [&](int column) {
        return Base::template by_k<kX, true>(weights + column * kX * kSize + Math::template lane_row_b<kX>(lane));
      }, lane.t * 2, 1);
      add<Q1 / kStep>(total, [&](int row) {
        const u32 from = slot + kBehind + row * kG * kSize + Math::template lane_row_a<kG>(lane);
        return Base::template tiles_by_rows<kG, true>(from);
      }, [&](int column) {
        return Base::template by_k<kG>(state + column * kG * kSize + Math::template lane_row_b<kG>(lane));
      });
    });
    add_parts<P0>(total, made() + first);
  }

  DEVICE void of_b(int first) const {
    arrive_at_cluster();
    Base::template copy<Q0, P0, kA, kThreads>(a, weights);
    constexpr int kBehind = P0 * kX * kSize;
    Total<SPAN, P1> total;
    each_unit([&](i64 unit, u32 slot) {
      Base::template copy<P0, P1, kX>(source_of<typename Pass::Source, Element>(params) + unit * (P0 * P1), slot);
      Base::template copy<Q0, SPAN, kS, kGroup, Q1>(g + unit * (Q0 * Q1) + first, slot + kBehind);
    }, [&](i64, u32 slot) {
      make_state<P0, SPAN, Q0 / kStep, kS>([&](int row) {
        const u32 from = weights + row * kSize + Math::template lane_a_by_m<kA, kPairs>(lane);
        return Base::template tiles_by_m<kA, true>(from);
      }, [&](int column) {
        const u32 from = slot + kBehind + column * kSize + Math::template lane_b_by_n<kS, kPairs>(lane);
        return Base::template by_n<kS, true>(from, lane.index);
      }, lane.t * 2, 1);
      add<P0 / kStep>(total, [&](int row) {
        return Base::template tiles_by_m<kS, false>(state + row * kSize + Math::template lane_a_by_m<kS, kPairs>(lane));
      }, [&](int column) {
        const u32 from = slot + column * kSize + Math::template lane_b_by_n<kX, kPairs>(lane);
        return Base::template by_n<kX, true>(from, lane.index);
      });
    });
    add_parts<P1>(total, made() + Q0 * P0 + first * P1);
  }

  struct Bias {
    using Element = typename Pass::Element;
    using Result = Element;
    static constexpr int FEATURES = Pass::UNITS * Q0 * Q1, ROW = FEATURES, RUN = 16 / sizeof(Element), EACH = 4, BESIDE = -1;
    static constexpr int kPieces = FEATURES / RUN;
    static constexpr bool STORES = false, SUMS = true, TURNS = false, ROUNDS = false;
    static constexpr int LANES = ceil_div(kPieces, CLUSTER) < kThreads ? ceil_div(kPieces, CLUSTER) : kThreads;
    static constexpr int WAYS = kThreads / LANES < 16 ? kThreads / LANES : 16;
  };
  DEVICE void of_bias() const {  // all threads have a piece of their own, where there are further tiles
    for (int tile = rank; tile * Bias::LANES < Bias::kPieces; tile += CLUSTER)
      Columns<Bias>(g, made() + Q0 * P0 + Q1 * P1, params.batch, tile).run();
  }

  DEVICE void of_x(int first) const {
    constexpr int kBehind = Q0 * kS * kSize;  // B among the weights
    Base::template copy<Q0, SPAN, kS, kThreads, P0>(a + first, weights);
    Base::template copy<Q1, P1, kX, kThreads>(b, weights + kBehind);
    using Task = Tiles<SPAN, P1>;
    const u32 staged = received + (group * WARPS + warp) * (16 * (Task::NT * 8 + 8) * kSize);
    each_unit([&](i64 unit, u32 slot) {
      Base::template copy<Q0, Q1, kG>(g + unit * (Q0 * Q1), slot);
    }, [&](i64 unit, u32 slot) {
      const auto place = [](int column) { return kPairs ? Base::place(column) : column; };
      make_state<SPAN, Q1, Q0 / kStep, kG>([&](int row) {
        const u32 from = weights + row * kSize + Math::template lane_a_by_m<kS, kPairs>(lane);
        return Base::template tiles_by_m<kS, true>(from);
      }, [&](int column) {
        const u32 from = slot + column * kSize + Math::template lane_b_by_n<kG, kPairs>(lane);
        return Base::template by_n<kG, true>(from, lane.index);
      }, place(lane.t * 2), place(1));
      const auto to = sink_of<typename Pass::Sink, Element>(params) + (unit * P0 + first) * P1;
      ROLL for (int task = warp; task < Task::kCount; task += WARPS) {
        const int row = Task::row(task), column = Task::column(task);
        typename Task::Sums sums = {};
        const u32 left = state + row * kG * kSize + Math::template lane_row_a<kG>(lane);
        const u32 right = weights + kBehind + column * kSize + Math::template lane_b_by_n<kX, kPairs>(lane);
        Base::template multiply<Q1 / kStep, kAtOnce>(sums, Base::template tiles_by_rows<kG, false>(left),
                                                     Base::template by_n<kX, true>(right, lane.index));
        Base::template store_tile<SPAN, P1, P1, true>(sums[0], row, column, to, staged, lane);
      }
    });
  }
};
