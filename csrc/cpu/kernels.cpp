// The kernels, compiled once an instruction set with that set's flags (ZK_ISA_* names it). Everything but the table
// is in an anonymous namespace, and no standard template is used: an inline function shared with another object file
// could be kept in its AVX-512 form and run on a processor that has none.
#include "kernels.h"

#include "../rules/adamw.h"
#include "../rules/amsgrad.h"
#include "../rules/lion.h"
#include "../rules/muon.h"
#include "../rules/sgd.h"

#if defined(ZK_ISA_AVX512)
#include "vec_avx512.h"
#define ZK_TABLE kAvx512Kernels
#define ZK_NAME "avx512"
#elif defined(ZK_ISA_AVX2)
#include "vec_avx2.h"
#define ZK_TABLE kAvx2Kernels
#define ZK_NAME "avx2"
#else
#include "vec_scalar.h"
#define ZK_TABLE kScalarKernels
#define ZK_NAME "scalar"
#endif

namespace zero_kernels {
namespace {

constexpr int kLanes = Vec::kLanes;
constexpr int kPair = 2 * kLanes;

// What is measured of a vector: its gradients, its old masters and its new ones.
struct Measured {
  Vec g, before, p;
};

// Elements between a load and its prefetch; the hardware's prefetcher alone falls behind. 64 Mi bf16 elements, two
// cores of a Sapphire Rapids: adam_step 40.1 ms without, 34.9 ms with 512 (256 and 1024: 35.3); pack 13.4 and 10.8 ms.
constexpr int64_t kAhead = 512;

// Elements from which param_out is written past the cache, saving the read of each line before it is written (43 to
// 40 ms at 64 Mi). A smaller one is still in the cache when the gather reads it.
constexpr int64_t kStreamFrom = 1 << 22;

// Always inlined, as is what it calls: a call that has no effect on memory was left out (seen with GCC 12).
template <class T>
[[gnu::always_inline]] inline void prefetch_pair(const T* at) {
  for (int64_t byte = 0; byte < kPair * int64_t(sizeof(T)); byte += 64)
    prefetch(reinterpret_cast<const char*>(at) + byte);
}

bool aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; }

// ---- the update of a shard, by any rule -----------------------------------------------------------------------------

struct NoOutput {};  // the master is the parameter

template <class T>
void write(T* to, Vec x, int count) {
  count == kLanes ? x.store(to) : x.store_first(to, count);
}
void write(NoOutput*, Vec, int) {}

template <class T>
[[gnu::always_inline]] inline void write_pair(T* to, Vec a, Vec b, bool stream) {
  stream ? stream_pair(to, a, b) : store_pair(to, a, b);
}
void write_pair(NoOutput*, Vec, Vec, bool) {}

template <class Out>
Out* advance(Out* out, int64_t by) {
  return out + by;
}
NoOutput* advance(NoOutput* out, int64_t) { return out; }

// Updates a vector, and gives what can be measured of it.
template <class Rule, class Grad>
[[gnu::always_inline]] inline Measured update_at(
    const StepArgs& args, const Grad* grad, int64_t i, const Coefficients<Rule, Vec>& c) {
  Vec before = Vec::load(args.master + i), g = Vec::load(grad + i);
  Lane<Rule, Vec> lane;
  lane.p = before;
  for (int s = 0; s < Rule::kStates; ++s) lane.states[s] = Vec::load(args.states[s] + i);
  update(g, lane, c);
  lane.p.store(args.master + i);
  for (int s = 0; s < Rule::kStates; ++s) lane.states[s].store(args.states[s] + i);
  return {g * c.grad_scale, before, lane.p};
}

template <class Rule, class Grad>
Vec update_tail(const StepArgs& args, const Grad* grad, int64_t i, int count, const Coefficients<Rule, Vec>& c) {
  Lane<Rule, Vec> lane;
  lane.p = Vec::load_first(args.master + i, count);
  for (int s = 0; s < Rule::kStates; ++s) lane.states[s] = Vec::load_first(args.states[s] + i, count);
  update(Vec::load_first(grad + i, count), lane, c);
  lane.p.store_first(args.master + i, count);
  for (int s = 0; s < Rule::kStates; ++s) lane.states[s].store_first(args.states[s] + i, count);
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
    prefetch_pair(args.master + i + kAhead);
    for (int s = 0; s < Rule::kStates; ++s) prefetch_pair(args.states[s] + i + kAhead);
    Vec a = update_at(args, grad, i, c).p;
    Vec b = update_at(args, grad, i + kLanes, c).p;
    write_pair(advance(out, i), a, b, stream);
  }
  for (; i < end; i += kLanes) {
    int count = end - i < kLanes ? int(end - i) : kLanes;
    Vec p = update_tail(args, grad, i, count, c);
    write(advance(out, i), p, count);
  }
}

