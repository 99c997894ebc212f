// adam_step's kernel bodies, run for every thread of every block on this processor.
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

// tensors: for each shard grad, master, exp_avg, exp_avg_sq, param_out and row_slot. Returns how many launches it took.
extern "C" int foreach_adam_step(
    void* const* tensors, const int64_t* numels, int count, int grad_dtype, int out_dtype, const float* hyper,
    const float* grad_scale, const float* found_inf, int32_t* nonfinite_slots, int32_t slots) {
  const HyperRow* rows = reinterpret_cast<const HyperRow*>(hyper);
  std::vector<AdamStepArgs> shards;
  for (int i = 0; i < count; ++i) {
    void* const* of = tensors + 6 * i;
    auto fp32 = [&](int at) { return static_cast<float*>(of[at]); };
    auto row_slot = static_cast<const int32_t*>(of[5]);
    shards.push_back(
        {of[0], fp32(1), fp32(2), fp32(3), of[4], row_slot, rows, grad_scale, found_inf, nonfinite_slots, numels[i],
         slots, false});
  }
  int launches = 0;
  launch_foreach(
      shards, DType(grad_dtype), DType(out_dtype), [&](auto g, auto out, const ForeachArgs& args, int64_t blocks) {
        ++launches;
        for (int64_t block = 0; block < blocks; ++block)
          for (int thread = 0; thread < kThreads; ++thread)
            foreach_adam_step_thread<typename decltype(g)::type, typename decltype(out)::type>(args, block, thread);
      });
  return launches;
}
