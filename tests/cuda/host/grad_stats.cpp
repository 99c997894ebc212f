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

// Blocks run from the last to the first: the order of additions must not follow them. Returns their number.
extern "C" int64_t grad_stats(
    const void* shard, int dtype, int64_t numel, double norm_type, float* partials, float* out) {
  Tally tally = {};
  StatsArgs args = {};
  args.shard = shard;
  args.numel = numel;
  args.partials = partials;
  args.tally = &tally;
  args.out = out;
  int64_t ran = 0;
  launch(args, DType(dtype), norm_type, [&](auto norm, auto type, const StatsArgs& args) {
    using Norm = typename decltype(norm)::type;
    float acc[kStatsLanes];
    ran = args.blocks;
    for (int64_t block = args.blocks - 1; block >= 0; --block)
      stats_block<Norm, typename decltype(type)::type>(args, block, acc, EachOfBlock());
    stats_combine<Norm>(args, acc, EachOfBlock());
  });
  return tally.nonfinite == 0 ? ran : -1;  // left zero for the next launch
}
