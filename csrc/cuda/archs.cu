// The architectures that the library holds code for, as TORCH_CUDA_ARCH_LIST names them.
#include <string>

#include "launch.h"

namespace zero_kernels {
namespace {

std::string cuda_archs() { return ZK_CUDA_ARCHS; }

}  // namespace
}  // namespace zero_kernels

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("cuda_archs", TORCH_BOX(&zero_kernels::cuda_archs));
}
