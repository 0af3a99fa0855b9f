// A step of a decoder: what maths/decoder.py writes, and noise as maths/noise.py has it.
#pragma once
#include <cstdint>
#include <string>

#include "chain.h"

namespace factorlayer {

// Its text is "decode EMBEDDING CONTEXT VOCABULARY LAYERS SAMPLES MADE", " biased" if the head has a bias, "; " and a recurrence.
struct Decoder {
  enum Made { best, drawn, scores };  // the best token, one that is drawn, or all scores
  const Recurrence* recurrence;
  int64_t embedding = 0, context = 0, vocabulary = 0, layers = 0, samples = 0;  // samples: at most
  Made made = best;
  bool biased = false;

  int64_t hidden() const { return recurrence->hidden(); }
  int64_t inputs(int64_t layer) const { return layer ? hidden() : embedding + context; }
  bool gates_biased() const { return recurrence->chain.bias; }
  size_t of_layer() const { return gates_biased() ? 4 : 2; }
  // How many tensors its parameters are: embedding, head and, if it has one, its bias, and those of the layers.
  size_t tensors() const { return 2 + biased + size_t(layers) * of_layer(); }
};
constexpr int64_t kMostDecoderLayers = 12, kMostDecoderSamples = 16;

bool is_of_decoder(const std::string& text);

// Parses a decoder's text once and keeps the result, as find_chain does.
const Decoder& find_decoder(const std::string& text);

// An address that stands for a question about scores that are there: "draw", "draw placed" if they are those of some tokens, or "few",
// the best ones. Plans are kept by it; it is null for other texts.
const void* find_choice(const std::string& text);

// The bits that noise is made of: the first word of Philox4x32-10.
inline uint32_t noise_bits(uint64_t seed, uint64_t step, uint32_t sample, uint32_t token) {
  uint32_t counter[] = {token, sample, uint32_t(step), uint32_t(step >> 32)}, key[] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(0xD2511F53u) * counter[0], second = uint64_t(0xCD9E8D57u) * counter[2];
    const uint32_t next[] = {uint32_t(second >> 32) ^ counter[1] ^ key[0], uint32_t(second),
                             uint32_t(first >> 32) ^ counter[3] ^ key[1], uint32_t(first)};
    for (int i = 0; i < 4; ++i) counter[i] = next[i];
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  return counter[0];
}

}  // namespace factorlayer
