// The boundary between the ops and their kernels, which are compiled apart: plain pointers, no torch.
#pragma once

#include "../args.h"
#include "../hyper_table.h"
#include "../pack_job.h"

struct CUstream_st;  // a cudaStream_t points to one

namespace zero_kernels {

// Of each rule: updates one shard or more.
using RunStep = void (*)(CUstream_st* stream, const Stored&, std::vector<StepArgs>& shards);
extern const RunStep step_adamw, step_amsgrad, step_lion, step_sgd, step_sgd_plain, step_muon_look_ahead,
    step_muon_subtract;

void run_ema(CUstream_st* stream, EmaArgs args);

void run_pack(CUstream_st* stream, const PackJob& job);
void run_unpack(CUstream_st* stream, const PackJob& job);

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

void run_hyper_table(CUstream_st* stream, const HyperTableArgs& args);

}  // namespace zero_kernels
