// What CUDA's runtime answers, as an exception where it is an error.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace zero_kernels {

inline void check(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // forgets it, where it can be: the next launch must not be blamed for it
  throw std::runtime_error(std::string("zero_kernels: ") + op + " on CUDA: " + cudaGetErrorString(error));
}

}  // namespace zero_kernels
