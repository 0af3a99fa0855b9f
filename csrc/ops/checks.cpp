#include "checks.h"

namespace factorlayer {

void check(const Tensor& t, const Home& x, int64_t elements, const char* name) {
  const Home own(t);
  const bool at_home = own.type == x.type && own.index == x.index, alike = own.dtype == x.dtype;
  STD_TORCH_CHECK(at_home && alike && t.numel() == elements, "factorlayer: ", name, " must be a ",
                  x.is_cpu ? "CPU" : "CUDA", " tensor of x's dtype", x.is_cpu ? "" : " and on x's device", " with ",
                  elements, " elements; it has ", t.numel(), at_home ? "" : ", elsewhere",
                  alike ? "" : ", of another dtype");
}

void check_slabs(const Chain& chain, const Tensor& x) {
  STD_TORCH_CHECK(!chain.slabs || x.size(0) % 64 == 0, "factorlayer: \"slabs\" are for a multiple of 64 samples, x has ",
                  x.size(0));
}

// Whether the tensors are those that the chain reads; the text of the chain comes from anyone.
void check_x(const Chain& chain, const Tensor& x) {
  STD_TORCH_CHECK(chain.inputs.empty(), "factorlayer: x is several tensors by \"inputs\", which this op does not take");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == chain.given_features(), "factorlayer: x must be [batch, ",
                  chain.given_features(), "]");
  check_slabs(chain, x);
}

void check_layer(const Chain& chain, const Home& x, const Tensor* weights, size_t given, const Tensor* bias) {
  STD_TORCH_CHECK(!x.is_cpu || !(chain.x_turned || chain.turned || chain.slabs),
                  "factorlayer: a chain with \"turned\", \"turn\" or \"slabs\" is for tensors on a GPU");
  STD_TORCH_CHECK(given == chain.weights(), "factorlayer: the chain has ", chain.weights(), " weights, ", given,
                  " were given");
  const size_t count = chain.contractions.size();
  for (const Contraction& c : chain.contractions) {
    STD_TORCH_CHECK(c.weight < int64_t(count), "factorlayer: the chain names weight ", c.weight,
                    ", which was not given");
    const Tensor& weight = weights[c.weight];
    check(weight, x, chain.rank * c.weight_size(), "a weight");
    STD_TORCH_CHECK(weight.dim() >= 2 && weight.size(weight.dim() - 1) == c.p && weight.size(weight.dim() - 2) == c.q,
                    "factorlayer: a weight must be [..., ", c.q, ", ", c.p, "]");
  }
  for (size_t i = count; i < given; ++i) check(weights[i], x, 1, "an activation's parameter");
  STD_TORCH_CHECK((bias != nullptr) == chain.bias, "factorlayer: bias and chain disagree");
  if (bias) check(*bias, x, chain.out_features(), "bias");
  STD_TORCH_CHECK(!bias || bias->dim() == 1, "factorlayer: bias must be [", chain.out_features(), "]");
}

void check_inputs(const Chain& chain, const Tensor& x, const std::vector<Tensor>& weights,
                  const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(chain.makes_y(),
                  "factorlayer: a chain with \"gradient\", \"backward\", \"slope\", \"through\" or \"sums\" is for the ops ",
                  "that make gradients, one with \"kept\" for forward_states");
  check_x(chain, x);
  check_layer(chain, x, weights.data(), weights.size(), bias ? &*bias : nullptr);
}

void check_several(const Chain& chain, const std::vector<Tensor>& inputs) {
  STD_TORCH_CHECK(!inputs.empty() && inputs.size() == chain.inputs.size(), "factorlayer: x is ", chain.inputs.size(),
                  " tensors by the chain's \"inputs\", ", inputs.size(), " were given");
  const Home home(inputs[0]);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t rows = inputs[i].dim() == 2 ? inputs[0].size(0) : 0;
    check(inputs[i], home, rows * chain.inputs[i], "an input");
    STD_TORCH_CHECK(inputs[i].dim() == 2 && inputs[i].size(0) == rows && inputs[i].size(1) == chain.inputs[i],
                    "factorlayer: an input must be [", rows, ", ", chain.inputs[i], "]");
  }
}

// Checks the tensors of all layers, but not x.
static void check_tensors(const Stack& stack, const Home& home, const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(!stack.backward && !stack.states && !stack.frozen,
                  "factorlayer: a stack with \"backward\", \"states\" or \"frozen\" is no text for this op; leave that word out");
  size_t count = 0;
  for (const Chain& layer : stack.layers) count += layer.weights() + layer.bias;
  STD_TORCH_CHECK(tensors.size() == count, "factorlayer: the layers of the stack have ", count, " weights and biases, ",
                  tensors.size(), " were given");
  const Tensor* at = tensors.data();
  for (const Chain& layer : stack.layers) {
    check_layer(layer, home, at, layer.weights(), layer.bias ? at + layer.weights() : nullptr);
    at += layer.weights() + layer.bias;
  }
}

