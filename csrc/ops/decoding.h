// A decoder's step on tensors that have been checked: by the raw op (decode.cpp), or past the dispatcher (eager.cpp).
#pragma once
#include <array>
#include <vector>

#include "../decoder.h"
#include "launch.h"

namespace factorlayer {

constexpr int64_t kRandom = 3;  // a seed, the number of the step, and what is zero between calls

struct DecodeTensors {
  int64_t batch, rows;  // rows: of the embedding
  const void *tokens, *state, *context, *embedding, *head, *bias;  // context and bias may be null
  std::array<const void*, 4 * kMostDecoderLayers> layers;          // each one's weights of inputs and states, and biases
  int64_t* random;                                                 // null where nothing is drawn
  void *new_tokens, *scores, *new_state;                           // tokens or scores is null
};

void run_decode_on_cpu(const Decoder& decoder, DType dtype, const DecodeTensors& tensors, double temperature);

// Launches a step on a GPU. `like` is any tensor there, of the decoder's dtype.
void run_decode_on_gpu(const Text& text, const Decoder& decoder, const Tensor& like, const DecodeTensors& tensors,
                       double temperature, std::vector<Tensor>& kept);

}  // namespace factorlayer
