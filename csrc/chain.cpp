// Parsing of the text of a chain or a stack, with a table of those seen so far.
#include "chain.h"

#include <initializer_list>
#include <sstream>
#include <stdexcept>

#include "table.h"

namespace factorlayer {

int64_t Chain::in_features() const {
  if (contractions.empty()) return turned + slope + through + sums;
  const Contraction& c = contractions.front();
  return c.outer * c.p * c.inner;
}

int64_t Chain::out_features() const {
  if (contractions.empty()) return turned + slope + through + sums;
  const Contraction& c = contractions.back();
  return c.outer * c.q * c.inner;
}

int64_t Chain::state_features() const {
  int64_t sum = in_features();
  for (const Contraction& c : contractions) sum += c.outer * c.q * c.inner;
  return sum;
}

constexpr int64_t most_elements = int64_t(1) << 48;  // few enough that no offset into memory overflows

// Whether the product is positive and not too large.
static bool is_size(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (int64_t factor : factors)
    if (factor < 1 || __builtin_mul_overflow(product, factor, &product) || product > most_elements) return false;
  return true;
}

static Contraction parse_contraction(bool tied, std::istringstream& words, const Chain& chain) {
  Contraction c{tied, -1, 0, 0, 0, 0};
  words >> c.weight >> c.outer >> c.p >> c.q >> c.inner;
  if (!words || c.weight < 0 || !is_size({c.outer, c.p, c.inner}) || !is_size({c.outer, c.q, c.inner}) ||
      !is_size({tied ? 1 : c.outer * c.inner, c.q, c.p, chain.rank}))
    throw std::invalid_argument("a contraction needs a weight index and four positive sizes that memory can hold");
  if (!chain.contractions.empty() && chain.out_features() != c.outer * c.p * c.inner)
    throw std::invalid_argument("neighbouring contractions disagree about the size of the state");
  for (const Contraction& earlier : chain.contractions)
    if (earlier.weight == c.weight) throw std::invalid_argument("two contractions share a weight");
  return c;
}

// Of matrices, in all of the chain's y; of gradients, in x; what comes "mixed", in y.
static int64_t parse_turn(const std::string& name, std::istringstream& words, const Chain& chain) {
  int64_t outer = 0, rows = 0, columns = 0;
  words >> outer >> rows >> columns;
  if (!words || !is_size({outer, rows, columns}))
    throw std::invalid_argument("\"" + name + "\" needs three positive sizes that memory can hold");
  const bool of_x = chain.backward && name == "turn";
  if (!chain.contractions.empty() && (of_x ? chain.in_features() : chain.out_features()) != outer * rows * columns)
    throw std::invalid_argument("\"" + name + "\" disagrees about the size of " + (of_x ? "x" : "y"));
  return outer * rows * columns;
}

// Of "slope", "through" and "sums".
static int64_t parse_features(const std::string& name, std::istringstream& words, const Chain& chain) {
  int64_t features = 0;
  words >> features;
  if (!words || !is_size({features}))
    throw std::invalid_argument("\"" + name + "\" needs a positive size that memory can hold");
  if (!chain.contractions.empty() && chain.out_features() != features)
    throw std::invalid_argument("\"" + name + "\" disagrees about the size of y");
  return features;
}

// One matrix product, and of what may come behind it only a bias.
static bool is_dense_with_bias(const Chain& chain, bool has_activation) {
  const Contraction& c = chain.contractions.front();
  return chain.bias && c.tied && c.outer * c.inner == 1 && !has_activation && !chain.gradient;
}

// Stages come in the order: rank, turned, contractions, bias, activation, tf32; or contractions, turn, tf32; or turned,
// a contraction, bias if it is dense, gradient, mixed, tf32; or contractions, backward, turn, mixed, tf32, with turned if
// it is one, which may have slabs before tf32, or with bias alone; or a contraction, slabs, tf32. A turn that is all may be
// mixed. Behind an activation may stand slope, or through if there is no bias, before tf32, and both may be all. sums stands
// alone.
static Chain parse(const std::string& text) {
  Chain chain;
  bool has_activation = false;
  std::istringstream stages(text);
  for (std::string stage, name; std::getline(stages, stage, ';');) {
    std::istringstream words(stage);
    words >> name;
    if (chain.tf32) throw std::invalid_argument("\"" + name + "\" stands in the wrong place");
    const bool finishing = chain.bias || has_activation || chain.gradient || chain.backward || chain.turned || chain.slabs;
    if (name == "tf32" && (chain.turned || !chain.contractions.empty())) {
      chain.tf32 = true;
    } else if (name == "turned" && chain.contractions.empty() && !chain.x_turned) {
      chain.x_turned = true;
    } else if (name == "turn") {
      if (finishing && !(chain.backward && !chain.bias && !chain.turned && !chain.mixed && !chain.slabs))
        throw std::invalid_argument("\"turn\" stands in the wrong place");
      chain.turned = parse_turn(name, words, chain);
    } else if (name == "mixed") {
      if (chain.mixed || chain.bias || !(chain.gradient || chain.backward || (chain.turned && chain.contractions.empty())))
        throw std::invalid_argument("\"mixed\" stands in the wrong place");
      chain.mixed = parse_turn(name, words, chain);
    } else if (name == "slabs") {
      if (chain.slabs || chain.contractions.size() != 1 || chain.rank > 1 || (finishing && !chain.backward))
        throw std::invalid_argument("\"slabs\" stands in the wrong place");
      words >> chain.slabs;
      if (!words || chain.slabs < 1 || chain.slabs > (chain.backward && !chain.turned ? 2 : 1))
        throw std::invalid_argument("\"slabs\" needs 1, or, behind \"backward\" without a turn, 2");
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
      if (text.find(';') != std::string::npos)
        throw std::invalid_argument("\"sums\" stands in the wrong place");
      chain.sums = parse_features(name, words, chain);
    } else if (name == "backward") {
      const bool behind_bias = chain.bias && !has_activation && !chain.gradient && !chain.backward && !chain.x_turned;
      if ((finishing && !behind_bias) || chain.contractions.empty() || chain.rank != 1)
        throw std::invalid_argument("\"backward\" stands in the wrong place");
      chain.backward = true;
    } else if ((name == "untied" || (name == "tied" && !chain.x_turned)) && !finishing) {
      chain.contractions.push_back(parse_contraction(name == "tied", words, chain));
      if (chain.state_features() > most_elements)
        throw std::invalid_argument("its states are more than memory can hold");
    } else if (name == "rank" && chain.contractions.empty() && chain.rank == 1 && !chain.x_turned && !chain.turned) {
      words >> chain.rank;
      if (!words || chain.rank < 1) throw std::invalid_argument("rank must be a positive integer");
    } else if (name == "bias" && !finishing && !chain.contractions.empty()) {
      chain.bias = true;
    } else if (!has_activation && !chain.gradient && !chain.backward && !chain.turned && !chain.slabs &&
               !(chain.x_turned && chain.contractions.empty())) {
      chain.activation = name;
      if (name.find('/') != std::string::npos) chain.program = std::make_shared<const Program>(parse_program(name));
      has_activation = true;
    } else {
      throw std::invalid_argument("\"" + name + "\" stands in the wrong place");
    }
    if (words >> name) throw std::invalid_argument("\"" + name + "\" is one word too many");
  }
  if (chain.contractions.empty() && (!chain.in_features() || chain.x_turned))
    throw std::invalid_argument("there is no contraction in it");
  return chain;
}

// Each tensor begins at a multiple of 256 bytes, whatever its dtype: factorlayer/frozen.py puts them there.
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
    if (places.back() > most_elements) throw std::invalid_argument("its weights are more than memory can hold");
  }
  return places;
}

