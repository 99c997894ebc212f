// The kernel bodies of every rule, run for every thread of every block on this processor.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "../../../csrc/cuda/encoded_step.h"
#include "../../../csrc/rules/adamw.h"
#include "../../../csrc/rules/amsgrad.h"
#include "../../../csrc/rules/lion.h"
#include "../../../csrc/rules/muon.h"
#include "../../../csrc/rules/sgd.h"

using namespace zero_kernels;

template <class Thread>
static void for_threads(int64_t blocks, Thread run) {
  for (int64_t block = 0; block < blocks; ++block)
    for (int thread = 0; thread < kThreads; ++thread) run(block, thread);
}

// The values of a warp's 32 threads, as row_stats.h wants them.
template <class T>
struct OfWarp {
  T at[32];
};
template <class T>
static OfWarp<T> operator+(const OfWarp<T>& a, const OfWarp<T>& b) {
  OfWarp<T> sum;
  for (int t = 0; t < 32; ++t) sum.at[t] = a.at[t] + b.at[t];
  return sum;
}
struct HostWarp {
  static OfWarp<float> pick(int bit, const OfWarp<float>& a, const OfWarp<float>& b) {
    OfWarp<float> picked;
    for (int t = 0; t < 32; ++t) picked.at[t] = t & bit ? b.at[t] : a.at[t];
    return picked;
  }
  static OfWarp<float> other(const OfWarp<float>& x, int bit) {
    OfWarp<float> others;
    for (int t = 0; t < 32; ++t) others.at[t] = x.at[t ^ bit];
    return others;
  }
  static OfWarp<uint32_t> largest(OfWarp<uint32_t> x) {
    for (uint32_t& of : x.at) of = *std::max_element(x.at, x.at + 32);
    return x;
  }
  static OfWarp<uint32_t> sum(OfWarp<uint32_t> x) {
    uint32_t total = std::accumulate(x.at, x.at + 32, 0u);
    for (uint32_t& of : x.at) of = total;
    return x;
  }
};

// Collects what the threads of a warp measure, one after another. The last of them has the warp's rows measured.
struct MeasuredOnHost {
  static constexpr bool kMeasures = true;
  struct Row {
    RowTerms<OfWarp<float>, OfWarp<uint32_t>> terms;
    float* stats;
    bool there, live;
  };
  int lane;
  Row* rows;  // [kQuads]

  void operator()(int q, float* stats, bool there, bool live, const RowTerms<float, uint32_t>& terms) const {
    Row& row = rows[q];
    if (lane == 0) row.stats = stats, row.there = there, row.live = live;
    for (int j = 0; j < kQuad; ++j) {
      row.terms.g[j].at[lane] = terms.g[j];
      row.terms.u[j].at[lane] = terms.u[j];
      row.terms.p[j].at[lane] = terms.p[j];
    }
    row.terms.largest.at[lane] = terms.largest;
    row.terms.zeros.at[lane] = terms.zeros;
    if (lane < 31 || !row.there) return;
    auto of = row_numbers<HostWarp>(row.terms);
    for (int t = 0; t < 32; ++t)  // all threads have the same
      store_row_stats(row.stats, row.live, {of.g.at[t], of.u.at[t], of.p.at[t], of.largest.at[t], of.zeros.at[t]});
  }
};

static int run_adam_step(const StepArgs& shard, DType grad, DType out) {
  launch(shard, grad, out, [](auto g, auto o, const StepArgs& args, int64_t blocks) {
    for_threads(blocks, [&](int64_t block, int thread) {
      step_thread<AdamW, typename decltype(g)::type, typename decltype(o)::type>(args, block, thread);
    });
  });
  return 1;
}

template <class Rule>
static int run(const std::vector<StepArgs>& shards, const Averages& averages, DType grad, DType out) {
  int launches = 0;
  launch_foreach(
      shards, averages, grad, out,
      [&](auto g, auto o, const PlainArgs& args, int64_t blocks) {
        ++launches;
        for_threads(blocks, [&](int64_t block, int thread) {
          foreach_step_thread<Rule, typename decltype(g)::type, typename decltype(o)::type>(args, block, thread);
        });
      },
      [&](auto g, const ExtendedArgs& args, int64_t blocks) {
        ++launches;
        MeasuredOnHost::Row rows[kQuads];
        for_threads(blocks, [&](int64_t block, int thread) {
          MeasuredOnHost measure = {thread % 32, rows};
          extended_step_thread<Rule, typename decltype(g)::type>(args, block, thread, measure);
        });
      });
  return launches;
}

