// The device's memory and pinned host memory: who has read and written which part of it, and who may not yet.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>

#include "clocks.h"

namespace simulated_gpu {

// As the caching allocator has it. The kernels of a CPU want no more.
constexpr size_t kAlignment = 512;
// Eight bits of ones: NaN in every floating dtype, -1 in the others.
constexpr int kFreshByte = 0xFF;

struct Range {
  uintptr_t begin, end;

  bool empty() const { return begin >= end; }
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
  bool contains(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

enum class Kind { kRead, kWrite, kAllocation };

// A timeline's use of a range. An allocation counts as one: its memory may come from earlier work of its stream.
struct Access {
  Range range;
  Kind kind;
  int timeline;
  uint64_t at;             // in the timeline's own count
  const std::string* who;  // the op, of the names kept for good

  bool writes() const { return kind != Kind::kRead; }
};

// One allocation. `accesses`: those that a later one could still race with.
struct Block {
  size_t size;
  int stream;
  bool pinned;
  std::vector<Access> accesses;
  std::array<bool, kTimelines> recorded{};  // the streams given to record_stream
};

// Called with the text of a race, without the lock: it takes Python's, and its holder may be waiting for ours.
using Reporter = void (*)(const char* text);
inline std::atomic<Reporter> reporter{nullptr};

inline void report(const std::string& race) {
  if (race.empty()) return;
  if (Reporter call = reporter.load()) call(race.c_str());
}

inline std::string actor(const Access& access) {
  if (access.timeline == kHost) return "the host (" + *access.who + ")";
  return *access.who + " on " + name_of(access.timeline);
}

inline std::string describe(const Access& access, const Access& earlier) {
  std::string text = actor(access) + (access.writes() ? " writes" : " reads");
  if (earlier.kind == Kind::kAllocation)
    return text + " memory allocated on " + name_of(earlier.timeline) + ", whose earlier work may still use it";
  return text + " what " + actor(earlier) + (earlier.writes() ? " wrote" : " read");
}

// Whether the block is given out again only after this use of it. The allocator asks a stream of record_stream for an
// event when the block is freed: that comes after all that the stream has been given, or has waited for.
inline bool is_waited_for(const Block& block, const Access& use) {
  if (block.recorded[use.timeline] || timelines().will_be_after(block.stream, use.timeline, use.at)) return true;
  for (int stream = 0; stream < kHost; ++stream)
    if (block.recorded[stream] && timelines().is_after(stream, use.timeline, use.at)) return true;
  return false;
}

// Every block alive. The lock is the timelines'.
class Memory {
 public:
  size_t device_bytes = 0, device_peak = 0;

  void* allocate(size_t size, bool pinned) {
    if (size == 0) return nullptr;
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, kAlignment, size) == 0, "no memory for ", size, " bytes");
    std::memset(pointer, kFreshByte, size);
    Lock guard(timelines().lock);
    auto begin = reinterpret_cast<uintptr_t>(pointer);
    Block block{size, current_stream, pinned, {}};
    if (!pinned) {  // the allocator of pinned memory waits for its last use before it gives it out again
      Range whole{begin, begin + size};
      uint64_t at = timelines().now(current_stream);
      block.accesses.push_back({whole, Kind::kAllocation, current_stream, at, keep("the allocator")});
      device_bytes += size;
      device_peak = std::max(device_peak, device_bytes);
    }
    blocks_.insert_or_assign(begin, std::move(block));
    return pointer;
  }

  // The caching allocator gives freed memory to later work of the stream that it was allocated on, without a wait. It
  // waits for the streams given to record_stream, and for no other.
  void release(void* pointer) {
    std::vector<std::string> races;
    {
      Lock guard(timelines().lock);
      auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
      if (found == blocks_.end()) return;
      const Block& block = found->second;
      if (!block.pinned) {
        device_bytes -= block.size;
        for (const Access& last : block.accesses)
          if (!is_waited_for(block, last))
            races.push_back(
                "memory allocated on " + name_of(block.stream) + " is freed, and may be used again there, while " +
                actor(last) + (last.writes() ? " writes" : " reads") + " it");
      }
      blocks_.erase(found);
    }
    std::free(pointer);
    for (const std::string& race : races) report(race);
  }

