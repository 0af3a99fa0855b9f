// Programs (../../expression.h) over rows of numbers: each step for a chunk that stays in cache, so that its choice among the
// operations costs little beside its work.

constexpr int kChunkVectors = 16;
template <class T> constexpr int kChunk = kChunkVectors * kLanes<T>;

// What has no vector form here: the standard library's, lane by lane
template <class T, class F> __attribute__((noinline)) Vec<T> each_lane(Vec<T> a, Vec<T> b, F f) {
  for (int i = 0; i < kLanes<T>; ++i) a[i] = f(a[i], b[i]);
  return a;
}

template <class T> FL_INLINE Vec<T> vsqrt(Vec<T> v) {
#if defined(ISA_AVX512)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_sqrt_ps(__mmask16(-1), (__m512)v);
  else return (Vec<T>)_mm512_maskz_sqrt_pd(__mmask8(-1), (__m512d)v);
#elif defined(ISA_AVX2)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_sqrt_ps((__m256)v);
  else return (Vec<T>)_mm256_sqrt_pd((__m256d)v);
#else
  return each_lane<T>(v, v, [](T x, T) { return std::sqrt(x); });
#endif
}
template <class T> FL_INLINE Vec<T> vfloor(Vec<T> v) {
  constexpr T round = MathTable<T>::round;
  const Vec<T> x = magnitude<T>(v), nearest = with_sign_of<T>(v, (x + round) - round);
  const Vec<T> below = with_sign_of<T>(v, magnitude<T>(nearest - (nearest > v ? splat<T>(1) : Vec<T>{})));
  return x < T(int64_t(1) << MathTable<T>::mantissa_bits) ? below : v;
}
template <class T> FL_INLINE Vec<T> vsoftplus(Vec<T> v) {
  return at_least<T>(v, T(0)) + vlog1p<T>(vexp<T>(-magnitude<T>(v)));
}
template <class T> FL_INLINE Vec<T> zero_or_one(Mask<T> m) { return m ? splat<T>(1) : Vec<T>{}; }

// One vector of the result of an operation
template <class T> struct Operation {
  using V = Vec<T>;
  static FL_INLINE V neg(V a, V, V) { return -a; }
  static FL_INLINE V abs(V a, V, V) { return magnitude<T>(a); }
  static FL_INLINE V sign(V a, V, V) { return a > T(0) ? splat<T>(1) : a < T(0) ? splat<T>(-1) : V{}; }
  static FL_INLINE V floor(V a, V, V) { return vfloor<T>(a); }
  static FL_INLINE V sqrt(V a, V, V) { return vsqrt<T>(a); }
  static FL_INLINE V exp(V a, V, V) { return vexp<T>(a); }
  static FL_INLINE V expm1(V a, V, V) { return vexpm1<T>(a); }
  static FL_INLINE V log(V a, V, V) { return vlog<T>(a); }
  static FL_INLINE V log1p(V a, V, V) { return vlog1p<T>(a); }
  static FL_INLINE V sin(V a, V, V) { return vsin<T>(a); }
  static FL_INLINE V cos(V a, V, V) { return vcos<T>(a); }
  static FL_INLINE V tanh(V a, V, V) { return vtanh<T>(a); }
  static FL_INLINE V sigmoid(V a, V, V) { return T(1) / (T(1) + vexp<T>(-a)); }
  static FL_INLINE V softplus(V a, V, V) { return vsoftplus<T>(a); }
  static FL_INLINE V erf(V a, V, V) { return verf<T>(a); }
  static FL_INLINE V atan(V a, V, V) { return each_lane<T>(a, a, [](T x, T) { return std::atan(x); }); }
  static FL_INLINE V add(V a, V b, V) { return a + b; }
  static FL_INLINE V sub(V a, V b, V) { return a - b; }
  static FL_INLINE V mul(V a, V b, V) { return a * b; }
  static FL_INLINE V div(V a, V b, V) { return a / b; }
  static FL_INLINE V pow(V a, V b, V) { return each_lane<T>(a, b, [](T x, T n) { return std::pow(x, n); }); }
  static FL_INLINE V min(V a, V b, V) { return (a < b) | (a != a) ? a : b; }
  static FL_INLINE V max(V a, V b, V) { return (a > b) | (a != a) ? a : b; }
  static FL_INLINE V lt(V a, V b, V) { return zero_or_one<T>(a < b); }
  static FL_INLINE V le(V a, V b, V) { return zero_or_one<T>(a <= b); }
  static FL_INLINE V eq(V a, V b, V) { return zero_or_one<T>(a == b); }
  static FL_INLINE V select(V a, V b, V c) { return a != T(0) ? b : c; }
};

// A row of a chunk, or a constant: one vector for all places
template <class T> struct Source {
  const T* data;
  int step;
  FL_INLINE Vec<T> at(int vector) const { return load(data + vector * step); }
};

