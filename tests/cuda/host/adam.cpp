// adam_step's kernel body, run for every thread of every block on this processor.
#include "../../../csrc/cuda/adam.cu"

using namespace zero_kernels;

extern "C" void adam_step(
    const void* grad, int grad_dtype, float* master, float* exp_avg, float* exp_avg_sq, void* param_out, int out_dtype,
    const int32_t* row_slot, const float* hyper, const float* grad_scale, const float* found_inf,
    int32_t* nonfinite_slots, int64_t numel, int32_t slots) {
  const HyperRow* rows = reinterpret_cast<const HyperRow*>(hyper);
  AdamStepArgs args = {grad,       master,    exp_avg,         exp_avg_sq, param_out, row_slot, rows,
                       grad_scale, found_inf, nonfinite_slots, numel,      slots,     false};
  launch(args, DType(grad_dtype), DType(out_dtype), [](auto g, auto out, const AdamStepArgs& args, int64_t blocks) {
    for (int64_t block = 0; block < blocks; ++block)
      for (int thread = 0; thread < kThreads; ++thread)
        adam_step_thread<typename decltype(g)::type, typename decltype(out)::type>(args, block, thread);
  });
}
