// The raw ops of a recurrence on a CPU: tensors of any strides in, contiguous ones out.
#include <algorithm>
#include <optional>
#include <vector>

#include "../chain.h"
#include "checks.h"
#include "on_cpu.h"

namespace factorlayer {
namespace {

// A call's tensors, checked, as the kernels take them.
struct RecurrentCall {
  std::vector<Tensor> tensors;  // contiguous, kept for the call
  cpu::Recurrent problem;
  int64_t steps = 0;            // of all sequences
  int threads = 1;

  RecurrentCall(const std::vector<Tensor>& gates, const Tensor& initial, const std::vector<Tensor>& weights,
                const std::optional<Tensor>& bias, const std::optional<Tensor>& starts,
                const std::optional<Tensor>& first, const std::optional<Tensor>& lengths,
                const std::optional<Tensor>& offsets, const std::vector<int64_t>& numbers,
                const Recurrence& recurrence) {
    STD_TORCH_CHECK(initial.is_cpu(), "factorlayer: the initial state must be a CPU tensor, as the others are");
    const Walk walk =
        check_recurrence(recurrence, gates, initial, weights, bias, starts, first, lengths, offsets, numbers);
    const Chain& chain = recurrence.chain;
    STD_TORCH_CHECK(chain.program || cpu::has_activation(chain.activation), "factorlayer: unknown stage ",
                    chain.activation);
    tensors.reserve(gates.size() + weights.size() + 6);
    problem.recurrence = &recurrence;
    problem.dtype = dtype_of(initial);
    problem.rows = walk.rows, problem.sequences = walk.sequences, problem.steps = walk.steps;
    problem.of_sequence = walk.of_sequence, problem.of_step = walk.of_step;
    for (const Tensor& gate : gates) problem.gates.push_back(pointer(gate));
    problem.initial = pointer(initial);
    for (const Tensor& weight : weights) problem.weights.push_back(pointer(weight));
    problem.bias = pointer(bias);
    problem.starts = static_cast<const bool*>(pointer(starts));
    problem.first = static_cast<const int64_t*>(pointer(first));
    problem.lengths = static_cast<const int64_t*>(pointer(lengths));
    problem.offsets = static_cast<const int64_t*>(pointer(offsets));
    check_rows();
    double work = 0;  // of a product
    for (const Contraction& c : chain.contractions) work += double(c.outer * c.q * c.inner) * double(c.p);
    threads = threads_for(work * double(chain.rank) * double(kGates) * double(steps));
  }

  // A new tensor [rows, columns]. Rows that belong to no sequence are zero.
  Tensor new_rows(int64_t columns) const {
    Tensor made = new_matrix(tensors[0], problem.rows, columns);
    cpu::prefer_huge_pages(made.mutable_data_ptr(), made.numel() * int64_t(made.element_size()));
    if (steps < problem.rows) torch::stable::zero_(made);
    return made;
  }

 private:
  const void* pointer(const Tensor& t) { return tensors.emplace_back(as_contiguous(t)).const_data_ptr(); }
  const void* pointer(const std::optional<Tensor>& t) { return t ? pointer(*t) : nullptr; }

  // Checks that every step has a row, and no two the same.
  void check_rows() {
    for (int64_t i = 0; i < problem.sequences; ++i) {
      const int64_t length = problem.length(i);
      STD_TORCH_CHECK(length >= 0 && length <= problem.steps, "factorlayer: a sequence must have 0 to ", problem.steps,
                      " steps, one has ", length);
      steps += length;
      STD_TORCH_CHECK(steps <= problem.rows, "factorlayer: the steps of the sequences must have a row each, there are ",
                      problem.rows, " rows");
    }
    if (!problem.first && !problem.offsets && !problem.lengths && is_plain()) return;
    std::vector<bool> taken(size_t(problem.rows), false);
    for (int64_t i = 0; i < problem.sequences; ++i)
      for (int64_t t = 0, length = problem.length(i); t < length; ++t) {
        int64_t row = 0, of_step = 0;
        const bool far = (problem.first ? (row = problem.first[i], false)
                                        : __builtin_mul_overflow(i, problem.of_sequence, &row)) ||
                         (problem.offsets ? (of_step = problem.offsets[t], false)
                                          : __builtin_mul_overflow(t, problem.of_step, &of_step)) ||
                         __builtin_add_overflow(row, of_step, &row);
        STD_TORCH_CHECK(!far && row >= 0 && row < problem.rows, "factorlayer: step ", t, " of sequence ", i,
                        " has no row among the ", problem.rows, " that there are");
        STD_TORCH_CHECK(!taken[size_t(row)], "factorlayer: step ", t, " of sequence ", i, " has row ", row,
                        ", which another step has, too");
        taken[size_t(row)] = true;
      }
  }

