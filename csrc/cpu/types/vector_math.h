// exp, expm1, log, log1p, tanh, erf, sin and cos of every lane of a Vec<float> or Vec<double>, for pointwise.h and
// expression.h.
//
// Branch-free, in plain vector arithmetic, with or without fused multiply-add. Largest errors measured, of
// either type: exp, log, log1p 0.91 ulp, expm1 1.26, tanh 1.31, erf 1.43, sin, cos 2.5 (also next to their zeros).
// NaN, infinities, signed zeros, overflow and subnormal numbers come out as from <cmath>. The coefficients of
// log are those of fdlibm and musl, the others minimax in relative error, fitted with mpmath and rounded
// one by one. All are in ascending order.

template <class T> struct MathTable;

template <> struct MathTable<float> {
  typedef uint32_t bits __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int mantissa_bits = 23, bias = 127;
  static constexpr int32_t sign = INT32_MIN, one = 0x3f800000, half_sqrt2 = 0x3f3504f3;
  static constexpr float round = 0x1.8p23f; // n + round holds the integer n in its low bits
  static constexpr float ulp_of_one = 0x1p-23f;

  static constexpr float ln2_hi = 0x1.62e3p-1f, ln2_lo = 0x1.2fefa2p-17f;
  static constexpr float exp_min = -104, exp_max = 89, expm1_min = -20, tanh_max = 10, erf_max = 4;
  // (e^r - 1 - r) / r^2, |r| <= ln(2) / 2
  static constexpr float exp[] = {0.49999997f, 0.16666545f, 0.041667465f, 0.008366424f, 0.0013868314f};
  // (log((1 + s) / (1 - s)) / s - 2) / s^2 in s^2, |s| <= 0.1716
  static constexpr float log[] = {0xaaaaaa.0p-24f, 0xccce13.0p-25f, 0x91e9ee.0p-25f, 0xf89e26.0p-26f};
  // (tanh(x) / x - 1) / x^2 in x^2, x <= 0.625
  static constexpr float tanh[] = {-0.3333328f, 0.13331406f, -0.053736515f, 0.020628167f, -0.005692296f};
  // erf(x) / x - 1 in x^2, x <= 1
  static constexpr float erf[] = {0.12837917f,  -0.37612626f,   0.11283579f,  -0.026853347f,
                                  0.005187162f, -0.0007997853f, 7.806903e-05f};
  // log(1 - erf(x)) in x - 1, 1 <= x <= erf_max
  static constexpr float log_erfc[] = {-1.8496056f,  -2.6389627f,    -0.8431724f,   -0.041262202f,
                                       0.009452626f, -0.0014809513f, 9.0042566e-05f};
  // (sin(x) / x - 1) / x^2 in x^2, |x| <= pi / 2
  static constexpr float sin[] = {-0.1666666f, 0.008333069f, -0.00019809774f, 2.6060818e-06f};
  // Their sum is pi / 2; an integer up to angle_max times any part but the last is exact.
  static constexpr float half_pi[] = {0x1.92p0f, 0x1.fap-12f, 0x1.54p-20f, 0x1.1p-30f, 0x1.68c234p-39f};
  static constexpr float angle_max = 1e5f;
};