  // Memory of the host that is there already, as cudaHostRegister takes it.
  void pin(const void* pointer, size_t size) {
    auto begin = reinterpret_cast<uintptr_t>(pointer);
    Lock guard(timelines().lock);
    auto next = blocks_.lower_bound(begin);
    bool taken = find(begin) != blocks_.end() || (next != blocks_.end() && next->first < begin + size);
    TORCH_CHECK(!taken, "this memory of the host is pinned already");
    blocks_.insert_or_assign(begin, Block{size, kHost, true, {}});
  }

  // Its owner may free it next, whatever the device still does with it. False where it is not the start of a block.
  bool unpin(const void* pointer) {
    std::vector<std::string> races;
    {
      Lock guard(timelines().lock);
      auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
      if (found == blocks_.end()) return false;
      for (const Access& last : found->second.accesses)
        if (!timelines().is_after(kHost, last.timeline, last.at))
          races.push_back("memory of the host is unregistered while " + actor(last) + " uses it");
      blocks_.erase(found);
    }
    for (const std::string& race : races) report(race);
    return true;
  }

  void access(Range range, bool write, int timeline, const std::string& who) {
    if (range.empty()) return;
    std::vector<std::string> races;
    {
      Lock guard(timelines().lock);
      auto found = find(range.begin);
      if (found == blocks_.end()) return;  // pageable memory of the host
      auto& earlier = found->second.accesses;
      Access access{range, write ? Kind::kWrite : Kind::kRead, timeline, timelines().now(timeline), keep(who)};
      auto implied = [&](const Access& other) {
        if (!range.overlaps(other.range)) return false;
        if (!timelines().is_after(timeline, other.timeline, other.at)) {
          if (write || other.writes()) races.push_back(describe(access, other));
          return false;
        }
        // What is not ordered after the other is not ordered after this either, so only this need be remembered.
        return range.contains(other.range) && (write || !other.writes());
      };
      earlier.erase(std::remove_if(earlier.begin(), earlier.end(), implied), earlier.end());
      earlier.push_back(access);
    }
    for (const std::string& race : races) report(race);
  }

  void record_stream(const void* pointer, int stream) {
    Lock guard(timelines().lock);
    auto found = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
    if (found != blocks_.end()) found->second.recorded[stream] = true;
  }

  bool is_pinned(const void* pointer) {
    Lock guard(timelines().lock);
    auto found = find(reinterpret_cast<uintptr_t>(pointer));
    return found != blocks_.end() && found->second.pinned;
  }

 private:
  using Blocks = std::map<uintptr_t, Block>;

  Blocks::iterator find(uintptr_t address) {
    auto found = blocks_.upper_bound(address);
    if (found == blocks_.begin()) return blocks_.end();
    --found;
    return address < found->first + found->second.size ? found : blocks_.end();
  }
  const std::string* keep(const std::string& name) { return &*names_.insert(name).first; }

  Blocks blocks_;
  std::unordered_set<std::string> names_;
};

inline Memory& memory() {
  static auto* all = new Memory;  // never destroyed: memory is freed until the process ends
  return *all;
}

inline void release(void* pointer) { memory().release(pointer); }

// The number of the device. Those below it are there too, and are other ranks': whoever uses one is told.
inline c10::DeviceIndex number() {
  static const char* given = std::getenv("SIMULATED_GPU_NUMBER");
  static const auto number = static_cast<c10::DeviceIndex>(given ? std::atoi(given) : 0);
  return number;
}

inline c10::Device the_device() { return c10::Device(c10::kCUDA, number()); }

// As CUDA has it, each thread has its own, and begins with the first.
inline thread_local c10::DeviceIndex current_device = 0;

// Raises where it is not this device. No index: the current one.
inline void check_ours(c10::DeviceIndex index) {
  index = index < 0 ? current_device : index;
  int used = index, ours = number();  // as numbers: an index is a char
  TORCH_CHECK(used == ours, "GPU ", used, " is used, and not GPU ", ours, ", which is the rank's");
}

// What torch asks for memory, on the device or pinned.
class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(bool pinned) : pinned_(pinned) {}

  c10::DataPtr allocate(size_t size) override {
    void* pointer = memory().allocate(size, pinned_);
    return {pointer, pointer, &release, pinned_ ? c10::Device(c10::kCPU) : the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }

 private:
  bool pinned_;
};

inline Allocator& device_allocator() {
  static auto* allocator = new Allocator(/*pinned=*/false);
  return *allocator;
}

inline Allocator& pinned_allocator() {
  static auto* allocator = new Allocator(/*pinned=*/true);
  return *allocator;
}

}  // namespace simulated_gpu
