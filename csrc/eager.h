// Calls that Python makes in eager mode past PyTorch's dispatcher, which takes longer than the rest of a small one.
// They are for what has its kernels and is nothing special: whatever else comes is left to the raw ops, which do the same.
// Tensors are PyTorch's handles, AtenTensorHandle, and belong to whom they are given.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace factorlayer::eager {

using Handle = void*;

bool is_float_on_gpu(Handle x);  // which stays the caller's

// y of x, the weights and the bias of a chain; null if the raw op has to make it. `chooses`: as implementation="auto" does.
Handle forward(const std::string& chain, bool chooses, const std::vector<Handle>& tensors);

// Of a chain that is a layer, from grad_y, x, the weights and the bias: the gradients whose bits are set in `wanted`, as the
// raw op backward has them; none if factorlayer/backward.py has to make them.
std::vector<Handle> gradients(const std::string& chain, const std::vector<Handle>& tensors, int64_t wanted);

}  // namespace factorlayer::eager
