// The raw ops on a GPU that make gradients, of a layer and of a stack.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "../chain.h"
#include "checks.h"
#include "launch.h"

namespace factorlayer {
namespace {

// The gradient of what a chain activates, from grad_y; or, with "through", the gradient of what was activated, from that of
// its result. With `sums`, sums over samples go there; the gradient may then be x itself, turned, and `beside` is x as well.
Tensor make_slopes(const Tensor& beside, const Tensor& x, const std::vector<Tensor>& weights,
                   const std::optional<Tensor>& bias, const Text& text, std::optional<Tensor>* sums) {
  const Chain& chain = find_chain(text.value);
  const int64_t features = chain.out_features();
  STD_TORCH_CHECK((chain.slope || chain.through || (chain.sums && chain.turned)) && !chain.parameters(),
                  "factorlayer: the chain should have an activation without parameters and \"slope\" or \"through\"",
                  sums ? ", or \"sums\" and \"turn\"" : "");
  STD_TORCH_CHECK(bool(chain.sums) == bool(sums), "factorlayer: a chain with \"sums\" is for the op that returns these");
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_x(chain, x);
  check_layer(chain, x, weights.data(), weights.size(), bias ? &*bias : nullptr);
  check(beside, x, x.size(0) * features, "what is read beside x");
  STD_TORCH_CHECK(weights.size() < cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS - 1,
                  " weights at most, the chain has ", weights.size());
  Tensor gradient = new_matrix(x, x.size(0), features);
  if (sums) *sums = new_matrix(x, 1, features, -1, 1);
  if (!x.size(0)) {
    if (sums) torch::stable::zero_(**sums);
    return gradient;
  }

  std::vector<Tensor> kept;
  kept.reserve(weights.size() + 6);
  auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
  cuda::Params params{};
  params.x = address(x);
  params.y = gradient.mutable_data_ptr();
  params.bias = bias ? address(*bias) : nullptr;
  params.batch = x.size(0);
  for (size_t i = 0; i < weights.size(); ++i) params.weights[i] = address(weights[i]);
  params.weights[weights.size()] = address(beside);
  const cuda::Rows rows{weights.size(), {features * bytes_of(dtype_of(x))}};
  run_on_cuda(text, &chain, x, x.size(1), features, params, kept, sums ? (*sums)->mutable_data_ptr() : nullptr, nullptr, rows);
  return gradient;
}

Tensor slopes_cuda(const Tensor& beside, const Tensor& x, const std::vector<Tensor>& weights,
                   const std::optional<Tensor>& bias, const Text& text) {
  return make_slopes(beside, x, weights, bias, text, nullptr);
}

// The gradient that slopes_cuda makes, and its sums over the samples: the gradient of a bias.
std::tuple<Tensor, Tensor> slopes_and_sums_cuda(const Tensor& beside, const Tensor& x, const std::vector<Tensor>& weights,
                                                const std::optional<Tensor>& bias, const Text& text) {
  std::optional<Tensor> sums;
  Tensor gradient = make_slopes(beside, x, weights, bias, text, &sums);
  return {gradient, *sums};
}

// Sums over the samples: the gradient of a bias.
Tensor sums_cuda(const Tensor& grad_y, const Text& text) {
  const Chain& chain = find_chain(text.value);
  Tensor sums = new_matrix(grad_y, 1, chain.sums, -1, 1);
  if (!grad_y.size(0)) return torch::stable::zero_(sums);

  const Tensor given = aligned(as_contiguous(grad_y));
  std::vector<Tensor> kept;
  cuda::Params params{};
  params.x = given.const_data_ptr();
  params.y = sums.mutable_data_ptr();
  params.batch = grad_y.size(0);
  run_on_cuda(text, &chain, grad_y, grad_y.size(1), chain.sums, params, kept);
  return sums;
}

// The gradient of the chain's one weight, [.. q, p] as [rows, p], from the state before its contraction and the gradient behind
// it. If the chain has a bias, all is one row, which ends in the bias's gradient. If the chain is "sums", it is the gradient of a
// bias alone, and x is grad_y as well.
Tensor weight_gradient_cuda(const Tensor& grad_y, const Tensor& x, const Text& text) {
  const Chain& chain = find_chain(text.value);
  STD_TORCH_CHECK(chain.gradient || (chain.sums && !chain.slope && !chain.through && !chain.turned),
                  "factorlayer: the chain should be a contraction and \"gradient\", or \"sums\"");
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2 && x.size(1) == chain.in_features(), "factorlayer: x must be [batch, ",
                  chain.in_features(), "], a CUDA tensor");
  check(grad_y, x, x.size(0) * chain.out_features(), "grad_y");
  if (chain.sums) return sums_cuda(grad_y, text);
  const Contraction& c = chain.contractions[0];
  const int64_t count = c.weight_size() + (chain.bias ? c.q : 0), columns = chain.bias ? count : c.p;
  Tensor gradient = new_matrix(x, count / columns, columns);
  if (!x.size(0)) return torch::stable::zero_(gradient);

