// The raw ops of a recurrence on a GPU: all of its steps, the slopes of all steps, and the way back by these slopes.
// autograd/recurrent_ops.py makes recurrence_backward of the last two.
#include <optional>
#include <utility>
#include <vector>

#include "../chain.h"
#include "checks.h"
#include "launch.h"

namespace factorlayer {
namespace {

// Puts a kernel's tensors into their places behind the weights, and numbers as if they were addresses.
struct Places {
  std::vector<Tensor> kept;
  cuda::Params params{};
  size_t count = 0;

  const void* address(const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); }
  void add(const void* place) { params.weights[count++] = place; }
  void add(const Tensor& t) { add(address(t)); }
  void add(const std::optional<Tensor>& t) { add(t ? address(*t) : nullptr); }
  void add(int64_t number) { add(reinterpret_cast<const void*>(number)); }
  void add(const std::vector<Tensor>& tensors) {
    STD_TORCH_CHECK(tensors.size() + kOthers <= cuda::MAX_WEIGHTS, "factorlayer: recurrent kernels take ",
                    cuda::MAX_WEIGHTS - kOthers, " weights at most, ", tensors.size(), " were given");
    for (const Tensor& t : tensors) add(t);
  }
  // Adds the inputs of the gates. The first of them is x.
  void add_gates(const std::vector<Tensor>& gates, int64_t hidden) { params.x = add_by_gate(gates, hidden, 1); }
  // Adds the gates' tensors from the gate `from` on, of three tensors or of one whose rows have all three side by side. Returns
  // the first gate's address.
  const void* add_by_gate(const std::vector<Tensor>& tensors, int64_t hidden, int from) {
    const void* const first = address(tensors[0]);
    const int64_t size = int64_t(tensors[0].element_size());
    for (int i = from; i < kGates; ++i)
      add(i && tensors.size() > 1 ? address(tensors[size_t(i)]) : static_cast<const char*>(first) + i * hidden * size);
    return first;
  }
  void add_walk(const Walk& walk, const std::optional<Tensor>& starts, const std::optional<Tensor>& first,
                const std::optional<Tensor>& lengths, const std::optional<Tensor>& offsets) {
    add(starts), add(first), add(lengths), add(offsets);
    add(walk.steps), add(walk.of_sequence), add(walk.of_step), add(walk.rows);
  }
  static constexpr size_t kOthers = 24;  // most that there is beside weights
};

void launch(Places& places, const std::string& text, const Tensor& like, int64_t batch) {
  places.params.batch = batch;
  run_on_cuda(Text{text}, &find_asked(text), like, 0, 0, places.params, places.kept);
}

// A new tensor [rows, columns]. It is zero if there may be rows that belong to no sequence.
Tensor new_rows(const Tensor& like, const Walk& walk, int64_t columns, bool ragged) {
  Tensor made = new_matrix(like, walk.rows, columns);
  if (ragged || walk.rows != walk.sequences * walk.steps) torch::stable::zero_(made);
  return made;
}

Tensor recurrence(const std::vector<Tensor>& gates, const Tensor& initial, const std::vector<Tensor>& weights,
                  const std::optional<Tensor>& bias, const std::optional<Tensor>& starts, const std::optional<Tensor>& first,
                  const std::optional<Tensor>& lengths, const std::optional<Tensor>& offsets,
                  const std::vector<int64_t>& numbers, const Text& text) {
  STD_TORCH_CHECK(initial.is_cuda(), "factorlayer: the initial state must be a CUDA tensor, as the others are");
  const Recurrence& unit = find_recurrence(text.value);
  const Walk walk = check_recurrence(unit, gates, initial, weights, bias, starts, first, lengths, offsets, numbers);
  const int64_t hidden = unit.hidden();
  Tensor output = new_rows(initial, walk, hidden, first || lengths || offsets);
  if (!walk.sequences || !walk.steps || !walk.rows) return output;
  Places places;
  places.params.y = output.mutable_data_ptr();
  places.params.bias = bias ? places.address(*bias) : nullptr;
  places.add(weights);
  places.add_gates(gates, hidden);
  places.add(initial);
  places.add_walk(walk, starts, first, lengths, offsets);
  places.add(gates[0].size(1));
  const auto& contractions = unit.chain.contractions;
  if (unit.before && contractions.size() == 1 && contractions[0].tied) {
    // Blocks that share a dense matrix hand on states there that are reset.
    places.kept.push_back(new_matrix(initial, walk.rows, hidden));
    places.add(places.kept.back().mutable_data_ptr());
  }
  launch(places, text.value, initial, walk.sequences);
  return output;
}

// Five tensors of all rows: the slopes of reset, update and candidate, the reset, and 1 minus the update
// (kernels/recurrent/recurrent_slopes.cuh).
// Products of all gates are three tensors, or one, as the gates' inputs are.
std::vector<Tensor> recurrence_slopes(const std::vector<Tensor>& gates, const Tensor& before, const std::vector<Tensor>& products,
                                      const std::optional<Tensor>& bias, const Text& text) {
  STD_TORCH_CHECK(before.is_cuda() && before.dim() == 2, "factorlayer: the states must be a CUDA matrix");
  const Recurrence& unit = find_recurrence(text.value);
  const int64_t rows = before.size(0), hidden = unit.hidden();
  const Home home(before);
  for (const auto& [tensors, name] : {std::pair(&gates, "a gate"), std::pair(&products, "a product")}) {
    STD_TORCH_CHECK(tensors->size() == 1 || tensors->size() == kGates, "factorlayer: gates must be one tensor or three, and so must "
                    "products");
    for (const Tensor& t : *tensors) check(t, home, rows * hidden * kGates / int64_t(tensors->size()), name);
  }
  check(before, home, rows * hidden, "the states");
  STD_TORCH_CHECK(unit.chain.bias == bias.has_value(), "factorlayer: a bias must be given where the recurrence has one");
  if (bias) check(*bias, home, hidden, "bias");
  std::vector<Tensor> made;
  for (int i = 0; i < 5; ++i) made.push_back(new_matrix(before, rows, hidden));
  if (!rows) return made;
  Places places;
  places.params.y = made[0].mutable_data_ptr();
  places.params.bias = bias ? places.address(*bias) : nullptr;
  places.add_gates(gates, hidden);
  places.add_by_gate(products, hidden, 0);
  places.add(before);
  places.add(gates[0].size(1));
  places.add(products[0].size(1));
  for (size_t i = 1; i < made.size(); ++i) places.add(made[i].mutable_data_ptr());
  launch(places, text.value + " | slopes", before, rows);
  return made;
}

// The gradients of the gates' inputs, of the candidate's product where the reset stands behind it, and of the initial state, by
// the slopes that recurrence_slopes makes. The recurrence has no bias, and `initial` is a tensor like its initial state.
std::vector<Tensor> recurrence_through(const Tensor& grad_output, const std::vector<Tensor>& slopes, const Tensor& initial,
                                       const std::vector<Tensor>& weights, const std::optional<Tensor>& starts,
                                       const std::optional<Tensor>& first, const std::optional<Tensor>& lengths,
                                       const std::optional<Tensor>& offsets, const std::vector<int64_t>& numbers, bool joined,
                                       const Text& text) {
  STD_TORCH_CHECK(initial.is_cuda(), "factorlayer: the initial state must be a CUDA tensor, as the others are");
  const Recurrence& unit = find_recurrence(text.value);
  const int64_t hidden = unit.hidden();
  const std::vector<Tensor> as_gates(kGates, grad_output);
  const Walk walk = check_recurrence(unit, as_gates, initial, weights, std::nullopt, starts, first, lengths, offsets, numbers);
  STD_TORCH_CHECK(slopes.size() == 5, "factorlayer: slopes must be five tensors");
  const bool ragged = first || lengths || offsets;
  std::vector<Tensor> made;
  if (joined)
    made.push_back(new_rows(initial, walk, kGates * hidden, ragged));
  else
    for (int i = 0; i < kGates; ++i) made.push_back(new_rows(initial, walk, hidden, ragged));
  const size_t gates = made.size();
  if (!unit.before) made.push_back(new_rows(initial, walk, hidden, ragged));
  made.push_back(new_matrix(initial, walk.sequences, hidden));
  if (!walk.sequences || !walk.steps || !walk.rows) {
    torch::stable::zero_(made.back());
    return made;
  }
  Places places;
  places.params.x = places.address(grad_output);
  char* const first_gate = static_cast<char*>(made[0].mutable_data_ptr());
  places.params.y = first_gate;
  places.add(weights);
  for (const Tensor& slope : slopes) {
    STD_TORCH_CHECK(slope.numel() == walk.rows * hidden && slope.is_cuda(), "factorlayer: slopes must be of all rows");
    places.add(slope);
  }
  places.add_walk(walk, starts, first, lengths, offsets);
  places.add(made[0].size(1));
  for (int64_t i = 1; i < kGates; ++i)
    places.add(joined ? first_gate + i * hidden * int64_t(initial.element_size()) : made[size_t(i)].mutable_data_ptr());
  for (size_t i = gates; i < made.size(); ++i) places.add(made[i].mutable_data_ptr());
  launch(places, text.value + " | backward", initial, walk.sequences);
  return made;
}

}  // namespace
}  // namespace factorlayer

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CUDA, m) {
  m.impl("recurrence", TORCH_BOX(&factorlayer::recurrence));
  m.impl("recurrence_slopes", TORCH_BOX(&factorlayer::recurrence_slopes));
  m.impl("recurrence_through", TORCH_BOX(&factorlayer::recurrence_through));
}
