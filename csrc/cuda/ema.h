#pragma once

#include "../types.h"

struct CUstream_st;

namespace zero_kernels {

constexpr int kMostAverages = 16;  // of a launch

// The averages of one shard.
struct EmaArgs {
  const void* master;  // of `dtype`, or the low halves of `low_size` bytes
  const void* high;    // of a split master, or null
  float* averages[kMostAverages];
  const float* rates;  // [slots, columns], from the first of these averages on
  const int32_t* row_slot;
  int64_t numel;
  int32_t each, columns, slots;
  int low_size;
  DType dtype;
  bool vector;  // every tensor starts where its chunks are aligned
};

void run_ema(CUstream_st* stream, EmaArgs args);

}  // namespace zero_kernels
