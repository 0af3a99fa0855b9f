// The backward pass of five factors of 8 x 8 in float from sm_90 on, in one, by mma.sync in tf32: gradients of all weights and of
// x. A sample's state lies in shared memory three times over, each time in the place of the one before:
//
//     G, back through a and b, by columns (a, b)
//     by cubes (c, d, e): that, back through c, d and e -> memory, while x meets it: dC, dD, dE
//     what x has come to behind c, d and e: with G once more, by columns, dA and dB
//
// A warp has 32 columns, and then four cubes. Lane 4g + t holds, of 8 x 8, m's 2t and 2t + 1 of n = g. As they stand these are
// an operand of m's contraction, and one of the sum over m that is the gradient of n's weight. What is needed both ways is read
// both ways. A state as operand A, two at once, makes three products of high parts and low ones, whose sums are to the lanes as
// it was (`contract`); a weight as operand A, of high parts and low ones (eights.cuh), has sums that are n's 2t and 2t + 1 of
// m = g (`turn`). Infinities, and finite numbers so large that tf32 has none for them, make NaNs, of what depends on them and
// of nothing else; below 2^-115 low parts are lost.
//
// In shared memory a state is in order, but for the fours of rows (d, e): what is exclusive-ored to their places keeps lanes of
// an access from meeting in a bank. Half of a warp's columns of G stay there until they are needed again, then the other half
// comes in their place, and that of the next unit where this one's state is done with.
//
// Pass: UNITS_PER_SAMPLE
#pragma once
#include "mma.cuh"
#include "params.cuh"

