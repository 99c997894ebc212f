// The kernel bodies of every rule, run for every thread of every block on this processor.
#include <cstring>

#include "../../../csrc/cuda/step.h"
#include "../../../csrc/rules/adamw.h"
#include "../../../csrc/rules/amsgrad.h"
#include "../../../csrc/rules/lion.h"
#include "../../../csrc/rules/sgd.h"

using namespace zero_kernels;

template <class Thread>
static void for_threads(int64_t blocks, Thread run) {
  for (int64_t block = 0; block < blocks; ++block)
    for (int thread = 0; thread < kThreads; ++thread) run(block, thread);
}

static int run_adam_step(const StepArgs& shard, DType grad, DType out) {
  launch(shard, grad, out, [](auto g, auto o, const StepArgs& args, int64_t blocks) {
    for_threads(blocks, [&](int64_t block, int thread) {
      step_thread<AdamW, typename decltype(g)::type, typename decltype(o)::type>(args, block, thread);
    });
  });
  return 1;
}

template <class Rule>
static int run(const std::vector<StepArgs>& shards, DType grad, DType out) {
  int launches = 0;
  launch_foreach(shards, grad, out, [&](auto g, auto o, const ForeachArgs& args, int64_t blocks) {
    ++launches;
    for_threads(blocks, [&](int64_t block, int thread) {
      foreach_step_thread<Rule, typename decltype(g)::type, typename decltype(o)::type>(args, block, thread);
    });
  });
  return launches;
}

// rule: its name, or "adam_step". tensors: of each shard grad, master, param_out, row_slot and its states. Returns how
// many launches it took.
extern "C" int step(
    const char* rule, void* const* tensors, int states, const int64_t* numels, int count, int grad_dtype, int out_dtype,
    const float* hyper, const float* grad_scale, const float* found_inf, int32_t* nonfinite_slots, int32_t slots) {
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
  if (!std::strcmp(rule, "adam_step")) return run_adam_step(shards[0], grad, out);
  if (!std::strcmp(rule, "adamw")) return run<AdamW>(shards, grad, out);
  if (!std::strcmp(rule, "amsgrad")) return run<AmsGrad>(shards, grad, out);
  if (!std::strcmp(rule, "lion")) return run<Lion>(shards, grad, out);
  if (!std::strcmp(rule, "sgd")) return run<Sgd>(shards, grad, out);
  if (!std::strcmp(rule, "sgd_plain")) return run<SgdPlain>(shards, grad, out);
  return -1;
}
