// What C++ has no word for: one function for each instruction of the GPU that the engine uses, and nothing else. All
// inline assembly is here, but for Wgmma<Element, N>, which device/code.py writes. So tests/emulator, which has
// the same functions for a CPU, runs the other headers as they are.
//
// Addresses in shared memory are 32-bit, in bytes, as PTX has them.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__
// Before a loop: it is unrolled, as many times as it runs or so many times, or is not.
#define PRAGMA(text) _Pragma(#text)
#define UNROLL PRAGMA(unroll)
#define UNROLL_BY(times) PRAGMA(unroll(times))
#define ROLL PRAGMA(unroll 1)
// Operands of an instruction: the first elements of an array
#define TWO(kind, x) kind(x[0]), kind(x[1])
#define FOUR(kind, x) TWO(kind, x), kind(x[2]), kind(x[3])

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

extern __shared__ __align__(128) unsigned char shared_memory[];

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Conversions: of f16; to two neighbours, x in the low half; to the nearest tf32.
DEVICE float float_of(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE u32 bf16x2_of(float x, float y) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(y), "f"(x));
  return bits;
}
DEVICE u32 f16x2_of(float x, float y) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(y), "f"(x));
  return bits;
}
DEVICE u32 tf32_of(u32 x) {
  u32 y;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "r"(x));  // one instruction
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "r"(x));  // four
#endif
  return y;
}

// Of its two words
DEVICE double double_of(u32 low, u32 high) {
  double x;
  asm("mov.b64 %0, {%1, %2};" : "=d"(x) : "r"(low), "r"(high));
  return x;
}

DEVICE u32 low_of(double x) { return u32(__double_as_longlong(x)); }
DEVICE u32 high_of(double x) { return u32(u64(__double_as_longlong(x)) >> 32); }

// The larger one, or the smaller one, or NaN if either is.
DEVICE float larger(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
DEVICE float smaller(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Whether kernels start before the ones before them have ended, as the next two say.
#if __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif

// Until the kernel before in the stream has ended, and what it wrote is there: driver.cpp has blocks start a little earlier.
DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From now on blocks of the next kernel may start beside this one's: one that waits where it needs what this one makes. Behind
// the wait, what earlier kernels wrote is there for them.
DEVICE void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Special functions by the unit that has them. 2^x, off by 2^-22 of it at most, and 1/x, by 2^-23: what is smaller than normal
// numbers is zero. Tanh, by 2^-11. The logarithm to base 2, by 2^-22, and by no more of it beyond 1/2 to 2. The root, by 2^-23,
// and a quotient, by 2^-22, of all numbers that there are.
#define SPECIAL_FUNCTION(name, instruction)            \
  DEVICE float name(float x) {                         \
    float y;                                           \
    asm(instruction " %0, %1;" : "=f"(y) : "f"(x));    \
    return y;                                          \
  }
SPECIAL_FUNCTION(fast_exp2, "ex2.approx.ftz.f32")
SPECIAL_FUNCTION(fast_reciprocal, "rcp.approx.ftz.f32")
SPECIAL_FUNCTION(fast_tanh, "tanh.approx.f32")
SPECIAL_FUNCTION(fast_log2, "lg2.approx.f32")
SPECIAL_FUNCTION(fast_root, "sqrt.approx.f32")
// 1/x, off by 2^-20
DEVICE double fast_reciprocal(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
}
DEVICE float fast_quotient(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// What is the same for a whole warp, so that the compiler keeps it, and what follows from it, in uniform registers: the matrix
// unit's descriptors have to be there.
DEVICE int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// No instructions at all: the compiler is told that these values change here. So it does not keep in registers, through a
// loop, what it could compute from them before; makes operands here and not where they are used, where they may not be
// written any more; and moves no use of sums across the wait for them.
template <class Int> DEVICE void stay_here(Int& x, Int& y) { asm volatile("" : "+r"(x), "+r"(y)); }
DEVICE void stay_here(const void*& x) { asm volatile("" : "+l"(x)); }
DEVICE void settle(u32 (&x)[4]) { asm volatile("" : FOUR("+r", x)::"memory"); }
DEVICE void touch(double& x) { asm volatile("" : "+d"(x)::"memory"); }
template <int N> DEVICE void touch(float (&x)[N]) {
  UNROLL for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
// Numbers that are made by here, and no later: ptxas leaves a short computation to where its result is used, behind loops, and
// keeps what it is made of until then. They are stored if `never` holds, which only a run can tell.
template <int N> DEVICE void make_here(const u32 (&x)[N], bool never, void* nowhere) {
  if (never)
    UNROLL for (int i = 0; i < N; ++i) static_cast<u32*>(nowhere)[i] = x[i];
}

// Shared memory
DEVICE void store_shared(u32 to, u16 x) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory"); }
DEVICE void store_shared(u32 to, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEVICE void store_shared(u32 to, double x) { asm volatile("st.shared.f64 [%0], %1;" ::"r"(to), "d"(x) : "memory"); }
DEVICE void store_f32x2(u32 to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
DEVICE void store_f64x2(u32 to, double x, double y) {
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(to), "d"(x), "d"(y) : "memory");
}
DEVICE void store_u32x4(u32 to, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), FOUR("r", x) : "memory");
}
DEVICE u16 load_u16(u32 from) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}
DEVICE u32 load_u32(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
DEVICE void load_u32x2(u32 from, u32 (&x)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : TWO("=r", x) : "r"(from) : "memory");
}
DEVICE void load_u32x4(u32 from, u32 (&x)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : FOUR("=r", x) : "r"(from) : "memory");
}
DEVICE double load_f64(u32 from) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(from) : "memory");
  return x;
}
// Of some lanes: others load zero, and store nothing, without a branch.
DEVICE double load_f64(u32 from, bool present) {
  double x;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b64 %0, 0; @p ld.shared.f64 %0, [%1]; }"
               : "=&d"(x) : "r"(from), "r"(int(present)) : "memory");
  return x;
}
DEVICE void store_shared(u32 to, double x, bool wanted) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.f64 [%0], %1; }" ::"r"(to), "d"(x), "r"(int(wanted))
               : "memory");
}
DEVICE void store_global(double* to, double x, bool wanted) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.f64 [%0], %1; }" ::"l"(to), "d"(x), "r"(int(wanted))
               : "memory");
}
DEVICE void load_f64x2(u32 from, double& x, double& y) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(x), "=d"(y) : "r"(from) : "memory");
}

