// adam_step and foreach_step on CUDA.
#include "../bounds.h"
#include "../rules/adamw.h"
#include "../rules/amsgrad.h"
#include "../rules/lion.h"
#include "../rules/sgd.h"
#include "average.h"
#include "launch.h"
#include "step_args.h"

namespace zero_kernels {
namespace {

struct StepEntry {
  const char* rule;
  int states;
  const RunStep* run;
  const RunEncodedStep* run_encoded;
};
const StepEntry kSteps[] = {
    {"adamw", AdamW::kStates, &step_adamw, &encoded_adamw},
    {"amsgrad", AmsGrad::kStates, &step_amsgrad, &encoded_amsgrad},
    {"lion", Lion::kStates, &step_lion, &encoded_lion},
    {"sgd", Sgd::kStates, &step_sgd, &encoded_sgd},
    {"sgd_plain", SgdPlain::kStates, &step_sgd_plain, &encoded_sgd_plain},
    {}};

StepArgs args_of(const StepTensors& of) {
  StepArgs args = {
      data<const void>(of.grad),
      of.is_split() ? nullptr : data<float>(of.master),
      {},
      of.param_out ? data<void>(*of.param_out) : nullptr,
      data<const int32_t>(of.row_slot),
      data<const HyperRow>(of.hyper),
      of.grad_scale ? data<const float>(*of.grad_scale) : nullptr,
      of.found_inf ? data<const float>(*of.found_inf) : nullptr,
      of.nonfinite_slots ? data<int32_t>(*of.nonfinite_slots) : nullptr,
      of.row_stats ? data<float>(*of.row_stats) : nullptr,
      of.grad.numel(),
      static_cast<int32_t>(of.hyper.size(0)),
      false,
      of.param_dtype()};
  for (int i = 0; i < of.state_count; ++i) args.states[i] = data<float>(*of.states[i]);
  return args;
}

Averages averages_of(const std::vector<StepTensors>& given) {
  const StepTensors& first = given[0];
  Averages args = {
      data<const HyperRow>(first.hyper),
      data<const float>(*first.rates),
      first.found_inf ? data<const float>(*first.found_inf) : nullptr,
      first.average_count,
      {}};
  for (const StepTensors& of : given)
    for (int k = 0; k < of.average_count; ++k)
      args.of.push_back(
          {of.is_split() ? data<const void>(*of.param_out) : data<const void>(of.master), encoded_of(of).low,
           data<float>(of.averages[k]), data<const int32_t>(of.row_slot), of.grad.numel(), k, false});
  return args;
}

void adam_step(
    const Tensor& grad, const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
    const std::optional<Tensor>& param_out, const Tensor& row_slot, const Tensor& hyper,
    const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots) {
  StepTensors of = {
      grad,       master,    {&exp_avg, &exp_avg_sq}, 2, param_out ? &*param_out : nullptr, row_slot, hyper,
      grad_scale, found_inf, nonfinite_slots};
  check_step(of);
  Launch on_gpu("adam_step", grad);
  step_adamw(on_gpu.stream(), "adam_step", {args_of(of)}, dtype_of(grad), of.param_dtype());
}

void foreach_step(
    const std::string& rule, const std::vector<Tensor>& grads, const std::vector<Tensor>& masters,
    const std::vector<Tensor>& states, const std::vector<Tensor>& params_out, const std::vector<Tensor>& row_slots,
    const Tensor& hyper, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots, const std::optional<std::vector<Tensor>>& averages,
    const std::optional<Tensor>& rates, const std::optional<std::vector<Tensor>>& row_stats,
    const std::optional<std::vector<Tensor>>& scales) {
  const StepEntry& step = entry_of(rule, kSteps);
  std::vector<StepTensors> given = check_foreach_step(
      step.states, grads, masters, states, params_out, row_slots, hyper, grad_scale, found_inf, nonfinite_slots,
      averages, rates, row_stats, scales);
  Launch on_gpu("foreach_step", grads.at(0));
  std::vector<StepArgs> shards;
  shards.reserve(given.size());
  for (const StepTensors& of : given) shards.push_back(args_of(of));
  for (const StepArgs& shard : shards)  // without slots no row is updated, and nothing is launched
    if (shard.row_stats && shard.slots == 0)
      on_gpu.zero(shard.row_stats, ceil_div(shard.numel, kRow) * kRowStats * sizeof(float));
  DType grad = dtype_of(grads[0]), out = given[0].param_dtype();
  Encoded forms = encoded_of(given[0]);  // those of all shards
  if (given[0].is_split() || forms.any()) {
    std::vector<EncodedShard> encoded;
    for (size_t i = 0; i < given.size(); ++i) {
      Encoded of = encoded_of(given[i]);
      encoded.push_back({shards[i], {of.scales[0], of.scales[1], of.scales[2]}, of.low});
    }
    (*step.run_encoded)(on_gpu.stream(), encoded, forms.forms, grad, out);
  } else {
    (*step.run)(on_gpu.stream(), "foreach_step", shards, grad, out);
  }
  if (given[0].average_count) run_average(on_gpu.stream(), averages_of(given));
}

}  // namespace
}  // namespace zero_kernels

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CUDA, m) {
  m.impl("adam_step", TORCH_BOX(&zero_kernels::adam_step));
  m.impl("foreach_step", TORCH_BOX(&zero_kernels::foreach_step));
}
