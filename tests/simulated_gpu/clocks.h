// Streams, the host and events as vector clocks: which piece of work is known to come after which.
//
// Each timeline (a stream, or the host) counts its own pieces of work. A clock holds one count a timeline: "all pieces
// up to here, of each timeline, come before what I do next". A wait takes the larger of two clocks, entry by entry.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <string>

#include <c10/util/Exception.h>

namespace simulated_gpu {

// torch has this many streams for each priority, and hands them out in turn: the 33rd is the first again.
constexpr int kStreamsPerPool = 32;
constexpr int kPriorities = 4;

// The numbers of the timelines: the default stream, torch's pools, streams that a collective has for itself, the host.
constexpr int kDefaultStream = 0;
constexpr int kFirstOfPools = 1;
constexpr int kFirstOwnStream = kFirstOfPools + kPriorities * kStreamsPerPool;
constexpr int kHost = 255;
constexpr int kTimelines = 256;

using Clock = std::array<uint64_t, kTimelines>;

inline void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < kTimelines; ++i) clock[i] = std::max(clock[i], other[i]);
}

inline bool includes(const Clock& clock, const Clock& other) {
  for (int i = 0; i < kTimelines; ++i)
    if (clock[i] < other[i]) return false;
  return true;
}

using Lock = std::lock_guard<std::recursive_mutex>;

// A point of a stream. What it stands for changes when it is recorded again, as with CUDA's.
struct Event {
  Clock clock{};
};

// All timelines of the process. The memory's members hold the same lock.
class Timelines {
 public:
  std::recursive_mutex lock;

  // A kernel is launched on the stream, after all that the host knows to be over.
  void launch(int stream) {
    Lock guard(lock);
    join(clocks_[stream], clocks_[kHost]);
    ++clocks_[stream][stream];
  }
  // The host itself reads or writes memory.
  void host_works() {
    Lock guard(lock);
    ++clocks_[kHost][kHost];
  }

  void record(int stream, Event& event) {
    Lock guard(lock);
    join(clocks_[stream], clocks_[kHost]);
    event.clock = clocks_[stream];
  }
  // Later work of the stream comes after the event.
  void block(const Event& event, int stream) {
    Lock guard(lock);
    join(clocks_[stream], event.clock);
  }
  // The host waits.
  void synchronize(const Event& event) {
    Lock guard(lock);
    join(clocks_[kHost], event.clock);
  }
  void synchronize(int stream) {
    Lock guard(lock);
    join(clocks_[kHost], clocks_[stream]);
  }
  void synchronize_all() {
    for (int stream = 0; stream < kHost; ++stream) synchronize(stream);
  }
  // A query: everything is late, so only what the host has waited for is over.
  bool arrived(const Event& event) {
    Lock guard(lock);
    return includes(clocks_[kHost], event.clock);
  }

  // The number of a timeline's last piece of work.
  uint64_t now(int timeline) const { return clocks_[timeline][timeline]; }
  // Whether that piece comes after piece `at` of `other`.
  bool is_after(int timeline, int other, uint64_t at) const { return at <= clocks_[timeline][other]; }
  // Whether later work of the stream comes after piece `at` of `other`. The stream may know so by itself, or because
  // the host does: a launch comes after all that the host has waited for.
  bool will_be_after(int stream, int other, uint64_t at) const {
    return is_after(stream, other, at) || is_after(kHost, other, at);
  }

  // torch's rule: priority 0 or lower, a lower number is more urgent.
  int next_of_pool(int priority) {
    Lock guard(lock);
    int pool = std::clamp(-priority, 0, kPriorities - 1);
    return kFirstOfPools + pool * kStreamsPerPool + handed_out_[pool]++ % kStreamsPerPool;
  }
  int next_own_stream() {
    Lock guard(lock);
    TORCH_CHECK(own_streams_ < kHost - kFirstOwnStream, "the simulated device has no stream left for a collective");
    return kFirstOwnStream + own_streams_++;
  }

  // All work is over, and streams are handed out from the first again.
  void restart() {
    Lock guard(lock);
    synchronize_all();
    handed_out_.fill(0);
    own_streams_ = 0;
  }

 private:
  std::array<Clock, kTimelines> clocks_{};
  std::array<int, kPriorities> handed_out_{};
  int own_streams_ = 0;
};

// Never destroyed: memory is freed until the process ends.
inline Timelines& timelines() {
  static auto* all = new Timelines;
  return *all;
}

// As CUDA has it, each thread has its own.
inline thread_local int current_stream = kDefaultStream;

inline std::string name_of(int timeline) {
  if (timeline == kHost) return "the host";
  return timeline == kDefaultStream ? "the default stream" : "stream " + std::to_string(timeline);
}

}  // namespace simulated_gpu