// BYTES of memory, moved by one access.
template <int BYTES> struct Words;
template <> struct Words<2> { u16 word; };
template <> struct Words<4> { u32 word; };
template <> struct Words<8> { u64 word; };
template <> struct __align__(16) Words<16> { u64 word[2]; };

template <int BYTES> DEVICE Words<BYTES> load_words(u32 from) {
  Words<BYTES> x;
  if constexpr (BYTES == 16)
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : TWO("=l", x.word) : "r"(from) : "memory");
  else
    x = *reinterpret_cast<const Words<BYTES>*>(__cvta_shared_to_generic(size_t(from)));
  return x;
}
template <int BYTES> DEVICE void store_words(u32 to, Words<BYTES> x) {
  if constexpr (BYTES == 16)
    asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(to), TWO("l", x.word) : "memory");
  else if constexpr (BYTES == 8)
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(x.word) : "memory");
  else
    store_shared(to, x.word);
}
template <int BYTES> DEVICE void store_words(void* to, Words<BYTES> x) {
  if constexpr (BYTES == 16)
    asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(to), TWO("l", x.word) : "memory");
  else
    *static_cast<Words<BYTES>*>(to) = x;
}

// Halves of two words: x's and, above it, y's
DEVICE u32 lower_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }
DEVICE u32 upper_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }

