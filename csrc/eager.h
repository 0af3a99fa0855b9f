// Calls that Python makes in eager mode past PyTorch's dispatcher, which takes longer than the rest of a small one.
// They are for what has its kernels and is nothing special: whatever else comes is left to the raw ops, which do the same.
// Tensors come as DLPack has them, and are made as PyTorch's handles, AtenTensorHandle, which belong to who asked for them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace factorlayer::eager {

using Handle = void*;

// A tensor, laid out as DLTensor of dlpack.h; strides count elements. PyTorch's own have their offset in `data`.
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

// Whether a backward pass may follow a call, and one for every weight.
enum class Recorded { no, of_some, of_all };

// y, and behind it the states that a layer keeps for its backward pass, by a text that says so; nothing if the raw op has to make y.
struct Made {
  std::vector<Handle> tensors;
  const std::string* kept = nullptr;  // stays where it is
};

// The y of a chain or a stack. The tensors are x, or those that x consists of, and the weights and the bias; of a stack x and the
// tensors of its layers. `chooses` is for implementation="auto".
Made forward(const std::string& chain, bool chooses, Recorded recorded, const std::vector<Given>& tensors);

// From now on `chooses` takes the kernels of a GPU, for all numbers of samples that round up to the same power of two.
void take(const std::string& chain, const std::string& dtype, int device, int64_t batch, bool recorded);

// Says how a layer runs on a GPU that is trained with so many samples, and all that round up to the same power of two: by the text
// `kept`, which keeps states, or, where it is empty, as ever. Until then the raw op makes y.
void settle(const std::string& chain, const std::string& dtype, int device, int64_t batch, const std::string& kept);

constexpr int kMostBits = 63;  // that `wanted` has beside its sign; a layer with more tensors is left to the raw ops

// The gradients whose bits are set in `wanted`; none if autograd/backward.py or stack_ops.py has to make them. The tensors are
// grad_y and those of forward(). Bits and order are those of the raw op: backward for a layer, inputs_backward where its x is
// several tensors, stack_backward for a stack.
std::vector<Handle> gradients(const std::string& chain, const std::vector<Given>& tensors, int64_t wanted);

// A decoder's step: tokens or scores, and the state, which for a cell has no axis of layers; none if the raw op has to make it. The
// tensors are those of the raw op decode in its order, but with `random` in front of the parameters; one that is not given has no
// data.
std::vector<Handle> decode(const std::string& decoder, const std::vector<Given>& tensors, double temperature);

}  // namespace factorlayer::eager
