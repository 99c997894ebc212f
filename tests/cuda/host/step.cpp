// The kernel bodies of every rule, run for every thread of every block on this processor.
#include <cstring>

#include "../../../csrc/cuda/step.h"
#include "../../../csrc/rules/adamw.h"
#include "../../../csrc/rules/amsgrad.h"
#include "../../../csrc/rules/lion.h"
#include "../../../csrc/rules/sgd.h"

using namespace zero_kernels;

template <class Rule>
static int run(const std::vector<StepArgs>& shards, DType grad, DType out, bool foreach) {
  int launches = 0;
  auto all_threads = [&](int64_t blocks, auto thread_of) {
    ++launches;
    for (int64_t block = 0; block < blocks; ++block)
      for (int thread = 0; thread < kThreads; ++thread) thread_of(block, thread);
  };
  if (!foreach) {
    launch(shards[0], grad, out, [&](auto g, auto o, const StepArgs& args, int64_t blocks) {
      all_threads(blocks, [&](int64_t block, int thread) {
        step_thread<Rule, typename decltype(g)::type, typename decltype(o)::type>(args, block, thread);
      });
    });
    return launches;
  }
  launch_foreach(shards, grad, out, [&](auto g, auto o, const ForeachArgs& args, int64_t blocks) {
    all_threads(blocks, [&](int64_t block, int thread) {
      foreach_step_thread<Rule, typename decltype(g)::type, typename decltype(o)::type>(args, block, thread);
    });
  });
  return launches;
}

// tensors: of each shard grad, master, param_out, row_slot and its states. `foreach`: by the kernel of several shards.
// Returns how many launches it took.
extern "C" int step(
    const char* rule, int foreach, void* const* tensors, int states, const int64_t* numels, int count, int grad_dtype,
    int out_dtype, const float* hyper, const float* grad_scale, const float* found_inf, int32_t* nonfinite_slots,
    int32_t slots) {
  std::vector<StepArgs> shards;
  for (int i = 0; i < count; ++i) {
    void* const* of = tensors + (4 + states) * i;
    StepArgs args = {};
    args.grad = of[0];
    args.master = static_cast<float*>(of[1]);
    for (int s = 0; s < states; ++s) args.states[s] = static_cast<float*>(of[4 + s]);
    args.param_out = of[2];
    args.row_slot = static_cast<const int32_t*>(of[3]);
    args.hyper = reinterpret_cast<const HyperRow*>(hyper);
    args.grad_scale = grad_scale;
    args.found_inf = found_inf;
    args.nonfinite_slots = nonfinite_slots;
    args.numel = numels[i];
    args.slots = slots;
    shards.push_back(args);
  }
  DType grad = DType(grad_dtype), out = DType(out_dtype);
  if (!std::strcmp(rule, "adamw")) return run<AdamW>(shards, grad, out, foreach);
  if (!std::strcmp(rule, "amsgrad")) return run<AmsGrad>(shards, grad, out, foreach);
  if (!std::strcmp(rule, "lion")) return run<Lion>(shards, grad, out, foreach);
  if (!std::strcmp(rule, "sgd")) return run<Sgd>(shards, grad, out, foreach);
  if (!std::strcmp(rule, "sgd_plain")) return run<SgdPlain>(shards, grad, out, foreach);
  return -1;
}
