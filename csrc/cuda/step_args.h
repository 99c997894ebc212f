// The boundary between the ops and the kernels of the rules, which are compiled apart: plain pointers, no torch.
#pragma once

#include <vector>

#include "../rules/codecs.h"

struct CUstream_st;  // a cudaStream_t points to one

namespace zero_kernels {

struct StepArgs {
  const void* grad;
  float* master;
  float* states[kMostStates];  // as many as the rule has
  void* param_out;             // or null
  const int32_t* row_slot;
  const HyperRow* hyper;
  const float* grad_scale;   // or null: 1
  const float* found_inf;    // or null: 0
  int32_t* nonfinite_slots;  // or null
  int64_t numel;
  int32_t slots;
  bool vector;      // every tensor starts where its chunks are aligned
  DType out_dtype;  // of param_out, where there is one

  // Indexed by constants alone: indexed by a loop's variable, though it was unrolled, the addresses took registers, and
  // AdamW's kernels for sm_100 spilled.
  ZK_HOST_DEVICE float* state(int i) const {
    static_assert(kMostStates == 3);
    return i == 0 ? states[0] : i == 1 ? states[1] : states[2];
  }
};

// A shard whose states or master are not in fp32 alone. Pointers to states are those to what is stored.
struct EncodedShard {
  StepArgs step;
  float* scales[kMostStates];  // [rows], or null where the form has none
  void* low;                   // of a split master, whose high halves are the parameters; or null
  const int32_t* row_keys;     // [rows], by which bf16 is rounded stochastically; or null, without states in bf16

  ZK_HOST_DEVICE float* scale(int i) const { return i == 0 ? scales[0] : i == 1 ? scales[1] : scales[2]; }
};

// Of each rule: updates shards that are alike in their dtypes and share their slots. `of_all`: the forms of all.
using RunStep = void (*)(CUstream_st* stream, const char* op, const std::vector<StepArgs>&, DType grad, DType out);
using RunEncodedStep =
    void (*)(CUstream_st* stream, const std::vector<EncodedShard>&, const Encoded& of_all, DType grad, DType out);
extern const RunStep step_adamw, step_amsgrad, step_lion, step_sgd, step_sgd_plain, step_muon_look_ahead,
    step_muon_subtract;
extern const RunEncodedStep encoded_adamw, encoded_amsgrad, encoded_lion, encoded_sgd, encoded_sgd_plain,
    encoded_muon_look_ahead, encoded_muon_subtract;

}  // namespace zero_kernels
