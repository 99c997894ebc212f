// What a call without Python's checks, as those of zero_kernels/prepared.py are, could read or write out of bounds.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "hyper_table.h"
#include "rules/codecs.h"
#include "stable.h"

namespace zero_kernels {

// Raises unless `tensor` is `numel` elements side by side on the device of that index, which is -1 for a processor.
inline void check_bounds(const char* name, const Tensor& tensor, int64_t numel, int32_t device) {
  if (tensor.numel() == numel && tensor.is_contiguous() && tensor.get_device_index() == device) return;
  throw std::runtime_error(
      std::string("zero_kernels: ") + name + " is not as this call was prepared for: expected " +
      std::to_string(numel) + " elements, contiguous, on the device of the other tensors; got " +
      std::to_string(tensor.numel()) + " elements");
}

inline void check_bounds(const char* name, const Tensor& tensor, ScalarType dtype, int64_t numel, int32_t device) {
  check_bounds(name, tensor, numel, device);
  if (tensor.scalar_type() != dtype)
    throw std::runtime_error(
        std::string("zero_kernels: ") + name + " has another dtype than this call was prepared for");
}

inline void check_bounds(
    const char* name, const std::optional<Tensor>& tensor, ScalarType dtype, int64_t numel, int32_t device) {
  if (tensor) check_bounds(name, *tensor, dtype, numel, device);
}

// Bytes of a split master's low half; 0: the master is not split.
inline int low_size_of(const Tensor& master) {
  return master.scalar_type() == ScalarType::Char ? 1 : master.scalar_type() == ScalarType::Short ? 2 : 0;
}

// What an update of one shard is given.
struct StepTensors {
  const Tensor &grad, &master;
  const Tensor* states[kMostStates];  // as many as the rule has
  int state_count;
  const Tensor* param_out;  // or null
  const Tensor &row_slot, &hyper;
  const std::optional<Tensor>&grad_scale, &found_inf, &nonfinite_slots;
  const Tensor* scales[kMostStates] = {};  // of each state, or null
  const Tensor* row_keys = nullptr;

  bool is_split() const { return low_size_of(master) != 0; }
  DType param_dtype() const { return param_out ? dtype_of(*param_out) : DType::kFloat; }
};

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
      throw std::runtime_error("zero_kernels: a state has another dtype than this call was prepared for");
  }
}

// Of a checked call.
inline Encoded encoded_of(const StepTensors& of) {
  Encoded encoded = {};
  for (int i = 0; i < of.state_count; ++i) {
    encoded.forms[i] = form_of(*of.states[i]);
    encoded.scales[i] = of.scales[i] ? data<float>(*of.scales[i]) : nullptr;
  }
  encoded.low = of.is_split() ? data<void>(of.master) : nullptr;
  encoded.low_size = low_size_of(of.master);
  encoded.row_keys = of.row_keys ? data<const int32_t>(*of.row_keys) : nullptr;
  return encoded;
}

inline void check_step(const StepTensors& of, bool in_any_form = false) {
  int64_t numel = of.grad.numel(), slots = of.hyper.size(0);
  int32_t device = of.grad.get_device_index();
  check_bounds("grad", of.grad, numel, device);
  bool split = in_any_form && of.is_split();
  check_bounds("master", of.master, split ? of.master.scalar_type() : ScalarType::Float, numel, device);
  for (int i = 0; i < of.state_count; ++i) {
    if (in_any_form)
      check_bounds("a state", *of.states[i], numel, device);
    else
      check_bounds("a state", *of.states[i], ScalarType::Float, numel, device);
    if (of.scales[i]) check_bounds("a scale", *of.scales[i], ScalarType::Float, ceil_div(numel, kRow), device);
  }
  if (of.param_out) check_bounds("param_out", *of.param_out, numel, device);
  if (split && (!of.param_out || of.param_dtype() != DType::kBFloat16))
    throw std::runtime_error("zero_kernels: a split master needs param_out in bfloat16, its high half");
  check_bounds("row_slot", of.row_slot, ScalarType::Int, ceil_div(numel, kRow), device);
  check_bounds("hyper", of.hyper, ScalarType::Float, slots * kHyperColumns, device);
  check_bounds("grad_scale", of.grad_scale, ScalarType::Float, 1, device);
  check_bounds("found_inf", of.found_inf, ScalarType::Float, 1, device);
  check_bounds("nonfinite_slots", of.nonfinite_slots, ScalarType::Int, slots, device);
  if (of.row_keys) check_bounds("row_keys", *of.row_keys, ScalarType::Int, ceil_div(numel, kRow), device);
}

