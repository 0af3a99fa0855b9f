// Activations: one row for each that has a name, with PyTorch's value at kinks and for NaN. Sums are activated before
// they are rounded. A kernel makes them of what it is given: those with learnable parameters read these.
#pragma once
#include "types/params.cuh"

#define FUNCTION(NAME)                                  \
  DEVICE float NAME##_(float x) { return NAME##f(x); }  \
  DEVICE double NAME##_(double x) { return NAME(x); }
FUNCTION(exp)
FUNCTION(expm1)
FUNCTION(log)
FUNCTION(log1p)
FUNCTION(tanh)
FUNCTION(erf)
FUNCTION(sin)
FUNCTION(cos)
FUNCTION(atan)
FUNCTION(sqrt)
FUNCTION(floor)
#undef FUNCTION
DEVICE float abs_(float x) { return fabsf(x); }
DEVICE double abs_(double x) { return fabs(x); }
DEVICE float pow_(float x, float n) { return powf(x, n); }
DEVICE double pow_(double x, double n) { return pow(x, n); }

// What is left of the operations of activations/expression.py, whose expressions are written out like a row.
template <class T> DEVICE T sign_(T x) { return T(x > T(0)) - T(x < T(0)); }
template <class T> DEVICE T sigmoid_(T x) { return T(1) / (T(1) + exp_(-x)); }
template <class T> DEVICE T softplus_(T x) { return (x < T(0) ? T(0) : x) + log1p_(exp_(-abs_(x))); }
template <class T> DEVICE T min_(T x, T y) { return x < y || x != x ? x : y; }
template <class T> DEVICE T max_(T x, T y) { return x > y || x != x ? x : y; }
DEVICE float max_(float x, float y) { return larger(x, y); }  // one instruction, which compilers do not always find

#define ACTIVATION(NAME, ...)                              \
  struct NAME {                                            \
    DEVICE NAME(const Params&) {}                          \
    template <class T> static DEVICE T of(T x) { return __VA_ARGS__; } \
  };
ACTIVATION(identity, x)
ACTIVATION(relu, max_(x, T(0)))
ACTIVATION(leaky_relu, x > T(0) ? x : T(0.01) * x)
ACTIVATION(elu, x > T(0) ? x : expm1_(x))
ACTIVATION(gelu, T(0.5) * x * (T(1) + erf_(T(0.70710678118654752440) * x)))
ACTIVATION(gelu_tanh, T(0.5) * x * (T(1) + tanh_(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x))))
ACTIVATION(silu, x / (T(1) + exp_(-x)))
ACTIVATION(sigmoid, T(1) / (T(1) + exp_(-x)))
ACTIVATION(tanh, tanh_(x))
ACTIVATION(sine, sin_(x))
ACTIVATION(softplus, x > T(20) ? x : log1p_(exp_(x)))
ACTIVATION(square, x * x)
ACTIVATION(relu_squared, x <= T(0) ? T(0) : x * x)
#undef ACTIVATION

// The same of results that are rounded to 11 bits or fewer, where that takes fewer instructions, off by 2^-14 of it at most:
// the 30 of expm1 or erf for each element would take longer than a wide layer's products.
template <class Activation> struct Rounded : Activation {};
template <> struct Rounded<elu> {
  static DEVICE float of(float x) {
    const float near = 0.5f * x * x + x, below = fast_exp2(1.44269504f * x) - 1.f;
    return x > 0.f ? x : x > -0.015625f ? near : below;
  }
};
// Half of erfc(|x| / sqrt(2)) is exp(-x^2 / 2) times a polynomial of t, fitted up to |x| = 14, where the product has left fp16.
template <> struct Rounded<gelu> {
  static DEVICE float of(float x) {
    const float t = fast_reciprocal(0.3765f * fabsf(x) + 1.f);
    const float sum = (((-0.0909654f * t + 0.1979814f) * t + 0.0852781f) * t + 0.1580061f) * t + 0.1496857f;
    const float beyond = sum * t * fast_exp2(-0.72134752f * x * x);
    return x * (x > 0.f ? 1.f - beyond : beyond);
  }
};
