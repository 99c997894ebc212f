// N neighbouring elements as fp32, moved in accesses of 16 bytes (or fewer, where they make no 16 bytes).
#pragma once

#include "../float16.h"

namespace zero_kernels {

template <class T, int N>
struct alignas(N * sizeof(T)) Chunk {
  T at[N];
};

// Elements of T that one access moves, when N of them are wanted.
template <class T, int N>
constexpr int kAccess = N * sizeof(T) <= 16 ? N : 16 / sizeof(T);

template <class T>
ZK_HOST_DEVICE inline bool aligned(const T* at, int elements) {
  return reinterpret_cast<uintptr_t>(at) % (elements * sizeof(T)) == 0;
}

template <int N, class T>
ZK_HOST_DEVICE inline void load_chunk(const T* from, float (&x)[N]) {
  constexpr int kStep = kAccess<T, N>;
  for (int i = 0; i < N; i += kStep) {
    Chunk<T, kStep> chunk = *reinterpret_cast<const Chunk<T, kStep>*>(from + i);
    for (int j = 0; j < kStep; ++j) x[i + j] = widen(chunk.at[j]);
  }
}

#if defined(__CUDA_ARCH__)
#if defined(ZK_STRONG_STORES)  // a variant that benchmarks/gpu_variants.py times
__device__ inline void store_whole(void* to, uint4 word) { __stwb(static_cast<uint4*>(to), word); }
__device__ inline void store_whole(void* to, uint2 word) { __stwb(static_cast<uint2*>(to), word); }
#else
__device__ inline void store_whole(void* to, uint4 word) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(word.x), "r"(word.y),
               "r"(word.z), "r"(word.w)
               : "memory");
}
__device__ inline void store_whole(void* to, uint2 word) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(word.x), "r"(word.y)
               : "memory");
}
#endif

template <class Word, class C>
__device__ inline void store_as(C* to, const C& chunk) {
  Word word;
  memcpy(&word, &chunk, sizeof word);
  store_whole(to, word);
}
#endif

// As one word of 8 or 16 bytes, by assembly: the compiler was seen to cut an assignment into four, of a chunk and of a
// word. The intrinsic __stwb keeps it whole, but as a store that is strong in the memory model (STG.STRONG.SM).
template <class C>
ZK_HOST_DEVICE inline void store_word(C* to, const C& chunk) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(C) == sizeof(uint4)) return store_as<uint4>(to, chunk);
  if constexpr (sizeof(C) == sizeof(uint2)) return store_as<uint2>(to, chunk);
#endif
  *to = chunk;
}

template <int N, class T>
ZK_HOST_DEVICE inline void store_chunk(T* to, const float (&x)[N]) {
  constexpr int kStep = kAccess<T, N>;
  for (int i = 0; i < N; i += kStep) {
    Chunk<T, kStep> chunk;
    for (int j = 0; j < kStep; ++j) narrow(x[i + j], &chunk.at[j]);
    store_word(reinterpret_cast<Chunk<T, kStep>*>(to + i), chunk);
  }
}

// The first `count` of them, one by one. The rest of x is 0.
template <int N, class T>
ZK_HOST_DEVICE inline void load_first(const T* from, int count, float (&x)[N]) {
  for (int j = 0; j < N; ++j) x[j] = j < count ? widen(from[j]) : 0.0f;
}

ZK_HOST_DEVICE inline bool is_nonfinite(float x) { return (float_bits(x) & 0x7f800000) == 0x7f800000; }

}  // namespace zero_kernels
