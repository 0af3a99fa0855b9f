// A token for each sample, drawn by scores that are there: a block for each sample, whose best score with noise is taken. With PLACED
// scores are those of some tokens alone.
//
// Pass: Element; THREADS; PLACED. Tensors: scores x [samples, count], tokens y; weights: temperature, count, the tokens that scores are
//       of, and the seed, the number of the step, which the last block makes one more, and a counter that is zero between kernels.
#pragma once
#include "kernels/decode/decode_best.cuh"

template <class Pass> struct DecodeDraw {
  using Element = typename Pass::Element;
  using Real = Sum<Element>;
  static constexpr int kWarps = Pass::THREADS / 32, kReal = sizeof(Real), kBest = 2 * kReal;
  const Params& params;
  const u32 memory = shared_address(shared_memory);
  DEVICE explicit DecodeDraw(const Params& p) : params(p) {}

  DEVICE void run() const {
    const u64 bits = reinterpret_cast<u64>(params.weights[0]);
    const Real temperature = Real(double_of(u32(bits), u32(bits >> 32)));
    const i64 count = reinterpret_cast<i64>(params.weights[1]), first = i64(blockIdx.x) * count;
    const Element* const scores = static_cast<const Element*>(params.x) + first;
    const i64* const places = static_cast<const i64*>(params.weights[2]) + first;  // maybe of nothing
    u64* const numbers = static_cast<u64*>(const_cast<void*>(params.weights[3]));
    const u64 seed = numbers[0], step = numbers[1];
    Best<Real> best;  // its token is the place
    for (i64 i = threadIdx.x; i < count; i += Pass::THREADS) {
      const u32 token = u32(Pass::PLACED ? places[i] : i);
      best.take(widen(scores[i]) / temperature + gumbel<Real>(seed, step, blockIdx.x, token), u32(i));
    }
    best.take_lanes();
    if (threadIdx.x % 32 == 0) {
      store_shared(memory + threadIdx.x / 32 * kBest, best.score);
      store_shared(memory + threadIdx.x / 32 * kBest + kReal, best.token);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = best_of_warp<Real>(kWarps, [&](int warp) {
      return Best<Real>{load_sum(memory + warp * kBest, Real()), load_u32(memory + warp * kBest + kReal)};
    });
    if (threadIdx.x > 0) return;
    store_global(static_cast<i64*>(params.y) + blockIdx.x, Pass::PLACED ? places[best.token] : i64(best.token));
    u32* const counter = reinterpret_cast<u32*>(numbers + 2);
    if (count_up(counter) + 1 != gridDim.x) return;  // others have not read the step's number yet
    store_global(counter, u32(0));
    store_global(numbers + 1, step + 1);
  }
};
