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

// f(how the tensors of a dtype hold what is computed in)
template <class F> void with_held(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float64: return f(Held<double>::as<double>());
    case DType::float32: return f(Held<float>::as<float>());
    case DType::bfloat16: return f(Held<float>::as<BFloat16>());
    default: return f(Held<float>::as<Float16>());
  }
}

void forward(const Problem& problem, void* y, int threads, const Parallel& parallel) {
  with_held(problem.dtype, [&](auto held) { run_forward(problem, held, y, threads, parallel); });
}

void backward(const Problem& problem, const void* grad_y, const std::vector<void*>& gradients, int threads,
              const Parallel& parallel) {
  with_held(problem.dtype, [&](auto held) { Backward(problem, held, grad_y, gradients, threads).run(parallel); });
}

void recurrence(const Recurrent& problem, void* output, int threads, const Parallel& parallel) {
  with_held(problem.dtype, [&](auto held) { RecurrentForward(problem, held, output, threads).run(parallel); });
}

void recurrence_backward(const Recurrent& problem, const RecurrentGradients& gradients, int threads,
                         const Parallel& parallel) {
  with_held(problem.dtype, [&](auto held) { RecurrentBackward(problem, held, gradients, threads).run(parallel); });
}

void decode(const Decode& problem, const Decoded& made, int threads, const Parallel& parallel) {
  with_held(problem.dtype, [&](auto held) { DecodeStep(problem, held, made, threads).run(parallel); });
}

void draw(const Draw& problem, int64_t* tokens, const Parallel& parallel) {
  with_held(problem.dtype, [&](auto held) { draw_tokens(problem, held, tokens, parallel); });
}

bool has_activation(const std::string& name) { return find_activation<float>(name) != nullptr; }
