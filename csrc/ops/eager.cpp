// The calls of eager mode that go past PyTorch's dispatcher.
#include "../eager.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <vector>

#include "../chain.h"
#include "../table.h"
#include "decoding.h"
#include "launch.h"
#include "on_cpu.h"

namespace factorlayer {
namespace {

using eager::Given;

// The dtype and device of a layer's tensors. One that the fused kernels do not know is refused.
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

// Whether kernels can read a tensor as it lies. A tensor without memory stands for zeros, and one whose last stride is not 1 may
// be the imaginary part of another, negated by name only: both are left to the dispatcher.
bool is_plain(const Given& t, const Given& x, int64_t elements) {
  const bool at_home = t.device_type == x.device_type && t.device == x.device, alike = t.code == x.code && t.bits == x.bits;
  if (!at_home || !alike || t.lanes != 1 || !t.data || t.offset) return false;
  if (t.device_type != 1 && reinterpret_cast<uintptr_t>(t.data) % 16) return false;
  int64_t count = 1;
  for (int32_t i = t.dimensions - 1; i >= 0; count *= t.sizes[i--])
    if ((t.sizes[i] != 1 || i == t.dimensions - 1) && t.strides[i] != count) return false;
  return count == elements;
}

// How many tensors x consists of.
size_t count_of_x(const Chain& chain) { return std::max<size_t>(1, chain.inputs.size()); }

// Whether `input` has the samples of x and so many features, and kernels can read it.
bool is_input(const Given& input, const Given& x, int64_t features) {
  return input.dimensions == 2 && x.sizes[0] && input.sizes[0] == x.sizes[0] && input.sizes[1] == features &&
         is_plain(input, x, x.sizes[0] * features);
}

// Whether the tensors are the chain's weights, and behind them its bias.
bool are_weights(const Chain& chain, const Given& x, const Given* weights, size_t given) {
  if (given != chain.weights() + chain.bias || !chain.makes_y() || chain.turned || chain.x_turned) return false;
  const size_t count = chain.contractions.size();
  for (const Contraction& c : chain.contractions) {
    if (c.weight >= int64_t(count)) return false;
    const Given& w = weights[c.weight];
    if (!is_plain(w, x, chain.rank * c.weight_size()) || w.dimensions < 2) return false;
    if (w.sizes[w.dimensions - 1] != c.p || w.sizes[w.dimensions - 2] != c.q) return false;
  }
  for (size_t i = count; i < chain.weights(); ++i)
    if (!is_plain(weights[i], x, 1)) return false;
  if (!chain.bias) return true;
  const Given& bias = weights[given - 1];
  return bias.dimensions == 1 && is_plain(bias, x, chain.out_features());
}

// Whether the tensors are those that x consists of, the chain's weights and its bias.
bool are_of_layer(const Chain& chain, const Given* tensors, size_t given) {
  const Given& x = tensors[0];
  const size_t of_x = count_of_x(chain);
  if (given < of_x || !are_weights(chain, x, tensors + of_x, given - of_x)) return false;
  for (size_t i = 0; i < of_x; ++i)
    if (!is_input(tensors[i], x, chain.inputs.empty() ? chain.in_features() : chain.inputs[i])) return false;
  return true;
}

// Whether the tensors are x and the weights and biases of the stack, layer by layer.
bool are_of_stack(const Stack& stack, const Given* tensors, size_t given) {
  const Given& x = tensors[0];
  if (stack.backward || stack.states || stack.frozen || !stack.layers[0].inputs.empty()) return false;
  if (!is_input(x, x, stack.layers[0].in_features())) return false;
  size_t at = 1;
  for (const Chain& layer : stack.layers) {
    const size_t count = layer.weights() + layer.bias;
    if (count > given - at || !are_weights(layer, x, tensors + at, count)) return false;
    at += count;
  }
  return at == given;
}

// The numbers of samples that a layer's kernels are taken for, without a backward pass and with one: a bit for each power of two
// that they round up to.
struct Taken {
  std::atomic<uint64_t> batches[2] = {};
};

Table<cuda::PlanKey, Taken, cuda::KeyHash>& all_taken() {
  static Table<cuda::PlanKey, Taken, cuda::KeyHash> all;
  return all;
}

uint64_t bit_of(int64_t batch) {
  uint64_t bit = 1;
  for (int64_t left = (batch - 1) >> 1; left > 0; left >>= 1) bit <<= 1;
  return bit;
}

// The most elements of a dense weight whose product is not left to a library: LARGEST_DENSE of autograd/stack_ops.py.
constexpr int64_t kLargestDense = int64_t(1) << 19;

// Whether take() has named these kernels. `chain` is what find_chain or find_stack made of a text.
bool is_taken(const void* chain, const Site& site, int64_t batch, bool recorded) {
  const Taken* found = all_taken().find({chain, site.dtype, 0, site.index});
  return found && found->batches[recorded].load(std::memory_order_relaxed) & bit_of(batch);
}

// The power of two that a number of samples rounds up to, in the place of a plan's class.
int place_of(int64_t batch) { return __builtin_ctzll(bit_of(batch)); }

// How a layer runs that is trained, as settle() says: by this text and chain, which keep states, or as ever.
struct Trained {
  std::string text;
  const Chain* chain = nullptr;
};

Table<cuda::PlanKey, Trained, cuda::KeyHash>& all_trained() {
  static Table<cuda::PlanKey, Trained, cuda::KeyHash> all;
  return all;
}

// Whether factorlayer/functional.py would choose the fused kernels: on a GPU if it has said so, on a CPU unless the layer is one
// product that is large or of 16 bits.
bool is_small(const Chain& layer) { return layer.contractions.size() > 1 || layer.contractions[0].weight_size() <= kLargestDense; }
bool has_vectors(const Site& site) { return site.dtype == DType::float32 || site.dtype == DType::float64; }
bool is_chosen(const Chain& chain, const Site& site, int64_t batch, bool recorded) {
  if (!site.is_cpu) return is_taken(&chain, site, batch, recorded);
  return chain.contractions.size() > 1 || (is_small(chain) && has_vectors(site));
}
// Whether factorlayer/stacks/stack.py would.
bool is_chosen(const Stack& stack, const Site& site, int64_t batch, bool recorded) {
  if (!site.is_cpu) return is_taken(&stack, site, batch, recorded);
  return has_vectors(site) && std::all_of(stack.layers.begin(), stack.layers.end(), is_small);
}

bool has_kernels(const Chain& chain, const Site& site, int64_t batch) {
  return chain.weights() + count_of_x(chain) + chain.kept.size() < cuda::MAX_WEIGHTS &&
         cuda::find_program({&chain, site.dtype, cuda::batch_class(batch), site.index});
}

// The problem that kernels of a CPU solve: x, and the weights and bias of each layer.
cpu::Problem problem_of(std::vector<const Chain*> layers, DType dtype, const Given* tensors, size_t given) {
  for (const Chain* layer : layers)
    STD_TORCH_CHECK(layer->program || cpu::has_activation(layer->activation), "factorlayer: unknown stage ", layer->activation);
  const Chain& chain = *layers[0];
  const size_t of_x = count_of_x(chain);
  cpu::Problem problem{std::move(layers), dtype, tensors[0].sizes[0], {tensors[0].data}, {}};
  for (size_t i = of_x; i < given; ++i) problem.tensors.push_back(tensors[i].data);
  for (size_t i = 0; i < chain.inputs.size(); ++i) problem.inputs.push_back(tensors[i].data);
  return problem;
}

std::vector<const Chain*> layers_of(const Stack& stack) {
  std::vector<const Chain*> layers;
  for (const Chain& layer : stack.layers) layers.push_back(&layer);
  return layers;
}

eager::Handle handle_of(const Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return handle;
}

// The texts that autograd/backward.py would ask for all gradients of a layer at once: without the bias's, and with it.
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
  const cpu::Problem problem = problem_of({&chain}, site.dtype, tensors + 1, given - 1);
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

// The gradients of several layers, or of an x that is several tensors: those whose bit is set, in the order of the tensors.
std::vector<Tensor> gradients_in_order(const std::vector<const Chain*>& layers, const Site& site, const Given* tensors, size_t given,
                                       int64_t wanted) {
  const cpu::Problem problem = problem_of(layers, site.dtype, tensors + 1, given - 1);
  const size_t of_x = problem.inputs.size();
  std::vector<void*> to(problem.tensors.size() + of_x);
  std::vector<Tensor> made;
  for (size_t i = 0; i + 1 < given; ++i) {
    if (!(wanted >> i & 1)) continue;
    const Tensor& gradient = made.emplace_back(site.make(tensors[1 + i].dimensions, tensors[1 + i].sizes));
    void*& place = to[i < of_x ? problem.tensors.size() + i : of_x ? 1 + i - of_x : i];
    place = gradient.mutable_data_ptr();
    cpu::prefer_huge_pages(place, gradient.numel() * int64_t(gradient.element_size()));
  }
  cpu::backward(problem, tensors[0].data, to, threads_for(problem), parallel);
  return made;
}

// All gradients by one plan. `chain` is one that back_of has made.
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

void eager::take(const std::string& text, const std::string& dtype, int device, int64_t batch, bool recorded) {
  const void* const chain = is_stack(text) ? static_cast<const void*>(&find_stack(text)) : &find_chain(text);
  Taken& taken = all_taken().find_or_add({chain, dtype_named(dtype), 0, device}, [] { return Taken(); });
  taken.batches[recorded] |= bit_of(batch);
}

void eager::settle(const std::string& text, const std::string& dtype, int device, int64_t batch, const std::string& kept) {
  const cuda::PlanKey key{&find_chain(text), dtype_named(dtype), place_of(batch), device};
  all_trained().find_or_add(key, [&] { return Trained{kept, kept.empty() ? nullptr : &find_chain(kept)}; });
}

static eager::Made made_alone(eager::Handle y) { return {y ? std::vector<eager::Handle>{y} : std::vector<eager::Handle>(), nullptr}; }

// The y of a stack. On a GPU it is made only if take() has named the stack, by one plan, and unrecorded.
static eager::Handle forward_of_stack(const std::string& text, bool chooses, bool recorded, const std::vector<Given>& tensors) {
  const Stack& stack = find_stack(text);
  const Given& x = tensors[0];
  if (!are_of_stack(stack, tensors.data(), tensors.size())) return nullptr;
  const Site site(x);
  const int64_t batch = x.sizes[0], in = x.sizes[1], out = stack.layers.back().out_features();
  if (chooses && !is_chosen(stack, site, batch, recorded)) return nullptr;
  if (site.is_cpu) {
    const Tensor y = site.make(batch, out);
    run_forward(problem_of(layers_of(stack), site.dtype, tensors.data(), tensors.size()), y);
    return handle_of(y);
  }
  if (!chooses || recorded || tensors.size() > cuda::MAX_WEIGHTS) return nullptr;
  if (!cuda::find_program({&stack, site.dtype, cuda::batch_class(batch), site.index})) return nullptr;
  const Tensor y = site.make(batch, out);
  cuda::Params params{};
  params.x = x.data;
  params.y = y.mutable_data_ptr();
  params.batch = batch;
  for (size_t i = 1; i < tensors.size(); ++i) params.weights[i - 1] = tensors[i].data;
  std::vector<Tensor> kept;
  run_on_cuda({text}, &stack, y, in, out, params, kept);
  return handle_of(y);
}

eager::Made eager::forward(const std::string& text, bool chooses, Recorded recorded, const std::vector<Given>& tensors) {
  const bool is_recorded = recorded != Recorded::no;
  if (is_stack(text)) return made_alone(forward_of_stack(text, chooses, is_recorded, tensors));
  const Chain& chain = find_chain(text);
  const Given& x = tensors[0];
  if (!are_of_layer(chain, tensors.data(), tensors.size())) return {};
  const Site site(x);
  const int64_t batch = x.sizes[0], in = chain.in_features(), out = chain.out_features();
  if (chooses && !is_chosen(chain, site, batch, is_recorded)) return {};
  if (site.is_cpu) {
    const Tensor y = site.make(batch, out);
    run_forward(problem_of({&chain}, site.dtype, tensors.data(), tensors.size()), y);
    return made_alone(handle_of(y));
  }
  const Trained* trained = nullptr;
  if (is_recorded && chain.may_keep()) {
    trained = all_trained().find({&chain, site.dtype, place_of(batch), site.index});
    if (!trained) return {};  // autograd/layer_ops.py has to ask first
  }
  const bool keeps = trained && trained->chain && recorded == Recorded::of_all;
  const Chain& run = keeps ? *trained->chain : chain;
  if (!has_kernels(run, site, batch)) return {};
  const Tensor y = site.make(batch, out);
  cuda::Params params;
  params.x = x.data;
  params.y = y.mutable_data_ptr();
  params.bias = chain.bias ? tensors.back().data : nullptr;
  params.batch = batch;
  const size_t of_x = count_of_x(chain), count = chain.weights();
  for (size_t i = 0; i < count; ++i) params.weights[i] = tensors[of_x + i].data;
  params.weights[count] = params.bias;  // where a stack's layer has it
  cuda::Rows rows{count + 1, {}};
  for (size_t i = 1; i < of_x; ++i) {
    params.weights[count + i] = tensors[i].data;
    rows.bytes.push_back(chain.inputs[i] * bytes_of(site.dtype));
  }
  std::vector<Tensor> states, kept;
  for (size_t i = 0; i < run.kept.size(); ++i) {
    states.push_back(site.make(batch, run.kept[i]));
    params.weights[count + 1 + i] = states.back().mutable_data_ptr();
    rows.bytes.push_back(run.kept[i] * bytes_of(site.dtype));
  }
  run_on_cuda({keeps ? trained->text : text}, &run, y, of_x > 1 ? chain.inputs[0] : in, out, params, kept, nullptr, nullptr, rows);
  Made made{{handle_of(y)}, keeps ? &trained->text : nullptr};
  for (const Tensor& state : states) made.tensors.push_back(handle_of(state));
  return made;
}

// The gradients of a stack on a CPU; none on a GPU, where autograd/stack_ops.py decides what makes them.
static std::vector<Tensor> gradients_of_stack(const Stack& stack, const std::vector<Given>& tensors, int64_t wanted) {
  const Given &grad_y = tensors[0], &x = tensors[1];
  if (x.device_type != 1 || !are_of_stack(stack, tensors.data() + 1, tensors.size() - 1)) return {};
  if (!is_input(grad_y, x, stack.layers.back().out_features())) return {};
  return gradients_in_order(layers_of(stack), Site(x), tensors.data(), tensors.size(), wanted);
}

std::vector<eager::Handle> eager::gradients(const std::string& text, const std::vector<Given>& tensors, int64_t wanted) {
  std::vector<Handle> handles;
  if (is_stack(text)) {
    for (const Tensor& gradient : gradients_of_stack(find_stack(text), tensors, wanted)) handles.push_back(handle_of(gradient));
    return handles;
  }
  const Chain& chain = find_chain(text);
  const Given &grad_y = tensors[0], &x = tensors[1];
  if (!are_of_layer(chain, tensors.data() + 1, tensors.size() - 1) || grad_y.dimensions != 2 ||
      !is_plain(grad_y, x, x.sizes[0] * chain.out_features()))
    return handles;
  const Site site(x);
  std::vector<Tensor> made;
  if (!chain.inputs.empty()) {  // on a GPU, autograd/input_ops.py knows whether they are concatenated
    if (site.is_cpu) made = gradients_in_order({&chain}, site, tensors.data(), tensors.size(), wanted);
  } else if (site.is_cpu) {
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

// Whether a tensor has these sizes and kernels can read it as it lies.
static bool is_plain(const Given& t, const Given& x, std::initializer_list<int64_t> sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return t.dimensions == int32_t(sizes.size()) && std::equal(sizes.begin(), sizes.end(), t.sizes) && is_plain(t, x, count);
}
static bool are_integers(const Given& t, const Given& x, int64_t count) {
  Given like = x;
  like.code = 0, like.bits = 64;  // int64
  return is_plain(t, like, {count});
}

std::vector<eager::Handle> eager::decode(const std::string& text, const std::vector<Given>& tensors, double temperature) {
  const Decoder& decoder = find_decoder(text);
  const Given &tokens = tensors[0], &state = tensors[1], &context = tensors[2], &random = tensors[3];
  const Given* const given = &tensors[4];
  const bool draws = decoder.made == Decoder::drawn;
  const int64_t hidden = decoder.hidden(), batch = tokens.dimensions == 1 ? tokens.sizes[0] : 0;
  if (tensors.size() != 4 + decoder.tensors() || batch < 1 || batch > decoder.samples) return {};
  const bool of_cell = state.dimensions == 2 && decoder.layers == 1;
  if (!are_integers(tokens, state, batch)) return {};
  if (!(of_cell ? is_plain(state, state, {batch, hidden}) : is_plain(state, state, {decoder.layers, batch, hidden}))) return {};
  if (draws != (random.data != nullptr) || (draws && !are_integers(random, state, kRandom))) return {};
  if ((decoder.context > 0) != (context.data != nullptr)) return {};
  if (decoder.context && !is_plain(context, state, {batch, decoder.context})) return {};
  if (given[0].dimensions != 2) return {};
  DecodeTensors read{};
  read.batch = batch, read.rows = given[0].sizes[0];
  if (!is_plain(given[0], state, {read.rows, decoder.embedding}) || !is_plain(given[1], state, {decoder.vocabulary, hidden})) return {};
  if (decoder.biased && !is_plain(given[2], state, {decoder.vocabulary})) return {};
  const Given* layer = given + 2 + decoder.biased;
  for (int64_t l = 0; l < decoder.layers; ++l, layer += decoder.of_layer()) {
    if (!is_plain(layer[0], state, {kGates * hidden, decoder.inputs(l)}) || !is_plain(layer[1], state, {kGates * hidden, hidden})) return {};
    for (size_t i = 0; i < decoder.of_layer(); ++i) {
      if (i > 1 && !is_plain(layer[i], state, {kGates * hidden})) return {};
      read.layers[size_t(4 * l) + i] = layer[i].data;
    }
  }
  const Site site(state);
  if (!site.is_cpu && !cuda::find_program({&decoder, site.dtype, 0, site.index})) return {};
  read.tokens = tokens.data, read.state = state.data, read.context = context.data, read.embedding = given[0].data;
  read.head = given[1].data, read.bias = decoder.biased ? given[2].data : nullptr, read.random = static_cast<int64_t*>(random.data);
  Site of_tokens = site, of_scores = site;
  of_tokens.torch_dtype = aoti_torch_dtype_int64();
  if (site.dtype != DType::float64) of_scores.torch_dtype = aoti_torch_dtype_float32();
  const bool scores = decoder.made == Decoder::scores;
  const Tensor made = scores ? of_scores.make(batch, decoder.vocabulary) : of_tokens.make(1, &batch);
  const Tensor behind = site.make(state.dimensions, state.sizes);
  (scores ? read.scores : read.new_tokens) = made.mutable_data_ptr(), read.new_state = behind.mutable_data_ptr();
  std::vector<Tensor> kept;
  if (site.is_cpu)
    run_decode_on_cpu(decoder, site.dtype, read, temperature);
  else
    run_decode_on_gpu({text}, decoder, behind, read, temperature, kept);
  return {handle_of(made), handle_of(behind)};
}

}  // namespace factorlayer
