// grad_stats on CUDA, for any number of shards in two launches: a block of threads makes the partial of each block of
// elements, then one block adds the partials of each shard. Where a shard has many partials, a launch between the two
// has many blocks add them to one row. The order of additions is that of docs/ops.md.
#include "launchers.h"

#include <algorithm>
#include <cmath>

#include "../norms.h"
#include "chunk.h"
#include "shard_of_block.h"

#if defined(__CUDACC__)
#include "launch.h"
#endif

namespace zero_kernels {
namespace {

// ---- kernels ------------------------------------------------------------------------------------------------------

constexpr int kLanes = 8;  // neighbouring running sums that a thread keeps
constexpr int kThreads = kStatsLanes / kLanes;
constexpr int kDepth = kStatsBlock / kStatsLanes;  // terms of a running sum; a thread's loads under way

constexpr int kBlocksPerSm = 7;  // lets a thread have 72 registers: held to 32, it waits for every other load

constexpr int kShards = 1024;  // of a launch: their table is among its arguments, which may be 32764 bytes

// Row k of a shard's partials has a term for each running sum, as a row of elements has. One block has kDepth rows on
// their way at a time. With many rows it waits long, while a launch more shares the lanes out among many blocks.
constexpr int64_t kLarge = 2 * kDepth * kStatsLanes;  // partials; a shard that has more of them is large
constexpr int kLanesOfBlock = 32;                     // of a large shard; a thread each, which makes 128 bytes of a row
constexpr int kBlocksOfLarge = kStatsLanes / kLanesOfBlock;
constexpr int kRowsOfLarge = 32;  // a thread's loads under way; of 64 the compiler holds some back for the first sums

struct StatsArgs {
  float* partials;     // [blocks]
  int32_t* nonfinite;  // [blocks]; written where the partial is not finite, and else undefined
  float* out;          // [count, 2]: norm term, count of non-finite values
  int64_t blocks;
  int count;        // of shards
  int large_count;  // of large ones
  DType dtypes[kShards];
  int16_t large[kShards];  // indices of the large ones
  Shard shards[kShards];
};
static_assert(sizeof(StatsArgs) <= 32764);

// A block is run as a sequence of phases: `each(f)` calls f(thread) for every thread, then waits for all of them.

// Folds kStatsLanes running sums by halves: acc[j] gets acc[j + h] for h = 512 … 1.
template <class Norm, class Each>
ZK_HOST_DEVICE inline void fold(float* acc, Each each) {
  for (int h = kStatsLanes / 2; h >= 1; h /= 2)
    each([&](int thread) {
      for (int j = thread; j < h; j += kThreads) acc[j] = Norm::join(acc[j], acc[j + h]);
    });
}

// A block of elements of one shard. What lies beyond the shard's end is +0.
template <class T>
struct Block {
  const T* first;
  int64_t left;  // elements from `first` to the shard's end

  ZK_HOST_DEVICE Block(const Shard& shard, int64_t block) {
    int64_t offset = (block - shard.first_block) * kStatsBlock;
    first = static_cast<const T*>(shard.data) + offset;
    left = shard.numel - offset;
  }

  ZK_HOST_DEVICE bool whole() const { return left >= kStatsBlock && aligned(first, kAccess<T, kLanes>); }