template <class Pass> struct EightsBackward {
  static constexpr int kWarps = 16, kSize = 32768, kModes = 5, kCubes = 4, kWeight = 64;  // cubes of a warp
  static constexpr u32 kRow = 2048, kHalf = 64 * 64, kHeld = 64 * kRow, kCopies = kHeld + kWarps * kHalf;
  static constexpr u32 kWeights = kCopies + kWarps * kRow;
  static constexpr bool kBack = true;
  enum { kA, kB, kC, kD, kE };

  // Two elements of a lane: as operand A of 16 rows, those of high parts and those of low ones; as operand B. And those of four
  // states, whose products do not wait for each other.
  struct Rows { u32 words[4]; };
  using Pairs = Split3::B;
  using Four = u32[4][2];
  struct Sums { float of[kModes][2]; };

  const Params& params;
  Lane lane;
  const int warp;
  const u32 memory;
  const int units;  // of 128 KB: fewer than memory has

  DEVICE EightsBackward(const Params& given)
      : params(given), warp(uniform(threadIdx.x / 32)), memory(shared_address(shared_memory)),
        units(int(given.batch * Pass::UNITS_PER_SAMPLE)) {}

  // What is exclusive-ored to places in rows, of c and d: so even numbers, as odd ones, are in four places of 32 bytes
  static constexpr DEVICE u32 mixed(int i) { return (i ^ i >> 2) * 32; }

  // What follows from these is computed anew, not kept in registers through the loop.
  DEVICE void forget() {
    stay_here(lane.t, lane.g);
    lane.index = lane.g * 4 + lane.t;
  }
  // Where a lane's part of a row begins: e's 2t (and 2t + 1) of d = g; d's 2t of e = g; the g'th four, of two rows
  DEVICE u32 two_e() const { return mixed(lane.g) ^ lane.t * 8; }
  DEVICE u32 two_d() const { return mixed(lane.t * 2) ^ lane.g * 4; }
  DEVICE u32 four() const { return mixed(lane.t * 2 ^ lane.g / 2) ^ lane.g % 2 * 16; }
  DEVICE u32 held() const { return memory + kHeld + warp * kHalf; }
  DEVICE u32 copies() const { return memory + kCopies + warp * kRow; }
  static DEVICE u32 mix_of(int row) { return (row / 8 ^ row % 8) * 16; }  // exclusive-ored to places in an (a, b)'s row

  DEVICE void run() {
    load_weights();
    Sums sums = {};
    int unit = blockIdx.x;
    copy_cube(unit, 0);
    commit_copies();
    copy_columns(unit, 0);
    commit_copies();
    hold_columns(unit, 1, 0), hold_columns(unit, 1, 2);
    commit_copies();
    __syncthreads();
    int half = 0;  // of columns, which lies where the state will
#pragma unroll 1
    for (; unit < units; unit += gridDim.x, half ^= 1) {
      forget();
      const int next = unit + gridDim.x;
      wait_for_copies<1>();
      __syncwarp();
      bring_back<false>(half);
      wait_for_copies<0>();
      __syncwarp();
      bring_back<true>(half ^ 1);
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < kCubes; ++i) meet_in_cube(unit, i, sums);
      __syncthreads();
      Columns at(*this, half ^ 1);
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        if (i == 2) {
          at.other_half();
          copy_columns(next, half ^ 1);
          commit_copies();
          wait_for_copies<2>();
          __syncwarp();
        } else if (i == 3) {
          wait_for_copies<1>();
          __syncwarp();
        }
        meet_by_column(at, i % 2 * 2, sums);
        __syncwarp();
        if (i < 2) {
          hold_columns(unit, half, i * 2);
          commit_copies();
        }
      }
      hold_columns(next, half, 0), hold_columns(next, half, 2);
      commit_copies();
    }
    store(sums);
  }

  // In parts: all high ones, all low ones
  DEVICE void load_weights() const {
#pragma unroll
    for (int mode = 0; mode < kModes; ++mode)
      if (threadIdx.x / kWeight == mode) {
        const int i = threadIdx.x % kWeight;
        u32 high, low;
        Split3::split(__float_as_uint(static_cast<const float*>(params.weights[mode])[i]), high, low);
        store_shared(memory + kWeights + (mode * 2 * kWeight + i) * 4, high);
        store_shared(memory + kWeights + (mode * 2 * kWeight + kWeight + i) * 4, low);
      }
  }
  template <bool BACK = false> DEVICE Pairs weight(int mode) const {
    const u32 from = memory + kWeights + mode * (2 * kWeight * 4) + (BACK ? lane.t * 64 + lane.g * 4 : lane.index * 8);
    Pairs made;
    if constexpr (BACK) {
#pragma unroll
      for (int i = 0; i < 2; ++i) made.high[i] = load_u32(from + i * 32), made.low[i] = load_u32(from + kWeight * 4 + i * 32);
    } else {
      load_u32x2(from, made.high), load_u32x2(from + kWeight * 4, made.low);
    }
    return made;
  }
  static DEVICE Rows rows(const u32 (&x)[2]) {
    Rows made;
    Split3::split(x[0], made.words[0], made.words[1]), Split3::split(x[1], made.words[2], made.words[3]);
    return made;
  }
  static DEVICE Pairs pairs(const u32 (&x)[2]) {
    Pairs made;
    Split3::split(x[0], made.high[0], made.low[0]), Split3::split(x[1], made.high[1], made.low[1]);
    return made;
  }
  static DEVICE void turn(Four& x, const Rows& weight) {
    Pairs b[4];
    float sums[4][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = pairs(x[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_tf32(sums[i], weight.words, b[i].low);
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_tf32(sums[i], weight.words, b[i].high);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) x[i][j] = __float_as_uint(sums[i][j] + sums[i][j + 2]);
  }
  static DEVICE void contract(Four& x, const Pairs& weight) {
    Split3::A a[2];
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) Split3::split(x[i / 4 * 2 + i % 2][i % 4 / 2], a[i / 4].high[i % 4], a[i / 4].low[i % 4]);
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_tf32(sums[i], a[i].low, weight.high);
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_tf32(sums[i], a[i].high, weight.low);
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_tf32(sums[i], a[i].high, weight.high);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 2][i % 2] = __float_as_uint(sums[i / 4][i % 4]);
  }
  // Rows of sums are of x, columns of G. The matrix unit truncates what it adds to: sums of few products are added rounded.
  static DEVICE void add(float (&sums)[2], const Four& x, const Four& grad) {
    float more[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      Rows a[2];
      Pairs b[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) a[j] = rows(x[i + j]), b[j] = pairs(grad[i + j]);
#pragma unroll
      for (int j = 0; j < 2; ++j) multiply_tf32(more, a[j].words, b[j].low);
#pragma unroll
      for (int j = 0; j < 2; ++j) multiply_tf32(more, a[j].words, b[j].high);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] += more[i] + more[i + 2];
  }

  // G's columns, 16 for a warp at once, to where the state will be; 8 of them beside it; and a cube of x
  DEVICE const float* grad_of(int unit) const {
    return static_cast<const float*>(params.weights[kModes]) + i64(unit) * kSize;
  }
  DEVICE void copy_columns(int unit, int half) const {
    if (unit >= units) return;
    const int b = lane.index / 4, four = half * 4 + lane.index % 4;
    const float* from = grad_of(unit) + b * 512 + warp * 32 + four * 4;
    const u32 to = memory + b * kRow + warp / 2 * 256 + (mixed(warp % 2 * 4 ^ warp / 2) ^ (b ^ four) * 16);
#pragma unroll
    for (int a = 0; a < 8; ++a) copy_async<16>((to ^ a * 16) + a * (8 * kRow), from + a * 4096, true);
  }
  DEVICE void hold_columns(int unit, int half, int first) const {
    if (unit >= units) return;
    const int odd = lane.index / 16, b = lane.index / 2 % 8, four = first + lane.index % 2;  // of a
    const float* from = grad_of(unit) + odd * 4096 + b * 512 + warp * 32 + half * 16 + four * 4;
    const u32 to = held() + odd * 512 + b / 2 * 128 + ((odd ^ b) % 2 * 64 ^ b / 2 * 16 ^ four * 16);
#pragma unroll
    for (int a = 0; a < 8; a += 2) copy_async<16>((to ^ a * 8) + a * 512, from + a * 4096, true);
  }
  DEVICE void copy_cube(int unit, int cube) const {
    if (unit >= units) return;
    const int i = lane.index, row = warp * kCubes + cube;
    const float* from = static_cast<const float*>(params.x) + i64(unit) * kSize + row * 512 + i * 4;
    const u32 to = i / 16 * 256 + (mixed(i / 2 % 8 ^ i / 16) ^ i % 2 * 16), mix = mix_of(row);
#pragma unroll
    for (int c = 0; c < 8; c += 2) copy_async<16>(copies() + (to ^ mix ^ mixed(c)) + c * 256, from + c * 64, true);
  }

  // Places of four columns, in the state and where G is held: of a's 2t and 2t + 1 (b = g), or of two b's
  struct Columns {
    u32 by_a, by_b, held_by_a, held_by_b;
    DEVICE Columns(const EightsBackward& the, int half) {
      const int t = the.lane.t, g = the.lane.g, x = t * 2 ^ g;
      const u32 mix = mixed(the.warp % 2 * 4 ^ the.warp / 2) ^ (x ^ half * 4) * 16;
      const u32 from = the.memory + the.warp / 2 * 256 + mix;
      by_a = from + t * (16 * kRow) + g * kRow, by_b = from + g * (8 * kRow) + t * (2 * kRow);
      const u32 held = the.held() + (x % 2 * 64 ^ x / 2 * 16);
      held_by_a = held + t * 1024 + g / 2 * 128, held_by_b = held + g * 512 + t * 128;
    }
    DEVICE void other_half() { by_a ^= 64, by_b ^= 64; }
    template <bool B> DEVICE u32 state(int four, int i) const {
      return ((B ? by_b : by_a) ^ (four * 16 ^ i * 16)) + i * (B ? kRow : 8 * kRow);
    }
    template <bool B> DEVICE u32 held(int four, int i) const {
      return ((B ? held_by_b : held_by_a) ^ (four * 16 ^ i * 64)) + (B ? 0 : i * 512);
    }
  };

  // G's columns back through a and b
  template <bool HELD> DEVICE void bring_back(int half) const {
    const Pairs split = weight<kBack>(kA), b = weight<kBack>(kB);
    const Rows a = {split.high[0], split.low[0], split.high[1], split.low[1]};
    const Columns at(*this, half);
#pragma unroll 2
    for (int four = 0; four < 4; ++four) {
      Four x;
      load(x, HELD ? at.template held<false>(four, 0) : at.template state<false>(four, 0),
           HELD ? at.template held<false>(four, 1) : at.template state<false>(four, 1));
      if constexpr (!HELD) __syncwarp();
      turn(x, a);
      contract(x, b);
      store(x, at.template state<true>(four, 0), at.template state<true>(four, 1));
    }
  }
  static DEVICE void store(const Four& x, u32 first, u32 second) {
    store_u32x4(first, {x[0][0], x[1][0], x[2][0], x[3][0]}), store_u32x4(second, {x[0][1], x[1][1], x[2][1], x[3][1]});
  }
  static DEVICE void load(Four& x, u32 first, u32 second) {
    u32 y[2][4];
    load_u32x4(first, y[0]), load_u32x4(second, y[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 2][i % 2] = y[i % 2][i / 2];
  }

  // What came back to an (a, b), by x: c's of all d; c's gradient waits for x to pass d and e.
  DEVICE void meet_in_cube(int unit, int i, Sums& sums) const {
    const int row = warp * kCubes + i;
    const u32 cube = memory + row * kRow, mix = mix_of(row), one_c = two_e() + lane.g * 256;
    Four back[2];
#pragma unroll
    for (int d = 0; d < 8; ++d) load_u32x2(cube + (one_c ^ mix ^ mixed(d)), back[d / 4][d % 4]);
    __syncwarp();
    through_c<kBack>(cube, mix);
    wait_for_copies<0>();
    __syncwarp();
    through_d_and_e(cube, mix, static_cast<float*>(params.y) + i64(unit) * kSize + row * 512 + lane.index * 2, sums);
    __syncwarp();
    copy_cube(i + 1 < kCubes ? unit : unit + gridDim.x, (i + 1) % kCubes);
    commit_copies();
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
      Four x;
#pragma unroll
      for (int j = 0; j < 4; ++j) load_u32x2(cube + (one_c ^ mix ^ mixed(first + j)), x[j]);
      add(sums.of[kC], x, back[first / 4]);
    }
    __syncwarp();
    through_c<!kBack>(cube, mix);
  }
  template <bool BACK> DEVICE void through_c(u32 cube, u32 mix) const {
    const Pairs c = weight<BACK>(kC);
    const u32 from = four() + lane.t * 512;
    Four x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) load(x[i], cube + (from ^ mix ^ mixed(i * 4)), cube + (from ^ mix ^ mixed(i * 4) ^ 32) + 256);