template <> struct MathTable<double> {
  typedef uint64_t bits __attribute__((vector_size(VECTOR_BYTES)));
  static constexpr int mantissa_bits = 52, bias = 1023;
  static constexpr int64_t sign = INT64_MIN, one = 0x3ff0000000000000, half_sqrt2 = 0x3fe6a09e667f3bcd;
  static constexpr double round = 0x1.8p52;
  static constexpr double ulp_of_one = 0x1p-52;

  static constexpr double ln2_hi = 0x1.62e42feep-1, ln2_lo = 0x1.a39ef35793c76p-33;
  static constexpr double exp_min = -746, exp_max = 710, expm1_min = -40, tanh_max = 20, erf_max = 6;
  static constexpr double exp[] = {0.5000000000000006,     0.16666666666666632,    0.04166666666657509,
                                   0.008333333333368807,   0.001388888893190142,   0.00019841269754809066,
                                   2.4801504923030736e-05, 2.7557380881313962e-06, 2.7626179449981763e-07,
                                   2.5061072937221655e-08};
  static constexpr double log[] = {
      6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
      1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01};
  static constexpr double tanh[] = {-0.33333333333333315,   0.1333333333332996,     -0.05396825396614945,
                                    0.02186948847069938,    -0.008863234338756135,  0.0035921142224465694,
                                    -0.0014557272098101733, 0.0005894566187319427,  -0.00023702398874282443,
                                    9.157831252260568e-05,  -3.020587864346869e-05, 6.05015549191122e-06};
  static constexpr double erf[] = {0.1283791670955126,      -0.376126389031841,      0.11283791670971101,
                                   -0.026866170648032518,   0.005223977652718093,    -0.0008548328538231721,
                                   0.00012055386328609746,  -1.4926886127811911e-05, 1.648116132686583e-06,
                                   -1.6558561081254796e-07, 1.6025514251124528e-08,  -1.6523686118508679e-09,
                                   1.4464406149393564e-10};
  static constexpr double log_erfc[] = {
      -1.8496055099332482,    -2.638967514234783,     -0.843107256359164,     -0.04156109802899246,
      0.01003382521299988,    -0.0019779013968228647, 0.0002373170747798562,  2.6294760146948204e-05,
      -2.719623586306087e-05, 9.667899414382784e-06,  -2.128690746383811e-06, 2.025731937908733e-07,
      5.914336666855327e-08,  -3.380470482319781e-08, 8.624706102276327e-09,  -1.3371202225232954e-09,
      1.2114894219389252e-10, -4.9479217041621826e-12};
  static constexpr double sin[] = {-0.16666666666666666,   0.008333333333333207,    -0.0001984126984121248,
                                   2.7557319211569482e-06, -2.5052106904422856e-08, 1.6058941002315909e-10,
                                   -7.643019373901111e-13, 2.721419632843109e-15};
  static constexpr double half_pi[] = {0x1.921fb5p0, 0x1.110b46p-26, 0x1.1a6263p-54, 0x1.8a2e03p-81,
                                       0x1.c1cd129024e09p-107};
  static constexpr double angle_max = 1e8;
};

// c[I] + c[I + Step] x + c[I + 2 Step] x^2 + ...
template <class T, int Step, int I, int N> FL_INLINE Vec<T> horner(Vec<T> x, const T (&c)[N]) {
  if constexpr (I + Step >= N)
    return splat<T>(c[I]);
  else
    return c[I] + x * horner<T, Step, I + Step>(x, c);
}
// A long polynomial's terms after the first are summed in two interleaved chains, for a shorter wait.
template <class T, int N> FL_INLINE Vec<T> polynomial(Vec<T> x, const T (&c)[N]) {
  if constexpr (N <= 8)
    return horner<T, 1, 0>(x, c);
  else
    return c[0] + x * (horner<T, 2, 1>(x * x, c) + x * horner<T, 2, 2>(x * x, c));
}

template <class T> FL_INLINE Vec<T> magnitude(Vec<T> v) { return (Vec<T>)((Mask<T>)v & ~MathTable<T>::sign); }
template <class T> FL_INLINE Vec<T> with_sign_of(Vec<T> v, Vec<T> positive) {
  return (Vec<T>)((Mask<T>)positive | ((Mask<T>)v & MathTable<T>::sign));
}
// A NaN stays a NaN.
template <class T> FL_INLINE Vec<T> at_least(Vec<T> v, T low) { return v < low ? splat<T>(low) : v; }
template <class T> FL_INLINE Vec<T> at_most(Vec<T> v, T high) { return v > high ? splat<T>(high) : v; }

// e^v = 2^(n - round) (1 + (r + tail)) with |r| <= ln(2) / 2 and |tail| <= r^2.
template <class T> struct ExpParts {
  Vec<T> n, r, tail;
};
template <class T> FL_INLINE ExpParts<T> exp_parts(Vec<T> v) {
  using C = MathTable<T>;
  const Vec<T> n = v * T(1.44269504088896340736) + C::round, k = n - C::round;
  const Vec<T> hi = v - k * C::ln2_hi, r = hi - k * C::ln2_lo;
  const Vec<T> lost = (hi - r) - k * C::ln2_lo;
  return {n, r, lost + r * (lost + r * polynomial<T>(r, C::exp))};
}
// 2^(n - round)
template <class T> FL_INLINE Vec<T> power_of_two(Vec<T> n) {
  return (Vec<T>)(((Mask<T>)n + MathTable<T>::bias) << MathTable<T>::mantissa_bits);
}

