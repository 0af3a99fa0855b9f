// The functions that activations are made of, which activations/written.py writes out as structs of a kernel: a sum is
// activated before it is rounded. Docs, errors and instructions of each: docs/kernels/activations.md.
//
// Accurate: of double, and of float within 3 units in the last place. Short: of float, for results that are rounded to BITS, off
// by at most 2^-14 of it (11 of fp16 and tf32), or 2^-11 (8 of bf16). None of them branches, but Accurate sines and cosines, whose
// code for angles beyond 2^17 is apart, and powers. NaN and infinities are PyTorch's; what Short makes below 2^-126 is zero.
#pragma once
#include "types/params.cuh"

struct identity {
  DEVICE identity(const Params&) {}
  template <class T> static DEVICE T of(T x) { return x; }
};

DEVICE float signed_as(float size, float x) {
  return __uint_as_float(__float_as_uint(size) | (__float_as_uint(x) & 0x80000000u));
}

// c0 + c1 x + c2 x^2 + ...
DEVICE float polynomial(float, float c0) { return c0; }
template <class... More> DEVICE float polynomial(float x, float c0, More... more) { return fmaf(polynomial(x, more...), x, c0); }
DEVICE double polynomial(double, double c0) { return c0; }
template <class... More> DEVICE double polynomial(double x, double c0, More... more) { return fma(polynomial(x, more...), x, c0); }

constexpr float kRound = 12582912.f;  // x + 1.5 * 2^23 has the integer nearest to x in its low bits
constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;

// An angle between -pi / 2 and pi / 2 with the sine, or cosine, of x: x in turns is a product of its bits and those of
// 1 / (2 pi), of which whole turns are left out before anything is rounded.
__constant__ const u32 kTurns[] = {0, 0x28be60db, 0x9391054a, 0x7f09d5f4, 0x7d4d3770, 0x36d8a566, 0x4f10e410, 0x7f9458ea};
template <bool COSINE> __device__ __noinline__ float angle_of_large(float x) {
  const u32 bits = __float_as_uint(x), exponent = bits >> 23 & 255;
  if (exponent == 255) return x - x;
  const u32 mantissa = (bits & 0x7fffff) | 0x800000, at = exponent - 118, shift = at % 32;
  u32 word[3];
  UNROLL for (int i = 0; i < 3; ++i)
    word[i] = u32(((u64(kTurns[at / 32 + i]) << 32 | kTurns[at / 32 + i + 1]) << shift) >> 32);
  u64 turns = u64(mantissa) * word[1] + (u64(mantissa) * word[2] >> 32) + (u64(mantissa * word[0]) << 32);  // times 2^64
  if (bits >> 31) turns = 0 - turns;
  if (COSINE) turns += u64(1) << 62;
  const bool behind = (turns >> 63 ^ turns >> 62) & 1;  // of which the sine is that of half a turn less it
  return float(i64(behind ? (u64(1) << 63) - turns : turns)) * 3.4061217e-19f;
}
// The same of any x up to 2^17, with pi in PARTS: each step but the last two is exact.
template <int PARTS, bool COSINE> DEVICE float angle_of(float x) {
  const float turned = COSINE ? fmaf(x, 0.31830989f, -0.5f) + kRound : fmaf(x, 0.31830989f, kRound);
  const float halves = COSINE ? turned - kRound + 0.5f : turned - kRound;
  float angle = fmaf(halves, 8.74227766e-8f, fmaf(halves, -3.14159274f, x));
  if (PARTS == 3) angle = fmaf(halves, 3.43024902e-15f, angle);
  return __uint_as_float(__float_as_uint(angle) ^ (__float_as_uint(turned) << 31) ^ (COSINE ? 0x80000000u : 0u));
}

// gelu_tanh is x sigmoid(kGelu (x + kCubed x^3)).
constexpr double kGelu = 1.5957691216057308, kCubed = 0.044715;

// In double, without branches: those of CUDA's keep the compiler from mixing elements, each of which waits for itself then.
struct Doubles {
  static constexpr double kRound = 6755399441055744., kLog2e = 1.4426950408889634;  // x + 1.5 * 2^52, as above
  static constexpr double kLn2 = 0.6931471805599453, kLn2Behind = 2.3190468138462996e-17;
  static constexpr double kPi = 3.141592653589793, kPiBehind = 1.2246467991473532e-16, kPiFurther = -2.9947698097183397e-33;

