// The kernel body of pack and unpack, run for every thread of every block on this processor.
#include "../../../csrc/cuda/pack.cu"

using namespace zero_kernels;

namespace {

template <Direction kDirection>
int run(const PackJob& job) {
  int launches = 0;
  launch(job, [&](auto bucket, const auto& args, int64_t blocks) {
    ++launches;
    for (int64_t block = 0; block < blocks; ++block)
      for (int thread = 0; thread < kThreads; ++thread)
        pack_thread<kDirection, typename decltype(bucket)::type>(args, block, thread);
  });
  return launches;
}

}  // namespace

// Returns the number of launches that it takes.
extern "C" int pack(
    int unpack, void** grads, const int* dtypes, const int64_t* begins, const int64_t* ends, int count, void* bucket,
    int64_t numel, int bucket_dtype, float scale, int32_t* nonfinite) {
  PackJob job = {bucket, numel, DType(bucket_dtype), scale, nonfinite, {}, {}};
  for (int i = 0; i < count; ++i) {
    job.slots.push_back({grads[i], begins[i], ends[i]});
    job.dtypes.push_back(DType(dtypes[i]));
  }
  return unpack ? run<Direction::kUnpack>(job) : run<Direction::kPack>(job);
}