// Elements that are updated before their averages are, and before their parameters are written where rows are measured:
// the new masters are still in the nearest cache. Measured rows come with all their state, of which less fits.
constexpr int64_t kPiece = 32 * kRow;
constexpr int64_t kMeasuredPiece = 4 * kRow;

Vec nearer(Vec average, Vec p, Vec rate) { return average + rate * (p - average); }

// `master`: the new masters, from element 0 on.
void average_floats(float* average, const float* master, int64_t begin, int64_t end, Vec rate) {
  int64_t i = begin;
  for (; i + kPair <= end; i += kPair) {
    prefetch_pair(average + i + kAhead);
    Vec a = nearer(Vec::load(average + i), Vec::load(master + i), rate);
    Vec b = nearer(Vec::load(average + i + kLanes), Vec::load(master + i + kLanes), rate);
    store_pair(average + i, a, b);
  }
  for (; i < end; i += kLanes) {
    int count = end - i < kLanes ? int(end - i) : kLanes;
    Vec p = Vec::load_first(master + i, count);
    nearer(Vec::load_first(average + i, count), p, rate).store_first(average + i, count);
  }
}

// A pair of an average in bf16, rounded stochastically; `element` is the place of the first in its row.
[[gnu::always_inline]] inline void average_pair(
    BFloat16* average, const float* master, Vec rate, uint32_t noise, int element) {
  Vec a = nearer(Vec::load(average), Vec::load(master), rate);
  Vec b = nearer(Vec::load(average + kLanes), Vec::load(master + kLanes), rate);
  store_stochastic(average, a, b, noise, element);
}

// Elements of one row. What is shorter than a pair at its end is copied, with zeros behind.
void average_row(BFloat16* average, const float* master, int count, Vec rate, uint32_t noise) {
  int i = 0;
  for (; i + kPair <= count; i += kPair) {
    prefetch_pair(average + i + kAhead);
    average_pair(average + i, master + i, rate, noise, i);
  }
  if (i == count) return;
  BFloat16 kept[kPair] = {};
  float p[kPair] = {};
  __builtin_memcpy(kept, average + i, (count - i) * sizeof(BFloat16));
  __builtin_memcpy(p, master + i, (count - i) * sizeof(float));
  average_pair(kept, p, rate, noise, i);
  __builtin_memcpy(average + i, kept, (count - i) * sizeof(BFloat16));
}

// `p`: the new masters, from element `begin` on, which is the start of a row.
void average_run(const StepArgs& args, const float* p, int64_t begin, int64_t end, int32_t slot) {
  const float* master = p - begin;
  for (int k = 0; k < args.average_count; ++k) {
    Vec rate(args.rates[int64_t(slot) * args.average_count + k]);
    if (args.average_dtype == DType::kFloat) {
      average_floats(static_cast<float*>(args.averages[k]), master, begin, end, rate);
      continue;
    }
    BFloat16* average = static_cast<BFloat16*>(args.averages[k]);
    for (int64_t i = begin; i < end; i += kRow) {
      uint32_t of_row = noise_of_row(args.encoded.row_keys[i / kRow], args.hyper[slot].step_number);
      int count = end - i < kRow ? int(end - i) : int(kRow);
      average_row(average + i, master + i, count, rate, noise_of_average(of_row, k));
    }
  }
}

// ---- rows that are measured as they are updated ---------------------------------------------------------------------

constexpr int kParts = kLine / kLanes;  // vectors of a line
constexpr int kLines = kRow / kLine;

