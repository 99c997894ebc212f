// The update of shards on CUDA, by any rule. A launch serves up to kMostShards shards, whatever the number of their
// parameters and groups. Three kinds of kernels run one body:
//   step_kernel            one shard with fp32 state, for AdamW; the dtypes are template arguments
//   foreach_step_kernel    several shards with fp32 state; the dtypes are template arguments
//   encoded_step_kernel    state of any form; the kernel branches on dtypes and forms at run time
// AdamW has faster kernels for bf16 gradients and encoded state: quick_step.h. Each rule is compiled in a file of its
// own, step_<rule>.cu.
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

// benchmarks/gpu_variants.py builds and times variants by these two macros, ZK_BARRIER, and chunk.h's
// ZK_STRONG_STORES.
#if !defined(ZK_QUADS)
#define ZK_QUADS 2
#endif
#if !defined(ZK_BLOCKS)
#define ZK_BLOCKS 4
#endif

namespace zero_kernels {

// Shards of a launch: their table is a kernel argument, and kernel arguments stay below 4 KB.
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

constexpr int64_t kBetweenQuads = kThreads * kQuad;  // elements from one quad of a thread to its next
constexpr int64_t kTile = kQuads * kBetweenQuads;

// Indexed by constants alone: indexed by a loop's variable, though it was unrolled, the addresses took registers, and
// AdamW's kernels for sm_100 spilled.
template <class T>
ZK_HOST_DEVICE inline T of_state(const T (&all)[kMostStates], int i) {
  static_assert(kMostStates == 3);
  return i == 0 ? all[0] : i == 1 ? all[1] : all[2];
}

ZK_HOST_DEVICE inline void decode_raw(Form form, const Raw& raw, float scale, float (&x)[kQuad]) {
  if (form == Form::kFloat || form == Form::kBFloat16)
    return widen_raw(form == Form::kFloat ? DType::kFloat : DType::kBFloat16, raw, x);
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j)
    x[j] = form == Form::kInt8 ? unscaled_int8(float(int8_t(byte(raw, j)))) * scale
                               : decoded_root8(float(byte(raw, j)), scale);
}

ZK_HOST_DEVICE inline Raw encode_raw(Form form, const float (&x)[kQuad], float scale) {
  if (form == Form::kFloat) return narrow_raw(DType::kFloat, x);
  Raw raw = {};
  if (!is_usable(scale)) return raw;
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j) raw.words[0] |= uint32_t(uint8_t(nearest(encoded(form, x[j], scale)))) << (j * 8);
  return raw;
}

// `element`: the place of the first in its row.
ZK_HOST_DEVICE inline Raw stochastic_raw(const float (&x)[kQuad], uint32_t of_state, int element) {
  Raw raw = {};
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j) {
    uint32_t noise = noise_in(noise_word(of_state, element + j), j);
    raw.words[j / 2] |= uint32_t(narrow_stochastic(x[j], noise).bits) << (j % 2 * 16);
  }
  return raw;
}

// A quad as it was loaded.
template <class Rule>
struct RawQuad {
  Raw grad, master, high;  // high: of a split master, whose low halves `master` has
  Raw states[Rule::kStates > 0 ? Rule::kStates : 1];
  int64_t i;
  int count;
  int32_t slot;
};

// A quad that is updated, and what is to be done with it.
template <class Rule>
struct Quad {
  float p[kQuad], states[Rule::kStates > 0 ? Rule::kStates : 1][kQuad];
  uint32_t bounds[kMostStates];  // of states with a scale: the largest of its elements, and then of the row
  bool live;
};

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

ZK_HOST_DEVICE inline bool skips(const StepArgs& args) { return args.found_inf && *args.found_inf != 0.0f; }

template <class Rule, bool kWhole>
ZK_HOST_DEVICE inline RawQuad<Rule> load_quad(const Stored& stored, const StepArgs& args, int64_t i) {
  RawQuad<Rule> raw = {};
  raw.i = i;
  int64_t left = args.numel - i;
  raw.count = kWhole || left > kQuad ? kQuad : left > 0 ? int(left) : 0;
  raw.slot = kWhole || left > 0 ? args.row_slot[row_of(i)] : -1;
  raw.grad = load_raw<kWhole>(args.grad, size_of(stored.grad), i, raw.count);
  raw.master = load_raw<kWhole>(args.master, stored.low_size ? stored.low_size : sizeof(float), i, raw.count);
  if (stored.low_size) raw.high = load_raw<kWhole>(args.param_out, sizeof(BFloat16), i, raw.count);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s)
    raw.states[s] = load_raw<kWhole>(of_state(args.states, s), size_of(of_state(stored.forms, s)), i, raw.count);
  return raw;
}

