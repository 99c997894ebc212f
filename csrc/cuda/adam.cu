// adam_step on CUDA: one launch for a shard, whatever the number of its parameters and groups; foreach_adam_step: one
// for up to kShards shards.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "../adam_math.h"
#include "chunk.h"
#include "shard_of_block.h"

#if defined(__CUDACC__)
#include "../bounds.h"
#include "launch.h"
#endif

namespace zero_kernels {
namespace {

// ---- kernel -------------------------------------------------------------------------------------------------------

// A warp's access to a tensor of fp32 covers a row: 32 lanes of 16 bytes, side by side. So one row of the hyper table
// serves the warp. 16-bit tensors go in 8 bytes a lane: 16 would put the fp32 accesses of neighbours 16 bytes apart.
constexpr int kQuad = 4;
constexpr int kThreads = 256;
constexpr int kQuads = 2;               // of a thread: eight loads of data are under way before the first is used
constexpr int kBlocksPerSm = 4;         // at 64 registers a thread; 112 KB under way on each multiprocessor
constexpr int kForeachBlocksPerSm = 3;  // held to 64 registers, it spilled: the shard's addresses take some
constexpr int64_t kTile = kThreads * kQuads * kQuad;

struct AdamStepArgs {
  const void* grad;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  void* param_out;  // or null
  const int32_t* row_slot;
  const HyperRow* hyper;
  const float* grad_scale;   // or null: 1
  const float* found_inf;    // or null: 0
  int32_t* nonfinite_slots;  // or null
  int64_t numel;
  int32_t slots;
  bool vector;  // every tensor starts where its chunks are aligned
};

constexpr int kShards = 32;  // of a launch: their table is among its arguments, and stays below 4 KB

struct ForeachArgs {
  int count;  // of shards
  int64_t first_block[kShards];
  AdamStepArgs shards[kShards];
};
static_assert(sizeof(ForeachArgs) <= 4096);

struct NoOutput {};  // the master is the parameter

struct Quad {
  float g[kQuad], p[kQuad], m[kQuad], v[kQuad];
};

template <bool kWhole, class Grad>
ZK_HOST_DEVICE inline void load_quad(const AdamStepArgs& args, int64_t i, int count, Quad& quad) {
  const Grad* grad = static_cast<const Grad*>(args.grad) + i;
  if (kWhole) {
    load_chunk(grad, quad.g);
    load_chunk(args.master + i, quad.p);
    load_chunk(args.exp_avg + i, quad.m);
    load_chunk(args.exp_avg_sq + i, quad.v);
  } else {
    load_first(grad, count, quad.g);
    load_first(args.master + i, count, quad.p);
    load_first(args.exp_avg + i, count, quad.m);
    load_first(args.exp_avg_sq + i, count, quad.v);
  }
}

template <bool kWhole, class T>
ZK_HOST_DEVICE inline void store(T* to, int count, const float (&x)[kQuad]) {
  if (kWhole)
    store_chunk(to, x);
  else
    store_first(to, count, x);
}

template <bool kWhole, class Out>
ZK_HOST_DEVICE inline void store_quad(const AdamStepArgs& args, int64_t i, int count, const Quad& quad) {
  store<kWhole>(args.master + i, count, quad.p);
  store<kWhole>(args.exp_avg + i, count, quad.m);
  store<kWhole>(args.exp_avg_sq + i, count, quad.v);
  if constexpr (!std::is_same_v<Out, NoOutput>) store<kWhole>(static_cast<Out*>(args.param_out) + i, count, quad.p);
}

ZK_HOST_DEVICE inline void update_quad(Quad& quad, const AdamCoefficients<float>& c) {
  for (int j = 0; j < kQuad; ++j) {
    AdamLane<float> lane = adam_update(quad.g[j], {quad.p[j], quad.m[j], quad.v[j]}, c);
    quad.p[j] = lane.p;
    quad.m[j] = lane.m;
    quad.v[j] = lane.v;
  }
}

ZK_HOST_DEVICE inline bool any_nonfinite(const Quad& quad, float scale) {
  bool found = false;
  for (float g : quad.g) found |= is_nonfinite(g * scale);
  return found;
}

// Three accesses of 16 bytes, for which the row is padded.
template <bool kWhole>
ZK_HOST_DEVICE inline HyperRow load_row(const HyperRow* at) {
  if (!kWhole) return *at;
  float a[4], b[4], c[4];
  load_chunk(&at->step_size, a);
  load_chunk(&at->beta1, b);
  load_chunk(&at->bias_correction2_sqrt, c);
  return {a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3]};
}

// No branch stands between the loads and the update: the compiler would move loads into it, behind the wait for
// row_slot. Rows that nothing is done to are loaded and computed all the same, and not stored.
template <class Grad, class Out, bool kWhole>
ZK_HOST_DEVICE inline void adam_step_quads(const AdamStepArgs& args, int64_t first) {
  Quad quads[kQuads];
  int32_t slots[kQuads];
  int counts[kQuads];
  ZK_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    int64_t i = first + int64_t(q) * kThreads * kQuad;
    int64_t left = args.numel - i;
    counts[q] = kWhole || left > kQuad ? kQuad : left > 0 ? int(left) : 0;
    slots[q] = kWhole || left > 0 ? args.row_slot[i / kRow] : -1;
    load_quad<kWhole, Grad>(args, i, counts[q], quads[q]);
  }
  bool skip = args.found_inf && *args.found_inf != 0.0f;
  ZK_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    if (slots[q] >= args.slots) stop();
    HyperRow row = load_row<kWhole>(args.hyper + (slots[q] < 0 ? 0 : slots[q]));
    // Read again for each quad, beside the row: kept over both, it would be one register too many.
    AdamCoefficients<float> c(row, args.grad_scale ? *args.grad_scale : 1.0f);
    // Threads that share a slot all write the same 1.
    if (skip && args.nonfinite_slots && slots[q] >= 0 && any_nonfinite(quads[q], c.grad_scale))
      args.nonfinite_slots[slots[q]] = 1;
    update_quad(quads[q], c);
    if (slots[q] >= 0 && row.active != 0.0f && !skip)
      store_quad<kWhole, Out>(args, first + int64_t(q) * kThreads * kQuad, counts[q], quads[q]);
  }
}

