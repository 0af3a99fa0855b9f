// The backward pass of two tied contractions, of the last two modes, where samples are too few for a block to have
// whole ones. A block has one unit's strip, SPAN rows of X [p0, p1] and columns of A [q0, p0], and takes B [q1, p1] and
// G [q0, q1] by chunks of WIDTH q1's, those of later chunks on their way meanwhile. Of each chunk
//
//     T = X B',  dT = A' G,  dA += G T',  dX += dT B,  dB = dT' X
//
// with dA and dX, columns and rows of the strip, as sums in registers until the last one. What blocks make of dA, and
// of dB, they write side by side: first dA of all units, then dB of all units' strips. Sizes are multiples of 16.
//
// Of 32 bits what is read by n or m takes k's in pairs, and what is read by rows takes them in order: so dT's columns
// lie as B's rows want them.
//
// Pass: Math, Element, P0, P1, Q0, Q1, SPAN, WIDTH, SLOTS (for chunks), WARPS, GRAD (the parameter that G is); Source and Sink:
//       void, or Several, the tensors that X and dX are
#pragma once
#include "kernels/operands.cuh"
#include "types/params.cuh"
#include "move/several.cuh"

template <class Pass> struct PairFewBackward : Operands<typename Pass::Math, typename Pass::Element, Pass::WARPS * 32> {
  using Math = typename Pass::Math;
  static constexpr int WARPS = Pass::WARPS, kThreads = WARPS * 32;
  static constexpr int WIDTH = Pass::WIDTH, SLOTS = Pass::SLOTS, SPAN = Pass::SPAN;
  using Base = Operands<Math, typename Pass::Element, kThreads>;
  using typename Base::Element;
  using typename Base::Real;
  using Base::stride, Base::kAtOnce, Base::kPairs, Base::kSize, Base::kStep;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int kChunks = Q1 / WIDTH, kStrips = P0 / SPAN;
  static_assert(Q1 % WIDTH == 0 && P0 % SPAN == 0 && SLOTS > 1 && SLOTS <= kChunks);
  static_assert(Q0 % 16 == 0 && P1 % 16 == 0 && WIDTH % 16 == 0 && SPAN % 16 == 0);

  // Shared memory: X and A; T and dT; slots with chunks of B and of G.
  static constexpr int kX = stride(P1), kA = stride(SPAN), kT = stride(WIDTH);  // strides; B's is X's, and G's is T's
  static constexpr int kBytesX = SPAN * kX * kSize, kBytesA = Q0 * kA * kSize, kBytesT = SPAN * kT * kSize;
  static constexpr int kBytesB = WIDTH * kX * kSize, kSlot = kBytesB + Q0 * kT * kSize;

  // Warps take tasks in turn: MT tiles of 16 rows by NT of 8 columns, up to 8, few enough for all warps to have one.
  // Those of T and dT, and of dA and dX, are taken together.
  static constexpr int kRows = SPAN / 16;  // of tiles
  static constexpr int rows(int of_both, int tiles) { return of_both % 2 == 0 && tiles >= 8 * WARPS ? 2 : 1; }
  static constexpr int columns(int of_both, int tiles, int most) {
    return most > 1 && (of_both % most || tiles / most < WARPS) ? columns(of_both, tiles, most / 2) : most;
  }
  template <int MT_, int NT_, int ROWS, int COLUMNS> struct Tasks {
    static constexpr int MT = MT_, NT = NT_, kRows = ROWS / MT, kCount = kRows * (COLUMNS / NT);
    static DEVICE int row(int task) { return task % kRows * (MT * 16); }
    static DEVICE int column(int task) { return task / kRows * (NT * 8); }
    using Sums = Real[MT][NT][4];
  };
  static constexpr int kOfT = 2 * kRows * (WIDTH / 8), kOfB = WIDTH / 16 * (P1 / 8);
  static constexpr int kOfBoth = Q0 / 16 * (SPAN / 8) + kRows * (P1 / 8);  // dA and dX
  static constexpr int kHighT = rows(kRows, kOfT), kHighB = rows(WIDTH / 16, kOfB);
  static constexpr int kHigh = rows(kRows | Q0 / 16, kOfBoth);
  static constexpr int kWide = columns(SPAN / 8 | P1 / 8, kOfBoth / kHigh, 8 / kHigh);
  using TasksT = Tasks<kHighT, columns(WIDTH / 8, kOfT / kHighT, 8 / kHighT), kRows, WIDTH / 8>;
  using TasksB = Tasks<kHighB, columns(P1 / 8, kOfB / kHighB, 8 / kHighB), WIDTH / 16, P1 / 8>;
  using TasksA = Tasks<kHigh, kWide, Q0 / 16, SPAN / 8>;
  using TasksX = Tasks<kHigh, kWide, kRows, P1 / 8>;
  static constexpr int kTasks = TasksA::kCount + TasksX::kCount;
  using Sums = typename TasksA::Sums[ceil_div(kTasks, WARPS)];

  const Params& params;
  const Lane lane;
  const int warp;
  const u32 x, a, t, d_t, slots;
  DEVICE PairFewBackward(const Params& given)
      : params(given), warp(threadIdx.x / 32), x(shared_address(shared_memory)), a(x + kBytesX), t(a + kBytesA),
        d_t(t + kBytesT), slots(d_t + kBytesT) {}

  static constexpr DEVICE int place(int column) { return kPairs ? column / 8 * 8 + Base::place(column % 8) : column; }
  static constexpr DEVICE int column_at(int place) {
    return kPairs ? place / 8 * 8 + place % 4 * 2 + place / 4 % 2 : place;
  }

  static DEVICE u32 behind(int chunk) { return chunk % SLOTS * kSlot; }
  DEVICE void load_chunk(int chunk, const Element* b, const Element* g) const {
    if (chunk < kChunks) {
      Base::template copy<WIDTH, P1, kX>(b + chunk * WIDTH * P1, slots + behind(chunk));
      Base::template copy<Q0, WIDTH, kT, kThreads, Q1>(g + chunk * WIDTH, slots + behind(chunk) + kBytesB);
    }
    commit_copies();
  }

  DEVICE void run() const {
    const i64 unit = blockIdx.x;
    const int first = blockIdx.y * SPAN;
    const Element* b = static_cast<const Element*>(params.weights[1]);
    const Element* g = static_cast<const Element*>(params.weights[Pass::GRAD]) + unit * (Q0 * Q1);
    Base::template copy<SPAN, P1, kX>(source_of<typename Pass::Source, Element>(params) + (unit * P0 + first) * P1, x);
    Base::template copy<Q0, SPAN, kA, kThreads, P0>(static_cast<const Element*>(params.weights[0]) + first, a);
    UNROLL for (int chunk = 0; chunk < SLOTS; ++chunk) load_chunk(chunk, b, g);
    Real* of_a = static_cast<Real*>(params.sums) + unit * (Q0 * P0) + first;
    Real* of_b = static_cast<Real*>(params.sums) + gridDim.x * i64(Q0 * P0) + (unit * kStrips + blockIdx.y) * (Q1 * P1);
    Sums sums = {};
    ROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
      const u32 here = slots + behind(chunk);
      if (chunk == 0)
        wait_for_copies<SLOTS - 1>();
      else
        wait_for_copies<SLOTS - 2>();
      __syncthreads();  // the chunk is there, and what the last one's products read may be written
      if (chunk > 0) load_chunk(chunk - 1 + SLOTS, b, g);
      make_states(here);
      __syncthreads();  // T and dT are there
      add(sums, here);
      make_b(of_b + chunk * WIDTH * P1);
    }
    store(sums, of_a, sink_of<typename Pass::Sink, Element>(params) + (unit * P0 + first) * P1);
  }

  // T and dT
  DEVICE void make_states(u32 chunk) const {
    ROLL for (int task = warp; task < 2 * TasksT::kCount; task += WARPS) {
      const int row = TasksT::row(task % TasksT::kCount), column = TasksT::column(task % TasksT::kCount);
      typename TasksT::Sums sums = {};
      if (task < TasksT::kCount) {
        Base::template multiply<P1 / kStep, kAtOnce>(
            sums, Base::template tiles_by_rows<kX, true>(x + row * kX * kSize + Math::template lane_row_a<kX>(lane)),
            Base::template by_k<kX, true>(chunk + column * kX * kSize + Math::template lane_row_b<kX>(lane)));
        Base::template put_rounded<kT>(sums, t + ((row + lane.g) * kT + column + lane.t * 2) * kSize, 1);
      } else {
        const u32 g = chunk + kBytesB + column * kSize;
        Base::template multiply<Q0 / kStep, kAtOnce>(
            sums, Base::template tiles_by_m<kA, true>(a + row * kSize + Math::template lane_a_by_m<kA, kPairs>(lane)),
            Base::template by_n<kT, true>(g + Math::template lane_b_by_n<kT, kPairs>(lane), lane.index));
        Base::template put_rounded<kT>(sums, d_t + ((row + lane.g) * kT + column + place(lane.t * 2)) * kSize, place(1));
      }
    }
  }

  // To dA and dX
  DEVICE void add(Sums& sums, u32 chunk) const {
    each([&](int turn, int task) {
      const int row = TasksA::row(task), column = TasksA::column(task);
      const u32 g = chunk + kBytesB + row * kT * kSize;
      Base::template multiply<WIDTH / kStep, kAtOnce>(
          sums[turn], Base::template tiles_by_rows<kT, true>(g + Math::template lane_row_a<kT>(lane)),
          Base::template by_k<kT>(t + column * kT * kSize + Math::template lane_row_b<kT>(lane)));
    }, [&](int turn, int task) {
      const u32 left = d_t + TasksX::row(task) * kT * kSize, right = chunk + TasksX::column(task) * kSize;
      Base::template multiply<WIDTH / kStep, kAtOnce>(
          sums[turn], Base::template tiles_by_rows<kT, false>(left + Math::template lane_row_a<kT>(lane)),
          Base::template by_n<kX, true>(right + Math::template lane_b_by_n<kX, kPairs>(lane), lane.index));
    });
  }
  // The warp's tasks of dA or dX, and in which turn it has them.
  template <class OfA, class OfX> DEVICE void each(const OfA& of_a, const OfX& of_x) const {
    UNROLL for (int turn = 0; turn < ceil_div(kTasks, WARPS); ++turn) {
      const int task = turn * WARPS + warp;
      if (task < TasksA::kCount)
        of_a(turn, task);
      else if (kTasks % WARPS == 0 || task < kTasks)
        of_x(turn, task - TasksA::kCount);
    }
  }

  DEVICE void make_b(Real* to) const {
    ROLL for (int task = warp; task < TasksB::kCount; task += WARPS) {
      const int row = TasksB::row(task), column = TasksB::column(task);
      typename TasksB::Sums sums = {};
      Base::template multiply<SPAN / kStep, kAtOnce>(
          sums, Base::template tiles_by_m<kT, false>(d_t + row * kSize + Math::template lane_a_by_m<kT, kPairs>(lane)),
          Base::template by_n<kX, true>(x + column * kSize + Math::template lane_b_by_n<kX, kPairs>(lane), lane.index));
      UNROLL for (int m = 0; m < TasksB::MT; ++m)
        put<P1>(sums[m], to + (row + m * 16 + column_at(lane.g)) * P1 + column);
    }
  }

  template <class OfX> DEVICE void store(const Sums& sums, Real* of_a, const OfX& of_x) const {
    const u32 staged = slots + warp * (16 * (kWide * 8 + 8) * kSize);
    if constexpr (kSize == 2) __syncthreads();  // chunks are read
    each([&](int turn, int task) {
      UNROLL for (int m = 0; m < kHigh; ++m)
        put<P0>(sums[turn][m], of_a + (TasksA::row(task) + m * 16 + lane.g) * P0 + TasksA::column(task));
    }, [&](int turn, int task) {
      UNROLL for (int m = 0; m < kHigh; ++m)
        Base::template store_tile<SPAN, P1, P1, true>(
            sums[turn][m], TasksX::row(task) + m * 16, TasksX::column(task), of_x, staged, lane);
    });
  }
  // Sums as they are, STEP from row to row; the lane's first row begins at `to`.
  template <int STEP, int NT> DEVICE void put(const Real (&y)[NT][4], Real* to) const {
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 2; ++i)
        store_two<true>(to + i * 8 * STEP + n * 8 + lane.t * 2, y[n][i * 2], y[n][i * 2 + 1], true);
  }
};
