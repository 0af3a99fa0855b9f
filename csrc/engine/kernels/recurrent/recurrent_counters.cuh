// Zeros where many.cuh's blocks count how often they have handed on.
//
// Pass: THREADS, COUNTERS (each of 128 bytes)
#pragma once
#include "move/memory.cuh"
#include "types/params.cuh"

template <class Pass> struct RecurrentCounters {
  const Params& params;
  DEVICE explicit RecurrentCounters(const Params& p) : params(p) {}
  DEVICE void run() const {
    for (int i = threadIdx.x; i < Pass::COUNTERS * 8; i += Pass::THREADS) store_words<16>(static_cast<char*>(params.y) + i * 16, Words<16>{});
  }
};
