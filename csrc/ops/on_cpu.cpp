// The raw ops on a CPU: tensors of any strides in, contiguous ones out, no memory shared between in and out.
#include "on_cpu.h"

#include <optional>
#include <vector>

#include "../chain.h"
#include "checks.h"

namespace factorlayer {

void parallel(int64_t count, const std::function<void(int64_t)>& task) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) task(i);
  });
}

int threads_for(double multiply_adds) {
  const double least = 1 << 19;
  return multiply_adds < least ? 1 : int(torch::stable::get_num_threads());
}

// The work of a number that a contraction reads or makes, and of one that an activation makes, in multiply-adds that take as long.
constexpr double kMovedWork = 8, kActivatedWork = 32;

int threads_for(const cpu::Problem& problem) {
  double work = 0;
  for (const Chain* layer : problem.layers) {
    for (const Contraction& c : layer->contractions)
      work += double(c.outer * c.inner) * (double(c.q * c.p) + kMovedWork * double(c.q + c.p)) * double(layer->rank);
    if (layer->activation != "identity") work += kActivatedWork * double(layer->out_features());
  }
  return threads_for(work * double(problem.batch));
}

void run_forward(const cpu::Problem& problem, const Tensor& y) {
  cpu::prefer_huge_pages(y.mutable_data_ptr(), y.numel() * int64_t(y.element_size()));
  if (problem.batch) cpu::forward(problem, y.mutable_data_ptr(), threads_for(problem), parallel);
}

namespace {

// A call's tensors, checked, as the kernels take them.
struct Call {
  std::vector<Tensor> tensors;  // x, then each layer's weights and bias, then what x is, if it is several
  cpu::Problem problem;

  Call(const Tensor& x, const std::vector<Tensor>& weights, const std::optional<Tensor>& bias, const Chain& chain) {
    begin(x, weights.size() + 2);
    check_inputs(chain, x, weights, bias);
    append(chain);
    for (const Tensor& weight : weights) append(weight);
    if (bias) append(*bias);
  }

  Call(const Tensor& x, const std::vector<Tensor>& given, const Stack& stack) {
    begin(x, given.size() + 1);
    check_layers(stack, x, given);
    for (const Chain& layer : stack.layers) append(layer);
    for (const Tensor& tensor : given) append(tensor);
  }

  // A call with an x that is several tensors. The first of them stands in the place of x.
  Call(const std::vector<Tensor>& inputs, const std::vector<Tensor>& given, const Stack& stack) {
    STD_TORCH_CHECK(!inputs.empty(), "factorlayer: x is no tensor at all");
    begin(inputs[0], inputs.size() + given.size() + 1);
    check_layers(stack, inputs, given);
    for (const Chain& layer : stack.layers) append(layer);
    for (const Tensor& tensor : given) append(tensor);
    for (const Tensor& input : inputs)
      problem.inputs.push_back(tensors.emplace_back(as_contiguous(input)).const_data_ptr());
  }

  // A call with the tensors of all layers in one.
  Call(const Tensor& x, const Tensor& frozen, const Stack& stack) {
    begin(x, 2);
    check_frozen(stack, x, frozen, 0);
    const char* first = static_cast<const char*>(tensors.emplace_back(frozen).const_data_ptr());
    for (size_t i = 0; i + 1 < stack.places.size(); ++i)
      problem.tensors.push_back(first + stack.places[i] * bytes_of(problem.dtype));
    for (const Chain& layer : stack.layers) append(layer);
  }

  int64_t out_features() const { return problem.layers.back()->out_features(); }

 private:
  void begin(const Tensor& x, size_t count) {
    STD_TORCH_CHECK(x.is_cpu(), "factorlayer: x must be a CPU tensor, as the others are");
    tensors.reserve(count);
    problem.tensors.reserve(count);
    problem.dtype = dtype_of(x);
    problem.batch = x.size(0);
    append(x);
  }

  void append(const Tensor& t) { problem.tensors.push_back(tensors.emplace_back(as_contiguous(t)).const_data_ptr()); }

