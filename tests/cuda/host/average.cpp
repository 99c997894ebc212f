// The kernel body of averages, run for every thread of every block on this processor.
#include "../../../csrc/cuda/average.cu"

using namespace zero_kernels;

// tensors: of each average its master, or its high and low halves, else null; itself, and its row_slot. low_size: of an
// element of low halves. Returns how many launches it took.
extern "C" int average(
    void* const* tensors, const int64_t* numels, const int* columns, int count, const float* hyper, const float* rates,
    const float* found_inf, int row, int low_size) {
  Averages averages = {reinterpret_cast<const HyperRow*>(hyper), rates, found_inf, row, {}};
  for (int i = 0; i < count; ++i) {
    void* const* of = tensors + 4 * i;
    averages.of.push_back(
        {of[0], of[1], static_cast<float*>(of[2]), static_cast<const int32_t*>(of[3]), numels[i], columns[i],
         int8_t(low_size), false});
  }
  int launches = 0;
  launch(averages, [&](const AverageArgs& args, int64_t blocks) {
    ++launches;
    for (int64_t block = 0; block < blocks; ++block)
      for (int thread = 0; thread < kThreads; ++thread) average_thread(args, block, thread);
  });
  return launches;
}
