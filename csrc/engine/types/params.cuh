// What every kernel is given; the runtime writes the same struct.
#pragma once
#include "types/types.cuh"

struct Params {
  const void* x;
  void* y;
  const void* bias;
  i64 batch;
  const void* weights[62];
  void* sums;  // of blocks, which a second kernel adds up
};
