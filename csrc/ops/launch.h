// From the text of a chain or a stack to its kernels on a GPU: its plan, their compilation, their launch.
#pragma once
#include <string>
#include <vector>

#include "../python.h"
#include "../runtime/kernels.h"
#include "tensors.h"

namespace factorlayer {

// PyTorch's current stream.
cuda::Stream current_stream(int device);

// The tensor, or a copy if it is not aligned: kernels read 16 bytes at once.
inline Tensor aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 ? torch::stable::clone(t) : t;
}

void locate_compiler();

// A GPU's limits, and the text by which the cache knows them.
python::Limits limits_of(const cuda::Device& device);
std::string shown(const python::Limits& gpu);

// The plan from the cache or from the planner, which takes longer than all the rest of a first call does. A plan that
// cannot be kept is made again by the next process, and that is all.
std::string plan_of(const std::string& chain, DType dtype, int batch_class, const python::Limits& gpu);

const cuda::Program& program_of(const cuda::PlanKey& key, const std::string& chain);

// Runs the plan of a text, of x's dtype and device, on params, in which x, y and the weights are set. `chain` is what find_chain
// or find_stack made of the text; `in` and `out` are the features of x and y. `kept` are tensors that are needed until the kernels
// are launched, after which PyTorch's streams keep them. `prepared` is what passes that read weights alone have made, if they have
// run. `rows` says which of the weights have a row for each sample.
void run_on_cuda(const Text& text, const void* chain, const Tensor& x, int64_t in, int64_t out, const cuda::Params& params,
                 std::vector<Tensor>& kept, void* second = nullptr, void* prepared = nullptr, const cuda::Rows& rows = {});

// A part of a tensor of one row, with sizes of its own.
inline Tensor part(const Tensor& whole, int64_t first, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(whole.get(), int64_t(sizes.size()), sizes.data(),
                                                               strides.data(), first, &made));
  return Tensor(made);
}

inline Tensor part_like(const Tensor& whole, int64_t first, const Tensor& like) {
  std::vector<int64_t> sizes(like.dim());
  for (int64_t i = 0; i < like.dim(); ++i) sizes[i] = like.size(i);
  return part(whole, first, sizes);
}

}  // namespace factorlayer
