// What an update rule is, and what it may use.
//
// A rule is a struct in a file of its own: how many state tensors it has, its coefficients, and the update of one lane.
// One that divides (`kDivides`) has `begin` and `end` in place of `update`: a processor's loop begins the next lanes
// before it ends these, as a division takes long.
// Loops, loads, stores and casts are written once a backend, for all rules. V is float or a SIMD vector with + - * /,
// square_root, magnitude, max_bits and sign.
//
// Every operation is rounded on its own, in the order that is written: compile without contraction (-ffp-contract=off)
// and without -ffast-math, or the backends stop agreeing bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "../float16.h"
#include "../types.h"

namespace zero_kernels {

constexpr int64_t kRow = 128;  // elements that share one entry of row_slot

constexpr int kMostStates = 3;

// One row of the hyper table, as zero_kernels/hyper.py lays it out.
struct HyperRow {
  float own[9];  // the rule's own columns, in its order
  float active;
  float grad_factor;
  float step_number;  // for which it was made
};
constexpr int64_t kHyperColumns = 12;
static_assert(sizeof(HyperRow) == kHyperColumns * sizeof(float));

ZK_HOST_DEVICE static inline float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

ZK_HOST_DEVICE static inline float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffff); }

// The larger bit pattern, unsigned: of magnitudes NaN is above inf.
ZK_HOST_DEVICE static inline float max_bits(float a, float b) { return float_bits(a) > float_bits(b) ? a : b; }

// 1, -1, or x itself where it is neither above nor below 0: so NaN stays.
ZK_HOST_DEVICE static inline float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

// 1 where x is 0, of either sign, else 0.
ZK_HOST_DEVICE static inline float is_zero(float x) { return x == 0.0f ? 1.0f : 0.0f; }

// What many lanes are divided by. The quotients are rounded to nearest, as those of `/` are: vectors may find them in
// another way than by dividing.
template <class V>
struct Divisor {
  V by;

  ZK_HOST_DEVICE explicit Divisor(float by) : by(by) {}
};
template <class V>
ZK_HOST_DEVICE inline V operator/(V a, const Divisor<V>& divisor) {
  return a / divisor.by;
}

// A row of the hyper table, spread over the lanes of V.
template <class Rule, class V>
struct Coefficients {
  V grad_scale;
  typename Rule::template Own<V> own;

  ZK_HOST_DEVICE Coefficients(const HyperRow& row, float scale) : grad_scale(scale * row.grad_factor), own(row.own) {}
};

// What an update reads and writes of one lane: the master, and the states in the rule's order.
template <class Rule, class V>
struct Lane {
  V p;
  V states[Rule::kStates > 0 ? Rule::kStates : 1];
};

// New states, and what `end_update` divides by, if it does.
template <class Rule, class V>
ZK_HOST_DEVICE inline V begin_update(V grad, Lane<Rule, V>& lane, const Coefficients<Rule, V>& c) {
  V g = grad * c.grad_scale;
  if constexpr (Rule::kDivides) {
    return Rule::begin(g, lane.p, lane.states, c.own);
  } else {
    Rule::update(g, lane.p, lane.states, c.own);
    return g;
  }
}

template <class Rule, class V>
ZK_HOST_DEVICE inline void end_update(Lane<Rule, V>& lane, V divisor, const Coefficients<Rule, V>& c) {
  if constexpr (Rule::kDivides) lane.p = Rule::end(lane.p, lane.states[0], divisor, c.own);
}

template <class Rule, class V>
ZK_HOST_DEVICE inline void update(V grad, Lane<Rule, V>& lane, const Coefficients<Rule, V>& c) {
  end_update(lane, begin_update(grad, lane, c), c);
}

}  // namespace zero_kernels
