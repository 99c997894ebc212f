// Averages of the masters, in the pass that updates these.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "chunk.h"
#include "step_args.h"

namespace zero_kernels {

constexpr int kMostAverages = 96;  // of a launch: their addresses are among its arguments

// Averages of the shards of a launch: those of a shard side by side.
struct LaunchedAverages {
  const float* rates;  // [slots, each]
  int32_t each;        // of a shard
  DType dtype;
  void* of[kMostAverages];
};

// How many of at most `most` shards a launch takes.
inline size_t most_shards(size_t most, const Averages& averages) {
  if (averages.each > kMostAverages) throw std::runtime_error("zero_kernels: more than 96 averages of a parameter");
  return averages.each ? std::min(most, size_t(kMostAverages / averages.each)) : most;
}

// Of `count` shards from `first` on.
inline LaunchedAverages launched(const Averages& averages, size_t first, int count) {
  LaunchedAverages of = {averages.rates, averages.each, averages.dtype, {}};
  auto begin = averages.of.begin() + first * averages.each;
  std::copy(begin, begin + count * averages.each, of.of);
  return of;
}

namespace {

// Kernels that do the update alone.
struct NoAverages {
  template <bool kWhole, int N>
  ZK_HOST_DEVICE void ask(int64_t, int, float (&)[N]) const {}
  template <bool kWhole, int N>
  ZK_HOST_DEVICE void follow(int32_t, int64_t, int, const float (&)[N], float (&)[N]) const {}
};

// The averages of one shard, in fp32. The first is asked for with what the update reads; others, which are rare, behind
// it.
struct ShardAverages {
  const LaunchedAverages& launched;
  int shard;

  ZK_HOST_DEVICE float* average(int k) const { return static_cast<float*>(launched.of[shard * launched.each + k]); }

  template <bool kWhole, int N>
  ZK_HOST_DEVICE void ask(int64_t i, int count, float (&first)[N]) const {
    if (launched.each) load<kWhole>(average(0) + i, count, first);
  }

  // p: the new master.
  template <bool kWhole, int N>
  ZK_HOST_DEVICE void follow(int32_t slot, int64_t i, int count, const float (&p)[N], float (&first)[N]) const {
    if (launched.each) one<kWhole>(0, slot, i, count, p, first);
    for (int k = 1; k < launched.each; ++k) {
      float e[N];
      load<kWhole>(average(k) + i, count, e);
      one<kWhole>(k, slot, i, count, p, e);
    }
  }

 private:
  template <bool kWhole, int N>
  ZK_HOST_DEVICE void one(int k, int32_t slot, int64_t i, int count, const float (&p)[N], float (&e)[N]) const {
    float rate = launched.rates[int64_t(slot) * launched.each + k];
    for (int j = 0; j < N; ++j) e[j] = e[j] + rate * (p[j] - e[j]);
    store<kWhole>(average(k) + i, count, e);
  }
};

}  // namespace

}  // namespace zero_kernels