// What foreach_step is given, shard by shard and checked: each has `state_count` of `states`, shard after shard.
// params_out is empty where masters are the parameters.
inline std::vector<StepTensors> check_foreach_step(
    int state_count, const std::vector<Tensor>& grads, const std::vector<Tensor>& masters,
    const std::vector<Tensor>& states, const std::vector<Tensor>& params_out, const std::vector<Tensor>& row_slots,
    const Tensor& hyper, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots, const std::optional<std::vector<Tensor>>& scales,
    const std::optional<std::vector<Tensor>>& row_keys) {
  size_t count = grads.size(), scaled = 0;
  if (masters.size() != count || row_slots.size() != count || states.size() != count * state_count ||
      (row_keys && row_keys->size() != count))
    throw std::runtime_error("zero_kernels: foreach_step got lists of unlike lengths");
  if (!params_out.empty() && params_out.size() != count)
    throw std::runtime_error("zero_kernels: params_out must be empty, or have a tensor for each gradient");
  std::vector<StepTensors> shards;
  shards.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Tensor* param_out = params_out.empty() ? nullptr : &params_out[i];
    StepTensors shard = {grads[i],     masters[i], {},         state_count, param_out,
                         row_slots[i], hyper,      grad_scale, found_inf,   nonfinite_slots};
    for (int s = 0; s < state_count; ++s) {
      shard.states[s] = &states[i * state_count + s];
      if (form_of(*shard.states[s]) == Form::kBFloat16 && !row_keys)
        throw std::runtime_error("zero_kernels: foreach_step needs row_keys for states in bfloat16");
      if (!has_scale(form_of(*shard.states[s]))) continue;
      if (!scales || scaled == scales->size())
        throw std::runtime_error("zero_kernels: foreach_step needs a scale for each int8 or uint8 state");
      shard.scales[s] = &(*scales)[scaled++];
    }
    if (row_keys) shard.row_keys = &(*row_keys)[i];
    check_step(shard, true);
    shards.push_back(shard);
    bool alike = masters[i].scalar_type() == masters[0].scalar_type();
    for (int s = 0; s < state_count; ++s) alike &= form_of(*shard.states[s]) == form_of(states[s]);
    if (!alike || grads[i].get_device_index() != grads[0].get_device_index() ||
        dtype_of(grads[i]) != dtype_of(grads[0]) || shard.param_dtype() != shards[0].param_dtype())
      throw std::runtime_error("zero_kernels: the shards of foreach_step are not alike in device and dtypes");
  }
  if (scales && scaled != scales->size())
    throw std::runtime_error("zero_kernels: foreach_step got more scales than int8 and uint8 states");
  return shards;
}

// Of ema: `averages` has as many for each shard as `rates` has columns, shard after shard.
inline void check_ema(
    const std::vector<Tensor>& averages, const std::vector<Tensor>& masters, const std::vector<Tensor>& params,
    const std::vector<Tensor>& row_slots, const Tensor& rates) {
  size_t count = masters.size(), each = rates.size(1);
  int low_size = low_size_of(masters.at(0));
  if (row_slots.size() != count || averages.size() != count * each || (low_size && params.size() != count))
    throw std::runtime_error("zero_kernels: ema got lists of unlike lengths");
  int32_t device = masters[0].get_device_index();
  check_bounds("rates", rates, ScalarType::Float, rates.size(0) * each, device);
  for (size_t i = 0; i < count; ++i) {
    int64_t numel = masters[i].numel();
    check_bounds("a master", masters[i], masters[0].scalar_type(), numel, device);
    if (low_size) check_bounds("a parameter", params[i], ScalarType::BFloat16, numel, device);
    check_bounds("row_slot", row_slots[i], ScalarType::Int, ceil_div(numel, kRow), device);
    for (size_t k = 0; k < each; ++k)
      check_bounds("an average", averages[i * each + k], ScalarType::Float, numel, device);
  }
}

// The entry of that rule in a backend's table, whose last entry has a null name.
template <class Entry>
const Entry& entry_of(const std::string& rule, const Entry* table) {
  for (const Entry* entry = table; entry->rule; ++entry)
    if (rule == entry->rule) return *entry;
  throw std::runtime_error("zero_kernels: this library has no rule '" + rule + "'");
}

// The tensors of hyper_table as plain pointers.
inline HyperTableArgs hyper_table_args(
    const Tensor& coefficients, const std::optional<Tensor>& group, const Tensor& step,
    const std::optional<Tensor>& active, const Tensor& out) {
  return {
      data<const double>(coefficients),
      group ? data<const int32_t>(*group) : nullptr,
      data<const double>(step),
      active ? data<const bool>(*active) : nullptr,
      data<HyperRow>(out),
      coefficients.size(1),
      out.size(0)};
}

// Of pack and unpack: no slot reaches over the next one, or over the bucket's end.
inline void check_slots_fit(
    const std::vector<Tensor>& grads, const std::vector<int64_t>& offsets, const Tensor& bucket,
    const std::optional<Tensor>& nonfinite) {
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
  if (!fit) throw std::runtime_error("zero_kernels: gradients do not fit between the offsets and the bucket's end");
}

}  // namespace zero_kernels
