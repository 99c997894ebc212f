// The update of shards whose states or masters are not in fp32 alone, on CUDA. A kernel for each rule, whatever the
// forms and dtypes: what differs by them is loads, stores and conversions, and a warp takes one way through them.
#pragma once

#include "encoded_rows.h"
#include "quick_step.h"

namespace zero_kernels {
namespace {

// The shard of a block, the block's first element of it, and whether all of the block is whole.
struct EncodedPlace {
  const EncodedShard& shard;
  int64_t tile;
  bool whole;
};

ZK_HOST_DEVICE inline EncodedPlace place_of(const EncodedForeachArgs& args, int64_t block) {
  int at = shard_of(args, block);
  const EncodedShard& shard = args.shards[at];
  int64_t of_shard = block - args.first_block[at];
  bool whole = shard.step.vector && (of_shard + 1) * kTile <= shard.step.numel;
  return {shard, of_shard * kTile, whole};
}

// Whether there is a quick way: see quick_step.h.
template <class Rule, class Kinds>
constexpr bool kIsQuick = false;
template <int kLow>
constexpr bool kIsQuick<AdamW, UsualKinds<kLow, Form::kInt8, Form::kRoot8>> = kTile == kThreads * kEight;

#if defined(__CUDACC__)

__device__ inline uint32_t largest_in_warp(uint32_t x) { return __reduce_max_sync(0xffffffff, x); }

__device__ constexpr Decoded kDecoded = make_decoded();

template <class Rule, bool kWhole, class Kinds>
__device__ inline void encoded_quad(const Kinds& kinds, const EncodedShard& shard, const RawQuad<Rule>& raw) {
  UpdatedQuad<Rule> of = update_encoded<Rule, kWhole>(kinds, shard, raw);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s)
    if (has_scale(kinds.form(s))) of.bounds[s] = largest_in_warp(of.bounds[s]);
  store_encoded<Rule, kWhole>(kinds, shard, raw, of);
}

// Updates the two rows of a warp where one has an unusual value. It loads them again: kept meanwhile, they spilled.
template <class Kinds>
__device__ __noinline__ void encoded_rows_again(const EncodedForeachArgs& args, const EncodedShard& shard, int64_t i) {
  Kinds kinds(args);
  for (int row = 0; row < 2; ++row)
    encoded_quad<AdamW, true>(kinds, shard, load_encoded<AdamW, true>(kinds, shard, i + row * kRow, 0));
}

// The largest of the 16 threads of a row.
__device__ inline uint32_t largest_in_row(uint32_t x) {
  bool first = threadIdx.x % 32 < 16;  // a reduction is quick over all of a warp alone
  uint32_t of_first = largest_in_warp(first ? x : 0), of_second = largest_in_warp(first ? 0 : x);
  return first ? of_first : of_second;
}

// Updates two rows by the warp. Returns false, and stores nothing, where a value is unusual.
template <int kLow>
__device__ inline bool quick_eight(const EncodedShard& shard, int64_t i, const Decoded& decoded) {
  const StepArgs& step = shard.step;
  int64_t at = row_of(i);
  int32_t slot = step.row_slot[at];
  QuickRaw raw = load_quick<kLow>(shard, i);
  float scale_m = shard.scale(0)[at], scale_v = shard.scale(1)[at];
  if (slot >= step.slots) stop();
  HyperRow row = load_row<true>(step.hyper + (slot < 0 ? 0 : slot));
  Coefficients<AdamW, float> c(row, step.grad_scale ? *step.grad_scale : 1.0f);
  bool usual = !(step.found_inf && *step.found_inf != 0.0f) && is_usual(c.own);
  if (!__all_sync(0xffffffff, usual)) return false;
  c.own.l2 = false;  // known, and no longer asked
  QuickEight of = update_quick<kLow>(raw, scale_m, scale_v, decoded, c);
  of.largest_m = bits_float(largest_in_row(float_bits(of.largest_m)));
  of.largest_s = largest_in_row(of.largest_s);
  QuickMoments moments = moments_quick(of);
  if (!__all_sync(0xffffffff, of.usual)) return false;
  if (slot >= 0 && row.active != 0.0f) store_quick<kLow>(shard, i, of, moments);
  return true;
}

// All threads of a warp come here together: a block has one shard, and one way.
template <class Rule, bool kWhole, class Kinds>
__device__ inline void encoded_quads(const EncodedForeachArgs& args, const EncodedPlace& at) {
  const EncodedShard& shard = at.shard;
  if constexpr (kWhole && kIsQuick<Rule, Kinds>) {
    __shared__ Decoded decoded;
    decoded.int8[threadIdx.x] = kDecoded.int8[threadIdx.x];
    decoded.root8[threadIdx.x] = kDecoded.root8[threadIdx.x];
    __syncthreads();
    if (!quick_eight<Kinds::low_size()>(shard, at.tile + threadIdx.x * kEight, decoded)) {
      int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      encoded_rows_again<Kinds>(args, shard, at.tile + warp * 2 * kRow + lane * kQuad);
    }
  } else {
    Kinds kinds(args);
    RawQuad<Rule> raws[kQuads];
    ZK_UNROLL
    for (int q = 0; q < kQuads; ++q)
      raws[q] = load_encoded<Rule, kWhole>(kinds, shard, at.tile + threadIdx.x * kQuad, q);
    ZK_UNROLL
    for (int q = 0; q < kQuads; ++q) encoded_quad<Rule, kWhole>(kinds, shard, raws[q]);
  }
}

template <class Rule, class Kinds>
constexpr int kEncodedBlocksPerSm = Kinds::kBlocksPerSm;
template <class Rule>
constexpr int kEncodedBlocksPerSm<Rule, AnyKinds> = Rule::kStates <= 1 ? 3 : 2;

template <class Rule, class Kinds>
__global__ void __launch_bounds__(kThreads, kEncodedBlocksPerSm<Rule, Kinds>)
    encoded_step_kernel(const __grid_constant__ EncodedForeachArgs args) {
  EncodedPlace at = place_of(args, blockIdx.x);
  if (at.whole)
    encoded_quads<Rule, true, Kinds>(args, at);
  else
    encoded_quads<Rule, false, Kinds>(args, at);
}

#endif

// ---- launcher -----------------------------------------------------------------------------------------------------

inline bool all_aligned(const EncodedShard& shard, const Encoded& of_all, int64_t grad_size, int64_t out_size) {
  bool aligned = !of_all.low_size || is_aligned(shard.low, std::min(16, kEight * of_all.low_size));
  for (int s = 0; s < kMostStates; ++s)
    aligned &= is_aligned(shard.step.states[s], std::min<int64_t>(16, kEight * size_of(of_all.forms[s])));
  return aligned && is_aligned(shard.step.grad, std::min<int64_t>(16, kEight * grad_size)) &&
         is_aligned(shard.step.param_out, std::min<int64_t>(16, kEight * out_size)) &&
         is_aligned(shard.step.master, 16) && is_aligned(shard.step.hyper, 16);
}

// Calls run(args, blocks) for each launch that several shards take, which are alike in dtypes and forms.
template <class Run>
void launch_encoded(const std::vector<EncodedShard>& shards, const Encoded& of_all, DType grad, DType out, Run run) {
  auto aligned = [&](const EncodedShard& shard) { return all_aligned(shard, of_all, size_of(grad), size_of(out)); };
  for_launches<EncodedForeachArgs>(shards, aligned, [&](EncodedForeachArgs& args, int64_t blocks) {
    args.grad = grad;
    args.out = out;
    args.low_size = of_all.low_size;
    std::copy(of_all.forms, of_all.forms + kMostStates, args.forms);
    run(args, blocks);
  });
}

#if defined(__CUDACC__)

template <class Rule>
void run_encoded_step(
    CUstream_st* stream, const std::vector<EncodedShard>& shards, const Encoded& of_all, DType grad, DType out) {
  RuleKinds<Rule>::choose(of_all, grad, out, [&](auto kinds) {
    launch_encoded(shards, of_all, grad, out, [&](const EncodedForeachArgs& args, int64_t blocks) {
      auto kernel = encoded_step_kernel<Rule, typename decltype(kinds)::type>;
      on_stream(stream, "foreach_step", kernel, blocks, kThreads, args);
    });
  });
}

#endif

}  // namespace

}  // namespace zero_kernels