void check_layers(const Stack& stack, const Tensor& x, const std::vector<Tensor>& tensors) {
  check_x(stack.layers.front(), x);
  check_tensors(stack, x, tensors);
}

void check_layers(const Stack& stack, const std::vector<Tensor>& inputs, const std::vector<Tensor>& tensors) {
  check_several(stack.layers.front(), inputs);
  check_tensors(stack, inputs[0], tensors);
}

// Whether the tensor has the elements of all layers' tensors, side by side, and bytes of prepared weights behind them.
void check_values(const Stack& stack, const Tensor& frozen, int64_t prepared) {
  STD_TORCH_CHECK(stack.frozen && frozen.dim() == 1 && frozen.is_contiguous(),
                  "factorlayer: frozen layers should be a stack with \"frozen\" and one contiguous tensor [elements]");
  const int64_t elements = stack.places.back() + prepared / int64_t(frozen.element_size());
  STD_TORCH_CHECK(frozen.numel() == elements, "factorlayer: frozen layers should have ", elements, " elements, they have ",
                  frozen.numel(), "; freeze them again");
}

void check_frozen(const Stack& stack, const Tensor& x, const Tensor& frozen, int64_t prepared) {
  check_values(stack, frozen, prepared);
  check_x(stack.layers.front(), x);
  check(frozen, x, frozen.numel(), "what is frozen");
}

static void check_matrix(const Tensor& t, const Home& home, int64_t rows, int64_t columns, const char* name) {
  check(t, home, rows * columns, name);
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, "factorlayer: ", name, " must be [", rows, ", ",
                  columns, "]");
}

// Checks a tensor that says where rows lie, or where sequences begin again.
static void check_vector(const std::optional<Tensor>& t, const Home& home, ScalarType dtype, int64_t elements,
                         const char* name) {
  if (!t) return;
  const Home own(*t);
  STD_TORCH_CHECK(own.type == home.type && own.index == home.index && t->scalar_type() == dtype && t->dim() == 1 &&
                      t->numel() == elements,
                  "factorlayer: ", name, " must be ", dtype == ScalarType::Bool ? "bool" : "int64", " [", elements,
                  "], on the device of the gates");
}

Walk check_recurrence(const Recurrence& recurrence, const std::vector<Tensor>& gates, const Tensor& initial,
                      const std::vector<Tensor>& weights, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& starts, const std::optional<Tensor>& first,
                      const std::optional<Tensor>& lengths, const std::optional<Tensor>& offsets,
                      const std::vector<int64_t>& numbers) {
  const Chain& chain = recurrence.chain;
  const int64_t hidden = recurrence.hidden();
  const size_t count = chain.contractions.size();
  STD_TORCH_CHECK(!chain.parameters(), "factorlayer: the activation of a recurrence must have no parameters");
  STD_TORCH_CHECK((gates.size() == 1 || gates.size() == kGates) && gates[0].dim() == 2 && initial.dim() == 2,
                  "factorlayer: gates must be three tensors [rows, ", hidden, "] or one [rows, ", kGates * hidden,
                  "], and the initial state [sequences, ", hidden, "]");
  const Home home(gates[0]);
  const Walk walk{initial.size(0), numbers.empty() ? -1 : numbers[0], gates[0].size(0), numbers.size() == 3 ? numbers[1] : -1,
                  numbers.size() == 3 ? numbers[2] : -1};
  STD_TORCH_CHECK(walk.steps >= 0 && walk.of_sequence >= 0 && walk.of_step >= 0 && walk.steps <= kMostElements,
                  "factorlayer: numbers must be [steps, rows of a sequence, rows of a step], none of them negative");
  for (const Tensor& gate : gates) check_matrix(gate, home, walk.rows, kGates * hidden / int64_t(gates.size()), "a gate");
  check_matrix(initial, home, walk.sequences, hidden, "the initial state");
  STD_TORCH_CHECK(weights.size() == kGates * count, "factorlayer: a recurrence must have the ", count,
                  " weights of each of its three gates, ", weights.size(), " were given");
  for (size_t at = 0; at < weights.size(); at += count) check_layer(chain, home, &weights[at], count, bias ? &*bias : nullptr);
  check_vector(starts, home, ScalarType::Bool, walk.rows, "starts");
  check_vector(first, home, ScalarType::Long, walk.sequences, "first");
  check_vector(lengths, home, ScalarType::Long, walk.sequences, "lengths");
  check_vector(offsets, home, ScalarType::Long, walk.steps, "offsets");
  return walk;
}

void check_wanted(const std::vector<int64_t>& wanted, size_t tensors) {
  int64_t least = 0;
  for (int64_t place : wanted) {
    STD_TORCH_CHECK(place >= least && place <= int64_t(tensors),
                    "factorlayer: `wanted` should be ascending places in x and the ", tensors,
                    " tensors behind it, each at most once, ", place, " is out of place");
    least = place + 1;
  }
}

}  // namespace factorlayer
