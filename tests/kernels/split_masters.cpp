// Splits every fp32 there is by pairs of vectors, joins it again, and counts what is not as docs/ops.md says, where 16
// bits of the low half are stored. A part of them goes through single vectors, and through the functions of the scalar
// and the CUDA kernels, which are slower: of each high half another. So do they where 8 bits are stored, by pairs, too.
// What counts has no branches, so that the compiler makes vectors of it: it takes most of the time.
#include <cstdio>

#if defined(ZK_ISA_AVX512)
#include "../../csrc/cpu/vec_avx512.h"
#else
#include "../../csrc/cpu/vec_avx2.h"
#endif

using namespace zero_kernels;

constexpr int kMany = 1 << 12;
constexpr uint32_t kBecomesInf = 0x7f7f8000;  // masters from there on are rounded to inf, which is its own master
static float masters[kMany], joined[kMany];
static BFloat16 highs[kMany];
static int16_t lows[kMany];
static int8_t lows8[kMany];

static void by_function() {
  for (int i = 0; i < kMany; ++i) {
    Halves halves = split(masters[i]);
    highs[i] = halves.high;
    lows[i] = halves.low;
    joined[i] = join(halves);
  }
}

static void by_function_8() {
  for (int i = 0; i < kMany; ++i) {
    Halves halves = split(masters[i]);
    halves.low = in_8_bits(halves.low);
    highs[i] = halves.high;
    lows8[i] = int8_t(halves.low / 256);
    joined[i] = join(halves);
  }
}

template <class Low>
static void by_pairs(Low* lows) {
  for (int i = 0; i < kMany; i += 2 * Vec::kLanes) {
    split_pair(Vec::load(masters + i), Vec::load(masters + i + Vec::kLanes), highs + i, lows + i);
    Pair pair = join_pair(highs + i, lows + i);
    store_pair(joined + i, pair.a, pair.b);
  }
}

template <class Low>
static void by_vectors(Low* lows) {
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
    uint32_t up = (away + 0x7fff + (high & 1)) >> 16, off = away == 0x8000 ? 2 * up - 1 : 0;
    uint32_t of_number = (got ^ ((high + up) & 0xffff)) | (kept ^ (bits + off));
    uint32_t of_nan = (~got & 0x7fc0) | uint32_t(lows[i]);
    uint32_t of_inf = (got ^ ((high + up) & 0xffff)) | uint32_t(lows[i]) | (kept ^ (got << 16));
    uint32_t size = bits & 0x7fffffff, of_it = size > 0x7f800000 ? of_nan : size >= kBecomesInf ? of_inf : of_number;
    found += of_it ? 1 : 0;
  }
  return found;
}

// Of numbers: the parameter is the nearest, what is stored is within -127 and 127, and no other number of that many
// 256ths beside the parameter is nearer to the master, or as near and even.
static uint32_t wrong_8() {
  uint32_t found = 0;
  for (int i = 0; i < kMany; ++i) {
    uint32_t bits, kept;
    __builtin_memcpy(&bits, masters + i, sizeof bits);
    __builtin_memcpy(&kept, joined + i, sizeof kept);
    uint32_t high = bits >> 16, away = bits & 0xffff, got = highs[i].bits;
    uint32_t up = (away + 0x7fff + (high & 1)) >> 16;
    int stored = lows8[i], off = int(away) - int(up << 16) - 256 * stored, most = off < 0 ? -off : off;
    int end = stored == 127 ? off : stored == -127 ? -off : 0;
    int far = (end > 0 ? 0 : most) + (stored & 1);
    uint32_t of_number = (got ^ ((high + up) & 0xffff)) | (kept ^ (bits - uint32_t(off)));
    of_number |= (far > 128 ? 1 : 0) | (stored == -128 ? 1 : 0);
    uint32_t of_nan = (~got & 0x7fc0) | uint32_t(stored) | ((kept & 0x7fffffff) > 0x7f800000 ? 0 : 1);
    uint32_t of_inf = (got ^ ((high + up) & 0xffff)) | uint32_t(stored) | (kept ^ (got << 16));
    uint32_t size = bits & 0x7fffffff, of_it = size > 0x7f800000 ? of_nan : size >= kBecomesInf ? of_inf : of_number;
    found += of_it ? 1 : 0;
  }
  return found;
}

int main() {
  unsigned long long found[6] = {};
  for (uint64_t first = 0; first < uint64_t(1) << 32; first += kMany) {
    for (int i = 0; i < kMany; ++i) {
      uint32_t bits = uint32_t(first) + uint32_t(i);
      __builtin_memcpy(masters + i, &bits, sizeof bits);
    }
    by_pairs(lows);
    found[0] += wrong();
    if ((first >> 16) % 16 != first / kMany % 16) continue;
    by_vectors(lows);
    found[1] += wrong();
    by_function();
    found[2] += wrong();
    by_pairs(lows8);
    found[3] += wrong_8();
    by_vectors(lows8);
    found[4] += wrong_8();
    by_function_8();
    found[5] += wrong_8();
  }
  for (unsigned long long of : found) std::printf("%llu ", of);
}
