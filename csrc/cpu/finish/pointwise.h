// The named activations: one row each, written once over X, which is a vector (the value) or a dual number (the value
// and its derivative). Bias and activation are applied to finished rows while they are in cache.

template <class T> struct Dual {
  Vec<T> value, slope;
};
template <class T> FL_INLINE Dual<T> operator+(Dual<T> x, Dual<T> y) { return {x.value + y.value, x.slope + y.slope}; }
template <class T> FL_INLINE Dual<T> operator*(Dual<T> x, Dual<T> y) {
  return {x.value * y.value, x.slope * y.value + x.value * y.slope};
}
// With a constant: no slope of it is multiplied in, which would be 0 times infinity for an infinite x.
template <class T> FL_INLINE Dual<T> operator+(Vec<T> c, Dual<T> x) { return {c + x.value, x.slope}; }
template <class T> FL_INLINE Dual<T> operator*(Vec<T> c, Dual<T> x) { return {c * x.value, c * x.slope}; }

// f(x) from f and f', both given at the value
template <class T> FL_INLINE Dual<T> apply(Dual<T> x, Vec<T> f, Vec<T> slope) { return {f, slope * x.slope}; }

template <class T> FL_INLINE Vec<T> value_of(Vec<T> x) { return x; }
template <class T> FL_INLINE Vec<T> value_of(Dual<T> x) { return x.value; }
template <class T> FL_INLINE Vec<T> select(Mask<T> m, Vec<T> x, Vec<T> y) { return m ? x : y; }
template <class T> FL_INLINE Dual<T> select(Mask<T> m, Dual<T> x, Dual<T> y) {
  return {m ? x.value : y.value, m ? x.slope : y.slope};
}
template <class T> FL_INLINE Vec<T> sigmoid(Vec<T> x) { return T(1) / (T(1) + vexp<T>(-x)); }
template <class T> FL_INLINE Dual<T> sigmoid(Dual<T> x) {
  const Vec<T> s = sigmoid<T>(x.value);
  return apply<T>(x, s, s * (T(1) - s));
}
template <class T> FL_INLINE Vec<T> tanh(Vec<T> x) { return vtanh<T>(x); }
template <class T> FL_INLINE Dual<T> tanh(Dual<T> x) {
  const Vec<T> t = vtanh<T>(x.value);
  return apply<T>(x, t, T(1) - t * t);
}
template <class T> FL_INLINE Vec<T> erf(Vec<T> x) { return verf<T>(x); }
template <class T> FL_INLINE Dual<T> erf(Dual<T> x) {
  return apply<T>(x, verf<T>(x.value), vexp<T>(-x.value * x.value) * T(1.12837916709551257390));  // 2 / sqrt(pi)
}
template <class T> FL_INLINE Vec<T> sin(Vec<T> x) { return vsin<T>(x); }
template <class T> FL_INLINE Dual<T> sin(Dual<T> x) { return apply<T>(x, vsin<T>(x.value), vcos<T>(x.value)); }
template <class T> FL_INLINE Vec<T> expm1(Vec<T> x) { return vexpm1<T>(x); }
template <class T> FL_INLINE Dual<T> expm1(Dual<T> x) {
  const Vec<T> e = vexpm1<T>(x.value);
  return apply<T>(x, e, e + T(1));
}
template <class T> FL_INLINE Vec<T> softplus(Vec<T> x) { return vlog1p<T>(vexp<T>(x)); }
template <class T> FL_INLINE Dual<T> softplus(Dual<T> x) {
  return apply<T>(x, softplus<T>(x.value), sigmoid<T>(x.value));
}

// Branches are chosen so that at a kink, and for NaN, value and slope are PyTorch's.
#define FL_ACTIVATIONS(ROW)                                                                            \
  ROW(identity, x)                                                                                     \
  ROW(relu, select<T>(v <= T(0), X{}, x))                                                              \
  ROW(leaky_relu, select<T>(v > T(0), x, c(0.01) * x))                                                 \
  ROW(elu, select<T>(v <= T(0), expm1<T>(x), x))                                                       \
  ROW(gelu, c(0.5) * x * (c(1) + erf<T>(c(0.70710678118654752440) * x)))                               \
  ROW(gelu_tanh, c(0.5) * x * (c(1) + tanh<T>(c(0.79788456080286535588) * (x + c(0.044715) * x * x * x)))) \
  ROW(silu, x * sigmoid<T>(x))                                                                         \
  ROW(sigmoid, sigmoid<T>(x))                                                                          \
  ROW(tanh, tanh<T>(x))                                                                                \
  ROW(sine, sin<T>(x))                                                                                 \
  ROW(softplus, select<T>(v > T(20), x, softplus<T>(x)))                                               \
  ROW(square, x * x)                                                                                   \
  ROW(relu_squared, select<T>(v <= T(0), X{}, x * x))

#define FL_DEFINE(NAME, ...)                                             \
  struct activation_##NAME {                                             \
    template <class T, class X> static FL_INLINE X of(X x) {             \
      [[maybe_unused]] const Vec<T> v = value_of<T>(x);                  \
      [[maybe_unused]] const auto c = [](double k) { return splat<T>(T(k)); }; \
      return __VA_ARGS__;                                                \
    }                                                                    \
  };
FL_ACTIVATIONS(FL_DEFINE)
#undef FL_DEFINE

// y = f(y + bias) over one row; bias may be null
template <class T, class F> void activate(int64_t n, const T* bias, T* y) {
  constexpr int L = kLanes<T>;
  int64_t i = 0;
  for (; i + L <= n; i += L)
    store(y + i, F::template of<T>(bias ? load(y + i) + load(bias + i) : load(y + i)));
  if (const int last = int(n - i)) {
    const Vec<T> x = load_first(y + i, last);
    store_first(y + i, F::template of<T>(bias ? x + load_first(bias + i, last) : x), last);
  }
}

// grad times f'(x). Where a rectifier is constant nothing comes back, as PyTorch has it, even if grad is infinite or NaN.
template <class T, class F> FL_INLINE Vec<T> back_through(Vec<T> x, Vec<T> grad) {
  const Vec<T> made = grad * F::template of<T>(Dual<T>{x, splat<T>(1)}).slope;
  if constexpr (std::is_same_v<F, activation_relu> || std::is_same_v<F, activation_relu_squared>)
    return select<T>(x <= T(0), Vec<T>{}, made);
  return made;
}

// grad *= f'(z + bias) over one row
template <class T, class F> void activate_backward(int64_t n, const T* bias, const T* z, T* grad) {
  constexpr int L = kLanes<T>;
  int64_t i = 0;
  for (; i + L <= n; i += L) {
    const Vec<T> x = bias ? load(z + i) + load(bias + i) : load(z + i);
    store(grad + i, back_through<T, F>(x, load(grad + i)));
  }
  if (const int last = int(n - i)) {
    Vec<T> x = load_first(z + i, last);
    if (bias) x += load_first(bias + i, last);
    store_first(grad + i, back_through<T, F>(x, load_first(grad + i, last)), last);
  }
}

template <class T> struct Named {
  const char* name;
  void (*forward)(int64_t, const T*, T*);
  void (*backward)(int64_t, const T*, const T*, T*);
};

template <class T> const Named<T>* find_activation(const std::string& name) {
  static const Named<T> table[] = {
#define FL_ROW(NAME, ...) {#NAME, activate<T, activation_##NAME>, activate_backward<T, activation_##NAME>},
      FL_ACTIVATIONS(FL_ROW)
#undef FL_ROW
  };
  for (const Named<T>& row : table)
    if (name == row.name) return &row;
  return nullptr;
}
