// One row of AdamW's hyper table from the coefficients of a slot. In float64, each operation rounded on its own.
#pragma once

#include <cmath>

#include "rules/rule.h"

namespace zero_kernels {

// base^exponent by squaring: a product in one fixed order, which a library's pow does not promise.
ZK_HOST_DEVICE inline double power(double base, uint32_t exponent) {
  double result = 1.0;
  for (double square = base; exponent != 0; exponent >>= 1, square *= square)
    if (exponent & 1) result *= square;
  return result;
}

// What HyperRow is made from: the rows of `coefficients` in zero_kernels/hyper.py.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay, decoupled, maximize;
};

// Float64 throughout, each coefficient rounded once.
ZK_HOST_DEVICE inline HyperRow hyper_row(const Hyper& h, double step, bool active) {
  double shared = h.weight_decay * h.decoupled;
  return {
      {float(h.lr / (1 - power(h.beta1, uint32_t(step)))), float(1 - h.lr * shared), float(h.weight_decay - shared),
       float(h.eps), float(h.beta1), float(1 - h.beta1), float(h.beta2), float(1 - h.beta2),
       float(std::sqrt(1 - power(h.beta2, uint32_t(step))))},
      active ? 1.0f : 0.0f,
      float(1 - 2 * h.maximize),
      float(step)};
}

struct HyperTableArgs {
  const double* coefficients;  // [7, groups], the rows in Hyper's order
  const int32_t* group;        // [slots] or null: slot i uses column i
  const double* step;          // [slots]
  const bool* active;          // [slots] or null: all
  HyperRow* out;               // [slots]
  int64_t groups;
  int64_t slots;
};

ZK_HOST_DEVICE inline void make_hyper_row(const HyperTableArgs& args, int64_t slot) {
  int64_t column = args.group ? args.group[slot] : slot;
  if (column < 0 || column >= args.groups) stop();
  const double* of = args.coefficients + column;
  int64_t n = args.groups;
  Hyper h = {of[0], of[n], of[2 * n], of[3 * n], of[4 * n], of[5 * n], of[6 * n]};
  args.out[slot] = hyper_row(h, args.step[slot], args.active ? args.active[slot] : true);
}

}  // namespace zero_kernels