template <class T> FL_INLINE Vec<T> vexp(Vec<T> v) {
  using C = MathTable<T>;
  const Mask<T> vanishes = v < C::exp_min; // kept out of the arithmetic, where underflow can be slow
  const ExpParts<T> e = exp_parts<T>(at_most<T>(vanishes ? Vec<T>{} : v, C::exp_max));
  const Vec<T> half = (e.n - C::round) * T(0.5) + C::round; // the power alone may be out of range
  const Vec<T> y = (T(1) + (e.r + e.tail)) * power_of_two<T>(half) * power_of_two<T>(e.n - half + C::round);
  return vanishes ? Vec<T>{} : y;
}

template <class T> FL_INLINE Vec<T> vexpm1(Vec<T> v) {
  using C = MathTable<T>;
  const ExpParts<T> e = exp_parts<T>(at_most<T>(at_least<T>(v, C::expm1_min), C::exp_max));
  const Vec<T> half = power_of_two<T>(e.n - T(1)); // of the power, which may be out of range too
  const Vec<T> a = half - T(0.5), b = half * e.r, sum = a + b, lost = b - (sum - a);
  const Vec<T> y = (sum + (lost + half * e.tail)) * T(2);
  return magnitude<T>(v) < C::ulp_of_one / 4 ? v : y;
}

// log(u + c), where u is at least 2^-126 (or 2^-1022), c is at most its rounding error
template <class T> FL_INLINE Vec<T> log_of_sum(Vec<T> u, Vec<T> c) {
  using C = MathTable<T>;
  // u + c = 2^k (m + c 2^-k), sqrt(1/2) <= m < sqrt(2)
  const Mask<T> shifted = (Mask<T>)u + (C::one - C::half_sqrt2);
  const Mask<T> exponent = (Mask<T>)((typename C::bits)shifted >> C::mantissa_bits);
  const Vec<T> m = (Vec<T>)((Mask<T>)u - ((exponent - C::bias) << C::mantissa_bits));
  const Vec<T> k = (Vec<T>)((Mask<T>)splat<T>(C::round) + exponent) - (C::round + T(C::bias));
  const Vec<T> scale = (Vec<T>)((2 * C::bias + 1 - exponent) << C::mantissa_bits); // 2^(1 - k): in range
  const Vec<T> correction = c * T(0.5) * scale;
  const Vec<T> f = (m - T(1)) + correction, lost = correction - (f - (m - T(1)));
  // log(1 + f) = f - (h - s (h + z polynomial(z))), as fdlibm has it
  const Vec<T> s = f / (T(2) + f), z = s * s, h = T(0.5) * f * f;
  const Vec<T> series = s * (h + z * polynomial<T>(z, C::log));
  return k * C::ln2_hi + (f - (h - (series + (k * C::ln2_lo + lost))));
}
// A logarithm y of v, if v is inside of the range from `least` to infinity.
template <class T> FL_INLINE Vec<T> in_range_of_log(Vec<T> v, Vec<T> y, T least) {
  constexpr T infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  const Vec<T> outside = v == least ? splat<T>(-infinity) : splat<T>(nan);
  const Vec<T> inside = v < infinity ? y : v;
  return v <= least ? outside : inside;
}

template <class T> FL_INLINE Vec<T> vlog(Vec<T> v) {
  using C = MathTable<T>;
  constexpr int shift = C::mantissa_bits + 1;  // brings subnormal numbers to where log_of_sum takes them
  const Mask<T> tiny = v < std::numeric_limits<T>::min();
  const Vec<T> y = log_of_sum<T>(tiny ? v * T(int64_t(1) << shift) : v, Vec<T>{});
  return in_range_of_log<T>(v, y - (tiny ? splat<T>(T(shift * 0.69314718055994530942)) : Vec<T>{}), T(0));
}
template <class T> FL_INLINE Vec<T> vlog1p(Vec<T> v) {
  const Vec<T> u = T(1) + v, y = log_of_sum<T>(u, v - (u - T(1)));
  return magnitude<T>(v) < MathTable<T>::ulp_of_one / 4 ? v : in_range_of_log<T>(v, y, T(-1));
}

