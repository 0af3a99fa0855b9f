// Parsing of a program, and the allocation of its rows.
#include "expression.h"

#include <algorithm>
#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>

#include "shown.h"

namespace factorlayer {
namespace {

constexpr size_t kMostSteps = 1000;
constexpr int kMostParameters = 16;
constexpr size_t kLongestStep = 80;  // letters; activations/expression.py has the same numbers

struct Node {
  enum Kind { x, gradient, parameter, number, operation } kind;
  int index = 0;  // of a parameter or number
  Op op = Op::neg;
  int count = 0;
  int from[3] = {0, 0, 0};
};

struct Row {
  const char* name;
  Op op;
  int count;
};
constexpr Row kRows[] = {
#define FL_ROW(NAME, COUNT) {#NAME, Op::NAME, COUNT},
    FL_OPERATIONS(FL_ROW)
#undef FL_ROW
};

// The number that a text of digits alone means, if it is below a limit; else -1.
int whole_number(const std::string& text, size_t limit) {
  size_t value = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return -1;
    value = 10 * value + size_t(c - '0');
    if (value >= limit) return -1;
  }
  return text.empty() ? -1 : int(value);
}

// Reads a number as Python writes it.
bool read_number(const std::string& text, double& value) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (text == "inf" || text == "-inf" || text == "nan") {
    value = text == "nan" ? std::numeric_limits<double>::quiet_NaN() : text == "inf" ? infinity : -infinity;
    return true;
  }
  if (text.find_first_not_of("0123456789.e+-") != std::string::npos || text[0] == '+') return false;
  if (text.find_first_of(".e") == std::string::npos) return false;
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  return stream >> value && stream.peek() == std::istringstream::traits_type::eof();
}

class Parser {
 public:
  std::vector<Node> nodes;
  std::vector<double> numbers;
  std::vector<int> results;  // nodes

  explicit Parser(const std::string& text) {
    for (size_t at = 0, end; at <= text.size(); at = end + 1) {
      end = std::min(text.find_first_of(",/", at), text.size());
      if (steps_.size() == kMostSteps)
        throw std::invalid_argument("an expression should have " + std::to_string(kMostSteps) + " steps at most");
      const std::string word = text.substr(at, end - at);
      const int node = read(word);
      if (node < 0)
        throw std::invalid_argument("step " + std::to_string(steps_.size()) + " of the expression, \"" +
                                    shown(word.substr(0, 80)) + "\", cannot be read");
      steps_.push_back(node);
      if (end == text.size() || text[end] == '/') results.push_back(node);
    }
  }

 private:
  std::vector<int> steps_;  // the node of each

  // Reads a step as activations/expression.py does. Returns its node, or -1.
  int read(const std::string& word) {
    if (word.size() > kLongestStep) return -1;
    Node node{Node::operation};
    const size_t colon = std::min(word.find(':'), word.size());
    const std::string name = word.substr(0, colon);
    for (size_t at = colon; at < word.size();) {
      const size_t end = std::min(word.find(':', at + 1), word.size());
      const int step = whole_number(word.substr(at + 1, end - at - 1), steps_.size());
      if (step < 0 || node.count == 3) return -1;
      node.from[node.count++] = steps_[step];
      at = end;
    }
    if (name.empty()) return node.count == 1 ? node.from[0] : -1;
    if (!(node.count ? is_operation(name, node) : is_leaf(name, node))) return -1;
    nodes.push_back(node);
    return int(nodes.size()) - 1;
  }

  bool is_leaf(const std::string& name, Node& node) {
    double value = 0;
    if (name == "x") {
      node.kind = Node::x;
    } else if (name[0] == 'p') {
      node.kind = Node::parameter;
      node.index = whole_number(name.substr(1), kMostParameters);
    } else if (read_number(name, value)) {
      node.kind = Node::number;
      node.index = int(numbers.size());
      numbers.push_back(value);
    } else {
      return false;
    }
    return node.index >= 0;
  }

