// The kernels, compiled once an instruction set with that set's flags (ZK_ISA_* names it). Everything but the table
// is in an anonymous namespace, and no standard template is used: an inline function shared with another object file
// could be kept in its AVX-512 form and run on a processor that has none.
#include "kernels.h"

#include "../rules/adamw.h"
#include "../rules/amsgrad.h"
#include "../rules/lion.h"
#include "../rules/muon.h"
#include "../rules/sgd.h"

#if defined(ZK_ISA_AVX512)
#include "vec_avx512.h"
#define ZK_TABLE kAvx512Kernels
#define ZK_NAME "avx512"
#elif defined(ZK_ISA_AVX2)
#include "vec_avx2.h"
#define ZK_TABLE kAvx2Kernels
#define ZK_NAME "avx2"
#else
#include "vec_scalar.h"
#define ZK_TABLE kScalarKernels
#define ZK_NAME "scalar"
#endif

#include "passes.h"
#include "step.h"

namespace zero_kernels {
namespace {

template <class Rule>
constexpr StepKernel step_of(const char* rule) {
  static_assert(Rule::kStates <= kMostStates);
  return {rule, Rule::kStates, step<Rule>};
}

const StepKernel kSteps[] = {
    step_of<AdamW>("adamw"),
    step_of<AmsGrad>("amsgrad"),
    step_of<Lion>("lion"),
    step_of<Sgd>("sgd"),
    step_of<SgdPlain>("sgd_plain"),
    step_of<MuonLookAhead>("muon_look_ahead"),
    step_of<MuonSubtract>("muon_subtract"),
    {}};

}  // namespace

const KernelTable ZK_TABLE = {ZK_NAME, kSteps, ema, scale, stats, combine, stream_rows};

}  // namespace zero_kernels
