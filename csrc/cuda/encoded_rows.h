// The update of four elements whose states or master are not in fp32 alone, on CUDA.
#pragma once

#include "estimates.h"
#include "raw.h"
#include "step.h"

namespace zero_kernels {

struct EncodedForeachArgs {
  static constexpr int kMostShards = 24;
  int count;  // of shards
  DType grad, out;
  int low_size;  // of a split master
  Form forms[kMostStates];
  int64_t first_block[kMostShards];
  EncodedShard shards[kMostShards];
};
static_assert(sizeof(EncodedForeachArgs) <= kMostBytes);

namespace {

// ---- kinds --------------------------------------------------------------------------------------------------------

// The dtypes and forms of a launch, of any kind: told by its arguments, which a thread asks for each element.
struct AnyKinds {
  const EncodedForeachArgs& args;
  ZK_HOST_DEVICE explicit AnyKinds(const EncodedForeachArgs& args) : args(args) {}

  ZK_HOST_DEVICE DType grad() const { return args.grad; }
  ZK_HOST_DEVICE DType out() const { return args.out; }
  ZK_HOST_DEVICE int low_size() const { return args.low_size; }
  ZK_HOST_DEVICE bool is_split(const EncodedShard& shard) const { return shard.low != nullptr; }

  // As StepArgs::state.
  ZK_HOST_DEVICE Form form(int i) const { return i == 0 ? args.forms[0] : i == 1 ? args.forms[1] : args.forms[2]; }
};

// The usual ones, of a rule with two states, known as it is compiled. kLow: bytes of a split master's low half, or 0.
template <int kLow, Form kFirst, Form kSecond>
struct UsualKinds {
  // Four blocks, but where masters are split beside moments of 16 bits or more: these kernels would spill. For moments
  // of 8 bits an H100 had 0.88 of a copy's bandwidth with four, and 0.75 with three.
  static constexpr int kBlocksPerSm = kLow == 0 || kFirst == Form::kInt8 ? 4 : 3;

  ZK_HOST_DEVICE explicit UsualKinds(const EncodedForeachArgs&) {}

  ZK_HOST_DEVICE static constexpr DType grad() { return DType::kBFloat16; }
  ZK_HOST_DEVICE static constexpr DType out() { return DType::kBFloat16; }
  ZK_HOST_DEVICE static constexpr int low_size() { return kLow; }
  ZK_HOST_DEVICE static constexpr bool is_split(const EncodedShard&) { return kLow != 0; }
  ZK_HOST_DEVICE static constexpr Form form(int i) { return i == 0 ? kFirst : kSecond; }

  static bool are(const Encoded& of_all, DType grad, DType out) {
    return grad == DType::kBFloat16 && out == DType::kBFloat16 && of_all.low_size == kLow &&
           of_all.forms[0] == kFirst && of_all.forms[1] == kSecond;
  }
};

// Calls run(Type<Kinds>): of the one of Usual that the shards have, else AnyKinds.
template <class... Usual>
struct KindsOf {
  template <class Run>
  static void choose(
      [[maybe_unused]] const Encoded& of_all, [[maybe_unused]] DType grad, [[maybe_unused]] DType out, Run run) {
    bool found = false;
    ((!found && Usual::are(of_all, grad, out) ? (found = true, run(Type<Usual>())) : void()), ...);
    if (!found) run(Type<AnyKinds>());
  }
};

template <Form kFirst, Form kSecond>
using Split = UsualKinds<2, kFirst, kSecond>;
template <Form kFirst, Form kSecond>
using Split8 = UsualKinds<1, kFirst, kSecond>;
template <Form kFirst, Form kSecond>
using Whole = UsualKinds<0, kFirst, kSecond>;

// A kernel for each set of kinds: so only AdamW, the rule of two states, has more than one.
template <class Rule>
using RuleKinds = std::conditional_t<
    Rule::kStates == 2,
    KindsOf<
        Whole<Form::kBFloat16, Form::kBFloat16>, Whole<Form::kInt8, Form::kRoot8>, Split<Form::kFloat, Form::kFloat>,
        Split<Form::kBFloat16, Form::kBFloat16>, Split<Form::kInt8, Form::kRoot8>, Split8<Form::kFloat, Form::kFloat>,
        Split8<Form::kBFloat16, Form::kBFloat16>, Split8<Form::kInt8, Form::kRoot8>>,
    KindsOf<>>;

// ---- kernel -------------------------------------------------------------------------------------------------------

ZK_HOST_DEVICE inline void decode_raw(Form form, const Raw& raw, float scale, float (&x)[kQuad]) {
  if (form == Form::kFloat || form == Form::kBFloat16)
    return widen_raw(form == Form::kFloat ? DType::kFloat : DType::kBFloat16, raw, x);
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j)
    x[j] = form == Form::kInt8 ? quick_unscaled_int8(float(int8_t(byte(raw, j)))) * scale
                               : decoded_root8(float(byte(raw, j)), scale);
}

ZK_HOST_DEVICE inline Raw encode_raw(Form form, const float (&x)[kQuad], float scale) {
  if (form == Form::kFloat) return narrow_raw(DType::kFloat, x);
  Raw raw = {};
  if (!is_usable(scale)) return raw;
  Estimate estimate(form, scale);
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j) raw.words[0] |= uint32_t(uint8_t(stored_by(estimate, x[j]))) << (j * 8);
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

template <class Rule, bool kWhole, class Kinds>
ZK_HOST_DEVICE inline RawQuad<Rule> load_encoded(const Kinds& kinds, const EncodedShard& shard, int64_t first, int q) {
  const StepArgs& step = shard.step;
  RawQuad<Rule> raw;
  raw.i = first + int64_t(q) * kThreads * kQuad;
  int64_t left = step.numel - raw.i;
  raw.count = kWhole || left > kQuad ? kQuad : left > 0 ? int(left) : 0;
  raw.slot = kWhole || left > 0 ? step.row_slot[row_of(raw.i)] : -1;
  raw.grad = load_raw<kWhole>(step.grad, size_of(kinds.grad()), raw.i, raw.count);
  raw.high = {};
  if (kinds.is_split(shard)) {
    raw.master = load_raw<kWhole>(shard.low, kinds.low_size(), raw.i, raw.count);
    raw.high = load_raw<kWhole>(step.param_out, sizeof(BFloat16), raw.i, raw.count);
  } else {
    raw.master = load_raw<kWhole>(step.master, sizeof(float), raw.i, raw.count);
  }
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s)
    raw.states[s] = load_raw<kWhole>(step.state(s), size_of(kinds.form(s)), raw.i, raw.count);
  return raw;
}

