// The kernel bodies of grad_stats, run on this processor: all threads of a block, a phase at a time.
#include "../../../csrc/cuda/grad_stats.cu"

using namespace zero_kernels;

namespace {

struct EachOfBlock {
  template <class F>
  void operator()(F f) const {
    for (int thread = 0; thread < kThreads; ++thread) f(thread);
  }
};

}  // namespace

// Returns the number of launches. Blocks run from the last to the first: the order of additions must not follow them.
// Where data is null, the partials of blocks are given.
extern "C" int grad_stats(
    void** data, const int* dtypes, const int64_t* numels, int count, double norm_type, float* partials,
    int32_t* nonfinite, float* out) {
  std::vector<Shard> shards;
  std::vector<DType> types;
  for (int i = 0; i < count; ++i) {
    shards.push_back({data ? data[i] : nullptr, numels[i], 0});
    types.push_back(DType(dtypes[i]));
  }
  StatsArgs args;
  args.partials = partials;
  args.nonfinite = nonfinite;
  args.out = out;
  int launches = 0;
  launch(shards, types, norm_type, args, [&](auto norm, const StatsArgs& args) {
    using Norm = typename decltype(norm)::type;
    float acc[kStatsLanes];
    int64_t counts[kThreads];
    launches += args.large_count ? 3 : 2;
    if (data)
      for (int64_t block = args.blocks - 1; block >= 0; --block) stats_block<Norm>(args, block, acc, EachOfBlock());
    for (int block = args.large_count * kBlocksOfLarge - 1; block >= 0; --block)
      for (int thread = 0; thread < kLanesOfBlock; ++thread) stats_large<Norm>(args, block, thread);
    for (int shard = 0; shard < args.count; ++shard) stats_combine<Norm>(args, shard, acc, counts, EachOfBlock());
  });
  return launches;
}
