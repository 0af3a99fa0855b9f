// Parsing of a plan's text.
#include "plan.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "../shown.h"

namespace factorlayer {
namespace {

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  bool at_end() const { return at_ == text_.size(); }

  bool is_next(const std::string& name) const { return text_.compare(at_, name.size() + 1, name + " ") == 0; }

  // The words of the next line, which starts with `name` and has `count` more, or up to `most`.
  std::vector<std::string> line(const std::string& name, size_t count, size_t most = 0) {
    ++line_;
    const size_t end = text_.find('\n', at_);
    if (end == std::string::npos) fail("a line that begins with \"" + name + "\" and ends in a newline should be here");
    std::istringstream stream(text_.substr(at_, end - at_));
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    at_ = end + 1;
    if (words.empty() || words[0] != name)
      fail("it should begin with \"" + name + "\", it is \"" + shown(stream.str().substr(0, 80)) + "\"");
    most = std::max(count, most);
    if (words.size() < count + 1 || words.size() > most + 1)
      fail("\"" + name + "\" has " + std::to_string(count) + (most > count ? " to " + std::to_string(most) : "") +
           " words behind it, " + std::to_string(words.size() - 1) + " came");
    return words;
  }

  // A whole number from `least` to `most`.
  int64_t number(const std::string& word, const char* what, int64_t least, int64_t most) {
    int64_t value = 0;
    bool fine = !word.empty() && word.size() < 18;
    for (char c : word) {
      fine = fine && c >= '0' && c <= '9';
      value = fine ? 10 * value + (c - '0') : 0;
    }
    if (!fine || value < least || value > most)
      fail(std::string(what) + " should be a whole number from " + std::to_string(least) + " to " +
           std::to_string(most) + ", it is \"" + shown(word) + "\"");
    return value;
  }

  std::string source(size_t bytes) {
    if (text_.size() - at_ <= bytes || text_[at_ + bytes] != '\n')
      fail("a source of " + std::to_string(bytes) + " bytes and a newline should follow");
    std::string found = text_.substr(at_, bytes);
    at_ += bytes + 1;
    if (found.find('\0') != std::string::npos) fail("a source should be text, this one has a byte that is 0");
    for (char c : found) line_ += c == '\n';
    ++line_;
    return found;
  }

