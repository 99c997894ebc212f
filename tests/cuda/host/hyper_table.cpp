// hyper_table's kernel body, run for every thread of every block on this processor.
#include "../../../csrc/cuda/hyper_table.cu"

using namespace zero_kernels;

extern "C" void hyper_table(
    const double* coefficients, int64_t groups, const int32_t* group, const double* step, const bool* active,
    float* out, int64_t slots) {
  HyperTableArgs args = {coefficients, group, step, active, reinterpret_cast<HyperRow*>(out), groups, slots};
  for (int64_t block = 0; block < ceil_div(slots, kThreads); ++block)
    for (int thread = 0; thread < kThreads; ++thread) hyper_table_thread(args, block, thread);
}
