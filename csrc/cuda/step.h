// The update of shards on CUDA, by any rule: one launch for up to kShards shards, whatever the number of their
// parameters and groups. AdamW has a kernel for one shard, too: adam_step. Rules are compiled beside each other, in
// files of their own: step_<rule>.cu.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "raw.h"
#include "shard_of_block.h"
#include "step_args.h"

#if defined(__CUDACC__)
#include "launch.h"
#endif

// For variants, which benchmarks/gpu_variants.py builds and times; ZK_BARRIER and chunk.h's ZK_STRONG_STORES are
// others.
#if !defined(ZK_QUADS)
#define ZK_QUADS 2
#endif
#if !defined(ZK_BLOCKS)
#define ZK_BLOCKS 4
#endif

namespace zero_kernels {

// Of a launch: its table of shards is among its arguments, and all of these stay below 4 KB.
constexpr size_t kMostBytes = 4096;

struct ForeachArgs {
  static constexpr int kMostShards = 32;
  int count;  // of shards
  int64_t first_block[kMostShards];
  StepArgs shards[kMostShards];
};
static_assert(sizeof(ForeachArgs) <= kMostBytes);

namespace {

// ---- kernel -------------------------------------------------------------------------------------------------------

// A warp's access to a tensor of fp32 covers a row: 32 lanes of 16 bytes, side by side. So one row of the hyper table
// serves the warp. 16-bit tensors go in 8 bytes a lane: 16 would put the fp32 accesses of neighbours 16 bytes apart.
constexpr int kThreads = 256;
constexpr int kQuads = ZK_QUADS;  // of a thread: eight loads of data are under way before the first is used

// At 64 registers a thread four blocks share a multiprocessor: 112 KB of adam_step are under way on each. Held to as
// many, kernels of several shards with two states or more spilled, as the shards' addresses take registers.
constexpr int kBlocksPerSm = ZK_BLOCKS;
template <class Rule>
constexpr int kForeachBlocksPerSm = Rule::kStates <= 1 ? 4 : 3;

constexpr int64_t kTile = kThreads * kQuads * kQuad;

struct NoOutput {};  // the master is the parameter

template <class Rule>
struct Quad {
  float g[kQuad], p[kQuad];
  float states[Rule::kStates > 0 ? Rule::kStates : 1][kQuad];
};

template <bool kWhole, class Rule, class Grad>
ZK_HOST_DEVICE inline void load_quad(const StepArgs& args, int64_t i, int count, Quad<Rule>& quad) {
  load<kWhole>(static_cast<const Grad*>(args.grad) + i, count, quad.g);
  load<kWhole>(args.master + i, count, quad.p);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) load<kWhole>(args.state(s) + i, count, quad.states[s]);
}

template <bool kWhole, class Out>
ZK_HOST_DEVICE inline void store_output(const StepArgs& args, int64_t i, int count, const float (&p)[kQuad]) {
  if constexpr (!std::is_same_v<Out, NoOutput>) store<kWhole>(static_cast<Out*>(args.param_out) + i, count, p);
}

template <bool kWhole, class Rule, class Out>
ZK_HOST_DEVICE inline void store_quad(const StepArgs& args, int64_t i, int count, const Quad<Rule>& quad) {
  store<kWhole>(args.master + i, count, quad.p);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) store<kWhole>(args.state(s) + i, count, quad.states[s]);
  store_output<kWhole, Out>(args, i, count, quad.p);
}

template <class Rule>
ZK_HOST_DEVICE inline void update_quad(Quad<Rule>& quad, const Coefficients<Rule, float>& c) {
  for (int j = 0; j < kQuad; ++j) {
    Lane<Rule, float> lane;
    lane.p = quad.p[j];
    for (int s = 0; s < Rule::kStates; ++s) lane.states[s] = quad.states[s][j];
    update(quad.g[j], lane, c);
    quad.p[j] = lane.p;
    for (int s = 0; s < Rule::kStates; ++s) quad.states[s][j] = lane.states[s];
  }
}