template <class T> class Evaluator {
  const Program* program_ = nullptr;
  std::vector<T> constants_;  // a vector of each

 public:
  Evaluator() = default;
  Evaluator(const Program* program, const std::vector<T>& parameters) : program_(program) {
    if (!program) return;
    constants_.reserve((parameters.size() + program->numbers.size()) * kLanes<T>);
    for (T parameter : parameters) constants_.insert(constants_.end(), kLanes<T>, parameter);
    for (double number : program->numbers) constants_.insert(constants_.end(), kLanes<T>, T(number));
  }

  explicit operator bool() const { return program_; }

  // y = f(y)
  void forward(int64_t n, T* y) const {
    const Code& code = program_->value;
    Arena<T> arena(Purpose::expression, code.rows * kChunk<T>);
    T* rows = arena.take(code.rows * kChunk<T>);
    for_chunks(n, [&](int64_t at, int count) {
      const Given given{whole_chunk(y + at, count, rows), nullptr};
      run(code, given, count, rows);
      copy(source(code.results[0].slope, given, rows), count, y + at);
    });
  }

  // grad *= f'(z); where `sums` are given, sums[i] += grad times the derivative by parameter i before
  void backward(int64_t n, const T* z, T* grad, double* sums) const {
    const Code& code = sums ? program_->slopes : program_->slope;
    Arena<T> arena(Purpose::expression, code.rows * kChunk<T>);
    T* rows = arena.take(code.rows * kChunk<T>);
    for_chunks(n, [&](int64_t at, int count) {
      const T* behind = code.takes_gradient ? whole_chunk(grad + at, count, rows + kChunk<T>) : grad + at;
      const Given given{whole_chunk(z + at, count, rows), behind};
      run(code, given, count, rows);
      for (int i = 1; i < int(code.results.size()); ++i) {
        const auto [slope, gradient] = code.results[i];
        if (!gradient.constant)  // which is 0
          sums[i - 1] += dot(count, source(gradient, given, rows).data, source(slope, given, rows));
      }
      const auto [slope, gradient] = code.results[0];
      if (slope.constant == gradient.constant && slope.index == gradient.index)
        copy(source(slope, given, rows), count, grad + at);
      else
        multiply_by(source(slope, given, rows), count, grad + at);
    });
  }

 private:
  struct Given {
    const T *x, *gradient;
  };

  template <class F> static void for_chunks(int64_t n, F&& f) {
    for (int64_t at = 0; at < n; at += kChunk<T>) f(at, int(std::min<int64_t>(kChunk<T>, n - at)));
  }

  // Where whole vectors of the chunk can be read: in place, or in a row of its own, with zeros behind it.
  static const T* whole_chunk(const T* from, int count, T* row) {
    if (count == kChunk<T>) return from;
    std::copy(from, from + count, row);
    std::fill(row + count, row + kChunk<T>, T(0));
    return row;
  }

  Source<T> source(Place place, Given given, const T* rows) const {
    if (place.constant) return {constants_.data() + place.index * kLanes<T>, 0};
    if (place.index >= Code::kGiven) return {rows + place.index * kChunk<T>, kLanes<T>};
    return {place.index ? given.gradient : given.x, kLanes<T>};
  }

  void run(const Code& code, Given given, int count, T* rows) const {
    const int vectors = (count + kLanes<T> - 1) / kLanes<T>;
    for (const Code::Step& step : code.steps) {
      const Source<T> a = source(step.from[0], given, rows), b = source(step.from[1], given, rows);
      const Source<T> c = source(step.from[2], given, rows);
      T* to = rows + step.to * kChunk<T>;
      switch (step.op) {
#define FL_CASE(NAME, COUNT) \
  case Op::NAME: apply<COUNT>(vectors, a, b, c, to, Operation<T>::NAME); break;
        FL_OPERATIONS(FL_CASE)
#undef FL_CASE
      }
    }
  }

  template <int COUNT, class F>
  static FL_INLINE void apply(int vectors, Source<T> a, Source<T> b, Source<T> c, T* to, F f) {
    for (int i = 0; i < vectors; ++i)
      store(to + i * kLanes<T>, f(a.at(i), COUNT > 1 ? b.at(i) : Vec<T>{}, COUNT > 2 ? c.at(i) : Vec<T>{}));
  }

  static void copy(Source<T> from, int count, T* to) {
    constexpr int L = kLanes<T>;
    int i = 0;
    for (; i + L <= count; i += L) store(to + i, from.at(i / L));
    if (i < count) store_first(to + i, from.at(i / L), count - i);
  }
  static void multiply_by(Source<T> from, int count, T* to) {
    constexpr int L = kLanes<T>;
    int i = 0;
    for (; i + L <= count; i += L) store(to + i, load(to + i) * from.at(i / L));
    if (i < count) store_first(to + i, load_first(to + i, count - i) * from.at(i / L), count - i);
  }
  // In several sums, so that no addition waits for the last one.
  static double dot(int count, const T* grad, Source<T> slope) {
    double sums[8] = {};
    for (int i = 0; i < count; ++i)
      sums[i % 8] += double(grad[i]) * double(slope.data[i / kLanes<T> * slope.step + i % kLanes<T>]);
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }
};
