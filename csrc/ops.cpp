// Every compiled schema (namespace zero_kernels_C), and the ops on CPU tensors.
#include "ops.h"

#include <cmath>
#include <cstring>

#include "cpu/isa.h"

namespace zero_kernels {
namespace {

constexpr int64_t kGrain = 32768;  // elements: below this a second thread costs more than it brings

// table: what the slots are rows of.
void check_slots(const char* table, const int32_t* row_slot, int64_t rows, int64_t slots) {
  for (int64_t row = 0; row < rows; ++row)
    if (row_slot[row] >= slots)
      refuse(
          "row_slot[" + std::to_string(row) + "] = " + std::to_string(row_slot[row]) + ", but " + table + " has " +
          std::to_string(slots) + " rows");
}

template <class Kernel>
void parallel_rows(int64_t numel, Kernel kernel) {
  torch::stable::parallel_for(0, ceil_div(numel, kRow), kGrain / kRow, kernel);
}

// Marks the slots that hold a non-finite gradient times scale, and so are the reason of a skipped step.
void mark_nonfinite(const StepArgs& args, DType dtype) {
  const KernelTable& table = kernels();
  parallel_rows(args.numel, [&](int64_t begin, int64_t end) {
    float scaled[kRow];
    for (int64_t row = begin; row < end; ++row) {
      int32_t slot = args.row_slot[row];
      if (slot < 0) continue;
      int64_t count = std::min(kRow, args.numel - row * kRow);
      float scale = (args.grad_scale ? *args.grad_scale : 1.0f) * args.hyper[slot].grad_factor;
      const void* grad = static_cast<const char*>(args.grad) + row * kRow * size_of(dtype);
      table.scale({grad, scaled, count, scale, dtype, DType::kFloat});
      if (table.scale({scaled, scaled, count, 1.0f, DType::kFloat, DType::kFloat}))
        __atomic_store_n(args.nonfinite_slots + slot, 1, __ATOMIC_RELAXED);
    }
  });
}

// Calls visit(index of slot, begin, end) for the parts of slots in [begin, end), in order.
template <class Visit>
void for_slots(const std::vector<Slot>& slots, int64_t begin, int64_t end, Visit visit) {
  auto first =
      std::upper_bound(slots.begin(), slots.end(), begin, [](int64_t at, const Slot& slot) { return at < slot.end; });
  for (auto slot = first; slot != slots.end() && slot->begin < end; ++slot) {
    int64_t from = std::max(begin, slot->begin), to = std::min(end, slot->end);
    if (from < to) visit(slot - slots.begin(), from, to);
  }
}

// Element `at` of the bucket, and that of a gradient that lies there.
char* in_bucket(const PackJob& job, int64_t at) { return static_cast<char*>(job.bucket) + at * size_of(job.dtype); }
char* in_grad(const PackJob& job, int64_t i, int64_t at) {
  return static_cast<char*>(job.slots[i].grad) + (at - job.slots[i].begin) * size_of(job.dtypes[i]);
}

void stats_of(const Tensor& shard, double norm_type, float* out) {
  int64_t blocks = ceil_div(shard.numel(), kStatsBlock);
  std::vector<float> partials(blocks);
  std::vector<int32_t> nonfinite(blocks);
  StatsArgs args = {data<const void>(shard), shard.numel(), partials.data(), nonfinite.data(), dtype_of(shard)};
  int norm = std::isinf(norm_type) ? 0 : int(norm_type);
  const KernelTable& table = kernels();
  torch::stable::parallel_for(
      0, blocks, kGrain / kStatsBlock, [&](int64_t begin, int64_t end) { table.stats(args, norm, begin, end); });
  int64_t count = 0;
  for (int32_t found : nonfinite) count += found;
  out[0] = table.combine(partials.data(), blocks, norm);
  out[1] = float(count);
}

struct Cpu {
  static const StepKernel* rules() { return kernels().steps; }

  static void step(const StepKernel& kernel, const Stored& stored, const std::vector<StepArgs>& shards, const Tensor&) {
    std::vector<int64_t> ends;  // of each shard, in the rows of all
    int64_t rows = 0;
    for (const StepArgs& args : shards) {
      int64_t of_shard = ceil_div(args.numel, kRow);
      check_slots("hyper", args.row_slot, of_shard, args.slots);
      ends.push_back(rows += of_shard);
    }
    if (shards[0].found_inf && *shards[0].found_inf != 0.0f) {
      for (const StepArgs& args : shards)
        if (args.nonfinite_slots) mark_nonfinite(args, stored.grad);
      return;
    }
    torch::stable::parallel_for(0, rows, kGrain / kRow, [&](int64_t begin, int64_t end) {
      size_t i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
      for (; begin < end; begin = ends[i++]) {
        int64_t first = i ? ends[i - 1] : 0;
        kernel.run(shards[i], stored, begin - first, std::min(end, ends[i]) - first);
      }
    });
  }

