// What is done with a shard beside its update: averages, pack and unpack, grad_stats. Part of kernels.cpp.
#pragma once

#include "../norms.h"
#include "access.h"

namespace zero_kernels {
namespace {

// ---- ema ----------------------------------------------------------------------------------------------------------

// The masters of a row as fp32, [kRow]: its own memory, or `kept`, with zeros behind the `count` that exist.
template <class T>
const float* widened(const T* from, int count, float* kept) {
  T whole[kRow] = {};
  if (count < kRow) __builtin_memcpy(whole, from, count * sizeof(T));
  const T* at = count < kRow ? whole : from;
  for (int i = 0; i < kRow; i += kLanes) Vec::load(at + i).store(kept + i);
  return kept;
}

template <class Low>
const float* joined(const BFloat16* high, const Low* low, int count, float* kept) {
  BFloat16 highs[kRow] = {};
  Low lows[kRow] = {};
  if (count < kRow) {
    __builtin_memcpy(highs, high, count * sizeof(BFloat16));
    __builtin_memcpy(lows, low, count * sizeof(Low));
    high = highs;
    low = lows;
  }
  for (int i = 0; i < kRow; i += kPair) {
    prefetch_pair(high + i + kAhead);
    prefetch_pair(low + i + kAhead);
    Pair p = join_pair(high + i, low + i);
    store_pair(kept + i, p.a, p.b);
  }
  return kept;
}

const float* masters_of(const EmaArgs& args, int64_t i, int count, float* kept) {
  const BFloat16* high = static_cast<const BFloat16*>(args.high) + i;
  if (args.low_size == 1) return joined(high, static_cast<const int8_t*>(args.master) + i, count, kept);
  if (args.low_size == 2) return joined(high, static_cast<const int16_t*>(args.master) + i, count, kept);
  if (args.dtype == DType::kHalf) return widened(static_cast<const Half*>(args.master) + i, count, kept);
  if (args.dtype == DType::kBFloat16) return widened(static_cast<const BFloat16*>(args.master) + i, count, kept);
  return static_cast<const float*>(args.master) + i;
}

Vec nearer(Vec average, Vec p, Vec rate) { return average + rate * (p - average); }

void follow(float* average, const float* p, int count, Vec rate) {
  int i = 0;
  for (; i + kPair <= count; i += kPair) {
    prefetch_pair(average + i + kAhead);
    prefetch_pair(p + i + kAhead);
    Vec a = nearer(Vec::load(average + i), Vec::load(p + i), rate);
    Vec b = nearer(Vec::load(average + i + kLanes), Vec::load(p + i + kLanes), rate);
    store_pair(average + i, a, b);
  }
  for (; i < count; i += kLanes) {
    int left = count - i < kLanes ? count - i : kLanes;
    nearer(Vec::load_first(average + i, left), Vec::load_first(p + i, left), rate).store_first(average + i, left);
  }
}

void ema(const EmaArgs& args, int64_t row_begin, int64_t row_end) {
  alignas(64) float kept[kRow];
  for (int64_t row = row_begin; row < row_end; ++row) {
    int32_t slot = args.row_slot[row];
    if (slot < 0) continue;
    int64_t i = row * kRow;
    int count = args.numel - i < kRow ? int(args.numel - i) : int(kRow);
    const float* p = masters_of(args, i, count, kept);
    for (int k = 0; k < args.each; ++k) {
      float rate = args.rates[int64_t(slot) * args.columns + k];
      if (rate != 0.0f) follow(args.averages[k] + i, p, count, Vec(rate));
    }
  }
}

// ---- pack and unpack ----------------------------------------------------------------------------------------------

constexpr uint32_t kInfinity = 0x7f800000;

bool any_nonfinite(Vec largest) {
  float lanes[kLanes];
  largest.store(lanes);
  bool found = false;
  for (float lane : lanes) found |= float_bits(lane) >= kInfinity;
  return found;
}

template <class Src, class Dst>
bool scale_to(const ScaleArgs& args) {
  const Src* src = static_cast<const Src*>(args.src);
  Dst* dst = static_cast<Dst*>(args.dst);
  Vec scale(args.scale);
  Vec largest(0.0f);
  int64_t i = 0;
  for (; i + kPair <= args.numel; i += kPair) {
    prefetch_pair(src + i + kAhead);
    Vec a = Vec::load(src + i), b = Vec::load(src + i + kLanes);
    largest = max_bits(largest, max_bits(magnitude(a), magnitude(b)));
    store_pair(dst + i, a * scale, b * scale);
  }
  for (; i < args.numel; i += kLanes) {
    int count = args.numel - i < kLanes ? int(args.numel - i) : kLanes;
    Vec a = Vec::load_first(src + i, count);
    largest = max_bits(largest, magnitude(a));
    (a * scale).store_first(dst + i, count);
  }
  return any_nonfinite(largest);
}

bool scale(const ScaleArgs& args) {
  bool found = false;
  with_type(args.src_dtype, [&](auto src) {
    with_type(args.dst_dtype, [&](auto dst) {
      found = scale_to<typename decltype(src)::type, typename decltype(dst)::type>(args);
    });
  });
  return found;
}

// ---- grad_stats ---------------------------------------------------------------------------------------------------

// Folds kStatsLanes values by halves: acc[j] += acc[j + h] for h = 512 … 1.
template <class Norm>
float fold(float* acc) {
  int64_t h = kStatsLanes / 2;
  for (; h >= kLanes; h /= 2)
    for (int64_t j = 0; j < h; j += kLanes) Norm::join(Vec::load(acc + j), Vec::load(acc + j + h)).store(acc + j);
  for (; h >= 1; h /= 2)
    for (int64_t j = 0; j < h; ++j)
      Norm::join(Vec::load_first(acc + j, 1), Vec::load_first(acc + j + h, 1)).store_first(acc + j, 1);
  return acc[0];
}

template <class Norm, class T>
float block_partial(const T* x) {
  alignas(64) float acc[kStatsLanes];
  for (int64_t j = 0; j < kStatsLanes; j += kLanes) {
    Vec sum(0.0f);
    for (int64_t k = 0; k < kStatsBlock; k += kStatsLanes) {
      // The same place in the next block: 7.6 to 6.4 ms for 64 Mi bf16 elements.
      if (j % kPair == 0) prefetch_pair(x + kStatsBlock + k + j);
      sum = Norm::join(sum, Norm::term(Vec::load(x + k + j)));
    }
    sum.store(acc + j);
  }
  return fold<Norm>(acc);
}

template <class T>
int32_t count_nonfinite(const T* x, int64_t count) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += (float_bits(widen(x[i])) & kInfinity) == kInfinity;
  return found;
}

template <class Norm, class T>
void stats_of(const StatsArgs& args, int64_t block_begin, int64_t block_end) {
  const T* shard = static_cast<const T*>(args.shard);
  for (int64_t block = block_begin; block < block_end; ++block) {
    const T* x = shard + block * kStatsBlock;
    int64_t left = args.numel - block * kStatsBlock;
    float partial;
    if (left >= kStatsBlock) {
      partial = block_partial<Norm>(x);
    } else {
      T padded[kStatsBlock] = {};
      for (int64_t i = 0; i < left; ++i) padded[i] = x[i];
      partial = block_partial<Norm>(padded);
    }
    args.partials[block] = partial;
    // Terms are never negative, so a non-finite value makes the partial non-finite: only then is counting needed.
    bool suspect = (float_bits(partial) & 0x7fffffff) >= kInfinity;
    args.nonfinite[block] = suspect ? count_nonfinite(x, left < kStatsBlock ? left : kStatsBlock) : 0;
  }
}

void stats(const StatsArgs& args, int norm, int64_t block_begin, int64_t block_end) {
  with_type(args.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto run = norm == 2 ? stats_of<Square, T> : norm == 1 ? stats_of<Magnitude, T> : stats_of<Largest, T>;
    run(args, block_begin, block_end);
  });
}

