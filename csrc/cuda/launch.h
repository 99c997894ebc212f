// What every launcher needs: the launch, and the check of what CUDA's runtime answers. Nothing here waits for the GPU.
// torch's headers, which take longer to compile than most kernels, are included by ops.cpp alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace zero_kernels {

inline void check(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // forgets it, where it can be: the next launch must not be blamed for it
  throw std::runtime_error(std::string("zero_kernels: ") + op + " on CUDA: " + cudaGetErrorString(error));
}

#if defined(__CUDACC__)
// kernel<<<blocks, threads>>>(args), if there is any block.
template <class Args>
void on_stream(
    CUstream_st* stream, const char* op, void (*kernel)(Args), int64_t blocks, int threads, const Args& args) {
  if (blocks == 0) return;
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(args);
  check(cudaGetLastError(), op);
}
#endif

}  // namespace zero_kernels