  std::vector<Tensor> kept;
  kept.reserve(3);
  auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
  cuda::Params params{};
  params.x = address(x);
  params.y = gradient.mutable_data_ptr();
  params.batch = x.size(0);
  params.weights[0] = address(grad_y);
  run_on_cuda(text, &chain, x, x.size(1), chain.out_features(), params, kept);
  return gradient;
}

// Checks the weights of a chain that makes all gradients, behind which the states stand that it has kept, and counts their elements.
int64_t check_weights(const Chain& chain, const Tensor& x, const std::vector<Tensor>& weights) {
  const size_t of_chain = chain.contractions.size(), states = chain.kept.size();
  STD_TORCH_CHECK(weights.size() == of_chain + states && weights.size() + 1 < cuda::MAX_WEIGHTS, "factorlayer: the chain has ",
                  of_chain, " weights and ", states, " kept states, ", weights.size(), " were given");
  for (size_t i = 0; i < states; ++i) check(weights[of_chain + i], x, x.size(0) * chain.kept[i], "a kept state");
  int64_t count = 0;
  for (const Contraction& c : chain.contractions) {
    STD_TORCH_CHECK(c.weight < int64_t(of_chain), "factorlayer: the chain names weight ", c.weight,
                    ", which was not given");
    check(weights[c.weight], x, chain.rank * c.weight_size(), "a weight");
    count += chain.rank * c.weight_size();
  }
  return count;
}

// Appends the gradients of weights, which lie side by side in `whole`.
void add_parts(const Tensor& whole, const Tensor* weights, size_t count, std::vector<Tensor>& gradients) {
  int64_t from = 0;
  for (size_t i = 0; i < count; from += weights[i++].numel()) gradients.push_back(part_like(whole, from, weights[i]));
}

// The gradients of x and of a bias, if their bits 1 and 2 are set, and of all weights, by one plan. Those of weights lie side by
// side. The plan of a chain with a bias makes the bias's gradient behind them, and leaves out that of x if it can. States that the
// chain has kept are given behind the weights.
std::vector<Tensor> gradients_cuda(const Tensor& grad_y, const Tensor& x, const std::vector<Tensor>& weights,
                                   const Text& text, int64_t wanted) {
  const Chain& chain = find_chain(text.value);
  STD_TORCH_CHECK(chain.backward, "factorlayer: the chain should be contractions and \"backward\"");
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2 && x.size(1) == chain.in_features(), "factorlayer: x must be [batch, ",
                  chain.in_features(), "], a CUDA tensor");
  check(grad_y, x, x.size(0) * chain.out_features(), "grad_y");
  STD_TORCH_CHECK(grad_y.dim() == 2, "factorlayer: grad_y must be [batch, ", chain.out_features(), "]");
  check_slabs(chain, x);
  STD_TORCH_CHECK(chain.inputs.empty(), "factorlayer: x is several tensors by \"inputs\", which this op does not take");
  const int64_t count = check_weights(chain, x, weights);
  const bool of_x = wanted & 1, of_bias = wanted & 2;
  std::optional<Tensor> grad_x;
  if (of_x || !chain.bias) grad_x = new_matrix(x, x.size(0), chain.in_features());
  Tensor others = new_matrix(x, 1, count + (chain.bias ? chain.out_features() : 0));
  std::vector<Tensor> gradients;
  gradients.reserve(weights.size() + 2);
  if (of_x) gradients.push_back(*grad_x);
  if (of_bias && chain.bias) gradients.push_back(part(others, count, {chain.out_features()}));
  if (of_bias && !chain.bias) gradients.push_back(sums_cuda(grad_y, {"sums " + std::to_string(chain.out_features())}));
  const size_t own = chain.contractions.size();
  add_parts(others, weights.data(), own, gradients);
  if (!x.size(0)) {
    torch::stable::zero_(others);
    return gradients;
  }

  std::vector<Tensor> kept;
  kept.reserve(weights.size() + 3);
  auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
  cuda::Params params{};
  params.x = address(x);
  params.y = grad_x ? grad_x->mutable_data_ptr() : nullptr;
  params.batch = x.size(0);
  for (size_t i = 0; i < weights.size(); ++i) params.weights[i < own ? i : i + 2] = address(weights[i]);
  params.weights[own] = address(grad_y);
  params.weights[own + 1] = others.mutable_data_ptr();  // for a pass that makes x's as well
  run_on_cuda(text, &chain, x, x.size(1), chain.out_features(), params, kept, others.mutable_data_ptr());
  return gradients;
}

