// A pass of two tied contractions of large modes in double on sm_90a: Y[q0, q1] = A[q0, p0] X[p0, p1] B[q1, p1]' for each
// unit, where shared memory has no room for the weights. They come by chunks of kDepth k's, B's and then A's for each unit
// again, through a ring of SLOTS that four warps fill: L2 has them, and gives a tenth of what it could.
//
// T = X B' lies where X was. Its rows in a chunk of A's are free once that is multiplied, and the next X takes their place;
// but for those of the last chunk, which have one of their own, so that the first of the next X need not wait for it.
//
// Eight warps, four by two, make all sums at once: 16 tiles of rows and 8 NT columns each. They meet twice for a unit.
//
// Pass: Math, Element, Activation, BIAS, FACTOR_A, FACTOR_B (parameters), P0, P1, Q0, Q1, UNITS_PER_SAMPLE, SLOTS;
//       REGISTERS and COPY_REGISTERS of a thread who multiplies, or copies
#pragma once
#include "kernels/double_ring.cuh"
#include "finish/pointwise.cuh"

constexpr int larger_of(int x, int y) { return x > y ? x : y; }

// A slot holds a chunk of either weight.
template <class Pass>
using RingOfWeights = DoubleRing<typename Pass::Math, typename Pass::Element, Pass::SLOTS,
                                 larger_of(round_up(Pass::Q0, 64), round_up(Pass::Q1, 16)) * 20 * 8>;

