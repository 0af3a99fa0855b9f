// The raw ops, factorlayer::forward and factorlayer::backward: tensors in, tensors out, nothing shared
// between them. The only file that sees torch, through its stable ABI. Callers are factorlayer/fused.py and
// exported graphs; shapes were checked in Python, so the checks here only keep memory safe.
#include <Python.h>

#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "chain.h"
#include "cpu/cpu.h"

namespace factorlayer {

// A string argument of an op. The conversion to std::string that comes with PyTorch 2.11 to 2.13 leaks a copy at every
// call, and glibc then cannot put a large output where the last one was.
struct Text {
  std::string value;
};

}  // namespace factorlayer

HIDDEN_NAMESPACE_BEGIN(torch, stable, detail)
template <>
struct ToImpl<factorlayer::Text> {
  static factorlayer::Text call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    factorlayer::Text text{std::string(data, length)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
HIDDEN_NAMESPACE_END(torch, stable, detail)

namespace factorlayer {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

cpu::DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return cpu::DType::float64;
    case ScalarType::Float: return cpu::DType::float32;
    case ScalarType::BFloat16: return cpu::DType::bfloat16;
    case ScalarType::Half: return cpu::DType::float16;
    default: break;
  }
  STD_TORCH_CHECK(false, "factorlayer: x has a dtype that the fused kernels do not know; use float64, float32, ",
                  "bfloat16 or float16");
}

void check(const Tensor& t, const Tensor& x, int64_t elements, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == x.scalar_type() && t.is_contiguous() && t.numel() == elements,
                  "factorlayer: ", name, " must be a contiguous CPU tensor of x's dtype with ", elements,
                  " elements, it has ", t.numel());
}

// A call's tensors, checked, with the pointers that the kernels take.
struct Call {
  const Chain& chain;
  std::vector<const void*> weights;
  cpu::Problem problem;

  Call(const Tensor& x, const std::vector<Tensor>& given, const std::optional<Tensor>& bias, const std::string& text)
      : chain(find_chain(text)), weights(given.size()) {
    STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == chain.in_features(), "factorlayer: x must be [batch, ",
                    chain.in_features(), "]");
    check(x, x, x.numel(), "x");
    STD_TORCH_CHECK(given.size() == chain.contractions.size(), "factorlayer: the chain has ",
                    chain.contractions.size(), " weights, ", given.size(), " were given");
    for (const Contraction& c : chain.contractions) {
      STD_TORCH_CHECK(c.weight < int64_t(given.size()), "factorlayer: the chain names weight ", c.weight,
                      ", which was not given");
      check(given[c.weight], x, chain.rank * c.weight_size(), "a weight");
      weights[c.weight] = given[c.weight].const_data_ptr();
    }
    STD_TORCH_CHECK(bias.has_value() == chain.bias, "factorlayer: bias and chain disagree");
    if (bias) check(*bias, x, chain.out_features(), "bias");
    STD_TORCH_CHECK(cpu::has_activation(chain.activation), "factorlayer: unknown stage ", chain.activation);
    problem = {&chain, dtype_of(x), x.size(0), x.const_data_ptr(), weights.data(),
               bias ? bias->const_data_ptr() : nullptr};
  }
};

void parallel(int64_t count, const std::function<void(int64_t)>& task) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) task(i);
  });
}

// One thread for work that takes less time than waking another.
int threads_for(const cpu::Problem& problem) {
  double work = 0;
  for (const Contraction& c : problem.chain->contractions) work += double(c.outer * c.q * c.inner * c.p);
  const double least = 1 << 19;
  return work * double(problem.batch * problem.chain->rank) < least ? 1 : int(torch::stable::get_num_threads());
}

Tensor forward(const Tensor& x, const std::vector<Tensor>& weights, const std::optional<Tensor>& bias,
               const Text& chain) {
  const Call call(x, weights, bias, chain.value);
  Tensor y = torch::stable::new_empty(x, {x.size(0), call.chain.out_features()});
  cpu::prefer_huge_pages(y.mutable_data_ptr(), y.numel() * int64_t(y.element_size()));
  if (x.size(0)) cpu::forward(call.problem, y.mutable_data_ptr(), threads_for(call.problem), parallel);
  return y;
}

// `wanted` has a bit for each gradient: 1 for x, 2 for the bias, 4 << i for weight i. They come in that order.
std::vector<Tensor> backward(const Tensor& grad_y, const Tensor& x, const std::vector<Tensor>& weights,
                             const std::optional<Tensor>& bias, const Text& chain, int64_t wanted) {
  const Call call(x, weights, bias, chain.value);
  check(grad_y, x, x.size(0) * call.chain.out_features(), "grad_y");
  STD_TORCH_CHECK(wanted >= 0 && wanted >> (weights.size() + 2) == 0 && (bias || !(wanted & 2)),
                  "factorlayer: a gradient is wanted of something that was not given");
  std::vector<Tensor> gradients;
  auto want = [&](int bit, const Tensor& like) -> void* {
    if (!(wanted >> bit & 1)) return nullptr;
    const Tensor& gradient = gradients.emplace_back(torch::stable::empty_like(like));
    cpu::prefer_huge_pages(gradient.mutable_data_ptr(), gradient.numel() * int64_t(gradient.element_size()));
    return gradient.mutable_data_ptr();
  };
  cpu::Gradients to{};
  to.grad_x = want(0, x);
  to.grad_bias = bias ? want(1, *bias) : nullptr;
  std::vector<void*> grad_weights(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) grad_weights[i] = want(int(i) + 2, weights[i]);
  to.grad_weights = grad_weights.data();
  if (x.size(0)) {
    cpu::backward(call.problem, grad_y.const_data_ptr(), to, threads_for(call.problem), parallel);
  } else {
    for (Tensor& gradient : gradients) torch::stable::zero_(gradient);
  }
  return gradients;
}

std::string instruction_set() { return cpu::instruction_set(); }

}  // namespace
}  // namespace factorlayer

STABLE_TORCH_LIBRARY(factorlayer, m) {
  m.def("forward(Tensor x, Tensor[] weights, Tensor? bias, str chain) -> Tensor");
  m.def("backward(Tensor grad_y, Tensor x, Tensor[] weights, Tensor? bias, str chain, int wanted) -> Tensor[]");
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CPU, m) {
  m.impl("forward", TORCH_BOX(&factorlayer::forward));
  m.impl("backward", TORCH_BOX(&factorlayer::backward));
}

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&factorlayer::instruction_set));
}

// The module itself is empty: importing it registers the ops above.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
