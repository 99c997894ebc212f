// The ops on CUDA: tensors become plain pointers, and launchers get torch's stream. Here alone torch's headers are
// included, and no kernel is: the host's compiler alone sees this file, through nvcc.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../bounds.h"
#include "../rules/adamw.h"
#include "../rules/amsgrad.h"
#include "../rules/lion.h"
#include "../rules/muon.h"
#include "../rules/sgd.h"
#include "../stable.h"
#include "ema.h"
#include "grad_stats.h"
#include "hyper_table.h"
#include "launch.h"
#include "pack.h"
#include "step_args.h"

namespace zero_kernels {
namespace {

// Makes the device of a tensor the current one for as long as it lives, and knows the stream that torch uses there.
class OnGpu {
 public:
  OnGpu(const char* op, const Tensor& tensor) : op_(op), guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != 0)
      throw std::runtime_error(std::string("zero_kernels: ") + op + ": torch gave no CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }

  void zero(void* at, size_t bytes) const { check(cudaMemsetAsync(at, 0, bytes, stream_), op_); }

  cudaStream_t stream() const { return stream_; }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// ---- adam_step and foreach_step -----------------------------------------------------------------------------------

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
    {"muon_look_ahead", MuonLookAhead::kStates, &step_muon_look_ahead, &encoded_muon_look_ahead},
    {"muon_subtract", MuonSubtract::kStates, &step_muon_subtract, &encoded_muon_subtract},
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
      of.grad.numel(),
      static_cast<int32_t>(of.hyper.size(0)),
      false,
      of.param_dtype()};
  for (int i = 0; i < of.state_count; ++i) args.states[i] = data<float>(*of.states[i]);
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
  OnGpu on_gpu("adam_step", grad);
  step_adamw(on_gpu.stream(), "adam_step", {args_of(of)}, dtype_of(grad), of.param_dtype());
}

void foreach_step(
    const std::string& rule, const std::vector<Tensor>& grads, const std::vector<Tensor>& masters,
    const std::vector<Tensor>& states, const std::vector<Tensor>& params_out, const std::vector<Tensor>& row_slots,
    const Tensor& hyper, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& nonfinite_slots, const std::optional<std::vector<Tensor>>& scales,
    const std::optional<std::vector<Tensor>>& row_keys) {
  const StepEntry& step = entry_of(rule, kSteps);
  std::vector<StepTensors> given = check_foreach_step(
      step.states, grads, masters, states, params_out, row_slots, hyper, grad_scale, found_inf, nonfinite_slots, scales,
      row_keys);
  OnGpu on_gpu("foreach_step", grads.at(0));
  std::vector<StepArgs> shards;
  shards.reserve(given.size());
  for (const StepTensors& of : given) shards.push_back(args_of(of));
  DType grad = dtype_of(grads[0]), out = given[0].param_dtype();
  Encoded of_all = encoded_of(given[0]);
  if (of_all.any()) {
    std::vector<EncodedShard> encoded;
    for (size_t i = 0; i < given.size(); ++i) {
      Encoded of = encoded_of(given[i]);
      encoded.push_back({shards[i], {of.scales[0], of.scales[1], of.scales[2]}, of.low, of.row_keys});
    }
    (*step.run_encoded)(on_gpu.stream(), encoded, of_all, grad, out);
  } else {
    (*step.run)(on_gpu.stream(), "foreach_step", shards, grad, out);
  }
}

// ---- ema ----------------------------------------------------------------------------------------------------------

void ema(
    const std::vector<Tensor>& averages, const std::vector<Tensor>& masters, const std::vector<Tensor>& params,
    const std::vector<Tensor>& row_slots, const Tensor& rates) {
  check_ema(averages, masters, params, row_slots, rates);
  OnGpu on_gpu("ema", masters.at(0));
  int low_size = low_size_of(masters[0]), columns = int(rates.size(1));
  for (size_t i = 0; i < masters.size(); ++i)
    for (int first = 0; first < columns; first += kMostAverages) {
      EmaArgs args = {};
      args.master = data<const void>(masters[i]);
      args.high = low_size ? data<const void>(params[i]) : nullptr;
      args.each = std::min(columns - first, kMostAverages);
      for (int k = 0; k < args.each; ++k) args.averages[k] = data<float>(averages[i * columns + first + k]);
      args.rates = data<const float>(rates) + first;
      args.row_slot = data<const int32_t>(row_slots[i]);
      args.numel = masters[i].numel();
      args.columns = columns;
      args.slots = int32_t(rates.size(0));
      args.low_size = low_size;
      args.dtype = low_size ? DType::kBFloat16 : dtype_of(masters[i]);
      run_ema(on_gpu.stream(), args);
    }
}

// ---- grad_stats ---------------------------------------------------------------------------------------------------

Tensor grad_stats(const std::vector<Tensor>& tensors, double norm_type) {
  std::vector<Shard> shards;
  std::vector<DType> dtypes;
  int64_t blocks = 0;
  for (const Tensor& tensor : tensors) {
    shards.push_back({data<const void>(tensor), tensor.numel(), 0});
    dtypes.push_back(dtype_of(tensor));
    blocks += ceil_div(tensor.numel(), kStatsBlock);
  }
  OnGpu on_gpu("grad_stats", tensors.at(0));
  // The allocator takes the scratch back once the launches are queued, and gives it only to later work of the stream.
  Tensor out = torch::stable::new_empty(tensors[0], {int64_t(shards.size()), 2}, ScalarType::Float);
  Tensor scratch = torch::stable::new_empty(tensors[0], {2 * blocks}, ScalarType::Float);
  float* partials = data<float>(scratch);
  StatsOutput output = {partials, reinterpret_cast<int32_t*>(partials + blocks), data<float>(out)};
  run_grad_stats(on_gpu.stream(), shards, dtypes, norm_type, output);
  return out;
}

// ---- hyper_table --------------------------------------------------------------------------------------------------

void hyper_table(
    const Tensor& coefficients, const std::optional<Tensor>& group, const Tensor& step,
    const std::optional<Tensor>& active, const Tensor& out) {
  run_hyper_table(OnGpu("hyper_table", out).stream(), hyper_table_args(coefficients, group, step, active, out));
}

// ---- pack and unpack ----------------------------------------------------------------------------------------------

PackJob make_job(
    const std::vector<Tensor>& grads, const std::vector<int64_t>& offsets, const Tensor& bucket, double scale) {
  PackJob job = {data<void>(bucket), bucket.numel(), dtype_of(bucket), float(scale), nullptr, {}, {}};
  for (size_t i = 0; i < grads.size(); ++i) {
    job.slots.push_back({data<void>(grads[i]), offsets[i], offsets[i] + grads[i].numel()});
    job.dtypes.push_back(dtype_of(grads[i]));
  }
  return job;
}

void pack(
    const std::vector<Tensor>& grads, const std::vector<int64_t>& offsets, const Tensor& bucket, double scale,
    const std::optional<Tensor>& nonfinite) {
  check_slots_fit(grads, offsets, bucket, nonfinite);
  PackJob job = make_job(grads, offsets, bucket, scale);
  OnGpu on_gpu("pack", bucket);
  if (nonfinite && nonfinite->numel() != 0) {
    job.nonfinite = data<int32_t>(*nonfinite);
    on_gpu.zero(job.nonfinite, grads.size() * sizeof(int32_t));
  }
  run_pack(on_gpu.stream(), job);
}

void unpack(const Tensor& bucket, const std::vector<int64_t>& offsets, const std::vector<Tensor>& grads, double scale) {
  check_slots_fit(grads, offsets, bucket, std::nullopt);
  run_unpack(OnGpu("unpack", bucket).stream(), make_job(grads, offsets, bucket, scale));
}

// ---- what the library needs of the machine ------------------------------------------------------------------------

// The architectures that it holds code for, as TORCH_CUDA_ARCH_LIST names them.
std::string cuda_archs() { return ZK_CUDA_ARCHS; }

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

// Empty, or why the driver cannot run it. A driver runs what was built for its own major version of CUDA or an older.
std::string cuda_problem() {
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  if (driver / 1000 >= CUDART_VERSION / 1000) return "";
  return "built by CUDA " + version(CUDART_VERSION) + ", but the driver is of CUDA " + version(driver) +
         ": install again with that CUDA's nvcc, or update the driver";
}

}  // namespace
}  // namespace zero_kernels

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CUDA, m) {
  m.impl("adam_step", TORCH_BOX(&zero_kernels::adam_step));
  m.impl("foreach_step", TORCH_BOX(&zero_kernels::foreach_step));
  m.impl("ema", TORCH_BOX(&zero_kernels::ema));
  m.impl("grad_stats", TORCH_BOX(&zero_kernels::grad_stats));
  m.impl("hyper_table", TORCH_BOX(&zero_kernels::hyper_table));
  m.impl("pack", TORCH_BOX(&zero_kernels::pack));
  m.impl("unpack", TORCH_BOX(&zero_kernels::unpack));
}

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("cuda_archs", TORCH_BOX(&zero_kernels::cuda_archs));
  m.impl("cuda_problem", TORCH_BOX(&zero_kernels::cuda_problem));
}
