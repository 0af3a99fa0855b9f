// The raw ops, factorlayer::forward and factorlayer::backward, for a stack stack_forward, stack_states, stack_backward and,
// with weights that stay as they are, stack_prepare and stack_frozen: tensors of any strides in, contiguous ones out, no
// memory shared between in and out. The only file that sees torch, through its stable ABI. Callers are autograd/fused.py,
// stacked.py, frozen.py and exported graphs; shapes were checked in Python, so the checks here only keep memory safe.
#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "chain.h"
#include "cpu/cpu.h"
#include "dtype.h"
#include "eager.h"
#include "python.h"
#include "runtime/cache.h"
#include "runtime/kernels.h"
#include "runtime/nvrtc.h"
#include "shown.h"
#include "table.h"

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

DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return DType::float64;
    case ScalarType::Float: return DType::float32;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: break;
  }
  STD_TORCH_CHECK(false, "factorlayer: x has a dtype that the fused kernels do not know; use float64, float32, ",
                  "bfloat16 or float16");
}

DType dtype_named(const std::string& name) {
  for (DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16})
    if (name == name_of(dtype)) return dtype;
  STD_TORCH_CHECK(false, "factorlayer: a dtype should be float64, float32, bfloat16 or float16, it is \"", shown(name), "\"");
}

// Where a tensor is, and of what: asked of x once for all tensors that are compared with it.
struct Home {
  int32_t type = 0, index = 0, dtype = 0;
  bool is_cpu;

  Home(const Tensor& t) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    is_cpu = type == aoti_torch_device_type_cpu();
    if (!is_cpu) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &index));
  }
};

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
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == chain.in_features(), "factorlayer: x must be [batch, ",
                  chain.in_features(), "]");
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
                  "that make gradients");
  check_x(chain, x);
  check_layer(chain, x, weights.data(), weights.size(), bias ? &*bias : nullptr);
}

void check_layers(const Stack& stack, const Tensor& x, const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(!stack.backward && !stack.states && !stack.frozen,
                  "factorlayer: a stack with \"backward\", \"states\" or \"frozen\" is no text for this op; leave that word out");
  size_t count = 0;
  for (const Chain& layer : stack.layers) count += layer.weights() + layer.bias;
  STD_TORCH_CHECK(tensors.size() == count, "factorlayer: the layers of the stack have ", count, " weights and biases, ",
                  tensors.size(), " were given");
  check_x(stack.layers.front(), x);
  const Tensor* at = tensors.data();
  const Home home(x);
  for (const Chain& layer : stack.layers) {
    check_layer(layer, home, at, layer.weights(), layer.bias ? at + layer.weights() : nullptr);
    at += layer.weights() + layer.bias;
  }
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

void check_wanted(const std::vector<int64_t>& wanted, size_t tensors) {
  int64_t least = 0;
  for (int64_t place : wanted) {
    STD_TORCH_CHECK(place >= least && place <= int64_t(tensors),
                    "factorlayer: `wanted` should be ascending places in x and the ", tensors,
                    " tensors behind it, each at most once, ", place, " is out of place");
    least = place + 1;
  }
}

// As the kernels read it. Looking costs less than Python's own contiguous().
Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// Uninitialised, on x's device, of x's dtype or another. The stable new_empty takes a microsecond more, in which it looks
// an operator up by name. With one dimension, of one row, a vector.
Tensor new_matrix(const Tensor& x, int64_t rows, int64_t columns, int32_t dtype = -1, int dimensions = 2) {
  int32_t type = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
  if (dtype < 0) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  AtenTensorHandle made = nullptr;
  // PyTorch writes to stderr what went wrong, and returns that something did.
  const int from = 2 - dimensions;
  if (aoti_torch_empty_strided(dimensions, sizes + from, strides + from, dtype, type, index, &made))
    throw std::runtime_error(std::string(x.is_cuda() ? "CUDA " : "") + "out of memory: factorlayer could not allocate [" +
                             std::to_string(rows) + ", " + std::to_string(columns) + "] for what it computes from x [" +
                             std::to_string(x.size(0)) + ", " + std::to_string(x.size(1)) +
                             "]; split the batch, or free memory");
  return Tensor(made);
}

// The CPU

// A call's tensors, checked, as the kernels take them.
struct Call {
  std::vector<Tensor> tensors;  // x, then each layer's weights and bias
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

  // With the tensors of all layers in one.
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

void parallel(int64_t count, const std::function<void(int64_t)>& task) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) task(i);
  });
}

// One thread for work that takes less time than waking another.
int threads_for(const cpu::Problem& problem) {
  double work = 0;
  for (const Chain* layer : problem.layers)
    for (const Contraction& c : layer->contractions)
      work += double(c.outer * c.q * c.inner * c.p) * double(layer->rank);
  const double least = 1 << 19;
  return work * double(problem.batch) < least ? 1 : int(torch::stable::get_num_threads());
}

void run_forward(const cpu::Problem& problem, const Tensor& y) {
  cpu::prefer_huge_pages(y.mutable_data_ptr(), y.numel() * int64_t(y.element_size()));
  if (problem.batch) cpu::forward(problem, y.mutable_data_ptr(), threads_for(problem), parallel);
}

Tensor run_forward(const Call& call) {
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
  return run_forward(Call(x, weights, bias, find_chain(chain.value)));
}

// `wanted` has a bit for each gradient: 1 for x, 2 for the bias, 4 << i for weight i. They come in that order.
constexpr size_t kMostWanted = 61;  // weights: bit 63 would be its sign. autograd/fused.py has the same number

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
  return run_forward(Call(x, tensors, find_stack(stack.value)));
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
  return run_forward(Call(x, frozen, find_stack(stack.value)));
}

