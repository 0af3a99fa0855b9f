// instructions.cuh for a CPU: the same functions, and CUDA's own words.
#pragma once
#include <cstring>

#include "emulator.h"

#define __device__
#define __forceinline__ inline
#define __noinline__ inline
#define __constant__ static
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define DEVICE inline
#define UNROLL
#define UNROLL_BY(times)
#define ROLL

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Functions of the C library, for float as well. Of <cmath> and <algorithm>, C++'s own, the compiler would read more than
// of a kernel, for each one anew.
#define FOR_FLOAT(name)           \
  extern "C" double name(double); \
  extern "C" float name##f(float); \
  inline float name(float x) { return name##f(x); }
FOR_FLOAT(fabs)
FOR_FLOAT(floor)
FOR_FLOAT(sqrt)
FOR_FLOAT(exp)
FOR_FLOAT(exp2)
FOR_FLOAT(expm1)
FOR_FLOAT(log)
FOR_FLOAT(log2)
FOR_FLOAT(log1p)
FOR_FLOAT(sin)
FOR_FLOAT(cos)
FOR_FLOAT(tanh)
FOR_FLOAT(erf)
FOR_FLOAT(atan)
extern "C" double pow(double, double), fma(double, double, double), copysign(double, double);
extern "C" float powf(float, float), fmaf(float, float, float), fmaxf(float, float), copysignf(float, float);
inline float pow(float x, float y) { return powf(x, y); }
template <class T> inline T min(T x, T y) { return y < x ? y : x; }

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
template <class T> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<bf16> = true;

struct Index3 { unsigned x, y, z; };
extern Index3 threadIdx, blockIdx, gridDim;

template <class To, class From> inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(u32 x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline u32 __float_as_uint(float x) { return same_bits<u32>(x); }

constexpr bool kStartsEarly = true;
inline void wait_for_kernel_before() {}
inline void start_next_kernel() {}
inline void __syncthreads() { emulator::sync_block(0, 0); }
inline bool __syncthreads_or(bool here) { return emulator::sync_block(0, 0, here); }
inline void __syncwarp() { emulator::sync_warp(); }
inline bool __all_sync(u32, bool here) {
  emulator::together("__all_sync", &here, [](void* const* lanes) {
    bool all = true;
    for (int i = 0; i < 32; ++i) all &= *static_cast<bool*>(lanes[i]);
    for (int i = 0; i < 32; ++i) *static_cast<bool*>(lanes[i]) = all;
  });
  return here;
}
// What each lane has of the one that it names: by number, or by the bits in which both differ
struct Shuffled { u32 x, lane, got; };
template <bool XOR> u32 shuffled(u32 x, u32 lane) {
  Shuffled mine = {x, lane, 0};
  emulator::together(XOR ? "__shfl_xor_sync" : "__shfl_sync", &mine, [](void* const* lanes) {
    const auto given = [&](u32 i) { return static_cast<Shuffled*>(lanes[i]); };
    for (u32 i = 0; i < 32; ++i) given(i)->got = given((XOR ? i : 0) ^ given(i)->lane)->x;
  });
  return mine.got;
}
inline u32 __shfl_sync(u32, u32 x, int from) { return shuffled<false>(x, u32(from) % 32); }
inline u32 __shfl_xor_sync(u32, u32 x, int by) { return shuffled<true>(x, u32(by)); }

static unsigned char shared_memory[1];
inline u32 shared_address(const void*) { return emulator::kBase; }

inline float float_of(f16 x) { return emulator::float_of_f16(x.bits); }
inline u32 bf16x2_of(float x, float y) { return emulator::bf16_of(x) | u32(emulator::bf16_of(y)) << 16; }
inline u32 f16x2_of(float x, float y) { return emulator::f16_of(x) | u32(emulator::f16_of(y)) << 16; }
inline u32 tf32_of(u32 x) { return (x >> 23 & 255) == 255 ? x : emulator::truncated_to_tf32(x + 0x1000); }

inline double double_of(u32 low, u32 high) {
  const u64 bits = u64(high) << 32 | low;
  double x;
  memcpy(&x, &bits, 8);
  return x;
}
inline u32 low_of(double x) { return u32(same_bits<u64>(x)); }
inline u32 high_of(double x) { return u32(same_bits<u64>(x) >> 32); }
inline float larger(float x, float y) { return x > y || x != x ? x : y; }
inline float smaller(float x, float y) { return x < y || x != x ? x : y; }

// Special functions: off by as much as the unit may be, up or down as the argument's bits have it, but right where the result
// is a power of two.
inline double off_by(double most, float x) { return same_bits<u32>(x) * 2654435761u >> 31 ? most : -most; }
inline bool is_power_of_two(double x) { return !(same_bits<u64>(x) << 12); }
inline float times_off_by(double y, double most, float x) {
  return float(is_power_of_two(y) || y != y ? y : y * (1 + off_by(most, x)));
}
inline float normal_or_zero(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.f, x) : x; }
inline float fast_exp2(float x) { return normal_or_zero(times_off_by(exp2(double(x)), 0x1p-22, x)); }
inline float fast_reciprocal(float x) { return normal_or_zero(times_off_by(1 / double(normal_or_zero(x)), 0x1p-23, x)); }
inline double fast_reciprocal(double x) {  // of whose result the lower word is zero
  const double y = 1 / x * (1 + (same_bits<u64>(x) * 2654435761u >> 40 & 1 ? 0x1p-20 : -0x1p-20));
  return double_of(0, high_of(y));
}
inline float fast_tanh(float x) {
  const float y = times_off_by(tanh(double(x)), 0x1p-11, x);
  return y > 1 ? 1 : y < -1 ? -1 : y;
}
inline float fast_log2(float x) {
  const double y = log2(double(x));
  return float(y - y != 0 || is_power_of_two(x) ? y : y + off_by(0x1p-22, x) * (fabs(y) > 1 ? fabs(y) : 1));
}
inline float fast_root(float x) { return times_off_by(sqrt(double(x)), 0x1p-23, x); }
inline float fast_quotient(float x, float y) { return times_off_by(double(x) / double(y), 0x1p-22, x); }
inline int uniform(int x) { return x; }
template <class Int> inline void stay_here(Int&, Int&) {}
inline void stay_here(const void*&) {}
inline void settle(u32 (&)[4]) {}
inline void touch(double&) {}
template <int N> inline void touch(float (&)[N]) {}
template <int N> inline void make_here(const u32 (&)[N], bool, void*) {}

template <class T> inline T load(u32 from) {
  T x;
  memcpy(&x, emulator::read(from, sizeof(T)), sizeof(T));
  return x;
}
template <class T> inline void store(u32 to, const T& x) { memcpy(emulator::write(to, sizeof(T)), &x, sizeof(T)); }

inline void store_shared(u32 to, u16 x) { store(to, x); }
inline void store_shared(u32 to, u32 x) { store(to, x); }
inline void store_shared(u32 to, double x) { store(to, x); }
template <class T> struct Two { T x, y; };
struct Four { u32 x[4]; };
inline void store_f32x2(u32 to, float x, float y) { store(to, Two<float>{x, y}); }
inline void store_f64x2(u32 to, double x, double y) { store(to, Two<double>{x, y}); }
inline void store_u32x4(u32 to, const u32 (&x)[4]) { store(to, Four{x[0], x[1], x[2], x[3]}); }
inline u16 load_u16(u32 from) { return load<u16>(from); }
inline u32 load_u32(u32 from) { return load<u32>(from); }
inline void load_u32x2(u32 from, u32 (&x)[2]) {
  const u64 both = load<u64>(from);
  x[0] = u32(both), x[1] = u32(both >> 32);
}
inline void load_u32x4(u32 from, u32 (&x)[4]) {
  const Four four = load<Four>(from);
  for (int i = 0; i < 4; ++i) x[i] = four.x[i];
}
inline double load_f64(u32 from) { return load<double>(from); }
inline double load_f64(u32 from, bool present) { return present ? load_f64(from) : 0; }
inline void store_shared(u32 to, double x, bool wanted) {
  if (wanted) store_shared(to, x);
}
inline void load_f64x2(u32 from, double& x, double& y) {
  const auto two = load<Two<double>>(from);
  x = two.x, y = two.y;
}

template <int BYTES> struct Words { unsigned char bytes[BYTES]; };
template <> struct Words<16> { u64 word[2]; };
template <int BYTES> inline Words<BYTES> load_words(u32 from) { return load<Words<BYTES>>(from); }

template <int BYTES> inline void store_words(u32 to, Words<BYTES> x) { store(to, x); }

template <class T> inline void store_to_memory(void* to, const T& x) {
  emulator::write_global(to, sizeof(T));
  memcpy(to, &x, sizeof(T));
}
template <int BYTES> inline void store_words(void* to, Words<BYTES> x) { store_to_memory(to, x); }
template <class T> inline void store_global(T* to, T x) { store_to_memory(to, x); }
inline void store_global(double* to, double x, bool wanted) {
  if (wanted) store_global(to, x);
}
template <int BYTES> inline void store_global(void* to, const u32* x) {
  Words<BYTES> words;
  memcpy(&words, x, BYTES);
  store_to_memory(to, words);
}
inline void load_global(const void* from, u32 (&x)[4]) {
  emulator::read_global(from, 16);
  memcpy(x, from, 16);
}
inline void load_global(const void* from, u32 (&x)[4], bool present) {
  memset(x, 0, 16);
  if (present) load_global(from, x);
}
template <int BYTES> inline void load_global(const void* from, u32 (&x)[BYTES < 4 ? 1 : BYTES / 4], bool present) {
  memset(x, 0, sizeof x);
  if (!present) return;
  emulator::read_global(from, BYTES);
  memcpy(x, from, BYTES);
}
template <int BYTES> inline void load_made(const void* from, u32 (&x)[BYTES < 4 ? 1 : BYTES / 4], bool present) {
  load_global<BYTES>(from, x, present);
}
template <int BYTES, bool> inline void load_some(const void* from, u32 (&x)[BYTES < 4 ? 1 : BYTES / 4], bool present) {
  if (present) load_global<BYTES>(from, x, true);
}
inline u32 lower_halves(u32 x, u32 y) { return (x & 0xffff) | y << 16; }
inline u32 upper_halves(u32 x, u32 y) { return x >> 16 | (y & 0xffff0000); }
inline void load_five(const void* from, u32 (&x)[5], bool present) {
  memset(x, 0, sizeof x);
  if (!present) return;
  for (int i = 0; i < 5; ++i) emulator::read_global(static_cast<const u32*>(from) + i, 4);
  memcpy(x, from, sizeof x);
}
template <int BYTES> inline void load_now(const void* from, u32 (&x)[BYTES < 4 ? 1 : BYTES / 4]) {
  emulator::read_now(from, BYTES);
  x[0] = 0;
  memcpy(x, from, BYTES);
}
inline u32 count_up(u32* counter) {
  emulator::read_now(counter, sizeof *counter);
  emulator::come_after_counts(counter, true);
  return (*counter)++;
}
inline void count(u32* counter) { count_up(counter); }
inline void come_after(const u32* counter) { emulator::come_after_counts(counter, false); }
inline void prefetch(const void* from) { emulator::read_global(from, 1); }

template <int BYTES> inline void copy_async(u32 to, const void* from, bool present) {
  emulator::copy(to, from, BYTES, present ? BYTES : 0);
}
inline void copy_bytes(u32 to, const void* from, int bytes) { emulator::copy(to, from, 16, bytes); }
template <int BYTES, class Element>
inline void copy_async_if(u32 to, const Element* from, bool present, bool wanted) {
  if (!wanted) return;
  if constexpr (BYTES >= 4)
    emulator::copy(to, from, BYTES, present ? BYTES : 0);
  else
    store_shared(to, present ? from->bits : u16(0));
}
inline void commit_copies() { emulator::commit_copies(); }
template <int PENDING> inline void wait_for_copies() { emulator::wait_for_copies(PENDING); }

template <int THREADS> inline void sync_threads(int barrier) { emulator::sync_block(barrier, THREADS); }

inline void init_barrier(u32 barrier, int arrivals) { emulator::init_barrier(barrier, arrivals); }
inline void init_arrivals(u32 barrier) { emulator::init_barrier(barrier, 1); }
inline void arrive(u32 barrier) { emulator::arrive(barrier); }
inline void arrive_with_copies(u32 barrier) { emulator::arrive_with_copies(barrier); }
inline void expect_bytes(u32 barrier, u32 bytes) { emulator::arrive(barrier, bytes); }
inline void wait_for_bytes(u32 barrier, u32 phase) { emulator::wait(barrier, phase); }

inline void load_run(u32 to, const void* from, u32 bytes, u32 barrier) { emulator::load_run(to, from, bytes, barrier); }
inline void load_run(u32 to, const void* from, u32 bytes, u32 barrier, u32 blocks) {
  emulator::load_run(to, from, bytes, barrier, blocks);
}
using TensorMap = emulator::TensorMap;
inline void prefetch_map(const TensorMap&) {}
inline void load_box(u32 to, const TensorMap& map, const int (&at)[5], u32 barrier) {
  emulator::bring_box(to, map, at, barrier, 0);
}
inline void load_box(u32 to, const TensorMap& map, const int (&at)[5], u32 barrier, u32 blocks) {
  emulator::bring_box(to, map, at, barrier, blocks);
}
inline void store_run(void* to, u32 from, u32 bytes) { emulator::store_run(to, from, bytes); }
inline void commit_stores() {}
inline void wait_for_stores_to_read() { emulator::wait_for_stores(); }
inline void wait_for_stores() { emulator::wait_for_stores(); }
inline void fence_copy_engine() { emulator::fence(); }
inline void fence_memory_for_copies() {}

template <bool TRANSPOSED, int N> inline void load_matrices(u32 (&x)[N], u32 row) {
  emulator::Matrices mine = {x, nullptr, N, TRANSPOSED};
  if (threadIdx.x % 32 < 8 * N) mine.at = static_cast<unsigned char*>(emulator::read(row, 16));
  emulator::together("ldmatrix", &mine, mine.load);
}
inline void store_matrices_transposed(u32 row, const u32 (&x)[4]) {
  u32 words[4] = {x[0], x[1], x[2], x[3]};
  emulator::Matrices mine = {words, static_cast<unsigned char*>(emulator::write(row, 16)), 4, true};
  emulator::together("stmatrix", &mine, mine.store);
}
template <bool TRANSPOSED> inline void store_matrices(u32 row, const u32 (&x)[2]) {
  u32 words[2] = {x[0], x[1]};
  emulator::Matrices mine = {words, nullptr, 2, TRANSPOSED};
  if (threadIdx.x % 32 < 16) mine.at = static_cast<unsigned char*>(emulator::write(row, 16));
  emulator::together("stmatrix", &mine, mine.store);
}

template <class Element, int K> inline void multiply_halves(float (&y)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  const auto value = [](const u32* words, int i) {
    const u16 bits = u16(words[i / 2] >> i % 2 * 16);
    return kIsBf16<Element> ? __uint_as_float(u32(bits) << 16) : emulator::float_of_f16(bits);
  };
  emulator::Product<float, K, 2> mine = {y, {}, {}};
  for (int i = 0; i < K / 2; ++i) mine.a[i] = value(a, i);
  for (int i = 0; i < K / 4; ++i) mine.b[i] = value(b, i);
  emulator::together("mma.sync of 16 bits", &mine, mine.make);
}
template <class Element> inline void multiply_16(float (&y)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  multiply_halves<Element, 16>(y, a, b);
}
template <class Element> inline void multiply_8(float (&y)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  multiply_halves<Element, 8>(y, a, b);
}
inline void multiply_tf32(float (&y)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::Product<float, 8, 1> mine = {y, {}, {}};
  for (int i = 0; i < 4; ++i) mine.a[i] = __uint_as_float(emulator::truncated_to_tf32(a[i]));
  for (int i = 0; i < 2; ++i) mine.b[i] = __uint_as_float(emulator::truncated_to_tf32(b[i]));
  emulator::together("mma.sync of tf32", &mine, mine.make);
}
inline void multiply_f64(double (&y)[4], const double (&a)[4], const double (&b)[2]) {
  emulator::Product<double, 8, 1> mine = {y, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  emulator::together("mma.sync of doubles", &mine, mine.make);
}

template <class Element, int N> struct Wgmma {
  static_assert(N % 8 == 0 && N <= 256);
  static constexpr auto kKind = sizeof(Element) == 4 ? emulator::Kind::tf32
                                : kIsBf16<Element>   ? emulator::Kind::bf16
                                                     : emulator::Kind::f16;
  static void multiply(float (&d)[N / 2], u64 a, u64 b, bool add = true) {
    emulator::multiply(kKind, N, d, nullptr, a, b, add, false, false);
  }
  static void multiply(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool add = true) {
    emulator::multiply(kKind, N, d, a, 0, b, add, false, false);
  }
  static void multiply_turned(float (&d)[N / 2], u64 a, u64 b, bool add = true) {
    emulator::multiply(kKind, N, d, nullptr, a, b, add, true, true);
  }
  static void multiply_turned(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool add = true) {
    emulator::multiply(kKind, N, d, a, 0, b, add, false, true);
  }
  static void multiply_right_turned(float (&d)[N / 2], u64 a, u64 b, bool add = true) {
    emulator::multiply(kKind, N, d, nullptr, a, b, add, false, true);
  }
};
inline void open_products() { emulator::open_products(); }
inline void commit_products() { emulator::commit_products(); }
template <int PENDING> inline void wait_for_products() { emulator::wait_for_products(PENDING); }
template <int COUNT> inline void take_registers() {}
template <int COUNT> inline void give_registers() {}

inline u32 in_block(u32 address, int rank) { return emulator::in_block(address, rank); }
inline u32 in_other_block(u32 address) { return emulator::in_other_block(address); }
template <int N> inline void send_words(u32 to, const u32 (&x)[N], u32 barrier) { emulator::send_words(to, x, N, barrier); }
inline void store_in_other_block(u32 to, const u32 (&x)[4]) { store_u32x4(to, x); }
inline void arrive_in_other_block(u32 barrier) { emulator::arrive(barrier); }
inline void free_in_other_block(u32 barrier) { emulator::arrive(barrier); }
inline void send_run(u32 to, u32 from, u32 bytes, u32 barrier) { emulator::send_run(to, from, bytes, barrier); }
inline void wait_for_cluster(u32 barrier, u32 phase) { emulator::wait(barrier, phase); }
inline void sync_cluster() { emulator::sync_cluster(); }
inline void arrive_at_cluster() { emulator::arrive_at_cluster(); }
inline void wait_at_cluster() { emulator::wait_at_cluster(); }
inline void store_in_block(u32 to, u32 x) { store_shared(to, x); }
inline void store_in_block(u32 to, float x, float y) { store_f32x2(to, x, y); }
inline void store_in_block(u32 to, double x, double y) { store_f64x2(to, x, y); }
