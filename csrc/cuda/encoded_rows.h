// The update of four elements whose states or master are not in fp32 alone, on CUDA.
#pragma once

#include "step.h"

namespace zero_kernels {
namespace {

ZK_HOST_DEVICE inline void decode_raw(Form form, const Raw& raw, float scale, float (&x)[kQuad]) {
  if (form == Form::kFloat || form == Form::kBFloat16)
    return widen_raw(form == Form::kFloat ? DType::kFloat : DType::kBFloat16, raw, x);
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j)
    x[j] = form == Form::kInt8 ? unscaled_int8(float(int8_t(byte(raw, j)))) * scale
                               : decoded_root8(float(byte(raw, j)), scale);
}

ZK_HOST_DEVICE inline Raw encode_raw(Form form, const float (&x)[kQuad], float scale) {
  if (form == Form::kFloat) return narrow_raw(DType::kFloat, x);
  Raw raw = {};
  if (!is_usable(scale)) return raw;
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j) raw.words[0] |= uint32_t(uint8_t(nearest(encoded(form, x[j], scale)))) << (j * 8);
  return raw;
}

// `element`: the place of the first in its row.
ZK_HOST_DEVICE inline Raw stochastic_raw(const float (&x)[kQuad], uint32_t of_state, int element) {
  Raw raw = {};
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j) {
    uint32_t noise = noise_in(noise_word(of_state, element + j), j);
    raw.words[j / 2] |= uint32_t(narrow_stochastic(x[j], noise).bits) << (j % 2 * 16);
  }
  return raw;
}

// A quad as it was loaded.
template <class Rule>
struct RawQuad {
  Raw grad, master, high;  // high: of a split master, whose low halves `master` has
  Raw states[Rule::kStates > 0 ? Rule::kStates : 1];
  int64_t i;
  int count;
  int32_t slot;
};

// A quad that is updated, and what is to be done with it.
template <class Rule>
struct UpdatedQuad {
  Quad<Rule> quad;
  uint32_t bounds[kMostStates];  // the largest of its elements, and then of the row
  bool live;
};

template <class Rule, bool kWhole>
ZK_HOST_DEVICE inline RawQuad<Rule> load_encoded(const Stored& stored, const StepArgs& args, int64_t i) {
  RawQuad<Rule> raw;
  raw.i = i;
  int64_t left = args.numel - raw.i;
  raw.count = kWhole || left > kQuad ? kQuad : left > 0 ? int(left) : 0;
  raw.slot = kWhole || left > 0 ? args.row_slot[row_of(raw.i)] : -1;
  raw.grad = load_raw<kWhole>(args.grad, size_of(stored.grad), raw.i, raw.count);
  raw.high = {};
  if (stored.low_size) {
    raw.master = load_raw<kWhole>(args.master, stored.low_size, raw.i, raw.count);
    raw.high = load_raw<kWhole>(args.param_out, sizeof(BFloat16), raw.i, raw.count);
  } else {
    raw.master = load_raw<kWhole>(args.master, sizeof(float), raw.i, raw.count);
  }
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s)
    raw.states[s] = load_raw<kWhole>(of_state(args.states, s), size_of(of_state(stored.forms, s)), raw.i, raw.count);
  return raw;
}

template <class Rule, bool kWhole>
ZK_HOST_DEVICE inline UpdatedQuad<Rule> update_encoded(
    const Stored& stored, const StepArgs& args, const RawQuad<Rule>& raw) {
  UpdatedQuad<Rule> of;
  if (raw.slot >= args.slots) stop();
  HyperRow row = load_row<kWhole>(args.hyper + (raw.slot < 0 ? 0 : raw.slot));
  Coefficients<Rule, float> c(row, args.grad_scale ? *args.grad_scale : 1.0f);
  widen_raw(stored.grad, raw.grad, of.quad.g);
  bool skip = args.found_inf && *args.found_inf != 0.0f;
  // Threads that share a slot all write the same 1.
  if (skip && args.nonfinite_slots && raw.slot >= 0 && any_nonfinite(of.quad.g, c.grad_scale))
    args.nonfinite_slots[raw.slot] = 1;
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j)
    of.quad.p[j] = stored.low_size ? join({{half_word(raw.high, j)}, low_half(stored.low_size, raw.master, j)})
                                   : bits_float(raw.master.words[j]);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) {
    Form form = of_state(stored.forms, s);
    float scale = has_scale(form) && raw.count > 0 ? of_state(args.scales, s)[row_of(raw.i)] : 0.0f;
    decode_raw(form, raw.states[s], scale, of.quad.states[s]);
  }
  update_quad(of.quad, c);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) {
    of.bounds[s] = 0;
    ZK_UNROLL
    for (int j = 0; j < kQuad; ++j) {
      uint32_t bound = float_bits(bound_of(of_state(stored.forms, s), of.quad.states[s][j]));
      if (j < raw.count && bound > of.bounds[s]) of.bounds[s] = bound;
    }
  }
  of.live = raw.slot >= 0 && row.active != 0.0f && !skip;
  return of;
}

// The master becomes what is kept of it.
template <class Rule, bool kWhole>
ZK_HOST_DEVICE inline void store_encoded(
    const Stored& stored, const StepArgs& args, const RawQuad<Rule>& raw, UpdatedQuad<Rule>& of) {
  Raw high = {}, low = {};
  if (stored.low_size) {
    ZK_UNROLL
    for (int j = 0; j < kQuad; ++j) {
      Halves halves = split(of.quad.p[j]);
      if (stored.low_size == 1) {
        halves.low = in_8_bits(halves.low);
        low.words[0] |= uint32_t(uint16_t(halves.low) >> 8) << (j * 8);
      } else {
        low.words[j / 2] |= uint32_t(uint16_t(halves.low)) << (j % 2 * 16);
      }
      high.words[j / 2] |= uint32_t(halves.high.bits) << (j % 2 * 16);
    }
  }
  if (!of.live) return;
  if (stored.low_size) {
    store_raw<kWhole>(args.param_out, sizeof(BFloat16), raw.i, raw.count, high);
    store_raw<kWhole>(args.master, stored.low_size, raw.i, raw.count, low);
  } else {
    store_raw<kWhole>(args.master, sizeof(float), raw.i, raw.count, narrow_raw(DType::kFloat, of.quad.p));
    if (args.param_out)
      store_raw<kWhole>(args.param_out, size_of(stored.out), raw.i, raw.count, narrow_raw(stored.out, of.quad.p));
  }
  // Loaded anew: kept since the update, the number of the step took registers where nobody needs it.
  uint32_t noise = 0;
  if (args.row_keys) noise = noise_of_row(args.row_keys[row_of(raw.i)], args.hyper[raw.slot].step_number);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) {
    Form form = of_state(stored.forms, s);
    float scale = has_scale(form) ? scale_of(form, bits_float(of.bounds[s])) : 0.0f;
    if (has_scale(form) && place_in_row(raw.i) == 0 && raw.count > 0) of_state(args.scales, s)[row_of(raw.i)] = scale;
    Raw kept = form == Form::kBFloat16
                   ? stochastic_raw(of.quad.states[s], noise_of_state(noise, s), place_in_row(raw.i))
                   : encode_raw(form, of.quad.states[s], scale);
    store_raw<kWhole>(of_state(args.states, s), size_of(form), raw.i, raw.count, kept);
  }
}

}  // namespace
}  // namespace zero_kernels
