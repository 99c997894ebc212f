// What every launcher needs: the stream and the check of a launch. Nothing here waits for the GPU.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "../stable.h"
#include "check.h"

namespace zero_kernels {

// Makes the device of a tensor the current one for as long as it lives, and knows the stream that torch uses there.
class Launch {
 public:
  Launch(const char* op, const Tensor& tensor) : op_(op), guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != 0)
      throw std::runtime_error(std::string("zero_kernels: ") + op + ": torch gave no CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }

#if defined(__CUDACC__)
  // kernel<<<blocks, threads>>>(args), if there is any block.
  template <class Args>
  void operator()(void (*kernel)(Args), int64_t blocks, int threads, const Args& args) const {
    if (blocks == 0) return;
    kernel<<<static_cast<unsigned>(blocks), threads, 0, stream_>>>(args);
    check(cudaGetLastError(), op_);
  }
#endif

  void zero(void* at, size_t bytes) const { check(cudaMemsetAsync(at, 0, bytes, stream_), op_); }

  cudaStream_t stream() const { return stream_; }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace zero_kernels