ZK_HOST_DEVICE inline bool any_nonfinite(const float (&grad)[kQuad], float scale) {
  bool found = false;
  for (float g : grad) found |= is_nonfinite(g * scale);
  return found;
}

// Three accesses of 16 bytes, for which the row is padded.
template <bool kWhole>
ZK_HOST_DEVICE inline HyperRow load_row(const HyperRow* at) {
  if (!kWhole) return *at;
  float a[4], b[4], c[4];
  load_chunk(at->own, a);
  load_chunk(at->own + 4, b);
  load_chunk(at->own + 8, c);
  return {{a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0]}, c[1], c[2], c[3]};
}

// No branch stands between the loads and the update: the compiler would move loads into it, behind the wait for
// row_slot. Rows that nothing is done to are loaded and computed all the same, and not stored.
template <class Rule, class Grad, class Out, bool kWhole>
ZK_HOST_DEVICE inline void step_quads(const StepArgs& args, int64_t first) {
  Quad<Rule> quads[kQuads];
  int32_t slots[kQuads];
  int counts[kQuads];
  ZK_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    int64_t i = first + int64_t(q) * kThreads * kQuad;
    int64_t left = args.numel - i;
    counts[q] = kWhole || left > kQuad ? kQuad : left > 0 ? int(left) : 0;
    slots[q] = kWhole || left > 0 ? args.row_slot[row_of(i)] : -1;
    load_quad<kWhole, Rule, Grad>(args, i, counts[q], quads[q]);
  }
#if defined(ZK_BARRIER) && defined(__CUDA_ARCH__)
  __syncthreads();
#endif
  bool skip = args.found_inf && *args.found_inf != 0.0f;
  ZK_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    if (slots[q] >= args.slots) stop();
    HyperRow row = load_row<kWhole>(args.hyper + (slots[q] < 0 ? 0 : slots[q]));
    // Read again for each quad, beside the row: kept over both, it would be one register too many.
    Coefficients<Rule, float> c(row, args.grad_scale ? *args.grad_scale : 1.0f);
    // Threads that share a slot all write the same 1.
    if (skip && args.nonfinite_slots && slots[q] >= 0 && any_nonfinite(quads[q].g, c.grad_scale))
      args.nonfinite_slots[slots[q]] = 1;
    update_quad(quads[q], c);
    int64_t i = first + int64_t(q) * kThreads * kQuad;
    bool live = slots[q] >= 0 && row.active != 0.0f && !skip;
    if (live) store_quad<kWhole, Rule, Out>(args, i, counts[q], quads[q]);
  }
}

// The program of one thread of one block.
template <class Rule, class Grad, class Out>
ZK_HOST_DEVICE inline void step_thread(const StepArgs& args, int64_t block, int thread) {
  int64_t first = block * kTile + thread * kQuad;
  if (args.vector && (block + 1) * kTile <= args.numel)
    step_quads<Rule, Grad, Out, true>(args, first);
  else
    step_quads<Rule, Grad, Out, false>(args, first);
}

template <class Args>
ZK_HOST_DEVICE inline int shard_of(const Args& args, int64_t block) {
  return shard_of_block(block, args.count, [&](int i) { return args.first_block[i]; });
}

template <class Rule, class Grad, class Out>
ZK_HOST_DEVICE inline void foreach_step_thread(const ForeachArgs& args, int64_t block, int thread) {
  int shard = shard_of(args, block);
  step_thread<Rule, Grad, Out>(args.shards[shard], block - args.first_block[shard], thread);
}

// ---- launcher -----------------------------------------------------------------------------------------------------

// Tensors that are not given are null.
inline bool is_aligned(const void* at, int64_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; }

inline bool all_aligned(const StepArgs& args, int64_t grad_size, int64_t out_size) {
  bool states =
      std::all_of(std::begin(args.states), std::end(args.states), [&](float* at) { return is_aligned(at, 16); });
  return states && is_aligned(args.grad, kQuad * grad_size) && is_aligned(args.param_out, kQuad * out_size) &&
         is_aligned(args.master, 16) && is_aligned(args.hyper, 16);
}

