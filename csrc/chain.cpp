// Parsing of the text of a chain or a stack, with a table of those seen so far.
#include "chain.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <stdexcept>

#include "shown.h"
#include "table.h"

namespace factorlayer {

int64_t Chain::in_features() const {
  if (contractions.empty()) return std::max({turned, slope, through, sums});  // which agree
  const Contraction& c = contractions.front();
  return c.outer * c.p * c.inner;
}

int64_t Chain::out_features() const {
  if (contractions.empty()) return std::max({turned, slope, through, sums});  // which agree
  const Contraction& c = contractions.back();
  return c.outer * c.q * c.inner;
}

int64_t Chain::state_features() const {
  int64_t sum = in_features();
  for (const Contraction& c : contractions) sum += c.outer * c.q * c.inner;
  return sum;
}

// Activations that have a name: csrc/cpu/finish/pointwise.h and pointwise.cuh have a row for each.
constexpr const char* kActivations[] = {"identity", "relu", "leaky_relu", "elu", "gelu", "gelu_tanh", "silu",
                                        "sigmoid", "tanh", "sine", "softplus", "square", "relu_squared"};

// The words of a stage, each with one blank before it but for the first; numbers are whole and written as Python does.
class Words {
 public:
  explicit Words(const std::string& stage) {
    for (size_t at = 0, end = 0; end != std::string::npos; at = end + 1) {
      end = stage.find(' ', at);
      words_.push_back(stage.substr(at, end == std::string::npos ? end : end - at));
      if (words_.back().empty())
        throw std::invalid_argument("words stand with one blank between them, and stages with \"; \"");
    }
  }

  bool at_end() const { return at_ == words_.size(); }
  explicit operator bool() const { return fine_; }

  std::string next() { return at_end() ? "" : words_[at_++]; }

  template <class Integer> Words& operator>>(Integer& number) {
    const std::string word = next();
    fine_ = fine_ && !word.empty() && word.size() < 17 && (word[0] != '0' || word.size() == 1) &&
            word.find_first_not_of("0123456789") == std::string::npos;
    const long long value = fine_ ? std::stoll(word) : 0;
    number = Integer(value);
    fine_ = fine_ && number == value;
    return *this;
  }

