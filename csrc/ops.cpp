// Every compiled schema (namespace zero_kernels_C), and the ops on CPU tensors.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bounds.h"
#include "cpu/isa.h"
#include "hyper_table.h"
#include "stable.h"

namespace zero_kernels {
namespace {

// ---- adam_step and foreach_step -----------------------------------------------------------------------------------

constexpr int64_t kGrain = 32768;  // elements: below this a second thread costs more than it brings

// table: what the slots are rows of.
void check_slots(const char* table, const int32_t* row_slot, int64_t rows, int64_t slots) {
  for (int64_t row = 0; row < rows; ++row)
    if (row_slot[row] >= slots)
      throw std::runtime_error(
          "zero_kernels: row_slot[" + std::to_string(row) + "] = " + std::to_string(row_slot[row]) + ", but " + table +
          " has " + std::to_string(slots) + " rows");
}

template <class Kernel>
void parallel_rows(int64_t numel, Kernel kernel) {
  torch::stable::parallel_for(0, ceil_div(numel, kRow), kGrain / kRow, kernel);
}

// Marks the slots that hold a non-finite gradient times scale, and so are the reason of a skipped step.
void mark_nonfinite(const StepArgs& args, int32_t* flags) {
  const KernelTable& table = kernels();
  int64_t size = size_of(args.grad_dtype);
  parallel_rows(args.numel, [&](int64_t begin, int64_t end) {
    float scaled[kRow];
    for (int64_t row = begin; row < end; ++row) {
      int32_t slot = args.row_slot[row];
      if (slot < 0) continue;
      int64_t count = std::min(kRow, args.numel - row * kRow);
      float scale = args.grad_scale * args.hyper[slot].grad_factor;
      const void* grad = static_cast<const char*>(args.grad) + row * kRow * size;
      table.scale({grad, scaled, count, scale, args.grad_dtype, DType::kFloat});
      if (table.scale({scaled, scaled, count, 1.0f, DType::kFloat, DType::kFloat}))
        __atomic_store_n(flags + slot, 1, __ATOMIC_RELAXED);
    }
  });
}

StepArgs args_of(const StepTensors& of) {
  StepArgs args = {
      data<const void>(of.grad),
      of.is_split() ? nullptr : data<float>(of.master),
      {},
      of.param_out ? data<void>(*of.param_out) : nullptr,
      data<const int32_t>(of.row_slot),
      data<const HyperRow>(of.hyper),
      of.grad.numel(),
      of.grad_scale ? *data<const float>(*of.grad_scale) : 1.0f,
      dtype_of(of.grad),
      of.param_dtype(),
      encoded_of(of)};
  for (int i = 0; i < of.state_count; ++i) args.states[i] = data<float>(*of.states[i]);
  check_slots("hyper", args.row_slot, ceil_div(args.numel, kRow), of.hyper.size(0));
  return args;
}

// Whether nothing is updated. Slots are marked then, where that is wanted.
bool skips(const StepTensors& of, const StepArgs& args) {
  if (!of.found_inf || *data<const float>(*of.found_inf) == 0.0f) return false;
  if (of.nonfinite_slots) mark_nonfinite(args, data<int32_t>(*of.nonfinite_slots));
  return true;
}

void adam_step(
    const Tensor& grad, const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const std::optional<Tensor>& param_out, const Tensor& row_slot, const Tensor& hyper,
    const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots) {
  const StepKernel& kernel = entry_of("adamw", kernels().steps);
  StepTensors of = {
      grad,       master,    {&exp_avg, &exp_avg_sq}, kernel.states, param_out ? &*param_out : nullptr, row_slot, hyper,
      grad_scale, found_inf, nonfinite_slots};
  check_step(of);
  StepArgs args = args_of(of);
  if (skips(of, args)) return;
  parallel_rows(args.numel, [&](int64_t begin, int64_t end) { kernel.run(args, begin, end); });
}

void foreach_step(
    const std::string& rule, const std::vector<Tensor>& grads, const std::vector<Tensor>& masters,
    const std::vector<Tensor>& states, const std::vector<Tensor>& params_out, const std::vector<Tensor>& row_slots,
    const Tensor& hyper, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots, const std::optional<std::vector<Tensor>>& scales,
    const std::optional<std::vector<Tensor>>& row_keys) {
  const StepKernel& kernel = entry_of(rule, kernels().steps);
  std::vector<StepTensors> given = check_foreach_step(
      kernel.states, grads, masters, states, params_out, row_slots, hyper, grad_scale, found_inf, nonfinite_slots,
      scales, row_keys);
  std::vector<StepArgs> shards;
  std::vector<int64_t> ends;  // of each shard, in the rows of all
  int64_t rows = 0;
  for (const StepTensors& of : given) {
    shards.push_back(args_of(of));
    ends.push_back(rows += ceil_div(shards.back().numel, kRow));
  }
  bool skipped = false;
  for (size_t i = 0; i < given.size(); ++i) skipped = skips(given[i], shards[i]);
  if (skipped) return;
  torch::stable::parallel_for(0, rows, kGrain / kRow, [&](int64_t begin, int64_t end) {
    for (size_t i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin(); begin < end; begin = ends[i++]) {
      int64_t first = i ? ends[i - 1] : 0;
      auto run = shards[i].encoded.any() ? kernel.run_encoded : kernel.run;
      run(shards[i], begin - first, std::min(end, ends[i]) - first);
    }
  });
}

void ema(
    const std::vector<Tensor>& averages, const std::vector<Tensor>& masters, const std::vector<Tensor>& params,
    const std::vector<Tensor>& row_slots, const Tensor& rates) {
  check_ema(averages, masters, params, row_slots, rates);
  const KernelTable& table = kernels();
  std::vector<float*> of_all;
  for (const Tensor& average : averages) of_all.push_back(data<float>(average));
  int each = int(rates.size(1)), low_size = low_size_of(masters.at(0));
  std::vector<EmaArgs> shards;  // all of them are checked before the first is written
  for (size_t i = 0; i < masters.size(); ++i) {
    int64_t numel = masters[i].numel();
    DType dtype = low_size ? DType::kBFloat16 : dtype_of(masters[i]);
    shards.push_back(
        {data<const void>(masters[i]), low_size ? data<const void>(params[i]) : nullptr, of_all.data() + i * each,
         data<const float>(rates), data<const int32_t>(row_slots[i]), numel, each, low_size, dtype});
    check_slots("rates", shards[i].row_slot, ceil_div(numel, kRow), rates.size(0));
  }
  for (const EmaArgs& args : shards)
    parallel_rows(args.numel, [&](int64_t begin, int64_t end) { table.ema(args, begin, end); });
}

void stream(const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& out) {
  StreamArgs args = {data<const void>(grad), data<float>(a),  data<float>(b),
                     data<float>(c),         data<void>(out), grad.numel()};
  const KernelTable& table = kernels();
  parallel_rows(args.numel, [&](int64_t begin, int64_t end) { table.stream(args, begin, end); });
}

// ---- pack and unpack ----------------------------------------------------------------------------------------------

// A gradient and its place in the bucket.
struct Slot {
  char* grad;
  int64_t begin, end;  // elements of the bucket
  DType dtype;
};

std::vector<Slot> slots_of(const std::vector<Tensor>& grads, const std::vector<int64_t>& offsets) {
  std::vector<Slot> slots;
  slots.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i)
    slots.push_back({data<char>(grads[i]), offsets[i], offsets[i] + grads[i].numel(), dtype_of(grads[i])});
  return slots;
}

// Calls visit(index of slot, begin, end) for the parts of slots in [begin, end), in order.
template <class Visit>
void for_slots(const std::vector<Slot>& slots, int64_t begin, int64_t end, Visit visit) {
  auto first =
      std::upper_bound(slots.begin(), slots.end(), begin, [](int64_t at, const Slot& slot) { return at < slot.end; });
  for (auto slot = first; slot != slots.end() && slot->begin < end; ++slot) {
    int64_t from = std::max(begin, slot->begin), to = std::min(end, slot->end);
    if (from < to) visit(slot - slots.begin(), from, to);
  }
}

void pack(
    const std::vector<Tensor>& grads, const std::vector<int64_t>& offsets, const Tensor& bucket, double scale,
    const std::optional<Tensor>& nonfinite) {
  check_slots_fit(grads, offsets, bucket, nonfinite);
  std::vector<Slot> slots = slots_of(grads, offsets);
  char* out = data<char>(bucket);
  DType dtype = dtype_of(bucket);
  int64_t size = size_of(dtype);
  int32_t* flags = nonfinite ? data<int32_t>(*nonfinite) : nullptr;
  if (flags) std::fill_n(flags, slots.size(), 0);
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, bucket.numel(), kGrain, [&](int64_t begin, int64_t end) {
    int64_t done = begin;
    for_slots(slots, begin, end, [&](int64_t i, int64_t from, int64_t to) {
      std::memset(out + done * size, 0, (from - done) * size);
      const Slot& slot = slots[i];
      const char* src = slot.grad + (from - slot.begin) * size_of(slot.dtype);
      bool bad = table.scale({src, out + from * size, to - from, float(scale), slot.dtype, dtype});
      // Threads that share a gradient all write the same 1.
      if (bad && flags) __atomic_store_n(flags + i, 1, __ATOMIC_RELAXED);
      done = to;
    });
    std::memset(out + done * size, 0, (end - done) * size);
  });
}

