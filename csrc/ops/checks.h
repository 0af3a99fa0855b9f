// Whether tensors are those of a chain or a stack, whose text comes from anyone. Shapes were checked in Python: what is
// checked here keeps memory safe, and says in words what is wrong.
#pragma once
#include <optional>
#include <vector>

#include "../chain.h"
#include "tensors.h"

namespace factorlayer {

void check(const Tensor& t, const Home& x, int64_t elements, const char* name);

void check_slabs(const Chain& chain, const Tensor& x);

// Whether the tensors are those that the chain reads; the text of the chain comes from anyone.
void check_x(const Chain& chain, const Tensor& x);

void check_layer(const Chain& chain, const Home& x, const Tensor* weights, size_t given, const Tensor* bias);

void check_inputs(const Chain& chain, const Tensor& x, const std::vector<Tensor>& weights,
                  const std::optional<Tensor>& bias);

void check_layers(const Stack& stack, const Tensor& x, const std::vector<Tensor>& tensors);

// Whether x is the tensors that the chain says, side by side.
void check_several(const Chain& chain, const std::vector<Tensor>& inputs);

// Whether the tensors are those of the layers, for an x that is several tensors.
void check_layers(const Stack& stack, const std::vector<Tensor>& inputs, const std::vector<Tensor>& tensors);

// Whether the tensor has the elements of all layers' tensors, side by side, and bytes of prepared weights behind them.
void check_values(const Stack& stack, const Tensor& frozen, int64_t prepared);

void check_frozen(const Stack& stack, const Tensor& x, const Tensor& frozen, int64_t prepared);

// The sizes of a recurrence: sequences, steps of the longest one, rows, and the strides of rows.
struct Walk {
  int64_t sequences, steps, rows, of_sequence, of_step;
};

// Whether tensors are those of a recurrence. Callers that can read the tensors which say where rows lie check these themselves.
Walk check_recurrence(const Recurrence& recurrence, const std::vector<Tensor>& gates, const Tensor& initial,
                      const std::vector<Tensor>& weights, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& starts, const std::optional<Tensor>& first,
                      const std::optional<Tensor>& lengths, const std::optional<Tensor>& offsets,
                      const std::vector<int64_t>& numbers);

void check_wanted(const std::vector<int64_t>& wanted, size_t tensors);

}  // namespace factorlayer
