#include "../rules/lion.h"
#include "encoded_step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_lion = run_foreach_step<Lion>;
const RunEncodedStep encoded_lion = run_encoded_step<Lion>;
}  // namespace zero_kernels
#endif