  // Whether rows are the steps of all sequences one behind another, or the sequences, so that every step has its row.
  bool is_plain() const {
    return (problem.of_sequence == 1 && problem.of_step == problem.sequences) ||
           (problem.of_step == 1 && problem.of_sequence == problem.steps);
  }
};

Tensor recurrence(const std::vector<Tensor>& gates, const Tensor& initial, const std::vector<Tensor>& weights,
                  const std::optional<Tensor>& bias, const std::optional<Tensor>& starts,
                  const std::optional<Tensor>& first, const std::optional<Tensor>& lengths,
                  const std::optional<Tensor>& offsets, const std::vector<int64_t>& numbers, const Text& text) {
  const Recurrence& unit = find_recurrence(text.value);
  const RecurrentCall call(gates, initial, weights, bias, starts, first, lengths, offsets, numbers, unit);
  Tensor output = call.new_rows(unit.hidden());
  if (call.steps) cpu::recurrence(call.problem, output.mutable_data_ptr(), call.threads, parallel);
  return output;
}

// The gradients of the gates and of the initial state, and between these what stands beside the gates: with the reset after the
// product the gradient of the candidate's product, with the reset before it r * h.
std::vector<Tensor> recurrence_backward(const Tensor& grad_output, const Tensor& output, const std::vector<Tensor>& gates,
                                        const Tensor& initial, const std::vector<Tensor>& weights,
                                        const std::optional<Tensor>& bias, const std::optional<Tensor>& starts,
                                        const std::optional<Tensor>& first, const std::optional<Tensor>& lengths,
                                        const std::optional<Tensor>& offsets, const std::vector<int64_t>& numbers,
                                        const Text& text) {
  const Recurrence& unit = find_recurrence(text.value);
  const RecurrentCall call(gates, initial, weights, bias, starts, first, lengths, offsets, numbers, unit);
  const Home home(initial);
  check(grad_output, home, call.problem.rows * unit.hidden(), "grad_output");
  check(output, home, call.problem.rows * unit.hidden(), "output");
  const Tensor read[] = {as_contiguous(grad_output), as_contiguous(output)};
  std::vector<Tensor> made;
  cpu::RecurrentGradients gradients{read[0].const_data_ptr(), read[1].const_data_ptr(), {}, nullptr, nullptr};
  for (const Tensor& gate : gates)
    gradients.gates.push_back(made.emplace_back(call.new_rows(gate.size(1))).mutable_data_ptr());
  gradients.beside = made.emplace_back(call.new_rows(unit.hidden())).mutable_data_ptr();
  Tensor& of_initial = made.emplace_back(new_matrix(initial, initial.size(0), unit.hidden()));
  torch::stable::zero_(of_initial);  // where a sequence has no step
  gradients.initial = of_initial.mutable_data_ptr();
  if (call.steps) cpu::recurrence_backward(call.problem, gradients, call.threads, parallel);
  return made;
}

}  // namespace
}  // namespace factorlayer

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CPU, m) {
  m.impl("recurrence", TORCH_BOX(&factorlayer::recurrence));
  m.impl("recurrence_backward", TORCH_BOX(&factorlayer::recurrence_backward));
}
