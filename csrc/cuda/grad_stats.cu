// grad_stats on CUDA: a block of threads makes the partial of each block of elements; the last to be through adds the
// partials. The order of additions is that of docs/ops.md, whatever the order in which blocks run.
#include <cmath>

#include "chunk.h"

#if defined(__CUDACC__)
#include <map>
#include <mutex>

#include "launch.h"
#endif

namespace zero_kernels {
namespace {

// ---- kernel -------------------------------------------------------------------------------------------------------

constexpr int kLanes = 8;  // neighbouring running sums that a thread keeps
constexpr int kThreads = kStatsLanes / kLanes;
constexpr int kDepth = kStatsBlock / kStatsLanes;  // terms of a running sum; a thread's loads under way

// What the blocks of a launch share. Left zero by the last of them, for the next launch.
struct Tally {
  unsigned long long nonfinite;
  unsigned int finished;
};

struct StatsArgs {
  const void* shard;
  float* partials;  // [blocks]
  Tally* tally;
  float* out;  // [2]: norm term, count of non-finite values
  int64_t numel;
  int64_t blocks;
  bool vector;  // the shard starts where its chunks are aligned
};

ZK_HOST_DEVICE inline float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffff); }

struct Square {
  ZK_HOST_DEVICE static float term(float x) { return x * x; }
  ZK_HOST_DEVICE static float join(float acc, float term) { return acc + term; }
};
struct Magnitude {
  ZK_HOST_DEVICE static float term(float x) { return magnitude(x); }
  ZK_HOST_DEVICE static float join(float acc, float term) { return acc + term; }
};
// The larger bit pattern: NaN is above inf.
struct Largest {
  ZK_HOST_DEVICE static float term(float x) { return magnitude(x); }
  ZK_HOST_DEVICE static float join(float acc, float term) { return float_bits(acc) > float_bits(term) ? acc : term; }
};

// A block is run as a sequence of phases: `each(f)` calls f(thread) for every thread, then waits for all of them.

// Folds kStatsLanes running sums by halves: acc[j] gets acc[j + h] for h = 512 … 1.
template <class Norm, class Each>
ZK_HOST_DEVICE inline void fold(float* acc, Each each) {
  for (int h = kStatsLanes / 2; h >= 1; h /= 2)
    each([&](int thread) {
      for (int j = thread; j < h; j += kThreads) acc[j] = Norm::join(acc[j], acc[j + h]);
    });
}

// Elements [first, first + kLanes) of the shard; what lies beyond its end is +0.
template <bool kWhole, class T>
ZK_HOST_DEVICE inline void load_lanes(const StatsArgs& args, int64_t first, float (&x)[kLanes]) {
  const T* shard = static_cast<const T*>(args.shard);
  int64_t left = args.numel - first;
  if (kWhole)
    load_chunk(shard + first, x);
  else
    load_first(shard + first, left < 0 ? 0 : left < kLanes ? int(left) : kLanes, x);
}

template <class Norm, bool kWhole, class T>
ZK_HOST_DEVICE inline void add_terms(const StatsArgs& args, int64_t first, float (&sum)[kLanes]) {
  float x[kDepth][kLanes];
  ZK_UNROLL
  for (int k = 0; k < kDepth; ++k) load_lanes<kWhole, T>(args, first + k * kStatsLanes, x[k]);
  ZK_UNROLL
  for (int k = 0; k < kDepth; ++k)
    for (int j = 0; j < kLanes; ++j) sum[j] = Norm::join(sum[j], Norm::term(x[k][j]));
}

template <class T>
ZK_HOST_DEVICE inline void count_nonfinite(const StatsArgs& args, int64_t block, int thread) {
  int found = 0;
  for (int k = 0; k < kDepth; ++k) {
    float x[kLanes];
    load_lanes<false, T>(args, block * kStatsBlock + k * kStatsLanes + thread * kLanes, x);
    for (float value : x) found += is_nonfinite(value);
  }
#if defined(__CUDA_ARCH__)
  if (found) atomicAdd(&args.tally->nonfinite, found);
#else
  args.tally->nonfinite += found;
#endif
}

// The partial of a block of elements. acc: [kStatsLanes], shared by the threads.
template <class Norm, class T, class Each>
ZK_HOST_DEVICE inline void stats_block(const StatsArgs& args, int64_t block, float* acc, Each each) {
  bool whole = args.vector && (block + 1) * kStatsBlock <= args.numel;
  each([&](int thread) {
    int64_t first = block * kStatsBlock + thread * kLanes;
    float sum[kLanes] = {};
    if (whole)
      add_terms<Norm, true, T>(args, first, sum);
    else
      add_terms<Norm, false, T>(args, first, sum);
    for (int j = 0; j < kLanes; ++j) acc[thread * kLanes + j] = sum[j];
  });
  fold<Norm>(acc, each);
  each([&](int thread) {
    if (thread == 0) args.partials[block] = acc[0];
    // Terms are never negative, so a non-finite value makes the partial non-finite: only then is counting needed.
    if (is_nonfinite(acc[0])) count_nonfinite<T>(args, block, thread);
  });
}

// What other blocks have just written: read from where all see it, past this multiprocessor's own cache.
template <class T>
ZK_HOST_DEVICE inline T read_shared(const T* at) {
#if defined(__CUDA_ARCH__)
  return __ldcg(at);
#else
  return *at;
#endif
}

