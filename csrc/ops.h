// The ops, written once for all devices: tensors of libtorch's stable ABI become plain pointers, and a backend has the
// kernels. One binary serves all torch >= 2.10. Arguments are checked in Python (zero_kernels/ops.py), but for later
// calls of zero_kernels/prepared.py: what could be read or written out of bounds is refused here again.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "args.h"
#include "hyper_table.h"
#include "pack_job.h"

namespace zero_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

[[noreturn]] inline void refuse(const std::string& why) { throw std::runtime_error("zero_kernels: " + why); }

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return DType::kHalf;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat;
    default:
      refuse("expected float16, bfloat16 or float32");
  }
}

// The form of a state, by its dtype.
inline Form form_of(const Tensor& state) {
  switch (state.scalar_type()) {
    case ScalarType::Float:
      return Form::kFloat;
    case ScalarType::BFloat16:
      return Form::kBFloat16;
    case ScalarType::Char:
      return Form::kInt8;
    case ScalarType::Byte:
      return Form::kRoot8;
    default:
      refuse("a state has another dtype than this call was prepared for");
  }
}

// Bytes of a split master's low half; 0: the master is not split.
inline int low_size_of(const Tensor& master) {
  return master.scalar_type() == ScalarType::Char ? 1 : master.scalar_type() == ScalarType::Short ? 2 : 0;
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}
template <class T>
T* data(const OptionalTensor& tensor) {
  return tensor ? data<T>(*tensor) : nullptr;
}

// ---- checks -------------------------------------------------------------------------------------------------------

// `tensor` has `numel` elements side by side, on the device of that index, which is -1 for a processor.
inline void check_bounds(const char* name, const Tensor& tensor, int64_t numel, int32_t device) {
  if (tensor.numel() == numel && tensor.is_contiguous() && tensor.get_device_index() == device) return;
  refuse(
      std::string(name) + " is not as this call was prepared for: expected " + std::to_string(numel) +
      " elements, contiguous, on the device of the other tensors; got " + std::to_string(tensor.numel()) + " elements");
}

inline void check_bounds(const char* name, const Tensor& tensor, ScalarType dtype, int64_t numel, int32_t device) {
  check_bounds(name, tensor, numel, device);
  if (tensor.scalar_type() != dtype)
    refuse(std::string(name) + " has another dtype than this call was prepared for, or than that of the first shard");
}

inline void check_bounds(
    const char* name, const OptionalTensor& tensor, ScalarType dtype, int64_t numel, int32_t device) {
  if (tensor) check_bounds(name, *tensor, dtype, numel, device);
}

// Of pack and unpack: no slot reaches over the next one, or over the bucket's end.
inline void check_slots_fit(
    const Tensors& grads, const std::vector<int64_t>& offsets, const Tensor& bucket, const OptionalTensor& nonfinite) {
  int64_t count = grads.size(), end = bucket.numel();
  int32_t device = bucket.get_device_index();
  check_bounds("bucket", bucket, end, device);
  check_bounds("nonfinite", nonfinite, ScalarType::Int, count, device);
  bool fit = offsets.size() == grads.size();
  for (int64_t i = count - 1; fit && i >= 0; --i) {
    int64_t numel = grads[i].numel();
    check_bounds("a gradient", grads[i], numel, device);
    fit = offsets[i] >= 0 && offsets[i] + numel <= end;
    end = offsets[i];
  }
  if (!fit) refuse("gradients do not fit between the offsets and the bucket's end");
}

// ---- ops ----------------------------------------------------------------------------------------------------------

// The entry of that rule in a backend's table, whose last entry has a null name.
template <class Entry>
const Entry& entry_of(const std::string& rule, const Entry* table) {
  for (const Entry* entry = table; entry->rule; ++entry)
    if (rule == entry->rule) return *entry;
  refuse("this library has no rule '" + rule + "'");
}