template <class Rule, bool kWhole>
ZK_HOST_DEVICE inline Quad<Rule> update_quad(
    const Stored& stored, const StepArgs& args, const RawQuad<Rule>& raw, bool skip) {
  if (raw.slot >= args.slots) stop();
  HyperRow row = load_row<kWhole>(args.hyper + (raw.slot < 0 ? 0 : raw.slot));
  Coefficients<Rule, float> c(row, args.grad_scale ? *args.grad_scale : 1.0f);
  float g[kQuad];
  widen_raw(stored.grad, raw.grad, g);
  if (skip && args.nonfinite_slots && raw.slot >= 0) {
    bool found = false;
    for (float x : g) found |= is_nonfinite(x * c.grad_scale);
    if (found) args.nonfinite_slots[raw.slot] = 1;  // threads that share a slot all write the same 1
  }
  Quad<Rule> of;
  of.live = raw.slot >= 0 && row.active != 0.0f && !skip;
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) {
    Form form = of_state(stored.forms, s);
    float scale = has_scale(form) && raw.count > 0 ? of_state(args.scales, s)[row_of(raw.i)] : 0.0f;
    decode_raw(form, raw.states[s], scale, of.states[s]);
    of.bounds[s] = 0;
  }
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j) {
    Lane<Rule, float> lane;
    lane.p = stored.low_size ? join({{half_word(raw.high, j)}, low_half(stored.low_size, raw.master, j)})
                             : bits_float(raw.master.words[j]);
    for (int s = 0; s < Rule::kStates; ++s) lane.states[s] = of.states[s][j];
    update(g[j], lane, c);
    of.p[j] = lane.p;
    for (int s = 0; s < Rule::kStates; ++s) {
      of.states[s][j] = lane.states[s];
      Form form = of_state(stored.forms, s);
      uint32_t bound = float_bits(bound_of(form, lane.states[s]));
      if (has_scale(form) && j < raw.count && bound > of.bounds[s]) of.bounds[s] = bound;
    }
  }
  return of;
}

template <class Rule, bool kWhole>
ZK_HOST_DEVICE inline void store_quad(
    const Stored& stored, const StepArgs& args, const RawQuad<Rule>& raw, const Quad<Rule>& of) {
  if (!of.live) return;
  if (stored.low_size) {
    Raw high = {}, low = {};
    ZK_UNROLL
    for (int j = 0; j < kQuad; ++j) {
      Halves halves = split(of.p[j]);
      if (stored.low_size == 1)
        low.words[0] |= uint32_t(uint16_t(in_8_bits(halves.low)) >> 8) << (j * 8);
      else
        low.words[j / 2] |= uint32_t(uint16_t(halves.low)) << (j % 2 * 16);
      high.words[j / 2] |= uint32_t(halves.high.bits) << (j % 2 * 16);
    }
    store_raw<kWhole>(args.param_out, sizeof(BFloat16), raw.i, raw.count, high);
    store_raw<kWhole>(args.master, stored.low_size, raw.i, raw.count, low);
  } else {
    store_raw<kWhole>(args.master, sizeof(float), raw.i, raw.count, narrow_raw(DType::kFloat, of.p));
    if (stored.has_output)
      store_raw<kWhole>(args.param_out, size_of(stored.out), raw.i, raw.count, narrow_raw(stored.out, of.p));
  }
  // Loaded anew: kept since the update, the number of the step took registers where nobody needs it.
  uint32_t noise = 0;
  if (args.row_keys) noise = noise_of_row(args.row_keys[row_of(raw.i)], args.hyper[raw.slot].step_number);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) {
    Form form = of_state(stored.forms, s);
    float scale = has_scale(form) ? scale_of(form, bits_float(of.bounds[s])) : 0.0f;
    if (has_scale(form) && place_in_row(raw.i) == 0 && raw.count > 0) of_state(args.scales, s)[row_of(raw.i)] = scale;
    Raw kept = form == Form::kBFloat16 ? stochastic_raw(of.states[s], noise_of_state(noise, s), place_in_row(raw.i))
                                       : encode_raw(form, of.states[s], scale);
    store_raw<kWhole>(of_state(args.states, s), size_of(form), raw.i, raw.count, kept);
  }
}

// The shard of a block, the block's first element of it, and whether all of the block is whole.
struct Place {
  const StepArgs& shard;
  int64_t tile;
  bool whole;
};

ZK_HOST_DEVICE inline Place place_in(const StepArgs& shard, int64_t block) {
  return {shard, block * kTile, shard.vector && (block + 1) * kTile <= shard.numel};
}

ZK_HOST_DEVICE inline Place place_of(const ForeachArgs& args, int64_t block) {
  int at = shard_of_block(block, args.count, [&](int i) { return args.first_block[i]; });
  return place_in(args.shards[at], block - args.first_block[at]);
}

// `Stored` of fp32 state, a compile-time constant. NoOutput: the master is the parameter.
struct NoOutput {};
template <class T>
constexpr DType kDType = std::is_same_v<T, Half>       ? DType::kHalf
                         : std::is_same_v<T, BFloat16> ? DType::kBFloat16
                                                       : DType::kFloat;
template <class Grad, class Out>
ZK_HOST_DEVICE constexpr Stored floats_of() {
  return {kDType<Grad>, kDType<Out>, !std::is_same_v<Out, NoOutput>, 0, {}};
}

#if defined(__CUDACC__)

