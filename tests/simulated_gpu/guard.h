// What torch's own C++ asks of a device: its streams and events, and that it is there. Autograd's engine goes through
// it.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "clocks.h"
#include "memory.h"

namespace simulated_gpu {

inline c10::Stream stream_of(int id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }

// The number that a stream of torch's has here. A number from elsewhere would be an index out of range.
inline int id_of(const c10::Stream& stream) {
  check_ours(stream.device_index());
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kHost, "stream ", stream.id(), " is not one of the simulated device");
  return static_cast<int>(stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current_device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(c10::kCUDA, std::exchange(current_device, device.index()));
  }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return number() + 1; }

  c10::Stream getStream(c10::Device device) const override {
    check_ours(device.index());
    return stream_of(current_stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    check_ours(device.index());
    return stream_of(kDefaultStream);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    check_ours(device.index());
    return stream_of(timelines().next_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_stream, id_of(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    timelines().record(id_of(stream), *static_cast<Event*>(*event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    timelines().block(*static_cast<Event*>(event), id_of(stream));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    return timelines().arrived(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    timelines().synchronize(*static_cast<Event*>(event));
  }
  void synchronizeStream(const c10::Stream& stream) const override { timelines().synchronize(id_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex) const override { timelines().synchronize_all(); }
  // As the caching allocator, it does nothing for memory that is not its own.
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_deleter() == &release) memory().record_stream(data.get(), id_of(stream));
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return index == number(); }
  int getNumGPUs() const override { return number() + 1; }
  c10::DeviceIndex deviceCount() const override { return number() + 1; }
  c10::DeviceIndex current_device() const override { return simulated_gpu::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return simulated_gpu::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { simulated_gpu::current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(simulated_gpu::current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Device getDeviceFromPtr(void*) const override { return the_device(); }

  bool isPinnedPtr(const void* data) const override { return memory().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { timelines().synchronize_all(); }

  // Random numbers are the host's: a kernel runs there.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

}  // namespace simulated_gpu
