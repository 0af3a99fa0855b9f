// The raw ops of a decoder's step and of drawing by scores, on a CPU and on a GPU, and of the few best scores on a GPU. autograd/decode_ops.py calls them.
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../cpu/cpu.h"
#include "checks.h"
#include "decoding.h"
#include "on_cpu.h"

namespace factorlayer {

// A number that is handed to a kernel in the place of an address.
static const void* as_place(int64_t number) { return reinterpret_cast<const void*>(number); }
static const void* as_place(double number) {
  int64_t bits = 0;
  static_assert(sizeof bits == sizeof number, "of 64 bits");
  std::memcpy(&bits, &number, sizeof bits);
  return as_place(bits);
}

void run_decode_on_cpu(const Decoder& decoder, DType dtype, const DecodeTensors& t, double temperature) {
  const Chain& chain = decoder.recurrence->chain;
  STD_TORCH_CHECK(chain.program || cpu::has_activation(chain.activation), "factorlayer: unknown stage ", chain.activation);
  const int64_t* const tokens = static_cast<const int64_t*>(t.tokens);
  for (int64_t b = 0; b < t.batch; ++b)
    STD_TORCH_CHECK(tokens[b] >= 0 && tokens[b] < t.rows, "factorlayer: a decoder's token should be one of the ", t.rows,
                    " that its embedding has, it is ", tokens[b]);
  const cpu::Decode problem{&decoder, dtype,  t.batch,  tokens,
                            t.embedding, t.context, t.state, t.head, t.bias, t.layers.data(),
                            t.random ? uint64_t(t.random[0]) : 0, t.random ? uint64_t(t.random[1]) : 0, temperature};
  double work = double(decoder.vocabulary) * double(decoder.hidden());
  for (int64_t l = 0; l < decoder.layers; ++l) work += double(kGates * decoder.hidden()) * double(decoder.inputs(l) + decoder.hidden());
  cpu::decode(problem, {t.new_state, static_cast<int64_t*>(t.new_tokens), t.scores}, threads_for(work * double(t.batch)), parallel);
  if (t.random) ++t.random[1];
}

// Places among the weights are those that kernels/decode/decode_rows.cuh names; outputs stand behind all.
void run_decode_on_gpu(const Text& text, const Decoder& decoder, const Tensor& like, const DecodeTensors& t, double temperature,
                       std::vector<Tensor>& kept) {
  cuda::Params params;
  params.x = t.tokens, params.y = t.new_state, params.bias = nullptr, params.batch = t.batch;
  const void** place = params.weights;
  for (const void* each : {t.embedding, as_place(t.rows), t.context, t.state, t.head, t.bias, as_place(temperature)})
    *place++ = each;
  for (int64_t i = 0; i < 4 * decoder.layers; ++i) *place++ = t.layers[size_t(i)];
  for (const void* each : {static_cast<const void*>(t.new_tokens ? t.new_tokens : t.scores), static_cast<const void*>(t.random)})
    *place++ = each;
  run_on_cuda(text, &decoder, like, 0, 0, params, kept);
}

namespace {

void check_sizes(const Tensor& t, const Home& home, std::initializer_list<int64_t> sizes, const char* name) {
  const Home own(t);
  bool fine = own.type == home.type && own.index == home.index && own.dtype == home.dtype && t.dim() == int64_t(sizes.size());
  int64_t at = 0;
  for (int64_t size : sizes) fine = fine && t.size(at++) == size;
  std::string wanted;
  if (!fine)
    for (int64_t size : sizes) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  STD_TORCH_CHECK(fine, "factorlayer: ", name, " of a decoder must be [", wanted, "], of the dtype of its state and on its device");
}

void check_integers(const Tensor& t, const Home& home, int64_t elements, const char* name) {
  const Home own(t);
  STD_TORCH_CHECK(own.type == home.type && own.index == home.index && t.scalar_type() == ScalarType::Long && t.dim() == 1 &&
                      t.numel() == elements,
                  "factorlayer: ", name, " of a decoder must be int64 [", elements, "], on the device of its state");
}

void check_random(const Tensor& t, const Home& home) {
  check_integers(t, home, kRandom, "random numbers");
  STD_TORCH_CHECK(t.is_contiguous(), "factorlayer: random numbers of a decoder must be contiguous");
}

// A call's tensors, checked: tokens, state, the context or none, and what stands in `tensors`: embedding, head and its bias, each
// layer's weights of inputs and states, and the biases of both.
struct DecodeCall {
  const Decoder& decoder;
  DecodeTensors read;
  std::vector<Tensor> kept, made;  // made: tokens or scores, and the state