inline StepArgs& step_of(StepArgs& shard) { return shard; }
inline const StepArgs& step_of(const StepArgs& shard) { return shard; }
inline StepArgs& step_of(EncodedShard& shard) { return shard.step; }
inline const StepArgs& step_of(const EncodedShard& shard) { return shard.step; }

// Calls run(Type<Grad>, Type<Out>).
template <class Run>
void with_types(DType grad, bool has_output, DType out, Run run) {
  with_type(grad, [&](auto g) {
    if (!has_output) return run(g, Type<NoOutput>());
    with_type(out, [&](auto o) { run(g, o); });
  });
}

// Calls run(Type<Grad>, Type<Out>, args, blocks), if there is anything to do.
template <class Run>
void launch(StepArgs args, DType grad, DType out, Run run) {
  if (args.slots == 0) return;  // all is padding
  args.vector = all_aligned(args, size_of(grad), size_of(out));
  with_types(
      grad, args.param_out != nullptr, out, [&](auto g, auto o) { run(g, o, args, ceil_div(args.numel, kTile)); });
}

// Calls run(args, blocks) for each launch that several shards take, which are alike in their dtypes and share their
// slots. aligned(shard): whether chunks of its tensors are.
template <class Args, class Shard, class Aligned, class Run>
void for_launches(const std::vector<Shard>& shards, Aligned aligned, Run run) {
  if (shards.empty() || step_of(shards[0]).slots == 0) return;
  constexpr size_t kMost = Args::kMostShards;
  for (size_t from = 0; from < shards.size(); from += kMost) {
    Args args;
    args.count = int(std::min(kMost, shards.size() - from));
    int64_t blocks = 0;
    for (int i = 0; i < args.count; ++i) {
      args.shards[i] = shards[from + i];
      step_of(args.shards[i]).vector = aligned(shards[from + i]);
      args.first_block[i] = blocks;
      blocks += ceil_div(step_of(args.shards[i]).numel, kTile);
    }
    run(args, blocks);
  }
}

// Calls run(Type<Grad>, Type<Out>, args, blocks) for each launch.
template <class Run>
void launch_foreach(const std::vector<StepArgs>& shards, DType grad, DType out, Run run) {
  // An empty tensor's address is null.
  bool has_output = std::any_of(shards.begin(), shards.end(), [](const auto& shard) { return shard.param_out; });
  auto aligned = [&](const StepArgs& shard) { return all_aligned(shard, size_of(grad), size_of(out)); };
  for_launches<ForeachArgs>(shards, aligned, [&](const ForeachArgs& args, int64_t blocks) {
    with_types(grad, has_output, out, [&](auto g, auto o) { run(g, o, args, blocks); });
  });
}

#if defined(__CUDACC__)

template <class Rule, class Grad, class Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) step_kernel(const __grid_constant__ StepArgs args) {
  step_thread<Rule, Grad, Out>(args, blockIdx.x, threadIdx.x);
}

template <class Rule, class Grad, class Out>
__global__ void __launch_bounds__(kThreads, kForeachBlocksPerSm<Rule>)
    foreach_step_kernel(const __grid_constant__ ForeachArgs args) {
  foreach_step_thread<Rule, Grad, Out>(args, blockIdx.x, threadIdx.x);
}

template <class Rule>
void run_step(CUstream_st* stream, const char* op, const StepArgs& shard, DType grad, DType out) {
  launch(shard, grad, out, [&](auto g, auto o, const StepArgs& args, int64_t blocks) {
    using Grad = typename decltype(g)::type;
    using Out = typename decltype(o)::type;
    on_stream(stream, op, step_kernel<Rule, Grad, Out>, blocks, kThreads, args);
  });
}

template <class Rule>
void run_foreach_step(CUstream_st* stream, const char* op, const std::vector<StepArgs>& shards, DType grad, DType out) {
  launch_foreach(shards, grad, out, [&](auto g, auto o, const ForeachArgs& args, int64_t blocks) {
    auto kernel = foreach_step_kernel<Rule, typename decltype(g)::type, typename decltype(o)::type>;
    on_stream(stream, op, kernel, blocks, kThreads, args);
  });
}

#endif

}  // namespace

}  // namespace zero_kernels
