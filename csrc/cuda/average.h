// The boundary between foreach_step and the kernel of averages, which is compiled apart: plain pointers, no torch.
#pragma once

#include <vector>

#include "../rules/codecs.h"

struct CUstream_st;  // a cudaStream_t points to one

namespace zero_kernels {

// One average of one shard.
struct Average {
  const void* master;  // fp32, or the high halves of a split one
  const void* low;     // its low halves, or null
  float* average;
  const int32_t* row_slot;
  int64_t numel;
  int32_t column;   // of rates
  int8_t low_size;  // 2: int16; 1: int8
  bool vector;      // both start where their chunks are aligned
};

struct Averages {
  const HyperRow* hyper;
  const float* rates;      // [slots, columns]
  const float* found_inf;  // or null: 0
  int32_t columns;
  std::vector<Average> of;
};

void run_average(CUstream_st* stream, const Averages& averages);

}  // namespace zero_kernels
