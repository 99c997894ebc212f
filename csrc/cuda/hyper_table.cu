// hyper_table on CUDA: bias corrections are made where the step counts are, so that the host reads nothing.
#include "launchers.h"

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

// ---- launcher -----------------------------------------------------------------------------------------------------

#if defined(__CUDACC__)

__global__ void __launch_bounds__(kThreads) hyper_table_kernel(const HyperTableArgs args) {
  hyper_table_thread(args, blockIdx.x, threadIdx.x);
}

#endif

}  // namespace

#if defined(__CUDACC__)

void run_hyper_table(CUstream_st* stream, const HyperTableArgs& args) {
  on_stream(stream, "hyper_table", hyper_table_kernel, ceil_div(args.slots, kThreads), kThreads, args);
}

#endif

}  // namespace zero_kernels
