// A pass of two tied contractions of large modes in double on sm_90a: Y[q0, q1] = A[q0, p0] X[p0, p1] B[q1, p1]' for each
// unit, where shared memory has no room for the weights. They come by chunks of kDepth k's, B's and then A's for each unit
// again, through a ring of STAGES that four warps fill: L2 has them, and gives a tenth of what it could.
//
// T = X B' lies where X was. Its rows in a chunk of A's are free once that is multiplied, and the next X takes their place;
// but for those of the last chunk, which have one of their own, so that the first of the next X need not wait for it.
//
// Eight warps, four by two, make all sums at once: 16 tiles of rows and 8 NT columns each. They meet twice for a unit.
//
// Pass: Math, Element, Activation, BIAS, FACTOR_A, FACTOR_B (parameters), P0, P1, Q0, Q1, UNITS_PER_SAMPLE, STAGES;
//       REGISTERS and COPY_REGISTERS of a thread who multiplies, or copies
#pragma once
#include "operands.cuh"
#include "pointwise.cuh"

template <class Pass> struct DoublePair {
  using Element = typename Pass::Element;
  using Math = typename Pass::Math;
  using Tensors = Operands<Math, Element, 256>;
  using A = typename Math::A;
  using B = typename Math::B;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1, STAGES = Pass::STAGES;
  static constexpr int kSize = sizeof(Element), kStep = Math::kStep, kDepth = 16, NT = ceil_div(Q1, 16);
  static constexpr int kMiddle = ceil_div(P0, 64), kLast = ceil_div(Q0, 64);  // tiles of 16 rows of a warp's T and Y
  static constexpr int kRows = kMiddle * 64, kColumns = NT * 16, kWidth = round_up(P1, kDepth);
  static constexpr int kState = Tensors::stride(kWidth > kColumns ? kWidth : kColumns);
  static constexpr int kChunksB = ceil_div(P1, kDepth), kChunksA = ceil_div(P0, kDepth), kChunks = kChunksB + kChunksA;
  static constexpr int kTail = (kChunksA - 1) * kDepth;  // where T's last rows begin
  static constexpr int kChunk = kDepth + 4, kWeightRows = kLast * 64 > kColumns ? kLast * 64 : kColumns;
  static constexpr int kThreads = 256, kCopiers = 128;
  static constexpr int kStageBytes = kWeightRows * kChunk * kSize, kStateBytes = kRows * kState * kSize;
  static constexpr int kTailBytes = kDepth * kState * kSize;
  template <int TILES> using Sums = Element[TILES][NT][4];

  const Params& params;
  const typename Pass::Activation activation;
  const Lane lane;
  const int down, along;  // this warp's place among the four by two
  const u32 state, tail, ring, barriers;
  const i64 units;

  DEVICE DoublePair(const Params& given)
      : params(given), activation(given), down(threadIdx.x / 32 / 2), along(threadIdx.x / 32 % 2),
        state(shared_address(shared_memory)), tail(state + kStateBytes), ring(tail + kTailBytes),
        barriers(ring + STAGES * kStageBytes), units(given.batch * Pass::UNITS_PER_SAMPLE) {}
  DEVICE u32 full(int c) const { return barriers + c % STAGES * 8; }
  DEVICE u32 empty(int c) const { return barriers + (STAGES + c % STAGES) * 8; }
  DEVICE u32 x_full() const { return barriers + 2 * STAGES * 8; }

  // Who copies

  // ROWS x COLUMNS of a matrix whose rows have FROM elements; what is not there is zero.
  template <int ROWS, int COLUMNS, int STRIDE, int FROM>
  DEVICE void copy(u32 to, const Element* from, int rows, int columns) const {
    constexpr int kBytes = FROM % 2 ? 8 : 16, kEach = kBytes / kSize, kRow = COLUMNS / kEach;
#pragma unroll 4
    for (int j = threadIdx.x % kCopiers; j < ROWS * kRow; j += kCopiers) {
      const int row = j / kRow, column = j % kRow * kEach;
      const bool present = row < rows && column < columns;
      copy_async<kBytes>(to + (row * STRIDE + column) * kSize, present ? from + row * FROM + column : from, present);
    }
  }
  // Chunk c of a unit's weights, B's first
  DEVICE void load_weights(int c) const {
    const u32 to = ring + c % STAGES * kStageBytes;
    const int at = c % kChunks;
    if (at < kChunksB)
      copy<kColumns, kDepth, kChunk, P1>(to, weight(Pass::FACTOR_B) + at * kDepth, Q1, P1 - at * kDepth);
    else
      copy<kLast * 64, kDepth, kChunk, P0>(to, weight(Pass::FACTOR_A) + (at - kChunksB) * kDepth, Q0, P0 - (at - kChunksB) * kDepth);
  }
  DEVICE const Element* weight(int factor) const { return static_cast<const Element*>(params.weights[factor]); }
  // The rows of a unit's X that a chunk of A's meets
  DEVICE void load_x(i64 unit, int chunk) const {
    const int first = chunk * kDepth;
    const Element* from = static_cast<const Element*>(params.x) + (unit * P0 + first) * P1;
    copy<kDepth, kWidth, kState, P1>(state + first * kState * kSize, from, P0 - first, P1);
  }

  DEVICE void produce() const {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunksA; ++chunk) load_x(blockIdx.x, chunk);
    arrive_with_copies(x_full());
    int c = 0, read = -STAGES;  // the chunk of a unit that was here before
#pragma unroll 1
    for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x)
