// The gradients of weights that were taken as one, from that of their product: a weight's element is in the product as often as
// the others have elements, dF[q', p'] = sum dW[q, p] x (what the others give there). A warp makes one after the other, always in
// the same order.
//
// Pass: Element, COUNT (of all weights' elements), BEGIN (where their gradients begin, behind other ones), gradient(), which says what parts the products have
#pragma once
#include "move/memory.cuh"
#include "types/params.cuh"

template <class Pass> struct FactorGradients {
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  static constexpr int kWarps = 8;
  const Params& params;
  const int warp, lane;
  DEVICE FactorGradients(const Params& given) : params(given), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  // Element `at` of all, if it is one of the TO-th and following, [Q, P]: of a weight with BEHIND_Q x BEHIND_P behind it in the
  // product [ALL_Q, ALL_P], whose gradient begins at FROM.
  template <int Q, int P, int ALL_Q, int ALL_P, int BEHIND_Q, int BEHIND_P, int FROM, int TO, class Others>
  DEVICE void part(int at, Others others) const {
    if (at < TO || at >= TO + Q * P) return;
    constexpr int kColumns = ALL_P / P, kTerms = ALL_Q / Q * kColumns;
    const Real* x = static_cast<const Real*>(params.x) + FROM;
    Real sum = 0;
    UNROLL_BY(4) for (int j = lane; j < kTerms; j += 32) {
      const int q = whole<Q, BEHIND_Q>(j / kColumns, (at - TO) / P), p = whole<P, BEHIND_P>(j % kColumns, (at - TO) % P);
      sum += x[q * ALL_P + p] * others(q, p);
    }
    const u32 sums = shared_address(shared_memory) + warp * 32 * sizeof(Real);
    store_shared(sums + lane * sizeof(Real), sum);
    __syncwarp();
    if (lane == 0) {
      for (int i = 1; i < min(32, kTerms); ++i) sum += load_sum(sums + i * sizeof(Real), sum);
      store_global(static_cast<Element*>(params.y) + Pass::BEGIN + at, narrow<Element>(sum));
    }
    __syncwarp();
  }
  // The index in a product, from the others' and the part's own.
  template <int SIZE, int BEHIND> static DEVICE int whole(int others, int own) {
    return others / BEHIND * (SIZE * BEHIND) + own * BEHIND + others % BEHIND;
  }

  DEVICE void run() const {
    for (int at = blockIdx.y * kWarps + warp; at < Pass::COUNT; at += gridDim.y * kWarps) Pass::gradient(*this, at);
  }
};
