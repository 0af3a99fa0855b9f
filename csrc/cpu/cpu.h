// The fused CPU kernels: a block of samples goes through all contractions, bias and activation while it
// sits in cache. No torch in here; ops.cpp calls it.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "../chain.h"
#include "../dtype.h"

namespace factorlayer::cpu {

// Runs tasks 0 .. count-1, in parallel where it can.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

// Pointers to contiguous memory of one dtype: x is [batch, in], y [batch, out], weights and bias as in chain.h.
struct Problem {
  const Chain* chain;
  DType dtype;
  int64_t batch;
  const void* x;
  const void* const* weights;
  const void* bias;  // null without one
};

// Null where a gradient is not wanted. Sums over samples are partial sums per thread, added in their order.
struct Gradients {
  void* grad_x;
  void* const* grad_weights;
  void* grad_bias;
};

void forward(const Problem& problem, void* y, int threads, const Parallel& parallel);
void backward(const Problem& problem, const void* grad_y, const Gradients& gradients, int threads,
              const Parallel& parallel);

bool has_activation(const std::string& name);

// Asks for 2 MB pages under a large new output: its first touch costs a page fault for every 4 KB otherwise,
// which takes longer than the work (32 MB: 5 ms of faults, 1 ms to write).
void prefer_huge_pages(void* memory, int64_t bytes);

// avx512, avx2 or generic: the best of this machine, or what FACTORLAYER_CPU names.
const char* instruction_set();

}  // namespace factorlayer::cpu
