// The update of rows by any rule, however they are stored: one loop for all forms and dtypes. Part of kernels.cpp.
#pragma once

#include "access.h"

namespace zero_kernels {
namespace {

// Rows that are updated before they are encoded, so that a processor that waits for the largest of one row is at the
// next one meanwhile. In the cache, int8 and uint8, an EPYC with AVX-512: 0.93 ns an element with 2, 0.85 with 4, 0.83
// with 8 and with 16.
constexpr int kTogether = 8;
constexpr int kMostElements = kTogether * kRow;

// What the next such rows need is asked for, so that it comes while these are encoded, too. 16 Mi elements with int8,
// uint8 and 8 bits of the master, one thread of an EPYC: 0.97 ns an element at least, and 1.03 with kAhead. Not what
// has 4 bytes an element: with those and fp32 moments it took 0.79 in place of 0.76.
constexpr int kAheadOfRows = kMostElements;

// Of such rows: states that are not encoded yet; and of each state and row the noise by which bf16 is rounded.
struct Rows {
  uint32_t noise[kMostStates][kTogether];
  alignas(64) float states[kMostStates][kMostElements];
};

// Two vectors of a tensor, and the prefetch of later ones.
template <class T>
[[gnu::always_inline]] inline Pair load_pair(const T* from) {
  prefetch_pair(from + (sizeof(T) < 4 ? kAheadOfRows : kAhead));
  return {Vec::load(from), Vec::load(from + kLanes)};
}

[[gnu::always_inline]] inline Pair load_pair(DType dtype, const void* from, int i) {
  if (dtype == DType::kBFloat16) return load_pair(static_cast<const BFloat16*>(from) + i);
  if (dtype == DType::kHalf) return load_pair(static_cast<const Half*>(from) + i);
  return load_pair(static_cast<const float*>(from) + i);
}

template <class Low>
[[gnu::always_inline]] inline Pair load_master(const BFloat16* high, const Low* low) {
  prefetch_pair(high + kAheadOfRows);
  prefetch_pair(low + kAheadOfRows);
  return join_pair(high, low);
}

// `low`: of that many bytes an element.
[[gnu::always_inline]] inline Pair load_master(const BFloat16* high, const void* low, int low_size, int i) {
  if (low_size == 1) return load_master(high + i, static_cast<const int8_t*>(low) + i);
  return load_master(high + i, static_cast<const int16_t*>(low) + i);
}

[[gnu::always_inline]] inline void store_master(BFloat16* high, void* low, int low_size, int i, Vec a, Vec b) {
  if (low_size == 1) return split_pair(a, b, high + i, static_cast<int8_t*>(low) + i);
  split_pair(a, b, high + i, static_cast<int16_t*>(low) + i);
}

[[gnu::always_inline]] inline Pair load_state(Form form, const void* from, const float* scales, int i) {
  if (form == Form::kFloat) return load_pair(static_cast<const float*>(from) + i);
  if (form == Form::kBFloat16) return load_pair(static_cast<const BFloat16*>(from) + i);
  Vec scale(scales[i / kRow]);
  if (form == Form::kInt8) {
    const int8_t* stored = static_cast<const int8_t*>(from) + i;
    prefetch_pair(stored + kAheadOfRows);
    Pair x = unscaled_int8_pair(stored);
    return {x.a * scale, x.b * scale};
  }
  Pair x = load_pair(static_cast<const uint8_t*>(from) + i);
  return {decoded_root8(x.a, scale), decoded_root8(x.b, scale)};
}

// What is encoded once a row is complete goes to `kept`: values, or their roots. AdamW has these roots anyway. `noise`:
// of each row, by which bf16 is rounded.
[[gnu::always_inline]] inline void store_state(
    Form form, void* to, float* kept, const uint32_t* noise, int i, Vec a, Vec b) {
  if (form == Form::kFloat) return store_pair(static_cast<float*>(to) + i, a, b);
  if (form == Form::kBFloat16) return store_stochastic(static_cast<BFloat16*>(to) + i, a, b, noise[i / kRow], i % kRow);
  if (form == Form::kInt8) return store_pair(kept + i, a, b);
  store_pair(kept + i, square_root(a), square_root(b));
}

[[gnu::always_inline]] inline void write_pair(DType dtype, void* to, int i, Vec a, Vec b, bool stream) {
  if (dtype == DType::kBFloat16) return write_pair(static_cast<BFloat16*>(to) + i, a, b, stream);
  if (dtype == DType::kHalf) return write_pair(static_cast<Half*>(to) + i, a, b, stream);
  write_pair(static_cast<float*>(to) + i, a, b, stream);
}

constexpr int kLine = 16;
constexpr int kParts = kLine / kLanes;  // vectors of a line

float scale_of_row(Form form, const float* values) {
  Vec largest[kParts];
  for (Vec& part : largest) part = Vec(0.0f);
  for (int i = 0; i < kRow; i += kLine)
    for (int part = 0; part < kParts; ++part)
      largest[part] = max_bits(largest[part], magnitude(Vec::load(values + i + part * kLanes)));
  return usual_scale(form, largest_of_line(largest));
}

// Stores estimates. False where one is too near to a tie for that, or may be wrong: where a value or a reciprocal is
// below the normal numbers, processors take it for 0, and at the largest scale values may lie above it.
template <class T>
bool estimate_row(const float* values, T* to, float scale) {
  if (!kEstimates || scale < 0x1p-50f || scale >= kLargest) return false;
  Estimate estimate(scale);
  Vec unsure(0.0f);
  for (int i = 0; i < kRow; i += kLanes) unsure = any_bits(unsure, estimate.store(Vec::load(values + i), to + i));
  return !has_bits(unsure);
}

template <Form kForm, class T>
void encode_rows(float* values, int numel, T* to, float* scales) {
  for (int i = 0; i < numel; i += kRow) scales[i / kRow] = scale_of_row(kForm, values + i);
  for (int i = 0; i < numel; i += kRow) {
    float scale = scales[i / kRow];
    if (!is_usable(scale)) {
      __builtin_memset(to + i, 0, kRow);
    } else if (!estimate_row(values + i, to + i, scale)) {
      for (int j = i; scale == kLargest && j < i + kRow; ++j) values[j] = within(values[j], scale);
      for (int j = i; j < i + kRow; j += kLanes) {
        Vec value = Vec::load(values + j);
        (kForm == Form::kInt8 ? encoded_int8(value, Vec(scale)) : encoded_root8(value, Vec(scale))).store(to + j);
      }
    }
  }
}

void encode(Form form, float* values, int numel, void* to, float* scales) {
  if (form == Form::kInt8) encode_rows<Form::kInt8>(values, numel, static_cast<int8_t*>(to), scales);
  if (form == Form::kRoot8) encode_rows<Form::kRoot8>(values, numel, static_cast<uint8_t*>(to), scales);
}

template <class T>
T* of_row(T* tensor, int64_t row, int64_t size) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(tensor) + row * kRow * size);
}