  DecodeCall(const Tensor& tokens, const Tensor& state, const std::optional<Tensor>& context,
             const std::vector<Tensor>& tensors, const std::optional<Tensor>& random, const Text& text)
      : decoder(find_decoder(text.value)), read{} {
    const Home home(state);
    const int64_t hidden = decoder.hidden(), batch = read.batch = tokens.dim() == 1 ? tokens.size(0) : -1;
    STD_TORCH_CHECK(batch >= 0 && batch <= decoder.samples, "factorlayer: tokens of a decoder must be [samples], ",
                    decoder.samples, " of them at most");
    check_integers(tokens, home, batch, "tokens");
    check_sizes(state, home, {decoder.layers, batch, hidden}, "the state");
    STD_TORCH_CHECK(context.has_value() == (decoder.context > 0), "factorlayer: a context must be given where the decoder has one");
    STD_TORCH_CHECK(random.has_value() == (decoder.made == Decoder::drawn), "factorlayer: random numbers must be given where the decoder draws");
    STD_TORCH_CHECK(tensors.size() == decoder.tensors(), "factorlayer: the decoder has ", decoder.tensors(), " tensors, ",
                    tensors.size(), " were given");
    if (context) check_sizes(*context, home, {batch, decoder.context}, "the context");
    if (random) check_random(*random, home);
    read.rows = tensors[0].dim() == 2 ? tensors[0].size(0) : -1;
    check_sizes(tensors[0], home, {read.rows, decoder.embedding}, "the embedding");
    check_sizes(tensors[1], home, {decoder.vocabulary, hidden}, "the head");
    const size_t first = 2 + decoder.biased;
    if (decoder.biased) check_sizes(tensors[2], home, {decoder.vocabulary}, "the head's bias");
    kept.reserve(tensors.size() + 4);
    for (size_t at = first; at < tensors.size(); at += decoder.of_layer()) {
      const size_t l = (at - first) / decoder.of_layer();
      check_sizes(tensors[at], home, {kGates * hidden, decoder.inputs(int64_t(l))}, "weights of inputs");
      check_sizes(tensors[at + 1], home, {kGates * hidden, hidden}, "weights of states");
      for (size_t i = 0; i < decoder.of_layer(); ++i) {
        if (i > 1) check_sizes(tensors[at + i], home, {kGates * hidden}, "a bias");
        read.layers[4 * l + i] = address(tensors[at + i]);
      }
    }
    read.tokens = address(tokens), read.state = address(state), read.embedding = address(tensors[0]), read.head = address(tensors[1]);
    if (context) read.context = address(*context);
    if (decoder.biased) read.bias = address(tensors[2]);
    if (random) read.random = static_cast<int64_t*>(random->mutable_data_ptr());
    make(state);
  }

 private:
  const void* address(const Tensor& t) {
    kept.push_back(as_contiguous(t));
    if (t.is_cuda()) kept.back() = aligned(kept.back());
    return kept.back().const_data_ptr();
  }

  // Scores have the dtype that sums are kept in.
  void make(const Tensor& like) {
    const int32_t sums = like.scalar_type() == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
    made.reserve(2);
    if (decoder.made == Decoder::scores)
      read.scores = made.emplace_back(new_matrix(like, read.batch, decoder.vocabulary, sums)).mutable_data_ptr();
    else
      read.new_tokens = made.emplace_back(new_matrix(like, 1, read.batch, aoti_torch_dtype_int64(), 1)).mutable_data_ptr();
    read.new_state = made.emplace_back(new_state_like(like)).mutable_data_ptr();
  }
  Tensor new_state_like(const Tensor& like) const {
    const int64_t hidden = decoder.hidden(), batch = read.batch, sizes[] = {decoder.layers, batch, hidden}, strides[] = {batch * hidden, hidden, 1};
    const Home home(like);
    AtenTensorHandle state = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(3, sizes, strides, home.dtype, home.type, home.index, &state));
    return Tensor(state);
  }
};

using Made = std::tuple<Tensor, Tensor>;

Made decode_on_cpu(const Tensor& tokens, const Tensor& state, const std::optional<Tensor>& context, const std::vector<Tensor>& tensors,
                   const std::optional<Tensor>& random, double temperature, const Text& text) {
  STD_TORCH_CHECK(state.is_cpu(), "factorlayer: the state must be a CPU tensor, as the others are");
  const DecodeCall call(tokens, state, context, tensors, random, text);
  if (call.read.batch) run_decode_on_cpu(call.decoder, dtype_of(state), call.read, temperature);
  return {call.made[0], call.made[1]};
}

Made decode_on_gpu(const Tensor& tokens, const Tensor& state, const std::optional<Tensor>& context, const std::vector<Tensor>& tensors,
                   const std::optional<Tensor>& random, double temperature, const Text& text) {
  STD_TORCH_CHECK(state.is_cuda(), "factorlayer: the state must be a CUDA tensor, as the others are");
  DecodeCall call(tokens, state, context, tensors, random, text);
  if (call.read.batch) run_decode_on_gpu(text, call.decoder, state, call.read, temperature, call.kept);
  return {call.made[0], call.made[1]};
}

// The tensors of a call that draws: contiguous scores, and the tokens that they belong to.
struct DrawCall {
  std::vector<Tensor> kept;
  Tensor tokens;

