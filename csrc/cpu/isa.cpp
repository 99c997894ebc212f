#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace zero_kernels {
namespace {

// Best first. What the processor has counts where the operating system saves its registers. All with AVX2 have F16C.
std::vector<const KernelTable*> detect() {
  std::vector<const KernelTable*> usable = {&kScalarKernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return usable;
  usable.insert(usable.begin(), &kAvx2Kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    usable.insert(usable.begin(), &kAvx512Kernels);
#endif
  return usable;
}

const std::vector<const KernelTable*>& usable() {
  static const std::vector<const KernelTable*> tables = detect();
  return tables;
}

const KernelTable* find(const std::string& name) {
  if (name.empty()) return usable().front();
  for (const KernelTable* table : usable())
    if (name == table->name) return table;
  throw std::runtime_error("instruction set '" + name + "' is not usable here; usable: " + usable_isas());
}

std::atomic<const KernelTable*>& current() {
  static std::atomic<const KernelTable*> table([] {
    const char* name = std::getenv("ZERO_KERNELS_ISA");
    return find(name ? name : "");
  }());
  return table;
}

}  // namespace

const KernelTable& kernels() { return *current().load(std::memory_order_relaxed); }

std::string usable_isas() {
  std::string names;
  for (const KernelTable* table : usable()) {
    if (!names.empty()) names += ',';
    names += table->name;
  }
  return names;
}

void use_isa(const std::string& name) { current().store(find(name), std::memory_order_relaxed); }

}  // namespace zero_kernels
