// Moving data: asynchronous copies to shared memory, vector accesses, matrix loads, barriers of a group of warps.
// Addresses in shared memory are 32-bit, in bytes, as PTX has them.
#pragma once
#include "types.cuh"

extern __shared__ __align__(128) unsigned char shared_memory[];

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// BYTES is 4, 8 or 16; with `present` false zeros are written and nothing is read.
template <int BYTES> DEVICE void copy_async(u32 to, const void* from, bool present) {
  const int size = present ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// From sm_90 on a copy engine moves whole runs (multiples of 16 bytes) while the warps compute. Loads count their bytes
// at a barrier in shared memory, stores are waited for by the lane that asked for them. What ordinary accesses did to
// shared memory is fenced before the engine touches it.
DEVICE void init_arrivals(u32 barrier) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory"); }
DEVICE void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void wait_for_bytes(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(phase) : "memory");
}
DEVICE void load_run(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void store_run(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void wait_for_stores_to_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void fence_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void store_shared(u32 to, u16 x) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory"); }
DEVICE void store_shared(u32 to, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEVICE void store_shared(u32 to, bf16 x) { store_shared(to, x.bits); }
DEVICE void store_shared(u32 to, f16 x) { store_shared(to, x.bits); }
DEVICE void store_shared(u32 to, float x) { store_shared(to, __float_as_uint(x)); }
DEVICE void store_shared(u32 to, double x) { asm volatile("st.shared.f64 [%0], %1;" ::"r"(to), "d"(x) : "memory"); }
DEVICE void store_shared(u32 to, Pair<bf16> x) { store_shared(to, x.bits); }
DEVICE void store_shared(u32 to, Pair<f16> x) { store_shared(to, x.bits); }
DEVICE void store_shared(u32 to, Pair<float> x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
}
DEVICE void store_shared(u32 to, Pair<double> x) {
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(to), "d"(x.x), "d"(x.y) : "memory");
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
    asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(x.word[0]), "=l"(x.word[1]) : "r"(from) : "memory");
  else
    x = *reinterpret_cast<const Words<BYTES>*>(__cvta_shared_to_generic(size_t(from)));
  return x;
}
template <int BYTES> DEVICE void store_words(void* to, Words<BYTES> x) {
  if constexpr (BYTES == 16)
    asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(x.word[0]), "l"(x.word[1]) : "memory");
  else
    *static_cast<Words<BYTES>*>(to) = x;
}

DEVICE void load_global(const void* from, u32 (&x)[4]) {
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from));
}
DEVICE u32 load_u32(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
DEVICE void load_u32x4(u32 from, u32 (&x)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}
DEVICE void store_u32x4(u32 to, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEVICE double load_f64(u32 from) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(from) : "memory");
  return x;
}
DEVICE void load_f64x2(u32 from, double& x, double& y) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(x), "=d"(y) : "r"(from) : "memory");
}

// 8 x 8 matrices of 16-bit elements, one row address per lane; TRANSPOSED hands out columns.
template <bool TRANSPOSED> DEVICE void load_matrices(u32 (&x)[4], u32 row) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}
template <bool TRANSPOSED> DEVICE void load_matrices(u32 (&x)[2], u32 row) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1]) : "r"(row) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x[0]), "=r"(x[1]) : "r"(row) : "memory");
}

// Four of them written, columns as rows (sm_90)
DEVICE void store_matrices_transposed(u32 row, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3]) : "memory");
}

// WARPS warps that work on one tile, GROUPS such groups in a block, each with a barrier of its own. The first one's is
// __syncthreads' too: a block may use that only before its groups part.
template <int WARPS, int GROUPS> DEVICE void sync_group(int group) {
  if constexpr (WARPS == 1)
    __syncwarp();
  else if constexpr (GROUPS == 1)
    __syncthreads();
  else {
    static_assert(GROUPS <= 16);
    asm volatile("bar.sync %0, %1;" ::"r"(group), "n"(WARPS * 32) : "memory");
  }
}
