// An activation's program: what it computes of x and of parameters p0, p1, ..., and the derivatives by them.
//
// Python writes it as a word (activations/expression.py), which is a chain's activation where that has no name. Example,
// x tanh(softplus(x)) and its derivative:
//     "x,softplus:0,tanh:1,mul:0:2/1.0,mul:2:2,sub:4:5,mul:0:6,sigmoid:0,mul:7:8,add:2:9"
// A step is x, p and an index, a number, or an operation and the earlier steps that it takes; ":i" is step i again. Each
// part ends in its result: the value, then the derivatives by x, p0, p1, .... Steps are counted through all parts.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace factorlayer {

// The operations, as in activations/expression.py, with their numbers of arguments.
#define FL_OPERATIONS(ROW)                                                                                   \
  ROW(neg, 1) ROW(abs, 1) ROW(sign, 1) ROW(floor, 1) ROW(sqrt, 1) ROW(exp, 1) ROW(expm1, 1) ROW(log, 1)      \
  ROW(log1p, 1) ROW(sin, 1) ROW(cos, 1) ROW(tanh, 1) ROW(sigmoid, 1) ROW(softplus, 1) ROW(erf, 1) ROW(atan, 1) \
  ROW(add, 2) ROW(sub, 2) ROW(mul, 2) ROW(div, 2) ROW(pow, 2) ROW(min, 2) ROW(max, 2) ROW(lt, 2) ROW(le, 2)  \
  ROW(eq, 2) ROW(select, 3)

enum class Op : uint8_t {
#define FL_NAME(NAME, COUNT) NAME,
  FL_OPERATIONS(FL_NAME)
#undef FL_NAME
};

// Where an operand is: in a row, of which row 0 is x and row 1 the gradient of the value, or among the constants, parameters
// first and then numbers.
struct Place {
  bool constant;
  int index;
};

// The steps that some results need. A row is written again once nobody reads it any more. A derivative's result is a product
// with what is left of the gradient, which is nothing where the derivative passes nothing on. Where both are one place, that
// is the product, or the value.
struct Code {
  static constexpr int kGiven = 2;  // rows
  struct Step {
    Op op;
    int to;  // a row
    Place from[3];
  };
  struct Result {
    Place slope, gradient;
  };
  std::vector<Step> steps;
  std::vector<Result> results;
  int rows = kGiven;
  bool takes_gradient = false;  // whether a step does
};

struct Program {
  int parameters = 0;
  std::vector<double> numbers;
  Code value, slope, slopes;  // slopes: by x and all parameters
};

// Throws std::invalid_argument.
Program parse_program(const std::string& text);

}  // namespace factorlayer
