// The backward pass of two tied contractions, of the last two modes, where samples are too few for a block to have whole ones. A
// block has one unit's strip, SPAN rows of X [p0, p1] and columns of A [q0, p0], and takes B [q1, p1] and G [q0, q1] by chunks of
// WIDTH q1's, those of later chunks on their way meanwhile. Of each chunk
//
//     T = X B',  dT = A' G,  dA += G T',  dX += dT B,  dB = dT' X
//
// with dA and dX, columns and rows of the strip, as sums in registers until the last one. What blocks make of dA, and of dB, they
// write side by side: first dA of all units, then dB of all units' strips. Sizes are multiples of 16.
//
// Of 32 bits what is read by n or m takes k's in pairs, and what is read by rows takes them in order: so dT's columns lie as B's
// rows want them.
//
// Pass: Math, Element, P0, P1, Q0, Q1, SPAN, WIDTH, SLOTS (for chunks), WARPS, GRAD (the parameter that G is)
#pragma once
#include "operands.cuh"
#include "params.cuh"

template <class Pass> struct StripBackward : Operands<typename Pass::Math, typename Pass::Element, Pass::WARPS * 32> {
  using Math = typename Pass::Math;
  static constexpr int WARPS = Pass::WARPS, WIDTH = Pass::WIDTH, SLOTS = Pass::SLOTS, SPAN = Pass::SPAN, kThreads = WARPS * 32;
  using Base = Operands<Math, typename Pass::Element, kThreads>;
  using typename Base::Element;
  using typename Base::Real;
  using Base::stride, Base::kPairs, Base::kSize, Base::kStep;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int kChunks = Q1 / WIDTH, kStrips = P0 / SPAN;
  static_assert(Q1 % WIDTH == 0 && P0 % SPAN == 0 && SLOTS > 1 && SLOTS <= kChunks);
  static_assert(Q0 % 16 == 0 && P1 % 16 == 0 && WIDTH % 16 == 0 && SPAN % 16 == 0);

  // Shared memory: X and A; T and dT; slots with chunks of B and of G.
  static constexpr int kX = stride(P1), kA = stride(SPAN), kT = stride(WIDTH);  // strides; B's is X's, and G's is T's
  static constexpr int kBytesX = SPAN * kX * kSize, kBytesA = Q0 * kA * kSize, kBytesT = SPAN * kT * kSize;
  static constexpr int kBytesB = WIDTH * kX * kSize, kSlot = kBytesB + Q0 * kT * kSize;

  // Warps take tasks in turn: 16 rows and some tiles of 8 columns of what is made, at most 8, or 4 of large sums, and fewer where
  // some warps would have none.
  static constexpr int tiles(int row_tiles, int columns, int most) {
    return most > 1 && (columns % most || row_tiles * (columns / most) < WARPS) ? tiles(row_tiles, columns, most / 2) : most;
  }
  static constexpr int kMost = kSize == 8 || Math::kRepairs ? 4 : 8;
  static constexpr int kRows = SPAN / 16;  // of tiles
  static constexpr int kTilesT = tiles(2 * kRows, WIDTH / 8, 4), kTasksT = kRows * (WIDTH / 8 / kTilesT);
  static constexpr int kTilesA = tiles(Q0 / 16, SPAN / 8, kMost), kTasksA = Q0 / 16 * (SPAN / 8 / kTilesA);
  static constexpr int kTilesX = tiles(kRows, P1 / 8, kMost), kTasksX = kRows * (P1 / 8 / kTilesX);
  static constexpr int kTilesB = tiles(WIDTH / 16, P1 / 8, kMost), kTasksB = WIDTH / 16 * (P1 / 8 / kTilesB);
  using SumsA = Real[ceil_div(kTasksA, WARPS)][kTilesA][4];
  using SumsX = Real[ceil_div(kTasksX, WARPS)][kTilesX][4];

  const Params& params;
  const Lane lane;
  const int warp;
  const u32 x, a, t, d_t, slots;
  DEVICE StripBackward(const Params& given)
      : params(given), warp(threadIdx.x / 32), x(shared_address(shared_memory)), a(x + kBytesX), t(a + kBytesA),
        d_t(t + kBytesT), slots(d_t + kBytesT) {}

  static constexpr DEVICE int place(int column) { return kPairs ? column / 8 * 8 + Base::place(column % 8) : column; }
  static constexpr DEVICE int column_at(int place) { return kPairs ? place / 8 * 8 + place % 4 * 2 + place / 4 % 2 : place; }

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
    Base::template copy<SPAN, P1, kX>(static_cast<const Element*>(params.x) + (unit * P0 + first) * P1, x);
    Base::template copy<Q0, SPAN, kA, kThreads, P0>(static_cast<const Element*>(params.weights[0]) + first, a);
#pragma unroll
    for (int chunk = 0; chunk < SLOTS; ++chunk) load_chunk(chunk, b, g);
    Real* of_a = static_cast<Real*>(params.sums) + unit * (Q0 * P0) + first;
    Real* of_b = static_cast<Real*>(params.sums) + gridDim.x * i64(Q0 * P0) + (unit * kStrips + blockIdx.y) * (Q1 * P1);
    SumsA sums_a = {};
    SumsX sums_x = {};
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const u32 here = slots + behind(chunk);
      if (chunk == 0)
        wait_for_copies<SLOTS - 1>();
      else
        wait_for_copies<SLOTS - 2>();
      if constexpr (Math::kRounds) {
        if (chunk == 0)
          Base::template round_copies<SPAN, P1, kX>(x), Base::template round_copies<Q0, SPAN, kA>(a);
        Base::template round_copies<WIDTH, P1, kX>(here), Base::template round_copies<Q0, WIDTH, kT>(here + kBytesB);
      }
      __syncthreads();  // the chunk is there, and what the last one's products read may be written
      if (chunk > 0) load_chunk(chunk - 1 + SLOTS, b, g);
      make_states(here);
      __syncthreads();
      add(sums_a, sums_x, here);
      make_b(of_b + chunk * WIDTH * P1);
    }
    store(sums_a, sums_x, of_a, static_cast<Element*>(params.y) + (unit * P0 + first) * P1);
  }

  // T and dT
  DEVICE void make_states(u32 chunk) const {
#pragma unroll 1
    for (int task = warp; task < 2 * kTasksT; task += WARPS) {
      const int row = task % kRows * 16, column = task % kTasksT / kRows * (kTilesT * 8);
      Real y[kTilesT][4] = {};
      if (task < kTasksT) {
        Base::template multiply<kTilesT, P1 / kStep>(
            y, Base::template by_rows<kX>(x + row * kX * kSize + Math::template lane_row_a<kX>(lane)),
            Base::template by_k<kX>(chunk + column * kX * kSize + Math::template lane_row_b<kX>(lane)));
        put_rounded(y, t + ((row + lane.g) * kT + column + lane.t * 2) * kSize, 1);
      } else {
        Base::template multiply<kTilesT, Q0 / kStep>(
            y, Base::template by_m<kA>(a + row * kSize + Math::template lane_a_by_m<kA, kPairs>(lane)),
            Base::template by_n<kT>(chunk + kBytesB + column * kSize + Math::template lane_b_by_n<kT, kPairs>(lane), lane.index));
        put_rounded(y, d_t + ((row + lane.g) * kT + column + place(lane.t * 2)) * kSize, place(1));
      }
    }
  }
  // A lane's two of a row go to places that are APART.
  template <int NT> static DEVICE void put_rounded(const Real (&y)[NT][4], u32 to, int apart) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 here = to + (i * 8 * kT + n * 8) * kSize;
        const Real first = Math::rounded(y[n][i * 2]), second = Math::rounded(y[n][i * 2 + 1]);
        if (apart == 1)
          store_shared(here, Pair<Element>(first, second));
        else
          store_shared(here, narrow<Element>(first)), store_shared(here + apart * kSize, narrow<Element>(second));
      }
  }

  // To dA and dX
  DEVICE void add(SumsA& sums_a, SumsX& sums_x, u32 chunk) const {
    const u32 g = chunk + kBytesB;
    each<kTasksA>([&](int turn, int task) {
      const int row = task % (Q0 / 16) * 16, column = task / (Q0 / 16) * (kTilesA * 8);
      Base::template multiply<kTilesA, WIDTH / kStep>(
          sums_a[turn], Base::template by_rows<kT>(g + row * kT * kSize + Math::template lane_row_a<kT>(lane)),
          Base::template by_k<kT>(t + column * kT * kSize + Math::template lane_row_b<kT>(lane)));
    });
    each<kTasksX>([&](int turn, int task) {
      const int row = task % kRows * 16, column = task / kRows * (kTilesX * 8);
      Base::template multiply<kTilesX, WIDTH / kStep>(
          sums_x[turn], Base::template by_rows<kT>(d_t + row * kT * kSize + Math::template lane_row_a<kT>(lane)),
          Base::template by_n<kX>(chunk + column * kSize + Math::template lane_b_by_n<kX, kPairs>(lane), lane.index));
    });
  }
  // The warp's tasks of so many, and in which turn it has them.
  template <int TASKS, class Task> DEVICE void each(const Task& run) const {
#pragma unroll
    for (int turn = 0; turn < ceil_div(TASKS, WARPS); ++turn)
      if (TASKS % WARPS == 0 || turn * WARPS + warp < TASKS) run(turn, turn * WARPS + warp);
  }

  DEVICE void make_b(Real* to) const {
#pragma unroll 1
    for (int task = warp; task < kTasksB; task += WARPS) {
      const int row = task % (WIDTH / 16) * 16, column = task / (WIDTH / 16) * (kTilesB * 8);
      Real y[kTilesB][4] = {};
      Base::template multiply<kTilesB, SPAN / kStep>(
          y, Base::template by_m<kT>(d_t + row * kSize + Math::template lane_a_by_m<kT, kPairs>(lane)),
          Base::template by_n<kX>(x + column * kSize + Math::template lane_b_by_n<kX, kPairs>(lane), lane.index));
      put<P1>(y, to + (row + column_at(lane.g)) * P1 + column);
    }
  }

  DEVICE void store(const SumsA& sums_a, const SumsX& sums_x, Real* of_a, Element* of_x) const {
    const u32 staged = slots + warp * (16 * (kTilesX * 8 + 8) * kSize);
    each<kTasksA>([&](int turn, int task) {
      const int row = task % (Q0 / 16) * 16, column = task / (Q0 / 16) * (kTilesA * 8);
      put<P0>(sums_a[turn], of_a + (row + lane.g) * P0 + column);
    });
    if constexpr (kSize == 2) __syncthreads();  // chunks are read
    each<kTasksX>([&](int turn, int task) {
      const int row = task % kRows * 16, column = task / kRows * (kTilesX * 8);
      Base::template store_tile<SPAN, P1, P1, true>(sums_x[turn], row, column, of_x, staged, lane);
    });
  }
  // Sums as they are, STEP from row to row; the lane's first row begins at `to`.
  template <int STEP, int NT> DEVICE void put(const Real (&y)[NT][4], Real* to) const {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_two<true>(to + i * 8 * STEP + n * 8 + lane.t * 2, y[n][i * 2], y[n][i * 2 + 1], true);
  }
};
