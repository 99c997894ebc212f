// Launches over several shards: the blocks of the first, then those of the second, ...
#pragma once

#include "../types.h"

namespace zero_kernels {

// Index of the shard that a block of the launch belongs to: the last of `count` that begins at or before it. (Empty
// ones, which begin where the next does, come before that.) first_block(i): the block at which shard i begins.
template <class FirstBlock>
ZK_HOST_DEVICE inline int shard_of_block(int64_t block, int count, FirstBlock first_block) {
  int low = 0, high = count;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (first_block(middle) <= block)
      low = middle;
    else
      high = middle;
  }
  return low;
}

}  // namespace zero_kernels