  bool is_operation(const std::string& name, Node& node) const {
    const auto varies = [&](int i) { return i < node.count && nodes[node.from[i]].kind != Node::number; };
    for (const Row& row : kRows) {
      if (name != row.name) continue;
      node.op = row.op;
      const bool of_numbers = row.op == Op::select ? !varies(0) : row.op == Op::pow ? !varies(0) || varies(1) : false;
      return row.count == node.count && (varies(0) || varies(1) || varies(2)) && !of_numbers;
    }
    return false;
  }
};

struct Product {
  int slope, gradient;  // nodes
};

// Derivatives times the gradient of the value, such that where a select passes nothing on there is nothing to multiply: no 0
// times infinity, as in activations/results.py. Selects of the value itself are factors like any other, which may be 0.
class Through {
  Parser& parsed_;
  std::vector<bool> flat_;       // of each node, whether it is 0 or a select that passes nothing on somewhere
  std::vector<int> merged_;      // a node of the same value for each, sums of selects by one condition as one select
  std::vector<int> through_[2];  // what is made of each, or -1; without the product, and with it
  size_t merges_ = 0;
  int gradient_;

  int add(const Node& node) {
    parsed_.nodes.push_back(node);
    return int(parsed_.nodes.size()) - 1;
  }
  // What a derivative reads; `passes`: whether a select may be one that passes nothing on.
  int know(int i, bool passes) {
    const Node& node = parsed_.nodes[i];
    const bool selects = passes && node.kind == Node::operation && node.op == Op::select;
    if (i == int(flat_.size())) flat_.push_back(false), merged_.push_back(i);
    flat_[i] = is(i, 0) || (selects && (flat_[merged_[node.from[1]]] || flat_[merged_[node.from[2]]]));
    return i;
  }
  bool is(int i, double number) const {
    const Node& node = parsed_.nodes[i];
    return node.kind == Node::number && parsed_.numbers[node.index] == number;
  }

  // a + b, where selects of both are by one condition branch by branch: a place may be flat for both.
  int sum(int a, int b) {
    if (is(a, 0) || is(b, 0)) return is(a, 0) ? b : a;
    const Node one = parsed_.nodes[a], other = parsed_.nodes[b];
    const bool alike = flat_[a] && flat_[b] && one.from[0] == other.from[0] && ++merges_ < kMostSteps;
    if (!alike) return know(add({Node::operation, 0, Op::add, 2, {a, b}}), false);
    const int yes = sum(merged_[one.from[1]], merged_[other.from[1]]), no = sum(merged_[one.from[2]], merged_[other.from[2]]);
    return yes == no ? yes : know(add({Node::operation, 0, Op::select, 3, {one.from[0], yes, no}}), true);
  }

  // The gradient where the derivative i passes it on, times that if it is `multiplied`.
  int through(int i, bool multiplied) {
    i = merged_[i];
    int& made = through_[multiplied][i];
    if (made >= 0) return made;
    if (is(i, 0)) return made = i;
    if (!flat_[i]) {
      const bool alone = !multiplied || is(i, 1);
      return made = alone ? gradient_ : add({Node::operation, 0, Op::mul, 2, {gradient_, i}});
    }
    const Node node = parsed_.nodes[i];
    const int a = through(node.from[1], multiplied), b = through(node.from[2], multiplied);
    return made = a == b ? a : add({Node::operation, 0, Op::select, 3, {node.from[0], a, b}});
  }