__device__ inline uint32_t largest_in_warp(uint32_t x) { return __reduce_max_sync(0xffffffff, x); }

template <class Rule, bool kWhole>
__device__ inline void finish_quad(const Stored& stored, const StepArgs& shard, const RawQuad<Rule>& raw, bool skip) {
  Quad<Rule> of = update_quad<Rule, kWhole>(stored, shard, raw, skip);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s)
    if (has_scale(of_state(stored.forms, s))) of.bounds[s] = largest_in_warp(of.bounds[s]);
  store_quad<Rule, kWhole>(stored, shard, raw, of);
}

// All loads, then all updates. No branch stands between them: the compiler would move loads into it, behind the wait
// for row_slot. Rows that nothing is done to are loaded and computed all the same, and not stored.
template <class Rule, bool kWhole>
__device__ inline void step_quads(const Stored& stored, const Place& at) {
  int64_t i = at.tile + threadIdx.x * kQuad;
  RawQuad<Rule> raws[kQuads];
  ZK_UNROLL
  for (int q = 0; q < kQuads; ++q) raws[q] = load_quad<Rule, kWhole>(stored, at.shard, i + q * kBetweenQuads);
#if defined(ZK_BARRIER)
  __syncthreads();
#endif
  bool skip = skips(at.shard);
  ZK_UNROLL
  for (int q = 0; q < kQuads; ++q) finish_quad<Rule, kWhole>(stored, at.shard, raws[q], skip);
}

// One quad after the other, for state of any form. i: the first element of the first quad. All threads of a warp must
// call it together, as they reduce over the warp: a block has one shard, and quick_eight returns the same to all.
template <class Rule, bool kWhole>
__device__ inline void step_in_turn(const Stored& stored, const StepArgs& shard, int64_t i, int stride) {
#pragma unroll 1
  for (int q = 0; q < kQuads; ++q, i += stride)
    finish_quad<Rule, kWhole>(stored, shard, load_quad<Rule, kWhole>(stored, shard, i), skips(shard));
}

template <class Rule, class Grad, class Out>
__device__ inline void step_floats(const Place& at) {
  constexpr Stored stored = floats_of<Grad, Out>();
  if (at.whole)
    step_quads<Rule, true>(stored, at);
  else
    step_quads<Rule, false>(stored, at);
}

template <class Rule, class Grad, class Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) step_kernel(const __grid_constant__ StepArgs args) {
  step_floats<Rule, Grad, Out>(place_in(args, blockIdx.x));
}

template <class Rule, class Grad, class Out>
__global__ void __launch_bounds__(kThreads, kForeachBlocksPerSm<Rule>)
    foreach_step_kernel(const __grid_constant__ ForeachArgs args) {
  step_floats<Rule, Grad, Out>(place_of(args, blockIdx.x));
}

template <class Rule>
__global__ void __launch_bounds__(kThreads, kForeachBlocksPerSm<Rule>)
    encoded_step_kernel(const __grid_constant__ ForeachArgs args) {
  Place at = place_of(args, blockIdx.x);
  int64_t i = at.tile + threadIdx.x * kQuad;
  if (at.whole)
    step_in_turn<Rule, true>(args.stored, at.shard, i, kBetweenQuads);
  else
    step_in_turn<Rule, false>(args.stored, at.shard, i, kBetweenQuads);
}

#endif

// ---- launcher -----------------------------------------------------------------------------------------------------

// Whether every tensor is aligned for accesses of that many elements, or of 16 bytes if that is less.
inline bool all_aligned(const Stored& stored, const StepArgs& args, int elements) {
  auto holds = [elements](const void* at, int64_t size) {
    return is_aligned(at, std::min<int64_t>(16, elements * size));
  };
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

// Calls run(args, blocks) for each launch that the shards take, if there is anything to do. `elements`: see
// all_aligned.
template <class Run>
void for_launches(const Stored& stored, std::vector<StepArgs>& shards, int elements, Run run) {
  for (StepArgs& shard : shards) shard.vector = all_aligned(stored, shard, elements);
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

// Of states and masters in fp32. One shard has a kernel of its own where a rule has two states, as AdamW.
template <class Rule>
void run_floats(CUstream_st* stream, const Stored& stored, std::vector<StepArgs>& shards) {
  for_launches(stored, shards, kQuad, [&](const ForeachArgs& args, int64_t blocks) {
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

inline void run_kernel(
    CUstream_st* stream, const Stored& stored, std::vector<StepArgs>& shards, int elements,
    void (*kernel)(ForeachArgs)) {
  for_launches(stored, shards, elements, [&](const ForeachArgs& args, int64_t blocks) {
    on_stream(stream, "foreach_step", kernel, blocks, kThreads, args);
  });
}

template <class Rule>
void run_step(CUstream_st* stream, const Stored& stored, std::vector<StepArgs>& shards) {
  if (is_encoded(stored))
    run_kernel(stream, stored, shards, kQuad, encoded_step_kernel<Rule>);
  else
    run_floats<Rule>(stream, stored, shards);
}

#endif

}  // namespace
}  // namespace zero_kernels