// Memory
DEVICE void load_global(const void* from, u32 (&x)[4]) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : FOUR("=r", x) : "l"(from));
}
// Of lanes with `present`, without a branch, which would part many loads, each with an address of its own: by `zeroed` what others
// have becomes zero first, and nothing is read.
#define LOAD_SOME(kind, zeroed, operand, clobbers)                                                                      \
  if constexpr (BYTES == 16)                                                                                            \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; " zeroed("%0") zeroed("%1") zeroed("%2") zeroed("%3") "\n"       \
                 "@p ld.global" kind ".v4.u32 {%0, %1, %2, %3}, [%4]; }"                                                \
                 : FOUR(operand, x) : "l"(from), "r"(int(present)) clobbers);                                           \
  else if constexpr (BYTES == 8)                                                                                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; " zeroed("%0") zeroed("%1") "\n"                                \
                 "@p ld.global" kind ".v2.u32 {%0, %1}, [%2]; }"                                                        \
                 : TWO(operand, x) : "l"(from), "r"(int(present)) clobbers);                                            \
  else if constexpr (BYTES == 4)                                                                                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; " zeroed("%0") "@p ld.global" kind ".u32 %0, [%1]; }"           \
                 : operand(x[0]) : "l"(from), "r"(int(present)) clobbers);                                              \
  else                                                                                                                  \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; " zeroed("%0") "@p ld.global" kind ".u16 %0, [%1]; }"           \
                 : operand(x[0]) : "l"(from), "r"(int(present)) clobbers)
#define ZERO(x) "mov.b32 " x ", 0; "
#define AS_IT_WAS(x) ""
#define MEMORY : "memory"
template <int BYTES> DEVICE void load_global(const void* from, u32 (&x)[BYTES < 4 ? 1 : BYTES / 4], bool present) {
  LOAD_SOME(".nc", ZERO, "=&r", );
}
DEVICE void load_global(const void* from, u32 (&x)[4], bool present) { load_global<16>(from, x, present); }
// The same of what a kernel has made that had not ended when this one started, but has been waited for.
template <int BYTES> DEVICE void load_made(const void* from, u32 (&x)[BYTES < 4 ? 1 : BYTES / 4], bool present) {
  LOAD_SOME("", ZERO, "=&r", MEMORY);
}
// The same, by MADE of either kind, without zeros: what is not `present` stays as it was.
template <int BYTES, bool MADE> DEVICE void load_some(const void* from, u32 (&x)[BYTES < 4 ? 1 : BYTES / 4], bool present) {
  if constexpr (MADE) {
    LOAD_SOME("", AS_IT_WAS, "+r", MEMORY);
  } else {
    LOAD_SOME(".nc", AS_IT_WAS, "+r", MEMORY);
  }
}
#undef LOAD_SOME
#undef ZERO
#undef AS_IT_WAS
#undef MEMORY
// Five words behind one another, which lie in as many accesses
DEVICE void load_five(const void* from, u32 (&x)[5], bool present) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; mov.b32 %4, 0;\n"
               "@p ld.global.u32 %0, [%5]; @p ld.global.u32 %1, [%5+4]; @p ld.global.u32 %2, [%5+8];\n"
               "@p ld.global.u32 %3, [%5+12]; @p ld.global.u32 %4, [%5+16]; }"
               : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3]), "=&r"(x[4]) : "l"(from), "r"(int(present)) : "memory");
}
// What other blocks write meanwhile, as it is now
template <int BYTES> DEVICE void load_now(const void* from, u32 (&x)[BYTES < 4 ? 1 : BYTES / 4]) {
  if constexpr (BYTES == 16)
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : FOUR("=r", x) : "l"(from) : "memory");
  else if constexpr (BYTES == 8)
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : TWO("=r", x) : "l"(from) : "memory");
  else if constexpr (BYTES == 4)
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x[0]) : "l"(from) : "memory");
  else
    asm volatile("{ .reg .u16 h; ld.relaxed.gpu.global.u16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(x[0]) : "l"(from) : "memory");
}
// One more, and how many there were: what the block wrote before is there for whoever finds this.
DEVICE u32 count_up(u32* counter) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
// One more: what the block wrote before is there for whoever finds it, by load_now, and then comes after it.
DEVICE void count(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
DEVICE void come_after(const u32*) { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// A line of 128 bytes on its way to L2
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
template <class T> DEVICE void store_global(T* to, T x) { *to = x; }
template <int BYTES> DEVICE void store_global(void* to, const u32* x) {
  if constexpr (BYTES == 16)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), FOUR("r", x) : "memory");
  else if constexpr (BYTES == 8)
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), TWO("r", x) : "memory");
  else
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(x[0]) : "memory");
}