// Makes the numbers of one row. vector(k): gives the gradients, the old masters and the new ones of vector k of the
// row. `missing`: elements beyond the shard's end, which are +0 in all three.
template <class Vector>
[[gnu::always_inline]] inline void measure_row(Vector vector, int64_t missing, float* stats) {
  Vec g[kParts], u[kParts], p[kParts], zeros[kParts], largest[kParts];
  for (int part = 0; part < kParts; ++part) {
    Vec pair_g[kLines / 2], pair_u[kLines / 2], pair_p[kLines / 2];
    zeros[part] = largest[part] = Vec(0.0f);
#pragma GCC unroll 4  // in a loop the sums of pairs went through memory: 1.24 of the plain update's time, then 1.21
    for (int pair = 0; pair < kLines / 2; ++pair) {
      Measured a = vector(2 * pair * kParts + part), b = vector((2 * pair + 1) * kParts + part);
      Vec ua = a.p - a.before, ub = b.p - b.before;
      pair_g[pair] = a.g * a.g + b.g * b.g;
      pair_u[pair] = ua * ua + ub * ub;
      pair_p[pair] = a.p * a.p + b.p * b.p;
      zeros[part] = zeros[part] + (is_zero(a.g) + is_zero(b.g));
      largest[part] = max_bits(largest[part], max_bits(magnitude(ua), magnitude(ub)));
    }
    g[part] = (pair_g[0] + pair_g[1]) + (pair_g[2] + pair_g[3]);
    u[part] = (pair_u[0] + pair_u[1]) + (pair_u[2] + pair_u[3]);
    p[part] = (pair_p[0] + pair_p[1]) + (pair_p[2] + pair_p[3]);
  }
  float sums[4];
  fold_line(g, u, p, zeros, sums);
  stats[0] = sums[0];
  stats[1] = sums[1];
  stats[2] = sums[2];
  stats[3] = largest_of_line(largest);
  stats[4] = sums[3] - float(missing);
}

// One whole row.
template <class Rule, class Grad>
void update_and_measure(const StepArgs& args, int64_t begin, const Coefficients<Rule, Vec>& c) {
  const Grad* grad = static_cast<const Grad*>(args.grad);
  auto update_vector = [&](int k) __attribute__((always_inline)) {
    int64_t i = begin + k * kLanes;
    if (k % 2 == 0) {
      prefetch_pair(grad + i + kAhead);
      prefetch_pair(args.master + i + kAhead);
      for (int s = 0; s < Rule::kStates; ++s) prefetch_pair(args.states[s] + i + kAhead);
    }
    return update_at<Rule>(args, grad, i, c);
  };
  measure_row(update_vector, 0, args.row_stats + begin / kRow * kRowStats);
}

// Gradients of `numel` elements of rows, of which `count` exist: the others are 0, and not 0 * inf.
template <class Grad>
void scale_existing(const Grad* grad, int numel, int count, Vec scale, float* to) {
  for (int i = 0; i < numel; i += kLanes) (Vec::load(grad + i) * scale).store(to + i);
  for (int i = count; i < numel; ++i) to[i] = 0.0f;
}

// The last row, which has `count` elements.
template <class Rule, class Grad>
void update_and_measure_tail(const StepArgs& args, int64_t begin, int count, const Coefficients<Rule, Vec>& c) {
  Grad grad[kRow] = {};
  float scaled[kRow], before[kRow] = {}, after[kRow] = {};
  __builtin_memcpy(grad, static_cast<const Grad*>(args.grad) + begin, count * sizeof(Grad));
  __builtin_memcpy(before, args.master + begin, count * sizeof(float));
  update_run<Rule, Grad, NoOutput>(args, begin, begin + count, c, false);
  __builtin_memcpy(after, args.master + begin, count * sizeof(float));
  scale_existing(grad, kRow, count, c.grad_scale, scaled);
  auto vector = [&](int k) {
    int i = k * kLanes;
    return Measured{Vec::load(scaled + i), Vec::load(before + i), Vec::load(after + i)};
  };
  measure_row(vector, kRow - count, args.row_stats + begin / kRow * kRowStats);
}

// Writes the parameters of elements [begin, end) from the masters, which are still in the nearest cache.
template <class Out>
void write_out(const StepArgs& args, int64_t begin, int64_t end, bool stream) {
  Out* out = static_cast<Out*>(args.param_out);
  int64_t i = begin;
  for (; i + kPair <= end; i += kPair)
    write_pair(advance(out, i), Vec::load(args.master + i), Vec::load(args.master + i + kLanes), stream);
  for (; i < end; i += kLanes) {
    int count = end - i < kLanes ? int(end - i) : kLanes;
    write(advance(out, i), Vec::load_first(args.master + i, count), count);
  }
}