// All gradients of a layer whose x is several tensors: theirs, then those of the weights, by one plan. A kernel finds the first
// input and its gradient in the places of x and y. Behind the weights it finds grad_y, what it makes for a pass behind it, and
// the other inputs and their gradients.
std::vector<Tensor> inputs_gradients_cuda(const Tensor& grad_y, const std::vector<Tensor>& inputs,
                                          const std::vector<Tensor>& weights, const Text& text) {
  const Chain& chain = find_chain(text.value);
  STD_TORCH_CHECK(chain.backward && !chain.inputs.empty(),
                  "factorlayer: the chain should be inputs, contractions and \"backward\"");
  check_several(chain, inputs);
  const Tensor& x = inputs[0];
  const size_t second = weights.size() + 2, used = second + 2 * (inputs.size() - 1);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: inputs must be CUDA tensors, as the others are");
  STD_TORCH_CHECK(used <= cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS,
                  " weights, inputs and gradients of these at most, they are ", used);
  const int64_t count = check_weights(chain, x, weights);
  check(grad_y, x, x.size(0) * chain.out_features(), "grad_y");
  STD_TORCH_CHECK(grad_y.dim() == 2, "factorlayer: grad_y must be [batch, ", chain.out_features(), "]");
  std::vector<Tensor> gradients;
  for (const Tensor& input : inputs) gradients.push_back(new_matrix(x, x.size(0), input.size(1)));
  Tensor others = new_matrix(x, 1, count);
  add_parts(others, weights.data(), weights.size(), gradients);
  if (!x.size(0)) {
    torch::stable::zero_(others);
    return gradients;
  }

  std::vector<Tensor> kept;
  kept.reserve(weights.size() + inputs.size() + 3);
  auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
  cuda::Params params{};
  params.batch = x.size(0);
  for (size_t i = 0; i < weights.size(); ++i) params.weights[i] = address(weights[i]);
  params.weights[weights.size()] = address(grad_y);
  params.weights[weights.size() + 1] = others.mutable_data_ptr();
  params.x = address(inputs[0]);
  params.y = gradients[0].mutable_data_ptr();
  for (size_t i = 1; i < inputs.size(); ++i) {
    params.weights[second + i - 1] = address(inputs[i]);
    params.weights[second + inputs.size() + i - 2] = gradients[i].mutable_data_ptr();
  }
  run_on_cuda(text, &chain, x, x.size(1), chain.out_features(), params, kept, others.mutable_data_ptr());
  return gradients;
}

// The wanted gradients of a stack whose gradients one kernel makes, as the planner knows. The kernel makes all of them.
std::vector<Tensor> stack_backward_cuda(const Tensor& grad_y, const Tensor& x, const std::vector<Tensor>& tensors,
                                        const Text& text, const std::vector<int64_t>& wanted) {
  const Stack& layers = find_stack(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_layers(layers, x, tensors);
  check_wanted(wanted, tensors.size());
  STD_TORCH_CHECK(tensors.size() < cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS - 1,
                  " weights and biases at most, the stack has ", tensors.size());
  check(grad_y, x, x.size(0) * layers.layers.back().out_features(), "grad_y");
  Tensor grad_x = new_matrix(x, x.size(0), x.size(1));
  int64_t count = 0;
  for (const Tensor& t : tensors) count += t.numel();
  Tensor others = new_matrix(x, 1, count);
  if (x.size(0)) {
    std::vector<Tensor> kept;
    kept.reserve(tensors.size() + 4);
    auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
    cuda::Params params{};
    params.x = address(x);
    params.y = grad_x.mutable_data_ptr();
    params.batch = x.size(0);
    for (size_t i = 0; i < tensors.size(); ++i) params.weights[i] = address(tensors[i]);
    params.weights[tensors.size()] = address(grad_y);
    const Text backward{text.value + " | backward"};
    run_on_cuda(backward, &find_stack(backward.value), x, x.size(1), x.size(1), params, kept, others.mutable_data_ptr());
  } else {
    torch::stable::zero_(others);
  }
  std::vector<Tensor> gradients;
  count = 0;
  for (size_t place = 0, i = 0; i < wanted.size(); ++place) {
    if (int64_t(place) == wanted[i]) ++i, gradients.push_back(place ? part_like(others, count, tensors[place - 1]) : grad_x);
    if (place) count += tensors[place - 1].numel();
  }
  return gradients;
}

}  // namespace
}  // namespace factorlayer

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CUDA, m) {
  m.impl("stack_backward", TORCH_BOX(&factorlayer::stack_backward_cuda));
  m.impl("slopes", TORCH_BOX(&factorlayer::slopes_cuda));
  m.impl("slopes_and_sums", TORCH_BOX(&factorlayer::slopes_and_sums_cuda));
  m.impl("weight_gradient", TORCH_BOX(&factorlayer::weight_gradient_cuda));
  m.impl("inputs_gradients", TORCH_BOX(&factorlayer::inputs_gradients_cuda));
  m.impl("gradients", TORCH_BOX(&factorlayer::gradients_cuda));
}