// The program of one thread of one block.
template <class Grad, class Out>
ZK_HOST_DEVICE inline void adam_step_thread(const AdamStepArgs& args, int64_t block, int thread) {
  int64_t first = block * kTile + thread * kQuad;
  if (args.vector && (block + 1) * kTile <= args.numel)
    adam_step_quads<Grad, Out, true>(args, first);
  else
    adam_step_quads<Grad, Out, false>(args, first);
}

template <class Grad, class Out>
ZK_HOST_DEVICE inline void foreach_adam_step_thread(const ForeachArgs& args, int64_t block, int thread) {
  int shard = shard_of_block(block, args.count, [&](int i) { return args.first_block[i]; });
  adam_step_thread<Grad, Out>(args.shards[shard], block - args.first_block[shard], thread);
}

// ---- launcher -----------------------------------------------------------------------------------------------------

inline bool all_aligned(const AdamStepArgs& args, int64_t grad_size, int64_t out_size) {
  auto starts_at = [](const void* at, int64_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; };
  return starts_at(args.grad, kQuad * grad_size) && starts_at(args.param_out, kQuad * out_size) &&
         starts_at(args.master, 16) && starts_at(args.exp_avg, 16) && starts_at(args.exp_avg_sq, 16) &&
         starts_at(args.hyper, 16);
}

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
void launch(AdamStepArgs args, DType grad, DType out, Run run) {
  if (args.slots == 0) return;  // all is padding
  args.vector = all_aligned(args, size_of(grad), size_of(out));
  with_types(
      grad, args.param_out != nullptr, out, [&](auto g, auto o) { run(g, o, args, ceil_div(args.numel, kTile)); });
}

