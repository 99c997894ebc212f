// Divides roots by a `Divisor`, and counts the quotients that have other bits than the processor's. Of every divisor
// all fractions that a float can have, at one exponent; of all exponents that a root can have some; and what is no
// number.
#include <cstdio>
#include <initializer_list>

#include "../../csrc/cpu/vec_avx512.h"

using namespace zero_kernels;

static uint32_t draw(uint32_t* state) { return *state = mixed(*state + 0x9e3779b9); }

// Any two NaN are alike.
static uint32_t wrong(__m512i bits, const Divisor<Vec>& divisor) {
  Vec root(_mm512_castsi512_ps(bits)), got = root / divisor, right = root / divisor.by;
  __mmask16 numbers = _mm512_cmp_ps_mask(right.x, right.x, _CMP_ORD_Q) | _mm512_cmp_ps_mask(got.x, got.x, _CMP_ORD_Q);
  return __builtin_popcount(
      _mm512_mask_cmpneq_epi32_mask(numbers, _mm512_castps_si512(got.x), _mm512_castps_si512(right.x)));
}

static uint64_t wrong_of_fractions(const Divisor<Vec>& divisor, uint32_t exponent) {
  uint64_t found = 0;
  __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (uint32_t fraction = 0; fraction < 1u << 23; fraction += 16)
    found += wrong(_mm512_add_epi32(_mm512_set1_epi32(int32_t(exponent << 23 | fraction)), lanes), divisor);
  return found;
}

// 2^-75 is below the root of the least float, and 2^64 above that of the largest.
static uint64_t wrong_of_some(const Divisor<Vec>& divisor, uint32_t* state) {
  uint64_t found = 0;
  for (uint32_t exponent = 127 - 75; exponent <= 127 + 64; ++exponent)
    found += wrong(_mm512_set1_epi32(int32_t(exponent << 23 | draw(state) >> 9)), divisor);
  for (uint32_t bits : {0u, 0x7f800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u})
    found += wrong(_mm512_set1_epi32(int32_t(bits)), divisor);
  return found;
}

int main() {
  uint32_t state = 1;
  uint64_t fractions = 0, some = 0, not_usual = 0;
  // Bias corrections of the first steps, by two betas; the ends of what is usual; and any fraction.
  for (float beta : {0.999f, 0.95f}) {
    float power = 1;
    for (int step = 0; step < 8; ++step) {
      power *= beta;
      fractions += wrong_of_fractions(Divisor<Vec>(square_root(1 - power)), 127);
    }
  }
  for (uint32_t bits : {0x3f800000u, 0x3fffffffu, 0x3f800001u, 0x3f7fffffu, 0x32000001u, 0x4cffffffu})
    fractions += wrong_of_fractions(Divisor<Vec>(bits_float(bits)), 127 - 75);
  for (int i = 0; i < 16; ++i)
    fractions += wrong_of_fractions(Divisor<Vec>(bits_float(127u << 23 | draw(&state) >> 9)), 127 + i);
  for (int i = 0; i < 1 << 16; ++i)
    some += wrong_of_some(Divisor<Vec>(bits_float((127u - 27 + draw(&state) % 54) << 23 | draw(&state) >> 9)), &state);
  for (uint32_t bits : {0u, 0x80000000u, 1u, 0x7f800000u, 0x7fc00000u, 0xbf800000u, 0x00800000u, 0x7f7fffffu})
    not_usual += wrong_of_some(Divisor<Vec>(bits_float(bits)), &state);
  std::printf("%llu %llu %llu", (unsigned long long)fractions, (unsigned long long)some, (unsigned long long)not_usual);
}
