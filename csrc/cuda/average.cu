// Averages of masters on CUDA, behind the update of their shards: one launch for up to kAverages of them. Within the
// update the loop over them took registers of every kernel, with or without averages.
#include "average.h"

#include <algorithm>

#include "chunk.h"
#include "shard_of_block.h"

#if defined(__CUDACC__)
#include "launch.h"
#endif

namespace zero_kernels {
namespace {

// ---- kernel -------------------------------------------------------------------------------------------------------

constexpr int kQuad = 4;
constexpr int kThreads = 256;
constexpr int64_t kTile = kThreads * kQuad;
constexpr int kAverages = 64;  // of a launch: their table is among its arguments, and stays below 4 KB

struct AverageArgs {
  const HyperRow* hyper;
  const float* rates;
  const float* found_inf;
  int32_t columns;
  int count;  // of averages
  int64_t first_block[kAverages];
  Average of[kAverages];
};
static_assert(sizeof(AverageArgs) <= 4096);

// A quad as it is stored.
template <bool kWhole, class T>
ZK_HOST_DEVICE inline Chunk<T, kQuad> load_raw(const T* from, int count) {
  if constexpr (kWhole) return *reinterpret_cast<const Chunk<T, kQuad>*>(from);
  Chunk<T, kQuad> raw = {};
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j)
    if (j < count) raw.at[j] = from[j];
  return raw;
}

template <bool kWhole>
ZK_HOST_DEVICE inline void load_master(const Average& of, int64_t i, int count, float (&p)[kQuad]) {
  if (of.low) {
    const BFloat16* high = static_cast<const BFloat16*>(of.master) + i;
    Chunk<BFloat16, kQuad> highs = load_raw<kWhole>(high, count);
    int16_t lows[kQuad];
    if (of.low_size == 1) {
      Chunk<int8_t, kQuad> stored = load_raw<kWhole>(static_cast<const int8_t*>(of.low) + i, count);
      for (int j = 0; j < kQuad; ++j) lows[j] = int16_t(stored.at[j] * 256);
    } else {
      Chunk<int16_t, kQuad> stored = load_raw<kWhole>(static_cast<const int16_t*>(of.low) + i, count);
      for (int j = 0; j < kQuad; ++j) lows[j] = stored.at[j];
    }
    for (int j = 0; j < kQuad; ++j) p[j] = join({highs.at[j], lows[j]});
  } else if (kWhole) {
    load_chunk(static_cast<const float*>(of.master) + i, p);
  } else {
    load_first(static_cast<const float*>(of.master) + i, count, p);
  }
}

template <bool kWhole>
ZK_HOST_DEVICE inline void average_quad(const Average& of, int64_t i, int count, float rate) {
  float p[kQuad], e[kQuad];
  load_master<kWhole>(of, i, count, p);
  if (kWhole)
    load_chunk(of.average + i, e);
  else
    load_first(of.average + i, count, e);
  for (int j = 0; j < kQuad; ++j) e[j] = e[j] + rate * (p[j] - e[j]);
  if (kWhole)
    store_chunk(of.average + i, e);
  else
    store_first(of.average + i, count, e);
}

// The program of one thread of one block. The update before it has looked at the slots: none is too large.
ZK_HOST_DEVICE inline void average_thread(const AverageArgs& args, int64_t block, int thread) {
  int at = shard_of_block(block, args.count, [&](int i) { return args.first_block[i]; });
  const Average& of = args.of[at];
  int64_t i = (block - args.first_block[at]) * kTile + thread * kQuad;
  int64_t left = of.numel - i;
  if (left <= 0 || (args.found_inf && *args.found_inf != 0.0f)) return;
  int32_t slot = of.row_slot[i / kRow];
  if (slot < 0 || args.hyper[slot].active == 0.0f) return;
  float rate = args.rates[int64_t(slot) * args.columns + of.column];
  if (of.vector && left >= kQuad)
    average_quad<true>(of, i, kQuad, rate);
  else
    average_quad<false>(of, i, left < kQuad ? int(left) : kQuad, rate);
}

// ---- launcher -----------------------------------------------------------------------------------------------------

// Calls run(args, blocks) for each launch that the averages take.
template <class Run>
void launch(const Averages& averages, Run run) {
  for (size_t from = 0; from < averages.of.size(); from += kAverages) {
    AverageArgs args = {averages.hyper, averages.rates, averages.found_inf, averages.columns, 0, {}, {}};
    args.count = int(std::min<size_t>(kAverages, averages.of.size() - from));
    int64_t blocks = 0;
    for (int i = 0; i < args.count; ++i) {
      args.of[i] = averages.of[from + i];
      const Average& of = args.of[i];
      bool master = of.low ? aligned(static_cast<const BFloat16*>(of.master), kQuad) &&
                                 reinterpret_cast<uintptr_t>(of.low) % (kQuad * of.low_size) == 0
                           : aligned(static_cast<const float*>(of.master), kQuad);
      args.of[i].vector = master && aligned(of.average, kQuad);
      args.first_block[i] = blocks;
      blocks += ceil_div(args.of[i].numel, kTile);
    }
    run(args, blocks);
  }
}

#if defined(__CUDACC__)

__global__ void __launch_bounds__(kThreads) average_kernel(const __grid_constant__ AverageArgs args) {
  average_thread(args, blockIdx.x, threadIdx.x);
}

#endif

}  // namespace

#if defined(__CUDACC__)

void run_average(CUstream_st* stream, const Averages& averages) {
  launch(averages, [&](const AverageArgs& args, int64_t blocks) {
    on_stream(stream, "foreach_step", average_kernel, blocks, kThreads, args);
  });
}

#endif

}  // namespace zero_kernels