// update_run, of rows that are measured.
template <class Rule, class Grad>
void measured_run(const StepArgs& args, int64_t begin, int64_t end, const Coefficients<Rule, Vec>& c) {
  for (; begin + kRow <= end; begin += kRow) update_and_measure<Rule, Grad>(args, begin, c);
  if (begin < end) update_and_measure_tail<Rule, Grad>(args, begin, int(end - begin), c);
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
      Coefficients<Rule, Vec> c(args.hyper[slot], args.grad_scale);
      int64_t end = run_end * kRow < args.numel ? run_end * kRow : args.numel;
      int64_t piece = args.row_stats ? kMeasuredPiece : args.average_count ? kPiece : end;
      for (int64_t begin = row * kRow; begin < end; begin += piece) {
        int64_t piece_end = end - begin < piece ? end : begin + piece;
        if (args.row_stats) {
          measured_run<Rule, Grad>(args, begin, piece_end, c);
          write_out<Out>(args, begin, piece_end, stream);
        } else {
          update_run<Rule, Grad, Out>(args, begin, piece_end, c, stream);
        }
        average_run(args, args.master + begin, begin, piece_end, slot);
      }
    } else if (args.row_stats) {
      for (int64_t i = row * kRowStats; i < run_end * kRowStats; ++i) args.row_stats[i] = 0.0f;
    }
    row = run_end;
  }
  if (stream) stream_fence();
}

template <class Rule, class Grad>
void step_to(const StepArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.param_out == nullptr) return update_rows<Rule, Grad, NoOutput>(args, row_begin, row_end);
  switch (args.param_dtype) {
    case DType::kHalf:
      return update_rows<Rule, Grad, Half>(args, row_begin, row_end);
    case DType::kBFloat16:
      return update_rows<Rule, Grad, BFloat16>(args, row_begin, row_end);
    case DType::kFloat:
      return update_rows<Rule, Grad, float>(args, row_begin, row_end);
  }
}

template <class Rule>
void step(const StepArgs& args, int64_t row_begin, int64_t row_end) {
  static_assert(Rule::kStates <= kMostStates);
  switch (args.grad_dtype) {
    case DType::kHalf:
      return step_to<Rule, Half>(args, row_begin, row_end);
    case DType::kBFloat16:
      return step_to<Rule, BFloat16>(args, row_begin, row_end);
    case DType::kFloat:
      return step_to<Rule, float>(args, row_begin, row_end);
  }
}

// ---- rows of encoded states -----------------------------------------------------------------------------------------

// Rows that are updated before they are encoded, so that a processor that waits for the largest of one row is at the
// next one meanwhile. In the cache, int8 and uint8, an EPYC with AVX-512: 0.93 ns an element with 2, 0.85 with 4, 0.83
// with 8 and with 16.
constexpr int kTogether = 8;
constexpr int kMostElements = kTogether * kRow;

// What the next such rows need is asked for, so that it comes while these are encoded, too. 16 Mi elements with int8,
// uint8 and 8 bits of the master, one thread of an EPYC: 0.97 ns an element at least, and 1.03 with kAhead. Not what
// has 4 bytes an element: with those and fp32 moments it took 0.79 in place of 0.76.
constexpr int kAheadOfRows = kMostElements;

