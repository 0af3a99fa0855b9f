// The raw ops on a GPU that make y, of a layer and of a stack.
#include <algorithm>
#include <optional>
#include <vector>

#include "../chain.h"
#include "checks.h"
#include "launch.h"

namespace factorlayer {
namespace {

// Says where kernels find the tensors that x is: the first in x's place, the others as weights from the `second` on.
cuda::Rows add_inputs(const Chain& chain, const std::vector<Tensor>& inputs, size_t second, cuda::Params& params,
                      std::vector<Tensor>& kept) {
  cuda::Rows rows{second, {}};
  for (size_t i = 1; i < chain.inputs.size(); ++i) {
    params.weights[second + i - 1] = kept.emplace_back(aligned(as_contiguous(inputs[i]))).const_data_ptr();
    rows.bytes.push_back(chain.inputs[i] * int64_t(inputs[i].element_size()));
  }
  return rows;
}

// The y of a chain for x, or for the tensors that x is, and behind it the states that the chain keeps for its gradients.
std::vector<Tensor> run_chain(const Chain& chain, const std::vector<Tensor>& inputs, const std::vector<Tensor>& weights,
                              const std::optional<Tensor>& bias, const Text& text) {
  const Tensor& x = inputs[0];
  const size_t second = weights.size() + 1, others = inputs.size() - 1 + chain.kept.size();
  const size_t used = others ? second + others : weights.size();
  STD_TORCH_CHECK(used <= cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS,
                  " weights, inputs and states at most, the chain has ", used);
  const int64_t batch = x.size(0);
  std::vector<Tensor> made{new_matrix(x, batch, chain.out_features())};
  for (const int64_t features : chain.kept) made.push_back(new_matrix(x, batch, features));
  if (!batch) return made;

  std::vector<Tensor> kept;
  kept.reserve(weights.size() + inputs.size() + 5);
  auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
  cuda::Params params;
  params.x = address(x);
  params.y = made[0].mutable_data_ptr();
  params.bias = bias ? address(*bias) : nullptr;
  params.batch = batch;
  for (size_t i = 0; i < weights.size(); ++i) params.weights[i] = address(weights[i]);
  if (weights.size() < cuda::MAX_WEIGHTS) params.weights[weights.size()] = params.bias;  // where a stack's layer has it
  cuda::Rows rows = add_inputs(chain, inputs, second, params, kept);
  for (size_t i = 0; i < chain.kept.size(); ++i) {
    params.weights[second + i] = made[1 + i].mutable_data_ptr();
    rows.bytes.push_back(chain.kept[i] * int64_t(x.element_size()));
  }
  run_on_cuda(text, &chain, x, x.size(1), chain.out_features(), params, kept, nullptr, nullptr, rows);
  return made;
}

Tensor forward_cuda(const Tensor& x, const std::vector<Tensor>& weights, const std::optional<Tensor>& bias,
                    const Text& text) {
  const Chain& chain = find_chain(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_inputs(chain, x, weights, bias);
  return run_chain(chain, {x}, weights, bias, text)[0];
}

// The y of a chain, and behind it the states that it keeps for its gradients.
std::vector<Tensor> forward_states_cuda(const Tensor& x, const std::vector<Tensor>& weights, const std::optional<Tensor>& bias,
                                        const Text& text) {
  const Chain& chain = find_chain(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  STD_TORCH_CHECK(!chain.kept.empty() && !chain.backward && !chain.slope, "factorlayer: the chain should be a layer and \"kept\"");
  check_x(chain, x);
  check_layer(chain, x, weights.data(), weights.size(), bias ? &*bias : nullptr);
  return run_chain(chain, {x}, weights, bias, text);
}

// What the last layer makes, or what each layer does, of layers that one kernel takes, as the planner knows.
std::vector<Tensor> run_layers(const Stack& stack, const std::vector<Tensor>& inputs, const std::vector<Tensor>& tensors,
                               const Text& text, bool states) {
  const Chain& chain = stack.layers.front();
  const Tensor& x = inputs[0];
  const size_t first = states ? 0 : stack.layers.size() - 1;
  const size_t second = tensors.size() + stack.layers.size() - 1 - first, used = second + inputs.size() - 1;
  STD_TORCH_CHECK(used <= cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS,
                  " weights, biases, states and inputs at most, the stack has ", used);
  const int64_t batch = x.size(0);
  std::vector<Tensor> made;
  for (size_t i = first; i < stack.layers.size(); ++i) made.push_back(new_matrix(x, batch, stack.layers[i].out_features()));
  if (!batch) return made;

  std::vector<Tensor> kept;
  kept.reserve(tensors.size() + inputs.size() + 4);
  auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
  cuda::Params params{};
  params.x = address(x);
  params.y = made.back().mutable_data_ptr();
  params.batch = batch;
  for (size_t i = 0; i < tensors.size(); ++i) params.weights[i] = address(tensors[i]);
  for (size_t i = 0; i + 1 < made.size(); ++i) params.weights[tensors.size() + i] = made[i].mutable_data_ptr();
  const cuda::Rows rows = add_inputs(chain, inputs, second, params, kept);
  const int64_t out = stack.layers.back().out_features();
  run_on_cuda(text, &find_stack(text.value), x, x.size(1), out, params, kept, nullptr, nullptr, rows);
  return made;
}

// The y of a stack that one kernel takes, or of a single layer.
Tensor run_stack(const Stack& stack, const std::vector<Tensor>& inputs, const std::vector<Tensor>& tensors, const Text& text) {
  if (stack.layers.size() > 1) return run_layers(stack, inputs, tensors, text, false).back();
  const bool has_bias = stack.layers[0].bias;  // a chain's plan
  const std::optional<Tensor> bias = has_bias ? std::optional<Tensor>(tensors.back()) : std::nullopt;
  return run_chain(find_chain(text.value), inputs, {tensors.begin(), tensors.end() - has_bias}, bias, text)[0];
}

Tensor stack_forward_cuda(const Tensor& x, const std::vector<Tensor>& tensors, const Text& text) {
  const Stack& stack = find_stack(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_layers(stack, x, tensors);
  return run_stack(stack, {x}, tensors, text);
}

// The y of an x that is several tensors.
Tensor inputs_forward_cuda(const std::vector<Tensor>& inputs, const std::vector<Tensor>& tensors, const Text& text) {
  const Stack& stack = find_stack(text.value);
  STD_TORCH_CHECK(!inputs.empty() && inputs[0].is_cuda(), "factorlayer: inputs must be CUDA tensors, as the others are");
  check_layers(stack, inputs, tensors);
  return run_stack(stack, inputs, tensors, text);
}

// What each layer of a stack makes, if one kernel takes the stack.
std::vector<Tensor> stack_states_cuda(const Tensor& x, const std::vector<Tensor>& tensors, const Text& text) {
  const Stack& stack = find_stack(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_layers(stack, x, tensors);
  return run_layers(stack, {x}, tensors, Text{text.value + " | states"}, true);
}

// Bytes of a frozen stack's prepared weights: `all` that the plans of all classes of batches need, and those `before` one class's.
struct Prepared {
  int64_t all = 0, before = 0;
  bool own = false;  // whether that one needs any

  Prepared(const Stack& stack, const Text& text, DType dtype, int device, int batch_class) {
    for (int each = 0; each < cuda::BATCH_CLASSES; ++each) {
      const int64_t bytes = program_of({&stack, dtype, each, device}, text.value).plan.prepared;
      if (each == batch_class) before = all, own = bytes;
      all += (bytes + 255) / 256 * 256;  // as what comes before
    }
  }
};

// Says where the tensors of a frozen stack's layers are.
void set_weights(cuda::Params& params, const Stack& stack, const char* first, int64_t bytes) {
  const size_t count = stack.places.size() - 1;
  STD_TORCH_CHECK(count <= cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS,
                  " weights and biases at most, the stack has ", count);
  for (size_t i = 0; i < count; ++i) params.weights[i] = first + stack.places[i] * bytes;
}

// The weights as the kernels for each class of batches prepare them, class by class. `values` has the tensors of all layers.
Tensor stack_prepare_cuda(const Tensor& values, const Text& text) {
  const Stack& stack = find_stack(text.value);
  STD_TORCH_CHECK(values.is_cuda(), "factorlayer: frozen layers must be a CUDA tensor for kernels to prepare");
  check_values(stack, values, 0);
  const DType dtype = dtype_of(values);
  const int index = values.get_device_index();
  cuda::Params params{};
  params.batch = 1;
  set_weights(params, stack, static_cast<const char*>(values.const_data_ptr()), bytes_of(dtype));
  Tensor made = new_matrix(values, 1, Prepared(stack, text, dtype, index, 0).all / bytes_of(dtype), -1, 1);
  const cuda::Device& device = cuda::find_device(index);
  const cuda::ContextScope scope(device);
  for (int each = 0; each < cuda::BATCH_CLASSES; ++each) {
    const Prepared prepared(stack, text, dtype, index, each);
    if (!prepared.own) continue;
    void* scratch[MOST_SCRATCH] = {};
    scratch[SUMS] = static_cast<char*>(made.mutable_data_ptr()) + prepared.before;
    const cuda::Program& program = program_of({&stack, dtype, each, index}, text.value);
    cuda::run(program, cuda::Part::weights, 0, 0, device, params, scratch, nullptr, current_stream(index));
  }
  return made;
}

// The y of a frozen stack. `frozen` has the tensors of all layers, side by side, and behind them what stack_prepare makes of them.
Tensor stack_frozen_cuda(const Tensor& x, const Tensor& frozen, const Text& text) {
  const Stack& stack = find_stack(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  const int64_t batch = x.size(0), out = stack.layers.back().out_features();
  const Prepared prepared(stack, text, dtype_of(x), x.get_device_index(), cuda::batch_class(batch));
  check_frozen(stack, x, frozen, prepared.all);
  Tensor y = new_matrix(x, batch, out);
  if (!batch) return y;

  std::vector<Tensor> kept{aligned(as_contiguous(x))};
  char* first = static_cast<char*>(frozen.mutable_data_ptr());
  const int64_t bytes = int64_t(x.element_size());
  cuda::Params params{};
  params.x = kept[0].const_data_ptr();
  params.y = y.mutable_data_ptr();
  params.batch = batch;
  set_weights(params, stack, first, bytes);
  void* own = prepared.own ? first + stack.places.back() * bytes + prepared.before : nullptr;
  run_on_cuda(text, &stack, x, x.size(1), out, params, kept, nullptr, own);
  return y;
}

}  // namespace
}  // namespace factorlayer

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CUDA, m) {
  m.impl("forward", TORCH_BOX(&factorlayer::forward_cuda));
  m.impl("forward_states", TORCH_BOX(&factorlayer::forward_states_cuda));
  m.impl("inputs_forward", TORCH_BOX(&factorlayer::inputs_forward_cuda));
  m.impl("stack_forward", TORCH_BOX(&factorlayer::stack_forward_cuda));
  m.impl("stack_states", TORCH_BOX(&factorlayer::stack_states_cuda));
  m.impl("stack_prepare", TORCH_BOX(&factorlayer::stack_prepare_cuda));
  m.impl("stack_frozen", TORCH_BOX(&factorlayer::stack_frozen_cuda));
}
