#include "../rules/muon.h"
#include "encoded_step.h"

#if defined(__CUDACC__)
namespace zero_kernels {
const RunStep step_muon_look_ahead = run_foreach_step<MuonLookAhead>;
const RunStep step_muon_subtract = run_foreach_step<MuonSubtract>;
const RunEncodedStep encoded_muon_look_ahead = run_encoded_step<MuonLookAhead>;
const RunEncodedStep encoded_muon_subtract = run_encoded_step<MuonSubtract>;
}  // namespace zero_kernels
#endif