 public:
  explicit Through(Parser& parsed) : parsed_(parsed) {
    const int count = int(parsed.nodes.size());
    for (int i = 0; i < count; ++i) know(i, i > parsed.results[0]);
    for (int i = parsed.results[0] + 1; i < count; ++i) {
      const Node node = parsed.nodes[i];
      if (node.kind != Node::operation) continue;
      if (node.op == Op::select) know(i, true);
      const int a = merged_[node.from[0]], b = merged_[node.from[1]];
      if (node.op == Op::add && flat_[a] && flat_[b]) merged_[i] = sum(a, b);
    }
    for (auto& nodes : through_) nodes.assign(parsed.nodes.size(), -1);
    gradient_ = add({Node::gradient});
  }

  // The product for the derivative by x: if that is a select, it takes as many steps as the derivative alone.
  Product product(int slope) {
    if (!flat_[merged_[slope]]) return {slope, gradient_};
    const int made = through(slope, true);
    return {made, made};
  }
  // The product for a derivative by a parameter: such products are summed before they are rounded.
  Product term(int slope) { return {slope, through(slope, false)}; }
};

// The steps that `results` need, in rows that are used again.
Code code_for(const Parser& parsed, const std::vector<Product>& results, int parameters) {
  Code code;
  std::vector<int> last_use(parsed.nodes.size(), -1), row(parsed.nodes.size(), -1);
  const int end = int(parsed.nodes.size());
  for (const Product& result : results) last_use[result.slope] = last_use[result.gradient] = end;
  for (int i = end; i-- > 0;) {
    const Node& node = parsed.nodes[i];
    if (last_use[i] >= 0 && node.kind == Node::operation)
      for (int k = 0; k < node.count; ++k) last_use[node.from[k]] = std::max(last_use[node.from[k]], i);
  }
  const auto place = [&](int i) -> Place {
    const Node& node = parsed.nodes[i];
    if (node.kind == Node::x) return {false, 0};
    if (node.kind == Node::gradient) return {false, 1};
    if (node.kind == Node::operation) return {false, row[i]};
    return {true, node.index + (node.kind == Node::number ? parameters : 0)};
  };
  std::vector<int> free;
  for (int i = 0; i < end; ++i) {
    const Node& node = parsed.nodes[i];
    if (last_use[i] < 0 || node.kind != Node::operation) continue;
    Code::Step step{node.op, 0, {}};
    for (int k = 0; k < 3 && k < node.count; ++k) {
      step.from[k] = place(node.from[k]);
      code.takes_gradient |= parsed.nodes[node.from[k]].kind == Node::gradient;
    }
    for (int k = 0; k < node.count; ++k) {  // an operation may write where it reads
      const int from = node.from[k];
      if (parsed.nodes[from].kind == Node::operation && last_use[from] == i) free.push_back(row[from]), last_use[from] = -1;
    }
    if (free.empty()) free.push_back(code.rows++);
    step.to = row[i] = free.back();
    free.pop_back();
    code.steps.push_back(step);
  }
  for (const Product& result : results) code.results.push_back({place(result.slope), place(result.gradient)});
  return code;
}

}  // namespace

Program parse_program(const std::string& text) {
  Parser parsed(text);
  Program program;
  program.parameters = int(parsed.results.size()) - 2;
  if (program.parameters < 0 || program.parameters > kMostParameters)
    throw std::invalid_argument("an expression should come with its derivatives by x and by at most " +
                                std::to_string(kMostParameters) + " parameters");
  for (const Node& node : parsed.nodes)
    if (node.kind == Node::parameter && node.index >= program.parameters)
      throw std::invalid_argument("an expression has a parameter p" + std::to_string(node.index) +
                                  ", but no derivative by it");
  const std::vector<int> results = parsed.results;
  Through through(parsed);
  std::vector<Product> products{through.product(results[1])};
  for (size_t i = 2; i < results.size(); ++i) products.push_back(through.term(results[i]));
  program.numbers = parsed.numbers;
  program.value = code_for(parsed, {{results[0], results[0]}}, program.parameters);
  program.slope = code_for(parsed, {products[0]}, program.parameters);
  program.slopes = code_for(parsed, products, program.parameters);
  return program;
}

}  // namespace factorlayer
