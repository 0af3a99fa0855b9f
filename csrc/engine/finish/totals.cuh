// Sums of warps that share what is contracted, added up in shared memory, in order; and neighbours of a result by one access.
#pragma once
#include "multiply/mma.cuh"

// What warps have summed, in shared memory: for each of WAYS warps ROWS rows of SAMPLES. BY_SAMPLES these lie side by side,
// else the rows. Every SKEW samples are 16 or 32 bytes further than they would be, so that no two lanes meet in a bank.
template <class Total, int ROWS, int SAMPLES, int WAYS, bool BY_SAMPLES, int SKEW> struct WarpTotals {
  static constexpr int kSize = sizeof(Total), kEach = 16 / kSize, kShift = (BY_SAMPLES ? 16 : 32) / kSize;
  static constexpr int kSkews = SKEW ? SAMPLES / SKEW * kShift : 0;
  static constexpr int kLine = BY_SAMPLES ? SAMPLES + 8 + kSkews : ROWS + kEach;
  static constexpr int kWay = (BY_SAMPLES ? ROWS * kLine : SAMPLES * kLine + kSkews) * kSize, kBytes = WAYS * kWay + 16;
  u32 memory;
  DEVICE u32 place(int row, int sample) const {
    const int skew = SKEW ? sample / (SKEW ? SKEW : 1) * kShift : 0;
    return memory + ((BY_SAMPLES ? row * kLine + sample : sample * kLine + row) + skew) * kSize;
  }
  // COUNT that lie side by side
  template <int COUNT> DEVICE void put(int way, int row, int sample, const Total (&x)[COUNT]) const {
    const u32 to = place(row, sample) + way * kWay;
    if constexpr (COUNT == 1) {
      store_shared(to, x[0]);
    } else if constexpr (COUNT * kSize == 8) {
      store_shared(to, Pair<Total>(x[0], x[1]));
    } else {
      UNROLL for (int i = 0; i < COUNT; i += kEach) {
        if constexpr (kSize == 8)
          store_shared(to + i * kSize, Pair<Total>(x[i], x[i + 1]));
        else
          store_u32x4(to + i * kSize, {__float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                                       __float_as_uint(x[i + 3])});
      }
    }
  }
  // The same of all ways, added in order
  template <int COUNT> DEVICE void sum(int row, int sample, Total (&sum)[COUNT]) const {
    const u32 from = place(row, sample);
    UNROLL for (int i = 0; i < COUNT; ++i) sum[i] = 0;
    UNROLL for (int way = 0; way < WAYS; ++way)
      UNROLL for (int i = 0; i < COUNT; i += kAtOnce<COUNT>) add<kAtOnce<COUNT>>(from + way * kWay + i * kSize, sum + i);
  }
  template <int COUNT> static constexpr int kAtOnce = COUNT < kEach ? COUNT : kEach;
  template <int COUNT> static DEVICE void add(u32 from, Total* sum) {
    if constexpr (COUNT == 1) {
      sum[0] += load_sum(from, Total());
    } else if constexpr (kSize == 8) {
      double x, y;
      load_f64x2(from, x, y);
      sum[0] += x, sum[1] += y;
    } else {
      u32 x[COUNT];
      if constexpr (COUNT == 2)
        load_u32x2(from, x);
      else
        load_u32x4(from, x);
      UNROLL for (int i = 0; i < COUNT; ++i) sum[i] += __uint_as_float(x[i]);
    }
  }
};

// COUNT neighbours of a result, by one access.
template <class Element, int COUNT> DEVICE void store_run(Element* to, const Sum<Element> (&x)[COUNT]) {
  if constexpr (COUNT == 1) {
    store_global(to, narrow<Element>(x[0]));
  } else if constexpr (sizeof(Element) == 8) {
    const Pair<double> both(x[0], x[1]);
    store_words<16>(to, *reinterpret_cast<const Words<16>*>(&both));
  } else {
    constexpr int kBytes = COUNT * sizeof(Element);
    u32 words[kBytes / 4];
    words_of<Element>(words, [&](int i) { return x[i]; });
    store_global<kBytes>(to, words);
  }
}
// The same to shared memory, of 16 bytes
template <class Element, int COUNT> DEVICE void store_shared_run(u32 to, const Sum<Element> (&x)[COUNT]) {
  if constexpr (sizeof(Element) == 8) {
    store_f64x2(to, x[0], x[1]);
  } else {
    u32 words[4];
    words_of<Element>(words, [&](int i) { return x[i]; });
    store_u32x4(to, words);
  }
}
// COUNT of them by accesses of RUN; `left` are there, a multiple of RUN.
template <int RUN, class Element, int COUNT> DEVICE void store_runs(Element* to, const Sum<Element> (&x)[COUNT], int left) {
  UNROLL for (int first = 0; first < COUNT; first += RUN) {
    Sum<Element> run[RUN];
    UNROLL for (int i = 0; i < RUN; ++i) run[i] = x[first + i];
    if (first < left) store_run(to + first, run);
  }
}