  void append(const Chain& layer) {
    STD_TORCH_CHECK(layer.program || cpu::has_activation(layer.activation), "factorlayer: unknown stage ",
                    layer.activation);
    problem.layers.push_back(&layer);
  }
};

Tensor forward_of(const Call& call) {
  Tensor y = new_matrix(call.tensors[0], call.problem.batch, call.out_features());
  run_forward(call.problem, y);
  return y;
}

// The gradients of the tensors at the places `wanted`, in that order.
std::vector<Tensor> run_backward(const Call& call, const Tensor& grad_y, const std::vector<int64_t>& wanted) {
  const Tensor& x = call.tensors[0];
  check(grad_y, x, x.size(0) * call.out_features(), "grad_y");
  const Tensor read = as_contiguous(grad_y);
  std::vector<Tensor> gradients;
  std::vector<void*> to(call.tensors.size());
  for (int64_t place : wanted) {
    const Tensor& gradient = gradients.emplace_back(torch::stable::empty_like(call.tensors[place]));
    to[place] = gradient.mutable_data_ptr();
    cpu::prefer_huge_pages(to[place], gradient.numel() * int64_t(gradient.element_size()));
  }
  if (x.size(0)) {
    cpu::backward(call.problem, read.const_data_ptr(), to, threads_for(call.problem), parallel);
  } else {
    for (Tensor& gradient : gradients) torch::stable::zero_(gradient);
  }
  return gradients;
}

Tensor forward(const Tensor& x, const std::vector<Tensor>& weights, const std::optional<Tensor>& bias,
               const Text& chain) {
  return forward_of(Call(x, weights, bias, find_chain(chain.value)));
}

// `wanted` has a bit for each gradient: 1 for x, 2 for the bias, 4 << i for weight i. They come in that order.
constexpr size_t kMostWanted = 61;  // weights: bit 63 would be its sign. autograd/layer_ops.py has the same number

std::vector<Tensor> backward(const Tensor& grad_y, const Tensor& x, const std::vector<Tensor>& weights,
                             const std::optional<Tensor>& bias, const Text& chain, int64_t wanted) {
  const Call call(x, weights, bias, find_chain(chain.value));
  STD_TORCH_CHECK(weights.size() <= kMostWanted, "factorlayer: `wanted` has bits for ", kMostWanted, " weights at most, the ",
                  "chain has ", weights.size(), "; factorlayer::stack_backward takes places in their stead");
  STD_TORCH_CHECK(wanted >= 0 && wanted >> (weights.size() + 2) == 0 && (bias || !(wanted & 2)),
                  "factorlayer: a gradient is wanted of something that was not given");
  std::vector<int64_t> places;
  if (wanted & 1) places.push_back(0);
  if (wanted & 2) places.push_back(int64_t(weights.size()) + 1);
  for (size_t i = 0; i < weights.size(); ++i)
    if (wanted >> (i + 2) & 1) places.push_back(int64_t(i) + 1);
  return run_backward(call, grad_y, places);
}

// `tensors` has each layer's weights in the order of their index, and its bias if it has one.
Tensor stack_forward(const Tensor& x, const std::vector<Tensor>& tensors, const Text& stack) {
  return forward_of(Call(x, tensors, find_stack(stack.value)));
}

// `wanted` has the places of tensors in (x, *tensors), ascending. Their gradients come in that order.
std::vector<Tensor> stack_backward(const Tensor& grad_y, const Tensor& x, const std::vector<Tensor>& tensors,
                                   const Text& stack, const std::vector<int64_t>& wanted) {
  const Call call(x, tensors, find_stack(stack.value));
  check_wanted(wanted, tensors.size());
  return run_backward(call, grad_y, wanted);
}

// `frozen` has the tensors of all layers, side by side.
Tensor stack_frozen(const Tensor& x, const Tensor& frozen, const Text& stack) {
  return forward_of(Call(x, frozen, find_stack(stack.value)));
}

// stack_forward and stack_backward for an x that is several tensors: `wanted` has places in (*inputs, *tensors).
Tensor inputs_forward(const std::vector<Tensor>& inputs, const std::vector<Tensor>& tensors, const Text& stack) {
  return forward_of(Call(inputs, tensors, find_stack(stack.value)));
}

std::vector<Tensor> inputs_backward(const Tensor& grad_y, const std::vector<Tensor>& inputs,
                                    const std::vector<Tensor>& tensors, const Text& stack,
                                    const std::vector<int64_t>& wanted) {
  const Call call(inputs, tensors, find_stack(stack.value));
  check_wanted(wanted, inputs.size() + tensors.size() - 1);
  std::vector<int64_t> places;
  const int64_t count = int64_t(inputs.size());
  for (int64_t place : wanted) places.push_back(place < count ? 1 + int64_t(tensors.size()) + place : 1 + place - count);
  return run_backward(call, grad_y, places);
}

}  // namespace
}  // namespace factorlayer

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CPU, m) {
  m.impl("forward", TORCH_BOX(&factorlayer::forward));
  m.impl("backward", TORCH_BOX(&factorlayer::backward));
  m.impl("inputs_forward", TORCH_BOX(&factorlayer::inputs_forward));
  m.impl("inputs_backward", TORCH_BOX(&factorlayer::inputs_backward));
  m.impl("stack_forward", TORCH_BOX(&factorlayer::stack_forward));
  m.impl("stack_backward", TORCH_BOX(&factorlayer::stack_backward));
  m.impl("stack_frozen", TORCH_BOX(&factorlayer::stack_frozen));
}
