// The kernel bodies of every rule, run for every thread of every block on this processor.
#include <algorithm>
#include <cstring>

#include "../../../csrc/rules/adamw.h"
#include "../../../csrc/rules/amsgrad.h"
#include "../../../csrc/rules/lion.h"
#include "../../../csrc/rules/muon.h"
#include "../../../csrc/rules/sgd.h"
#include "warp.h"

using namespace zero_kernels;

template <class Rule>
static int run(const Stored& stored, std::vector<StepArgs>& shards) {
  int launches = 0;
  int elements = std::is_same_v<Rule, AdamW> && QuickWays::choose(stored, [](auto) {}) ? kEight : kQuad;
  for_launches(stored, shards, elements, [&](const ForeachArgs& args, int64_t blocks) {
    ++launches;
    for (int64_t block = 0; block < blocks; ++block) {
      Place at = place_of(args, block);
      for (int64_t i = at.tile; i < at.tile + kTile; i += kQuads * kRow) {
        bool done = false;
        if (std::is_same_v<Rule, AdamW> && at.whole)
          QuickWays::choose(stored, [&](auto way) { done = quick_rows<typename decltype(way)::type>(at.shard, i); });
        if (!done) step_rows<Rule>(stored, at.shard, i, at.whole);
      }
    }
  });
  return launches;
}

// tensors: of each shard grad, master, param_out, row_slot and its states. forms: of kMostStates states. scales: of
// each shard as many, null where there is none. low_size: of an element of split masters; 0: they are not split.
// row_keys: of each shard, or null. Returns how many launches it took.
extern "C" int step(
    const char* rule, void* const* tensors, int states, const int64_t* numels, int count, int grad_dtype, int out_dtype,
    const float* hyper, const float* grad_scale, const float* found_inf, int32_t* nonfinite_slots, int32_t slots,
    const int* forms, float* const* scales, int low_size, const int32_t* const* row_keys) {
  Stored stored = {DType(grad_dtype), DType(out_dtype), false, low_size, {}};
  for (int s = 0; s < kMostStates; ++s) stored.forms[s] = Form(forms[s]);
  std::vector<StepArgs> shards;
  for (int i = 0; i < count; ++i) {
    void* const* of = tensors + (4 + states) * i;
    stored.has_output |= of[2] != nullptr;  // an empty tensor's address is null, too
    StepArgs args = {};
    args.grad = of[0];
    args.master = of[1];
    for (int s = 0; s < states; ++s) args.states[s] = of[4 + s];
    for (int s = 0; s < kMostStates && scales; ++s) args.scales[s] = scales[i * kMostStates + s];
    args.param_out = of[2];
    args.row_slot = static_cast<const int32_t*>(of[3]);
    args.row_keys = row_keys ? row_keys[i] : nullptr;
    args.hyper = reinterpret_cast<const HyperRow*>(hyper);
    args.grad_scale = grad_scale;
    args.found_inf = found_inf;
    args.nonfinite_slots = nonfinite_slots;
    args.numel = numels[i];
    args.slots = slots;
    shards.push_back(args);
  }
  if (!std::strcmp(rule, "adamw")) return run<AdamW>(stored, shards);
  if (!std::strcmp(rule, "amsgrad")) return run<AmsGrad>(stored, shards);
  if (!std::strcmp(rule, "lion")) return run<Lion>(stored, shards);
  if (!std::strcmp(rule, "sgd")) return run<Sgd>(stored, shards);
  if (!std::strcmp(rule, "sgd_plain")) return run<SgdPlain>(stored, shards);
  if (!std::strcmp(rule, "muon_look_ahead")) return run<MuonLookAhead>(stored, shards);
  if (!std::strcmp(rule, "muon_subtract")) return run<MuonSubtract>(stored, shards);
  return -1;
}
