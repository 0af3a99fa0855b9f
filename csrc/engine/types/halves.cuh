// Floats as two halves: the largest of a row scaled to 2^15, each is an f16 and what that leaves out, 2^11 times as large in an
// f16 of its own. So 22 bits are held of what is 2^-29 of the largest, and 11 of what is 2^-40. Three products are what FMA would
// make: two with low halves, which are 2^11 too large, and one of high ones.
#pragma once
#include "types/types.cuh"

// A power of two that brings what is at most `most` below 2^15, and the one that takes it back. Of an infinite one all that is
// finite is lost, but sums with it are infinite or no numbers.
struct Scale {
  float there, back;
  DEVICE explicit Scale(float most) {
    const u32 exponent = __float_as_uint(most) >> 23, bounded = exponent > 15 ? exponent : 15;
    there = __uint_as_float((268 - bounded) << 23), back = __uint_as_float((bounded - 14) << 23);
  }
  // Four elements of one part of a row and four of the other, side by side.
  DEVICE void split(const u32 (&x)[4], const u32 (&y)[4], u32 (&high)[4], u32 (&low)[4]) const {
    UNROLL for (int i = 0; i < 4; ++i) {
      const float a = __uint_as_float(x[i]) * there, b = __uint_as_float(y[i]) * there;
      high[i] = Pair<f16>(a, b).bits;
      low[i] = Pair<f16>((a - widen(f16{u16(high[i])})) * 2048.f, (b - widen(f16{u16(high[i] >> 16)})) * 2048.f).bits;
    }
  }
};
DEVICE float larger_of(float most, const u32 (&x)[4]) {
  UNROLL for (u32 word : x) most = fmaxf(most, fabsf(__uint_as_float(word)));
  return most;
}
// Each of neighbouring threads
template <int THREADS, int COUNT> DEVICE void most_of(float (&x)[COUNT]) {
  UNROLL for (int by = 1; by < THREADS; by *= 2) {
    float given[COUNT];  // all on their way at once
    UNROLL for (int i = 0; i < COUNT; ++i) given[i] = of_lane(x[i], by);
    UNROLL for (int i = 0; i < COUNT; ++i) x[i] = fmaxf(x[i], given[i]);
  }
}