// The threads of a warp together: each loads, each updates, the largest of theirs is that of the row, each stores.
template <class Rule, bool kWhole, class Kinds>
static void encoded_warp(const EncodedForeachArgs& args, const EncodedPlace& at, MeasuredOnHost::Row* rows) {
  const EncodedShard& shard = at.shard;
  Kinds kinds(args);
  EncodedAverages averages = {args.averages, at.number, shard};
  static RawQuad<Rule> raws[32][kQuads];
  static Raw first_averages[32][kQuads];
  UpdatedQuad<Rule> of[32];
  for (int lane = 0; lane < 32; ++lane)
    for (int q = 0; q < kQuads; ++q) {
      RawQuad<Rule>& raw = raws[lane][q];
      raw = load_encoded<Rule, kWhole>(kinds, shard, at.first + lane * kQuad, q);
      first_averages[lane][q] = averages.ask<kWhole>(raw.i, raw.count);
    }
  for (int q = 0; q < kQuads; ++q) {
    for (int lane = 0; lane < 32; ++lane) of[lane] = update_encoded<Rule, kWhole>(kinds, shard, raws[lane][q]);
    for (int s = 0; s < Rule::kStates; ++s) {
      uint32_t largest = 0;
      for (const UpdatedQuad<Rule>& quad : of) largest = std::max(largest, quad.bounds[s]);
      for (UpdatedQuad<Rule>& quad : of) quad.bounds[s] = largest;
    }
    for (int lane = 0; lane < 32; ++lane) {
      const RawQuad<Rule>& raw = raws[lane][q];
      store_encoded<Rule, kWhole>(kinds, shard, raw, of[lane]);
      if (of[lane].live) averages.follow<kWhole>(raw.slot, raw.i, raw.count, of[lane].quad.p, first_averages[lane][q]);
      if (!shard.step.row_stats) continue;
      bool there = kWhole || raw.i < shard.step.numel;
      float* stats = there ? shard.step.row_stats + raw.i / kRow * kRowStats : nullptr;
      RowTerms<float, uint32_t> terms = terms_of(of[lane].quad, of[lane].before, of[lane].scale, raw.count);
      MeasuredOnHost{lane, rows}(q, stats, there, of[lane].live, terms);
    }
  }
}

template <class Rule>
static int run_encoded(
    const std::vector<EncodedShard>& shards, const Averages& averages, const Encoded& of_all, DType grad, DType out) {
  int launches = 0;
  auto run = [&](auto kinds) {
    using Kinds = typename decltype(kinds)::type;
    launch_encoded(shards, averages, of_all, grad, out, [&](const EncodedForeachArgs& args, int64_t blocks) {
      ++launches;
      MeasuredOnHost::Row rows[kQuads];
      for (int64_t block = 0; block < blocks; ++block)
        for (int thread = 0; thread < kThreads; thread += 32) {
          EncodedPlace at = place_of(args, block, thread);
          if (at.whole)
            encoded_warp<Rule, true, Kinds>(args, at, rows);
          else
            encoded_warp<Rule, false, Kinds>(args, at, rows);
        }
    });
  };
  if (is_extended(shards, averages))
    run(Type<AnyKinds>());
  else
    RuleKinds<Rule>::choose(of_all, grad, out, run);
  return launches;
}

// What both have of a shard. of: grad, master, param_out, row_slot and its states.
static StepArgs args_of(
    void* const* of, int states, int64_t numel, const float* hyper, const float* grad_scale, const float* found_inf,
    int32_t* nonfinite_slots, int32_t slots, float* row_stats) {
  StepArgs args = {};
  args.grad = of[0];
  args.master = static_cast<float*>(of[1]);
  for (int s = 0; s < states; ++s) args.states[s] = static_cast<float*>(of[4 + s]);
  args.param_out = of[2];
  args.row_slot = static_cast<const int32_t*>(of[3]);
  args.hyper = reinterpret_cast<const HyperRow*>(hyper);
  args.grad_scale = grad_scale;
  args.found_inf = found_inf;
  args.nonfinite_slots = nonfinite_slots;
  args.row_stats = row_stats;
  args.numel = numel;
  args.slots = slots;
  return args;
}

static Averages averages_of(void* const* averages, int each, const float* rates, int count, int dtype) {
  return {rates, each, std::vector<void*>(averages, averages + count * each), DType(dtype)};
}

// rule: its name, or "adam_step". tensors: of each shard grad, master, param_out, row_slot and its states. row_stats:
// of each shard, or null. averages: `each` of each shard, shard after shard. Returns how many launches it took.
extern "C" int step(
    const char* rule, void* const* tensors, int states, const int64_t* numels, int count, int grad_dtype, int out_dtype,
    const float* hyper, const float* grad_scale, const float* found_inf, int32_t* nonfinite_slots, int32_t slots,
    float* const* row_stats, void* const* averages, int each, const float* rates) {
  std::vector<StepArgs> shards;
  for (int i = 0; i < count; ++i) {
    shards.push_back(args_of(
        tensors + (4 + states) * i, states, numels[i], hyper, grad_scale, found_inf, nonfinite_slots, slots,
        row_stats ? row_stats[i] : nullptr));
    shards.back().out_dtype = DType(out_dtype);
  }
  Averages of_masters = averages_of(averages, each, rates, count, int(DType::kFloat));
  DType grad = DType(grad_dtype), out = DType(out_dtype);
  if (!std::strcmp(rule, "adam_step")) return run_adam_step(shards[0], grad, out);
  if (!std::strcmp(rule, "adamw")) return run<AdamW>(shards, of_masters, grad, out);
  if (!std::strcmp(rule, "amsgrad")) return run<AmsGrad>(shards, of_masters, grad, out);
  if (!std::strcmp(rule, "lion")) return run<Lion>(shards, of_masters, grad, out);
  if (!std::strcmp(rule, "sgd")) return run<Sgd>(shards, of_masters, grad, out);
  if (!std::strcmp(rule, "sgd_plain")) return run<SgdPlain>(shards, of_masters, grad, out);
  if (!std::strcmp(rule, "muon_look_ahead")) return run<MuonLookAhead>(shards, of_masters, grad, out);
  if (!std::strcmp(rule, "muon_subtract")) return run<MuonSubtract>(shards, of_masters, grad, out);
  return -1;
}

