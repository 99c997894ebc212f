// Makes the simulated device torch's "cuda", and the functions that Python calls. Loaded before torch is: it looks for
// a device once, when it is imported. What each part is for is told in __init__.py.
#include "clocks.h"
#include "guard.h"
#include "kernels.h"
#include "memory.h"

namespace simulated_gpu {
namespace {

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// The largest: no other allocator of torch's takes its place.
constexpr uint8_t kAllocatorPriority = 255;

const bool allocator_is_set = [] {
  c10::SetAllocator(c10::kCUDA, &device_allocator(), kAllocatorPriority);
  return true;
}();

std::vector<int64_t> bytes() {
  Lock guard(timelines().lock);
  return {static_cast<int64_t>(memory().device_bytes), static_cast<int64_t>(memory().device_peak)};
}

void reset_peak() {
  Lock guard(timelines().lock);
  memory().device_peak = memory().device_bytes;
}

// Some ops have a kernel for the CPU and, for devices without one, a definition by other ops, which torch prefers to a
// fallback. The CPU's kernel is taken here, as it is on the CPU: a device of its own would have one, too.
void prefer_cpu_kernels(torch::Library& library) {
  using c10::DispatchKey;
  constexpr std::array kDefinitions{
      DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional,
      DispatchKey::CompositeImplicitAutograd};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op || !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    auto is_there = [&](DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    if (std::any_of(kDefinitions.begin(), kDefinitions.end(), is_there))
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// A stream's number, checked: Python may give any.
int checked(int64_t stream) {
  TORCH_CHECK(stream >= 0 && stream < kHost, "there is no stream ", stream);
  return static_cast<int>(stream);
}

}  // namespace
}  // namespace simulated_gpu

namespace at {
// torch looks for it under this name.
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", simulated_gpu::Hooks)
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated_gpu::fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  simulated_gpu::prefer_cpu_kernels(m);
  m.impl("empty.memory_format", &simulated_gpu::empty);
  m.impl("empty_strided", &simulated_gpu::empty_strided);
  m.impl(
      "as_strided",
      [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
        return at::native::as_strided_tensorimpl(self, size, stride, offset);
      });
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl(
      "view.dtype", [](const at::Tensor& self, at::ScalarType dtype) { return at::native::view_dtype(self, dtype); });
  m.impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("copy_", &simulated_gpu::copy_);
  m.impl("set_.source_Storage_storage_offset", &simulated_gpu::set_to_part);
  m.impl("set_.source_Storage", &simulated_gpu::set_to_storage);
  m.impl("record_stream", &simulated_gpu::record_stream);
}

// Streams are numbers here; device.py says what each function does.
TORCH_LIBRARY(simulated_gpu, m) {
  using namespace simulated_gpu;
  m.def("new_stream() -> int", []() -> int64_t { return timelines().next_stream(); });
  m.def("launch(int stream) -> ()", [](int64_t stream) { timelines().launch(checked(stream)); });
  m.def(
      "touch(Tensor tensor, bool write, int stream, str what) -> ()",
      [](const at::Tensor& tensor, bool write, int64_t stream, const std::string& what) {
        touch(tensor, write, checked(stream), what);
      });
  m.def(
      "host_access(Tensor tensor, bool write, str what) -> ()",
      [](const at::Tensor& tensor, bool write, const std::string& what) { host_access(tensor, write, what); });
  m.def("alias(Tensor tensor) -> Tensor", [](const at::Tensor& tensor) { return cpu_alias(tensor); });
  m.def("resize_storage(Storage storage, int nbytes) -> ()", &resize_storage);
  m.def("bytes() -> int[]", &bytes);
  m.def("reset_peak() -> ()", &reset_peak);
  m.def("pin(int address, int size) -> ()", [](int64_t address, int64_t size) {
    memory().pin(reinterpret_cast<const void*>(address), static_cast<size_t>(size));
  });
  m.def("unpin(int address) -> bool", [](int64_t address) {
    return memory().unpin(reinterpret_cast<const void*>(address));
  });
}

extern "C" C10_EXPORT void simulated_gpu_set_reporter(simulated_gpu::Reporter reporter) {
  simulated_gpu::reporter = reporter;
}
