// The boundary between the ops and the kernels: plain pointers in structs, one table of functions an instruction set.
#pragma once

#include "../args.h"

namespace zero_kernels {

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
  void (*run)(const StepArgs&, const Stored&, int64_t row_begin, int64_t row_end);
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