// Adds the partials of all blocks and leaves the tally zero. Several rows of lanes are under way at a time: this is one
// block's work, and would else wait for the memory as often as there are rows.
template <class Norm, class Each>
ZK_HOST_DEVICE inline void stats_combine(const StatsArgs& args, float* acc, Each each) {
  each([&](int thread) {
    float sum[kLanes] = {};
    for (int64_t first = thread; first < args.blocks; first += kDepth * kStatsLanes) {
      float x[kDepth][kLanes];
      ZK_UNROLL
      for (int k = 0; k < kDepth; ++k)
        for (int j = 0; j < kLanes; ++j) {
          int64_t i = first + k * kStatsLanes + j * kThreads;
          x[k][j] = i < args.blocks ? read_shared(args.partials + i) : 0.0f;
        }
      ZK_UNROLL
      for (int k = 0; k < kDepth; ++k)
        for (int j = 0; j < kLanes; ++j) sum[j] = Norm::join(sum[j], x[k][j]);
    }
    for (int j = 0; j < kLanes; ++j) acc[thread + j * kThreads] = sum[j];
  });
  fold<Norm>(acc, each);
  each([&](int thread) {
    if (thread != 0) return;
    args.out[0] = acc[0];
    args.out[1] = float(read_shared(&args.tally->nonfinite));
    *args.tally = {};
  });
}

// ---- launcher -----------------------------------------------------------------------------------------------------

// Calls run(Type<Norm>, Type<T>, args), with what the shard says filled in.
template <class Run>
void launch(StatsArgs args, DType dtype, double norm_type, Run run) {
  args.blocks = ceil_div(args.numel, kStatsBlock);
  args.vector = reinterpret_cast<uintptr_t>(args.shard) % 16 == 0;
  with_type(dtype, [&](auto type) {
    if (std::isinf(norm_type)) return run(Type<Largest>(), type, args);
    if (norm_type == 2.0) return run(Type<Square>(), type, args);
    run(Type<Magnitude>(), type, args);
  });
}

#if defined(__CUDACC__)

struct EachThread {
  template <class F>
  __device__ void operator()(F f) const {
    f(threadIdx.x);
    __syncthreads();
  }
};

template <class Norm, class T>
__global__ void __launch_bounds__(kThreads) stats_kernel(const __grid_constant__ StatsArgs args) {
  __shared__ float acc[kStatsLanes];
  __shared__ bool last;
  if (args.numel != 0) stats_block<Norm, T>(args, blockIdx.x, acc, EachThread());
  // Every block's partial and count are in memory before it reports, and the last one reads them after all reports.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&args.tally->finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  stats_combine<Norm>(args, acc, EachThread());
}

// ---- op -----------------------------------------------------------------------------------------------------------

constexpr int kTallies = 1024;
__device__ Tally tallies[kTallies];

// The tally of a stream, whose launches follow each other and so can share it; null when there are no more. A captured
// launch can't have it: its replay may run beside other work of the stream.
Tally* tally_of(const Launch& launch, int device) {
  cudaStreamCaptureStatus capture;
  check(cudaStreamIsCapturing(launch.stream(), &capture), "grad_stats");
  if (capture != cudaStreamCaptureStatusNone) return nullptr;
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, Tally*> known;
  static std::map<int, int> used;  // of each device's tallies
  std::lock_guard<std::mutex> lock(mutex);
  auto [place, fresh] = known.try_emplace({device, launch.stream()}, nullptr);
  if (fresh && used[device] < kTallies) {
    void* first = nullptr;
    check(cudaGetSymbolAddress(&first, tallies), "grad_stats");
    place->second = static_cast<Tally*>(first) + used[device]++;
  }
  return place->second;
}

Tensor grad_stats(const Tensor& shard, double norm_type) {
  Launch on_gpu("grad_stats", shard);
  // The allocator takes the scratch back once the launch is queued, and gives it only to later work of the stream.
  constexpr int64_t kTallyFloats = ceil_div(sizeof(Tally), sizeof(float));
  Tensor out = torch::stable::new_empty(shard, {2}, ScalarType::Float);
  int64_t blocks = ceil_div(shard.numel(), kStatsBlock);
  Tensor scratch = torch::stable::new_empty(shard, {kTallyFloats + blocks}, ScalarType::Float);
  StatsArgs args = {};
  args.shard = data<const void>(shard);
  args.numel = shard.numel();
  args.out = data<float>(out);
  args.partials = data<float>(scratch) + kTallyFloats;
  args.tally = tally_of(on_gpu, shard.get_device_index());
  if (args.tally == nullptr) {
    args.tally = reinterpret_cast<Tally*>(data<float>(scratch));
    on_gpu.zero(args.tally, sizeof(Tally));
  }
  launch(args, dtype_of(shard), norm_type, [&](auto norm, auto type, const StatsArgs& args) {
    auto kernel = stats_kernel<typename decltype(norm)::type, typename decltype(type)::type>;
    on_gpu(kernel, args.blocks ? args.blocks : 1, kThreads, args);
  });
  return out;
}

#endif

}  // namespace
}  // namespace zero_kernels

#if defined(__CUDACC__)
STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CUDA, m) { m.impl("grad_stats", TORCH_BOX(&zero_kernels::grad_stats)); }
#endif
