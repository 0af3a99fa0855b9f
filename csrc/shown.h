// Text from anywhere, as an error may show it.
#pragma once
#include <string>

namespace factorlayer {

// The beginning of a text, in letters that every terminal and every decoder takes.
inline std::string shown(const std::string& text) {
  constexpr size_t kMost = 1000;
  std::string found = text.substr(0, kMost);
  for (char& c : found)
    if (c < ' ' || c > '~') c = '?';
  return text.size() > kMost ? found + "... (" + std::to_string(text.size()) + " bytes)" : found;
}

}  // namespace factorlayer
