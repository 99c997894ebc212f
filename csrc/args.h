// What the ops are given, on a processor and on a GPU alike: plain pointers, no torch. `ops.h` makes them from tensors.
#pragma once

#include "rules/rule.h"

namespace zero_kernels {

// What a state is stored as, by the dtype of its tensor. Those of eight bits have a scale for each row.
enum class Form : uint8_t { kFloat, kBFloat16, kInt8, kRoot8 };

ZK_HOST_DEVICE static constexpr bool has_scale(Form form) { return form == Form::kInt8 || form == Form::kRoot8; }

ZK_HOST_DEVICE static constexpr int64_t size_of(Form form) {
  return form == Form::kFloat ? 4 : form == Form::kBFloat16 ? 2 : 1;
}

// How the shards of an update are stored, all alike.
struct Stored {
  DType grad, out;  // out: of param_out, where there is one
  bool has_output;
  int low_size;             // bytes of a split master's low half; 0: masters are fp32
  Form forms[kMostStates];  // of states; kFloat where the rule has fewer
};

static inline bool is_encoded(const Stored& of) {
  return of.low_size || of.forms[0] != Form::kFloat || of.forms[1] != Form::kFloat || of.forms[2] != Form::kFloat;
}

// One shard of an update.
struct StepArgs {
  const void* grad;
  void* master;                // of a split master the low half
  void* states[kMostStates];   // as many as the rule has
  float* scales[kMostStates];  // [rows], or null where the form has none
  void* param_out;             // or null; of a split master the high half
  const int32_t* row_slot;     // [rows]
  const int32_t* row_keys;     // [rows], by which bf16 is rounded stochastically; may be null where none is
  const HyperRow* hyper;       // [slots]
  const float* grad_scale;     // or null: 1
  const float* found_inf;      // or null: 0
  int32_t* nonfinite_slots;    // [slots], or null
  int64_t numel;
  int32_t slots;
  bool vector;  // on CUDA: every tensor starts where its chunks are aligned
};

constexpr int kMostAverages = 16;  // of a launch

// Some of the averages of one shard.
struct EmaArgs {
  const void* master;  // of `dtype`, or the low halves of `low_size` bytes
  const void* high;    // of a split master, or null
  float* averages[kMostAverages];
  const float* rates;  // [slots, columns], from the first of these averages on
  const int32_t* row_slot;
  int64_t numel;
  int32_t each, columns, slots;
  int low_size;
  DType dtype;
  bool vector;  // as that of StepArgs
};

}  // namespace zero_kernels
