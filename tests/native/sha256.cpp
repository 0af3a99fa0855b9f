// sha256 MOST: the digests of "", "a", "aa" and so on up to so many letters, a line for each.
#include "../../csrc/runtime/sha256.h"

#include <cstdio>
#include <cstdlib>

int main(int, char** words) {
  for (int length = 0; length <= std::atoi(words[1]); ++length)
    std::puts(factorlayer::sha256(std::string(size_t(length), 'a')).c_str());
  return 0;
}
