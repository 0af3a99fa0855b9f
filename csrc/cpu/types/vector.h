// Short vectors of float or double, one width per instruction set.
//
// Included by each isa_*.cpp inside its own namespace, after ISA_AVX512, ISA_AVX2 or neither (128-bit
// vectors, any processor) is defined. Arithmetic, comparison and `mask ? a : b` are the compiler's own
// vector extension; only partial loads and stores and the half conversion need intrinsics.

#if defined(ISA_AVX512)
#define VECTOR_BYTES 64
#elif defined(ISA_AVX2)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define FL_INLINE inline __attribute__((always_inline))

template <class T> struct VectorOf;
template <> struct VectorOf<float> {
  typedef float type __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t mask __attribute__((vector_size(VECTOR_BYTES)));
};
template <> struct VectorOf<double> {
  typedef double type __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t mask __attribute__((vector_size(VECTOR_BYTES)));
};
template <class T> using Vec = typename VectorOf<T>::type;
template <class T> using Mask = typename VectorOf<T>::mask; // a lane is -1 or 0; also integer lanes
template <class T> constexpr int kLanes = VECTOR_BYTES / int(sizeof(T));

template <class T> FL_INLINE Vec<T> splat(T value) { return value - Vec<T>{}; }

template <class T> FL_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class T> FL_INLINE void store(T* p, Vec<T> v) { __builtin_memcpy(p, &v, sizeof v); }

// The first `count` lanes, 0 <= count <= lanes; the others read as zero and are not touched in memory.
#if defined(ISA_AVX512)
FL_INLINE Vec<float> load_first(const float* p, int count) {
  return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}
FL_INLINE Vec<double> load_first(const double* p, int count) {
  return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), p);
}
FL_INLINE void store_first(float* p, Vec<float> v, int count) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)v);
}
FL_INLINE void store_first(double* p, Vec<double> v, int count) {
  _mm512_mask_storeu_pd(p, __mmask8((1u << count) - 1), (__m512d)v);
}
#elif defined(ISA_AVX2)
FL_INLINE __m256i first_lanes(const float*, int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FL_INLINE __m256i first_lanes(const double*, int count) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
}
FL_INLINE Vec<float> load_first(const float* p, int count) {
  return (Vec<float>)_mm256_maskload_ps(p, first_lanes(p, count));
}
FL_INLINE Vec<double> load_first(const double* p, int count) {
  return (Vec<double>)_mm256_maskload_pd(p, first_lanes(p, count));
}
// In pieces: a masked store takes 8 to 20 cycles on AMD's processors, these 4 to 8.
FL_INLINE void store_first(float* p, Vec<float> v, int count) {
  if (count >= 8) return store(p, v);
  __m128 part = _mm256_castps256_ps128((__m256)v);
  if (count & 4) {
    _mm_storeu_ps(p, part);
    p += 4, part = _mm256_extractf128_ps((__m256)v, 1);
  }
  if (count & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(p), part);
    p += 2, part = _mm_movehl_ps(part, part);
  }
  if (count & 1) _mm_store_ss(p, part);
}
FL_INLINE void store_first(double* p, Vec<double> v, int count) {
  if (count >= 4) return store(p, v);
  __m128d part = _mm256_castpd256_pd128((__m256d)v);
  if (count & 2) {
    _mm_storeu_pd(p, part);
    p += 2, part = _mm256_extractf128_pd((__m256d)v, 1);
  }
  if (count & 1) _mm_store_sd(p, part);
}
#else
template <class T> FL_INLINE Vec<T> load_first(const T* p, int count) {
  Vec<T> v{};
  for (int i = 0; i < count; ++i) v[i] = p[i];
  return v;
}
template <class T> FL_INLINE void store_first(T* p, Vec<T> v, int count) {
  for (int i = 0; i < count; ++i) p[i] = v[i];
}
#endif
