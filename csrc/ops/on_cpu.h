// How the CPU's kernels are run: on PyTorch's threads.
#pragma once
#include <cstdint>
#include <functional>

#include "../cpu/cpu.h"
#include "tensors.h"

namespace factorlayer {

void parallel(int64_t count, const std::function<void(int64_t)>& task);

// How many threads to use: one for work that takes less time than waking another.
int threads_for(double multiply_adds);
int threads_for(const cpu::Problem& problem);

void run_forward(const cpu::Problem& problem, const Tensor& y);

}  // namespace factorlayer
