// Tensors of libtorch's stable ABI as plain pointers. One binary serves all torch >= 2.10.
// Arguments were checked in Python (zero_kernels/ops.py); only what would read out of bounds is checked again.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>

#include "types.h"

namespace zero_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return DType::kHalf;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat;
    default:
      throw std::runtime_error("zero_kernels: expected float16, bfloat16 or float32");
  }
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

}  // namespace zero_kernels
