#include "../rules/lion.h"
#include "step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_lion = run_step<Lion>;
}  // namespace zero_kernels
#endif