  // Row k of the block has a term for each running sum; these are the ones of a thread.
  template <bool kWhole>
  ZK_HOST_DEVICE void load(int k, int thread, float (&x)[kLanes]) const {
    int64_t at = k * kStatsLanes + thread * kLanes;
    if (kWhole)
      load_chunk(first + at, x);
    else
      load_first(first + at, left - at < 0 ? 0 : left - at < kLanes ? int(left - at) : kLanes, x);
  }
};

template <class Norm, bool kWhole, class T>
ZK_HOST_DEVICE inline void add_terms(const Block<T>& block, int thread, float* acc) {
  float x[kDepth][kLanes], sum[kLanes] = {};
  ZK_UNROLL
  for (int k = 0; k < kDepth; ++k) block.template load<kWhole>(k, thread, x[k]);
  ZK_UNROLL
  for (int k = 0; k < kDepth; ++k)
    for (int j = 0; j < kLanes; ++j) sum[j] = Norm::join(sum[j], Norm::term(x[k][j]));
  for (int j = 0; j < kLanes; ++j) acc[thread * kLanes + j] = sum[j];
}

// As many as fp32 counts exactly.
template <class T>
ZK_HOST_DEVICE inline void count_nonfinite(const Block<T>& block, int thread, float* acc) {
  float found[kLanes] = {};
  for (int k = 0; k < kDepth; ++k) {
    float x[kLanes];
    block.template load<false>(k, thread, x);
    for (int j = 0; j < kLanes; ++j) found[j] += is_nonfinite(x[j]);
  }
  for (int j = 0; j < kLanes; ++j) acc[thread * kLanes + j] = found[j];
}

// The partial of a block of elements. acc: [kStatsLanes], shared by the threads.
template <class Norm, class T, class Each>
ZK_HOST_DEVICE inline void stats_of(
    const StatsArgs& args, const Block<T>& block, int64_t index, float* acc, Each each) {
  bool whole = block.whole();
  each([&](int thread) {
    if (whole)
      add_terms<Norm, true>(block, thread, acc);
    else
      add_terms<Norm, false>(block, thread, acc);
  });
  fold<Norm>(acc, each);
  float partial = acc[0];
  each([&](int thread) {
    if (thread == 0) args.partials[index] = partial;
  });
  // Terms are never negative, so a non-finite value makes the partial non-finite: only then is counting needed.
  if (!is_nonfinite(partial)) return;
  each([&](int thread) { count_nonfinite(block, thread, acc); });
  fold<Magnitude>(acc, each);
  each([&](int thread) {
    if (thread == 0) args.nonfinite[index] = int32_t(acc[0]);
  });
}

template <class Norm, class Each>
ZK_HOST_DEVICE inline void stats_block(const StatsArgs& args, int64_t block, float* acc, Each each) {
  int shard = shard_of_block(block, args.count, [&](int i) { return args.shards[i].first_block; });
  with_type(args.dtypes[shard], [&](auto type) {
    using T = typename decltype(type)::type;
    stats_of<Norm>(args, Block<T>(args.shards[shard], block), block, acc, each);
  });
}

ZK_HOST_DEVICE inline int64_t partials_of(const Shard& shard) { return ceil_div(shard.numel, kStatsBlock); }

// Adds partials to the running sums of a thread: kN lanes, kThreads apart, of which the first has the partials `at`,
// at + kStatsLanes and so on, before `end`. kRows rows are under way at a time: a thread would else wait for the memory
// as often as there are rows.
template <class Norm, int kRows, int kN>
ZK_HOST_DEVICE inline void add_partials(const float* partials, int64_t at, int64_t end, float (&sum)[kN]) {
  for (; at < end; at += kRows * kStatsLanes) {
    float x[kRows][kN];
    ZK_UNROLL
    for (int k = 0; k < kRows; ++k)
      for (int j = 0; j < kN; ++j) {
        int64_t i = at + k * kStatsLanes + j * kThreads;
        x[k][j] = i < end ? partials[i] : 0.0f;
      }
    ZK_UNROLL
    for (int k = 0; k < kRows; ++k)
      for (int j = 0; j < kN; ++j) sum[j] = Norm::join(sum[j], x[k][j]);
  }
}

// The non-finite values behind the partials `at`, at + step and so on, of which `sum` is the sum. As with a block of
// elements, there are none where it is finite.
ZK_HOST_DEVICE inline int64_t sum_counts(const StatsArgs& args, float sum, int64_t at, int64_t end, int64_t step) {
  int64_t count = 0;
  if (is_nonfinite(sum))
    for (; at < end; at += step)
      if (is_nonfinite(args.partials[at])) count += args.nonfinite[at];
  return count;
}

// Adds the rows of a large shard's partials into the first row, some lanes a block. No other thread reads or writes the
// lane of a thread. A running sum starts from +0, so the first row added to +0 once more stays as it is.
template <class Norm>
ZK_HOST_DEVICE inline void stats_large(const StatsArgs& args, int64_t block, int thread) {
  const Shard& shard = args.shards[args.large[block / kBlocksOfLarge]];
  int64_t at = shard.first_block + block % kBlocksOfLarge * kLanesOfBlock + thread;
  int64_t end = shard.first_block + partials_of(shard);
  float sum[1] = {};
  add_partials<Norm, kRowsOfLarge>(args.partials, at, end, sum);
  int32_t count = int32_t(sum_counts(args, sum[0], at, end, kStatsLanes));
  args.partials[at] = sum[0];
  if (is_nonfinite(sum[0])) args.nonfinite[at] = count;
}

// Adds the partials of a shard's blocks; of a large shard those of the first row, which has become the sum of all.
// acc: [kStatsLanes], counts: [kThreads].
template <class Norm, class Each>
ZK_HOST_DEVICE inline void stats_combine(const StatsArgs& args, int shard, float* acc, int64_t* counts, Each each) {
  int64_t begin = args.shards[shard].first_block;
  int64_t partials = partials_of(args.shards[shard]);
  int64_t end = begin + (partials > kLarge ? kStatsLanes : partials);
  each([&](int thread) {
    float sum[kLanes] = {};
    add_partials<Norm, kDepth>(args.partials, begin + thread, end, sum);
    for (int j = 0; j < kLanes; ++j) acc[thread + j * kThreads] = sum[j];
  });
  fold<Norm>(acc, each);
  each([&](int thread) { counts[thread] = sum_counts(args, acc[0], begin + thread, end, kThreads); });
  each([&](int thread) {
    if (thread != 0) return;
    int64_t count = 0;
    for (int i = 0; i < kThreads; ++i) count += counts[i];
    args.out[2 * shard] = acc[0];
    args.out[2 * shard + 1] = float(count);
  });
}

// ---- launcher -----------------------------------------------------------------------------------------------------

// Calls run(Type<Norm>, args) for each kShards shards, for their two or three launches. All launches use the same
// scratch, one after the other: `blocks` of it are enough.
template <class Run>
void launch(
    const std::vector<Shard>& shards, const std::vector<DType>& dtypes, double norm_type, StatsArgs args, Run run) {
  for (size_t from = 0; from < shards.size(); from += kShards) {
    args.count = int(std::min<size_t>(kShards, shards.size() - from));
    args.blocks = 0;
    args.large_count = 0;
    for (int i = 0; i < args.count; ++i) {
      args.dtypes[i] = dtypes[from + i];
      args.shards[i] = {shards[from + i].data, shards[from + i].numel, args.blocks};
      int64_t partials = partials_of(args.shards[i]);
      if (partials > kLarge) args.large[args.large_count++] = int16_t(i);
      args.blocks += partials;
    }
    if (std::isinf(norm_type))
      run(Type<Largest>(), args);
    else if (norm_type == 2.0)
      run(Type<Square>(), args);
    else
      run(Type<Magnitude>(), args);
    args.out += 2 * args.count;
  }
}

#if defined(__CUDACC__)

struct EachThread {
  template <class F>
  __device__ void operator()(F f) const {
    f(threadIdx.x);
    __syncthreads();
  }
};

template <class Norm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) stats_kernel(const __grid_constant__ StatsArgs args) {
  __shared__ float acc[kStatsLanes];
  stats_block<Norm>(args, blockIdx.x, acc, EachThread());
}

// One block on a multiprocessor will do. Where that is not said, sm_100's compiler holds a thread to 32 registers, and
// its loads wait for each other.
template <class Norm>
__global__ void __launch_bounds__(kLanesOfBlock, 1) stats_large_kernel(const __grid_constant__ StatsArgs args) {
  stats_large<Norm>(args, blockIdx.x, threadIdx.x);
}

template <class Norm>
__global__ void __launch_bounds__(kThreads, 1) stats_combine_kernel(const __grid_constant__ StatsArgs args) {
  __shared__ float acc[kStatsLanes];
  __shared__ int64_t counts[kThreads];
  stats_combine<Norm>(args, blockIdx.x, acc, counts, EachThread());
}

#endif

}  // namespace

#if defined(__CUDACC__)

void run_grad_stats(
    CUstream_st* stream, const std::vector<Shard>& shards, const std::vector<DType>& dtypes, double norm_type,
    const StatsOutput& output) {
  StatsArgs args;
  args.partials = output.partials;
  args.nonfinite = output.nonfinite;
  args.out = output.out;
  launch(shards, dtypes, norm_type, args, [&](auto norm, const StatsArgs& args) {
    using Norm = typename decltype(norm)::type;
    int64_t of_large = int64_t(args.large_count) * kBlocksOfLarge;
    on_stream(stream, "grad_stats", stats_kernel<Norm>, args.blocks, kThreads, args);
    on_stream(stream, "grad_stats", stats_large_kernel<Norm>, of_large, kLanesOfBlock, args);
    on_stream(stream, "grad_stats", stats_combine_kernel<Norm>, args.count, kThreads, args);
  });
}

#endif

}  // namespace zero_kernels
