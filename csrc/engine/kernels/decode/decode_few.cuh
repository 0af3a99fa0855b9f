// The few best of the scores of each sample, and their tokens, from the best on: a block for each sample. Its threads have a score
// each that is the best of theirs; the best of these is next, and its thread goes on to the best of its own behind that.
//
// Pass: Element; THREADS; HELD, scores of a thread that it keeps. Tensors: scores x [samples, count], the best y [samples, few], in what sums are kept in; weights: count,
//       few, and the tokens [samples, few].
#pragma once
#include "kernels/decode/decode_best.cuh"

template <class Pass> struct DecodeFew {
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  static constexpr int kWarps = Pass::THREADS / 32, kReal = sizeof(Real), kBest = 2 * kReal;
  const Params& params;
  const u32 memory = shared_address(shared_memory);
  DEVICE explicit DecodeFew(const Params& p) : params(p) {}

  // The best so far and another one of this thread's scores, if it is behind `last`, which then is the better one; or ANY.
  template <bool ANY> static DEVICE void go_on(Best<Real>& best, Real score, u32 token, const Best<Real>& last) {
    Best<Real> first = last;
    first.take(score, token);
    if (ANY || (first.token == last.token && token != last.token)) best.take(score, token);
  }
  // The best of this thread's scores behind `last`, or of ANY: the first ones are in registers.
  template <bool ANY> DEVICE Best<Real> next(const Real (&held)[Pass::HELD], const Element* scores, i64 count, const Best<Real>& last) const {
    Best<Real> best;
    UNROLL for (int i = 0; i < Pass::HELD; ++i)
      if (const u32 token = threadIdx.x + i * Pass::THREADS; token < count) go_on<ANY>(best, held[i], token, last);
    for (i64 i = threadIdx.x + Pass::HELD * Pass::THREADS; i < count; i += Pass::THREADS) go_on<ANY>(best, widen(scores[i]), u32(i), last);
    return best;
  }

  DEVICE void run() const {
    const i64 count = reinterpret_cast<i64>(params.weights[0]), few = reinterpret_cast<i64>(params.weights[1]);
    const Element* const scores = static_cast<const Element*>(params.x) + i64(blockIdx.x) * count;
    Real* const values = static_cast<Real*>(params.y) + i64(blockIdx.x) * few;
    i64* const tokens = static_cast<i64*>(const_cast<void*>(params.weights[2])) + i64(blockIdx.x) * few;
    Real held[Pass::HELD];
    UNROLL for (int i = 0; i < Pass::HELD; ++i) {
      const i64 at = threadIdx.x + i * Pass::THREADS;
      held[i] = at < count ? widen(scores[at]) : Real(0);
    }
    Best<Real> own = next<true>(held, scores, count, {});
    ROLL for (i64 i = 0; i < few; ++i) {
      const u32 at = memory + int(i % 2) * kWarps * kBest;  // while some still read the other one
      Best<Real> best = own;
      best.take_lanes();
      if (threadIdx.x % 32 == 0) {
        store_shared(at + threadIdx.x / 32 * kBest, best.score);
        store_shared(at + threadIdx.x / 32 * kBest + kReal, best.token);
      }
      __syncthreads();
      best = best_of_warp<Real>(kWarps, [&](int warp) {
        return Best<Real>{load_sum(at + warp * kBest, Real()), load_u32(at + warp * kBest + kReal)};
      });
      if (threadIdx.x == 0) store_global(values + i, best.score), store_global(tokens + i, i64(best.token));
      if (own.token == best.token) own = next<false>(held, scores, count, best);
    }
  }
};
