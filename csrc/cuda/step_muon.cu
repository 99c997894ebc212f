#include "../rules/muon.h"
#include "step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_muon_look_ahead = run_step<MuonLookAhead>;
const RunStep step_muon_subtract = run_step<MuonSubtract>;
}  // namespace zero_kernels
#endif
