// Averages of the masters on CUDA.
#include "launchers.h"

#include "raw.h"

#if defined(__CUDACC__)
#include "launch.h"
#endif

namespace zero_kernels {
namespace {

// ---- kernel -------------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int64_t kTile = kThreads * kQuad;

template <bool kWhole>
ZK_HOST_DEVICE inline void load_masters(const EmaArgs& args, int64_t i, int count, float (&p)[kQuad]) {
  if (args.low_size == 0) return widen_raw(args.dtype, load_raw<kWhole>(args.master, size_of(args.dtype), i, count), p);
  Raw low = load_raw<kWhole>(args.master, args.low_size, i, count);
  Raw high = load_raw<kWhole>(args.high, sizeof(BFloat16), i, count);
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j) p[j] = join({{half_word(high, j)}, low_half(args.low_size, low, j)});
}

template <bool kWhole>
ZK_HOST_DEVICE inline void follow(const EmaArgs& args, int64_t i) {
  int64_t left = args.numel - i;
  if (!kWhole && left <= 0) return;
  int count = kWhole || left > kQuad ? kQuad : int(left);
  int32_t slot = args.row_slot[row_of(i)];
  float p[kQuad];
  load_masters<kWhole>(args, i, count, p);
  Raw e = load_raw<kWhole>(args.averages[0], sizeof(float), i, count);
  if (slot >= args.slots) stop();
  if (slot < 0) return;
  for (int k = 0; k < args.each; ++k) {
    float rate = args.rates[int64_t(slot) * args.columns + k];
    if (rate == 0.0f) continue;
    if (k > 0) e = load_raw<kWhole>(args.averages[k], sizeof(float), i, count);
    ZK_UNROLL
    for (int j = 0; j < kQuad; ++j) {
      float average = bits_float(e.words[j]);
      e.words[j] = float_bits(average + rate * (p[j] - average));
    }
    store_raw<kWhole>(args.averages[k], sizeof(float), i, count, e);
  }
}

// The program of one thread of one block.
ZK_HOST_DEVICE inline void ema_thread(const EmaArgs& args, int64_t block, int thread) {
  int64_t first = block * kTile + thread * kQuad;
  if (args.vector && (block + 1) * kTile <= args.numel)
    follow<true>(args, first);
  else
    follow<false>(args, first);
}

// ---- launcher -----------------------------------------------------------------------------------------------------

inline bool all_aligned(const EmaArgs& args) {
  bool of_all = is_aligned(args.master, kQuad * (args.low_size ? args.low_size : size_of(args.dtype)));
  of_all &= is_aligned(args.high, kQuad * sizeof(BFloat16));
  for (int k = 0; k < args.each; ++k) of_all &= is_aligned(args.averages[k], kQuad * sizeof(float));
  return of_all;
}

#if defined(__CUDACC__)

__global__ void __launch_bounds__(kThreads, 8) ema_kernel(const __grid_constant__ EmaArgs args) {
  ema_thread(args, blockIdx.x, threadIdx.x);
}

#endif

}  // namespace

#if defined(__CUDACC__)

void run_ema(CUstream_st* stream, EmaArgs args) {
  if (args.slots == 0) return;  // all is padding
  args.vector = all_aligned(args);
  on_stream(stream, "ema", ema_kernel, ceil_div(args.numel, kTile), kThreads, args);
}

#endif

}  // namespace zero_kernels
