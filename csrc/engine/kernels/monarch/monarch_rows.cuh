// Some groups of a tensor for the samples of a tile, in shared memory: [SAMPLES][SOME][PADDED], rows of STRIDE elements. In memory
// a sample has ALL groups of P numbers: one group after the other, or, where numbers are STEP > 1 apart, side by side. What is
// not there is zero; padding is left as it is.
//
// LOAD: bytes of an access. HELD: it has elements that lie apart in shared memory, or 2 bytes, and goes through registers.
#pragma once
#include "move/memory.cuh"

template <class Element, int THREADS, int SAMPLES, int ALL, int P, int SOME, i64 STEP, int PADDED, int STRIDE, int LOAD, bool HELD>
struct MonarchRows {
  static constexpr bool kAlong = STEP == 1;
  static constexpr int kSize = sizeof(Element), kPiece = LOAD / kSize, kOfSample = SOME * P / kPiece, kCount = SAMPLES * kOfSample;
  static_assert(SOME * P % kPiece == 0 && (HELD || LOAD >= 4));

  // Element e of a sample's, as they lie in memory
  static DEVICE int place(int sample, int e) {
    return sample * STRIDE + (kAlong ? e / P * PADDED + e % P : e % SOME * PADDED + e / SOME);
  }
  static DEVICE i64 from(i64 sample, int e, int group) {
    const i64 row = sample * (i64(ALL) * P);
    return kAlong ? row + i64(group) * P + e : row + e / SOME * STEP + group + e % SOME;
  }
  static DEVICE bool has(int e, int group) {
    return ALL % SOME == 0 || (kAlong ? group * P + e < ALL * P : group + e % SOME < ALL);
  }
  // Of samples and groups from these on
  static DEVICE void load(const Element* x, i64 sample, i64 batch, int group, u32 to) {
    const int left = batch - sample < SAMPLES ? int(batch - sample) : SAMPLES;
    if constexpr (!HELD) {
      UNROLL_BY(4) for (int j = threadIdx.x; j < kCount; j += THREADS) {
        const int s = j / kOfSample, e = j % kOfSample * kPiece;
        const bool here = s < left && has(e, group);
        copy_async<LOAD>(to + place(s, e) * kSize, here ? x + from(sample + s, e, group) : x, here);
      }
    } else {
      constexpr int kTogether = 8;
      ROLL for (int begin = threadIdx.x; begin < kCount; begin += kTogether * THREADS) {
        Words<LOAD> words[kTogether];
        UNROLL for (int i = 0; i < kTogether; ++i) {
          const int j = begin + i * THREADS, s = j / kOfSample, e = j % kOfSample * kPiece;
          words[i] = {};
          if (s < left && has(e, group)) words[i] = *reinterpret_cast<const Words<LOAD>*>(x + from(sample + s, e, group));
        }
        UNROLL for (int i = 0; i < kTogether; ++i) {
          const int j = begin + i * THREADS;
          if (j >= kCount) break;
          const Element* element = reinterpret_cast<const Element*>(&words[i]);
          UNROLL for (int k = 0; k < kPiece; ++k)
            store_shared(to + place(j / kOfSample, j % kOfSample * kPiece + k) * kSize, element[k]);
        }
      }
    }
  }
};
