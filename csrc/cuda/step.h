// The update of shards on CUDA, by any rule: one launch for up to kMostShards, whatever the number of their parameters
// and groups. AdamW has a kernel for one shard, too. Rules are compiled beside each other, in files of their own:
// step_<rule>.cu.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "launchers.h"
#include "raw.h"
#include "shard_of_block.h"

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
constexpr int kMostShards = 28;

struct ForeachArgs {
  Stored stored;
  int count;  // of shards
  int64_t first_block[kMostShards];
  StepArgs shards[kMostShards];
};
static_assert(sizeof(ForeachArgs) <= 4096);

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

// Indexed by constants alone: indexed by a loop's variable, though it was unrolled, the addresses took registers, and
// AdamW's kernels for sm_100 spilled.
template <class T>
ZK_HOST_DEVICE inline T of_state(const T (&all)[kMostStates], int i) {
  static_assert(kMostStates == 3);
  return i == 0 ? all[0] : i == 1 ? all[1] : all[2];
}
ZK_HOST_DEVICE inline float* master_of(const StepArgs& args) { return static_cast<float*>(args.master); }
ZK_HOST_DEVICE inline float* state_of(const StepArgs& args, int s) {
  return static_cast<float*>(of_state(args.states, s));
}

template <class Rule>
struct Quad {
  float g[kQuad], p[kQuad];
  float states[Rule::kStates > 0 ? Rule::kStates : 1][kQuad];
};

template <bool kWhole, class Rule, class Grad>
ZK_HOST_DEVICE inline void load_quad(const StepArgs& args, int64_t i, int count, Quad<Rule>& quad) {
  load<kWhole>(static_cast<const Grad*>(args.grad) + i, count, quad.g);
  load<kWhole>(master_of(args) + i, count, quad.p);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) load<kWhole>(state_of(args, s) + i, count, quad.states[s]);
}

template <bool kWhole, class Out>
ZK_HOST_DEVICE inline void store_output(const StepArgs& args, int64_t i, int count, const float (&p)[kQuad]) {
  if constexpr (!std::is_same_v<Out, NoOutput>) store<kWhole>(static_cast<Out*>(args.param_out) + i, count, p);
}

template <bool kWhole, class Rule, class Out>
ZK_HOST_DEVICE inline void store_quad(const StepArgs& args, int64_t i, int count, const Quad<Rule>& quad) {
  store<kWhole>(master_of(args) + i, count, quad.p);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) store<kWhole>(state_of(args, s) + i, count, quad.states[s]);
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

// A thread has eight elements, side by side or in two quads, and accesses of 16 bytes at most.
inline bool all_aligned(const Stored& stored, const StepArgs& args) {
  auto holds = [](const void* at, int64_t size) { return is_aligned(at, std::min<int64_t>(16, 2 * kQuad * size)); };
  bool aligned = holds(args.grad, size_of(stored.grad)) && holds(args.param_out, size_of(stored.out)) &&
                 holds(args.master, stored.low_size ? stored.low_size : sizeof(float)) && is_aligned(args.hyper, 16);
  for (int s = 0; s < kMostStates; ++s) aligned &= holds(args.states[s], size_of(stored.forms[s]));
  return aligned;
}

// Calls run(Type<Grad>, Type<Out>).
template <class Run>
void with_types(const Stored& stored, Run run) {
  with_type(stored.grad, [&](auto g) {
    if (!stored.has_output) return run(g, Type<NoOutput>());
    with_type(stored.out, [&](auto o) { run(g, o); });
  });
}

// Calls run(args, blocks) for each launch that the shards take, if there is anything to do.
template <class Run>
void for_launches(const Stored& stored, std::vector<StepArgs>& shards, Run run) {
  for (StepArgs& shard : shards) shard.vector = all_aligned(stored, shard);
  for (size_t from = 0; from < shards.size() && shards[0].slots; from += kMostShards) {
    ForeachArgs args;
    args.stored = stored;
    args.count = int(std::min<size_t>(kMostShards, shards.size() - from));
    int64_t blocks = 0;
    for (int i = 0; i < args.count; ++i) {
      args.shards[i] = shards[from + i];
      args.first_block[i] = blocks;
      blocks += ceil_div(args.shards[i].numel, kTile);
    }
    run(args, blocks);
  }
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

// Of states and masters in fp32. One shard has a kernel of its own where a rule has two states, as AdamW.
template <class Rule>
void run_floats(CUstream_st* stream, const Stored& stored, std::vector<StepArgs>& shards) {
  for_launches(stored, shards, [&](const ForeachArgs& args, int64_t blocks) {
    with_types(stored, [&](auto g, auto o) {
      using Grad = typename decltype(g)::type;
      using Out = typename decltype(o)::type;
      if constexpr (Rule::kStates == 2)
        if (args.count == 1)
          return on_stream(stream, "foreach_step", step_kernel<Rule, Grad, Out>, blocks, kThreads, args.shards[0]);
      on_stream(stream, "foreach_step", foreach_step_kernel<Rule, Grad, Out>, blocks, kThreads, args);
    });
  });
}

#endif

}  // namespace

}  // namespace zero_kernels
