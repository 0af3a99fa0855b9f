// What has been summed, to memory: by a thread, and by groups of warps each for itself.
#pragma once
#include "multiply/mma.cuh"

DEVICE void put_sums(u32 to, const float (&sum)[4]) {
  store_u32x4(to, {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])});
}
DEVICE void put_sums(u32 to, const double (&sum)[4]) {
  store_f64x2(to, sum[0], sum[1]);
  store_f64x2(to + 16, sum[2], sum[3]);
}
DEVICE void get_sums(u32 from, float (&sum)[4]) {
  u32 x[4];
  load_u32x4(from, x);
  UNROLL for (int i = 0; i < 4; ++i) sum[i] = __uint_as_float(x[i]);
}
DEVICE void get_sums(u32 from, double (&sum)[4]) {
  load_f64x2(from, sum[0], sum[1]);
  load_f64x2(from + 16, sum[2], sum[3]);
}

// THREADS of a block, in groups of MEMBERS that hold sums of the same places: N fours, sum_of(n), each. Adds them up in the
// order of the groups, as many at once as BYTES of shared memory hold, and hands them out: place(n, member, sums). Those threads
// meet by sync().
struct SyncBlock {
  DEVICE void operator()() const { __syncthreads(); }
};
template <int N, int THREADS, int MEMBERS, int BYTES, class Real, class SumOf, class Place, class Sync = SyncBlock>
DEVICE void add_up(u32 memory, const SumOf& sum_of, const Place& place, const Sync& sync = {}) {
  constexpr int kFour = 4 * sizeof(Real), kFit = BYTES / (THREADS * kFour), kAtOnce = kFit < N ? kFit : N;
  static_assert(kFit > 0 && THREADS % MEMBERS == 0);
  if constexpr (THREADS == MEMBERS) {
    UNROLL for (int n = 0; n < N; ++n) place(n, threadIdx.x, sum_of(n));
  } else {
    UNROLL for (int first = 0; first < N; first += kAtOnce) {
      sync();
      UNROLL for (int n = first; n < first + kAtOnce && n < N; ++n)
        put_sums(memory + ((n - first) * THREADS + threadIdx.x) * kFour, sum_of(n));
      sync();
      ROLL for (int j = threadIdx.x; j < (N - first < kAtOnce ? N - first : kAtOnce) * MEMBERS; j += THREADS) {
        const u32 from = memory + (j / MEMBERS * THREADS + j % MEMBERS) * kFour;
        Real sum[4] = {};
        UNROLL for (int group = 0; group < THREADS / MEMBERS; ++group) {
          Real more[4];
          get_sums(from + group * MEMBERS * kFour, more);
          UNROLL for (int i = 0; i < 4; ++i) sum[i] += more[i];
        }
        place(first + j / MEMBERS, j % MEMBERS, sum);
      }
    }
  }
}

// Where a block has its sums of two weights' gradients: dA [q0, p0] of all terms, then dB [q1, p1] of all.
template <class Pass> struct PlacesOfSums {
  static constexpr int kA = Pass::Q0 * Pass::P0, kB = Pass::Q1 * Pass::P1, kAll = Pass::RANK * (kA + kB);
  static constexpr bool kPaired = Pass::RANK * kA % 2 == 0;  // whether pairs of dB's lie as such
  float *const a, *const b;  // of one of the pass's terms
  DEVICE PlacesOfSums(float* block, int term)
      : a(block + (Pass::TERM + term) * kA), b(block + Pass::RANK * kA + (Pass::TERM + term) * kB) {}
};

// Gradients dA, with p0 as rows of sums, and dB, of whose rows a warp has 16, from `first` on: to where they belong. P1 is even.
template <class Pass, int A, int B>
DEVICE void store_rows(const PlacesOfSums<Pass>& to, int first, const Lane& lane, const float (&d_a)[A], const float (&d_b)[B]) {
  UNROLL for (int j = 0; j < A; ++j) {
    const int p = first + lane.g + j / 2 % 2 * 8, q = j / 4 * 8 + lane.t * 2 + j % 2;
    if (q < Pass::Q0 && p < Pass::P0) store_global(to.a + q * Pass::P0 + p, d_a[j]);
  }
  UNROLL for (int j = 0; j < B; j += 2) {
    const int q = first + lane.g + j / 2 % 2 * 8, p = j / 4 * 8 + lane.t * 2;
    if (q < Pass::Q1 && p < Pass::P1)
      store_two<PlacesOfSums<Pass>::kPaired>(to.b + q * Pass::P1 + p, d_b[j], d_b[j + 1], true);
  }
}

// Gradients dA, with p0 as rows of sums, and dB, up to 64 x 64, of which each of the THREADS' warpgroups has sums: added up as
// above, to where they belong. Those are all who multiply.
template <class Pass, int THREADS, int BYTES, int A, int B>
DEVICE void store_sums(u32 memory, const PlacesOfSums<Pass>& to, const float (&d_a)[A], const float (&d_b)[B]) {
  constexpr int P0 = Pass::P0, P1 = Pass::P1, Q0 = Pass::Q0, Q1 = Pass::Q1;
  constexpr int kFoursA = A / 4, kFoursB = B / 4;
  add_up<kFoursA + kFoursB, THREADS, 128, BYTES, float>(
      memory,
      [&](int n) -> const float(&)[4] {
        return reinterpret_cast<const float(&)[4]>(n < kFoursA ? d_a[n * 4] : d_b[(n - kFoursA) * 4]);
      },
      [&](int n, int member, const float(&sum)[4]) {
        const Lane at(member % 32);
        UNROLL for (int i = 0; i < 4; ++i) {
          const int row = member / 32 * 16 + at.g + i / 2 * 8, column = at.t * 2 + i % 2;
          if (n < kFoursA) {
            const int q = n * 8 + column;
            if (q < Q0 && row < P0) store_global(to.a + q * P0 + row, sum[i]);
          } else {
            const int p = (n - kFoursA) * 8 + column;
            if (row < Q1 && p < P1) store_global(to.b + row * P1 + p, sum[i]);
          }
        }
      },
      [] { sync_consumers<THREADS>(); });
}
