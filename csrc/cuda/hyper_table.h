// The boundary between hyper_table and its kernel, which is compiled apart: plain pointers, no torch.
#pragma once

#include "../hyper_table.h"

struct CUstream_st;  // a cudaStream_t points to one

namespace zero_kernels {

void run_hyper_table(CUstream_st* stream, const HyperTableArgs& args);

}  // namespace zero_kernels