template <class Norm>
float combine_as(const float* partials, int64_t count) {
  alignas(64) float acc[kStatsLanes] = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    int left = count - i < kLanes ? int(count - i) : kLanes;
    float* lanes = acc + i % kStatsLanes;
    Norm::join(Vec::load(lanes), left < kLanes ? Vec::load_first(partials + i, left) : Vec::load(partials + i))
        .store(lanes);
  }
  return fold<Norm>(acc);
}

float combine(const float* partials, int64_t count, int norm) {
  return norm ? combine_as<Square>(partials, count) : combine_as<Largest>(partials, count);
}

// ---- stream -------------------------------------------------------------------------------------------------------

void stream_rows(const StreamArgs& args, int64_t row_begin, int64_t row_end) {
  // 16-bit values go as pairs, in the words of a float: nothing is converted.
  const float* grad = static_cast<const float*>(args.grad);
  float* out = static_cast<float*>(args.out);
  bool stream = aligned(out) && args.numel >= kStreamFrom;
  int64_t end = row_end * kRow < args.numel ? row_end * kRow : args.numel;
  for (int64_t i = row_begin * kRow; i + 2 * kPair <= end; i += 2 * kPair) {
    prefetch_pair(grad + (i + kAhead) / 2);
    // The three arrays change places, so that no store can be left out as a copy of what is there.
    for (int64_t j = i; j < i + 2 * kPair; j += kPair) {
      prefetch_pair(args.a + j + kAhead);
      prefetch_pair(args.b + j + kAhead);
      prefetch_pair(args.c + j + kAhead);
      Vec a0 = Vec::load(args.a + j), a1 = Vec::load(args.a + j + kLanes);
      Vec b0 = Vec::load(args.b + j), b1 = Vec::load(args.b + j + kLanes);
      store_pair(args.b + j, Vec::load(args.c + j), Vec::load(args.c + j + kLanes));
      store_pair(args.a + j, b0, b1);
      store_pair(args.c + j, a0, a1);
    }
    write_pair(out + i / 2, Vec::load(grad + i / 2), Vec::load(grad + i / 2 + kLanes), stream);
  }
  if (stream) stream_fence();
}

}  // namespace
}  // namespace zero_kernels