template <class Pass> struct PairDouble : RingOfWeights<Pass> {
  using Base = RingOfWeights<Pass>;
  using Element = typename Pass::Element;
  using typename Base::A;
  using typename Base::Tensors;
  using Base::kChunk, Base::kCopiers, Base::kDepth, Base::kSize, Base::kStep, Base::kThreads;
  using Base::along, Base::down, Base::lane, Base::ring, Base::slot;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1, SLOTS = Pass::SLOTS;
  static constexpr int NT = ceil_div(Q1, 16);
  static constexpr int kMiddle = ceil_div(P0, 64), kLast = ceil_div(Q0, 64);  // tiles of 16 rows of a warp's T and Y
  static constexpr int kRows = kMiddle * 64, kColumns = NT * 16, kWidth = round_up(P1, kDepth);
  static constexpr int kState = Tensors::stride(kWidth > kColumns ? kWidth : kColumns);
  static constexpr int kChunksB = ceil_div(P1, kDepth), kChunksA = ceil_div(P0, kDepth), kChunks = kChunksB + kChunksA;
  static constexpr int kTail = (kChunksA - 1) * kDepth;  // where T's last rows begin
  static constexpr int kStateBytes = kRows * kState * kSize, kTailBytes = kDepth * kState * kSize;
  template <int TILES> using Sums = Element[TILES][NT][4];

  const Params& params;
  const typename Pass::Activation activation;
  const u32 state, tail;
  const i64 units;

  DEVICE PairDouble(const Params& given)
      : Base(shared_address(shared_memory) + kStateBytes + kTailBytes), params(given), activation(given),
        state(shared_address(shared_memory)), tail(state + kStateBytes), units(given.batch * Pass::UNITS_PER_SAMPLE) {}
  DEVICE u32 x_full() const { return ring.full(2 * SLOTS); }

  // Who copies

  // Chunk c of a unit's weights, B's first
  DEVICE void load_weights(int c) const {
    const u32 to = slot(c);
    const int at = c % kChunks;
    if (at < kChunksB)
      Base::template copy<kColumns, kDepth, kChunk, P1>(to, weight(Pass::FACTOR_B) + at * kDepth, Q1, P1 - at * kDepth);
    else
      Base::template copy<kLast * 64, kDepth, kChunk, P0>(
          to, weight(Pass::FACTOR_A) + (at - kChunksB) * kDepth, Q0, P0 - (at - kChunksB) * kDepth);
  }
  DEVICE const Element* weight(int factor) const { return static_cast<const Element*>(params.weights[factor]); }
  // The rows of a unit's X that a chunk of A's meets
  DEVICE void load_x(i64 unit, int chunk) const {
    const int first = chunk * kDepth;
    const Element* from = static_cast<const Element*>(params.x) + (unit * P0 + first) * P1;
    Base::template copy<kDepth, kWidth, kState, P1>(state + first * kState * kSize, from, P0 - first, P1);
  }

  DEVICE void produce() const {
    ROLL for (int chunk = 0; chunk < kChunksA; ++chunk) load_x(blockIdx.x, chunk);
    arrive_with_copies(x_full());
    int c = 0, read = -SLOTS;  // the chunk of a unit that was here before
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x)
      ROLL for (int at = 0; at < kChunks; ++at, ++c, ++read) {
        Base::wait_for_room(c);
        if (read == kChunks) read = 0;
        const i64 following = read < at ? unit + gridDim.x : unit;
        if (read >= kChunksB && following < units) load_next_x(following, read - kChunksB);
        load_weights(c);
        Base::hand_over(c);
      }
  }
  // The rows of X for which there is room once a chunk of A's has been multiplied by the rows of T that it meets
  DEVICE void load_next_x(i64 unit, int chunk) const {
    if (chunk == 0) load_x(unit, kChunksA - 1);
    if (chunk < kChunksA - 1) load_x(unit, chunk);
    if (chunk == (kChunksA > 1 ? kChunksA - 2 : 0)) arrive_with_copies(x_full());
  }

  // Who multiplies

  DEVICE void put_middle(const Sums<kMiddle>& sums) const {
    UNROLL for (int m = 0; m < kMiddle; ++m)
      UNROLL for (int i = 0; i < 2; ++i) {
        const int row = (down * kMiddle + m) * 16 + lane.g + i * 8;
        const u32 to = (row < kTail ? state + row * kState * kSize : tail + (row - kTail) * kState * kSize) + (along * NT * 8 + lane.t * 2) * kSize;
        if (row >= kChunksA * kDepth) continue;
        UNROLL for (int n = 0; n < NT; ++n) {
          const Element* two = sums[m][n] + i * 2;
          store_f64x2(to + n * 8 * kSize, row < P0 ? two[0] : 0, row < P0 ? two[1] : 0);
        }
      }
  }
  // To a tile's sums, all of it on its way at once, by two neighbours where 16 bytes divide rows
  DEVICE void add_bias(Element (&sums)[NT][4], i64 unit, int row, int column) const {
    constexpr int kEach = Q1 % 2 == 0 ? 2 : 1;
    const Element* bias = static_cast<const Element*>(params.bias) + unit % Pass::UNITS_PER_SAMPLE * (Q0 * Q1) + (row * Q1 + column);
    u32 words[NT][4][2];
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 4; i += kEach) {
        const int down = i / 2 * 8, c = n * 8 + i % 2;
        u32 word[kEach * 2];
        load_global<kEach * 8>(bias + (down * Q1 + c), word, row + down < Q0 && column + c < Q1);
        UNROLL for (int k = 0; k < kEach * 2; ++k) words[n][i + k / 2][k % 2] = word[k];
      }
    UNROLL for (int n = 0; n < NT; ++n)
      UNROLL for (int i = 0; i < 4; ++i) sums[n][i] += double_of(words[n][i][0], words[n][i][1]);
  }
  DEVICE void put_last(Sums<kLast>& sums, i64 unit) const {
    Element* to = static_cast<Element*>(params.y) + unit * (Q0 * Q1);
    UNROLL for (int m = 0; m < kLast; ++m) {
      const int first = (down * kLast + m) * 16, column = along * NT * 8;
      if constexpr (Pass::BIAS) add_bias(sums[m], unit, first + lane.g, column + lane.t * 2);
      UNROLL for (int n = 0; n < NT; ++n)
        UNROLL for (int i = 0; i < 4; ++i) {
          sums[m][n][i] = activation.of(sums[m][n][i]);
          touch(sums[m][n][i]);  // one after the other, or what they take is spilled
        }
      Tensors::template store_sums<Q0, Q1, Q1, Q0 % 64 == 0 && Q1 % 16 == 0>(sums[m], first, column, to, lane);
    }
  }

  DEVICE void consume() const {
    int c = 0, turn = 0;
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x, turn ^= 1) {
      wait_for_bytes(x_full(), turn);
      {
        Sums<kMiddle> sums = {};
        const auto left = Base::template rows<kState>(state, kMiddle);
        ROLL for (int k = 0; k < kChunksB; ++k, ++c) {
          Base::multiply(sums, c, [&](A& a, int m, int s) { left(a, m, s + k * (kDepth / kStep)); },
                         Base::template columns<kChunk>(slot(c), NT));
        }
        sync_consumers<kThreads>();  // all have read X
        put_middle(sums);
        sync_consumers<kThreads>();
      }
      Sums<kLast> sums = {};
      ROLL for (int k = 0; k < kChunksA; ++k, ++c) {
        const u32 middle = k == kChunksA - 1 ? tail : state + k * kTailBytes;
        Base::multiply(sums, c, Base::template rows<kChunk>(slot(c), kLast), Base::template columns_by_n<kState>(middle, NT));
      }
      put_last(sums, unit);
    }
  }

  DEVICE void run() const {
    Base::init();
    if (threadIdx.x == 0) init_barrier(x_full(), kCopiers);
    for (int j = threadIdx.x; j < (kStateBytes + kTailBytes) / 16; j += kThreads + kCopiers)
      store_u32x4(state + j * 16, {});  // rows that no X has
    __syncthreads();
    part_ways<kThreads, Pass::REGISTERS, Pass::COPY_REGISTERS>([&] { consume(); }, [&] { produce(); });
  }
};
