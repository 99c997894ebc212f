// The boundary between grad_stats and its kernels, which are compiled apart: plain pointers, no torch.
#pragma once

#include <vector>

#include "../types.h"

struct CUstream_st;  // a cudaStream_t points to one

namespace zero_kernels {

struct Shard {
  const void* data;
  int64_t numel;
  int64_t first_block;  // in the launch, which sets it
};

struct StatsOutput {
  float* partials;     // [blocks] of scratch: the kStatsBlock elements of each, over all shards
  int32_t* nonfinite;  // [blocks] of scratch
  float* out;          // [shards, 2]: norm term, count of non-finite values
};

void run_grad_stats(
    CUstream_st* stream, const std::vector<Shard>& shards, const std::vector<DType>& dtypes, double norm_type,
    const StatsOutput& output);

}  // namespace zero_kernels
