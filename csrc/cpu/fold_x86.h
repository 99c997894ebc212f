// The end of a row's sums on AVX2 and AVX-512: lines of 16 are folded by halves, four of them together.
#pragma once

#include <immintrin.h>

namespace zero_kernels {
namespace {

// From eight elements on: each of the four sums goes to its place in `to`.
inline void fold_eight(__m256 a, __m256 b, __m256 c, __m256 d, float* to) {
  auto halved = [](__m256 x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); };
  __m128 x0 = halved(a), x1 = halved(b), x2 = halved(c), x3 = halved(d);
  _MM_TRANSPOSE4_PS(x0, x1, x2, x3);  // now x0 has the first element of each
  _mm_storeu_ps(to, _mm_add_ps(_mm_add_ps(x0, x2), _mm_add_ps(x1, x3)));
}

// The largest bit pattern, unsigned.
inline float largest_of_eight(__m256i x) {
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, 1))));
}

}  // namespace
}  // namespace zero_kernels
