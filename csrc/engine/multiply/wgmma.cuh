// Matrix products of a warpgroup (four warps, 128 threads) on sm_90a: D[64, N] += A[64, k] B[N, k]', 32 bytes of k at once.
//
// Operands lie in shared memory with k contiguous, in slabs of 128 bytes of k: row r of a slab begins at 128 r, and its
// 16-byte pieces change places by `swizzled`. A slab begins at a multiple of 1024. A may come from registers instead: what a
// lane holds of it is what a sum of the same place would be (mma.cuh), so that sums become operands without moving.
// Thread 32 w + 4 g + t of the warpgroup holds rows 16 w + g and + 8, columns 8 n + 2 t and + 1 of the sums, as
// d[4 n] to d[4 n + 3] in mma.cuh's order. device/code.py writes Wgmma<Element, N> for the N's that a kernel has.
#pragma once
#include "move/memory.cuh"

// Products of STEPS of k, by multiply(s), on their way; and waited for.
template <int STEPS, class Multiply> DEVICE void ask_for_products(const Multiply& multiply) {
  open_products();
  UNROLL for (int s = 0; s < STEPS; ++s) multiply(s);
  commit_products();
}
template <int STEPS, int N, class Multiply> DEVICE void make_products(float (&sums)[N], const Multiply& multiply) {
  ask_for_products<STEPS>(multiply);
  wait_for_products<0>();
  touch(sums);
}

// Where a 16-byte piece of a slab lies, in bytes.
DEVICE constexpr u32 swizzled(u32 row, u32 piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// What the matrix unit is told of an operand. The next 32 bytes of k are at operand + 2, the next slab at its address.
DEVICE u64 operand(u32 slab) { return u64(slab >> 4 & 0x3fff) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62; }

// Of 16 bits, operands may lie the other way, turned: rows of a slab are k's, and 64 m's or n's go along them, `bytes` from one
// slab to the next 64. 16 k's further is operand + 128.
DEVICE u64 turned_operand(u32 slab, u32 bytes) {
  return u64(slab >> 4 & 0x3fff) | u64(bytes >> 4) << 16 | u64(64) << 32 | u64(1) << 62;
}

// Two neighbouring lanes have two columns side by side of each of two tiles, those of `sums` and the next: the even one gets
// four of the first, the odd one of the second. What they store so are whole sectors, in half as many accesses.
DEVICE void four_columns(const float* sums, u32 (&words)[4]) {
  UNROLL for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(sums[i / 2 * 4 + i % 2]);
  exchange_words<2, 2>(words);
}

