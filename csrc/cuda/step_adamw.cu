#include "../rules/adamw.h"
#include "encoded_step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_adamw = run_step<AdamW>;
}  // namespace zero_kernels
#endif
