// The kernel bodies of every rule, run for every thread of every block on this processor.
#include <algorithm>
#include <cstring>
#include <utility>

#include "../../../csrc/rules/adamw.h"
#include "../../../csrc/rules/amsgrad.h"
#include "../../../csrc/rules/lion.h"
#include "../../../csrc/rules/muon.h"
#include "../../../csrc/rules/sgd.h"
#include "warp.h"

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

template <class Rule>
static int run_encoded(const std::vector<EncodedShard>& shards, const Encoded& of_all, DType grad, DType out) {
  int launches = 0;
  RuleKinds<Rule>::choose(of_all, grad, out, [&](auto kinds) {
    using Kinds = typename decltype(kinds)::type;
    launch_encoded(shards, of_all, grad, out, [&](const EncodedForeachArgs& args, int64_t blocks) {
      ++launches;
      for (int64_t block = 0; block < blocks; ++block) {
        EncodedPlace at = place_of(args, block);
        for (int warp = 0; warp < kThreads / 32; ++warp) {
          if (at.whole)
            encoded_warp<Rule, true>(Kinds(args), at.shard, at.tile, warp);
          else
            encoded_warp<Rule, false>(Kinds(args), at.shard, at.tile, warp);
        }
      }
    });
  });
  return launches;
}

// What both have of a shard. of: grad, master, param_out, row_slot and its states.
static StepArgs args_of(
    void* const* of, int states, int64_t numel, const float* hyper, const float* grad_scale, const float* found_inf,
    int32_t* nonfinite_slots, int32_t slots) {
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
  args.numel = numel;
  args.slots = slots;
  return args;
}

// rule: its name, or "adam_step". tensors: of each shard grad, master, param_out, row_slot and its states. Returns how
// many launches it took.
extern "C" int step(
    const char* rule, void* const* tensors, int states, const int64_t* numels, int count, int grad_dtype, int out_dtype,
    const float* hyper, const float* grad_scale, const float* found_inf, int32_t* nonfinite_slots, int32_t slots) {
  std::vector<StepArgs> shards;
  for (int i = 0; i < count; ++i) {
    shards.push_back(
        args_of(tensors + (4 + states) * i, states, numels[i], hyper, grad_scale, found_inf, nonfinite_slots, slots));
    shards.back().out_dtype = DType(out_dtype);
  }
  DType grad = DType(grad_dtype), out = DType(out_dtype);
  if (!std::strcmp(rule, "adam_step")) return run_adam_step(shards[0], grad, out);
  if (!std::strcmp(rule, "adamw")) return run<AdamW>(shards, grad, out);
  if (!std::strcmp(rule, "amsgrad")) return run<AmsGrad>(shards, grad, out);
  if (!std::strcmp(rule, "lion")) return run<Lion>(shards, grad, out);
  if (!std::strcmp(rule, "sgd")) return run<Sgd>(shards, grad, out);
  if (!std::strcmp(rule, "sgd_plain")) return run<SgdPlain>(shards, grad, out);
  if (!std::strcmp(rule, "muon_look_ahead")) return run<MuonLookAhead>(shards, grad, out);
  if (!std::strcmp(rule, "muon_subtract")) return run<MuonSubtract>(shards, grad, out);
  return -1;
}

// The same of encoded states. forms: of kMostStates states. scales: of each shard as many, null where there is none.
// low_size: of an element of split masters; 0: they are not split. row_keys: of each shard; null: bf16 is rounded to
// nearest.
extern "C" int encoded_step(
    const char* rule, void* const* tensors, int states, const int64_t* numels, int count, int grad_dtype, int out_dtype,
    const float* hyper, const float* grad_scale, const float* found_inf, int32_t* nonfinite_slots, int32_t slots,
    const int* forms, float* const* scales, int low_size, const int32_t* const* row_keys) {
  std::vector<EncodedShard> shards;
  for (int i = 0; i < count; ++i) {
    EncodedShard shard = {};
    shard.step =
        args_of(tensors + (4 + states) * i, states, numels[i], hyper, grad_scale, found_inf, nonfinite_slots, slots);
    for (int s = 0; s < kMostStates; ++s) shard.scales[s] = scales[i * kMostStates + s];
    if (row_keys) shard.row_keys = row_keys[i];
    if (low_size) shard.low = std::exchange(shard.step.master, nullptr);
    shards.push_back(shard);
  }
  DType grad = DType(grad_dtype), out = DType(out_dtype);
  Encoded of = {{Form(forms[0]), Form(forms[1]), Form(forms[2])}, {}, nullptr, low_size, nullptr};
  if (!std::strcmp(rule, "adamw")) return run_encoded<AdamW>(shards, of, grad, out);
  if (!std::strcmp(rule, "amsgrad")) return run_encoded<AmsGrad>(shards, of, grad, out);
  if (!std::strcmp(rule, "lion")) return run_encoded<Lion>(shards, of, grad, out);
  if (!std::strcmp(rule, "sgd")) return run_encoded<Sgd>(shards, of, grad, out);
  if (!std::strcmp(rule, "sgd_plain")) return run_encoded<SgdPlain>(shards, of, grad, out);
  if (!std::strcmp(rule, "muon_look_ahead")) return run_encoded<MuonLookAhead>(shards, of, grad, out);
  if (!std::strcmp(rule, "muon_subtract")) return run_encoded<MuonSubtract>(shards, of, grad, out);
  return -1;
}

// How many of the numbers that 8 bits stand for are read wrongly, where reciprocals are off by up to `off` units of the
// last place.
extern "C" int wrong_quotients(int off) {
  int wrong = 0;
  for (int stored = -128; stored < 128; ++stored) {
    float y = over_127(float(stored)), divisor = 2.0f - magnitude(y);
    wrong += y != float(stored) / 127.0f || quick_unscaled_int8(float(stored)) != y / divisor;
    for (int units = -off; units <= off; ++units) {
      float near = bits_float(float_bits(1.0f / divisor) + units);
      wrong += float_bits(corrected_quotient(y, divisor, near)) != float_bits(y / divisor);
    }
  }
  return wrong;
}

// The same of what is stored, of `count` values below their scales. Returns how many estimates were not sure, or -1
// where a sure one was wrong.
extern "C" int64_t unsure_estimates(int form, const float* values, const float* scales, int64_t count, int off) {
  int64_t unsure = 0;
  for (int64_t i = 0; i < count; ++i)
    for (int units : {-off, 0, off}) {
      Estimate estimate(Form(form), scales[i]);
      float near = Form(form) == Form::kInt8 ? 1.0f / (scales[i] + magnitude(values[i])) : std::sqrt(values[i]);
      int32_t stored = estimate.stored(values[i], near > 0.0f ? bits_float(float_bits(near) + units) : near);
      if (stored == kUnsure)
        ++unsure;
      else if (stored != nearest(encoded(Form(form), values[i], scales[i])))
        return -1;
    }
  return unsure;
}
