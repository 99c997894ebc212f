// The threads of a warp together, on this processor.
#pragma once

#include <algorithm>

#include "../../../csrc/cuda/quick_step.h"

namespace zero_kernels {

// Each thread loads, each updates, the largest of theirs is that of the row, each stores. i: of the first element.
template <class Rule, bool kWhole>
static void step_row(const Stored& stored, const StepArgs& shard, int64_t i) {
  RawQuad<Rule> raws[32];
  Quad<Rule> of[32];
  uint32_t bounds[kMostStates] = {};
  for (int lane = 0; lane < 32; ++lane) {
    raws[lane] = load_quad<Rule, kWhole>(stored, shard, i + lane * kQuad);
    of[lane] = update_quad<Rule, kWhole>(stored, shard, raws[lane], skips(shard));
    for (int s = 0; s < Rule::kStates; ++s) bounds[s] = std::max(bounds[s], of[lane].bounds[s]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int s = 0; s < Rule::kStates; ++s) of[lane].bounds[s] = bounds[s];
    store_quad<Rule, kWhole>(stored, shard, raws[lane], of[lane]);
  }
}

// What a warp does of its rows.
template <class Rule>
static void step_rows(const Stored& stored, const StepArgs& shard, int64_t i, bool whole) {
  for (int q = 0; q < kQuads; ++q) {
    if (whole)
      step_row<Rule, true>(stored, shard, i + q * kRow);
    else
      step_row<Rule, false>(stored, shard, i + q * kRow);
  }
}

// As quick_eight of step_adamw.cu. False: nothing is done.
template <class Way>
static bool quick_rows(const StepArgs& shard, int64_t i) {
  static constexpr Decoded decoded = make_decoded();
  constexpr int kLow = Way::kLow;
  constexpr Form kForm = Way::kForm;
  QuickEight of[32];
  QuickMoments moments[32];
  uint32_t noise[32];
  bool live[32], usual = !(shard.found_inf && *shard.found_inf != 0.0f);
  for (int lane = 0; lane < 32; ++lane) {
    int64_t at = row_of(i + lane * kEight);
    int32_t slot = shard.row_slot[at];
    HyperRow row = load_row<true>(shard.hyper + (slot < 0 ? 0 : slot));
    Coefficients<AdamW, float> c(row, shard.grad_scale ? *shard.grad_scale : 1.0f);
    live[lane] = slot >= 0 && row.active != 0.0f;
    usual &= is_usual<kForm>(c.own);
    noise[lane] = kForm == Form::kBFloat16 ? noise_of_row(shard.row_keys[at], row.step_number) : 0;
    QuickRaw raw = load_quick<kLow, kForm>(shard, i + lane * kEight);
    float scale_m = shard.scales[0] ? shard.scales[0][at] : 0.0f,
          scale_v = shard.scales[1] ? shard.scales[1][at] : 0.0f;
    of[lane] = update_quick<kLow, kForm>(raw, scale_m, scale_v, decoded, c);
  }
  for (int first = 0; first < 32; first += 16) {
    uint32_t m = 0, s = 0;
    for (int lane = first; lane < first + 16; ++lane) {
      m = std::max(m, of[lane].largest_m);
      s = std::max(s, of[lane].largest_s);
    }
    for (int lane = first; lane < first + 16; ++lane) {
      of[lane].largest_m = m;
      of[lane].largest_s = s;
      moments[lane] = stored_moments<kForm>(of[lane], noise[lane], place_in_row(i + lane * kEight));
      usual &= of[lane].usual;
    }
  }
  for (int lane = 0; lane < 32 && usual; ++lane)
    if (live[lane]) store_quick<kLow, kForm>(shard, i + lane * kEight, of[lane], moments[lane]);
  return usual;
}

}  // namespace zero_kernels