  static void ema(const std::vector<EmaArgs>& all, const Tensor&) {
    for (const EmaArgs& args : all) check_slots("rates", args.row_slot, ceil_div(args.numel, kRow), args.slots);
    const KernelTable& table = kernels();
    for (const EmaArgs& args : all)
      parallel_rows(args.numel, [&](int64_t begin, int64_t end) { table.ema(args, begin, end); });
  }

  static void pack(const PackJob& job, const Tensor&) {
    if (job.nonfinite) std::fill_n(job.nonfinite, job.slots.size(), 0);
    const KernelTable& table = kernels();
    torch::stable::parallel_for(0, job.numel, kGrain, [&](int64_t begin, int64_t end) {
      int64_t done = begin;
      auto clear = [&](int64_t to) { std::memset(in_bucket(job, done), 0, in_bucket(job, to) - in_bucket(job, done)); };
      for_slots(job.slots, begin, end, [&](int64_t i, int64_t from, int64_t to) {
        clear(from);
        bool bad =
            table.scale({in_grad(job, i, from), in_bucket(job, from), to - from, job.scale, job.dtypes[i], job.dtype});
        // Threads that share a gradient all write the same 1.
        if (bad && job.nonfinite) __atomic_store_n(job.nonfinite + i, 1, __ATOMIC_RELAXED);
        done = to;
      });
      clear(end);
    });
  }

  static void unpack(const PackJob& job, const Tensor&) {
    const KernelTable& table = kernels();
    torch::stable::parallel_for(0, job.numel, kGrain, [&](int64_t begin, int64_t end) {
      for_slots(job.slots, begin, end, [&](int64_t i, int64_t from, int64_t to) {
        table.scale({in_bucket(job, from), in_grad(job, i, from), to - from, job.scale, job.dtype, job.dtypes[i]});
      });
    });
  }

  static Tensor grad_stats(const Tensors& shards, double norm_type) {
    Tensor out = torch::stable::new_empty(shards.at(0), {int64_t(shards.size()), 2}, ScalarType::Float);
    for (size_t i = 0; i < shards.size(); ++i) stats_of(shards[i], norm_type, data<float>(out) + 2 * i);
    return out;
  }

  static void hyper_table(const HyperTableArgs& args, const Tensor&) {
    for (int64_t slot = 0; args.group && slot < args.slots; ++slot)
      if (args.group[slot] < 0 || args.group[slot] >= args.groups)
        refuse(
            "group[" + std::to_string(slot) + "] = " + std::to_string(args.group[slot]) + ", but coefficients has " +
            std::to_string(args.groups) + " columns");
    torch::stable::parallel_for(0, args.slots, 256, [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin; slot < end; ++slot) make_hyper_row(args, slot);
    });
  }
};

// The reads and writes of a 16-bit update with nothing computed: the yardstick of the benchmark.
void stream(const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& out) {
  StreamArgs args = {data<const void>(grad), data<float>(a),  data<float>(b),
                     data<float>(c),         data<void>(out), grad.numel()};
  const KernelTable& table = kernels();
  parallel_rows(args.numel, [&](int64_t begin, int64_t end) { table.stream(args, begin, end); });
}

std::string isa() { return kernels().name; }

}  // namespace
}  // namespace zero_kernels

STABLE_TORCH_LIBRARY(zero_kernels_C, m) {
  m.def(
      "foreach_step(str rule, Tensor[] grads, Tensor(a!)[] masters, Tensor(b!)[] states, Tensor(c!)[] params_out, "
      "Tensor[] row_slots, Tensor hyper, Tensor? grad_scale, Tensor? found_inf, Tensor(d!)? nonfinite_slots, "
      "Tensor(e!)[]? scales=None, Tensor[]? row_keys=None) -> ()");
  m.def("ema(Tensor(a!)[] averages, Tensor[] masters, Tensor[] params, Tensor[] row_slots, Tensor rates) -> ()");
  m.def("pack(Tensor[] grads, int[] offsets, Tensor(a!) bucket, float scale, Tensor(b!)? nonfinite) -> ()");
  m.def("unpack(Tensor bucket, int[] offsets, Tensor(a!)[] grads, float scale) -> ()");
  m.def("grad_stats(Tensor[] shards, float norm_type) -> Tensor");
  m.def("hyper_table(Tensor coefficients, Tensor? group, Tensor step, Tensor? active, Tensor(a!) out) -> ()");
  m.def("stream(Tensor grad, Tensor(a!) a, Tensor(b!) b, Tensor(c!) c, Tensor(d!) out) -> ()");
  m.def("cuda_archs() -> str");
  m.def("cuda_problem() -> str");
  m.def("isa() -> str");
  m.def("isas() -> str");
  m.def("use_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CPU, m) {
  zero_kernels::implement<zero_kernels::Cpu>(m);
  m.impl("stream", TORCH_BOX(&zero_kernels::stream));
}

STABLE_TORCH_LIBRARY_IMPL(zero_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&zero_kernels::isa));
  m.impl("isas", TORCH_BOX(&zero_kernels::usable_isas));
  m.impl("use_isa", TORCH_BOX(&zero_kernels::use_isa));
}