// Neighbouring layers have to agree about the features between them.
static Stack parse_stack(const std::string& text) {
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
    if (!layer.makes_y() || layer.x_turned || layer.turned)
      throw std::invalid_argument(
          "\"gradient\", \"slope\", \"through\", \"sums\", \"backward\", \"turned\" and \"turn\" make no layer");
    if (!stack.layers.empty() && stack.layers.back().out_features() != layer.in_features())
      throw std::invalid_argument("a layer with " + std::to_string(layer.in_features()) +
                                  " inputs stands behind one with " +
                                  std::to_string(stack.layers.back().out_features()) + " outputs");
    features += layer.state_features();
    if (features > most_elements) throw std::invalid_argument("its states are more than memory can hold");
    stack.layers.push_back(layer);
  }
  if (stack.frozen) stack.places = places_of(stack.layers);
  return stack;
}

const Chain& find_chain(const std::string& text) {
  static Table<std::string, Chain> chains;
  try {
    return chains.find_or_add(text, [&] { return parse(text); });
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("factorlayer: chain \"" + text + "\": " + error.what());
  }
}

const Stack& find_stack(const std::string& text) {
  static Table<std::string, Stack> stacks;
  try {
    return stacks.find_or_add(text, [&] { return parse_stack(text); });
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("factorlayer: stack \"" + text + "\": " + error.what());
  }
}

}  // namespace factorlayer