// Of such rows: states that are not encoded yet; what averages and numbers of rows are made of; and of each state and
// row the noise by which bf16 is rounded.
struct EncodedRows {
  uint32_t noise[kMostStates][kTogether];
  alignas(64) float grad[kMostElements], before[kMostElements], master[kMostElements];
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
template <bool kStochastic>
[[gnu::always_inline]] inline void store_state(
    Form form, void* to, float* kept, const uint32_t* noise, int i, Vec a, Vec b) {
  if (form == Form::kFloat) return store_pair(static_cast<float*>(to) + i, a, b);
  if (form == Form::kBFloat16) {
    BFloat16* at = static_cast<BFloat16*>(to) + i;
    if constexpr (kStochastic) return store_stochastic(at, a, b, noise[i / kRow], i % kRow);
    return store_pair(at, a, b);
  }
  if (form == Form::kInt8) return store_pair(kept + i, a, b);
  store_pair(kept + i, square_root(a), square_root(b));
}

[[gnu::always_inline]] inline void write_pair(DType dtype, void* to, int i, Vec a, Vec b, bool stream) {
  if (dtype == DType::kBFloat16) return write_pair(static_cast<BFloat16*>(to) + i, a, b, stream);
  if (dtype == DType::kHalf) return write_pair(static_cast<Half*>(to) + i, a, b, stream);
  write_pair(static_cast<float*>(to) + i, a, b, stream);
}

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

// Updates `numel` elements of rows, and stores all but the states that have a scale. One loop for all forms and dtypes:
// the processor foresees its branches, which are the same in every round. Stochastic rounding has a loop of its own: as
// a branch it took 2 % of the time of bf16 that is rounded to nearest, one thread of an EPYC.
template <class Rule, bool kStochastic>
void update_pairs(
    const StepArgs& args, int64_t row, int numel, const Coefficients<Rule, Vec>& of, EncodedRows& rows, bool stream) {
  Coefficients<Rule, Vec> c = of;
  Encoded encoded = args.encoded;
  DType grad_dtype = args.grad_dtype, param_dtype = args.param_dtype;
  const void* grad = of_row(args.grad, row, size_of(grad_dtype));
  void* param = of_row(args.param_out, row, size_of(param_dtype));
  BFloat16* high = static_cast<BFloat16*>(param);
  void* low = of_row(encoded.low, row, encoded.low_size);
  float* master = args.master + row * kRow;
  void* states[kMostStates];
  for (int s = 0; s < Rule::kStates; ++s) states[s] = of_row(args.states[s], row, size_of(encoded.forms[s]));
  bool measured = args.row_stats, written = args.param_out;
  // The pair whose update has begun: it ends when the next one has begun, so that divisions have other work beside
  // them.
  Lane<Rule, Vec> a, b;
  Pair divisor;
  auto end_pair = [&](int i) __attribute__((always_inline)) {
    end_update(a, divisor.a, c);
    end_update(b, divisor.b, c);
    if (encoded.low) {
      store_master(high, low, encoded.low_size, i, a.p, b.p);
    } else {
      store_pair(master + i, a.p, b.p);
      if (written) write_pair(param_dtype, param, i, a.p, b.p, stream);
    }
  };
  for (int i = 0; i < numel; i += kPair) {
    Pair g = load_pair(grad_dtype, grad, i);
    Pair p = encoded.low ? load_master(high, low, encoded.low_size, i) : load_pair(master + i);
    Lane<Rule, Vec> next_a = {p.a}, next_b = {p.b};
    for (int s = 0; s < Rule::kStates; ++s) {
      Pair state = load_state(encoded.forms[s], states[s], encoded.scales[s] + row, i);
      next_a.states[s] = state.a;
      next_b.states[s] = state.b;
    }
    if (measured) {
      store_pair(rows.grad + i, g.a * c.grad_scale, g.b * c.grad_scale);
      store_pair(rows.before + i, p.a, p.b);
    }
    Vec divisor_a = begin_update(g.a, next_a, c), divisor_b = begin_update(g.b, next_b, c);
    for (int s = 0; s < Rule::kStates; ++s)
      store_state<kStochastic>(
          encoded.forms[s], states[s], rows.states[s], rows.noise[s], i, next_a.states[s], next_b.states[s]);
    if (i > 0) end_pair(i - kPair);
    a = next_a;
    b = next_b;
    divisor = {divisor_a, divisor_b};
  }
  end_pair(numel - kPair);
}

// `numel` elements of rows, of which `count` exist. Leaves the new masters in `of`, where averages want them.
template <class Rule>
void update_encoded(
    const StepArgs& args, int64_t row, int numel, int count, const Coefficients<Rule, Vec>& c, EncodedRows& of,
    bool stream) {
  const Encoded& encoded = args.encoded;
  auto run = encoded.row_keys ? update_pairs<Rule, true> : update_pairs<Rule, false>;
  run(args, row, numel, c, of, stream);
  for (int s = 0; s < Rule::kStates; ++s) {
    for (int i = count; i < numel; ++i) of.states[s][i] = 0.0f;
    void* to = of_row(args.states[s], row, size_of(encoded.forms[s]));
    encode(encoded.forms[s], of.states[s], numel, to, encoded.scales[s] + row);
  }
  if (!args.row_stats && !args.average_count) return;
  const BFloat16* high = static_cast<const BFloat16*>(args.param_out) + row * kRow;
  const void* low = of_row(encoded.low, row, encoded.low_size);
  const float* master = args.master + row * kRow;
  for (int i = 0; i < numel; i += kPair) {
    Pair p = encoded.low ? load_master(high, low, encoded.low_size, i) : load_pair(master + i);
    store_pair(of.master + i, p.a, p.b);
  }
  if (!args.row_stats) return;
  for (int i = count; i < numel; ++i) of.grad[i] = of.before[i] = of.master[i] = 0.0f;
  for (int i = 0; i < numel; i += kRow) {
    auto vector = [&](int k) __attribute__((always_inline)) {
      int at = i + k * kLanes;
      return Measured{Vec::load(of.grad + at), Vec::load(of.before + at), Vec::load(of.master + at)};
    };
    measure_row(vector, numel - count, args.row_stats + (row + i / kRow) * kRowStats);
  }
}

// The last row of a shard, where it is shorter: copies of it, with zeros behind, are updated.
template <class Rule>
void update_encoded_tail(
    const StepArgs& args, int64_t row, int count, const Coefficients<Rule, Vec>& c, EncodedRows& of) {
  alignas(64) float copies[3 + kMostStates][kRow] = {};
  struct Copied {
    void* tensor;
    int64_t size;
  } copied[3 + kMostStates] = {};
  StepArgs tail = args;
  int made = 0;
  auto copy = [&](auto*& at, int64_t size) {
    using Pointer = __typeof__(at + 0);
    if (at == nullptr) return;
    copied[made] = {const_cast<void*>(static_cast<const void*>(of_row(at, row, size))), size};
    __builtin_memcpy(copies[made], copied[made].tensor, count * size);
    at = reinterpret_cast<Pointer>(copies[made++]);
  };
  copy(tail.master, sizeof(float));
  copy(tail.encoded.low, args.encoded.low_size);
  copy(tail.param_out, size_of(args.param_dtype));
  for (int s = 0; s < Rule::kStates; ++s) {
    copy(tail.states[s], size_of(args.encoded.forms[s]));
    if (tail.encoded.scales[s]) tail.encoded.scales[s] += row;
  }
  int written = made;
  copy(tail.grad, size_of(args.grad_dtype));
  if (tail.row_stats) tail.row_stats += row * kRowStats;
  update_encoded<Rule>(tail, 0, kRow, count, c, of, false);
  for (int i = 0; i < written; ++i) __builtin_memcpy(copied[i].tensor, copies[i], count * copied[i].size);
}

void make_noise(const StepArgs& args, int64_t begin, int64_t end, int states, EncodedRows& of) {
  for (int64_t row = begin; row < end; ++row) {
    uint32_t of_row = noise_of_row(args.encoded.row_keys[row], args.hyper[args.row_slot[row]].step_number);
    for (int s = 0; s < states; ++s) of.noise[s][row - begin] = noise_of_state(of_row, s);
  }
}

template <class Rule>
void step_encoded(const StepArgs& args, int64_t row_begin, int64_t row_end) {
  EncodedRows of;
  bool stream = aligned(args.param_out) && args.numel >= kStreamFrom && !args.encoded.low;
  int64_t whole_end = args.numel / kRow;  // of rows that are whole
  for (int64_t row = row_begin; row < row_end;) {
    int32_t slot = args.row_slot[row];
    int64_t end = row + 1;
    while (end < row_end && end < whole_end && end < row + kTogether && args.row_slot[end] == slot) ++end;
    if (slot >= 0 && args.hyper[slot].active != 0.0f) {
      Coefficients<Rule, Vec> c(args.hyper[slot], args.grad_scale);
      int numel = int((end - row) * kRow), count = row < whole_end ? numel : int(args.numel % kRow);
      if (args.encoded.row_keys) make_noise(args, row, end, Rule::kStates, of);
      if (count == numel)
        update_encoded<Rule>(args, row, numel, count, c, of, stream);
      else
        update_encoded_tail<Rule>(args, row, count, c, of);
      average_run(args, of.master, row * kRow, row * kRow + count, slot);
    } else if (args.row_stats) {
      for (int64_t i = row * kRowStats; i < end * kRowStats; ++i) args.row_stats[i] = 0.0f;
    }
    row = end;
  }
  if (stream) stream_fence();
}

template <class Rule>
constexpr StepKernel step_of(const char* rule) {
  return {rule, Rule::kStates, step<Rule>, step_encoded<Rule>};
}

const StepKernel kSteps[] = {
    step_of<AdamW>("adamw"),
    step_of<AmsGrad>("amsgrad"),
    step_of<Lion>("lion"),
    step_of<Sgd>("sgd"),
    step_of<SgdPlain>("sgd_plain"),
    step_of<MuonLookAhead>("muon_look_ahead"),
    step_of<MuonSubtract>("muon_subtract"),
    {}};

// ---- pack and unpack ----------------------------------------------------------------------------------------------

constexpr uint32_t kInfinity = 0x7f800000;

bool any_nonfinite(Vec largest) {
  float lanes[kLanes];
  largest.store(lanes);
  bool found = false;
  for (float lane : lanes) found |= float_bits(lane) >= kInfinity;
  return found;
}

template <class Src, class Dst>
bool scale_to(const ScaleArgs& args) {
  const Src* src = static_cast<const Src*>(args.src);
  Dst* dst = static_cast<Dst*>(args.dst);
  Vec scale(args.scale);
  Vec largest(0.0f);
  int64_t i = 0;
  for (; i + kPair <= args.numel; i += kPair) {
    prefetch_pair(src + i + kAhead);
    Vec a = Vec::load(src + i), b = Vec::load(src + i + kLanes);
    largest = max_bits(largest, max_bits(magnitude(a), magnitude(b)));
    store_pair(dst + i, a * scale, b * scale);
  }
  for (; i < args.numel; i += kLanes) {
    int count = args.numel - i < kLanes ? int(args.numel - i) : kLanes;
    Vec a = Vec::load_first(src + i, count);
    largest = max_bits(largest, magnitude(a));
    (a * scale).store_first(dst + i, count);
  }
  return any_nonfinite(largest);
}

template <class Src>
bool scale_from(const ScaleArgs& args) {
  switch (args.dst_dtype) {
    case DType::kHalf:
      return scale_to<Src, Half>(args);
    case DType::kBFloat16:
      return scale_to<Src, BFloat16>(args);
    case DType::kFloat:
      return scale_to<Src, float>(args);
  }
  return false;
}

bool scale(const ScaleArgs& args) {
  switch (args.src_dtype) {
    case DType::kHalf:
      return scale_from<Half>(args);
    case DType::kBFloat16:
      return scale_from<BFloat16>(args);
    case DType::kFloat:
      return scale_from<float>(args);
  }
  return false;
}

// ---- grad_stats ---------------------------------------------------------------------------------------------------

struct Square {
  static Vec term(Vec x) { return x * x; }
  static Vec join(Vec acc, Vec term) { return acc + term; }
};
struct Magnitude {
  static Vec term(Vec x) { return magnitude(x); }
  static Vec join(Vec acc, Vec term) { return acc + term; }
};
struct Largest {
  static Vec term(Vec x) { return magnitude(x); }
  static Vec join(Vec acc, Vec term) { return max_bits(acc, term); }
};

// Folds kStatsLanes values by halves: acc[j] += acc[j + h] for h = 512 … 1.
template <class Norm>
float fold(float* acc) {
  int64_t h = kStatsLanes / 2;
  for (; h >= kLanes; h /= 2)
    for (int64_t j = 0; j < h; j += kLanes) Norm::join(Vec::load(acc + j), Vec::load(acc + j + h)).store(acc + j);
  for (; h >= 1; h /= 2)
    for (int64_t j = 0; j < h; ++j)
      Norm::join(Vec::load_first(acc + j, 1), Vec::load_first(acc + j + h, 1)).store_first(acc + j, 1);
  return acc[0];
}

template <class Norm, class T>
float block_partial(const T* x) {
  alignas(64) float acc[kStatsLanes];
  for (int64_t j = 0; j < kStatsLanes; j += kLanes) {
    Vec sum(0.0f);
    for (int64_t k = 0; k < kStatsBlock; k += kStatsLanes) {
      // The same place in the next block: 7.6 to 6.4 ms for 64 Mi bf16 elements.
      if (j % kPair == 0) prefetch_pair(x + kStatsBlock + k + j);
      sum = Norm::join(sum, Norm::term(Vec::load(x + k + j)));
    }
    sum.store(acc + j);
  }
  return fold<Norm>(acc);
}

template <class T>
int32_t count_nonfinite(const T* x, int64_t count) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += (float_bits(widen(x[i])) & kInfinity) == kInfinity;
  return found;
}

