// The backward pass of five factors of 8 x 8 in float from sm_90 on, in one, by mma.sync in tf32: gradients of all weights and
// of x. A sample's state lies in shared memory three times over, each time in the place of the one before:
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
#include "multiply/mma.cuh"
#include "types/params.cuh"

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
  u32 t = threadIdx.x % 4, g = threadIdx.x / 4 % 8;  // of a lane
  const u32 warp, memory;
  const u32 units;  // of 128 KB: memory has no 2^26 of them

  DEVICE EightsBackward(const Params& given)
      : params(given), warp(uniform(threadIdx.x / 32)), memory(shared_address(shared_memory)),
        units(u32(given.batch * Pass::UNITS_PER_SAMPLE)) {}

  // What is exclusive-ored to places in rows, of c and d: so even numbers, as odd ones, are in four places of 32 bytes
  static constexpr DEVICE u32 mixed(u32 i) { return (i ^ i >> 2) * 32; }

  // What follows from these is computed anew, not kept in registers through the loop.
  DEVICE void forget() { stay_here(t, g); }
  DEVICE u32 lane() const { return g * 4 + t; }
  // Where a lane's part of a row begins: e's 2t (and 2t + 1) of d = g; d's 2t of e = g; the g'th four, of two rows
  DEVICE u32 two_e() const { return mixed(g) ^ t * 8; }
  DEVICE u32 two_d() const { return mixed(t * 2) ^ g * 4; }
  DEVICE u32 four() const { return mixed(t * 2 ^ g / 2) ^ g % 2 * 16; }
  DEVICE u32 held() const { return memory + kHeld + warp * kHalf; }
  DEVICE u32 copies() const { return memory + kCopies + warp * kRow; }
  static DEVICE u32 mix_of(u32 cube) { return (cube / 8 ^ cube) % 8 * 16; }  // exclusive-ored to places in its row

  DEVICE void run() {
    load_weights();
    Sums sums = {};
    u32 unit = blockIdx.x;
    copy_columns(unit, 0);
    commit_copies();
    copy_cube(first_cube(unit));
    hold_half(unit, 1);
    commit_copies();
    __syncthreads();
    u32 half = 0;  // of columns, which lies where the state will
    ROLL for (; unit < units; unit += gridDim.x, half ^= 1) {
      forget();
      const u32 next = unit + gridDim.x;
      wait_for_copies<1>();
      __syncwarp();
      bring_back<false>(half);
      wait_for_copies<0>();
      __syncwarp();
      bring_back<true>(half ^ 1);
      __syncthreads();
      ROLL for (u32 i = 0; i < kCubes; ++i)
        meet_in_cube(first_cube(unit) + i, i + 1 < kCubes ? first_cube(unit) + i + 1 : first_cube(next), sums);
      __syncthreads();
      Columns at(*this, half ^ 1);
      ROLL for (int i = 0; i < 4; ++i) {
        if (i >= 2) {
          wait_for_copies<1>();
          __syncwarp();
        }
        if (i == 2) at.other_half();
        meet_by_column(at, i % 2 * 2, sums, [&](u32 four) {
          if (i == 2) copy_columns<4>(next, half ^ 1, four * 4);
        });
        __syncwarp();
        if (i < 2) hold_eight(unit, half, i * 2);
        if (i < 3) commit_copies();
      }
      hold_half(next, half);
      commit_copies();
    }
    store(sums);
  }

  // In parts: all high ones, all low ones
  DEVICE void load_weights() const {
    UNROLL for (int mode = 0; mode < kModes; ++mode)
      if (threadIdx.x / kWeight == mode) {
        const int i = threadIdx.x % kWeight;
        u32 high, low;
        Split3::split(__float_as_uint(static_cast<const float*>(params.weights[mode])[i]), high, low);
        store_shared(memory + kWeights + (mode * 2 * kWeight + i) * 4, high);
        store_shared(memory + kWeights + (mode * 2 * kWeight + kWeight + i) * 4, low);
      }
  }
  template <bool BACK = false> DEVICE Pairs weight(int mode) const {
    const u32 from = memory + kWeights + mode * (2 * kWeight * 4) + (BACK ? t * 64 + g * 4 : lane() * 8);
    Pairs made;
    if constexpr (BACK) {
      UNROLL for (int i = 0; i < 2; ++i)
        made.high[i] = load_u32(from + i * 32), made.low[i] = load_u32(from + kWeight * 4 + i * 32);
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
    UNROLL for (int i = 0; i < 4; ++i) b[i] = pairs(x[i]);
    UNROLL for (int i = 0; i < 4; ++i) multiply_tf32(sums[i], weight.words, b[i].low);
    UNROLL for (int i = 0; i < 4; ++i) multiply_tf32(sums[i], weight.words, b[i].high);
    UNROLL for (int i = 0; i < 4; ++i)
      UNROLL for (int j = 0; j < 2; ++j) x[i][j] = __float_as_uint(sums[i][j] + sums[i][j + 2]);
  }
  static DEVICE void contract(Four& x, const Pairs& weight) {
    Split3::A a[2];
    float sums[2][4] = {};
    UNROLL for (int i = 0; i < 8; ++i)
      Split3::split(x[i / 4 * 2 + i % 2][i % 4 / 2], a[i / 4].high[i % 4], a[i / 4].low[i % 4]);
    UNROLL for (int i = 0; i < 2; ++i) multiply_tf32(sums[i], a[i].low, weight.high);
    UNROLL for (int i = 0; i < 2; ++i) multiply_tf32(sums[i], a[i].high, weight.low);
    UNROLL for (int i = 0; i < 2; ++i) multiply_tf32(sums[i], a[i].high, weight.high);
    UNROLL for (int i = 0; i < 8; ++i) x[i / 2][i % 2] = __float_as_uint(sums[i / 4][i % 4]);
  }
  // Rows of sums are of x, columns of G. The matrix unit truncates what it adds to: sums of few products are added rounded.
  static DEVICE void add(float (&sums)[2], const Four& x, const Four& grad) {
    float more[4] = {};
    UNROLL for (int i = 0; i < 4; i += 2) {
      Rows a[2];
      Pairs b[2];
      UNROLL for (int j = 0; j < 2; ++j) a[j] = rows(x[i + j]), b[j] = pairs(grad[i + j]);
      UNROLL for (int j = 0; j < 2; ++j) multiply_tf32(more, a[j].words, b[j].low);
      UNROLL for (int j = 0; j < 2; ++j) multiply_tf32(more, a[j].words, b[j].high);
    }
    UNROLL for (int i = 0; i < 2; ++i) sums[i] += more[i] + more[i + 2];
  }

  // G's columns, 16 for a warp at once, to where the state will be; 8 of them beside it, or 16; and a cube of x. A few copies
  // between products keep other warps' loads from shared memory waiting for less than all at once.
  DEVICE const float* grad_of(u32 unit) const {
    return static_cast<const float*>(params.weights[kModes]) + u64(unit) * kSize;
  }
  template <int COUNT = 8> DEVICE void copy_columns(u32 unit, u32 half, u32 first = 0) const {
    if (unit >= units) return;
    const u32 four = half * 4 + t;
    const float* from = grad_of(unit) + g * 512 + warp * 32 + four * 4;
    const u32 to = memory + first * (8 * kRow) + g * kRow + warp / 2 * 256 +
                   (mixed(warp % 2 * 4 ^ warp / 2) ^ (g ^ four) * 16);
    UNROLL for (u32 a = 0; a < COUNT; ++a)
      copy_async<16>((to ^ (first ^ a) * 16) + a * (8 * kRow), from + (first + a) * 4096, true);
  }
  DEVICE void hold_eight(u32 unit, u32 half, u32 first) const {
    if (unit >= units) return;
    const u32 odd = g / 4, b = g % 4 * 2 + t / 2, four = first + t % 2;  // of a
    const float* from = grad_of(unit) + odd * 4096 + b * 512 + warp * 32 + half * 16 + four * 4;
    const u32 to = held() + odd * 512 + b / 2 * 128 + ((odd ^ b) % 2 * 64 ^ b / 2 * 16 ^ four * 16);
    UNROLL for (int a = 0; a < 8; a += 2) copy_async<16>((to ^ a * 8) + a * 512, from + a * 4096, true);
  }
  DEVICE void hold_half(u32 unit, u32 half) const {
    if (unit >= units) return;
    const float* from = grad_of(unit) + g * 512 + warp * 32 + half * 16 + t * 4;
    const u32 to = held() + g / 2 * 128 + (g % 2 * 64 ^ g / 2 * 16 ^ t * 16);
    UNROLL for (int a = 0; a < 8; ++a) copy_async<16>((to ^ a % 2 * 64 ^ a / 2 * 16) + a * 512, from + a * 4096, true);
  }
  DEVICE u32 first_cube(u32 unit) const { return unit * 64 + warp * kCubes; }
  DEVICE void copy_cube(u32 cube) const {
    if (cube >= units * 64) return;
    const char* from = static_cast<const char*>(params.x) + lane() * 16 + u64(cube) * kRow;
    const u32 to = copies() + g / 4 * 256 + (mixed(g % 4 * 2 ^ t / 2 ^ g / 4) ^ t % 2 * 16 ^ mix_of(cube));
    UNROLL for (int c = 0; c < 8; c += 2) copy_async<16>((to ^ mixed(c)) + c * 256, from + c * 256, true);
  }

  // Places of four columns, in the state and where G is held: of a's 2t and 2t + 1 (b = g), or of two b's
  struct Columns {
    u32 by_a, by_b, held_by_a, held_by_b;
    DEVICE Columns(const EightsBackward& the, u32 half) {
      const u32 t = the.t, g = the.g, x = t * 2 ^ g;
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
  template <bool HELD> DEVICE void bring_back(u32 half) const {
    const Pairs split = weight<kBack>(kA), b = weight<kBack>(kB);
    const Rows a = {split.high[0], split.low[0], split.high[1], split.low[1]};
    const Columns at(*this, half);
    UNROLL_BY(2) for (int four = 0; four < 4; ++four) {
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
    UNROLL for (int i = 0; i < 8; ++i) x[i / 2][i % 2] = y[i % 2][i / 2];
  }

  // What came back to an (a, b), by x: c's of all d; c's gradient waits for x to pass d and e.
  DEVICE void meet_in_cube(u32 index, u32 next, Sums& sums) const {
    const u32 cube = memory + index % 64 * kRow, mix = mix_of(index), one_c = two_e() + g * 256;
    Four back[2];
    UNROLL for (int d = 0; d < 8; ++d) load_u32x2(cube + (one_c ^ mix ^ mixed(d)), back[d / 4][d % 4]);
    __syncwarp();
    through_c<kBack>(cube, mix);
    wait_for_copies<0>();
    __syncwarp();
    through_d_and_e(cube, mix, static_cast<char*>(params.y) + lane() * 8 + u64(index) * kRow, sums);
    __syncwarp();
    copy_cube(next);
    commit_copies();
    UNROLL for (int first = 0; first < 8; first += 4) {
      Four x;
      UNROLL for (int j = 0; j < 4; ++j) load_u32x2(cube + (one_c ^ mix ^ mixed(first + j)), x[j]);
      add(sums.of[kC], x, back[first / 4]);
    }
    __syncwarp();
    through_c<!kBack>(cube, mix);
  }
  template <bool BACK> DEVICE void through_c(u32 cube, u32 mix) const {
    const Pairs c = weight<BACK>(kC);
    const u32 from = four() + t * 512;
    Four x[2];
    UNROLL for (int i = 0; i < 2; ++i)
      load(x[i], cube + (from ^ mix ^ mixed(i * 4)), cube + (from ^ mix ^ mixed(i * 4) ^ 32) + 256);
    UNROLL for (int i = 0; i < 2; ++i) contract(x[i], c);
    UNROLL for (int i = 0; i < 2; ++i)
      store(x[i], cube + (from ^ mix ^ mixed(i * 4)), cube + (from ^ mix ^ mixed(i * 4) ^ 32) + 256);
  }
  // Four c's at a time
  DEVICE void through_d_and_e(u32 cube, u32 mix, char* to, Sums& sums) const {
    const Pairs d = weight(kD), e = weight(kE), d_back = weight<kBack>(kD), e_back = weight<kBack>(kE);
    u32 from = copies();
    ROLL for (int c = 0; c < 8; c += 4) {
      Four x, by_d, grad, grad_by_d;
      load_pairs(x, from, mix);
      load_pairs(grad, cube, mix);
      load_apart(grad_by_d, cube, mix);
      load_apart(by_d, from, mix);
      __syncwarp();
      contract(x, e);
      contract(grad_by_d, d_back);
      UNROLL for (int i = 0; i < 4; ++i)
        store_f32x2(from + of_two_e(i, mix), __uint_as_float(x[i][0]), __uint_as_float(x[i][1]));
      UNROLL for (int i = 0; i < 8; ++i) store_shared(cube + of_two_d(i, mix), grad_by_d[i / 2][i % 2]);
      add(sums.of[kD], x, grad);
      add(sums.of[kE], by_d, grad_by_d);
      __syncwarp();
      load_pairs(grad, cube, mix);
      const u32 fours = four() + g / 2 * 256;
      load(x, from + (fours ^ mix), from + (fours ^ mix ^ 32));
      __syncwarp();
      contract(x, d);
      store(x, cube + (fours ^ mix), cube + (fours ^ mix ^ 32));
      contract(grad, e_back);
      UNROLL for (int i = 0; i < 4; ++i) store_global_once(to + i * 256, grad[i]);
      to += 4 * 256, cube += 4 * 256, from += 4 * 256, mix ^= mixed(4);
    }
  }
  DEVICE u32 of_two_e(int i, u32 mix) const { return i * 256 + (two_e() ^ mix ^ mixed(i)); }
  DEVICE u32 of_two_d(int i, u32 mix) const { return i / 2 * 256 + (two_d() ^ mix ^ mixed(i / 2) ^ i % 2 * 32); }
  DEVICE void load_pairs(Four& x, u32 from, u32 mix) const {
    UNROLL for (int i = 0; i < 4; ++i) load_u32x2(from + of_two_e(i, mix), x[i]);
  }
  DEVICE void load_apart(Four& x, u32 from, u32 mix) const {
    UNROLL for (int i = 0; i < 8; ++i) x[i / 2][i % 2] = load_u32(from + of_two_d(i, mix));
  }

  // Eight columns of what x came to, and of G, by fours; behind each, `then`
  template <class Then> DEVICE void meet_by_column(const Columns& at, u32 first, Sums& sums, const Then& then) const {
    const Pairs a = weight(kA), b = weight(kB);
    ROLL for (u32 four = 0; four < 2; ++four) {
      meet<false>(a, at, first + four, sums.of[kB]);
      meet<true>(b, at, first + four, sums.of[kA]);
      then(four);
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
    UNROLL for (int mode = 0; mode < kModes; ++mode)
      UNROLL for (int i = 0; i < 2; ++i)
        store_shared(memory + ((warp * kModes + mode) * kWeight + (t * 2 + i) * 8 + g) * 4,
                     __float_as_uint(sums.of[mode][i]));
    __syncthreads();
    const int i = threadIdx.x;
    if (i >= kModes * kWeight) return;
    float sum = 0;
    UNROLL for (int from = 0; from < kWarps; ++from)
      sum += __uint_as_float(load_u32(memory + (from * kModes * kWeight + i) * 4));
    store_global(static_cast<float*>(params.sums) + i64(blockIdx.x) * (kModes * kWeight) + i, sum);
  }
};
