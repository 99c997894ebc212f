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

namespace simulated_gpu {

// The numbers of the timelines: the default stream, other streams, the host.
constexpr int kDefaultStream = 0;
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

  // As torch does, in turn, but of more than its 32: two users of one stream would be in order by chance.
  int next_stream() {
    Lock guard(lock);
    return kDefaultStream + 1 + handed_out_++ % (kHost - 1);
  }

 private:
  std::array<Clock, kTimelines> clocks_{};
  int handed_out_ = 0;
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
