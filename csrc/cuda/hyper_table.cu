// hyper_table on CUDA: bias corrections are made where the step counts are, so that the host reads nothing.
#include "../hyper_table.h"

#if defined(__CUDACC__)
#include "launch.h"
#endif

namespace zero_kernels {
namespace {

// ---- kernel -------------------------------------------------------------------------------------------------------

constexpr int kThreads = 128;

// The program of one thread of one block.
ZK_HOST_DEVICE inline void hyper_table_thread(const HyperTableArgs& args, int64_t block, int thread) {
  int64_t slot = block * kThreads + thread;
  if (slot < args.slots) make_hyper_row(args, slot);
}

// ---- launcher and op ----------------------------------------------------------------------------------------------

#if defined(__CUDACC__)

__global__ void __launch_bounds__(kThreads) hyper_table_kernel(const HyperTableArgs args) {
  hyper_table_thread(args, blockIdx.x, threadIdx.x);
}

void hyper_table(
    const Tensor& coefficients, const std::optional<Tensor>& group, const Tensor& step,
    const std::optional<Tensor>& active, const Tensor& out) {
  HyperTableArgs args = {
      data<const double>(coefficients),
      group ? data<const int32_t>(*group) : nullptr,
      data<const double>(step),
      active ? data<const bool>(*active) : nullptr,
      data<HyperRow>(out),
      coefficients.size(1),
      out.size(0)};
  Launch("hyper_table", out)(hyper_table_kernel, ceil_div(args.slots, kThreads), kThreads, args);
}

#endif

}  // namespace
}  // namespace zero_kernels

#if defined(__CUDACC__)
STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CUDA, m) { m.impl("hyper_table", TORCH_BOX(&zero_kernels::hyper_table)); }
#endif
