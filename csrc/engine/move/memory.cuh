// Moving data: elements to shared memory, and a barrier of a group of warps.
#pragma once
#include "types/types.cuh"

DEVICE void store_shared(u32 to, bf16 x) { store_shared(to, x.bits); }
DEVICE void store_shared(u32 to, f16 x) { store_shared(to, x.bits); }
DEVICE void store_shared(u32 to, float x) { store_shared(to, __float_as_uint(x)); }
DEVICE void store_shared(u32 to, Pair<bf16> x) { store_shared(to, x.bits); }
DEVICE void store_shared(u32 to, Pair<f16> x) { store_shared(to, x.bits); }
DEVICE void store_shared(u32 to, Pair<float> x) { store_f32x2(to, x.x, x.y); }
DEVICE void store_shared(u32 to, Pair<double> x) { store_f64x2(to, x.x, x.y); }

// One like the second argument
DEVICE float load_sum(u32 from, float) { return __uint_as_float(load_u32(from)); }
DEVICE double load_sum(u32 from, double) { return load_f64(from); }

// Things 0, 1, ... ALL - 1 by THREADS of a block, TOGETHER of a thread on their way at once: get(j) is one, put(j, x) where it goes.
template <int ALL, int THREADS, int TOGETHER, class Get, class Put> DEVICE void move_together(const Get& get, const Put& put) {
  ROLL for (int from = threadIdx.x; from < ALL; from += TOGETHER * THREADS) {
    decltype(get(0)) x[TOGETHER];
    UNROLL for (int i = 0; i < TOGETHER; ++i) x[i] = get(from + i * THREADS);
    UNROLL for (int i = 0; i < TOGETHER; ++i) put(from + i * THREADS, x[i]);
  }
}
// So a weight [Q, P] to shared memory, padded with zeros to [HEIGHT, WIDTH]: at(q, p) is an element, place(q, p) where it goes.
template <class Element, int Q, int P, int HEIGHT, int WIDTH, int THREADS, int TOGETHER, class At, class Place>
DEVICE void make_weight(const At& at, const Place& place) {
  move_together<HEIGHT * WIDTH, THREADS, TOGETHER>(
      [&](int j) {
        const int q = j / WIDTH, p = j % WIDTH;
        return q < Q && p < P ? narrow<Element>(at(q, p)) : Element{};
      },
      [&](int j, Element x) {
        if (j / WIDTH < HEIGHT) store_shared(place(j / WIDTH, j % WIDTH), x);
      });
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
    sync_threads<WARPS * 32>(group);
  }
}
// Where the warps of a block have parted: its first THREADS, who multiply; and a warpgroup by itself, whichever it is.
template <int THREADS> DEVICE void sync_consumers() { sync_threads<THREADS>(1); }
DEVICE void sync_warpgroup(int warpgroup) { sync_threads<128>(2 + warpgroup); }
// Groups of a block take units in turn, so that in the last round some may have none where the first group has one, `of_first`:
// such a group meets `times`, as it would have with a unit. So all groups have met equally often when the block does, which
// racecheck takes as order between those alone that have.
template <int GROUPS, class Sync> DEVICE void meet_as_others(i64 of_first, i64 units, int times, const Sync& sync) {
  if constexpr (GROUPS > 1) {
    if (of_first < units) ROLL for (int i = 0; i < times; ++i) sync();
  }
}

// A tensor's bytes on their way to L2, by all threads of the grid: while the kernel before in the stream is running,
// which may still write them, as L2 has what is written.
template <int THREADS> DEVICE void ask_for(const void* from, i64 bytes) {
  if constexpr (kStartsEarly) {
    const i64 block = i64(blockIdx.y) * gridDim.x + blockIdx.x, blocks = i64(gridDim.x) * gridDim.y;
    for (i64 at = (threadIdx.x * blocks + block) * 128; at < bytes; at += blocks * (THREADS * 128))
      prefetch(static_cast<const char*>(from) + at);
  }
}
