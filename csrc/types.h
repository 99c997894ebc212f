// What the CPU and the CUDA kernels share: element types and the shape of grad_stats' tree. Functions are static:
// shared with an object file of another instruction set, one could be kept in a form that the processor does not have.
#pragma once

#include <cstdint>
#include <cstdlib>

// Functions that run on a processor and on a GPU alike, and loops over arrays that a GPU must keep in registers.
#if defined(__CUDACC__)
#define ZK_HOST_DEVICE __host__ __device__
#define ZK_UNROLL _Pragma("unroll")
#else
#define ZK_HOST_DEVICE
#define ZK_UNROLL
#endif

namespace zero_kernels {

enum class DType : uint8_t { kHalf, kBFloat16, kFloat };

ZK_HOST_DEVICE static constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat ? 4 : 2; }

constexpr int64_t kStatsLanes = 1024;             // running sums of a block of grad_stats
constexpr int64_t kStatsBlock = 8 * kStatsLanes;  // elements that make one partial

ZK_HOST_DEVICE static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// For an index that a table does not have, which is an error of the caller: a kernel on a GPU stops, as torch's own
// indexing does. On a processor it was checked before.
ZK_HOST_DEVICE static inline void stop() {
#if defined(__CUDA_ARCH__)
  __trap();
#else
  std::abort();
#endif
}

}  // namespace zero_kernels
