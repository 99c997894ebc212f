// The boundary between pack and unpack and their kernels, which are compiled apart: plain pointers, no torch.
#pragma once

#include <vector>

#include "../types.h"

struct CUstream_st;  // a cudaStream_t points to one

namespace zero_kernels {

// A gradient and its place in the bucket.
struct Slot {
  void* grad;
  int64_t begin, end;  // elements of the bucket
};

struct PackJob {
  void* bucket;
  int64_t numel;
  DType dtype;
  float scale;
  int32_t* nonfinite;  // [slots] or null
  std::vector<Slot> slots;
  std::vector<DType> dtypes;  // of the gradients
};

void run_pack(CUstream_st* stream, const PackJob& job);
void run_unpack(CUstream_st* stream, const PackJob& job);

}  // namespace zero_kernels
