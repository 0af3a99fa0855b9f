// The dtypes of x, weights and y, which are one.
#pragma once
#include <cstdint>

namespace factorlayer {

enum class DType { float64, float32, bfloat16, float16 };

inline const char* name_of(DType dtype) {
  const char* const names[] = {"float64", "float32", "bfloat16", "float16"};
  return names[int(dtype)];
}

inline int64_t bytes_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

}  // namespace factorlayer
