#include "../rules/sgd.h"
#include "encoded_step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_sgd = run_foreach_step<Sgd>;
const RunStep step_sgd_plain = run_foreach_step<SgdPlain>;
const RunEncodedStep encoded_sgd = run_encoded_step<Sgd>;
const RunEncodedStep encoded_sgd_plain = run_encoded_step<SgdPlain>;
}  // namespace zero_kernels
#endif
