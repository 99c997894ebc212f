// Four neighbouring elements of a tensor of any dtype, as they are stored.
#pragma once

#include "../rules/codecs.h"
#include "chunk.h"

namespace zero_kernels {
namespace {

constexpr int kQuad = 4;

// Of what is not given, which is null, too.
inline bool is_aligned(const void* at, int64_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; }

// Of an element of a shard, which is never below 0: unsigned, a division is a shift.
ZK_HOST_DEVICE inline int64_t row_of(int64_t i) { return int64_t(uint64_t(i) / kRow); }
ZK_HOST_DEVICE inline int place_in_row(int64_t i) { return int(uint32_t(i) % kRow); }

// 4, 8 or 16 bytes. Nothing is converted until all have been asked for.
struct Raw {
  uint32_t words[kQuad];
};

template <class Word, bool kWhole>
ZK_HOST_DEVICE inline void load_words(const void* from, int64_t i, int count, Raw& raw) {
  constexpr int kSize = sizeof(Word);
  const Word* at = static_cast<const Word*>(from) + i;
  if constexpr (kWhole) {
    Chunk<uint32_t, kSize> chunk = *reinterpret_cast<const Chunk<uint32_t, kSize>*>(at);
    ZK_UNROLL
    for (int w = 0; w < kSize; ++w) raw.words[w] = chunk.at[w];
  } else {
    ZK_UNROLL
    for (int j = 0; j < kQuad; ++j)
      if (j < count) raw.words[j * kSize / 4] |= uint32_t(at[j]) << (j * kSize % 4 * 8);
  }
}

template <bool kWhole>
ZK_HOST_DEVICE inline Raw load_raw(const void* from, int64_t size, int64_t i, int count) {
  Raw raw = {};
  if (size == 4)
    load_words<uint32_t, kWhole>(from, i, count, raw);
  else if (size == 2)
    load_words<uint16_t, kWhole>(from, i, count, raw);
  else
    load_words<uint8_t, kWhole>(from, i, count, raw);
  return raw;
}

template <class Word, bool kWhole>
ZK_HOST_DEVICE inline void store_words(void* to, int64_t i, int count, const Raw& raw) {
  constexpr int kSize = sizeof(Word);
  Word* at = static_cast<Word*>(to) + i;
  if constexpr (kWhole) {
    Chunk<uint32_t, kSize> chunk;
    ZK_UNROLL
    for (int w = 0; w < kSize; ++w) chunk.at[w] = raw.words[w];
    store_word(reinterpret_cast<Chunk<uint32_t, kSize>*>(at), chunk);
  } else {
    ZK_UNROLL
    for (int j = 0; j < kQuad; ++j)
      if (j < count) at[j] = Word(raw.words[j * kSize / 4] >> (j * kSize % 4 * 8));
  }
}

template <bool kWhole>
ZK_HOST_DEVICE inline void store_raw(void* to, int64_t size, int64_t i, int count, const Raw& raw) {
  if (size == 4)
    store_words<uint32_t, kWhole>(to, i, count, raw);
  else if (size == 2)
    store_words<uint16_t, kWhole>(to, i, count, raw);
  else
    store_words<uint8_t, kWhole>(to, i, count, raw);
}

ZK_HOST_DEVICE inline uint16_t half_word(const Raw& raw, int j) { return uint16_t(raw.words[j / 2] >> (j % 2 * 16)); }
ZK_HOST_DEVICE inline uint8_t byte(const Raw& raw, int j) { return uint8_t(raw.words[0] >> (j * 8)); }

ZK_HOST_DEVICE inline int16_t low_half(int low_size, const Raw& raw, int j) {
  return low_size == 1 ? int16_t(byte(raw, j) << 8) : int16_t(half_word(raw, j));
}

ZK_HOST_DEVICE inline void widen_raw(DType dtype, const Raw& raw, float (&x)[kQuad]) {
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j)
    x[j] = dtype == DType::kFloat  ? bits_float(raw.words[j])
           : dtype == DType::kHalf ? widen(Half{half_word(raw, j)})
                                   : widen(BFloat16{half_word(raw, j)});
}

ZK_HOST_DEVICE inline Raw narrow_raw(DType dtype, const float (&x)[kQuad]) {
  Raw raw = {};
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j) {
    if (dtype == DType::kFloat) {
      raw.words[j] = float_bits(x[j]);
    } else if (dtype == DType::kHalf) {
      Half half;
      narrow(x[j], &half);
      raw.words[j / 2] |= uint32_t(half.bits) << (j % 2 * 16);
    } else {
      BFloat16 half;
      narrow(x[j], &half);
      raw.words[j / 2] |= uint32_t(half.bits) << (j % 2 * 16);
    }
  }
  return raw;
}

// Two elements of bf16, the first in the lower half. No NaN.
ZK_HOST_DEVICE inline uint32_t narrow_pair(float a, float b) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
#else
  BFloat16 low, high;
  narrow(a, &low);
  narrow(b, &high);
  return uint32_t(high.bits) << 16 | low.bits;
#endif
}

}  // namespace
}  // namespace zero_kernels
