// The update of a shard, by any rule. Part of kernels.cpp: vectors are of its instruction set.
#pragma once

#include "access.h"

namespace zero_kernels {
namespace {

float* state_of(const StepArgs& args, int s) { return static_cast<float*>(args.states[s]); }

// Updates a vector, and gives the new masters.
template <class Rule, class Grad>
[[gnu::always_inline]] inline Vec update_at(
    const StepArgs& args, const Grad* grad, int64_t i, const Coefficients<Rule, Vec>& c) {
  Lane<Rule, Vec> lane;
  float* master = static_cast<float*>(args.master) + i;
  lane.p = Vec::load(master);
  for (int s = 0; s < Rule::kStates; ++s) lane.states[s] = Vec::load(state_of(args, s) + i);
  update(Vec::load(grad + i), lane, c);
  lane.p.store(master);
  for (int s = 0; s < Rule::kStates; ++s) lane.states[s].store(state_of(args, s) + i);
  return lane.p;
}

template <class Rule, class Grad>
Vec update_tail(const StepArgs& args, const Grad* grad, int64_t i, int count, const Coefficients<Rule, Vec>& c) {
  Lane<Rule, Vec> lane;
  float* master = static_cast<float*>(args.master) + i;
  lane.p = Vec::load_first(master, count);
  for (int s = 0; s < Rule::kStates; ++s) lane.states[s] = Vec::load_first(state_of(args, s) + i, count);
  update(Vec::load_first(grad + i, count), lane, c);
  lane.p.store_first(master, count);
  for (int s = 0; s < Rule::kStates; ++s) lane.states[s].store_first(state_of(args, s) + i, count);
  return lane.p;
}

// Elements [begin, end), all of one slot; begin is the start of a row.
template <class Rule, class Grad, class Out>
void update_run(const StepArgs& args, int64_t begin, int64_t end, const Coefficients<Rule, Vec>& c, bool stream) {
  const Grad* grad = static_cast<const Grad*>(args.grad);
  Out* out = static_cast<Out*>(args.param_out);
  int64_t i = begin;
  for (; i + kPair <= end; i += kPair) {
    prefetch_pair(grad + i + kAhead);
    prefetch_pair(static_cast<float*>(args.master) + i + kAhead);
    for (int s = 0; s < Rule::kStates; ++s) prefetch_pair(state_of(args, s) + i + kAhead);
    Vec a = update_at(args, grad, i, c);
    Vec b = update_at(args, grad, i + kLanes, c);
    write_pair(advance(out, i), a, b, stream);
  }
  for (; i < end; i += kLanes) {
    int count = end - i < kLanes ? int(end - i) : kLanes;
    Vec p = update_tail(args, grad, i, count, c);
    write(advance(out, i), p, count);
  }
}

// ---- rows, slot by slot ---------------------------------------------------------------------------------------------

template <class Rule, class Grad, class Out>
void update_rows(const StepArgs& args, int64_t row_begin, int64_t row_end) {
  bool stream = aligned(args.param_out) && args.numel >= kStreamFrom;
  for (int64_t row = row_begin; row < row_end;) {
    int32_t slot = args.row_slot[row];
    int64_t run_end = row + 1;
    while (run_end < row_end && args.row_slot[run_end] == slot) ++run_end;
    if (slot >= 0 && args.hyper[slot].active != 0.0f) {
      Coefficients<Rule, Vec> c(args.hyper[slot], scale_of(args));
      int64_t end = run_end * kRow < args.numel ? run_end * kRow : args.numel;
      update_run<Rule, Grad, Out>(args, row * kRow, end, c, stream);
    }
    row = run_end;
  }
  if (stream) stream_fence();
}

template <class Rule>
void step(const StepArgs& args, const Stored& stored, int64_t row_begin, int64_t row_end) {
  with_type(stored.grad, [&](auto g) {
    using Grad = typename decltype(g)::type;
    if (!stored.has_output) return update_rows<Rule, Grad, NoOutput>(args, row_begin, row_end);
    with_type(
        stored.out, [&](auto out) { update_rows<Rule, Grad, typename decltype(out)::type>(args, row_begin, row_end); });
  });
}

}  // namespace
}  // namespace zero_kernels