  DrawCall(const Tensor& scores, const std::optional<Tensor>& places, const Tensor& random)
      : tokens(new_matrix(check(scores), 1, scores.size(0), aoti_torch_dtype_int64(), 1)) {
    const Home home(scores);
    check_random(random, home);
    kept.push_back(as_contiguous(scores));
    if (!places) return;
    const Home own(*places);
    STD_TORCH_CHECK(own.type == home.type && own.index == home.index && places->scalar_type() == ScalarType::Long && places->dim() == 2 &&
                        places->size(0) == scores.size(0) && places->size(1) == scores.size(1),
                    "factorlayer: the tokens that are drawn from must be int64, as many as scores, and on their device");
    kept.push_back(as_contiguous(*places));
  }
  const void* places() const { return kept.size() > 1 ? kept[1].const_data_ptr() : nullptr; }

 private:
  static const Tensor& check(const Tensor& scores) {
    STD_TORCH_CHECK(scores.dim() == 2 && scores.size(1) > 0 && scores.size(1) < int64_t(1) << 31,
                    "factorlayer: scores that are drawn by must be [samples, tokens]");
    return scores;
  }
};

Tensor draw_on_cpu(const Tensor& scores, const std::optional<Tensor>& places, Tensor random, double temperature) {
  STD_TORCH_CHECK(scores.is_cpu(), "factorlayer: scores must be a CPU tensor, as the others are");
  const DrawCall call(scores, places, random);
  int64_t* const numbers = static_cast<int64_t*>(random.mutable_data_ptr());
  const cpu::Draw problem{dtype_of(scores), scores.size(0), scores.size(1), call.kept[0].const_data_ptr(),
                          static_cast<const int64_t*>(call.places()), uint64_t(numbers[0]), uint64_t(numbers[1]), temperature};
  cpu::draw(problem, static_cast<int64_t*>(call.tokens.mutable_data_ptr()), parallel);
  ++numbers[1];
  return call.tokens;
}

Tensor draw_on_gpu(const Tensor& scores, const std::optional<Tensor>& places, Tensor random, double temperature) {
  STD_TORCH_CHECK(scores.is_cuda(), "factorlayer: scores must be a CUDA tensor, as the others are");
  DrawCall call(scores, places, random);
  cuda::Params params{};
  params.x = call.kept[0].const_data_ptr(), params.y = call.tokens.mutable_data_ptr(), params.batch = scores.size(0);
  params.weights[0] = as_place(temperature), params.weights[1] = as_place(scores.size(1));
  params.weights[2] = call.places(), params.weights[3] = random.mutable_data_ptr();
  const Text text{places ? "draw placed" : "draw"};
  if (params.batch) run_on_cuda(text, find_choice(text.value), scores, 0, 0, params, call.kept);
  return call.tokens;
}

// The `few` best scores of each sample, from the best one on, in the dtype that sums are kept in, and their tokens.
Made few_on_gpu(const Tensor& scores, int64_t few) {
  STD_TORCH_CHECK(scores.is_cuda() && scores.dim() == 2 && scores.size(1) < int64_t(1) << 31,
                  "factorlayer: scores of which the best are found must be a CUDA matrix [samples, tokens]");
  const int64_t samples = scores.size(0), count = scores.size(1);
  STD_TORCH_CHECK(few > 0 && few <= count, "factorlayer: of ", count, " scores 1 to ", count, " can be the best, not ", few);
  const int32_t sums = scores.scalar_type() == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  Tensor best = new_matrix(scores, samples, few, sums), tokens = new_matrix(scores, samples, few, aoti_torch_dtype_int64());
  std::vector<Tensor> kept{as_contiguous(scores)};
  cuda::Params params{};
  params.x = kept[0].const_data_ptr(), params.y = best.mutable_data_ptr(), params.batch = samples;
  params.weights[0] = as_place(count), params.weights[1] = as_place(few), params.weights[2] = tokens.mutable_data_ptr();
  const Text text{"few"};
  if (samples) run_on_cuda(text, find_choice(text.value), scores, 0, 0, params, kept);
  return {best, tokens};
}

}  // namespace
}  // namespace factorlayer

STABLE_TORCH_LIBRARY_IMPL(factorlayer, CPU, m) {
  m.impl("decode", TORCH_BOX(&factorlayer::decode_on_cpu));
  m.impl("draw", TORCH_BOX(&factorlayer::draw_on_cpu));
}
STABLE_TORCH_LIBRARY_IMPL(factorlayer, CUDA, m) {
  m.impl("decode", TORCH_BOX(&factorlayer::decode_on_gpu));
  m.impl("draw", TORCH_BOX(&factorlayer::draw_on_gpu));
  m.impl("few", TORCH_BOX(&factorlayer::few_on_gpu));
}
