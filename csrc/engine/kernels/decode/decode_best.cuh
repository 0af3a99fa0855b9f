// The best of scores, and the noise that makes a draw of it.
#pragma once
#include "finish/pointwise.cuh"
#include "kernels/decode/decode_rows.cuh"

// Of equal ones the first, NaN above all, as torch.argmax has it.
template <class Real> struct Best {
  Real score = -Real(__uint_as_float(0x7f800000));
  u32 token = ~0u;
  DEVICE void take(Real other, u32 its_token) {
    const bool is_nan = other != other, was_nan = score != score;
    const bool alike = is_nan ? was_nan : other == score;
    const bool better = alike ? its_token < token : is_nan || (!was_nan && other > score);
    score = better ? other : score, token = better ? its_token : token;
  }
  DEVICE void take_lanes() {
    UNROLL for (int by = 1; by < 32; by *= 2) take(of_lane(score, by), of_lane(token, by));
  }
};

// The first word of Philox4x32-10: maths/noise.py has the formula.
DEVICE u32 noise_bits(u64 seed, u64 step, u32 sample, u32 token) {
  u32 counter[] = {token, sample, u32(step), u32(step >> 32)}, key[] = {u32(seed), u32(seed >> 32)};
  UNROLL for (int round = 0; round < 10; ++round) {
    const u64 first = u64(0xD2511F53u) * counter[0], second = u64(0xCD9E8D57u) * counter[2];
    counter[0] = u32(second >> 32) ^ counter[1] ^ key[0], counter[1] = u32(second);
    counter[2] = u32(first >> 32) ^ counter[3] ^ key[1], counter[3] = u32(first);
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  return counter[0];
}
// What is added to a score over the temperature
template <class Real> DEVICE Real gumbel(u64 seed, u64 step, u32 sample, u32 token) {
  const Real uniform = Real(2 * (noise_bits(seed, step, sample, token) >> 9) + 1) * Real(0x1p-24f);
  return -Accurate::log(-Accurate::log(uniform));
}

// The best of `count` that get(i) gives, in all lanes of a warp
template <class Real, class Get> DEVICE Best<Real> best_of_warp(int count, const Get& get) {
  Best<Real> best;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const Best<Real> other = get(i);
    best.take(other.score, other.token);
  }
  best.take_lanes();
  return best;
}