void unpack(const Tensor& bucket, const std::vector<int64_t>& offsets, const std::vector<Tensor>& grads, double scale) {
  check_slots_fit(grads, offsets, bucket, std::nullopt);
  std::vector<Slot> slots = slots_of(grads, offsets);
  const char* in = data<const char>(bucket);
  DType dtype = dtype_of(bucket);
  int64_t size = size_of(dtype);
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, bucket.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for_slots(slots, begin, end, [&](int64_t i, int64_t from, int64_t to) {
      const Slot& slot = slots[i];
      char* dst = slot.grad + (from - slot.begin) * size_of(slot.dtype);
      table.scale({in + from * size, dst, to - from, float(scale), dtype, slot.dtype});
    });
  });
}

// ---- grad_stats ---------------------------------------------------------------------------------------------------

void stats_of(const Tensor& shard, double norm_type, float* out) {
  int64_t blocks = ceil_div(shard.numel(), kStatsBlock);
  std::vector<float> partials(blocks);
  std::vector<int32_t> nonfinite(blocks);
  StatsArgs args = {data<const void>(shard), shard.numel(), partials.data(), nonfinite.data(), dtype_of(shard)};
  int norm = std::isinf(norm_type) ? 0 : int(norm_type);
  const KernelTable& table = kernels();
  torch::stable::parallel_for(
      0, blocks, kGrain / kStatsBlock, [&](int64_t begin, int64_t end) { table.stats(args, norm, begin, end); });
  int64_t count = 0;
  for (int32_t found : nonfinite) count += found;
  out[0] = table.combine(partials.data(), blocks, norm);
  out[1] = float(count);
}

