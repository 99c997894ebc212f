// What the library needs of the machine. No kernel is here, so the host's compiler alone sees it, through nvcc.
#include <string>

#include "../stable.h"
#include "check.h"

namespace zero_kernels {
namespace {

// The architectures that it holds code for, as TORCH_CUDA_ARCH_LIST names them.
std::string cuda_archs() { return ZK_CUDA_ARCHS; }

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

// Empty, or why the driver cannot run it. A driver runs what was built for its own major version of CUDA or an older.
std::string cuda_problem() {
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  if (driver / 1000 >= CUDART_VERSION / 1000) return "";
  return "built by CUDA " + version(CUDART_VERSION) + ", but the driver is of CUDA " + version(driver) +
         ": install again with that CUDA's nvcc, or update the driver";
}

}  // namespace
}  // namespace zero_kernels

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("cuda_archs", TORCH_BOX(&zero_kernels::cuda_archs));
  m.impl("cuda_problem", TORCH_BOX(&zero_kernels::cuda_problem));
}
