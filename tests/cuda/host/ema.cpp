// The kernel body of ema, run for every thread of every block on this processor.
#include "../../../csrc/cuda/ema.cu"

using namespace zero_kernels;

// averages: `each` of the `columns` that rates has. low_size: of an element of a split master; 0: it is not split.
extern "C" void ema(
    const void* master, const void* high, float* const* averages, const float* rates, const int32_t* row_slot,
    int64_t numel, int each, int columns, int slots, int low_size, int dtype) {
  EmaArgs args = {master, high, {}, rates, row_slot, numel, each, columns, slots, low_size, DType(dtype), false};
  for (int k = 0; k < each; ++k) args.averages[k] = averages[k];
  args.vector = all_aligned(args);
  for (int64_t block = 0; block < ceil_div(numel, kTile); ++block)
    for (int thread = 0; thread < kThreads; ++thread) ema_thread(args, block, thread);
}
