// All the CPU kernels, for the instruction set of the namespace that includes this.
#include "types/vector.h"
#include "types/vector_math.h"
#include "types/convert.h"
#include "finish/pointwise.h"
#include "multiply/gemm.h"
#include "multiply/contract.h"
#include "layer/merge.h"
#include "layer/phase.h"
#include "layer/memory.h"
#include "finish/expression.h"
#include "finish/activation.h"
#include "layer/layer.h"
#include "layer/run.h"
#include "layer/forward.h"
#include "layer/backward.h"
#include "recurrent/recurrent.h"
#include "recurrent/recurrent_forward.h"
#include "recurrent/recurrent_backward.h"
#include "recurrent/decode.h"

template <class F> auto with_types(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float64: return f(double(), double());
    case DType::float32: return f(float(), float());
    case DType::bfloat16: return f(float(), BFloat16());
    default: return f(float(), Float16());
  }
}

void forward(const Problem& problem, void* y, int threads, const Parallel& parallel) {
  with_types(problem.dtype, [&](auto t, auto s) {
    run_forward(problem, Held<decltype(t)>::template as<decltype(s)>(), y, threads, parallel);
  });
}

void backward(const Problem& problem, const void* grad_y, const std::vector<void*>& gradients, int threads,
              const Parallel& parallel) {
  with_types(problem.dtype, [&](auto t, auto s) {
    using T = decltype(t);
    Backward<T>(problem, Held<T>::template as<decltype(s)>(), grad_y, gradients, threads).run(parallel);
  });
}

void recurrence(const Recurrent& problem, void* output, int threads, const Parallel& parallel) {
  with_types(problem.dtype, [&](auto t, auto s) {
    RecurrentForward<decltype(t), decltype(s)>(problem, output, threads).run(parallel);
  });
}

void recurrence_backward(const Recurrent& problem, const RecurrentGradients& gradients, int threads,
                         const Parallel& parallel) {
  with_types(problem.dtype, [&](auto t, auto s) {
    RecurrentBackward<decltype(t), decltype(s)>(problem, gradients, threads).run(parallel);
  });
}

void decode(const Decode& problem, const Decoded& made, int threads, const Parallel& parallel) {
  with_types(problem.dtype, [&](auto t, auto s) { DecodeStep<decltype(t), decltype(s)>(problem, made, threads).run(parallel); });
}

void draw(const Draw& problem, int64_t* tokens, const Parallel& parallel) {
  with_types(problem.dtype, [&](auto t, auto s) { draw_tokens<decltype(t), decltype(s)>(problem, tokens, parallel); });
}

bool has_activation(const std::string& name) { return find_activation<float>(name) != nullptr; }