std::string instruction_set() { return cpu::instruction_set(); }

// CUDA

// PyTorch's current stream. Its stable CPU library, which this one is linked with, has no name for it.
cuda::Stream current_stream(int device) {
  using Find = AOTITorchError (*)(int32_t, void**);
  static const Find find = [] {
    const char* name = "aoti_torch_get_current_cuda_stream";
    void* symbol = dlsym(RTLD_DEFAULT, name);
    if (void* library = symbol ? nullptr : dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD))
      symbol = dlsym(library, name);
    STD_TORCH_CHECK(symbol, "factorlayer: this PyTorch cannot name its current CUDA stream; use a CUDA build of 2.11 ",
                    "or later");
    return reinterpret_cast<Find>(symbol);
  }();
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(find(device, &stream));
  return stream;
}

// Kernels read 16 bytes at once.
Tensor aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 ? torch::stable::clone(t) : t;
}

void locate_compiler() {
  if (!cuda::find_compiler()) cuda::locate_compiler(python::nvrtc_paths());
}

// Of a GPU, as the cache has them.
std::string limits_of(int capability, int processors, int shared_bytes) {
  return "sm_" + std::to_string(capability) + " with " + std::to_string(processors) + " SMs of " +
         std::to_string(shared_bytes) + " bytes";
}

// The plan from the cache or from the planner, which takes longer than all the rest of a first call does. A plan that
// cannot be kept is made again by the next process, and that is all.
std::string plan_of(const std::string& chain, DType dtype, int batch_class, int capability, int processors,
                    int shared_bytes) {
  const std::string name = chain + " in " + name_of(dtype) + ", batch class " + std::to_string(batch_class);
  const cache::Key key{"plan", name, limits_of(capability, processors, shared_bytes), "", "", python::planner()};
  if (std::optional<std::string> plan = cache::load(key)) return *plan;
  const std::string plan =
      python::plan_text(chain, name_of(dtype), batch_class, capability, processors, shared_bytes);
  cache::store(key, plan);
  return plan;
}

// The planner, or what the cache keeps of it, is asked nothing but this.
void check_question(const std::string& chain, const std::string& dtype, int64_t batch_class, int64_t capability,
                    int64_t processors, int64_t shared_bytes) {
  check_words(chain);
  dtype_named(dtype);
  auto check_number = [](const char* what, int64_t number, int64_t least, int64_t most) {
    STD_TORCH_CHECK(number >= least && number <= most, "factorlayer: ", what, " should be from ", least, " to ", most,
                    ", it is ", number);
  };
  check_number("a batch class", batch_class, 0, 2);
  check_number("a compute capability", capability, 10, 999);
  check_number("the number of multiprocessors", processors, 1, 1 << 16);
  check_number("the bytes of shared memory", shared_bytes, 0, 1 << 24);
}

// What else the planner is asked, has_plan for one: it may have to compare many plans, so its answers are kept, too.
std::string ask_planner(const Text& question, const Text& chain, const Text& dtype, int64_t capability, int64_t processors,
                        int64_t shared_bytes) {
  const char* const questions[] = {"has_plan", "has_plan_of_few", "predicted", "cut", "cut_backward"};
  STD_TORCH_CHECK(std::find(std::begin(questions), std::end(questions), question.value) != std::end(questions),
                  "factorlayer: the planner is asked has_plan, has_plan_of_few, predicted, cut or cut_backward, not \"",
                  shown(question.value), "\"");
  check_question(chain.value, dtype.value, 0, capability, processors, shared_bytes);
  const std::string name = question.value + " of " + chain.value + " in " + dtype.value;
  const std::string gpu = limits_of(int(capability), int(processors), int(shared_bytes));
  const cache::Key key{"plan", name, gpu, "", "", python::planner()};
  if (std::optional<std::string> answer = cache::load(key)) return *answer;
  const std::string answer = python::ask_planner(question.value, chain.value, dtype.value, int(capability),
                                                 int(processors), int(shared_bytes));
  cache::store(key, answer);
  return answer;
}

const cuda::Program& program_of(const cuda::PlanKey& key, const std::string& chain) {
  if (const cuda::Program* found = cuda::find_program(key)) return *found;
  locate_compiler();
  const cuda::Device& device = cuda::find_device(key.device);
  std::string plan;
  try {
    plan = plan_of(chain, key.dtype, key.batch_class, device.capability, device.processors, device.shared_bytes);
  } catch (const python::Error& error) {
    const cuda::Failure failure("factorlayer: chain \"" + chain + "\" has no plan: " + error.what(), "", "", "");
    if (error.lasting) cuda::remember_failure(key, failure);
    throw failure;
  }
  return cuda::build_program(key, plan, false, python::warn);
}

