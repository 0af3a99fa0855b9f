// The backward pass of two tied contractions of large modes in double on sm_90a, by two kernels: for each unit, of X [p0, p1] and
// G [q0, q1],
//
//     T = X B',  dA' += T G'      and, RETURNS,      dT' = G' A,  dB += dT' X,  dX = dT B
//
// Either makes a middle state, S = T or dT', by parts of up to 64 of its columns, which go through shared memory, multiplies it,
// and keeps the sums of one weight in registers for all units of a block. States and weights come by chunks (double_ring.cuh):
// first the left operand and the right one of S, then what S is multiplied by, and then what a part of S turned is.
//
//              S [M, N] = left [M, K] x right,  D [M, N2] += S x middle,  last:
//     dA'      T = X B'                         dA' += T G'
//     RETURNS  dT' = G' A                       dB += dT' X               dX = (dT')' B
//
// Pass: Math, Element, RETURNS, P0, P1, Q0, Q1, UNITS_PER_SAMPLE, SLOTS; FACTOR_A, FACTOR_B, GRAD (parameters); REGISTERS and
//       COPY_REGISTERS of a thread who multiplies, or copies
#pragma once
#include "kernels/double_ring.cuh"
#include "types/params.cuh"

// What a pass takes, and where it lies: sizes padded, and strides in shared memory.
template <class Pass> struct DoubleBackwardSizes {
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr bool RETURNS = Pass::RETURNS;
  static constexpr int M = RETURNS ? Q1 : P0, K = RETURNS ? Q0 : P1, N = RETURNS ? P0 : Q1, N2 = RETURNS ? P1 : Q0;
  static constexpr int kTiles = ceil_div(M, 64), kRows = kTiles * 64;  // of 16 rows, of a warp
  static constexpr int kParts = ceil_div(N, 64), kPart = round_up(ceil_div(N, kParts), 16), kNarrow = kPart / 16;
  static constexpr int kWide = ceil_div(N2, 16), kColumns = kWide * 16;
  static constexpr int kDepth = 16, kChunk = kDepth + 4;
  static constexpr int kLeft = RETURNS ? kDepth * (kRows + 4) : kRows * kChunk;  // elements of a chunk
  static constexpr int kRight = RETURNS ? kDepth * (kPart + 4) : kPart * kChunk;
  static constexpr int kMiddle = RETURNS ? kDepth * (kColumns + 4) : kColumns * kChunk;
  static constexpr int kSlot = (kLeft + kRight > kMiddle ? kLeft + kRight : kMiddle) * 8;
};

template <class Pass>
struct PairDoubleBackward : DoubleRing<typename Pass::Math, typename Pass::Element, Pass::SLOTS, DoubleBackwardSizes<Pass>::kSlot> {
  using Element = typename Pass::Element;
  using Sizes = DoubleBackwardSizes<Pass>;
  using Base = DoubleRing<typename Pass::Math, Element, Pass::SLOTS, Sizes::kSlot>;
  using typename Base::Tensors;
  using Base::kChunk, Base::kDepth, Base::kSize, Base::kThreads;
  using Base::along, Base::down, Base::lane, Base::slot;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1, SLOTS = Pass::SLOTS;
  static constexpr bool RETURNS = Pass::RETURNS;
  static constexpr int M = Sizes::M, K = Sizes::K, N = Sizes::N, N2 = Sizes::N2;
  static constexpr int kTiles = Sizes::kTiles, kRows = Sizes::kRows, kParts = Sizes::kParts, kPart = Sizes::kPart;
  static constexpr int kNarrow = Sizes::kNarrow, kWide = Sizes::kWide, kColumns = Sizes::kColumns;
  static constexpr int kState = kPart + 4, kStateBytes = kRows * kState * kSize;  // S, a part of its columns
  static constexpr int kFirst = ceil_div(K, kDepth), kThen = kPart / kDepth, kLast = RETURNS ? ceil_div(M, kDepth) : 0;
  static constexpr int kSums = Q0 * P0 + Q1 * P1;

  const Params& params;
  const u32 state;
  const i64 units;

  DEVICE PairDoubleBackward(const Params& given)
      : Base(shared_address(shared_memory) + kStateBytes), params(given), state(shared_address(shared_memory)),
        units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  DEVICE const Element* parameter(int which) const { return static_cast<const Element*>(params.weights[which]); }
  DEVICE const Element* x_of(i64 unit) const { return static_cast<const Element*>(params.x) + unit * (P0 * P1); }
  DEVICE const Element* g_of(i64 unit) const { return parameter(Pass::GRAD) + unit * (Q0 * Q1); }