// Asynchronous copies to shared memory. BYTES is 4, 8 or 16; with `present` false zeros are written and nothing is read.
template <int BYTES> DEVICE void copy_async(u32 to, const void* from, bool present) {
  const int size = present ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size) : "memory");
}
// 16 bytes, of which so many are read, and the others zeros
DEVICE void copy_bytes(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Nothing if it is not `wanted`: one branch for many copies would part them from the products. 2 BYTES are no copy, but
// there at once.
template <int BYTES, class Element> DEVICE void copy_async_if(u32 to, const Element* from, bool present, bool wanted) {
  if constexpr (BYTES == 16)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2; }"
                 ::"r"(to), "l"(from), "r"(present ? 16 : 0), "r"(int(wanted)) : "memory");
  else if constexpr (BYTES >= 4)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; @p cp.async.ca.shared.global [%0], [%1], %2, %3; }"
                 ::"r"(to), "l"(from), "n"(BYTES), "r"(present ? BYTES : 0), "r"(int(wanted)) : "memory");
  else if (wanted)
    store_shared(to, present ? from->bits : u16(0));
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// THREADS of a block meet at one of its 16 barriers; the first one is __syncthreads'.
template <int THREADS> DEVICE void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Barriers in shared memory (sm_90), of any number of arrivals, by phases (0, 1, 0, ...).
DEVICE void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void init_arrivals(u32 barrier) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory"); }
DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// Arrives once this thread's asynchronous copies so far are done; counts as one of the arrivals.
DEVICE void arrive_with_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void wait_for_bytes(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(phase) : "memory");
}

// From sm_90 on a copy engine moves whole runs (multiples of 16 bytes) while the warps compute. Loads count their bytes
// at a barrier in shared memory, stores are waited for by the lane that asked for them. What ordinary accesses did to
// shared memory is fenced before the engine touches it.
DEVICE void load_run(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// The same to those blocks of a cluster whose bits are set, at the same place, each of which counts the bytes.
DEVICE void load_run(u32 to, const void* from, u32 bytes, u32 barrier, u32 blocks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(u16(blocks)) : "memory");
}
// By a map of a tensor, which the runtime writes and a kernel has as a parameter: the box that begins at these coordinates,
// floats rounded to tf32, with zeros for what lies outside of the tensor. Its rows are a slab's (wgmma.cuh).
struct __align__(64) TensorMap { u64 words[16]; };
DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
DEVICE void load_box(u32 to, const TensorMap& map, const int (&at)[5], u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
               ::"r"(to), "l"(&map), FOUR("r", at), "r"(at[4]), "r"(barrier) : "memory");
}
// The same to those blocks of a cluster whose bits are set, at the same place, each of which counts the bytes.
DEVICE void load_box(u32 to, const TensorMap& map, const int (&at)[5], u32 barrier, u32 blocks) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
               ::"r"(to), "l"(&map), FOUR("r", at), "r"(at[4]), "r"(barrier), "h"(u16(blocks)) : "memory");
}
DEVICE void store_run(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void wait_for_stores_to_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void fence_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// And what they did to memory, before the engine reads it: by who has found that it is done.
DEVICE void fence_memory_for_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// 8 x 8 matrices of 16-bit elements, one row address per lane; TRANSPOSED hands out columns.
template <bool TRANSPOSED> DEVICE void load_matrices(u32 (&x)[4], u32 row) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : FOUR("=r", x) : "r"(row) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : FOUR("=r", x) : "r"(row) : "memory");
}
template <bool TRANSPOSED> DEVICE void load_matrices(u32 (&x)[2], u32 row) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : TWO("=r", x) : "r"(row) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : TWO("=r", x) : "r"(row) : "memory");
}
// Four of them written, columns as rows (sm_90)
DEVICE void store_matrices_transposed(u32 row, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), FOUR("r", x) : "memory");
}

// Two of them, by rows that the first 16 lanes name; TRANSPOSED: columns as rows
template <bool TRANSPOSED> DEVICE void store_matrices(u32 row, const u32 (&x)[2]) {
  if constexpr (TRANSPOSED)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), TWO("r", x) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), TWO("r", x) : "memory");
}

// Products of a warp: Y[16, 8] += A[16, k] B[k, 8] with k = 16 and 8 of Element, bf16 or f16, and k = 8 of 32 and 64 bits.
template <class T> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<bf16> = true;

#define IN_FLOAT(shape, kind, operands) \
  "mma.sync.aligned." shape ".row.col.f32." kind "." kind ".f32 {%0,%1,%2,%3}, " operands ", {%0,%1,%2,%3};"