// Runs the plan of a text on params, whose x, y and weights are there, and of x's dtype and device. `chain` is what find_chain
// or find_stack made of it, `in` and `out` the features of x and y. `kept` are tensors that it needs until its kernels are launched, after which PyTorch's streams
// keep them. `prepared` is what passes that read weights alone have made, if they have run.
void run_on_cuda(const Text& text, const void* chain, const Tensor& x, int64_t in, int64_t out, const cuda::Params& params,
                 std::vector<Tensor>& kept, void* second = nullptr, void* prepared = nullptr) {
  const cuda::PlanKey key{chain, dtype_of(x), cuda::batch_class(params.batch), x.get_device_index()};
  const cuda::Program& program = program_of(key, text.value);
  const cuda::Device& device = cuda::find_device(key.device);
  void* others[4] = {nullptr, nullptr, prepared, second};
  for (int i = 0; i < 3; ++i) {
    if (!program.plan.scratch[i] || (i == 2 && prepared)) continue;
    const int64_t batch = params.batch, samples = program.plan.chunk ? std::min(program.plan.chunk, batch) : batch;
    kept.push_back(new_matrix(x, i < 2 ? samples : 1, program.plan.scratch[i], aoti_torch_dtype_uint8()));
    others[i] = kept.back().mutable_data_ptr();
  }
  const cuda::ContextScope scope(device);
  const int64_t bytes = bytes_of(key.dtype);
  const cuda::Part part = prepared ? cuda::Part::samples : cuda::Part::all;
  cuda::run(program, part, in * bytes, out * bytes, device, params, others, current_stream(key.device));
}

