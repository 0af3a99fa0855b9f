#include "decoder.h"

#include <sstream>
#include <stdexcept>

#include "shown.h"
#include "table.h"

namespace factorlayer {
namespace {

int64_t number(std::istringstream& words, const char* what, int64_t least, int64_t most) {
  std::string word;
  words >> word;
  int64_t value = 0;
  bool fine = !word.empty() && word.size() < 17;
  for (char c : word) {
    fine = fine && c >= '0' && c <= '9';
    value = fine ? 10 * value + (c - '0') : 0;
  }
  if (!fine || value < least || value > most)
    throw std::invalid_argument(std::string(what) + " should be a whole number from " + std::to_string(least) + " to " +
                                std::to_string(most) + ", it is \"" + shown(word) + "\"");
  return value;
}

Decoder parse(const std::string& text) {
  const size_t end = text.find("; ");
  if (end == std::string::npos) throw std::invalid_argument("a recurrence should stand behind \"; \"");
  std::istringstream words(text.substr(0, end));
  Decoder decoder;
  std::string word;
  words >> word;
  constexpr int64_t kMostTokens = (int64_t(1) << 31) - 1;
  decoder.embedding = number(words, "the embedding's features", 1, kMostElements);
  decoder.context = number(words, "the context's features", 0, kMostElements);
  decoder.vocabulary = number(words, "the vocabulary", 1, kMostTokens);
  decoder.layers = number(words, "the number of layers", 1, kMostDecoderLayers);
  decoder.samples = number(words, "the number of samples", 1, kMostDecoderSamples);
  words >> word;
  const char* const made[] = {"best", "drawn", "scores"};
  int at = 0;
  while (at < 3 && word != made[at]) ++at;
  if (at == 3) throw std::invalid_argument("best, drawn or scores should stand behind the numbers");
  decoder.made = Decoder::Made(at);
  if (words >> word) {
    if (word != "biased" || words >> word) throw std::invalid_argument("nothing but biased should stand behind what is made");
    decoder.biased = true;
  }
  std::string written = "decode";
  for (int64_t each : {decoder.embedding, decoder.context, decoder.vocabulary, decoder.layers, decoder.samples})
    written += " " + std::to_string(each);
  written += std::string(" ") + made[at] + (decoder.biased ? " biased" : "");
  if (text.compare(0, end, written)) throw std::invalid_argument("it should be written as \"" + written + "\"");
  decoder.recurrence = &find_recurrence(text.substr(end + 2));
  const Chain& chain = decoder.recurrence->chain;
  const bool dense = chain.contractions.size() == 1 && chain.rank == 1 && chain.contractions[0].tied &&
                     chain.contractions[0].outer * chain.contractions[0].inner == 1 && chain.contractions[0].weight == 0;
  if (!dense || decoder.recurrence->before || decoder.recurrence->reversed || chain.parameters())
    throw std::invalid_argument("the recurrence should be dense, go forward, with its reset after the product and an activation without parameters");
  int64_t most = 0;
  if (__builtin_mul_overflow(kGates * decoder.hidden(), decoder.embedding + decoder.context, &most) || most > kMostElements)
    throw std::invalid_argument("its weights are more than memory can hold");
  return decoder;
}

}  // namespace

bool is_of_decoder(const std::string& text) { return text.rfind("decode ", 0) == 0; }

const void* find_choice(const std::string& text) {
  static const std::string choices[] = {"draw", "draw placed", "few"};
  for (const std::string& choice : choices)
    if (text == choice) return &choice;
  return nullptr;
}

const Decoder& find_decoder(const std::string& text) {
  static Table<std::string, Decoder> decoders;
  try {
    return decoders.find_or_add(text, [&] { return parse(text); });
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("factorlayer: decoder \"" + shown(text) + "\": " + error.what());
  }
}

}  // namespace factorlayer
