// A chain: what a layer does to a batch of samples, as a list of contractions and what follows them.
//
// Python writes it as text (maths/chain.py), the raw ops carry that text, and every engine parses it here. Stages stand with "; "
// between them. Example, two tied 32 x 32 factors, a bias and an activation:
//     "tied 1 32 32 32 1; tied 0 1 32 32 32; bias; gelu"
// A contraction "KIND w o p q i" views the state as [o, p, i] and contracts p with weight w:
//     tied:    y[o, q, i] = sum_p weight[q, p] x[o, p, i]              weight is [q, p]
//     untied:  y[o, q, i] = sum_p weight[o * I + i, q, p] x[o, p, i]   weight is [O * I, q, p]
//
// The other stages of a layer:
//     inputs a b ..  before all others: x is several tensors of so many features, side by side
//     rank r         before the contractions: every weight has a leading axis r, and the chain is summed over it
//     bias           behind the contractions
//     NAME           an activation that has a name; or a program (expression.h), whose parameters are weights behind those of the
//                    contractions
//     kept a b ..    behind tied contractions and what follows them in a layer, or behind "backward": states of so many features lie
//                    between passes, those of all terms, and stay: a layer makes them beside y, and gradients are given them. Behind
//                    "slope" the last of them is x. Behind two untied contractions and what follows them in a layer: what the first
//                    one makes stays, [o, i, p] of the second one.
//     tf32           at the end: float32 products may be rounded to TensorFloat-32, which kernels of a CPU never do
//
// Stages by which a chain makes a gradient in the place of y:
//     gradient       behind one contraction: the gradient of its weight, from states [samples, o p i] and [samples, o q i]. Behind a
//                    dense layer with "bias" it is that of the bias as well.
//     backward       behind contractions: all their gradients. With "bias" also that of the bias, and then that of x only where y is
//                    given. With "turned" grad_y is the last contraction's [o, i, q].
//     few            behind "backward" of two untied contractions: by the kernels for few samples
//     slope n        behind an activation of n features: the gradient of what is activated, from grad_y and what is activated. The
//                    contractions make that from x; where there are none, it is x.
//     through n      behind an activation of n features, too: the gradient of what is activated, from the activation's result and the
//                    gradient of that. The contractions make the latter from x; where there are none, it is x.
//     sums n         alone: the sum over samples of each of n features. Behind "slope" or "through": the sums of the gradient beside it.
//
// Stages that say how tensors lie, on a GPU:
//     turned         before untied contractions: x is the first one's [o, i, p]
//     turn o r c     behind the contractions: y, [o, r, c], is stored as [o, c, r]; behind "backward" the gradient of x is. A turn may be
//                    all of a chain. Behind "slope", "through" or "sums" without contractions, what these make, or what is summed, is
//                    stored so.
//     mixed o r c    behind "backward" or "gradient": the q's of grad_y, which weights have as [o, r, c], come as [o, c, r]. Behind a
//                    turn that is all: the rows of its matrices are taken so.
//     slabs 1        behind "backward": grad_y, of a multiple of 64 samples, lies as [samples / 32, o q i, 32]; with "slabs 2" so does the
//                    gradient of x. Behind one contraction alone: y lies so.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "expression.h"

namespace factorlayer {

// What a text may have: maths/chain.py has the same numbers. More is refused before anything is made of it.
constexpr size_t kMostText = size_t(1) << 22;  // bytes
constexpr size_t kMostContractions = 4096;     // of a chain
constexpr size_t kMostLayers = 4096;           // of a stack
constexpr size_t kMostInputs = 4096;           // tensors that x is
constexpr size_t kMostKept = 3;                // states between passes
constexpr int64_t kMostElements = int64_t(1) << 48;  // of a tensor or state: few enough that no offset into memory overflows

struct Contraction {
  bool tied;
  int weight;
  int64_t outer, p, q, inner;
  int64_t weight_size() const { return q * p * (tied ? 1 : outer * inner); }
};

struct Chain {
  std::vector<int64_t> inputs;  // features of each tensor that x is, if it is several
  std::vector<int64_t> kept;    // features of each state that y comes with, or gradients are made of
  std::vector<Contraction> contractions;
  int64_t rank = 1;
  bool bias = false;
  std::string activation = "identity";
  std::shared_ptr<const Program> program;  // the activation's, if it has no name
  bool gradient = false, backward = false, few = false, tf32 = false, x_turned = false;
  int64_t turned = 0;   // features of y, if it is stored turned
  int64_t slabs = 0;    // states that lie by slabs: y or grad_y, or that and the gradient of x
  int64_t mixed = 0;    // the same, if its q's come in another order
  int64_t slope = 0;    // features of y, if what is made is the gradient of what is activated
  int64_t through = 0;  // the same, of what has been activated before
  int64_t sums = 0;     // features, if their sums over the samples are made, alone or beside a gradient

  bool makes_y() const { return !(gradient || backward || slope || through || sums) && kept.empty(); }  // and nothing else
  bool may_keep() const;  // whether "kept" may stand behind it
  size_t parameters() const { return program ? program->parameters : 0; }
  size_t weights() const { return contractions.size() + parameters(); }
  int64_t in_features() const;
  int64_t out_features() const;
  int64_t given_features() const { return slope && !kept.empty() ? kept.back() : in_features(); }  // of x, which a state may be
  int64_t state_features() const;  // of x and of what each contraction makes of it, all together
};

// Layers one behind another, in the text with " | " between them; " | backward" at the end makes it all their gradients,
// " | states" what each of them makes. With " | frozen" the tensors of all layers lie side by side in one.
struct Stack {
  std::vector<Chain> layers;
  bool backward = false, states = false, frozen = false;
  std::vector<int64_t> places;  // if frozen: elements before each tensor, and before the end
};

// A gated recurrent unit. Its text is "gru after" or "gru before" (the reset gate stands behind a product or before it), then
// " reversed" if it goes from the last step to the first one, then "; " and the chain of a gate's recurrent matrix, whose bias
// and activation are the candidate's: maths/recurrence.py has the formula.
struct Recurrence {
  Chain chain;
  bool before = false, reversed = false;
  int64_t hidden() const { return chain.out_features(); }
};
constexpr int kGates = 3;  // reset, update, candidate

// Checks that a text has only words, numbers and activations of chains and stacks. What stands where is checked by Python, which
// reads such texts. Throws std::invalid_argument.
void check_words(const std::string& text);

// Parse the text once and keep the result for the life of the process. Throw std::invalid_argument.
const Chain& find_chain(const std::string& text);
const Stack& find_stack(const std::string& text);
inline bool is_stack(const std::string& text) { return text.find('|') != std::string::npos; }
const Recurrence& find_recurrence(const std::string& text);

// Whether a text asks a GPU about a recurrence: all steps by the recurrence's text alone, or, with " | slopes" or " | backward"
// behind it, what goes back.
bool is_of_recurrence(const std::string& text);
// The recurrence of such a text, at an address that plans are kept by.
const Recurrence* const& find_asked(const std::string& text);

}  // namespace factorlayer
