// A pass of five factors of 8 x 8 in float, a sample's state at a time, by mma.sync in tf32. Operand A is a weight, the high
// parts of its eight rows and the low ones, and operand B is 8 x 8 of the state: one product for its high parts and one for its
// low ones, and the sums' lower rows added to the upper ones. Lane 4g + t holds, of B, k's 2t and 2t + 1 of column g, and of
// the sums columns 2t and 2t + 1 of row g: as they stand these are B of the next contraction, of the mode that was across. So
// two modes are contracted in registers:
//
//     memory -> e, d of each (a, b, c) -> shared memory -> c, b of each (a, d, e) -> there again -> a -> bias, activation -> memory
//
// In shared memory a slab has the rows (b, c) of an a, each of all (d, e) and padded by 16 bytes. A pair of warps has a slab up
// to its last contraction. Of the next unit, the copy engine brings as many of a warp's rows as shared memory has room for
// meanwhile, and lanes ask for the rest before they store this one.
//
// Infinities and NaNs are not what they should be once they are split. Rows with numbers so large that one could be met, and
// all that comes of these, are made carefully: with sums of low parts by themselves, which count where they are finite.
//
// Pass: FIRST (the weight of a), UNITS_PER_SAMPLE, STAGED (rows of a warp that the copy engine brings); BIAS, Activation
#pragma once
#include "multiply/mma.cuh"
#include "finish/pointwise.cuh"