// The same of encoded states. forms: of kMostStates states. scales: of each shard as many, null where there is none.
// low_size: of an element of split masters; 0: they are not split. row_keys: of each shard; null: bf16 is rounded to
// nearest. average_dtype: of all averages.
extern "C" int encoded_step(
    const char* rule, void* const* tensors, int states, const int64_t* numels, int count, int grad_dtype, int out_dtype,
    const float* hyper, const float* grad_scale, const float* found_inf, int32_t* nonfinite_slots, int32_t slots,
    float* const* row_stats, void* const* averages, int each, const float* rates, const int* forms,
    float* const* scales, int low_size, const int32_t* const* row_keys, int average_dtype) {
  std::vector<EncodedShard> shards;
  for (int i = 0; i < count; ++i) {
    EncodedShard shard = {};
    shard.step = args_of(
        tensors + (4 + states) * i, states, numels[i], hyper, grad_scale, found_inf, nonfinite_slots, slots,
        row_stats ? row_stats[i] : nullptr);
    for (int s = 0; s < kMostStates; ++s) shard.scales[s] = scales[i * kMostStates + s];
    if (row_keys) shard.row_keys = row_keys[i];
    if (low_size) shard.low = std::exchange(shard.step.master, nullptr);
    shards.push_back(shard);
  }
  Averages of_masters = averages_of(averages, each, rates, count, average_dtype);
  DType grad = DType(grad_dtype), out = DType(out_dtype);
  Encoded of = {{Form(forms[0]), Form(forms[1]), Form(forms[2])}, {}, nullptr, low_size, nullptr};
  if (!std::strcmp(rule, "adamw")) return run_encoded<AdamW>(shards, of_masters, of, grad, out);
  if (!std::strcmp(rule, "amsgrad")) return run_encoded<AmsGrad>(shards, of_masters, of, grad, out);
  if (!std::strcmp(rule, "lion")) return run_encoded<Lion>(shards, of_masters, of, grad, out);
  if (!std::strcmp(rule, "sgd")) return run_encoded<Sgd>(shards, of_masters, of, grad, out);
  if (!std::strcmp(rule, "sgd_plain")) return run_encoded<SgdPlain>(shards, of_masters, of, grad, out);
  if (!std::strcmp(rule, "muon_look_ahead")) return run_encoded<MuonLookAhead>(shards, of_masters, of, grad, out);
  if (!std::strcmp(rule, "muon_subtract")) return run_encoded<MuonSubtract>(shards, of_masters, of, grad, out);
  return -1;
}

// How many of the numbers that 8 bits stand for are read wrongly, where reciprocals are off by up to `off` units of the
// last place.
extern "C" int wrong_quotients(int off) {
  int wrong = 0;
  for (int stored = -128; stored < 128; ++stored) {
    float y = over_127(float(stored)), divisor = 2.0f - magnitude(y);
    wrong += y != float(stored) / 127.0f || quick_unscaled_int8(float(stored)) != y / divisor;
    for (int units = -off; units <= off; ++units) {
      float near = bits_float(float_bits(1.0f / divisor) + units);
      wrong += float_bits(corrected_quotient(y, divisor, near)) != float_bits(y / divisor);
    }
  }
  return wrong;
}

// The same of what is stored, of `count` values below their scales. Returns how many estimates were not sure, or -1
// where a sure one was wrong.
extern "C" int64_t unsure_estimates(int form, const float* values, const float* scales, int64_t count, int off) {
  int64_t unsure = 0;
  for (int64_t i = 0; i < count; ++i)
    for (int units : {-off, 0, off}) {
      Estimate estimate(Form(form), scales[i]);
      float near = Form(form) == Form::kInt8 ? 1.0f / (scales[i] + magnitude(values[i])) : std::sqrt(values[i]);
      int32_t stored = estimate.stored(values[i], near > 0.0f ? bits_float(float_bits(near) + units) : near);
      if (stored == kUnsure)
        ++unsure;
      else if (stored != nearest(encoded(Form(form), values[i], scales[i])))
        return -1;
    }
  return unsure;
}