// How the shards are stored, by the first of them; the others are alike.
inline Stored stored_of(
    int states_of_rule, const Tensors& grads, const Tensors& masters, const Tensors& states, const Tensors& params_out,
    bool has_keys) {
  Stored stored = {dtype_of(grads[0]), DType::kFloat, !params_out.empty(), low_size_of(masters[0]), {}};
  if (stored.has_output) stored.out = dtype_of(params_out[0]);
  for (int s = 0; s < states_of_rule; ++s) stored.forms[s] = form_of(states[s]);
  if (stored.low_size && (!stored.has_output || stored.out != DType::kBFloat16))
    refuse("a split master needs param_out in bfloat16, its high half");
  if (!has_keys && std::count(stored.forms, stored.forms + kMostStates, Form::kBFloat16))
    refuse("foreach_step needs row_keys for states in bfloat16");
  return stored;
}

// `states` has those of each shard, shard after shard. params_out is empty where masters are the parameters.
template <class Backend>
void foreach_step(
    const std::string& rule, const Tensors& grads, const Tensors& masters, const Tensors& states,
    const Tensors& params_out, const Tensors& row_slots, const Tensor& hyper, const OptionalTensor& grad_scale,
    const OptionalTensor& found_inf, const OptionalTensor& nonfinite_slots, const std::optional<Tensors>& scales,
    const std::optional<Tensors>& row_keys) {
  const auto& entry = entry_of(rule, Backend::rules());
  size_t count = grads.size(), each = entry.states, scaled = 0;
  if (count == 0 || masters.size() != count || row_slots.size() != count || states.size() != count * each ||
      (row_keys && row_keys->size() != count))
    refuse("foreach_step got lists of unlike lengths");
  if (!params_out.empty() && params_out.size() != count)
    refuse("params_out must be empty, or have a tensor for each gradient");
  Stored stored = stored_of(entry.states, grads, masters, states, params_out, row_keys.has_value());
  int32_t device = grads[0].get_device_index();
  int64_t slots = hyper.size(0);
  check_bounds("hyper", hyper, ScalarType::Float, slots * kHyperColumns, device);
  check_bounds("grad_scale", grad_scale, ScalarType::Float, 1, device);
  check_bounds("found_inf", found_inf, ScalarType::Float, 1, device);
  check_bounds("nonfinite_slots", nonfinite_slots, ScalarType::Int, slots, device);
  StepArgs shard = {};
  shard.hyper = data<const HyperRow>(hyper);
  shard.grad_scale = data<const float>(grad_scale);
  shard.found_inf = data<const float>(found_inf);
  shard.nonfinite_slots = data<int32_t>(nonfinite_slots);
  shard.slots = int32_t(slots);
  std::vector<StepArgs> shards(count, shard);
  for (size_t i = 0; i < count; ++i) {
    StepArgs& of = shards[i];
    int64_t numel = of.numel = grads[i].numel(), rows = ceil_div(numel, kRow);
    check_bounds("grad", grads[i], grads[0].scalar_type(), numel, device);
    check_bounds("master", masters[i], stored.low_size ? masters[0].scalar_type() : ScalarType::Float, numel, device);
    check_bounds("row_slot", row_slots[i], ScalarType::Int, rows, device);
    of.grad = data<const void>(grads[i]);
    of.master = data<void>(masters[i]);
    of.row_slot = data<const int32_t>(row_slots[i]);
    if (stored.has_output) {
      check_bounds("param_out", params_out[i], params_out[0].scalar_type(), numel, device);
      of.param_out = data<void>(params_out[i]);
    }
    if (row_keys) {
      check_bounds("row_keys", (*row_keys)[i], ScalarType::Int, rows, device);
      of.row_keys = data<const int32_t>((*row_keys)[i]);
    }
    for (size_t s = 0; s < each; ++s) {
      const Tensor& state = states[i * each + s];
      check_bounds("a state", state, states[s].scalar_type(), numel, device);
      of.states[s] = data<void>(state);
      if (!has_scale(stored.forms[s])) continue;
      if (!scales || scaled == scales->size()) refuse("foreach_step needs a scale for each int8 or uint8 state");
      const Tensor& scale = (*scales)[scaled++];
      check_bounds("a scale", scale, ScalarType::Float, rows, device);
      of.scales[s] = data<float>(scale);
    }
  }
  if (scales && scaled != scales->size()) refuse("foreach_step got more scales than int8 and uint8 states");
  Backend::step(entry, stored, shards, grads[0]);
}

