// Which instruction sets this processor and its operating system run, and which of them is in use.
#pragma once

#include <string>

#include "kernels.h"

namespace zero_kernels {

// The table in use: the best usable one, unless ZERO_KERNELS_ISA or use_isa named another.
const KernelTable& kernels();

// Names of the usable sets, best first, joined by commas.
std::string usable_isas();

// Throws std::runtime_error for a name that is not usable; "" goes back to the best.
void use_isa(const std::string& name);

}  // namespace zero_kernels