 private:
  std::vector<std::string> words_;
  size_t at_ = 0;
  bool fine_ = true;
};

static std::vector<std::string> split(const std::string& text, const std::string& between) {
  std::vector<std::string> parts;
  for (size_t at = 0, end = 0; end != std::string::npos; at = end + between.size()) {
    end = text.find(between, at);
    parts.push_back(text.substr(at, end == std::string::npos ? end : end - at));
  }
  return parts;
}

// Checks that a text has only letters that texts have, and is not too long.
static void check_letters(const std::string& text) {
  if (text.size() > kMostText)
    throw std::invalid_argument("it should have " + std::to_string(kMostText) + " bytes at most, it has " +
                                std::to_string(text.size()));
  const size_t at = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_ ;|,:/.+-");
  if (at != std::string::npos)
    throw std::invalid_argument("byte " + std::to_string(at) + " is no letter that chains and stacks are written with");
}

static bool is_program(const std::string& activation) { return activation.find('/') != std::string::npos; }

static void check_activation(const std::string& name) {
  if (is_program(name))
    parse_program(name);
  else if (std::find(std::begin(kActivations), std::end(kActivations), name) == std::end(kActivations))
    throw std::invalid_argument("unknown stage " + shown(name));
}

// How many numbers stand behind the name of a stage, or -1 behind that of none.
static int numbers_behind(const std::string& name) {
  static const struct {
    const char* name;
    int numbers;
  } known[] = {{"tied", 5}, {"untied", 5}, {"rank", 1}, {"turned", 0}, {"bias", 0}, {"slope", 1}, {"through", 1}, {"sums", 1},
               {"gradient", 0}, {"backward", 0}, {"turn", 3}, {"mixed", 3}, {"slabs", 1}, {"few", 0}, {"tf32", 0}};
  for (const auto& each : known)
    if (name == each.name) return each.numbers;
  return -1;
}

// The features of each tensor that "inputs" or "kept" names.
static std::vector<int64_t> parse_tensors(const std::string& name, Words& words) {
  const size_t most = name == "inputs" ? kMostInputs : kMostKept;
  std::vector<int64_t> tensors;
  for (int64_t features = 0; !words.at_end(); tensors.push_back(features)) {
    words >> features;
    if (!words || features < 1 || features > kMostElements || tensors.size() == most)
      throw std::invalid_argument("\"" + name + "\" needs positive sizes that memory can hold, " + std::to_string(most) + " at most");
  }
  if (tensors.empty()) throw std::invalid_argument("\"" + name + "\" needs the features of each");
  return tensors;
}

static bool names_tensors(const std::string& name) { return name == "inputs" || name == "kept"; }

bool Chain::may_keep() const {
  const auto are = [&](bool tied) {
    return std::all_of(contractions.begin(), contractions.end(), [&](const Contraction& c) { return c.tied == tied; });
  };
  if (!inputs.empty() || x_turned || turned || mixed || gradient || slabs || through || sums || parameters()) return false;
  if (contractions.size() == 2 && are(false)) return !backward && !slope && rank == 1;
  return contractions.size() > 1 && are(true) && !(backward && bias);
}

static void check_stage(const std::string& stage) {
  Words words(stage);
  const std::string name = words.next();
  if (names_tensors(name)) {
    parse_tensors(name, words);
    return;
  }
  const int numbers = std::max(0, numbers_behind(name));
  if (numbers_behind(name) < 0) check_activation(name);
  int64_t number = 0;
  for (int i = 0; i < numbers; ++i) words >> number;
  if (!words || !words.at_end())
    throw std::invalid_argument("\"" + shown(name) + "\" should have " + std::to_string(numbers) + " whole numbers behind it");
}

void check_words(const std::string& text) {
  if (is_of_recurrence(text)) {
    find_asked(text);
    return;
  }
  try {
    check_letters(text);
    const std::vector<std::string> layers = split(text, " | ");
    if (layers.size() > kMostLayers + 1)
      throw std::invalid_argument("a stack should have " + std::to_string(kMostLayers) + " layers at most");
    for (const std::string& layer : layers) {
      const std::vector<std::string> stages = split(layer, "; ");
      if (&layer == &layers.back() && layers.size() > 1 && (layer == "states" || layer == "frozen")) continue;
      for (const std::string& stage : stages) check_stage(stage);
    }
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("factorlayer: chain \"" + shown(text) + "\": " + error.what());
  }
}

// Whether the product is positive and not too large.
static bool is_size(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (int64_t factor : factors)
    if (factor < 1 || __builtin_mul_overflow(product, factor, &product) || product > kMostElements) return false;
  return true;
}

static Contraction parse_contraction(bool tied, Words& words, const Chain& chain) {
  Contraction c{tied, -1, 0, 0, 0, 0};
  words >> c.weight >> c.outer >> c.p >> c.q >> c.inner;
  if (!words || c.weight < 0 || c.weight >= int(kMostContractions) || !is_size({c.outer, c.p, c.inner}) || !is_size({c.outer, c.q, c.inner}) ||
      !is_size({tied ? 1 : c.outer * c.inner, c.q, c.p, chain.rank}))
    throw std::invalid_argument("a contraction needs a weight index and four positive sizes that memory can hold");
  if (!chain.contractions.empty() && chain.out_features() != c.outer * c.p * c.inner)
    throw std::invalid_argument("neighbouring contractions disagree about the size of the state");
  for (const Contraction& earlier : chain.contractions)
    if (earlier.weight == c.weight) throw std::invalid_argument("two contractions share a weight");
  if (chain.contractions.size() == kMostContractions)
    throw std::invalid_argument("it should have " + std::to_string(kMostContractions) + " contractions at most");
  return c;
}

// The elements of the matrices that "turn" or "mixed" names. They make up y; a turn of gradients makes up x.
static int64_t parse_turn(const std::string& name, Words& words, const Chain& chain) {
  int64_t outer = 0, rows = 0, columns = 0;
  words >> outer >> rows >> columns;
  if (!words || !is_size({outer, rows, columns}))
    throw std::invalid_argument("\"" + name + "\" needs three positive sizes that memory can hold");
  const bool of_x = chain.backward && name == "turn";
  const int64_t features = of_x ? chain.in_features() : chain.out_features();
  const bool is_known = !chain.contractions.empty() || (features && name == "turn");
  if (is_known && features != outer * rows * columns)
    throw std::invalid_argument("\"" + name + "\" disagrees about the size of " + (of_x ? "x" : "y"));
  return outer * rows * columns;
}

// The features that "slope", "through" or "sums" names. They have to agree with the chain.
static int64_t parse_features(const std::string& name, Words& words, const Chain& chain) {
  int64_t features = 0;
  words >> features;
  if (!words || !is_size({features}))
    throw std::invalid_argument("\"" + name + "\" needs a positive size that memory can hold");
  if ((!chain.contractions.empty() || chain.slope || chain.through) && chain.out_features() != features)
    throw std::invalid_argument("\"" + name + "\" disagrees about the size of y");
  return features;
}

// Whether the chain is one matrix product with a bias, and nothing else behind it.
static bool is_dense_with_bias(const Chain& chain, bool has_activation) {
  const Contraction& c = chain.contractions.front();
  return chain.bias && c.tied && c.outer * c.inner == 1 && !has_activation && !chain.gradient;
}

// Parses a text. tf32 may end one with a contraction or a turn. The other stages, which chain.h explains, come in one of these
// orders; those in brackets may be left out:
//     a layer        [inputs] [rank] [turned] contractions [bias] [activation]
//     turned y       [rank] [turned] contractions turn
//     by slabs       a contraction, slabs
//     one gradient   [turned] a contraction [bias, of a dense layer] gradient [mixed]
//     all gradients  [inputs] [rank] contractions [bias, without a rank] backward, and without a bias [turn] [mixed]; of one
//                    contraction also [turned] before it and [slabs] behind all; of two untied ones also [few]
//     kept states    [rank] tied contractions [bias] [activation] kept, [rank] tied contractions [bias] activation slope kept, and
//                    [rank] tied contractions backward kept; two untied contractions [bias] [activation] kept
//     a slope        a layer that ends in an activation, slope or, without a bias, through, [sums]
//     no product     an activation, slope or through, [sums] [turn]; sums [turn]; turn [mixed]
static Chain parse(const std::string& text) {
  check_letters(text);
  if (text.empty()) throw std::invalid_argument("there is no contraction in it");
  Chain chain;
  bool has_activation = false;
  for (const std::string& stage : split(text, "; ")) {
    Words words(stage);
    const std::string name = words.next();
    const bool last = chain.slope || chain.through || chain.sums;  // but for these
    const bool is_behind = name == "sums" || name == "turn" || name == "kept" || name == "tf32";
    if (chain.tf32 || (!chain.kept.empty() && name != "tf32") || (last && !is_behind))
      throw std::invalid_argument("\"" + name + "\" stands in the wrong place");
    const bool finishing = chain.bias || has_activation || chain.gradient || chain.backward || chain.turned || chain.slabs;
    if (name == "inputs" && chain.inputs.empty() && chain.contractions.empty() && chain.rank == 1 && !chain.x_turned && !finishing) {
      chain.inputs = parse_tensors(name, words);
    } else if (name == "kept" && chain.may_keep()) {
      chain.kept = parse_tensors(name, words);
    } else if (name == "tf32" && (chain.turned || !chain.contractions.empty())) {
      chain.tf32 = true;
    } else if (name == "turned" && chain.contractions.empty() && !chain.x_turned) {
      chain.x_turned = true;
    } else if (name == "turn") {
      const bool of_x = chain.backward && !chain.bias && !chain.mixed && !chain.slabs && !chain.few;
      if (chain.turned || (last ? !chain.contractions.empty() : finishing && !of_x))
        throw std::invalid_argument("\"turn\" stands in the wrong place");
      chain.turned = parse_turn(name, words, chain);
    } else if (name == "mixed") {
      if (chain.mixed || chain.bias || chain.few || !(chain.gradient || chain.backward || (chain.turned && chain.contractions.empty())))
        throw std::invalid_argument("\"mixed\" stands in the wrong place");
      chain.mixed = parse_turn(name, words, chain);
    } else if (name == "slabs") {
      if (chain.slabs || chain.contractions.size() != 1 || chain.rank > 1 || (finishing && !chain.backward))
        throw std::invalid_argument("\"slabs\" stands in the wrong place");
      words >> chain.slabs;
      if (!words || chain.slabs < 1 || chain.slabs > (chain.backward && !chain.turned ? 2 : 1))
        throw std::invalid_argument("\"slabs\" needs 1, or, behind \"backward\" without a turn, 2");
    } else if (name == "few") {
      const bool untied = chain.contractions.size() == 2 && !chain.contractions[0].tied && !chain.contractions[1].tied;
      if (!chain.backward || !untied || chain.few || chain.bias || chain.x_turned || chain.turned || chain.mixed || chain.rank > 1)
        throw std::invalid_argument("\"few\" stands in the wrong place");
      chain.few = true;
    } else if (name == "gradient") {
      if ((finishing && !is_dense_with_bias(chain, has_activation)) || chain.contractions.size() != 1 || chain.rank != 1)
        throw std::invalid_argument("\"gradient\" stands in the wrong place");
      chain.gradient = true;
    } else if (name == "slope" || name == "through") {
      int64_t& features = name == "slope" ? chain.slope : chain.through;
      if (!has_activation || chain.slope || chain.through || (name == "through" && chain.bias))
        throw std::invalid_argument("\"" + name + "\" stands in the wrong place");
      features = parse_features(name, words, chain);
    } else if (name == "sums") {
      if (chain.sums || chain.turned || (!last && (finishing || chain.x_turned || chain.rank > 1 || !chain.contractions.empty())))
        throw std::invalid_argument("\"sums\" stands in the wrong place");
      chain.sums = parse_features(name, words, chain);
    } else if (name == "backward") {
      const bool behind_bias = chain.bias && !has_activation && !chain.gradient && !chain.backward && !chain.x_turned;
      if ((finishing && !behind_bias) || chain.contractions.empty() || (chain.rank != 1 && chain.bias))
        throw std::invalid_argument("\"backward\" stands in the wrong place");
      chain.backward = true;
    } else if ((name == "untied" || (name == "tied" && !chain.x_turned)) && !finishing) {
      chain.contractions.push_back(parse_contraction(name == "tied", words, chain));
      if (chain.state_features() > kMostElements)
        throw std::invalid_argument("its states are more than memory can hold");
    } else if (name == "rank" && chain.contractions.empty() && chain.rank == 1 && !chain.x_turned && !chain.turned) {
      words >> chain.rank;
      if (!words || chain.rank < 1) throw std::invalid_argument("rank must be a positive integer");
    } else if (name == "bias" && !finishing && !chain.contractions.empty()) {
      chain.bias = true;
    } else if (numbers_behind(name) < 0 && !has_activation && !chain.gradient && !chain.backward && !chain.turned && !chain.slabs &&
               !(chain.x_turned && chain.contractions.empty())) {
      check_activation(name);
      chain.activation = name;
      if (is_program(name)) chain.program = std::make_shared<const Program>(parse_program(name));
      has_activation = true;
    } else {
      throw std::invalid_argument("\"" + name + "\" stands in the wrong place");
    }
    if (!words.at_end()) throw std::invalid_argument("\"" + words.next() + "\" is one word too many");
  }
  if (chain.contractions.empty() && (!chain.in_features() || chain.x_turned))
    throw std::invalid_argument("there is no contraction in it");
  if (!chain.inputs.empty()) {
    const int64_t features = std::accumulate(chain.inputs.begin(), chain.inputs.end(), int64_t(0));
    if (features != chain.in_features())
      throw std::invalid_argument("its inputs have " + std::to_string(features) + " features, the chain takes " +
                                  std::to_string(chain.in_features()));
    const bool is_layer = chain.makes_y() || (chain.backward && !chain.bias && !chain.mixed);
    if (!is_layer || chain.contractions.empty() || chain.x_turned || chain.turned || chain.slabs)
      throw std::invalid_argument("\"inputs\" are those of a layer, or of all its gradients");
  }
  return chain;
}

// Where the tensors of frozen layers begin: each at a multiple of 256 bytes, whatever its dtype, as stacks/frozen.py puts them.
static std::vector<int64_t> places_of(const std::vector<Chain>& layers) {
  std::vector<int64_t> places{0};
  auto add = [&](int64_t elements) { places.push_back(places.back() + (elements + 127) / 128 * 128); };
  for (const Chain& layer : layers) {
    std::vector<int64_t> sizes(layer.weights(), 1);
    for (const Contraction& c : layer.contractions) {
      if (c.weight >= int64_t(layer.contractions.size()))
        throw std::invalid_argument("a layer names weight " + std::to_string(c.weight) + ", which is not its own");
      sizes[c.weight] = layer.rank * c.weight_size();
    }
    for (int64_t size : sizes) add(size);
    if (layer.bias) add(layer.out_features());
    if (places.back() > kMostElements) throw std::invalid_argument("its weights are more than memory can hold");
  }
  return places;
}

// Parses layers. Neighbours have to agree about the features between them.
static Stack parse_stack(const std::string& text) {
  check_letters(text);
  const std::string between = " | ";
  Stack stack;
  int64_t features = 0;  // of all states, which may be in memory at a time
  for (size_t from = 0, to = 0; to != std::string::npos; from = to + between.size()) {
    to = text.find(between, from);
    if (to == std::string::npos && !stack.layers.empty()) {
      stack.backward = text.substr(from) == "backward";
      stack.states = text.substr(from) == "states";
      stack.frozen = text.substr(from) == "frozen";
      if (stack.backward || stack.states || stack.frozen) break;
    }
    const Chain layer = parse(text.substr(from, to == std::string::npos ? to : to - from));
    if (!layer.inputs.empty() && !stack.layers.empty())
      throw std::invalid_argument("\"inputs\" are those of the first layer");
    if (!layer.makes_y() || layer.x_turned || layer.turned)
      throw std::invalid_argument(
          "\"gradient\", \"slope\", \"through\", \"sums\", \"backward\", \"turned\" and \"turn\" make no layer");
    if (!stack.layers.empty() && stack.layers.back().out_features() != layer.in_features())
      throw std::invalid_argument("a layer with " + std::to_string(layer.in_features()) +
                                  " inputs stands behind one with " +
                                  std::to_string(stack.layers.back().out_features()) + " outputs");
    features += layer.state_features();
    if (features > kMostElements) throw std::invalid_argument("its states are more than memory can hold");
    stack.layers.push_back(layer);
    if (stack.layers.size() > kMostLayers)
      throw std::invalid_argument("it should have " + std::to_string(kMostLayers) + " layers at most");
  }
  if (stack.frozen) stack.places = places_of(stack.layers);
  return stack;
}

static Recurrence parse_recurrence(const std::string& text) {
  check_letters(text);
  const size_t end = text.find("; ");
  const std::string head = text.substr(0, end);
  Recurrence recurrence;
  recurrence.before = head == "gru before" || head == "gru before reversed";
  recurrence.reversed = head == "gru after reversed" || head == "gru before reversed";
  if (end == std::string::npos || !(recurrence.before || recurrence.reversed || head == "gru after"))
    throw std::invalid_argument("it should begin with \"gru after\" or \"gru before\", \" reversed\" or not, and a chain behind");
  const Chain chain = recurrence.chain = parse(text.substr(end + 2));
  if (!chain.makes_y() || chain.x_turned || chain.turned || chain.slabs || !chain.inputs.empty())
    throw std::invalid_argument("only contractions, a bias and an activation make a gate's recurrent matrix");
  if (chain.in_features() != chain.out_features())
    throw std::invalid_argument("a recurrent matrix should have as many outputs as inputs, it has " +
                                std::to_string(chain.out_features()) + " and " + std::to_string(chain.in_features()));
  if (chain.bias && recurrence.before)
    throw std::invalid_argument("with \"before\" a bias should be added to the gates, whose product has none of its own");
  return recurrence;
}

const Chain& find_chain(const std::string& text) {
  static Table<std::string, Chain> chains;
  try {
    return chains.find_or_add(text, [&] { return parse(text); });
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("factorlayer: chain \"" + shown(text) + "\": " + error.what());
  }
}

const Stack& find_stack(const std::string& text) {
  static Table<std::string, Stack> stacks;
  try {
    return stacks.find_or_add(text, [&] { return parse_stack(text); });
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("factorlayer: stack \"" + shown(text) + "\": " + error.what());
  }
}

const Recurrence& find_recurrence(const std::string& text) {
  static Table<std::string, Recurrence> recurrences;
  try {
    return recurrences.find_or_add(text, [&] { return parse_recurrence(text); });
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("factorlayer: recurrence \"" + shown(text) + "\": " + error.what());
  }
}

bool is_of_recurrence(const std::string& text) { return text.rfind("gru ", 0) == 0; }

const Recurrence* const& find_asked(const std::string& text) {
  static Table<std::string, const Recurrence*> asked;
  return asked.find_or_add(text, [&] {
    const size_t end = text.find(" | ");
    const std::string word = end == std::string::npos ? "" : text.substr(end + 3);
    if (word != "" && word != "slopes" && word != "backward")
      throw std::invalid_argument("factorlayer: recurrence \"" + shown(text) + "\": slopes or backward can stand behind it");
    return &find_recurrence(text.substr(0, end));
  });
}

}  // namespace factorlayer