  [[noreturn]] void fail(const std::string& what) {
    throw std::invalid_argument("factorlayer: a plan's line " + std::to_string(line_) + " cannot be read: " + what);
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
  int64_t line_ = 0;
};

const std::string CLUSTER = "__cluster_dims__(1, ";  // of a kernel
const std::string TOGETHER = "\n// All blocks are on the GPU at once.\n";
const std::string APART = "\n// Blocks have multiprocessors of their own, where there are as many.\n";
constexpr int64_t MANY = int64_t(1) << 48;  // no offset into memory overflows

Pass::Buffer buffer(Reader& reader, const std::string& word, const std::string& outside) {
  if (word == outside) return Pass::outside;
  if (word == "w" && outside == "y") return Pass::second;
  if (word == "none" && outside == "x") return Pass::none;
  if (word.size() != 2 || word[0] != 's' || word[1] < '0' || word[1] >= '0' + MOST_SCRATCH)
    reader.fail("a buffer should be " + outside + (outside == "y" ? ", w" : ", none") + " or s0 to s" +
                std::to_string(MOST_SCRATCH - 1) + ", it is \"" + shown(word) + "\"");
  return Pass::Buffer(Pass::s0 + word[1] - '0');
}

TensorMap parse_map(Reader& reader) {
  std::vector<std::string> words = reader.line("map", 16);
  TensorMap map{};
  map.has_samples = words[1] == "x" || words[1].back() == '*';
  if (words[1].back() == '*') words[1].pop_back();
  map.weight = words[1] == "x" ? -1 : int(reader.number(words[1], "a weight's number", 0, 61));
  map.is_tf32 = words[2] == "tf32";
  if (!map.is_tf32 && words[2] != "u16") reader.fail("a map's elements should be tf32 or u16, they are \"" + shown(words[2]) + "\"");
  for (int i = 0; i < 5; ++i) map.sizes[i] = reader.number(words[3 + i], "a size", 1, int64_t(1) << 31);
  for (int i = 0; i < 4; ++i) map.strides[i] = reader.number(words[8 + i], "bytes from one to the next", 16, MANY);
  for (int i = 0; i < 5; ++i) map.box[i] = reader.number(words[12 + i], "a size of a box", 1, 256);
  return map;
}

Pass parse_pass(Reader& reader) {
  const std::vector<std::string> words = reader.line("pass", 11);
  Pass pass{};
  const size_t plus = words[1].find('+');
  const std::string in = words[1].substr(0, plus);
  pass.in = in[0] == '@' ? Pass::weight : buffer(reader, in, "x");
  pass.beside = Pass::none;
  if (pass.in == Pass::weight) pass.place = int(reader.number(in.substr(1), "a weight's number", 0, 61));
  if (plus != std::string::npos) {
    const size_t at = words[1].find('@', plus);
    if (at == std::string::npos) reader.fail("a buffer beside another should be such as +s1@3, it is \"" + shown(words[1]) + "\"");
    pass.beside = buffer(reader, words[1].substr(plus + 1, at - plus - 1), "x");
    if (pass.beside < Pass::s0) reader.fail("beside another buffer should be s0 to s" + std::to_string(MOST_SCRATCH - 1));
    pass.beside_place = int(reader.number(words[1].substr(at + 1), "a weight's number", 0, 61));
  }
  pass.out = words[2][0] == '@' ? Pass::weight : buffer(reader, words[2], "y");
  if (pass.out == Pass::weight) pass.out_place = int(reader.number(words[2].substr(1), "a weight's number", 0, 61));
  pass.threads = reader.number(words[3], "the number of threads", 1, 1024);
  pass.shared_bytes = reader.number(words[4], "the bytes of shared memory", 0, 1 << 20);
  pass.units_per_sample = reader.number(words[5], "units per sample", 1, MANY);
  pass.units_per_block = reader.number(words[6], "units per block", 1, MANY);
  pass.blocks_per_processor = reader.number(words[7], "blocks per SM", 0, 1024);
  pass.grid_y = reader.number(words[8], "grid y", 1, 65535);
  pass.architecture = words[9];
  pass.kernel = words[10];
  if (!is_architecture(pass.architecture))
    reader.fail("an architecture should be such as sm_90 or sm_90a, it is \"" + shown(pass.architecture) + "\"");
  if (!is_kernel_name(pass.kernel))
    reader.fail("a kernel's name should be at most " + std::to_string(MOST_NAME) +
                " letters, digits and underscores, and begin with none of the digits; it is \"" + shown(pass.kernel) + "\"");
  pass.source = reader.source(size_t(reader.number(words[11], "the source's length", 1, MOST_SOURCE)));
  const size_t cluster = pass.source.find(CLUSTER);
  pass.cluster = 1;
  if (cluster != std::string::npos) {
    const size_t at = cluster + CLUSTER.size(), end = pass.source.find_first_not_of("0123456789", at);
    pass.cluster = reader.number(pass.source.substr(at, std::min(end, pass.source.size()) - at), "a cluster's blocks", 1, 16);
  }
  pass.together = pass.source.find(TOGETHER) != std::string::npos;
  pass.apart = pass.source.find(APART) != std::string::npos;
  pass.waits = pass.architecture.compare(0, 3, "sm_") == 0 && std::atoi(pass.architecture.c_str() + 3) >= 90 &&
               pass.source.find("wait_for_kernel_before();") != std::string::npos;
  while (reader.is_next("map")) {
    pass.maps.push_back(parse_map(reader));
    if (pass.maps.size() > MOST_MAPS) reader.fail("a pass has " + std::to_string(MOST_MAPS) + " maps at most");
  }
  return pass;
}

bool are_digits(const std::string& word, size_t from, size_t to) {
  return from < to && std::all_of(word.begin() + long(from), word.begin() + long(to), [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

bool is_kernel_name(const std::string& word) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  const auto is_fine = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9'); };
  return !word.empty() && word.size() <= size_t(MOST_NAME) && is_letter(word[0]) && std::all_of(word.begin(), word.end(), is_fine);
}

bool is_architecture(const std::string& word) {
  if (word.compare(0, 3, "sm_") != 0) return false;
  const size_t end = word.size() - (word.back() == 'a' || word.back() == 'f');
  return end <= 6 && are_digits(word, 3, end);
}

Plan parse_plan(const std::string& text) {
  Reader reader(text);
  if (reader.line("factorlayer", 2)[2] != "1") reader.fail("it should be \"factorlayer plan 1\"");
  Plan plan{};
  plan.chunk = reader.number(reader.line("chunk", 1)[1], "the chunk", 0, MANY);
  const std::vector<std::string> scratch = reader.line("scratch", SUMS + 1, MOST_SCRATCH);
  for (size_t i = 1; i < scratch.size(); ++i) plan.scratch[i - 1] = reader.number(scratch[i], "the bytes of scratch", 0, MANY);
  bool written[Pass::end] = {};
  written[Pass::outside] = written[Pass::none] = written[Pass::weight] = true;
  written[Pass::s0 + SUMS] = plan.scratch[SUMS] > 0;  // they are written beside what a pass says
  bool writes_y = false;
  while (!reader.at_end()) {
    if (plan.passes.size() == MOST_PASSES) reader.fail("a plan has " + std::to_string(MOST_PASSES) + " passes at most");
    plan.passes.push_back(parse_pass(reader));
    const Pass& pass = plan.passes.back();
    if (!written[pass.in] || (pass.beside != Pass::none && !written[pass.beside])) reader.fail("this pass reads a buffer that no pass before it wrote");
    if (pass.out >= Pass::s0 && !plan.scratch[pass.out - Pass::s0]) reader.fail("this pass writes scratch of no bytes");
    if (pass.in == Pass::none && pass.out != Pass::s0 + SUMS) reader.fail("a pass that reads weights alone should write s2");
    if (pass.in == Pass::none) plan.prepared = plan.scratch[SUMS];
    written[pass.out] = true;
    writes_y |= pass.out == Pass::outside;
  }
  const Pass::Buffer last = writes_y ? plan.passes.back().out : Pass::none;
  if (last != Pass::outside && last != Pass::second) reader.fail("the last pass should write y, or w behind it");
  return plan;
}

}  // namespace factorlayer
