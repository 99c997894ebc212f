// Splits every fp32 there is by pairs of vectors, joins it again, and counts what is not as docs/ops.md says. A part of
// them goes through single vectors, and through the function of the scalar and the CUDA kernels, which are slower: of
// each high half another.
#include <cstdio>

#if defined(ZK_ISA_AVX512)
#include "../../csrc/cpu/vec_avx512.h"
#else
#include "../../csrc/cpu/vec_avx2.h"
#endif

using namespace zero_kernels;

constexpr int kMany = 1 << 12;
static float masters[kMany], joined[kMany];
static BFloat16 highs[kMany];
static int16_t lows[kMany];

static void by_function() {
  for (int i = 0; i < kMany; ++i) {
    Halves halves = split(masters[i]);
    highs[i] = halves.high;
    lows[i] = halves.low;
    joined[i] = join(halves);
  }
}

static void by_pairs() {
  for (int i = 0; i < kMany; i += 2 * Vec::kLanes) {
    split_pair(Vec::load(masters + i), Vec::load(masters + i + Vec::kLanes), highs + i, lows + i);
    Pair pair = join_pair(highs + i, lows + i);
    store_pair(joined + i, pair.a, pair.b);
  }
}

static void by_vectors() {
  for (int i = 0; i < kMany; i += Vec::kLanes) {
    Vec::load(masters + i).store(highs + i, lows + i);
    Vec::load(highs + i, lows + i).store(joined + i);
  }
}

static uint32_t wrong() {
  uint32_t found = 0;
  for (int i = 0; i < kMany; ++i) {
    uint32_t bits, kept;
    __builtin_memcpy(&bits, masters + i, sizeof bits);
    __builtin_memcpy(&kept, joined + i, sizeof kept);
    uint32_t high = bits >> 16, away = bits & 0xffff, got = highs[i].bits;
    uint32_t tie = away == 0x8000, up = (away > 0x8000) | (tie & high & 1);
    uint32_t of_number = (got != ((high + up) & 0xffff)) | (kept != bits + tie * (2 * up - 1));
    uint32_t of_nan = ((got & 0x7fc0) != 0x7fc0) | (lows[i] != 0);
    found += (bits & 0x7fffffff) > 0x7f800000 ? of_nan : of_number;
  }
  return found;
}

int main() {
  unsigned long long found[3] = {};
  for (uint64_t first = 0; first < uint64_t(1) << 32; first += kMany) {
    for (int i = 0; i < kMany; ++i) {
      uint32_t bits = uint32_t(first) + uint32_t(i);
      __builtin_memcpy(masters + i, &bits, sizeof bits);
    }
    by_pairs();
    found[0] += wrong();
    if ((first >> 16) % 16 != first / kMany % 16) continue;
    by_vectors();
    found[1] += wrong();
    by_function();
    found[2] += wrong();
  }
  std::printf("%llu %llu %llu\n", found[0], found[1], found[2]);
}
