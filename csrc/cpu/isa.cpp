#include "isa.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace zero_kernels {
namespace {

#if defined(__x86_64__)
bool has(uint32_t value, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(value >> bit & 1)) return false;
  return true;
}

// The register state that the operating system saves: without it the instructions fault, whatever cpuid says.
uint64_t saved_state(uint32_t leaf1_ecx) {
  if (!has(leaf1_ecx, {27})) return 0;  // OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

std::vector<const KernelTable*> detect() {
  std::vector<const KernelTable*> usable = {&kScalarKernels};
  uint32_t a, b, c, d, leaf1_c;
  if (!__get_cpuid(1, &a, &b, &leaf1_c, &d) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return usable;
  uint64_t saved = saved_state(leaf1_c);
  bool avx2 = has(leaf1_c, {28, 29}) && has(b, {5}) && (saved & 0x6) == 0x6;  // AVX, F16C; AVX2; xmm and ymm
  if (avx2) usable.insert(usable.begin(), &kAvx2Kernels);
  // F, DQ, BW, VL; opmask and both halves of zmm
  if (avx2 && has(b, {16, 17, 30, 31}) && (saved & 0xe6) == 0xe6) usable.insert(usable.begin(), &kAvx512Kernels);
  return usable;
}
#else
std::vector<const KernelTable*> detect() { return {&kScalarKernels}; }
#endif

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
