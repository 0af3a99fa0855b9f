// Two tied contractions, of the last two modes, where samples are too few for a block to have whole ones:
//
//     T = X B',  Y = A T
//
// A block has SPAN columns of a unit's Y, for which it takes as many rows of B, and X and A by chunks of ROWS rows:
// first it makes rows of T, which stay in shared memory, then rows of Y. Later chunks are on their way meanwhile, and its columns
// of a bias. Sizes are multiples of 16.
//
// Of 32 bits what is read by n takes k's in pairs, and what is read by rows takes them in order: T's rows lie so that
// pairs of them are in order, too.
//
// Pass: Math, Element, Activation, BIAS; P0, P1, Q0, Q1, FACTOR_A, FACTOR_B, UNITS_PER_SAMPLE; SPAN, ROWS, SLOTS, WARPS
#pragma once
#include "kernels/operands.cuh"
#include "types/params.cuh"
#include "finish/pointwise.cuh"

template <class Pass> struct PairFew : Operands<typename Pass::Math, typename Pass::Element, Pass::WARPS * 32> {
  using Math = typename Pass::Math;
  static constexpr int WARPS = Pass::WARPS, ROWS = Pass::ROWS, SLOTS = Pass::SLOTS, SPAN = Pass::SPAN;
  using Base = Operands<Math, typename Pass::Element, WARPS * 32>;
  using typename Base::Element;
  using typename Base::Real;
  using Base::stride, Base::kAtOnce, Base::kPairs, Base::kSize, Base::kStep;
  static constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  static constexpr int kOfX = P0 / ROWS, kChunks = kOfX + Q0 / ROWS;
  static_assert(P0 % ROWS == 0 && Q0 % ROWS == 0 && Q1 % SPAN == 0 && SLOTS > 1 && SLOTS <= kChunks);
  static_assert(P1 % 16 == 0 && ROWS % 16 == 0 && SPAN % 16 == 0);

  // Shared memory: B, T, a bias, slots with chunks of X or A, and of 16 bits what Y leaves through.
  static constexpr int kX = stride(P1), kA = stride(P0), kT = stride(SPAN);
  static constexpr int kBytesB = SPAN * kX * kSize, kBytesT = P0 * kT * kSize, kBytesBias = Pass::BIAS ? Q0 * kT * kSize : 0;
  static constexpr int kSlot = ROWS * (kX > kA ? kX : kA) * kSize;

  // Warps take tasks in turn: MT tiles of 16 rows of T or Y by NT of 8 columns, up to 8, few enough for all warps to
  // have one.
  static constexpr int kRowTiles = ROWS / 16, kColumns = SPAN / 8;
  static constexpr int MT = kRowTiles % 2 == 0 && kRowTiles * kColumns >= 8 * WARPS ? 2 : 1;
  static constexpr int columns(int most) {
    return most > 1 && (kColumns % most || kRowTiles / MT * (kColumns / most) < WARPS) ? columns(most / 2) : most;
  }
  static constexpr int NT = columns(8 / MT), kTasks = kRowTiles / MT * (kColumns / NT);
  using Sums = Real[MT][NT][4];
  static DEVICE int row_of(int task) { return task % (kRowTiles / MT) * (MT * 16); }
  static DEVICE int column_of(int task) { return task / (kRowTiles / MT) * (NT * 8); }

  const Params& params;
  const Lane lane;
  const int warp;
  const u32 b, t, bias, slots;
  const typename Pass::Activation activation;
  DEVICE PairFew(const Params& given)
      : params(given), warp(threadIdx.x / 32), b(shared_address(shared_memory)), t(b + kBytesB), bias(t + kBytesT),
        slots(bias + kBytesBias), activation(given) {}

  static DEVICE u32 behind(int chunk) { return chunk % SLOTS * kSlot; }
  DEVICE void load_chunk(int chunk, const Element* x, const Element* a) const {
    if (chunk < kOfX)
      Base::template copy<ROWS, P1, kX>(x + chunk * ROWS * P1, slots + behind(chunk));
    else if (chunk < kChunks)
      Base::template copy<ROWS, P0, kA>(a + (chunk - kOfX) * ROWS * P0, slots + behind(chunk));
    commit_copies();
  }

  DEVICE void run() const {
    const Element* x = static_cast<const Element*>(params.x) + i64(blockIdx.x) * (P0 * P1);
    const Element* a = static_cast<const Element*>(params.weights[Pass::FACTOR_A]);
    const Element* of_b = static_cast<const Element*>(params.weights[Pass::FACTOR_B]) + blockIdx.y * SPAN * P1;
    Base::template copy<SPAN, P1, kX>(of_b, b);
    UNROLL for (int chunk = 0; chunk < SLOTS; ++chunk) {
      if (Pass::BIAS && chunk == (SLOTS <= kOfX ? SLOTS - 1 : kOfX)) load_bias();  // behind what is needed before it
      load_chunk(chunk, x, a);
    }
    ROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
      const u32 here = slots + behind(chunk);
      if (chunk == 0)
        wait_for_copies<SLOTS - 1>();
      else
        wait_for_copies<SLOTS - 2>();
      if constexpr (Math::kRounds)  // here what all warps read, of chunks each warp what it reads
        if (chunk == 0) Base::template round_copies<SPAN, P1, kX>(b);
      __syncthreads();  // the chunk is there, or all of T, and the last one is read
      if (chunk > 0) load_chunk(chunk - 1 + SLOTS, x, a);
      if (chunk < kOfX)
        make_t(here, chunk * ROWS);
      else
        make_y(here, (chunk - kOfX) * ROWS);
    }
  }

  DEVICE void make_t(u32 x, int first) const {
    ROLL for (int task = warp; task < kTasks; task += WARPS) {
      const int row = row_of(task), column = column_of(task);
      Sums sums = {};
      Base::template multiply<P1 / kStep, kAtOnce>(
          sums, Base::template tiles_by_rows<kX, true>(x + row * kX * kSize + Math::template lane_row_a<kX>(lane)),
          Base::template by_k<kX>(b + column * kX * kSize + Math::template lane_row_b<kX>(lane)));
      const int mine = kPairs ? lane.g % 4 * 2 + lane.g / 4 : lane.g;
      const u32 to = t + ((first + row + mine) * kT + column + lane.t * 2) * kSize;
      Base::template put_rounded<kT>(sums, to, 1);
    }
  }

  DEVICE void make_y(u32 a, int first) const {
    const u32 staged = slots + SLOTS * kSlot + warp * (16 * (NT * 8 + 8) * kSize);
    Element* to = static_cast<Element*>(params.y) + i64(blockIdx.x) * (Q0 * Q1) + blockIdx.y * SPAN;
    ROLL for (int task = warp; task < kTasks; task += WARPS) {
      const int row = row_of(task), column = column_of(task);
      Sums sums = {};
      Base::template multiply<P0 / kStep, kAtOnce>(
          sums, Base::template tiles_by_rows<kA, true>(a + row * kA * kSize + Math::template lane_row_a<kA>(lane)),
          Base::template by_n<kT>(t + column * kSize + Math::template lane_b_by_n<kT, kPairs>(lane), lane.index));
      finish(sums, bias + ((first + row + lane.g) * kT + column + lane.t * 2) * kSize);
      UNROLL for (int m = 0; m < MT; ++m)
        Base::template store_tile<Q0, SPAN, Q1, true>(sums[m], first + row + m * 16, column, to, staged, lane);
    }
  }
  // The block's columns of a unit's bias
  DEVICE void load_bias() const {
    const Element* from = static_cast<const Element*>(params.bias) + i64(blockIdx.x % Pass::UNITS_PER_SAMPLE) * (Q0 * Q1);
    Base::template copy<Q0, SPAN, kT, WARPS * 32, Q1>(from + blockIdx.y * SPAN, bias);
  }
  // Bias, which begins there, and activation of sums
  DEVICE void finish(Sums& sums, u32 bias) const {
    UNROLL for (int m = 0; m < MT; ++m)
      UNROLL for (int n = 0; n < NT; ++n) {
        if constexpr (Pass::BIAS) {
          UNROLL for (int half = 0; half < 2; ++half) {
            Real two[2];
            load_two<Element>(bias + ((m * 16 + half * 8) * kT + n * 8) * kSize, two);
            UNROLL for (int i = 0; i < 2; ++i) sums[m][n][half * 2 + i] += two[i];
          }
        }
        UNROLL for (int i = 0; i < 4; ++i) sums[m][n][i] = activation.of(sums[m][n][i]);
      }
  }
};