template <class Norm, class T>
void stats_of(const StatsArgs& args, int64_t block_begin, int64_t block_end) {
  const T* shard = static_cast<const T*>(args.shard);
  for (int64_t block = block_begin; block < block_end; ++block) {
    const T* x = shard + block * kStatsBlock;
    int64_t left = args.numel - block * kStatsBlock;
    float partial;
    if (left >= kStatsBlock) {
      partial = block_partial<Norm>(x);
    } else {
      T padded[kStatsBlock] = {};
      for (int64_t i = 0; i < left; ++i) padded[i] = x[i];
      partial = block_partial<Norm>(padded);
    }
    args.partials[block] = partial;
    // Terms are never negative, so a non-finite value makes the partial non-finite: only then is counting needed.
    bool suspect = (float_bits(partial) & 0x7fffffff) >= kInfinity;
    args.nonfinite[block] = suspect ? count_nonfinite(x, left < kStatsBlock ? left : kStatsBlock) : 0;
  }
}

template <class T>
void stats_for(const StatsArgs& args, int norm, int64_t block_begin, int64_t block_end) {
  if (norm == 2) return stats_of<Square, T>(args, block_begin, block_end);
  if (norm == 1) return stats_of<Magnitude, T>(args, block_begin, block_end);
  return stats_of<Largest, T>(args, block_begin, block_end);
}

