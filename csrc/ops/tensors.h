// PyTorch's tensors and strings by its stable ABI, as all files of this folder take them. They alone see torch.
#pragma once
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "../dtype.h"
#include "../shown.h"

namespace factorlayer {

// A string argument of an op. The conversion to std::string that comes with PyTorch 2.11 to 2.13 leaks a copy at every
// call, and glibc then cannot put a large output where the last one was.
struct Text {
  std::string value;
};

}  // namespace factorlayer

HIDDEN_NAMESPACE_BEGIN(torch, stable, detail)
template <>
struct ToImpl<factorlayer::Text> {
  static factorlayer::Text call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    factorlayer::Text text{std::string(data, length)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
HIDDEN_NAMESPACE_END(torch, stable, detail)

namespace factorlayer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return DType::float64;
    case ScalarType::Float: return DType::float32;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    default: break;
  }
  STD_TORCH_CHECK(false, "factorlayer: x has a dtype that the fused kernels do not know; use float64, float32, ",
                  "bfloat16 or float16");
}

inline DType dtype_named(const std::string& name) {
  for (DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16})
    if (name == name_of(dtype)) return dtype;
  STD_TORCH_CHECK(false, "factorlayer: a dtype should be float64, float32, bfloat16 or float16, it is \"", shown(name), "\"");
}

// A tensor's device and dtype. x is asked once, for all tensors that are compared with it.
struct Home {
  int32_t type = 0, index = 0, dtype = 0;
  bool is_cpu;

  Home(const Tensor& t) {
    if (aoti_torch_get_device_type(t.get(), &type))
      throw std::runtime_error(
          "factorlayer: PyTorch has handed over no tensor for a weight. It does so from the second call on where TorchScript "
          "has weights for constants, as behind torch.jit.freeze and in a function that was traced: trace a module, and do "
          "not freeze it, or use implementation='batched'");
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    is_cpu = type == aoti_torch_device_type_cpu();
    if (!is_cpu) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &index));
  }
};

// The tensor as kernels read it. To look first costs less than PyTorch's own contiguous().
inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// A new tensor with any values, on x's device, of x's dtype or another. The stable new_empty takes a microsecond more, in which
// it looks an operator up by name. With one dimension it is a vector, of one row.
inline Tensor new_matrix(const Tensor& x, int64_t rows, int64_t columns, int32_t dtype = -1, int dimensions = 2) {
  int32_t type = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
  if (dtype < 0) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  AtenTensorHandle made = nullptr;
  // PyTorch writes to stderr what went wrong, and only returns that something did.
  const int from = 2 - dimensions;
  if (aoti_torch_empty_strided(dimensions, sizes + from, strides + from, dtype, type, index, &made))
    throw std::runtime_error(std::string(x.is_cuda() ? "CUDA " : "") + "out of memory: factorlayer could not allocate [" +
                             std::to_string(rows) + ", " + std::to_string(columns) + "] for what it computes from x [" +
                             std::to_string(x.size(0)) + ", " + std::to_string(x.size(1)) +
                             "]; split the batch, or free memory");
  return Tensor(made);
}

}  // namespace factorlayer