template <class Rule, bool kWhole, class Kinds>
ZK_HOST_DEVICE inline UpdatedQuad<Rule> update_encoded(
    const Kinds& kinds, const EncodedShard& shard, const RawQuad<Rule>& raw) {
  const StepArgs& step = shard.step;
  UpdatedQuad<Rule> of;
  if (raw.slot >= step.slots) stop();
  HyperRow row = load_row<kWhole>(step.hyper + (raw.slot < 0 ? 0 : raw.slot));
  Coefficients<Rule, float> c(row, step.grad_scale ? *step.grad_scale : 1.0f);
  widen_raw(kinds.grad(), raw.grad, of.quad.g);
  bool skip = step.found_inf && *step.found_inf != 0.0f;
  // Threads that share a slot all write the same 1.
  if (skip && step.nonfinite_slots && raw.slot >= 0 && any_nonfinite(of.quad.g, c.grad_scale))
    step.nonfinite_slots[raw.slot] = 1;
  ZK_UNROLL
  for (int j = 0; j < kQuad; ++j)
    of.quad.p[j] = kinds.is_split(shard) ? join({{half_word(raw.high, j)}, low_half(kinds.low_size(), raw.master, j)})
                                         : bits_float(raw.master.words[j]);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) {
    float scale = has_scale(kinds.form(s)) && raw.count > 0 ? shard.scale(s)[row_of(raw.i)] : 0.0f;
    decode_raw(kinds.form(s), raw.states[s], scale, of.quad.states[s]);
  }
  update_quad(of.quad, c);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) {
    of.bounds[s] = 0;
    ZK_UNROLL
    for (int j = 0; j < kQuad; ++j) {
      uint32_t bound = float_bits(bound_of(kinds.form(s), of.quad.states[s][j]));
      if (j < raw.count && bound > of.bounds[s]) of.bounds[s] = bound;
    }
  }
  of.live = raw.slot >= 0 && row.active != 0.0f && !skip;
  return of;
}

// The master becomes what is kept of it.
template <class Rule, bool kWhole, class Kinds>
ZK_HOST_DEVICE inline void store_encoded(
    const Kinds& kinds, const EncodedShard& shard, const RawQuad<Rule>& raw, UpdatedQuad<Rule>& of) {
  const StepArgs& step = shard.step;
  Raw high = {}, low = {};
  if (kinds.is_split(shard)) {
    ZK_UNROLL
    for (int j = 0; j < kQuad; ++j) {
      Halves halves = split(of.quad.p[j]);
      if (kinds.low_size() == 1) {
        halves.low = in_8_bits(halves.low);
        low.words[0] |= uint32_t(uint16_t(halves.low) >> 8) << (j * 8);
      } else {
        low.words[j / 2] |= uint32_t(uint16_t(halves.low)) << (j % 2 * 16);
      }
      high.words[j / 2] |= uint32_t(halves.high.bits) << (j % 2 * 16);
    }
  }
  if (!of.live) return;
  if (kinds.is_split(shard)) {
    store_raw<kWhole>(step.param_out, sizeof(BFloat16), raw.i, raw.count, high);
    store_raw<kWhole>(shard.low, kinds.low_size(), raw.i, raw.count, low);
  } else {
    store_raw<kWhole>(step.master, sizeof(float), raw.i, raw.count, narrow_raw(DType::kFloat, of.quad.p));
    if (step.param_out)
      store_raw<kWhole>(step.param_out, size_of(kinds.out()), raw.i, raw.count, narrow_raw(kinds.out(), of.quad.p));
  }
  // Loaded anew: kept since the update, the number of the step took registers where nobody needs it.
  uint32_t noise = 0;
  if (shard.row_keys) noise = noise_of_row(shard.row_keys[row_of(raw.i)], step.hyper[raw.slot].step_number);
  ZK_UNROLL
  for (int s = 0; s < Rule::kStates; ++s) {
    Form form = kinds.form(s);
    float scale = has_scale(form) ? scale_of(form, bits_float(of.bounds[s])) : 0.0f;
    if (has_scale(form) && place_in_row(raw.i) == 0 && raw.count > 0) shard.scale(s)[row_of(raw.i)] = scale;
    Raw kept = form == Form::kBFloat16
                   ? stochastic_raw(of.quad.states[s], noise_of_state(noise, s), place_in_row(raw.i))
                   : encode_raw(form, of.quad.states[s], scale);
    store_raw<kWhole>(step.state(s), size_of(form), raw.i, raw.count, kept);
  }
}

}  // namespace
}  // namespace zero_kernels