template <class T> FL_INLINE Vec<T> vtanh(Vec<T> v) {
  using C = MathTable<T>;
  const Vec<T> x = at_most<T>(magnitude<T>(v), C::tanh_max), z = x * x;
  const ExpParts<T> e = exp_parts<T>(x + x);
  const Vec<T> large = T(1) - T(2) / (T(1) + power_of_two<T>(e.n) * (T(1) + (e.r + e.tail)));
  const Vec<T> small = x + x * (z * polynomial<T>(z, C::tanh));
  return with_sign_of<T>(v, x < T(0.625) ? small : large);
}

template <class T> FL_INLINE Vec<T> verf(Vec<T> v) {
  using C = MathTable<T>;
  const Vec<T> x = at_most<T>(magnitude<T>(v), C::erf_max);
  const ExpParts<T> e = exp_parts<T>(polynomial<T>(x - T(1), C::log_erfc));
  const Vec<T> large = T(1) - power_of_two<T>(e.n) * (T(1) + (e.r + e.tail));
  const Vec<T> small = x + x * polynomial<T>(x * x, C::erf);
  return with_sign_of<T>(v, x < T(1) ? small : large);
}

template <class T> FL_INLINE bool any_lane(Mask<T> m) {
  typedef int64_t Pair __attribute__((vector_size(16)));
  Pair pairs[VECTOR_BYTES / 16], some{};
  __builtin_memcpy(pairs, &m, sizeof m);
  for (const Pair& pair : pairs) some |= pair;
  return (some[0] | some[1]) != 0;
}

// The lanes of y whose angle is too large for the reduction below, replaced by the standard library's value.
template <class T, bool Cosine> __attribute__((noinline)) Vec<T> large_angles(Vec<T> v, Vec<T> y) {
  for (int i = 0; i < kLanes<T>; ++i)
    if (std::abs(v[i]) > MathTable<T>::angle_max) y[i] = Cosine ? std::cos(v[i]) : std::sin(v[i]);
  return y;
}

// |v| = q pi / 2 + r + tail, |r| <= pi / 2, with q even for the sine and odd for the cosine: both then are
// sin(r + tail) up to sign.
template <class T, bool Cosine> FL_INLINE Vec<T> sine(Vec<T> v) {
  using C = MathTable<T>;
  const Vec<T> x = magnitude<T>(v);
  const Vec<T> n = (x * T(0.31830988618379067154) - T(Cosine ? 0.5 : 0)) + C::round;
  const Vec<T> q = (n - C::round) * T(2) + T(Cosine);
  const Vec<T> coarse = (x - q * C::half_pi[0]) - q * C::half_pi[1]; // no rounding
  const Vec<T> hi = coarse - q * C::half_pi[2], lost = (coarse - hi) - q * C::half_pi[2];
  const Vec<T> r = hi - q * C::half_pi[3];
  const Vec<T> tail = ((hi - r) - q * C::half_pi[3]) - (q * C::half_pi[4] - lost);
  const Vec<T> z = r * r, cosine = T(1) - T(0.45) * z; // roughly cos(r)
  const Vec<T> y = r + (r * (z * polynomial<T>(z, C::sin)) + tail * cosine);
  const Mask<T> turns = ((Mask<T>)n + Cosine) << (8 * int(sizeof(T)) - 1); // the sign from q
  const Mask<T> flips = Cosine ? turns : turns ^ ((Mask<T>)v & C::sign);
  const Vec<T> result = (Vec<T>)((Mask<T>)y ^ flips);
  return __builtin_expect(any_lane<T>(x > C::angle_max), 0) ? large_angles<T, Cosine>(v, result) : result;
}
template <class T> FL_INLINE Vec<T> vsin(Vec<T> v) { return sine<T, false>(v); }
template <class T> FL_INLINE Vec<T> vcos(Vec<T> v) { return sine<T, true>(v); }