Tensor forward_cuda(const Tensor& x, const std::vector<Tensor>& weights, const std::optional<Tensor>& bias,
                    const Text& text) {
  const Chain& chain = find_chain(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_inputs(chain, x, weights, bias);
  STD_TORCH_CHECK(weights.size() <= cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS,
                  " weights at most, the chain has ", weights.size());
  const int64_t batch = x.size(0);
  Tensor y = new_matrix(x, batch, chain.out_features());
  if (!batch) return y;

  std::vector<Tensor> kept;
  kept.reserve(weights.size() + 5);
  auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
  cuda::Params params;
  params.x = address(x);
  params.y = y.mutable_data_ptr();
  params.bias = bias ? address(*bias) : nullptr;
  params.batch = batch;
  for (size_t i = 0; i < weights.size(); ++i) params.weights[i] = address(weights[i]);
  if (weights.size() < cuda::MAX_WEIGHTS) params.weights[weights.size()] = params.bias;  // where a stack's layer has it
  run_on_cuda(text, &chain, x, x.size(1), chain.out_features(), params, kept);
  return y;
}

// The gradient of what a chain activates, from grad_y; or, with "through", of what was activated, from its result.
Tensor slopes_cuda(const Tensor& beside, const Tensor& x, const std::vector<Tensor>& weights,
                   const std::optional<Tensor>& bias, const Text& text) {
  const Chain& chain = find_chain(text.value);
  const int64_t features = chain.slope + chain.through;
  STD_TORCH_CHECK(features && !chain.parameters(),
                  "factorlayer: the chain should have an activation without parameters and \"slope\" or \"through\"");
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_x(chain, x);
  check_layer(chain, x, weights.data(), weights.size(), bias ? &*bias : nullptr);
  check(beside, x, x.size(0) * features, "what is read beside x");
  STD_TORCH_CHECK(weights.size() < cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS - 1,
                  " weights at most, the chain has ", weights.size());
  Tensor gradient = new_matrix(x, x.size(0), features);
  if (!x.size(0)) return gradient;

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
  run_on_cuda(text, &chain, x, x.size(1), features, params, kept);
  return gradient;
}

// Of layers that one kernel takes, as the planner knows: what the last one makes, or what each does.
std::vector<Tensor> run_layers(const Stack& stack, const Tensor& x, const std::vector<Tensor>& tensors, const Text& text,
                               bool states) {
  const size_t first = states ? 0 : stack.layers.size() - 1, used = tensors.size() + stack.layers.size() - 1 - first;
  STD_TORCH_CHECK(used <= cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS,
                  " weights, biases and states at most, the stack has ", used);
  const int64_t batch = x.size(0);
  std::vector<Tensor> made;
  for (size_t i = first; i < stack.layers.size(); ++i) made.push_back(new_matrix(x, batch, stack.layers[i].out_features()));
  if (!batch) return made;

  std::vector<Tensor> kept;
  kept.reserve(tensors.size() + 4);
  auto address = [&](const Tensor& t) { return kept.emplace_back(aligned(as_contiguous(t))).const_data_ptr(); };
  cuda::Params params{};
  params.x = address(x);
  params.y = made.back().mutable_data_ptr();
  params.batch = batch;
  for (size_t i = 0; i < tensors.size(); ++i) params.weights[i] = address(tensors[i]);
  for (size_t i = 0; i + 1 < made.size(); ++i) params.weights[tensors.size() + i] = made[i].mutable_data_ptr();
  run_on_cuda(text, &find_stack(text.value), x, x.size(1), stack.layers.back().out_features(), params, kept);
  return made;
}

// Of a stack that one kernel takes, or of a single layer.
Tensor stack_forward_cuda(const Tensor& x, const std::vector<Tensor>& tensors, const Text& text) {
  const Stack& stack = find_stack(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_layers(stack, x, tensors);
  if (stack.layers.size() == 1) {  // whose plan is a chain's
    const bool has_bias = stack.layers[0].bias;
    const std::optional<Tensor> bias = has_bias ? std::optional<Tensor>(tensors.back()) : std::nullopt;
    return forward_cuda(x, {tensors.begin(), tensors.end() - has_bias}, bias, text);
  }
  return run_layers(stack, x, tensors, text, false).back();
}

// What each layer makes, of a stack that one kernel takes.
std::vector<Tensor> stack_states_cuda(const Tensor& x, const std::vector<Tensor>& tensors, const Text& text) {
  const Stack& stack = find_stack(text.value);
  STD_TORCH_CHECK(x.is_cuda(), "factorlayer: x must be a CUDA tensor, as the others are");
  check_layers(stack, x, tensors);
  return run_layers(stack, x, tensors, Text{text.value + " | states"}, true);
}

// Of a frozen stack: bytes that the plans of all classes of batches need for prepared weights, and those before one's.
struct Prepared {
  int64_t all = 0, before = 0;
  bool own = false;  // whether that one needs any

  Prepared(const Stack& stack, const Text& text, DType dtype, int device, int batch_class) {
    for (int each = 0; each < 3; ++each) {
      const int64_t bytes = program_of({&stack, dtype, each, device}, text.value).plan.prepared;
      if (each == batch_class) before = all, own = bytes;
      all += (bytes + 255) / 256 * 256;  // as what comes before
    }
  }
};

// Where the tensors of a frozen stack's layers are.
void set_weights(cuda::Params& params, const Stack& stack, const char* first, int64_t bytes) {
  const size_t count = stack.places.size() - 1;
  STD_TORCH_CHECK(count <= cuda::MAX_WEIGHTS, "factorlayer: CUDA kernels take ", cuda::MAX_WEIGHTS,
                  " weights and biases at most, the stack has ", count);
  for (size_t i = 0; i < count; ++i) params.weights[i] = first + stack.places[i] * bytes;
}

// What the kernels for each class of batches prepare of weights, class by class. `values` has the tensors of all layers.
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
  for (int each = 0; each < 3; ++each) {
    const Prepared prepared(stack, text, dtype, index, each);
    if (!prepared.own) continue;
    void* others[4] = {nullptr, nullptr, static_cast<char*>(made.mutable_data_ptr()) + prepared.before, nullptr};
    const cuda::Program& program = program_of({&stack, dtype, each, index}, text.value);
    cuda::run(program, cuda::Part::weights, 0, 0, device, params, others, current_stream(index));
  }
  return made;
}

// `frozen` has the tensors of all layers, side by side, and behind them what stack_prepare makes of them.
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

// Over the samples: the gradient of a bias.
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

// Of the one weight of the chain, [.. q, p] as [rows, p]: from the states before and behind its contraction. With a bias in
// one row, whose end is the bias's. Or of a bias alone, if the chain is "sums": grad_y comes as x, too.
Tensor weight_gradient_cuda(const Tensor& grad_y, const Tensor& x, const Text& text) {
  const Chain& chain = find_chain(text.value);
  STD_TORCH_CHECK(chain.gradient || chain.sums,
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

// A part of a tensor of one row
Tensor part(const Tensor& whole, int64_t first, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(whole.get(), int64_t(sizes.size()), sizes.data(),
                                                               strides.data(), first, &made));
  return Tensor(made);
}

Tensor part_like(const Tensor& whole, int64_t first, const Tensor& like) {
  std::vector<int64_t> sizes(like.dim());
  for (int64_t i = 0; i < like.dim(); ++i) sizes[i] = like.size(i);
  return part(whole, first, sizes);
}

// Of x and of a bias if they are wanted, bits 1 and 2, and of all weights, which lie side by side: by a plan for all of them
// at once. A chain with a bias makes this one's as well, behind those, and leaves that of x out if it can.
std::vector<Tensor> gradients_cuda(const Tensor& grad_y, const Tensor& x, const std::vector<Tensor>& weights,
                                   const Text& text, int64_t wanted) {
  const Chain& chain = find_chain(text.value);
  STD_TORCH_CHECK(chain.backward, "factorlayer: the chain should be contractions and \"backward\"");
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2 && x.size(1) == chain.in_features(), "factorlayer: x must be [batch, ",
                  chain.in_features(), "], a CUDA tensor");
  STD_TORCH_CHECK(weights.size() == chain.contractions.size() && weights.size() + 1 < cuda::MAX_WEIGHTS,
                  "factorlayer: the chain has ", chain.contractions.size(), " weights, ", weights.size(), " were given");
  check(grad_y, x, x.size(0) * chain.out_features(), "grad_y");
  STD_TORCH_CHECK(grad_y.dim() == 2, "factorlayer: grad_y must be [batch, ", chain.out_features(), "]");
  check_slabs(chain, x);
  int64_t count = 0;
  for (const Contraction& c : chain.contractions) {
    STD_TORCH_CHECK(c.weight < int64_t(weights.size()), "factorlayer: the chain names weight ", c.weight,
                    ", which was not given");
    check(weights[c.weight], x, c.weight_size(), "a weight");
    count += c.weight_size();
  }
  const bool of_x = wanted & 1, of_bias = wanted & 2;
  std::optional<Tensor> grad_x;
  if (of_x || !chain.bias) grad_x = new_matrix(x, x.size(0), chain.in_features());
  Tensor others = new_matrix(x, 1, count + (chain.bias ? chain.out_features() : 0));
  std::vector<Tensor> gradients;
  gradients.reserve(weights.size() + 2);
  if (of_x) gradients.push_back(*grad_x);
  if (of_bias && chain.bias) gradients.push_back(part(others, count, {chain.out_features()}));
  if (of_bias && !chain.bias) gradients.push_back(sums_cuda(grad_y, {"sums " + std::to_string(chain.out_features())}));
  count = 0;
  for (const Tensor& weight : weights) {
    gradients.push_back(part_like(others, count, weight));
    count += weight.numel();
  }
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
  for (size_t i = 0; i < weights.size(); ++i) params.weights[i] = address(weights[i]);
  params.weights[weights.size()] = address(grad_y);
  params.weights[weights.size() + 1] = others.mutable_data_ptr();  // for a pass that makes x's as well
  run_on_cuda(text, &chain, x, x.size(1), chain.out_features(), params, kept, others.mutable_data_ptr());
  return gradients;
}

// Of a stack whose gradients one kernel makes, as the planner knows: all of them, of which the wanted ones are returned.
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

// The table of plans, and the compiler by itself. What can fail to compile returns nothing, or message, source, log and
// plan: an exception would bring the message only.

std::vector<std::string> in_parts(const cuda::Failure& failure) {
  return {failure.what(), failure.source, failure.log, failure.plan};
}

cuda::PlanKey key_of(const Text& chain, const Text& dtype, int64_t batch_class, int64_t device) {
  STD_TORCH_CHECK(batch_class >= 0 && batch_class <= 2, "factorlayer: a batch class should be 0, 1 or 2, it is ",
                  batch_class);
  STD_TORCH_CHECK(device >= 0 && device < 1 << 16, "factorlayer: a device should be its index, from 0 on, it is ", device);
  const bool several = chain.value.find('|') != std::string::npos;
  const void* described = several ? static_cast<const void*>(&find_stack(chain.value)) : &find_chain(chain.value);
  return {described, dtype_named(dtype.value), int(batch_class), int(device)};
}

int64_t batch_class(int64_t batch) { return cuda::batch_class(batch); }

std::string plan(const Text& chain, const Text& dtype, int64_t batch_class, int64_t capability, int64_t processors,
                 int64_t shared_bytes) {
  check_question(chain.value, dtype.value, batch_class, capability, processors, shared_bytes);
  return plan_of(chain.value, dtype_named(dtype.value), int(batch_class), int(capability), int(processors),
                 int(shared_bytes));
}

std::vector<std::string> prepare(const Text& chain, const Text& dtype, int64_t batch_class, int64_t device) {
  try {
    program_of(key_of(chain, dtype, batch_class, device), chain.value);
    return {};
  } catch (const cuda::Failure& failure) {
    return in_parts(failure);
  }
}

std::vector<std::string> install(const Text& chain, const Text& dtype, int64_t batch_class, int64_t device,
                                 const Text& plan) {
  locate_compiler();
  try {
    cuda::build_program(key_of(chain, dtype, batch_class, device), plan.value, true, python::warn);
    return {};
  } catch (const cuda::Failure& failure) {
    return in_parts(failure);
  }
}

std::vector<std::string> failure(const Text& chain, const Text& dtype, int64_t batch_class, int64_t device) {
  const cuda::Failure* found = cuda::find_failure(key_of(chain, dtype, batch_class, device));
  return found ? in_parts(*found) : std::vector<std::string>();
}

std::vector<std::string> fill_cache(const Text& plan) {
  locate_compiler();
  for (const Pass& pass : parse_plan(plan.value).passes) {
    std::string warning;
    try {
      cuda::cubin_of(pass, warning);
    } catch (const cuda::CompilationFailed& error) {
      return {error.what(), pass.source, error.log, plan.value};
    }
    if (!warning.empty()) python::warn(warning);
  }
  return {};
}

constexpr size_t MOST_OPTIONS = 64;

// The cubin (empty if there is none), the log, and what went wrong.
std::tuple<Tensor, std::string, std::string> compile(const Text& source, const Text& kernel, const Text& architecture,
                                                     const std::vector<Text>& options) {
  STD_TORCH_CHECK(is_kernel_name(kernel.value), "factorlayer: a kernel's name should be at most ", MOST_NAME,
                  " letters, digits and underscores, it is \"", shown(kernel.value), "\"");
  STD_TORCH_CHECK(is_architecture(architecture.value), "factorlayer: an architecture should be such as sm_90 or sm_90a, it is \"",
                  shown(architecture.value), "\"");
  STD_TORCH_CHECK(int64_t(source.value.size()) <= MOST_SOURCE && options.size() <= MOST_OPTIONS,
                  "factorlayer: a kernel's source should have ", MOST_SOURCE, " bytes at most, with ", MOST_OPTIONS,
                  " options, it has ", source.value.size(), " and ", options.size());
  auto check_text = [](const std::string& text) {
    STD_TORCH_CHECK(text.find('\0') == std::string::npos, "factorlayer: source and options should be text, there is a byte that is 0");
  };
  check_text(source.value);
  for (const Text& option : options) check_text(option.value);
  locate_compiler();
  std::vector<std::string> words;
  for (const Text& option : options) words.push_back(option.value);
  cuda::Compiled compiled;
  std::string error;
  try {
    compiled = cuda::compile(source.value, kernel.value, architecture.value, words);
  } catch (const cuda::CompilationFailed& failed) {
    compiled.log = failed.log;
    error = failed.what();
  }
  Tensor cubin = torch::stable::empty({int64_t(compiled.cubin.size())}, ScalarType::Byte);
  std::copy(compiled.cubin.begin(), compiled.cubin.end(), static_cast<char*>(cubin.mutable_data_ptr()));
  return {cubin, compiled.log, error};
}

std::vector<std::string> compiler() {
  locate_compiler();
  return {cuda::find_compiler()->version, cuda::find_compiler()->path};
}

// A line for each: file, bytes, whole or damaged, kernel or plan, name, architecture, compiler, package.
std::vector<std::string> cache_entries() {
  std::vector<std::string> lines;
  for (const cache::Entry& entry : cache::entries())
    lines.push_back(entry.file + "\t" + std::to_string(entry.bytes) + "\t" +
                    (entry.whole ? "whole" : "damaged") + "\t" + entry.kind + "\t" + entry.name + "\t" +
                    entry.architecture + "\t" + entry.compiler + "\t" + entry.package);
  return lines;
}

std::string cache_folder() { return cache::folder(); }

int64_t remove_cache_entries(bool all) { return cache::remove_entries(all); }

int64_t cache_occupied() { return cache::occupied(); }

int64_t cache_limit() { return cache::limit(); }

std::string set_cache_limit(int64_t bytes) { return cache::set_limit(bytes); }

// Eager mode, past the dispatcher

using eager::Given;

// Of the tensors of a layer; what the fused kernels do not know is refused.
struct Site {
  DType dtype;
  int32_t type, index, torch_dtype;
  bool is_cpu;

  Site(const Given& x) : type(aoti_torch_device_type_cpu()), index(x.device), is_cpu(x.device_type == 1) {
    const int kind = x.lanes == 1 ? x.code * 100 + x.bits : 0;
    switch (kind) {
      case 264: dtype = DType::float64, torch_dtype = aoti_torch_dtype_float64(); break;
      case 232: dtype = DType::float32, torch_dtype = aoti_torch_dtype_float32(); break;
      case 216: dtype = DType::float16, torch_dtype = aoti_torch_dtype_float16(); break;
      case 416: dtype = DType::bfloat16, torch_dtype = aoti_torch_dtype_bfloat16(); break;
      default: throw std::invalid_argument("another dtype");
    }
    if (!is_cpu && x.device_type != 2) throw std::invalid_argument("another device");
    if (!is_cpu) type = aoti_torch_device_type_cuda();
  }

  Tensor make(int64_t dimensions, const int64_t* sizes) const {
    int64_t strides[2] = {dimensions > 1 ? sizes[1] : 1, 1};
    std::vector<int64_t> many;
    const int64_t* given = strides;
    if (dimensions > 2) {
      many.assign(size_t(dimensions), 1);
      for (int64_t i = dimensions - 1; i > 0; --i) many[i - 1] = many[i] * sizes[i];
      given = many.data();
    }
    AtenTensorHandle made = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dimensions, sizes, given, torch_dtype, type, index, &made));
    return Tensor(made);
  }
  Tensor make(int64_t rows, int64_t columns) const {
    const int64_t sizes[] = {rows, columns};
    return make(2, sizes);
  }
};