// `averages` has as many for each shard as `rates` has columns, shard after shard.
template <class Backend>
void ema(
    const Tensors& averages, const Tensors& masters, const Tensors& params, const Tensors& row_slots,
    const Tensor& rates) {
  size_t count = masters.size(), columns = rates.size(1);
  int low_size = count ? low_size_of(masters[0]) : 0;
  if (count == 0 || row_slots.size() != count || averages.size() != count * columns ||
      (low_size && params.size() != count))
    refuse("ema got lists of unlike lengths");
  int32_t device = masters[0].get_device_index();
  check_bounds("rates", rates, ScalarType::Float, rates.size(0) * columns, device);
  std::vector<EmaArgs> all;
  for (size_t i = 0; i < count; ++i) {
    int64_t numel = masters[i].numel();
    check_bounds("a master", masters[i], masters[0].scalar_type(), numel, device);
    if (low_size) check_bounds("a parameter", params[i], ScalarType::BFloat16, numel, device);
    check_bounds("row_slot", row_slots[i], ScalarType::Int, ceil_div(numel, kRow), device);
    for (size_t first = 0; first < columns; first += kMostAverages) {
      EmaArgs args = {};
      args.master = data<const void>(masters[i]);
      args.high = low_size ? data<const void>(params[i]) : nullptr;
      args.each = int(std::min<size_t>(columns - first, kMostAverages));
      for (int k = 0; k < args.each; ++k) {
        const Tensor& average = averages[i * columns + first + k];
        check_bounds("an average", average, ScalarType::Float, numel, device);
        args.averages[k] = data<float>(average);
      }
      args.rates = data<const float>(rates) + first;
      args.row_slot = data<const int32_t>(row_slots[i]);
      args.numel = numel;
      args.columns = int32_t(columns);
      args.slots = int32_t(rates.size(0));
      args.low_size = low_size;
      args.dtype = low_size ? DType::kBFloat16 : dtype_of(masters[i]);
      all.push_back(args);
    }
  }
  Backend::ema(all, masters[0]);
}

inline PackJob make_job(
    const Tensors& grads, const std::vector<int64_t>& offsets, const Tensor& bucket, double scale,
    const OptionalTensor& nonfinite) {
  check_slots_fit(grads, offsets, bucket, nonfinite);
  PackJob job = {data<void>(bucket), bucket.numel(), dtype_of(bucket), float(scale), data<int32_t>(nonfinite), {}, {}};
  for (size_t i = 0; i < grads.size(); ++i) {
    job.slots.push_back({data<void>(grads[i]), offsets[i], offsets[i] + grads[i].numel()});
    job.dtypes.push_back(dtype_of(grads[i]));
  }
  return job;
}

template <class Backend>
void pack(
    const Tensors& grads, const std::vector<int64_t>& offsets, const Tensor& bucket, double scale,
    const OptionalTensor& nonfinite) {
  Backend::pack(make_job(grads, offsets, bucket, scale, nonfinite), bucket);
}

template <class Backend>
void unpack(const Tensor& bucket, const std::vector<int64_t>& offsets, const Tensors& grads, double scale) {
  Backend::unpack(make_job(grads, offsets, bucket, scale, std::nullopt), bucket);
}

template <class Backend>
void hyper_table(
    const Tensor& coefficients, const OptionalTensor& group, const Tensor& step, const OptionalTensor& active,
    const Tensor& out) {
  HyperTableArgs args = {
      data<const double>(coefficients),
      data<const int32_t>(group),
      data<const double>(step),
      data<const bool>(active),
      data<HyperRow>(out),
      coefficients.size(1),
      out.size(0)};
  Backend::hyper_table(args, out);
}

template <class Backend, class Library>
void implement(Library& m) {
  m.impl("foreach_step", TORCH_BOX(&foreach_step<Backend>));
  m.impl("ema", TORCH_BOX(&ema<Backend>));
  m.impl("pack", TORCH_BOX(&pack<Backend>));
  m.impl("unpack", TORCH_BOX(&unpack<Backend>));
  m.impl("grad_stats", TORCH_BOX(&Backend::grad_stats));
  m.impl("hyper_table", TORCH_BOX(&hyper_table<Backend>));
}

}  // namespace zero_kernels
