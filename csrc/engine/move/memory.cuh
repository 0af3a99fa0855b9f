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

// Two numbers that lie side by side there
template <class Element> DEVICE void load_two(u32 from, Sum<Element> (&x)[2]) {
  if constexpr (sizeof(Element) == 8) {
    load_f64x2(from, x[0], x[1]);
  } else if constexpr (sizeof(Element) == 4) {
    u32 two[2];
    load_u32x2(from, two);
    UNROLL for (int i = 0; i < 2; ++i) x[i] = __uint_as_float(two[i]);
  } else {
    const u32 two = load_u32(from);
    UNROLL for (int i = 0; i < 2; ++i) x[i] = number_of<Element>(&two, i);
  }
}

// To memory, side by side by one access, or, not PAIRED, where the second may not be there
template <bool PAIRED, class T> DEVICE void store_two(T* to, Sum<T> x, Sum<T> y, bool second) {
  if constexpr (PAIRED) {
    const Pair<T> two(x, y);
    store_words<sizeof(two)>(to, *reinterpret_cast<const Words<sizeof(two)>*>(&two));
  } else {
    store_global(to, narrow<T>(x));
    if (second) store_global(to + 1, narrow<T>(y));
  }
}

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
// A weight [Q, P], padded with zeros to [HEIGHT, WIDTH]: at(q, p) is an element, put(q, p, x) puts it down. Threads beside each other have
// neighbours of a row, or of a column if it is TURNED, and all others one behind another there, so that one of two places is found once.
// What is beyond the weight is loaded as its last element: behind a branch, each load would be waited for before the next one.
template <class Element, int Q, int P, int HEIGHT, int WIDTH, int THREADS, int TOGETHER, bool TURNED = false, class At, class Put>
DEVICE void make_weight(const At& at, const Put& put) {
  constexpr int kLength = TURNED ? HEIGHT : WIDTH, kLines = TURNED ? WIDTH : HEIGHT;
  constexpr int kAcross = kLength < THREADS ? kLength : THREADS, kDown = THREADS / kAcross, kRounds = ceil_div(kLines, kDown);
  constexpr int kTogether = kRounds < TOGETHER ? kRounds : TOGETHER;
  if (threadIdx.x >= kAcross * kDown) return;
  ROLL for (int along = threadIdx.x % kAcross; along < kLength; along += kAcross)
    ROLL for (int line = threadIdx.x / kAcross; line < kLines; line += kTogether * kDown) {
      const auto q_of = [&](int i) { return TURNED ? along : line + i * kDown; };
      const auto p_of = [&](int i) { return TURNED ? line + i * kDown : along; };
      Element x[kTogether];
      UNROLL for (int i = 0; i < kTogether; ++i) x[i] = at(min(q_of(i), Q - 1), min(p_of(i), P - 1));
      UNROLL for (int i = 0; i < kTogether; ++i)
        if (line + i * kDown < kLines) put(q_of(i), p_of(i), q_of(i) < Q && p_of(i) < P ? x[i] : Element{});
    }
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

// Of SIZE elements, a pointer's or several tensors', each line on its way to L2, by THREADS.
template <int SIZE, int THREADS, class From> DEVICE void prefetch_state(const From& from) {
  constexpr int kLine = 128 / sizeof(*(from + 0));
  ROLL for (int at = threadIdx.x % THREADS * kLine; at < SIZE; at += THREADS * kLine) prefetch(from + at);
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