#pragma unroll 1
      for (int at = 0; at < kChunks; ++at, ++c, ++read) {
        if (c >= STAGES) wait_for_bytes(empty(c), c / STAGES & 1 ^ 1);
        if (read == kChunks) read = 0;
        const i64 following = read < at ? unit + gridDim.x : unit;
        if (read >= kChunksB && following < units) load_next_x(following, read - kChunksB);
        load_weights(c);
        arrive_with_copies(full(c));
      }
  }
  // The rows of X for which there is room once a chunk of A's has been multiplied by the rows of T that it meets
  DEVICE void load_next_x(i64 unit, int chunk) const {
    if (chunk == 0) load_x(unit, kChunksA - 1);
    if (chunk < kChunksA - 1) load_x(unit, chunk);
    if (chunk == (kChunksA > 1 ? kChunksA - 2 : 0)) arrive_with_copies(x_full());
  }

  // Who multiplies

  // sums += left x right, of a chunk
  template <int TILES, class Left, class Right>
  DEVICE void multiply(Sums<TILES>& sums, int c, const Left& left, const Right& right) const {
    constexpr int kTogether = NT % 2 ? 1 : 2;
    wait_for_bytes(full(c), c / STAGES & 1);
#pragma unroll
    for (int s = 0; s < kDepth / kStep; ++s) {
      A a[TILES];
#pragma unroll
      for (int m = 0; m < TILES; ++m) left(a[m], m, s);
#pragma unroll
      for (int n = 0; n < NT; n += kTogether) {
        B some[kTogether];
        right(some, n, s);
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
#pragma unroll
          for (int m = 0; m < TILES; ++m) Math::template multiply<kStep>(sums[m][n + i], a[m], some[i]);
      }
    }
    arrive(empty(c));
  }
  template <int STRIDE> DEVICE auto rows(u32 from, int tiles) const {
    const u32 mine = from + down * tiles * 16 * STRIDE * kSize + Math::template lane_row_a<STRIDE>(lane);
    return [=](A& a, int m, int s) {
      Math::template load_row_a<kStep, STRIDE>(a, mine + (m * 16 * STRIDE + s * kStep) * kSize);
    };
  }

  DEVICE void put_middle(const Sums<kMiddle>& sums) const {
#pragma unroll
    for (int m = 0; m < kMiddle; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = (down * kMiddle + m) * 16 + lane.g + i * 8;
        const u32 to = (row < kTail ? state + row * kState * kSize : tail + (row - kTail) * kState * kSize) + (along * NT * 8 + lane.t * 2) * kSize;
        if (row >= kChunksA * kDepth) continue;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const Element* two = sums[m][n] + i * 2;
          store_f64x2(to + n * 8 * kSize, row < P0 ? two[0] : 0, row < P0 ? two[1] : 0);
        }
      }
  }
  DEVICE void put_last(Sums<kLast>& sums, i64 unit) const {
    const Element* bias = static_cast<const Element*>(params.bias) + unit % Pass::UNITS_PER_SAMPLE * (Q0 * Q1);
    Element* to = static_cast<Element*>(params.y) + unit * (Q0 * Q1);
#pragma unroll
    for (int m = 0; m < kLast; ++m) {
      const int first = (down * kLast + m) * 16, column = along * NT * 8;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first + lane.g + i / 2 * 8, c = column + n * 8 + lane.t * 2 + i % 2;
          if (Pass::BIAS && row < Q0 && c < Q1) sums[m][n][i] += bias[row * Q1 + c];
          sums[m][n][i] = activation.of(sums[m][n][i]);
          touch(sums[m][n][i]);  // one after the other, or what they take is spilled
        }
      Tensors::template store_sums<Q0, Q1, Q1, Q0 % 64 == 0 && Q1 % 16 == 0>(sums[m], first, column, to, lane);
    }
  }

  DEVICE void consume() const {
    int c = 0, turn = 0;
#pragma unroll 1
    for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x, turn ^= 1) {
      wait_for_bytes(x_full(), turn);
      {
        Sums<kMiddle> sums = {};
        const auto left = rows<kState>(state, kMiddle);
#pragma unroll 1
        for (int k = 0; k < kChunksB; ++k, ++c) {
          const u32 from = ring + c % STAGES * kStageBytes + along * NT * 8 * kChunk * kSize + Math::template lane_row_b<kChunk>(lane);
          multiply(sums, c, [&](A& a, int m, int s) { left(a, m, s + k * (kDepth / kStep)); }, Tensors::template by_k<kChunk>(from));
        }
        sync_threads<kThreads>(1);  // all have read X
        put_middle(sums);
        sync_threads<kThreads>(1);
      }
      Sums<kLast> sums = {};
#pragma unroll 1
      for (int k = 0; k < kChunksA; ++k, ++c) {
        const u32 middle = k == kChunksA - 1 ? tail : state + k * kTailBytes;
        const u32 from = middle + along * NT * 8 * kSize + Math::template lane_b_by_n<kState>(lane);
        multiply(sums, c, rows<kChunk>(ring + c % STAGES * kStageBytes, kLast), Tensors::template by_n<kState>(from, lane.index));
      }
      put_last(sums, unit);
    }
  }

  DEVICE void run() const {
    if (threadIdx.x < STAGES) init_barrier(full(threadIdx.x), kCopiers), init_barrier(empty(threadIdx.x), kThreads);
    if (threadIdx.x == 0) init_barrier(x_full(), kCopiers);
    for (int j = threadIdx.x; j < (kStateBytes + kTailBytes) / 16; j += kThreads + kCopiers)
      store_u32x4(state + j * 16, {});  // rows that no X has
    __syncthreads();
    if (threadIdx.x < kThreads) {
      take_registers<Pass::REGISTERS>();
      consume();
    } else {
      give_registers<Pass::COPY_REGISTERS>();
      produce();
    }
  }
};
