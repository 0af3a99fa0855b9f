// Calls that Python makes in eager mode past PyTorch's dispatcher, which takes longer than the rest of a small one.
// They are for what has its kernels and is nothing special: whatever else comes is left to the raw ops, which do the same.
// Tensors come as DLPack has them, and are made as PyTorch's handles, AtenTensorHandle, which belong to who asked for them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace factorlayer::eager {

using Handle = void*;

// DLTensor of dlpack.h: the rows of x, each at strides of elements; a tensor of PyTorch's has no offset but in `data`.
struct Given {
  void* data;
  int32_t device_type, device;
  int32_t dimensions;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *sizes, *strides;
  uint64_t offset;

  bool is_float_on_gpu() const { return device_type == 2 && code == 2 && bits == 32; }
};

// y of x, or of the tensors that it is, the weights and the bias of a chain, or of x and the tensors of a stack's layers; null if
// the raw op has to make it. `chooses`: as implementation="auto" does, `recorded` for a backward pass or not.
Handle forward(const std::string& chain, bool chooses, bool recorded, const std::vector<Given>& tensors);

// From now on `chooses` takes the kernels of a GPU, for all numbers of samples that round up to the same power of two.
void take(const std::string& chain, const std::string& dtype, int device, int64_t batch, bool recorded);

constexpr int kMostBits = 63;  // that `wanted` has beside its sign; a layer with more tensors is left to the raw ops

// Of a chain that is a layer, from grad_y, x, the weights and the bias: the gradients whose bits are set in `wanted`, as the
// raw op backward has them, or, where x is several tensors, inputs_backward; of a stack, from grad_y, x and its layers' tensors, as
// stack_backward has them. None if autograd/backward.py has to make them, or stack_ops.py.
std::vector<Handle> gradients(const std::string& chain, const std::vector<Given>& tensors, int64_t wanted);

// A decoder's step as the raw op decode has it, of its tensors in that order, with one without data where there is none, and
// `random` in front of the parameters: tokens or scores, and the state, of a cell without an axis of layers; none if the raw op has to make it.
std::vector<Handle> decode(const std::string& decoder, const std::vector<Given>& tensors, double temperature);

}  // namespace factorlayer::eager