#pragma unroll
    for (int i = 0; i < 2; ++i) contract(x[i], c);
#pragma unroll
    for (int i = 0; i < 2; ++i) store(x[i], cube + (from ^ mix ^ mixed(i * 4)), cube + (from ^ mix ^ mixed(i * 4) ^ 32) + 256);
  }
  // Four c's at a time
  DEVICE void through_d_and_e(u32 cube, u32 mix, float* to, Sums& sums) const {
    const Pairs d = weight(kD), e = weight(kE), d_back = weight<kBack>(kD), e_back = weight<kBack>(kE);
    u32 from = copies();
#pragma unroll 1
    for (int c = 0; c < 8; c += 4) {
      Four x, by_d, grad, grad_by_d;
      load_pairs(x, from, mix);
      load_pairs(grad, cube, mix);
      load_apart(grad_by_d, cube, mix);
      load_apart(by_d, from, mix);
      __syncwarp();
      contract(x, e);
      contract(grad_by_d, d_back);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_f32x2(from + of_two_e(i, mix), __uint_as_float(x[i][0]), __uint_as_float(x[i][1]));
#pragma unroll
      for (int i = 0; i < 8; ++i) store_shared(cube + of_two_d(i, mix), grad_by_d[i / 2][i % 2]);
      add(sums.of[kD], x, grad);
      add(sums.of[kE], by_d, grad_by_d);
      __syncwarp();
      load_pairs(grad, cube, mix);
      const u32 fours = four() + lane.g / 2 * 256;
      load(x, from + (fours ^ mix), from + (fours ^ mix ^ 32));
      __syncwarp();
      contract(x, d);
      store(x, cube + (fours ^ mix), cube + (fours ^ mix ^ 32));
      contract(grad, e_back);
#pragma unroll
      for (int i = 0; i < 4; ++i) store_global_once(to + i * 64, grad[i]);
      to += 4 * 64, cube += 4 * 256, from += 4 * 256, mix ^= mixed(4);
    }
  }
  DEVICE u32 of_two_e(int i, u32 mix) const { return i * 256 + (two_e() ^ mix ^ mixed(i)); }
  DEVICE u32 of_two_d(int i, u32 mix) const { return i / 2 * 256 + (two_d() ^ mix ^ mixed(i / 2) ^ i % 2 * 32); }
  DEVICE void load_pairs(Four& x, u32 from, u32 mix) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_u32x2(from + of_two_e(i, mix), x[i]);
  }
  DEVICE void load_apart(Four& x, u32 from, u32 mix) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 2][i % 2] = load_u32(from + of_two_d(i, mix));
  }

  // Eight columns of what x came to, and of G, by fours
  DEVICE void meet_by_column(const Columns& at, int first, Sums& sums) const {
    const Pairs a = weight(kA), b = weight(kB);
#pragma unroll 1
    for (int four = first; four < first + 2; ++four) {
      meet<false>(a, at, four, sums.of[kB]);
      meet<true>(b, at, four, sums.of[kA]);
    }
  }
  template <bool B> DEVICE void meet(const Pairs& weight, const Columns& at, int four, float (&sums)[2]) const {
    Four x, grad;
    load(x, at.template state<B>(four, 0), at.template state<B>(four, 1));
    load(grad, at.template held<B>(four, 0), at.template held<B>(four, 1));
    contract(x, weight);
    add(sums, x, grad);
  }

  // All warps' sums, to where this block's belong
  DEVICE void store(const Sums& sums) const {
    __syncthreads();
#pragma unroll
    for (int mode = 0; mode < kModes; ++mode)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared(memory + ((warp * kModes + mode) * kWeight + (lane.t * 2 + i) * 8 + lane.g) * 4,
                     __float_as_uint(sums.of[mode][i]));
    __syncthreads();
    const int i = threadIdx.x;
    if (i >= kModes * kWeight) return;
    float sum = 0;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) sum += __uint_as_float(load_u32(memory + (from * kModes * kWeight + i) * 4));
    store_global(static_cast<float*>(params.sums) + i64(blockIdx.x) * (kModes * kWeight) + i, sum);
  }
};
