// AdamW's kernels: those of step.h, and those with the quick path of quick_step.h.
#include "../rules/adamw.h"
#include "quick_step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
namespace {

__device__ constexpr Decoded kDecoded = make_decoded();

// The slow path, for both rows of the warp. It computes its place again: kept in registers, that would spill.
template <bool kWhole>
__device__ __noinline__ void step_apart(const ForeachArgs& args) {
  Place at = place_of(args, blockIdx.x);
  int64_t i = at.tile + (threadIdx.x & ~31u) * kEight + threadIdx.x % 32 * kQuad;
  step_in_turn<AdamW, kWhole>(args.stored, at.shard, i, kRow);
}

// The largest of the 16 threads of a row.
__device__ inline uint32_t largest_in_row(uint32_t x) {
  bool first = threadIdx.x % 32 < 16;  // a reduction is quick over all of a warp alone
  uint32_t of_first = largest_in_warp(first ? x : 0), of_second = largest_in_warp(first ? 0 : x);
  return first ? of_first : of_second;
}

// Updates two rows by the warp. Returns false, and stores nothing, where a value is unusual.
template <int kLow, Form kForm>
__device__ inline bool quick_eight(const StepArgs& shard, int64_t i, const Decoded& decoded) {
  int64_t at = row_of(i);
  int32_t slot = shard.row_slot[at];
  QuickRaw raw = load_quick<kLow, kForm>(shard, i);
  float scale_m = kForm == Form::kInt8 ? shard.scales[0][at] : 0.0f;
  float scale_v = kForm == Form::kInt8 ? shard.scales[1][at] : 0.0f;
  int32_t key = kForm == Form::kBFloat16 ? shard.row_keys[at] : 0;
  if (slot >= shard.slots) stop();
  HyperRow row = load_row<true>(shard.hyper + (slot < 0 ? 0 : slot));
  Coefficients<AdamW, float> c(row, shard.grad_scale ? *shard.grad_scale : 1.0f);
  bool usual = !skips(shard) && is_usual<kForm>(c.own);
  if (!__all_sync(0xffffffff, usual)) return false;
  QuickEight of = update_quick<kLow, kForm>(raw, scale_m, scale_v, decoded, c);
  if (kForm == Form::kInt8) {
    of.largest_m = largest_in_row(of.largest_m);
    of.largest_s = largest_in_row(of.largest_s);
  }
  QuickMoments moments = stored_moments<kForm>(of, noise_of_row(key, row.step_number), place_in_row(i));
  if (!__all_sync(0xffffffff, of.usual)) return false;
  if (slot >= 0 && row.active != 0.0f) store_quick<kLow, kForm>(shard, i, of, moments);
  return true;
}

template <class Way>
__global__ void __launch_bounds__(kThreads, Way::kBlocksPerSm)
    quick_step_kernel(const __grid_constant__ ForeachArgs args) {
  __shared__ Decoded decoded;
  if constexpr (Way::kForm == Form::kInt8) {
    decoded.int8[threadIdx.x] = kDecoded.int8[threadIdx.x];
    decoded.root8[threadIdx.x] = kDecoded.root8[threadIdx.x];
    __syncthreads();
  }
  Place at = place_of(args, blockIdx.x);
  if (!at.whole)
    step_apart<false>(args);
  else if (!quick_eight<Way::kLow, Way::kForm>(at.shard, at.tile + threadIdx.x * kEight, decoded))
    step_apart<true>(args);
}

}  // namespace

const RunStep step_adamw = [](CUstream_st* stream, const Stored& stored, std::vector<StepArgs>& shards) {
  bool quick = QuickWays::choose(stored, [&](auto way) {
    run_kernel(stream, stored, shards, kEight, quick_step_kernel<typename decltype(way)::type>);
  });
  if (!quick) run_step<AdamW>(stream, stored, shards);
};

}  // namespace zero_kernels
#endif
