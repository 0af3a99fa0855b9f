// Activations: one row each, with PyTorch's value at kinks and for NaN. Sums are activated before they are rounded.
#pragma once
#include "types.cuh"

DEVICE float exp_(float x) { return expf(x); }
DEVICE double exp_(double x) { return exp(x); }
DEVICE float expm1_(float x) { return expm1f(x); }
DEVICE double expm1_(double x) { return expm1(x); }
DEVICE float log1p_(float x) { return log1pf(x); }
DEVICE double log1p_(double x) { return log1p(x); }
DEVICE float tanh_(float x) { return tanhf(x); }
DEVICE double tanh_(double x) { return tanh(x); }
DEVICE float erf_(float x) { return erff(x); }
DEVICE double erf_(double x) { return erf(x); }
DEVICE float sin_(float x) { return sinf(x); }
DEVICE double sin_(double x) { return sin(x); }

#define ACTIVATION(NAME, ...)                              \
  struct NAME {                                            \
    template <class T> static DEVICE T of(T x) { return __VA_ARGS__; } \
  };
ACTIVATION(identity, x)
ACTIVATION(relu, x <= T(0) ? T(0) : x)
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