// Updates `numel` elements of rows, and stores all but the states that have a scale. The processor foresees the
// branches of this loop, which are the same in every round: a loop for each dtype was no faster with AVX-512; with AVX2
// it was 6 to 13 % faster where all is in the caches.
template <class Rule>
void update_pairs(
    const StepArgs& args, const Stored& of, int64_t row, int numel, const Coefficients<Rule, Vec>& given, Rows& rows,
    bool stream) {
  Coefficients<Rule, Vec> c = given;
  Stored stored = of;
  const void* grad = of_row(args.grad, row, size_of(stored.grad));
  void* param = of_row(args.param_out, row, size_of(stored.out));
  void* master = of_row(args.master, row, stored.low_size ? stored.low_size : sizeof(float));
  BFloat16* high = static_cast<BFloat16*>(param);
  void* states[kMostStates];
  const float* scales[kMostStates];
  for (int s = 0; s < Rule::kStates; ++s) {
    states[s] = of_row(args.states[s], row, size_of(stored.forms[s]));
    scales[s] = args.scales[s] ? args.scales[s] + row : nullptr;
  }
  // The pair whose update has begun: it ends when the next one has begun, so that divisions have other work beside
  // them.
  Lane<Rule, Vec> a, b;
  Pair divisor;
  auto end_pair = [&](int i) __attribute__((always_inline)) {
    end_update(a, divisor.a, c);
    end_update(b, divisor.b, c);
    if (stored.low_size) {
      store_master(high, master, stored.low_size, i, a.p, b.p);
    } else {
      store_pair(static_cast<float*>(master) + i, a.p, b.p);
      if (stored.has_output) write_pair(stored.out, param, i, a.p, b.p, stream);
    }
  };
  for (int i = 0; i < numel; i += kPair) {
    Pair g = load_pair(stored.grad, grad, i);
    Pair p =
        stored.low_size ? load_master(high, master, stored.low_size, i) : load_pair(static_cast<float*>(master) + i);
    Lane<Rule, Vec> next_a = {p.a}, next_b = {p.b};
    for (int s = 0; s < Rule::kStates; ++s) {
      Pair state = load_state(stored.forms[s], states[s], scales[s], i);
      next_a.states[s] = state.a;
      next_b.states[s] = state.b;
    }
    Vec divisor_a = begin_update(g.a, next_a, c), divisor_b = begin_update(g.b, next_b, c);
    for (int s = 0; s < Rule::kStates; ++s)
      store_state(stored.forms[s], states[s], rows.states[s], rows.noise[s], i, next_a.states[s], next_b.states[s]);
    if (i > 0) end_pair(i - kPair);
    a = next_a;
    b = next_b;
    divisor = {divisor_a, divisor_b};
  }
  end_pair(numel - kPair);
}

