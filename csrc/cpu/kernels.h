// All the CPU kernels, for the instruction set of the namespace that includes this.
#include "vector.h"
#include "vector_math.h"
#include "convert.h"
#include "pointwise.h"
#include "gemm.h"
#include "contract.h"
#include "merge.h"
#include "block.h"
#include "run.h"

void forward(const Problem& problem, void* y, int threads, const Parallel& parallel) {
  with_types(problem.dtype, [&](auto t, auto s) {
    run_forward<decltype(t), decltype(s)>(problem, y, threads, parallel);
  });
}

void backward(const Problem& problem, const void* grad_y, const Gradients& wanted, int threads,
              const Parallel& parallel) {
  with_types(problem.dtype, [&](auto t, auto s) {
    run_backward<decltype(t), decltype(s)>(problem, grad_y, wanted, threads, parallel);
  });
}

bool has_activation(const std::string& name) { return find_activation<float>(name) != nullptr; }
