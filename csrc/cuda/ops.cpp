// The ops on CUDA: launchers get torch's stream. Here alone torch's headers are included, and no kernel is: the host's
// compiler alone sees this file, through nvcc.
#include "../ops.h"

#include <torch/csrc/stable/accelerator.h>

#include "../rules/adamw.h"
#include "../rules/amsgrad.h"
#include "../rules/lion.h"
#include "../rules/muon.h"
#include "../rules/sgd.h"
#include "launch.h"
#include "launchers.h"

namespace zero_kernels {
namespace {

// Makes the device of a tensor the current one for as long as it lives, and knows the stream that torch uses there.
class OnGpu {
 public:
  OnGpu(const char* op, const Tensor& tensor) : op_(op), guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) != 0)
      refuse(std::string(op) + ": torch gave no CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }

  void zero(void* at, size_t bytes) const { check(cudaMemsetAsync(at, 0, bytes, stream_), op_); }

  cudaStream_t stream() const { return stream_; }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

struct StepEntry {
  const char* rule;
  int states;
  const RunStep* run;
};
const StepEntry kSteps[] = {
    {"adamw", AdamW::kStates, &step_adamw},
    {"amsgrad", AmsGrad::kStates, &step_amsgrad},
    {"lion", Lion::kStates, &step_lion},
    {"sgd", Sgd::kStates, &step_sgd},
    {"sgd_plain", SgdPlain::kStates, &step_sgd_plain},
    {"muon_look_ahead", MuonLookAhead::kStates, &step_muon_look_ahead},
    {"muon_subtract", MuonSubtract::kStates, &step_muon_subtract},
    {}};

struct Cuda {
  static const StepEntry* rules() { return kSteps; }

  static void step(const StepEntry& entry, const Stored& stored, std::vector<StepArgs>& shards, const Tensor& on) {
    (*entry.run)(OnGpu("foreach_step", on).stream(), stored, shards);
  }

  static void ema(const std::vector<EmaArgs>& all, const Tensor& on) {
    OnGpu on_gpu("ema", on);
    for (const EmaArgs& args : all) run_ema(on_gpu.stream(), args);
  }

  static void pack(const PackJob& job, const Tensor& on) {
    OnGpu on_gpu("pack", on);
    if (job.nonfinite) on_gpu.zero(job.nonfinite, job.slots.size() * sizeof(int32_t));
    run_pack(on_gpu.stream(), job);
  }

  static void unpack(const PackJob& job, const Tensor& on) { run_unpack(OnGpu("unpack", on).stream(), job); }

  static Tensor grad_stats(const Tensors& tensors, double norm_type) {
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

  static void hyper_table(const HyperTableArgs& args, const Tensor& on) {
    run_hyper_table(OnGpu("hyper_table", on).stream(), args);
  }
};

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

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CUDA, m) { zero_kernels::implement<zero_kernels::Cuda>(m); }

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("cuda_archs", TORCH_BOX(&zero_kernels::cuda_archs));
  m.impl("cuda_problem", TORCH_BOX(&zero_kernels::cuda_problem));
}