// `numel` elements of rows, of which `count` exist.
template <class Rule>
void update_rows(
    const StepArgs& args, const Stored& stored, int64_t row, int numel, int count, const Coefficients<Rule, Vec>& c,
    Rows& of, bool stream) {
  update_pairs(args, stored, row, numel, c, of, stream);
  for (int s = 0; s < Rule::kStates; ++s) {
    if (!has_scale(stored.forms[s])) continue;
    for (int i = count; i < numel; ++i) of.states[s][i] = 0.0f;
    void* to = of_row(args.states[s], row, size_of(stored.forms[s]));
    encode(stored.forms[s], of.states[s], numel, to, args.scales[s] + row);
  }
}

// The last row of a shard, where it is shorter: copies of it, with zeros behind, are updated.
template <class Rule>
void update_tail(
    const StepArgs& args, const Stored& stored, int64_t row, int count, const Coefficients<Rule, Vec>& c, Rows& of) {
  alignas(64) float copies[3 + kMostStates][kRow] = {};
  struct Copied {
    void* tensor;
    int64_t size;
  } copied[3 + kMostStates] = {};
  StepArgs tail = args;
  int made = 0;
  auto copy = [&](auto*& at, int64_t size) {
    if (at == nullptr) return;
    copied[made] = {const_cast<void*>(static_cast<const void*>(of_row(at, row, size))), size};
    __builtin_memcpy(copies[made], copied[made].tensor, count * size);
    at = copies[made++];
  };
  copy(tail.master, stored.low_size ? stored.low_size : sizeof(float));
  copy(tail.param_out, size_of(stored.out));
  for (int s = 0; s < Rule::kStates; ++s) {
    copy(tail.states[s], size_of(stored.forms[s]));
    if (tail.scales[s]) tail.scales[s] += row;
  }
  int written = made;
  copy(tail.grad, size_of(stored.grad));
  update_rows<Rule>(tail, stored, 0, kRow, count, c, of, false);
  for (int i = 0; i < written; ++i) __builtin_memcpy(copied[i].tensor, copies[i], count * copied[i].size);
}

void make_noise(const StepArgs& args, int64_t begin, int64_t end, int states, Rows& of) {
  for (int64_t row = begin; row < end; ++row) {
    uint32_t of_row = noise_of_row(args.row_keys[row], args.hyper[args.row_slot[row]].step_number);
    for (int s = 0; s < states; ++s) of.noise[s][row - begin] = noise_of_state(of_row, s);
  }
}

template <class Rule>
void step(const StepArgs& args, const Stored& stored, int64_t row_begin, int64_t row_end) {
  Rows of;
  bool stream = aligned(args.param_out) && args.numel >= kStreamFrom && !stored.low_size;
  int64_t whole_end = args.numel / kRow;  // of rows that are whole
  for (int64_t row = row_begin; row < row_end;) {
    int32_t slot = args.row_slot[row];
    int64_t end = row + 1;
    while (end < row_end && end < whole_end && end < row + kTogether && args.row_slot[end] == slot) ++end;
    if (slot >= 0 && args.hyper[slot].active != 0.0f) {
      Coefficients<Rule, Vec> c(args.hyper[slot], scale_of(args));
      int numel = int((end - row) * kRow), count = row < whole_end ? numel : int(args.numel % kRow);
      if (args.row_keys) make_noise(args, row, end, Rule::kStates, of);
      if (count == numel)
        update_rows<Rule>(args, stored, row, numel, count, c, of, stream);
      else
        update_tail<Rule>(args, stored, row, count, c, of);
    }
    row = end;
  }
  if (stream) stream_fence();
}

}  // namespace
}  // namespace zero_kernels
