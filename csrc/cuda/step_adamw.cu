#include "../rules/adamw.h"
#include "encoded_step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_adamw = [](CUstream_st* stream, const char* op, const std::vector<StepArgs>& shards, DType grad,
                              DType out) {
  if (shards.size() == 1)
    run_step<AdamW>(stream, op, shards[0], grad, out);
  else
    run_foreach_step<AdamW>(stream, op, shards, grad, out);
};
const RunEncodedStep encoded_adamw = run_encoded_step<AdamW>;
}  // namespace zero_kernels
#endif
