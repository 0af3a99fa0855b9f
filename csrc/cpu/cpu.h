// The fused CPU kernels: a block of samples goes through all layers, each of which is contractions, bias and activation,
// while it sits in cache. No torch in here; ops/on_cpu.cpp calls it.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../chain.h"
#include "../dtype.h"

namespace factorlayer::cpu {

// Runs tasks 0 .. count-1, in parallel where it can.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

// A stack of layers, each with the next one's inputs for outputs. Tensors are contiguous and of one dtype.
struct Problem {
  std::vector<const Chain*> layers;
  DType dtype;
  int64_t batch;
  std::vector<const void*> tensors;  // x [batch, in], then each layer's weights as in chain.h, and its bias if it has one
};

void forward(const Problem& problem, void* y, int threads, const Parallel& parallel);

// `gradients`: one for each of the problem's tensors, null where it is not wanted. Sums over samples are partial sums per
// thread, added in their order.
void backward(const Problem& problem, const void* grad_y, const std::vector<void*>& gradients, int threads,
              const Parallel& parallel);

bool has_activation(const std::string& name);

// Asks for 2 MB pages under a large new output: its first touch costs a page fault for every 4 KB otherwise,
// which takes longer than the work (32 MB: 5 ms of faults, 1 ms to write).
void prefer_huge_pages(void* memory, int64_t bytes);

// avx512, avx2 or generic: the best of this machine, or what FACTORLAYER_CPU names.
const char* instruction_set();

}  // namespace factorlayer::cpu
