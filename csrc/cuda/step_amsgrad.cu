#include "../rules/amsgrad.h"
#include "step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_amsgrad = run_step<AmsGrad>;
}  // namespace zero_kernels
#endif