  // Who copies: of a unit's part of S's columns, the first one of which is n
  DEVICE void load_first(int c, i64 unit, int n, int k) const {
    const u32 left = slot(c), right = left + Sizes::kLeft * kSize;
    if constexpr (RETURNS) {
      Base::template copy<kDepth, kRows, kRows + 4, Q1>(left, g_of(unit) + k * Q1, K - k, M);
      Base::template copy<kDepth, kPart, kPart + 4, P0>(right, parameter(Pass::FACTOR_A) + k * P0 + n, K - k, N - n);
    } else {
      Base::template copy<kRows, kDepth, kChunk, P1>(left, x_of(unit) + k, M, K - k);
      Base::template copy<kPart, kDepth, kChunk, P1>(right, parameter(Pass::FACTOR_B) + n * P1 + k, N - n, K - k);
    }
  }
  DEVICE void load_middle(int c, i64 unit, int n) const {
    if constexpr (RETURNS)
      Base::template copy<kDepth, kColumns, kColumns + 4, P1>(slot(c), x_of(unit) + n * P1, N - n, N2);
    else
      Base::template copy<kColumns, kDepth, kChunk, Q1>(slot(c), g_of(unit) + n, N2, N - n);
  }
  DEVICE void load_last(int c, int m) const {
    Base::template copy<kDepth, kColumns, kColumns + 4, P1>(slot(c), parameter(Pass::FACTOR_B) + m * P1, M - m, N2);
  }
  DEVICE void produce() const {
    int c = 0;
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x)
      ROLL for (int part = 0; part < kParts; ++part)
        ROLL for (int at = 0; at < kFirst + kThen + kLast; ++at, ++c) {
          Base::wait_for_room(c);
          if (at < kFirst)
            load_first(c, unit, part * kPart, at * kDepth);
          else if (at < kFirst + kThen)
            load_middle(c, unit, part * kPart + (at - kFirst) * kDepth);
          else
            load_last(c, (at - kFirst - kThen) * kDepth);
          Base::hand_over(c);
        }
  }

  // Who multiplies

  DEVICE void consume() const {
    Element sums[kTiles][kWide][4] = {};
    int c = 0;
    ROLL for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x)
      ROLL for (int part = 0; part < kParts; ++part) {
        make_state(c, part * kPart);
        ROLL for (int k = 0; k < kThen; ++k, ++c) {
          const auto left = Base::template rows<kState>(state + k * kDepth * kSize, kTiles);
          if constexpr (RETURNS)
            Base::multiply(sums, c, left, Base::template columns_by_n<kColumns + 4>(slot(c), kWide));
          else
            Base::multiply(sums, c, left, Base::template columns<kChunk>(slot(c), kWide));
        }
        if constexpr (RETURNS) give_back(c, unit, part * kPart);
      }
    store(sums);
  }
  DEVICE void make_state(int& c, int n) const {
    Element sums[kTiles][kNarrow][4] = {};
    ROLL for (int k = 0; k < kFirst; ++k, ++c) {
      const u32 left = slot(c), right = left + Sizes::kLeft * kSize;
      if constexpr (RETURNS)
        Base::multiply(sums, c, Base::template rows_by_m<kRows + 4>(left, kTiles),
                       Base::template columns_by_n<kPart + 4>(right, kNarrow));
      else
        Base::multiply(sums, c, Base::template rows<kChunk>(left, kTiles), Base::template columns<kChunk>(right, kNarrow));
    }
    // All have read the part before: who has seen more chunks than there are slots knows that the first one is free.
    if constexpr (kFirst <= SLOTS) sync_consumers<kThreads>();
    UNROLL for (int m = 0; m < kTiles; ++m)
      UNROLL for (int i = 0; i < 2; ++i) {
        const int row = (down * kTiles + m) * 16 + lane.g + i * 8;
        UNROLL for (int j = 0; j < kNarrow; ++j) {
          const int column = (along * kNarrow + j) * 8 + lane.t * 2;
          // Zeros for padding, which infinities would make NaN
          const auto at = [&](int k) {
            const bool there = (kRows == M || row < M) && (kParts * kPart == N || n + column + k < N);
            return there ? sums[m][j][i * 2 + k] : 0;
          };
          store_f64x2(state + (row * kState + column) * kSize, at(0), at(1));
        }
      }
    sync_consumers<kThreads>();
  }
  // dX, as many rows as a part of S has columns
  DEVICE void give_back(int& c, i64 unit, int n) const {
    Element sums[1][kWide][4] = {};
    Element* to = static_cast<Element*>(params.y) + unit * (P0 * P1);
    const int first = kPart == 64 || down * 16 < kPart ? down * 16 : 0;  // the others make the first rows in vain
    ROLL for (int m = 0; m < kLast; ++m, ++c) {
      const u32 from = state + (m * kDepth * kState + first) * kSize + Pass::Math::template lane_a_by_m<kState>(lane);
      Base::multiply(sums, c, Tensors::template tiles_by_m<kState, false>(from),
                     Base::template columns_by_n<kColumns + 4>(slot(c), kWide));
    }
    if (kPart == 64 || down * 16 < kPart)
      Tensors::template store_sums<P0, P1, P1, P0 % 64 == 0 && P1 % 16 == 0>(
          sums[0], n + first, along * kWide * 8, to, lane);
  }
  DEVICE void store(const Element (&sums)[kTiles][kWide][4]) const {
    Element* to = static_cast<Element*>(params.sums) + i64(blockIdx.x) * kSums + (RETURNS ? Q0 * P0 : 0);
    UNROLL for (int m = 0; m < kTiles; ++m)
      UNROLL for (int j = 0; j < kWide; ++j)
        UNROLL for (int i = 0; i < 4; ++i) {
          const int row = (down * kTiles + m) * 16 + lane.g + i / 2 * 8, column = (along * kWide + j) * 8 + lane.t * 2 + i % 2;
          if (row < M && column < N2) store_global(to + (RETURNS ? row * P1 + column : column * P0 + row), sums[m][j][i]);
        }
  }

  DEVICE void run() const {
    Base::init();
    __syncthreads();
    part_ways<kThreads, Pass::REGISTERS, Pass::COPY_REGISTERS>([&] { consume(); }, [&] { produce(); });
  }
};
