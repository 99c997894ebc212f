// The boundary between the ops and the kernels: plain pointers in structs, one table of functions an instruction set.
#pragma once

#include <cstdint>

#include "../rules/codecs.h"
#include "../types.h"

namespace zero_kernels {

struct StepArgs {
  const void* grad;
  float* master;
  float* states[kMostStates];  // as many as the rule has
  void* param_out;             // or null
  const int32_t* row_slot;
  const HyperRow* hyper;
  int64_t numel;
  float grad_scale;
  DType grad_dtype;
  DType param_dtype;
  Encoded encoded;
};

struct EmaArgs {
  const void* master;      // of `dtype`, or the low halves of `low_size` bytes
  const void* high;        // of a split master, or null
  float* const* averages;  // [each]
  const float* rates;      // [slots, each]
  const int32_t* row_slot;
  int64_t numel;
  int each;
  int low_size;
  DType dtype;
};

struct ScaleArgs {
  const void* src;
  void* dst;  // may be src itself, when the dtypes are equal
  int64_t numel;
  float scale;
  DType src_dtype;
  DType dst_dtype;
};

struct StatsArgs {
  const void* shard;
  int64_t numel;
  float* partials;     // [blocks]
  int32_t* nonfinite;  // [blocks]
  DType dtype;
};

struct StreamArgs {
  const void* grad;
  float* a;
  float* b;
  float* c;
  void* out;
  int64_t numel;
};

// The update of rows [begin, end) by one rule.
struct StepKernel {
  const char* rule;
  int states;
  void (*run)(const StepArgs&, int64_t row_begin, int64_t row_end);
  void (*run_encoded)(const StepArgs&, int64_t row_begin, int64_t row_end);  // of states or masters not in fp32 alone
};

struct KernelTable {
  const char* name;
  const StepKernel* steps;  // of each rule; after the last one a null name
  void (*ema)(const EmaArgs&, int64_t row_begin, int64_t row_end);
  // True when a source value was inf or NaN.
  bool (*scale)(const ScaleArgs&);
  // The partials of blocks [begin, end), and the partials as one: sums for norm 1 and 2, the largest bits for 0 (inf).
  void (*stats)(const StatsArgs&, int norm, int64_t block_begin, int64_t block_end);
  float (*combine)(const float* partials, int64_t count, int norm);
  // The reads and writes of a 16-bit adam_step with nothing computed: the yardstick of the benchmark.
  void (*stream)(const StreamArgs&, int64_t row_begin, int64_t row_end);
};

extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace zero_kernels