#define FOUR_BY_TWO "{%4,%5,%6,%7}, {%8,%9}"
template <class Element> DEVICE void multiply_16(float (&y)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (kIsBf16<Element>)
    asm(IN_FLOAT("m16n8k16", "bf16", FOUR_BY_TWO) : FOUR("+f", y) : FOUR("r", a), TWO("r", b));
  else
    asm(IN_FLOAT("m16n8k16", "f16", FOUR_BY_TWO) : FOUR("+f", y) : FOUR("r", a), TWO("r", b));
}
// Of the first halves of the operands
template <class Element> DEVICE void multiply_8(float (&y)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (kIsBf16<Element>)
    asm(IN_FLOAT("m16n8k8", "bf16", "{%4,%5}, {%6}") : FOUR("+f", y) : TWO("r", a), "r"(b[0]));
  else
    asm(IN_FLOAT("m16n8k8", "f16", "{%4,%5}, {%6}") : FOUR("+f", y) : TWO("r", a), "r"(b[0]));
}
DEVICE void multiply_tf32(float (&y)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm(IN_FLOAT("m16n8k8", "tf32", FOUR_BY_TWO) : FOUR("+f", y) : FOUR("r", a), TWO("r", b));
}
#undef FOUR_BY_TWO
#undef IN_FLOAT
DEVICE void multiply_f64(double (&y)[4], const double (&a)[4], const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : FOUR("+d", y) : FOUR("d", a), TWO("d", b));
#else
  UNROLL for (int i = 0; i < 4; ++i)
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(y[i % 2 * 2]), "+d"(y[i % 2 * 2 + 1]) : "d"(a[i]), "d"(b[i / 2]));
#endif
}

// Products of a warpgroup (wgmma.cuh). Registers that are sums or operands may be touched before open_products() and after
// the wait alone. Shared memory that ordinary accesses or cp.async wrote needs fence_copy_engine() first: by who wrote it,
// before the barrier, or by who has the products made, behind it.
template <class Element, int N> struct Wgmma;
DEVICE void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Registers of the warpgroup's threads, for kernels whose warpgroups have roles: a branch each of one if. 0: as they are
template <int COUNT> DEVICE void take_registers() {
  if constexpr (COUNT > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> DEVICE void give_registers() {
  if constexpr (COUNT > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Addresses in the shared memory of a cluster's blocks. Of two, those of the other one, and barriers that order both.
DEVICE u32 in_block(u32 address, int rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
DEVICE u32 in_other_block(u32 address) {
  u32 there;
  asm volatile("{ .reg .b32 rank; mov.u32 rank, %%cluster_ctarank; xor.b32 rank, rank, 1;\n"
               "mapa.shared::cluster.u32 %0, %1, rank; }" : "=r"(there) : "r"(address));
  return there;
}
// 16, 8 or 4 bytes on their way to one, which a barrier there counts
DEVICE void send_words(u32 to, const u32 (&x)[4], u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to), FOUR("r", x), "r"(barrier) : "memory");
}
DEVICE void send_words(u32 to, const u32 (&x)[2], u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
               ::"r"(to), TWO("r", x), "r"(barrier) : "memory");
}
DEVICE void send_words(u32 to, const u32 (&x)[1], u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(to), "r"(x[0]), "r"(barrier) : "memory");
}
DEVICE void store_in_other_block(u32 to, const u32 (&x)[4]) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), FOUR("r", x) : "memory");
}
DEVICE void arrive_in_other_block(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// By who has only read there: what it wrote elsewhere is not waited for.
DEVICE void free_in_other_block(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The copy engine moves a run there, and counts its bytes at a barrier there.
DEVICE void send_run(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void wait_for_cluster(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(phase) : "memory");
}
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Any number of blocks: the same in two steps; addresses in the shared memory of the one with that rank, which has to
// have begun, and two neighbours stored there.
DEVICE void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void wait_at_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
DEVICE void store_in_block(u32 to, u32 x) { asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEVICE void store_in_block(u32 to, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
DEVICE void store_in_block(u32 to, double x, double y) {
  asm volatile("st.shared::cluster.v2.f64 [%0], {%1, %2};" ::"r"(to), "d"(x), "d"(y) : "memory");
}
