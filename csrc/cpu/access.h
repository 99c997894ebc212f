// How memory is read and written, by all kernels. Part of kernels.cpp.
#pragma once

#include "kernels.h"

namespace zero_kernels {
namespace {

constexpr int kLanes = Vec::kLanes;
constexpr int kPair = 2 * kLanes;

// Elements between a load and its prefetch; the hardware's prefetcher alone falls behind. 64 Mi bf16 elements, two
// cores of a Sapphire Rapids: pack 13.4 ms without, 10.8 ms with it.
constexpr int64_t kAhead = 512;

// Elements from which param_out is written past the cache, saving the read of each line before it is written (43 to
// 40 ms at 64 Mi). A smaller one is still in the cache when the gather reads it.
constexpr int64_t kStreamFrom = 1 << 22;

// Always inlined, as is what it calls: a call that has no effect on memory was left out (seen with GCC 12).
template <class T>
[[gnu::always_inline]] inline void prefetch_pair(const T* at) {
  for (int64_t byte = 0; byte < kPair * int64_t(sizeof(T)); byte += 64)
    prefetch(reinterpret_cast<const char*>(at) + byte);
}

bool aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; }

float scale_of(const StepArgs& args) { return args.grad_scale ? *args.grad_scale : 1.0f; }

template <class T>
[[gnu::always_inline]] inline void write_pair(T* to, Vec a, Vec b, bool stream) {
  stream ? stream_pair(to, a, b) : store_pair(to, a, b);
}

}  // namespace
}  // namespace zero_kernels
