// The update of shards whose states or masters are not in fp32 alone, on CUDA. A kernel for each rule, whatever the
// forms and dtypes: what differs by them is loads, stores and conversions, and a warp takes one way through them. For
// AdamW, of bf16 gradients and parameters, there is one more for each way to store its state: quick_step.h. A warp has
// two neighbouring rows.
#pragma once

#include "encoded_rows.h"
#include "quick_step.h"

namespace zero_kernels {
namespace {

static_assert(kTile == kThreads * kEight && kEight == 2 * kQuad);

// The shard of a block, the block's first element of it, and whether all of the block is whole.
struct EncodedPlace {
  const StepArgs& shard;
  int64_t tile;
  bool whole;
};

ZK_HOST_DEVICE inline EncodedPlace place_of(const ForeachArgs& args, int64_t block) {
  int at = shard_of(args, block);
  const StepArgs& shard = args.shards[at];
  int64_t of_shard = block - args.first_block[at];
  return {shard, of_shard * kTile, shard.vector && (of_shard + 1) * kTile <= shard.numel};
}

// A quick way: for masters of which `low` bytes lie in the low half, or fp32 ones (0), and for moments in `form`, the
// second in kRoot8 where the first is in kInt8.
template <int low, Form form>
struct Quick {
  static constexpr int kLow = low;
  static constexpr Form kForm = form;

  // Four blocks, but where masters are split beside moments of 16 bits or more: these kernels would spill. For moments
  // of 8 bits an H100 had 0.88 of a copy's bandwidth with four, and 0.75 with three.
  static constexpr int kBlocksPerSm = low == 0 || form == Form::kInt8 ? 4 : 3;

  static bool is_for(const Stored& of) {
    return of.grad == DType::kBFloat16 && of.has_output && of.out == DType::kBFloat16 && of.low_size == low &&
           of.forms[0] == form && of.forms[1] == (form == Form::kInt8 ? Form::kRoot8 : form);
  }
};

template <class... Ways>
struct OneOf {
  // Calls run(Type<Quick>) of the one that is for the shards. Returns whether there is one.
  template <class Run>
  static bool choose([[maybe_unused]] const Stored& stored, [[maybe_unused]] Run run) {
    return ((Ways::is_for(stored) && (run(Type<Ways>()), true)) || ...);
  }
};

using QuickWays = OneOf<
    Quick<0, Form::kBFloat16>, Quick<0, Form::kInt8>, Quick<1, Form::kFloat>, Quick<1, Form::kBFloat16>,
    Quick<1, Form::kInt8>, Quick<2, Form::kFloat>, Quick<2, Form::kBFloat16>, Quick<2, Form::kInt8>>;

#if defined(__CUDACC__)

__device__ inline uint32_t largest_in_warp(uint32_t x) { return __reduce_max_sync(0xffffffff, x); }

__device__ constexpr Decoded kDecoded = make_decoded();

template <class Rule, bool kWhole>
__device__ inline void encoded_quad(const Stored& stored, const StepArgs& shard, const RawQuad<Rule>& raw) {
  UpdatedQuad<Rule> of = update_encoded<Rule, kWhole>(stored, shard, raw);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s)
    if (has_scale(of_state(stored.forms, s))) of.bounds[s] = largest_in_warp(of.bounds[s]);
  store_encoded<Rule, kWhole>(stored, shard, raw, of);
}

// The first element of a thread's first quad; the second one is in the next row.
__device__ inline int64_t first_of_thread(int64_t tile) {
  return tile + threadIdx.x / 32 * 2 * kRow + threadIdx.x % 32 * kQuad;
}

// All threads of a warp come here together: a block has one shard.
template <class Rule, bool kWhole>
__device__ inline void encoded_rows(const Stored& stored, const StepArgs& shard, int64_t tile) {
  int64_t i = first_of_thread(tile);
  RawQuad<Rule> first = load_encoded<Rule, kWhole>(stored, shard, i);
  RawQuad<Rule> second = load_encoded<Rule, kWhole>(stored, shard, i + kRow);
  encoded_quad<Rule, kWhole>(stored, shard, first);
  encoded_quad<Rule, kWhole>(stored, shard, second);
}

// The same where there is a quick way that cannot be taken. A row after the other, and what is known is found once
// more: kept, it would spill.
template <bool kWhole>
__device__ __noinline__ void encoded_rows_apart(const ForeachArgs& args) {
  EncodedPlace at = place_of(args, blockIdx.x);
  int64_t i = first_of_thread(at.tile);
#pragma unroll 1
  for (int row = 0; row < 2; ++row)
    encoded_quad<AdamW, kWhole>(
        args.stored, at.shard, load_encoded<AdamW, kWhole>(args.stored, at.shard, i + row * kRow));
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
  bool usual = !(shard.found_inf && *shard.found_inf != 0.0f) && is_usual<kForm>(c.own);
  if (!__all_sync(0xffffffff, usual)) return false;
  QuickEight of = update_quick<kLow, kForm>(raw, scale_m, scale_v, decoded, c);
  if (kForm == Form::kInt8) {
    of.largest_m = largest_in_row(of.largest_m);
    of.largest_s = largest_in_row(of.largest_s);
  }
  QuickMoments moments = stored_of<kForm>(of, noise_of_row(key, row.step_number), place_in_row(i));
  if (!__all_sync(0xffffffff, of.usual)) return false;
  if (slot >= 0 && row.active != 0.0f) store_quick<kLow, kForm>(shard, i, of, moments);
  return true;
}

template <class Rule>
__global__ void __launch_bounds__(kThreads, Rule::kStates <= 1 ? 3 : 2)
    encoded_step_kernel(const __grid_constant__ ForeachArgs args) {
  EncodedPlace at = place_of(args, blockIdx.x);
  if (at.whole)
    encoded_rows<Rule, true>(args.stored, at.shard, at.tile);
  else
    encoded_rows<Rule, false>(args.stored, at.shard, at.tile);
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
  EncodedPlace at = place_of(args, blockIdx.x);
  if (!at.whole)
    encoded_rows_apart<false>(args);
  else if (!quick_eight<Way::kLow, Way::kForm>(at.shard, at.tile + threadIdx.x * kEight, decoded))
    encoded_rows_apart<true>(args);
}

// ---- launcher -----------------------------------------------------------------------------------------------------

template <class Rule>
void run_step(CUstream_st* stream, const Stored& stored, std::vector<StepArgs>& shards) {
  if (!is_encoded(stored)) return run_floats<Rule>(stream, stored, shards);
  auto run = [&](void (*kernel)(ForeachArgs)) {
    for_launches(stored, shards, [&](const ForeachArgs& args, int64_t blocks) {
      on_stream(stream, "foreach_step", kernel, blocks, kThreads, args);
    });
  };
  if constexpr (Rule::kStates == 2)  // AdamW
    if (QuickWays::choose(stored, [&](auto way) { run(quick_step_kernel<typename decltype(way)::type>); })) return;
  run(encoded_step_kernel<Rule>);
}

#endif

}  // namespace
}  // namespace zero_kernels
