#include "../rules/sgd.h"
#include "step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_sgd = run_step<Sgd>;
const RunStep step_sgd_plain = run_step<SgdPlain>;
}  // namespace zero_kernels
#endif