  static DEVICE double reciprocal(double x) {  // of normal numbers
    const double y = fast_reciprocal(x), e = fma(-x, y, 1.);
    return fma(y, fma(e, e, e), y);
  }
  static DEVICE double power_of_two(int n) { return double_of(0, u32(1023 + n) << 20); }
  // e^x is 2^n (1 + rest), of x that are not far out of range
  struct Parts {
    double rest;
    int n;
    DEVICE Parts(double x) {
      const double turned = fma(x, kLog2e, kRound), whole = turned - kRound;
      const double r = fma(whole, -kLn2Behind, fma(whole, -kLn2, x));
      const double p = polynomial(r, 0.5, 0.16666666666666669, 0.041666666666666664, 0.008333333333330062, 0.0013888888888886552,
                                  0.00019841269863053618, 2.4801587317144498e-05, 2.7557268459997064e-06, 2.755728296954995e-07,
                                  2.510038549551032e-08, 2.0911236630261545e-09);
      rest = fma(r * r, p, r), n = int(low_of(turned));
    }
    // By halves of n, as 2^n alone may be out of range
    DEVICE double power() const {
      const double some = power_of_two(n >> 1);
      return fma(some, rest, some) * power_of_two(n - (n >> 1));
    }
    DEVICE double less_one() const {
      const double half = power_of_two(n - 1), y = fma(half, rest, half - 0.5);
      return n == 0 ? rest : y + y;
    }
  };
  static DEVICE double clamped(double x, double least, double most) { return x > most ? most : x < least ? least : x; }  // or NaN
  static DEVICE double exp(double x) { return Parts(clamped(x, -746, 710)).power(); }
  static DEVICE double exp_of_minus(double x) { return Parts(x > 746. ? -746. : -x).power(); }  // of no negative x
  static DEVICE double expm1(double x) { return Parts(clamped(x, -40, 710)).less_one(); }
  // log(1 + m), m from sqrt(1/2) - 1 to sqrt(2) - 1
  static DEVICE double log_near_one(double m) {
    const double s = m * reciprocal(2. + m), z = s * s;
    const double p = polynomial(z, 0.6666666666666666, 0.4000000000000089, 0.2857142857079543, 0.2222222239356661,
                                0.18181795442371984, 0.1538625044794019, 0.13268485680654427, 0.13089629160674623);
    return fma(s * z, p, s + s);
  }
  static DEVICE int exponent_of(u32 high) { return int(high - 0x3fe6a09e) >> 20; }  // from sqrt(1/2) on
  static DEVICE double logarithm(double n, double m) { return fma(n, kLn2, fma(n, kLn2Behind, log_near_one(m))); }
  static DEVICE double whole(int n) { return double_of(u32(n) ^ 0x80000000u, 0x43300000) - 4503601774854144.; }
  // What is added to the sum above where x = `of`, or `of` + 1, has no logarithm, or none that is finite. To choose one of both
  // instead, the compiler branches.
  static DEVICE double no_logarithm(double x, double of) {
    const double infinity = double_of(0, 0x7ff00000), odd = x == 0. ? -infinity : x < 0. ? double_of(0, 0x7ff80000) : of;
    return (x > 0.) & (of < infinity) ? 0. : odd;
  }
  static DEVICE double log(double x) {
    const bool small = x < 2.2250738585072014e-308;  // which are no normal numbers
    const double larger = small ? x * 18014398509481984. : x;
    const int n = exponent_of(high_of(larger));
    const double y = logarithm(whole(small ? n - 54 : n), double_of(low_of(larger), high_of(larger) - (u32(n) << 20)) - 1.);
    return y + no_logarithm(x, x);
  }
  // 1 + x is 2^n (1 + m), exactly where there are digits behind x's
  static DEVICE double log1p(double x) {
    const double u = 1. + x;
    const int n = exponent_of(high_of(u));
    const double scale = power_of_two(n > 60 ? 0 : -n), far = double_of(low_of(u), high_of(u) - (u32(n) << 20)) - 1.;
    const double y = logarithm(whole(n), n > 60 ? far : fma(x, scale, scale - 1.));
    return y + no_logarithm(u, x);
  }
  static DEVICE double sigmoid(double x) {
    const double e = exp_of_minus(fabs(x)), y = reciprocal(1. + e);
    return x < 0. ? e * y : y;
  }
  static DEVICE double softplus(double x) {
    const double e = exp_of_minus(fabs(x));
    const bool large = e > 0.41421356;  // 1 + e is 2 (1 + m) then
    const double y = log_near_one(large ? fma(e, 0.5, -0.5) : e);
    return (x < 0. ? 0. : x) + (large ? y + kLn2 : y);
  }
  static DEVICE double tanh(double x) {
    const double size = fabs(x), t = Parts(size > 20. ? 40. : size + size).less_one(), d = t + 2., r = reciprocal(d), y = t * r;
    return copysign(fma(r, fma(-y, d, t), y), x);  // 1 at most
  }
  static DEVICE double tanh_of_softplus(double x) {
    const double e = Parts(clamped(x, -746, 40)).power(), n = e * (e + 2.), r = reciprocal(n + 2.);
    return n > 16. ? fma(-2., r, 1.) : n * r;
  }
  // Of angles that are so large that pi in three parts is not exact enough
  template <bool COSINE> static __device__ __noinline__ double sine_of_large(double x) { return COSINE ? ::cos(x) : ::sin(x); }
  template <bool COSINE> static DEVICE double sine(double x) {
    const double turned = COSINE ? fma(x, 0.3183098861837907, -0.5) + kRound : fma(x, 0.3183098861837907, kRound);
    const double halves = COSINE ? turned - kRound + 0.5 : turned - kRound;
    const double angle = fma(halves, -kPiFurther, fma(halves, -kPiBehind, fma(halves, -kPi, x)));
    const double r = double_of(low_of(angle), high_of(angle) ^ low_of(turned) << 31 ^ (COSINE ? 0x80000000u : 0u)), z = r * r;
    const double p = polynomial(z, -0.16666666666666666, 0.008333333333333316, -0.00019841269841254966, 2.7557319219160833e-06,
                                -2.505210761669045e-08, 1.6058977292642743e-10, -7.643969663988074e-13, 2.7314368769379893e-15);
    double y = fma(r * z, p, r);
    if (fabs(x) > 1073741824.) y = sine_of_large<COSINE>(x);
    return y;
  }
};

