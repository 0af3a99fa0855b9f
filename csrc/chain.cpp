// Parsing of a chain's text, with a table of the chains seen so far.
#include "chain.h"

#include <mutex>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace factorlayer {

int64_t Chain::in_features() const {
  const Contraction& c = contractions.front();
  return c.outer * c.p * c.inner;
}

int64_t Chain::out_features() const {
  const Contraction& c = contractions.back();
  return c.outer * c.q * c.inner;
}

static Chain parse(const std::string& text) {
  auto fail = [&](const std::string& why) -> std::invalid_argument {
    return std::invalid_argument("chain \"" + text + "\": " + why);
  };
  Chain chain;
  std::istringstream stages(text);
  for (std::string stage; std::getline(stages, stage, ';');) {
    std::istringstream words(stage);
    std::string name;
    words >> name;
    if (name == "tied" || name == "untied") {
      Contraction c{name == "tied", 0, 0, 0, 0, 0};
      words >> c.weight >> c.outer >> c.p >> c.q >> c.inner;
      if (!words || c.weight < 0 || c.outer < 1 || c.p < 1 || c.q < 1 || c.inner < 1)
        throw fail("a contraction needs a weight index and four positive sizes");
      if (!chain.contractions.empty() && chain.out_features() != c.outer * c.p * c.inner)
        throw fail("neighbouring contractions disagree about the size of the state");
      chain.contractions.push_back(c);
    } else if (name == "rank") {
      words >> chain.rank;
      if (!words || chain.rank < 1) throw fail("rank must be a positive integer");
    } else if (name == "bias") {
      chain.bias = true;
    } else {
      chain.activation = name;
    }
  }
  if (chain.contractions.empty()) throw fail("there is no contraction in it");
  return chain;
}

const Chain& find_chain(const std::string& text) {
  static std::mutex mutex;
  static std::unordered_map<std::string, Chain> chains;  // nodes never move: references stay valid
  std::lock_guard<std::mutex> lock(mutex);
  auto found = chains.find(text);
  if (found == chains.end()) found = chains.emplace(text, parse(text)).first;
  return found->second;
}

}  // namespace factorlayer
