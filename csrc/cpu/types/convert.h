// Between what tensors hold (float64, float32, bfloat16, float16) and what the kernels compute in (double
// for float64, float for the rest). Rounds to nearest, ties to even; NaN stays NaN.

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

template <class To, class From> FL_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <class T> inline void read(int64_t n, const T* from, T* to) { std::memcpy(to, from, n * sizeof(T)); }
template <class T> inline void write(int64_t n, const T* from, T* to) { std::memcpy(to, from, n * sizeof(T)); }

inline void read(int64_t n, const BFloat16* from, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = bit_cast<float>(uint32_t(from[i].bits) << 16);
}
inline void write(int64_t n, const float* from, BFloat16* to) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i].bits = uint16_t(from[i] != from[i] ? 0x7fc0 : rounded);
  }
}

#if defined(ISA_AVX512) || defined(ISA_AVX2)
inline void read(int64_t n, const Float16* from, float* to) {
  for (int64_t i = 0; i < n; i += 8) {
    const int count = int(n - i < 8 ? n - i : 8);
    __m128i half = _mm_setzero_si128();
    if (count == 8) half = _mm_loadu_si128((const __m128i*)(from + i));
    else std::memcpy(&half, from + i, count * 2);
    const __m256 wide = _mm256_cvtph_ps(half);
    if (count == 8) _mm256_storeu_ps(to + i, wide);
    else std::memcpy(to + i, &wide, count * 4);
  }
}
inline void write(int64_t n, const float* from, Float16* to) {
  for (int64_t i = 0; i < n; i += 8) {
    const int count = int(n - i < 8 ? n - i : 8);
    __m256 wide = _mm256_setzero_ps();
    if (count == 8) wide = _mm256_loadu_ps(from + i);
    else std::memcpy(&wide, from + i, count * 4);
    const __m128i half = _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    if (count == 8) _mm_storeu_si128((__m128i*)(to + i), half);
    else std::memcpy(to + i, &half, count * 2);
  }
}
#else
inline void read(int64_t n, const Float16* from, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t sign = uint32_t(from[i].bits & 0x8000) << 16, rest = from[i].bits & 0x7fff;
    // Moving exponent and fraction into place leaves the exponent 112 too small, also for subnormals.
    const float finite = bit_cast<float>(rest << 13) * 0x1p112f;
    const uint32_t special = 0x7f800000 | (rest << 13);
    to[i] = bit_cast<float>(sign | (rest >= 0x7c00 ? special : bit_cast<uint32_t>(finite)));
  }
}
inline void write(int64_t n, const float* from, Float16* to) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(from[i]), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    uint32_t half;
    if (rest > 0x7f800000) half = 0x7e00;        // NaN
    else if (rest >= 0x477ff000) half = 0x7c00;  // rounds to infinity
    else if (rest < 0x38800000)                  // subnormal: adding 0.5 rounds at 2^-24
      half = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000;
    else half = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
    to[i].bits = uint16_t(sign | half);
  }
}
#endif