// Whether kernels can read it as it lies. One without memory stands for zeros, and one whose last stride is not 1 may be
// another one's imaginary part, negated by name only: both are the dispatcher's business.
bool is_plain(const Given& t, const Given& x, int64_t elements) {
  const bool at_home = t.device_type == x.device_type && t.device == x.device, alike = t.code == x.code && t.bits == x.bits;
  if (!at_home || !alike || t.lanes != 1 || !t.data || t.offset) return false;
  if (t.device_type != 1 && reinterpret_cast<uintptr_t>(t.data) % 16) return false;
  int64_t count = 1;
  for (int32_t i = t.dimensions - 1; i >= 0; count *= t.sizes[i--])
    if ((t.sizes[i] != 1 || i == t.dimensions - 1) && t.strides[i] != count) return false;
  return count == elements;
}

// Whether they are x, weights and a bias of the chain, or x is as wide as y.
bool are_of_layer(const Chain& chain, const Given* tensors, size_t given) {
  const Given& x = tensors[0];
  if (given != 1 + chain.weights() + chain.bias || !chain.makes_y() || chain.turned || chain.x_turned) return false;
  if (x.dimensions != 2 || !x.sizes[0] || !is_plain(x, x, x.sizes[0] * chain.in_features())) return false;
  const size_t count = chain.contractions.size();
  for (const Contraction& c : chain.contractions) {
    if (c.weight >= int64_t(count)) return false;
    const Given& w = tensors[1 + c.weight];
    if (!is_plain(w, x, chain.rank * c.weight_size()) || w.dimensions < 2) return false;
    if (w.sizes[w.dimensions - 1] != c.p || w.sizes[w.dimensions - 2] != c.q) return false;
  }
  for (size_t i = count; i < chain.weights(); ++i)
    if (!is_plain(tensors[1 + i], x, 1)) return false;
  const Given& bias = tensors[given - 1];
  return !chain.bias || (bias.dimensions == 1 && is_plain(bias, x, chain.out_features()));
}