struct Accurate {
  static DEVICE double exp(double x) { return Doubles::exp(x); }
  static DEVICE double expm1(double x) { return Doubles::expm1(x); }
  static DEVICE double log(double x) { return Doubles::log(x); }
  static DEVICE double log1p(double x) { return Doubles::log1p(x); }
  static DEVICE double sin(double x) { return Doubles::sine<false>(x); }
  static DEVICE double cos(double x) { return Doubles::sine<true>(x); }
  static DEVICE double tanh(double x) { return Doubles::tanh(x); }
  static DEVICE double erf(double x) { return ::erf(x); }
  static DEVICE double atan(double x) { return ::atan(x); }
  static DEVICE double sqrt(double x) { return ::sqrt(x); }
  static DEVICE double pow(double x, double n) { return ::pow(x, n); }
  static DEVICE double sigmoid(double x) { return Doubles::sigmoid(x); }
  static DEVICE double softplus(double x) { return Doubles::softplus(x); }
  static DEVICE double quotient(double x, double y) { return x / y; }
  static DEVICE double tanh_of_softplus(double x) { return Doubles::tanh_of_softplus(x); }

  static DEVICE float exp(float x) { return expf(x); }
  static DEVICE float log(float x) { return logf(x); }
  static DEVICE float tanh(float x) { return tanhf(x); }
  static DEVICE float erf(float x) { return erff(x); }
  static DEVICE float atan(float x) { return atanf(x); }
  static DEVICE float sqrt(float x) { return fast_root(x); }
  static DEVICE float pow(float x, float n) { return powf(x, n); }
  static DEVICE float quotient(float x, float y) { return fast_quotient(x, y); }
  // 2^n e^r - 1 by halves: 2^n alone may be out of range.
  static DEVICE float expm1(float x) {
    const float most = smaller(larger(x, -25.f), 89.f), n = fmaf(most, kLog2e, kRound), whole = n - kRound;
    const float r = fmaf(whole, 1.90465421e-9f, fmaf(whole, -kLn2, most));
    const float near = fmaf(r * r, polynomial(r, 0.49999997f, 0.16666545f, 0.041667465f, 0.008366424f, 0.0013868314f), r);
    const float half = __uint_as_float((__float_as_uint(n) << 23) + (126u << 23)), y = fmaf(half, near, half - 0.5f);
    return y + y;
  }
  // log(2^n (1 + m)), m from -1/4 to 1/2. What has no logarithm, or none that is finite, is left to the unit.
  static DEVICE float log1p(float x) {
    const float u = x + 1.f;
    const u32 n = (__float_as_uint(u) - 0x3f400000u) & 0xff800000u;
    const float m = __uint_as_float(__float_as_uint(x) - n) + fmaf(__uint_as_float(0x40800000u - n), 0.25f, -1.f);
    const float p = polynomial(m, -0.5f, 0.33333453f, -0.25000054f, 0.19990607f, -0.16647767f, 0.14482062f, -0.13162233f,
                               0.10448337f, -0.04490964f);
    const float y = fmaf(float(int(n)) * 0x1p-23f, kLn2, fmaf(m * m, p, m));
    return __float_as_uint(u) - 1u < 0x7f7fffffu ? y : fast_log2(u);
  }
  template <bool COSINE> static DEVICE float sine(float x) {
    float r = angle_of<3, COSINE>(x);
    if (fabsf(x) > 131072.f) r = angle_of_large<COSINE>(x);
    const float z = r * r;
    return fmaf(r * z, polynomial(z, -0.1666666f, 0.008333069f, -0.00019809774f, 2.6060818e-6f), r);
  }
  static DEVICE float sin(float x) { return sine<false>(x); }
  static DEVICE float cos(float x) { return sine<true>(x); }
  static DEVICE float sigmoid(float x) {
    const float e = expf(-fabsf(x)), d = 1.f + e, near = fast_reciprocal(d), above = fmaf(fmaf(-d, near, 1.f), near, near);
    return x < 0.f ? e * above : above;
  }
  static DEVICE float softplus(float x) {
    const float e = expf(-fabsf(x));
    const float p = polynomial(e, -0.49999931f, 0.33330512f, -0.24958587f, 0.196954f, -0.15355395f, 0.10680554f, -0.057664428f,
                               0.020204574f, -0.003318470f);
    return larger(x, 0.f) + fmaf(e * e, p, e);
  }

