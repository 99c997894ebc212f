// What pack and unpack are given, on a processor and on a GPU alike: plain pointers, no torch.
#pragma once

#include <vector>

#include "types.h"

namespace zero_kernels {

// A gradient and its place in the bucket.
struct Slot {
  void* grad;
  int64_t begin, end;  // elements of the bucket
};

// What is packed, or unpacked.
struct PackJob {
  void* bucket;
  int64_t numel;
  DType dtype;
  float scale;
  int32_t* nonfinite;  // [slots] or null
  std::vector<Slot> slots;
  std::vector<DType> dtypes;  // of the gradients
};

}  // namespace zero_kernels