// What factorlayer/functional.py takes these kernels for.
bool is_chosen(const Chain& chain, const Given& x) {
  const auto& steps = chain.contractions;
  const bool tied = std::all_of(steps.begin(), steps.end(), [](const Contraction& c) { return c.tied; });
  return steps.size() > 1 && (tied || !chain.tf32 || cuda::find_device(x.device).capability == 90);
}

bool has_kernels(const Chain& chain, const Site& site, int64_t batch) {
  return chain.weights() + 1 < cuda::MAX_WEIGHTS &&
         cuda::find_program({&chain, site.dtype, cuda::batch_class(batch), site.index});
}

// x, weights and bias on a CPU
cpu::Problem problem_of(const Chain& chain, DType dtype, const Given* tensors, size_t given) {
  STD_TORCH_CHECK(chain.program || cpu::has_activation(chain.activation), "factorlayer: unknown stage ", chain.activation);
  cpu::Problem problem{{&chain}, dtype, tensors[0].sizes[0], {}};
  for (size_t i = 0; i < given; ++i) problem.tensors.push_back(tensors[i].data);
  return problem;
}

eager::Handle handle_of(const Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return handle;
}

// All gradients of a layer at once, without the bias's and with it: what autograd/backward.py would ask for.
struct Back {
  Text texts[2];
  const Chain* chains[2] = {nullptr, nullptr};
};