Tensor grad_stats(const std::vector<Tensor>& shards, double norm_type) {
  Tensor out = torch::stable::new_empty(shards.at(0), {int64_t(shards.size()), 2}, ScalarType::Float);
  for (size_t i = 0; i < shards.size(); ++i) stats_of(shards[i], norm_type, data<float>(out) + 2 * i);
  return out;
}

// ---- hyper_table --------------------------------------------------------------------------------------------------

void hyper_table(
    const Tensor& coefficients, const std::optional<Tensor>& group, const Tensor& step,
    const std::optional<Tensor>& active, const Tensor& out) {
  HyperTableArgs args = hyper_table_args(coefficients, group, step, active, out);
  for (int64_t slot = 0; group && slot < args.slots; ++slot)
    if (args.group[slot] < 0 || args.group[slot] >= args.groups)
      throw std::runtime_error(
          "zero_kernels: group[" + std::to_string(slot) + "] = " + std::to_string(args.group[slot]) +
          ", but coefficients has " + std::to_string(args.groups) + " columns");
  torch::stable::parallel_for(0, args.slots, 256, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) make_hyper_row(args, slot);
  });
}

std::string isa() { return kernels().name; }

}  // namespace
}  // namespace zero_kernels

STABLE_TORCH_LIBRARY(zero_kernels_C, m) {
  m.def(
      "adam_step(Tensor grad, Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? param_out, "
      "Tensor row_slot, Tensor hyper, Tensor? grad_scale, Tensor? found_inf, Tensor(e!)? nonfinite_slots) -> ()");
  m.def(
      "foreach_step(str rule, Tensor[] grads, Tensor(a!)[] masters, Tensor(b!)[] states, Tensor(c!)[] params_out, "
      "Tensor[] row_slots, Tensor hyper, Tensor? grad_scale, Tensor? found_inf, Tensor(d!)? nonfinite_slots, "
      "Tensor(e!)[]? scales=None, Tensor[]? row_keys=None) -> ()");
  m.def("ema(Tensor(a!)[] averages, Tensor[] masters, Tensor[] params, Tensor[] row_slots, Tensor rates) -> ()");
  m.def("pack(Tensor[] grads, int[] offsets, Tensor(a!) bucket, float scale, Tensor(b!)? nonfinite) -> ()");
  m.def("unpack(Tensor bucket, int[] offsets, Tensor(a!)[] grads, float scale) -> ()");
  m.def("grad_stats(Tensor[] shards, float norm_type) -> Tensor");
  m.def("hyper_table(Tensor coefficients, Tensor? group, Tensor step, Tensor? active, Tensor(a!) out) -> ()");
  m.def("stream(Tensor grad, Tensor(a!) a, Tensor(b!) b, Tensor(c!) c, Tensor(d!) out) -> ()");
  m.def("cuda_archs() -> str");
  m.def("cuda_problem() -> str");
  m.def("isa() -> str");
  m.def("isas() -> str");
  m.def("use_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CPU, m) {
  m.impl("adam_step", TORCH_BOX(&zero_kernels::adam_step));
  m.impl("foreach_step", TORCH_BOX(&zero_kernels::foreach_step));
  m.impl("ema", TORCH_BOX(&zero_kernels::ema));
  m.impl("pack", TORCH_BOX(&zero_kernels::pack));
  m.impl("unpack", TORCH_BOX(&zero_kernels::unpack));
  m.impl("grad_stats", TORCH_BOX(&zero_kernels::grad_stats));
  m.impl("hyper_table", TORCH_BOX(&zero_kernels::hyper_table));
  m.impl("stream", TORCH_BOX(&zero_kernels::stream));
}

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&zero_kernels::isa));
  m.impl("isas", TORCH_BOX(&zero_kernels::usable_isas));
  m.impl("use_isa", TORCH_BOX(&zero_kernels::use_isa));
}
