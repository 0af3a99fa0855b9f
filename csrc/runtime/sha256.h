// SHA-256 (FIPS 180-4) of a text, as 64 hexadecimal digits.
#pragma once
#include <string>

namespace factorlayer {

std::string sha256(const std::string& text);

}  // namespace factorlayer