void stats(const StatsArgs& args, int norm, int64_t block_begin, int64_t block_end) {
  switch (args.dtype) {
    case DType::kHalf:
      return stats_for<Half>(args, norm, block_begin, block_end);
    case DType::kBFloat16:
      return stats_for<BFloat16>(args, norm, block_begin, block_end);
    case DType::kFloat:
      return stats_for<float>(args, norm, block_begin, block_end);
  }
}

template <class Norm>
float combine_as(const float* partials, int64_t count) {
  alignas(64) float acc[kStatsLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    float* lane = acc + i % kStatsLanes;
    Norm::join(Vec::load_first(lane, 1), Vec::load_first(partials + i, 1)).store_first(lane, 1);
  }
  return fold<Norm>(acc);
}

float combine(const float* partials, int64_t count, int norm) {
  return norm ? combine_as<Square>(partials, count) : combine_as<Largest>(partials, count);
}

// ---- stream -------------------------------------------------------------------------------------------------------

void stream_rows(const StreamArgs& args, int64_t row_begin, int64_t row_end) {
  // 16-bit values go as pairs, in the words of a float: nothing is converted.
  const float* grad = static_cast<const float*>(args.grad);
  float* out = static_cast<float*>(args.out);
  bool stream = aligned(out) && args.numel >= kStreamFrom;
  int64_t end = row_end * kRow < args.numel ? row_end * kRow : args.numel;
  for (int64_t i = row_begin * kRow; i + 2 * kPair <= end; i += 2 * kPair) {
    prefetch_pair(grad + (i + kAhead) / 2);
    // The three arrays change places, so that no store can be left out as a copy of what is there.
    for (int64_t j = i; j < i + 2 * kPair; j += kPair) {
      prefetch_pair(args.a + j + kAhead);
      prefetch_pair(args.b + j + kAhead);
      prefetch_pair(args.c + j + kAhead);
      Vec a0 = Vec::load(args.a + j), a1 = Vec::load(args.a + j + kLanes);
      Vec b0 = Vec::load(args.b + j), b1 = Vec::load(args.b + j + kLanes);
      store_pair(args.b + j, Vec::load(args.c + j), Vec::load(args.c + j + kLanes));
      store_pair(args.a + j, b0, b1);
      store_pair(args.c + j, a0, a1);
    }
    write_pair(out + i / 2, Vec::load(grad + i / 2), Vec::load(grad + i / 2 + kLanes), stream);
  }
  if (stream) stream_fence();
}

}  // namespace

const KernelTable ZK_TABLE = {ZK_NAME, kSteps, scale, stats, combine, stream_rows};

}  // namespace zero_kernels
