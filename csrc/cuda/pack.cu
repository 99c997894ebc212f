// pack and unpack on CUDA: one launch for up to kLargeTable gradients, their pointers among its arguments, so that no
// table has to reach the device first.
#include "launchers.h"

#include <algorithm>

#include "chunk.h"

#if defined(__CUDACC__)
#include "launch.h"
#endif

namespace zero_kernels {
namespace {

// ---- kernel -------------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kChunks = 4;       // of a thread: as many loads are under way before the first is stored
constexpr int kBlocksPerSm = 4;  // lets a thread have 64 registers: held to 32, it spilled on sm_100

// Slots of a launch: at most what 32764 bytes of arguments hold.
constexpr int kSmallTable = 128;
constexpr int kLargeTable = 1280;

template <int kSlots>
struct PackArgs {
  void* bucket;
  int32_t* nonfinite;  // [count] or null
  int64_t begin, end;  // elements of the bucket that this launch is about
  int count;           // of slots
  float scale;
  bool vector;  // the bucket starts where its chunks are aligned
  DType dtypes[kSlots];
  Slot slots[kSlots];
};
static_assert(sizeof(PackArgs<kLargeTable>) <= 32764);

enum class Direction { kPack, kUnpack };

// Elements of the bucket that one access moves, and that a block moves.
template <class T>
constexpr int kChunk = 16 / sizeof(T);
template <class T>
constexpr int64_t kTile = int64_t(kThreads) * kChunks * kChunk<T>;

// The first tile of a launch starts at a chunk of the bucket, wherever the launch begins.
template <class T>
ZK_HOST_DEVICE inline int64_t first_tile(int64_t begin) {
  return begin / kChunk<T> * kChunk<T>;
}

// Index of the first slot that ends after element `at`.
template <class Args>
ZK_HOST_DEVICE inline int find_slot(const Args& args, int64_t at) {
  int low = 0, high = args.count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (args.slots[middle].end <= at)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

template <Direction kDirection, class Bucket, class Grad, class Args>
struct Mover {
  static constexpr int N = kChunk<Bucket>;
  const Args& args;
  int slot;
  Bucket* bucket;
  Grad* grad;  // where element 0 of the bucket would be, were the gradient that long

  ZK_HOST_DEVICE Mover(const Args& args, int slot)
      : args(args),
        slot(slot),
        bucket(static_cast<Bucket*>(args.bucket)),
        grad(static_cast<Grad*>(args.slots[slot].grad)) {}

  ZK_HOST_DEVICE int64_t in_grad(int64_t i) const { return i - args.slots[slot].begin; }

  ZK_HOST_DEVICE bool can_move_chunk(int64_t i) const {
    return args.vector && aligned(grad + in_grad(i), kAccess<Grad, N>);
  }

  ZK_HOST_DEVICE void load(int64_t i, float (&x)[N]) const {
    if (kDirection == Direction::kPack)
      load_chunk(grad + in_grad(i), x);
    else
      load_chunk(bucket + i, x);
  }

  // Scales and stores; returns whether a value was not finite before.
  ZK_HOST_DEVICE bool store(int64_t i, float (&x)[N]) const {
    bool bad = false;
    for (int j = 0; j < N; ++j) {
      bad |= is_nonfinite(x[j]);
      x[j] = x[j] * args.scale;
    }
    if (kDirection == Direction::kPack)
      store_chunk(bucket + i, x);
    else
      store_chunk(grad + in_grad(i), x);
    return bad;
  }

  ZK_HOST_DEVICE bool move_one(int64_t i) const {
    float x = kDirection == Direction::kPack ? widen(grad[in_grad(i)]) : widen(bucket[i]);
    if (kDirection == Direction::kPack)
      narrow(x * args.scale, bucket + i);
    else
      narrow(x * args.scale, grad + in_grad(i));
    return is_nonfinite(x);
  }

  // Threads that share a gradient all write the same 1.
  ZK_HOST_DEVICE void flag(bool bad) const {
    if (bad && args.nonfinite) args.nonfinite[slot] = 1;
  }
};

// A whole tile inside one slot: all loads, then all stores.
template <class M>
ZK_HOST_DEVICE inline void move_tile(const M& mover, int64_t first) {
  constexpr int64_t kStride = int64_t(kThreads) * M::N;
  float x[kChunks][M::N];
  ZK_UNROLL
  for (int c = 0; c < kChunks; ++c) mover.load(first + c * kStride, x[c]);
  bool bad = false;
  ZK_UNROLL
  for (int c = 0; c < kChunks; ++c) bad |= mover.store(first + c * kStride, x[c]);
  mover.flag(bad);
}

// Elements [from, to) of one slot, at most a chunk.
template <class M>
ZK_HOST_DEVICE inline void move_part(const M& mover, int64_t from, int64_t to) {
  bool bad = false;
  if (to - from == M::N && from % M::N == 0 && mover.can_move_chunk(from)) {
    float x[M::N];
    mover.load(from, x);
    bad = mover.store(from, x);
  } else {
    for (int64_t i = from; i < to; ++i) bad |= mover.move_one(i);
  }
  mover.flag(bad);
}

// Calls f with the mover of a slot.
template <Direction kDirection, class Bucket, class Args, class F>
ZK_HOST_DEVICE inline void with_mover(const Args& args, int slot, F f) {
  with_type(args.dtypes[slot], [&](auto grad) {
    f(Mover<kDirection, Bucket, typename decltype(grad)::type, Args>(args, slot));
  });
}

// Elements [from, to), a chunk at most, of any slots and gaps; `slot` is the first that may reach into it.
template <Direction kDirection, class Bucket, class Args>
ZK_HOST_DEVICE inline void move_chunk(const Args& args, int64_t from, int64_t to, int slot) {
  while (from < to) {
    while (slot < args.count && args.slots[slot].end <= from) ++slot;
    int64_t begin = slot < args.count ? args.slots[slot].begin : to;
    if (begin > from) {
      int64_t gap_end = begin < to ? begin : to;
      if (kDirection == Direction::kPack)
        for (int64_t i = from; i < gap_end; ++i) narrow(0.0f, static_cast<Bucket*>(args.bucket) + i);
      from = gap_end;
      continue;
    }
    int64_t part_end = args.slots[slot].end < to ? args.slots[slot].end : to;
    with_mover<kDirection, Bucket>(args, slot, [&](const auto& mover) { move_part(mover, from, part_end); });
    from = part_end;
  }
}

// The program of one thread of one block.
template <Direction kDirection, class Bucket, class Args>
ZK_HOST_DEVICE inline void pack_thread(const Args& args, int64_t block, int thread) {
  constexpr int N = kChunk<Bucket>;
  int64_t tile = first_tile<Bucket>(args.begin) + block * kTile<Bucket>;
  int64_t tile_end = tile + kTile<Bucket>;
  int64_t first = tile + int64_t(thread) * N;
  int slot = find_slot(args, tile < args.begin ? args.begin : tile);
  bool moved = false;
  if (slot < args.count && args.slots[slot].begin <= tile && tile_end <= args.slots[slot].end && args.begin <= tile)
    with_mover<kDirection, Bucket>(args, slot, [&](const auto& mover) {
      moved = mover.can_move_chunk(tile);
      if (moved) move_tile(mover, first);
    });
  if (moved) return;
  for (int c = 0; c < kChunks; ++c) {
    int64_t from = first + int64_t(c) * kThreads * N, to = from + N;
    if (from < args.begin) from = args.begin;
    if (to > args.end) to = args.end;
    move_chunk<kDirection, Bucket>(args, from, to, slot);
  }
}

// ---- launcher -----------------------------------------------------------------------------------------------------

// Slots [from, to), and the gaps up to the slot that the next launch begins with.
template <int kSlots, class Run>
void launch_slots(const PackJob& job, size_t from, size_t to, Run run) {
  PackArgs<kSlots> args;
  args.bucket = job.bucket;
  args.nonfinite = job.nonfinite ? job.nonfinite + from : nullptr;
  args.begin = from == 0 ? 0 : job.slots[from].begin;
  args.end = to == job.slots.size() ? job.numel : job.slots[to].begin;
  args.count = int(to - from);
  args.scale = job.scale;
  args.vector = reinterpret_cast<uintptr_t>(job.bucket) % 16 == 0;
  std::copy(job.slots.begin() + from, job.slots.begin() + to, args.slots);
  std::copy(job.dtypes.begin() + from, job.dtypes.begin() + to, args.dtypes);
  with_type(job.dtype, [&](auto bucket) {
    using Bucket = typename decltype(bucket)::type;
    run(bucket, args, ceil_div(args.end - first_tile<Bucket>(args.begin), kTile<Bucket>));
  });
}

// Calls run(Type<Bucket>, args, blocks) for each launch that it takes.
template <class Run>
void launch(const PackJob& job, Run run) {
  size_t from = 0;
  do {
    size_t to = std::min(job.slots.size(), from + kLargeTable);
    if (to - from <= kSmallTable)
      launch_slots<kSmallTable>(job, from, to, run);
    else
      launch_slots<kLargeTable>(job, from, to, run);
    from = to;
  } while (from < job.slots.size());
}

#if defined(__CUDACC__)

template <Direction kDirection, class Bucket, class Args>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) pack_kernel(const __grid_constant__ Args args) {
  pack_thread<kDirection, Bucket>(args, blockIdx.x, threadIdx.x);
}

template <Direction kDirection>
void launch_on(CUstream_st* stream, const char* op, const PackJob& job) {
  launch(job, [&](auto bucket, const auto& args, int64_t blocks) {
    using Args = std::decay_t<decltype(args)>;
    on_stream(stream, op, pack_kernel<kDirection, typename decltype(bucket)::type, Args>, blocks, kThreads, args);
  });
}

#endif

}  // namespace

#if defined(__CUDACC__)

void run_pack(CUstream_st* stream, const PackJob& job) { launch_on<Direction::kPack>(stream, "pack", job); }

void run_unpack(CUstream_st* stream, const PackJob& job) { launch_on<Direction::kUnpack>(stream, "unpack", job); }

#endif

}  // namespace zero_kernels