// The same for each launch that several shards take, which are alike in their dtypes and share their slots.
template <class Run>
void launch_foreach(const std::vector<AdamStepArgs>& shards, DType grad, DType out, Run run) {
  if (shards.empty() || shards[0].slots == 0) return;
  // An empty tensor's address is null.
  bool has_output = std::any_of(shards.begin(), shards.end(), [](const auto& shard) { return shard.param_out; });
  for (size_t from = 0; from < shards.size(); from += kShards) {
    ForeachArgs args;
    args.count = int(std::min<size_t>(kShards, shards.size() - from));
    int64_t blocks = 0;
    for (int i = 0; i < args.count; ++i) {
      args.shards[i] = shards[from + i];
      args.shards[i].vector = all_aligned(args.shards[i], size_of(grad), size_of(out));
      args.first_block[i] = blocks;
      blocks += ceil_div(args.shards[i].numel, kTile);
    }
    with_types(grad, has_output, out, [&](auto g, auto o) { run(g, o, args, blocks); });
  }
}

#if defined(__CUDACC__)

template <class Grad, class Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) adam_step_kernel(const __grid_constant__ AdamStepArgs args) {
  adam_step_thread<Grad, Out>(args, blockIdx.x, threadIdx.x);
}

template <class Grad, class Out>
__global__ void __launch_bounds__(kThreads, kForeachBlocksPerSm)
    adam_step_foreach_kernel(const __grid_constant__ ForeachArgs args) {
  foreach_adam_step_thread<Grad, Out>(args, blockIdx.x, threadIdx.x);
}

// ---- ops ----------------------------------------------------------------------------------------------------------

AdamStepArgs args_of(const AdamStepTensors& of) {
  return {
      data<const void>(of.grad),
      data<float>(of.master),
      data<float>(of.exp_avg),
      data<float>(of.exp_avg_sq),
      of.param_out ? data<void>(*of.param_out) : nullptr,
      data<const int32_t>(of.row_slot),
      data<const HyperRow>(of.hyper),
      of.grad_scale ? data<const float>(*of.grad_scale) : nullptr,
      of.found_inf ? data<const float>(*of.found_inf) : nullptr,
      of.nonfinite_slots ? data<int32_t>(*of.nonfinite_slots) : nullptr,
      of.grad.numel(),
      static_cast<int32_t>(of.hyper.size(0)),
      false};
}

void adam_step(
    const Tensor& grad, const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const std::optional<Tensor>& param_out, const Tensor& row_slot, const Tensor& hyper,
    const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots) {
  AdamStepTensors of = {grad,     master, exp_avg,    exp_avg_sq, param_out ? &*param_out : nullptr,
                        row_slot, hyper,  grad_scale, found_inf,  nonfinite_slots};
  check_adam_step(of);
  Launch on_gpu("adam_step", grad);
  launch(args_of(of), dtype_of(grad), of.param_dtype(), [&](auto g, auto out, auto args, auto blocks) {
    on_gpu(adam_step_kernel<typename decltype(g)::type, typename decltype(out)::type>, blocks, kThreads, args);
  });
}

void foreach_adam_step(
    const std::vector<Tensor>& grads, const std::vector<Tensor>& masters, const std::vector<Tensor>& exp_avgs,
    const std::vector<Tensor>& exp_avg_sqs, const std::vector<Tensor>& params_out, const std::vector<Tensor>& row_slots,
    const Tensor& hyper, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots) {
  std::vector<AdamStepTensors> given = check_foreach_adam_step(
      grads, masters, exp_avgs, exp_avg_sqs, params_out, row_slots, hyper, grad_scale, found_inf, nonfinite_slots);
  std::vector<AdamStepArgs> shards;
  shards.reserve(given.size());
  for (const AdamStepTensors& of : given) shards.push_back(args_of(of));
  Launch on_gpu("foreach_adam_step", grads.at(0));
  launch_foreach(
      shards, dtype_of(grads[0]), given[0].param_dtype(), [&](auto g, auto out, const auto& args, auto blocks) {
        on_gpu(
            adam_step_foreach_kernel<typename decltype(g)::type, typename decltype(out)::type>, blocks, kThreads, args);
      });
}

#endif

}  // namespace
}  // namespace zero_kernels

#if defined(__CUDACC__)
STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CUDA, m) {
  m.impl("adam_step", TORCH_BOX(&zero_kernels::adam_step));
  m.impl("foreach_adam_step", TORCH_BOX(&zero_kernels::foreach_adam_step));
}
#endif
