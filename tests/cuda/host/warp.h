// The threads of a warp together, on this processor.
#pragma once

#include <algorithm>

#include "../../../csrc/cuda/encoded_step.h"

namespace zero_kernels {

// Each thread loads, each updates, the largest of theirs is that of the row, each stores. i: of the first element.
template <class Rule, bool kWhole, class Kinds>
static void encoded_row(const Kinds& kinds, const EncodedShard& shard, int64_t i) {
  RawQuad<Rule> raws[32];
  UpdatedQuad<Rule> of[32];
  uint32_t bounds[kMostStates] = {};
  for (int lane = 0; lane < 32; ++lane) {
    raws[lane] = load_encoded<Rule, kWhole>(kinds, shard, i + lane * kQuad, 0);
    of[lane] = update_encoded<Rule, kWhole>(kinds, shard, raws[lane]);
    for (int s = 0; s < Rule::kStates; ++s) bounds[s] = std::max(bounds[s], of[lane].bounds[s]);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int s = 0; s < Rule::kStates; ++s) of[lane].bounds[s] = bounds[s];
    store_encoded<Rule, kWhole>(kinds, shard, raws[lane], of[lane]);
  }
}

// As quick_eight of encoded_step.h. False: nothing is done.
template <int kLow>
static bool quick_rows(const EncodedShard& shard, int64_t i) {
  static constexpr Decoded decoded = make_decoded();
  const StepArgs& step = shard.step;
  QuickEight of[32];
  QuickMoments moments[32];
  bool live[32], usual = !(step.found_inf && *step.found_inf != 0.0f);
  for (int lane = 0; lane < 32; ++lane) {
    int64_t at = row_of(i + lane * kEight);
    int32_t slot = step.row_slot[at];
    HyperRow row = load_row<true>(step.hyper + (slot < 0 ? 0 : slot));
    Coefficients<AdamW, float> c(row, step.grad_scale ? *step.grad_scale : 1.0f);
    live[lane] = slot >= 0 && row.active != 0.0f;
    usual &= is_usual(c.own);
    QuickRaw raw = load_quick<kLow>(shard, i + lane * kEight);
    of[lane] = update_quick<kLow>(raw, shard.scales[0][at], shard.scales[1][at], decoded, c);
  }
  for (int first = 0; first < 32; first += 16) {
    uint32_t m = 0, s = 0;
    for (int lane = first; lane < first + 16; ++lane) {
      m = std::max(m, float_bits(of[lane].largest_m));
      s = std::max(s, of[lane].largest_s);
    }
    for (int lane = first; lane < first + 16; ++lane) {
      of[lane].largest_m = bits_float(m);
      of[lane].largest_s = s;
      moments[lane] = moments_quick(of[lane]);
      usual &= of[lane].usual;
    }
  }
  for (int lane = 0; lane < 32 && usual; ++lane)
    if (live[lane]) store_quick<kLow>(shard, i + lane * kEight, of[lane], moments[lane]);
  return usual;
}

// What a warp does of a tile, which begins at element `tile`: two rows. `quick`: where the kinds are, it tries.
template <class Rule, bool kWhole, class Kinds>
static void encoded_warp(const Kinds& kinds, const EncodedShard& shard, int64_t tile, int warp) {
  if constexpr (kWhole && kIsQuick<Rule, Kinds>) {
    int64_t i = tile + warp * 2 * kRow;
    if (quick_rows<Kinds::low_size()>(shard, i)) return;
    for (int row = 0; row < 2; ++row) encoded_row<Rule, true>(kinds, shard, i + row * kRow);
  } else {
    for (int q = 0; q < kQuads; ++q)
      encoded_row<Rule, kWhole>(kinds, shard, tile + warp * kRow + int64_t(q) * kThreads * kQuad);
  }
}

}  // namespace zero_kernels
