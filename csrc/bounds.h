// What a call without Python's checks, as those of zero_kernels/prepared.py are, could read or write out of bounds.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "adam_math.h"
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

inline void check_adam_step(
    const Tensor& grad, const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const std::optional<Tensor>& param_out, const Tensor& row_slot, const Tensor& hyper,
    const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots) {
  int64_t numel = grad.numel(), slots = hyper.size(0);
  int32_t device = grad.get_device_index();
  check_bounds("grad", grad, numel, device);
  check_bounds("master", master, ScalarType::Float, numel, device);
  check_bounds("exp_avg", exp_avg, ScalarType::Float, numel, device);
  check_bounds("exp_avg_sq", exp_avg_sq, ScalarType::Float, numel, device);
  if (param_out) check_bounds("param_out", *param_out, numel, device);
  check_bounds("row_slot", row_slot, ScalarType::Int, ceil_div(numel, kRow), device);
  check_bounds("hyper", hyper, ScalarType::Float, slots * kHyperColumns, device);
  check_bounds("grad_scale", grad_scale, ScalarType::Float, 1, device);
  check_bounds("found_inf", found_inf, ScalarType::Float, 1, device);
  check_bounds("nonfinite_slots", nonfinite_slots, ScalarType::Int, slots, device);
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