  template <class T> static DEVICE T one_plus_erf(T x) { return T(1) + erf(x); }
  template <class T> static DEVICE T one_plus_tanh(T x) { return T(2) * sigmoid(T(2) * x); }
  template <class T> static DEVICE T gelu_tanh(T x) { return x * sigmoid(T(kGelu) * x * (T(1) + T(kCubed) * x * x)); }
  template <class T> static DEVICE T gelu_tanh_slope(T x) {
    const T s = sigmoid(T(kGelu) * x * (T(1) + T(kCubed) * x * x)), y = x * s, g = y - y * s;  // 0 before x^2 is infinite
    return s + (T(kGelu) * g + T(3 * kGelu * kCubed) * (g * x) * x);
  }
  // n / (n + 2), n = e^x (e^x + 2). Near 1 what is left to it has to vanish with x: it may be multiplied by a large x.
  static DEVICE float tanh_of_softplus(float x) {
    const float e = exp(x), n = e * (e + 2.f), r = quotient(1.f, n + 2.f);
    return n > 16.f ? 1.f - 2.f * r : n * r;
  }
};

template <int BITS> struct Short {
  static DEVICE float exp(float x) { return fast_exp2(kLog2e * x); }
  static DEVICE float expm1(float x) {
    const float near = fmaf(0.5f * x, x, x), far = exp(x) - 1.f;
    return fabsf(x) < 0.015625f ? near : far;
  }
  static DEVICE float log(float x) { return near_one(x - 1.f, x); }
  static DEVICE float log1p(float x) { return near_one(x, 1.f + x); }
  static DEVICE float near_one(float x, float u) {  // of u = 1 + x
    const float near = fmaf(x * x, polynomial(x, -0.5f, 0.33333333f), x), far = kLn2 * fast_log2(u);
    return fabsf(x) < 0.03125f ? near : far;
  }
  // Beyond 2^17, which a 16-bit neighbour of x is turns away from, it is less and less exact; some number from -1 to 1.
  template <bool COSINE> static DEVICE float sine(float x) {
    const float r = smaller(larger(angle_of<2, COSINE>(x), -1.5708f), 1.5708f), z = r * r;
    if constexpr (BITS <= 8) return fmaf(r * z, polynomial(z, -0.16612904f, 0.007656455f), r);
    return fmaf(r * z, polynomial(z, -0.16665854f, 0.0083142696f, -0.0001854205f), r);
  }
  static DEVICE float sin(float x) { return sine<false>(x); }
  static DEVICE float cos(float x) { return sine<true>(x); }
  // The unit's is off by 2^-11. For more bits it is a fraction, and 1 where that is as near: then the slope is 0, whatever it
  // is multiplied by.
  static DEVICE float tanh(float x) {
    if constexpr (BITS <= 8) return fast_tanh(x);
    const float most = smaller(larger(x, -5.f), 5.f), z = most * most;
    const float p = polynomial(z, 0.9999482f, 0.10241834f, 0.00067057984f), q = polynomial(z, 1.f, 0.43543336f, 0.012820055f);
    return fabsf(x) > 5.2f ? signed_as(1.f, x) : most * p * fast_reciprocal(q);
  }
  static DEVICE float sigmoid(float x) { return fast_reciprocal(1.f + fast_exp2(-kLog2e * x)); }
  static DEVICE float gelu_gate(float x) {
    constexpr float kFirst = float(-kLog2e * kGelu), kThird = float(-kLog2e * kGelu * kCubed);
    return fast_reciprocal(1.f + fast_exp2(x * fmaf(kThird, x * x, kFirst)));
  }
  static DEVICE float gelu_tanh(float x) { return x * gelu_gate(x); }
  static DEVICE float gelu_tanh_slope(float x) {
    const float s = gelu_gate(x), y = x * s, g = fmaf(-y, s, y);
    return fmaf(float(3 * kGelu * kCubed) * (g * x), x, fmaf(float(kGelu), g, s));
  }
  static DEVICE float softplus(float x) {
    const float e = fast_exp2(-kLog2e * fabsf(x));
    const float p = polynomial(e, 0.99999159f, -0.49936137f, 0.3252067f, -0.21004872f, 0.1012223f, -0.023869153f);
    return fmaf(e, p, larger(x, 0.f));
  }
  // 1 - erf(|x|) is exp(-x^2) times a polynomial of t, fitted up to |x| = 10.
  static DEVICE float erfc_of_absolute(float x) {
    const float t = fast_reciprocal(fmaf(0.53245134f, fabsf(x), 1.f));
    return polynomial(t, 0.2993714f, 0.3160122f, 0.1705562f, 0.3959628f, -0.1819308f) * t * exp(-(x * x));
  }
  static DEVICE float one_plus_erf(float x) {
    return fabsf((x > 0.f ? 2.f : 0.f) - erfc_of_absolute(x));
  }
  static DEVICE float erf(float x) {
    const float near = x * polynomial(x * x, 1.1283668f, -0.3752392f, 0.10326761f);
    return fabsf(x) < 0.5f ? near : signed_as(1.f - erfc_of_absolute(x), x);
  }
  static DEVICE float atan(float x) {
    const float a = fabsf(x), t = a > 1.f ? fast_reciprocal(a) : a;
    const float y = t * polynomial(t * t, 0.99997008f, -0.33170107f, 0.18521644f, -0.091927595f, 0.023863854f);
    return signed_as(a > 1.f ? 1.57079633f - y : y, x);
  }
  static DEVICE float sqrt(float x) { return fast_root(x); }
  static DEVICE float quotient(float x, float y) { return fast_quotient(x, y); }
  // n is a constant. As C has it, for negative x where n is whole, and for infinities.
  static DEVICE float pow(float x, float n) {
    const float y = fast_exp2(n * fast_log2(fabsf(x))), half = 0.5f * n;
    if (floorf(n) != n) return x < 0.f && x * 0.f == 0.f ? __uint_as_float(0x7fc00000u) : y;
    return floorf(half) == half ? y : signed_as(y, x);
  }
  static DEVICE float one_plus_tanh(float x) { return 2.f * fast_reciprocal(1.f + fast_exp2(-2 * kLog2e * x)); }
  static DEVICE float tanh_of_softplus(float x) {  // as Accurate's
    const float e = exp(x), n = e * (e + 2.f), r = fast_reciprocal(n + 2.f);
    return n > 16.f ? fmaf(-2.f, r, 1.f) : n * r;
  }
};

// What takes no special functions, of either kind
DEVICE float abs_(float x) { return fabsf(x); }
DEVICE double abs_(double x) { return fabs(x); }
DEVICE float floor_(float x) { return floorf(x); }
DEVICE double floor_(double x) { return floor(x); }
template <class T> DEVICE T sign_(T x) { return T(x > T(0)) - T(x < T(0)); }
template <class T> DEVICE T min_(T x, T y) { return x < y || x != x ? x : y; }
template <class T> DEVICE T max_(T x, T y) { return x > y || x != x ? x : y; }
DEVICE float max_(float x, float y) { return larger(x, y); }  // one instruction, which compilers do not always find
