// What AVX2 and AVX-512 have in common.
#pragma once

#include <immintrin.h>

namespace zero_kernels {
namespace {

// The largest bit pattern, unsigned.
inline float largest_of_eight(__m256i x) {
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, 1))));
}

}  // namespace
}  // namespace zero_kernels