const Back& back_of(const std::string& text) {
  static Table<std::string, Back> all;
  return all.find_or_add(text, [&] {
    const Chain& chain = find_chain(text);
    Back back;
    if (chain.rank > 1 || chain.activation != "identity") return back;
    const std::string tf32 = chain.tf32 ? "; tf32" : "", bias = chain.bias ? "; bias" : "";
    const std::string plain = text.substr(0, text.size() - tf32.size() - bias.size());
    for (int i = 0; i <= int(chain.bias); ++i) {
      back.texts[i].value = plain + (i ? bias : "") + "; backward" + tf32;
      back.chains[i] = &find_chain(back.texts[i].value);
    }
    return back;
  });
}

std::vector<Tensor> gradients_on_cpu(const Chain& chain, const Site& site, const Given* tensors, size_t given, int64_t wanted) {
  const cpu::Problem problem = problem_of(chain, site.dtype, tensors + 1, given - 1);
  std::vector<void*> to(given - 1);
  std::vector<Tensor> made;
  const size_t count = chain.weights();
  for (size_t bit = 0; bit < count + 2; ++bit) {
    if (!(wanted >> bit & 1)) continue;
    const size_t at = bit == 0 ? 0 : bit == 1 ? count + 1 : bit - 1;  // among x, weights and bias
    const Given& like = tensors[1 + at];
    const Tensor& gradient = made.emplace_back(site.make(like.dimensions, like.sizes));
    to[at] = gradient.mutable_data_ptr();
    cpu::prefer_huge_pages(to[at], gradient.numel() * int64_t(gradient.element_size()));
  }
  cpu::backward(problem, tensors[0].data, to, threads_for(problem), parallel);
  return made;
}

// By one plan for all of them, of a chain that back_of has made.
std::vector<Tensor> gradients_on_cuda(const Chain& chain, const Text& text, const Site& site, const Given* tensors,
                                      int64_t wanted) {
  const Given *const x = tensors + 1, *const weights = tensors + 2;
  const size_t weight_count = chain.weights();
  const int64_t batch = x->sizes[0], in = chain.in_features(), out = chain.out_features();
  int64_t count = 0;
  for (const Contraction& c : chain.contractions) count += c.weight_size();
  std::optional<Tensor> grad_x;
  if (wanted & 1 || !chain.bias) grad_x = site.make(batch, in);
  const Tensor others = site.make(1, count + (chain.bias ? out : 0));
  cuda::Params params;
  params.x = x->data;
  params.y = grad_x ? grad_x->mutable_data_ptr() : nullptr;
  params.bias = nullptr;
  params.batch = batch;
  for (size_t i = 0; i < weight_count; ++i) params.weights[i] = weights[i].data;
  params.weights[weight_count] = tensors[0].data;
  params.weights[weight_count + 1] = others.mutable_data_ptr();
  std::vector<Tensor> kept;
  run_on_cuda(text, &chain, others, in, out, params, kept, others.mutable_data_ptr());

  std::vector<Tensor> made;
  made.reserve(weight_count + 2);
  if (wanted & 1) made.push_back(*grad_x);
  if (wanted & 2) made.push_back(part(others, count, {out}));
  count = 0;
  for (size_t i = 0; i < weight_count; ++i) {
    made.push_back(part(others, count, {weights[i].sizes, weights[i].sizes + weights[i].dimensions}));
    count += made.back().numel();
  }
  return made;
}

}  // namespace

eager::Handle eager::forward(const std::string& text, bool chooses, const std::vector<Given>& tensors) {
  const Chain& chain = find_chain(text);
  const Given& x = tensors[0];
  if (!are_of_layer(chain, tensors.data(), tensors.size()) || (chooses && !is_chosen(chain, x))) return nullptr;
  const Site site(x);
  const int64_t batch = x.sizes[0], in = chain.in_features(), out = chain.out_features();
  if (!site.is_cpu && !has_kernels(chain, site, batch)) return nullptr;
  const Tensor y = site.make(batch, out);
  if (site.is_cpu) {
    run_forward(problem_of(chain, site.dtype, tensors.data(), tensors.size()), y);
    return handle_of(y);
  }
  cuda::Params params;
  params.x = x.data;
  params.y = y.mutable_data_ptr();
  params.bias = chain.bias ? tensors.back().data : nullptr;
  params.batch = batch;
  for (size_t i = 0; i < chain.weights(); ++i) params.weights[i] = tensors[1 + i].data;
  params.weights[chain.weights()] = params.bias;  // where a stack's layer has it
  std::vector<Tensor> kept;
  run_on_cuda({text}, &chain, y, in, out, params, kept);
  return handle_of(y);
}

std::vector<eager::Handle> eager::gradients(const std::string& text, const std::vector<Given>& tensors, int64_t wanted) {
  const Chain& chain = find_chain(text);
  const Given &grad_y = tensors[0], &x = tensors[1];
  std::vector<Handle> handles;
  if (!are_of_layer(chain, tensors.data() + 1, tensors.size() - 1) || grad_y.dimensions != 2 ||
      !is_plain(grad_y, x, x.sizes[0] * chain.out_features()))
    return handles;
  const Site site(x);
  std::vector<Tensor> made;
  if (site.is_cpu) {
    made = gradients_on_cpu(chain, site, tensors.data(), tensors.size(), wanted);
  } else {
    const bool of_bias = wanted & 2, of_weights = wanted >> 2 == (int64_t(1) << chain.weights()) - 1;
    const Back& back = back_of(text);
    const Chain* const found = back.chains[of_bias];
    if (of_weights && found && has_kernels(*found, site, x.sizes[0]))
      made = gradients_on_cuda(*found, back.texts[of_bias], site, tensors.data(), wanted);
  }
  for (const Tensor& gradient : made) handles.push_back(handle_of(gradient));
  return handles;
}

}  // namespace factorlayer