template <class Pass> struct Eights {
  static constexpr int kWarps = 16, kRows = 32, kSize = 32768, kSlabSize = 4096, kRowSize = 64;  // rows of a warp; elements
  static constexpr int kRow = (kRowSize + 4) * 4, kSlab = 64 * kRow;                             // bytes
  static constexpr int kStaged = Pass::STAGED * kRowSize * 4;                                    // of a warp
  static constexpr u32 kWeight = 32 * 16, kStates = 5 * kWeight, kCopies = kStates + 8 * kSlab + 48;
  static constexpr u32 kBarriers = kCopies + kWarps * kStaged;
  static constexpr u32 kUnsure = kBarriers + kWarps * 8, kNorms = kUnsure + kWarps * 4;

  const Params& params;
  const Lane lane;
  const int warp;
  const u32 memory, slab, copies, barrier;
  const i64 units;

  // Slabs of odd and even a lie so that lanes of an access to two of each do not meet in a bank.
  static constexpr DEVICE u32 slab_at(int a) { return kStates + a * kSlab + a / 2 * 16; }
  DEVICE Eights(const Params& given)
      : params(given), warp(threadIdx.x / 32), memory(shared_address(shared_memory)), slab(memory + slab_at(warp / 2)),
        copies(memory + kCopies + warp * kStaged), barrier(memory + kBarriers + warp * 8),
        units(given.batch * Pass::UNITS_PER_SAMPLE) {}

  DEVICE void run() const {
    if (warp < 5) load_weight(warp);  // first of all: what they wait for must not stand behind x
    i64 unit = blockIdx.x;
    if (lane.index == 0) init_arrivals(barrier), ask_for(unit);
    float rest[kRows - Pass::STAGED][2];
    load_rest(rest, unit);
    __syncthreads();
    const float largest = kLargestFloat / norm();
    u32 phase = 0;
    ROLL for (; unit < units; unit += gridDim.x, phase ^= 1) {
      wait_for_bytes(barrier, phase);
      put_rows(rest, largest, unit + gridDim.x);
      prefetch_rest(unit + gridDim.x);
      sync_group<2, 16>(1 + warp / 2);
      u32 unsure[2];
      load_u32x2(memory + kUnsure + warp / 2 * 8, unsure);
      if (unsure[0] | unsure[1])
        contract_slab<true>();
      else
        contract_slab<false>();
      const bool careful = __syncthreads_or(unsure[0] | unsure[1]);
      load_rest(rest, unit + gridDim.x);
      if (careful)
        store<true>(unit);
      else
        store<false>(unit);
      __syncthreads();
    }
  }

  // As lanes have it: its high parts of k's 2t and 2t + 1, and low ones. And the largest sum of a row's magnitudes
  DEVICE void load_weight(int mode) const {
    const float* from = static_cast<const float*>(params.weights[Pass::FIRST + mode]) + lane.index * 2;
    u32 words[4];
    float norm = 0;
    UNROLL for (int i = 0; i < 2; ++i) {
      const float low = split_with_care(from[i], words[i * 2]);
      words[i * 2 + 1] = fabsf(low) <= kLargestFloat ? tf32_of(__float_as_uint(low)) : 0;
      norm += fabsf(from[i]);
    }
    store_u32x4(memory + mode * kWeight + lane.index * 16, words);
    norm += of_lane(norm, 1), norm += of_lane(norm, 2);
    UNROLL for (int by = 4; by < 32; by *= 2) norm = larger(norm, of_lane(norm, by));
    if (lane.index == 0) store_shared(memory + kNorms + mode * 4, __float_as_uint(norm));
  }
  // By how much a state can be larger
  DEVICE float norm() const {
    float norm = 2;
    UNROLL for (int mode = 0; mode < 5; ++mode)
      norm *= larger(1.f, __uint_as_float(load_u32(memory + kNorms + mode * 4)));
    return norm;
  }
  struct Weight { u32 rows[4]; };
  DEVICE Weight weight(int mode) const {
    Weight w;
    load_u32x4(memory + mode * kWeight + lane.index * 16, w.rows);
    return w;
  }
  // The low part, and the high one, which is to the nearest unless that is infinite; a NaN's has the bits that make it one.
  // Within 2^-10 of the largest number, products of high parts may be infinite all the same.
  static DEVICE float split_with_care(float x, u32& high) {
    const u32 bits = __float_as_uint(x);
    high = tf32_of(bits);
    if (!(fabsf(__uint_as_float(high)) <= kLargestFloat)) high = fabsf(x) <= kLargestFloat ? bits & ~0x1fffu : __float_as_uint(x + x);
    return x - __uint_as_float(high);
  }

  template <bool CAREFUL> static DEVICE void contract(float (&x)[2], const Weight& w) {
    u32 high[2], low[2];
    float y[4] = {};
    UNROLL for (int i = 0; i < 2; ++i)
      if constexpr (CAREFUL)
        low[i] = __float_as_uint(split_with_care(x[i], high[i]));
      else
        Split3::split(__float_as_uint(x[i]), high[i], low[i]);
    multiply_tf32(y, w.rows, low);
    if constexpr (CAREFUL) {
      float large[4] = {};
      multiply_tf32(large, w.rows, high);
      UNROLL for (int i = 0; i < 2; ++i) {
        const float small = y[i] + y[i + 2] + large[i + 2];
        x[i] = large[i] + (fabsf(small) <= kLargestFloat ? small : 0.f);
      }
    } else {
      multiply_tf32(y, w.rows, high);
      UNROLL for (int i = 0; i < 2; ++i) x[i] = y[i] + y[i + 2];
    }
  }

  // Four neighbours, of each k's 2t and 2t + 1, by one weight after the other
  template <bool CAREFUL, class... Weights> static DEVICE void contract_fours(u32 (&x)[2][4], const Weights&... weights) {
    UNROLL for (int i = 0; i < 4; ++i) {
      float two[2] = {__uint_as_float(x[0][i]), __uint_as_float(x[1][i])};
      (contract<CAREFUL>(two, weights), ...);
      x[0][i] = __float_as_uint(two[0]), x[1][i] = __float_as_uint(two[1]);
    }
  }

  // A warp's rows of x: to shared memory, on their way to L2, and to registers. Behind the last unit zeros: what x was before
  // must not stay in registers until here.
  DEVICE const float* rows_of(i64 unit) const {
    return static_cast<const float*>(params.x) + unit * kSize + warp * (kRows * kRowSize);
  }
  DEVICE void ask_for(i64 unit) const {
    if (unit >= units) return;
    fence_copy_engine();
    expect_bytes(barrier, kStaged);
    load_run_once(copies, rows_of(unit), kStaged, barrier);
  }
  DEVICE void prefetch_rest(i64 unit) const {
    constexpr int kLine = 32, kLines = (kRows - Pass::STAGED) * kRowSize / kLine;
    static_assert(kLines <= 32);
    if (unit < units && lane.index < kLines) prefetch(rows_of(unit) + Pass::STAGED * kRowSize + lane.index * kLine);
  }
  DEVICE void load_rest(float (&rest)[kRows - Pass::STAGED][2], i64 unit) const {
    const float* from = rows_of(unit) + Pass::STAGED * kRowSize + lane.index * 2;
    UNROLL for (int row = 0; row < kRows - Pass::STAGED; ++row) {
      u32 words[2];
      load_global<8>(from + row * kRowSize, words, unit < units);
      rest[row][0] = __uint_as_float(words[0]), rest[row][1] = __uint_as_float(words[1]);
    }
  }

  // e and d of the warp's rows, some at a time, to shared memory: a lane has e's 2t and 2t + 1 of d = g, and then again. Once
  // the copied ones have been read, the next ones are asked for.
  DEVICE void put_rows(const float (&rest)[kRows - Pass::STAGED][2], float largest, i64 next) const {
    constexpr int kAtOnce = 8;  // with c: of one b
    const Weight e = weight(4), d = weight(3);
    const u32 to = slab + warp % 2 * (kRows * kRow) + lane.index * 8;
    bool sure = true;
    UNROLL for (int first = 0; first < kRows; first += kAtOnce) {
      float x[kAtOnce][2], size = 0;
      UNROLL for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i;
        if (row < Pass::STAGED) {
          u32 words[2];
          load_u32x2(copies + row * (kRowSize * 4) + lane.index * 8, words);
          x[i][0] = __uint_as_float(words[0]), x[i][1] = __uint_as_float(words[1]);
        } else {
          x[i][0] = rest[row - Pass::STAGED][0], x[i][1] = rest[row - Pass::STAGED][1];
        }
        size += fabsf(x[i][0]) + fabsf(x[i][1]);
      }
      if (Pass::STAGED > first && Pass::STAGED <= first + kAtOnce) {
        __syncwarp();
        if (lane.index == 0) ask_for(next);
      }
      if (__all_sync(0xffffffff, size <= largest)) {
        contract_rows<false>(x, e, d);
      } else {
        contract_rows<true>(x, e, d);
        sure = false;
      }
      UNROLL for (int i = 0; i < kAtOnce; ++i)
        store_f32x2(to + place_of(first / 8, i) * kRow, x[i][0], x[i][1]);
    }
    if (lane.index == 0) store_shared(memory + kUnsure + warp * 4, u32(!sure));
  }
  template <bool CAREFUL, int N> static DEVICE void contract_rows(float (&x)[N][2], const Weight& e, const Weight& d) {
    UNROLL for (auto& row : x) contract<CAREFUL>(row, e);
    UNROLL for (auto& row : x) contract<CAREFUL>(row, d);
  }
  // Where a slab's row lies: every other b's in another order, so that lanes of 8 rows do not meet in a bank.
  static constexpr DEVICE int place_of(int b, int c) { return b * 8 + (c ^ b % 2); }

  // c and b: a lane has c's 2t and 2t + 1 of b = g, and then again, for four neighbours at a time.
  template <bool CAREFUL> DEVICE void contract_slab() const {
    const Weight c = weight(2), b = weight(1);
    const u32 half = slab + warp % 2 * (kRowSize * 2);
    const u32 first = half + place_of(lane.g, lane.t * 2) * kRow, second = half + place_of(lane.g, lane.t * 2 + 1) * kRow;
    UNROLL_BY(CAREFUL ? 1 : 2) for (int at = 0; at < kRowSize * 2; at += 16) {
      u32 x[2][4];
      load_u32x4(first + at, x[0]), load_u32x4(second + at, x[1]);
      contract_fours<CAREFUL>(x, c, b);
      store_u32x4(first + at, x[0]), store_u32x4(second + at, x[1]);
    }
  }

  // a, of halves of rows, four neighbours at a time: columns 2t and 2t + 1 of the sums are the t'th and the (t + 4)th four.
  template <bool CAREFUL> DEVICE void store(i64 unit) const {
    const typename Pass::Activation activation(params);
    const Weight a = weight(0);
    const u32 four = lane.g / 2 * 16 + lane.g % 2 * 64;
    const u32 first = memory + slab_at(lane.t * 2) + four, second = memory + slab_at(lane.t * 2 + 1) + four;
    const i64 place = lane.g * kSlabSize + lane.t * 4;
    float* y = static_cast<float*>(params.y) + unit * kSize + place;
    const float* bias = static_cast<const float*>(params.bias) + unit % Pass::UNITS_PER_SAMPLE * kSize + place;
    UNROLL_BY(CAREFUL ? 1 : 2) for (int i = 0; i < 8; ++i) {
      const int row = warp * 4 + i / 2, at = i % 2 * (kRowSize / 2);
      const int from = row * kRow + at * 4, to = place_of(row / 8, row % 8) * kRowSize + at;
      u32 x[2][4];
      load_u32x4(first + from, x[0]), load_u32x4(second + from, x[1]);
      contract_fours<CAREFUL>(x, a);
      UNROLL for (int half = 0; half < 2; ++half) {
        u32 more[4] = {};
        if constexpr (Pass::BIAS) load_global(bias + to + half * 16, more);
        UNROLL for (int j = 0; j < 4; ++j) {
          const float sum = __uint_as_float(x[half][j]);
          x[half][j] = __float_as_uint(activation.of(Pass::BIAS ? sum + __uint_as_float(more[j]) : sum));
        }
        store_global<16>(y + to + half * 16, x[half]);
      }
    }
  }
};