STABLE_TORCH_LIBRARY(factorlayer, m) {
  m.def("forward(Tensor x, Tensor[] weights, Tensor? bias, str chain) -> Tensor");
  m.def("backward(Tensor grad_y, Tensor x, Tensor[] weights, Tensor? bias, str chain, int wanted) -> Tensor[]");
  m.def("stack_forward(Tensor x, Tensor[] tensors, str stack) -> Tensor");
  m.def("stack_states(Tensor x, Tensor[] tensors, str stack) -> Tensor[]");
  m.def("stack_prepare(Tensor values, str stack) -> Tensor");
  m.def("stack_frozen(Tensor x, Tensor frozen, str stack) -> Tensor");
  m.def("stack_backward(Tensor grad_y, Tensor x, Tensor[] tensors, str stack, int[] wanted) -> Tensor[]");
  m.def("layers_backward(Tensor grad_y, Tensor x, Tensor[] states, Tensor[] tensors, str stack, int[] wanted) -> "
        "Tensor[]");
  m.def("slopes(Tensor beside, Tensor x, Tensor[] weights, Tensor? bias, str chain) -> Tensor");
  m.def("weight_gradient(Tensor grad_y, Tensor x, str chain) -> Tensor");
  m.def("gradients(Tensor grad_y, Tensor x, Tensor[] weights, str chain, int wanted) -> Tensor[]");
  m.def("instruction_set() -> str");
  m.def("batch_class(int batch) -> int");
  m.def("plan(str chain, str dtype, int batch_class, int capability, int processors, int shared_bytes) -> str");
  m.def("ask_planner(str question, str chain, str dtype, int capability, int processors, int shared_bytes) -> str");
  m.def("prepare(str chain, str dtype, int batch_class, int device) -> str[]");
  m.def("install(str chain, str dtype, int batch_class, int device, str plan) -> str[]");
  m.def("failure(str chain, str dtype, int batch_class, int device) -> str[]");
  m.def("compile(str source, str kernel, str architecture, str[] options) -> (Tensor, str, str)");
  m.def("compiler() -> str[]");
  m.def("fill_cache(str plan) -> str[]");
  m.def("cache_entries() -> str[]");
  m.def("cache_folder() -> str");
  m.def("remove_cache_entries(bool all) -> int");
  m.def("cache_occupied() -> int");
  m.def("cache_limit() -> int");
  m.def("set_cache_limit(int bytes) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CPU, m) {
  m.impl("forward", TORCH_BOX(&factorlayer::forward));
  m.impl("backward", TORCH_BOX(&factorlayer::backward));
  m.impl("stack_forward", TORCH_BOX(&factorlayer::stack_forward));
  m.impl("stack_backward", TORCH_BOX(&factorlayer::stack_backward));
  m.impl("stack_frozen", TORCH_BOX(&factorlayer::stack_frozen));
}

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CUDA, m) {
  m.impl("forward", TORCH_BOX(&factorlayer::forward_cuda));
  m.impl("stack_forward", TORCH_BOX(&factorlayer::stack_forward_cuda));
  m.impl("stack_states", TORCH_BOX(&factorlayer::stack_states_cuda));
  m.impl("stack_prepare", TORCH_BOX(&factorlayer::stack_prepare_cuda));
  m.impl("stack_frozen", TORCH_BOX(&factorlayer::stack_frozen_cuda));
  m.impl("stack_backward", TORCH_BOX(&factorlayer::stack_backward_cuda));
  m.impl("slopes", TORCH_BOX(&factorlayer::slopes_cuda));
  m.impl("weight_gradient", TORCH_BOX(&factorlayer::weight_gradient_cuda));
  m.impl("gradients", TORCH_BOX(&factorlayer::gradients_cuda));
}

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&factorlayer::instruction_set));
  m.impl("batch_class", TORCH_BOX(&factorlayer::batch_class));
  m.impl("plan", TORCH_BOX(&factorlayer::plan));
  m.impl("ask_planner", TORCH_BOX(&factorlayer::ask_planner));
  m.impl("prepare", TORCH_BOX(&factorlayer::prepare));
  m.impl("install", TORCH_BOX(&factorlayer::install));
  m.impl("failure", TORCH_BOX(&factorlayer::failure));
  m.impl("compile", TORCH_BOX(&factorlayer::compile));
  m.impl("compiler", TORCH_BOX(&factorlayer::compiler));
  m.impl("fill_cache", TORCH_BOX(&factorlayer::fill_cache));
  m.impl("cache_entries", TORCH_BOX(&factorlayer::cache_entries));
  m.impl("cache_folder", TORCH_BOX(&factorlayer::cache_folder));
  m.impl("remove_cache_entries", TORCH_BOX(&factorlayer::remove_cache_entries));
  m.impl("cache_occupied", TORCH_BOX(&factorlayer::cache_occupied));
  m.impl("cache_limit", TORCH_BOX(&factorlayer::cache_limit));
  m.impl("set_cache_limit", TORCH_BOX(&factorlayer::set_cache_limit));
}
