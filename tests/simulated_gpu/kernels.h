// Kernels of the device: torch's for the CPU, on CPU tensors that share the memory of the device's.
#pragma once

#include <memory>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/autograd/node.h>
#include <torch/library.h>

#include "guard.h"

namespace simulated_gpu {

// Ops that read from the device on the host, such as a size before they can allocate their result: CUDA's wait for the
// current stream.
inline const std::unordered_set<std::string> kWaitsForItsResult{
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"};

// The bytes between the first and the last element.
inline Range range_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage() || tensor.storage().nbytes() == 0) return {0, 0};
  auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.element_size();
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.element_size()};
}

inline void touch(const at::Tensor& tensor, bool write, int timeline, const std::string& who) {
  memory().access(range_of(tensor), write, timeline, who);
}

inline void host_access(const at::Tensor& tensor, bool write, const std::string& who) {
  timelines().host_works();
  touch(tensor, write, kHost, who);
}

// The op, and the node of autograd's graph that runs it: no Python code is on the stack there.
inline std::string with_node(const std::string& op) {
  auto node = torch::autograd::get_current_node();
  return node ? op + " of " + node->name() : op;
}

// CPU tensors that share the memory of the device's tensors. Tensors of one storage share one here, too: the CPU's
// kernels look at that to find outputs that overlap inputs.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    Range range = range_of(tensor);
    auto base = reinterpret_cast<uintptr_t>(storage->data());
    TORCH_CHECK(
        tensor.numel() == 0 || (!range.empty() && range.end <= base + storage->nbytes()),
        "a kernel is given a tensor whose memory is gone: it needs more bytes than its storage of ", storage->nbytes());
    auto [entry, is_new] = storages_.try_emplace(storage, c10::Storage());
    if (is_new) entry->second = share(tensor.storage());
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(entry->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    return alias;
  }

  // The device's storage that a CPU tensor shares, if it does.
  c10::Storage shared_with(const at::Tensor& cpu) const {
    for (const auto& [original, alias] : storages_)
      if (cpu.storage().is_alias_of(alias) && alias.data() == original->data())
        return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(original));
    return c10::Storage();
  }

 private:
  // The alias keeps the memory of the device alive. A kernel that resizes the alias gives it memory of the CPU's;
  // Call::take_back copies the result back.
  static c10::Storage share(const c10::Storage& storage) {
    auto* kept = new c10::Storage(storage);
    c10::DataPtr data(
        storage.unsafeGetStorageImpl()->mutable_data(), kept,
        [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::Device(c10::kCPU));
    return c10::Storage(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

inline at::Tensor cpu_alias(const at::Tensor& tensor) { return tensor.is_cuda() ? Aliases().of(tensor) : tensor; }

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  if (device) check_ours(device->index());
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  if (device) check_ours(device->index());
  return at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

// As CUDA's: what is there is copied by the current stream, and the old memory is freed.
inline void resize_storage(c10::Storage storage, int64_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  size_t kept = std::min(impl->nbytes(), static_cast<size_t>(nbytes));
  auto fresh = device_allocator().allocate(nbytes);
  if (kept) {
    auto from = reinterpret_cast<uintptr_t>(impl->data()), to = reinterpret_cast<uintptr_t>(fresh.get());
    timelines().launch(current_stream);
    memory().access({from, from + kept}, false, current_stream, "resize_");
    memory().access({to, to + kept}, true, current_stream, "resize_");
    std::memcpy(fresh.get(), impl->data(), kept);
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(nbytes);
}

// One op: its arguments become CPU tensors, the CPU's kernel runs, and its results become the device's.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op)
      : op_(op), name_(op.schema().operator_name().name), who_(with_node(name_)) {}

  void run(torch::jit::Stack* stack) {
    timelines().launch(current_stream);
    const auto& arguments = op_.schema().arguments();
    size_t begin = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) give((*stack)[begin + i], arguments[i].alias_info());
    op_.callBoxed(stack);
    for (const auto& [tensor, cpu] : written_) take_back(tensor, cpu);
    for (size_t i = stack->size() - op_.schema().returns().size(); i < stack->size(); ++i) take((*stack)[i]);
    if (kWaitsForItsResult.count(name_)) timelines().synchronize(current_stream);
  }

 private:
  using Pair = std::pair<at::Tensor, at::Tensor>;  // of the device, its alias

  void give(c10::IValue& value, const c10::AliasInfo* alias) {
    bool write = alias && alias->isWrite();
    if (value.isTensor()) {
      value = give(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(give(tensor, write));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(give(*tensor, write)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    }
  }

  at::Tensor give(const at::Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      // A tensor without dimensions is read by the host at launch. A larger one is read by the kernel, which CUDA
      // allows for few ops.
      if (tensor.dim() == 0) {
        host_access(tensor, write, who_);
      } else {
        touch(tensor, write, current_stream, who_);  // it does nothing for memory that is not pinned
      }
      return tensor;
    }
    touch(tensor, write, current_stream, who_);
    auto& pair = given_.emplace_back(tensor, aliases_.of(tensor));
    if (write) written_.push_back(pair);
    return pair.second;
  }

  // A kernel may have resized its output, as arange does.
  void take_back(const at::Tensor& tensor, const at::Tensor& cpu) {
    if (cpu.sizes() == tensor.sizes()) return;
    bool moved = cpu.numel() != 0 && cpu.storage().data() != tensor.storage().data();
    if (moved) resize_storage(tensor.storage(), cpu.nbytes());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
    if (!moved) return;
    cpu_alias(tensor).copy_(cpu);
    touch(tensor, true, current_stream, who_);
  }

  void take(c10::IValue& value) {
    if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(take(tensor));
      value = list;
    }
  }

  at::Tensor take(const at::Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    for (const auto& [tensor, alias] : given_)
      if (cpu.is_same(alias)) return tensor;
    if (c10::Storage storage = aliases_.shared_with(cpu)) {  // a view
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), cpu.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      return view;
    }
    at::Tensor result = empty_strided(cpu.sizes(), cpu.strides(), cpu.scalar_type(), {}, {}, {});
    cpu_alias(result).copy_(cpu);
    touch(result, true, current_stream, who_);
    return result;
  }

  const c10::OperatorHandle& op_;
  const std::string& name_;
  std::string who_;
  Aliases aliases_;
  std::vector<Pair> given_, written_;
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call(op).run(stack);
}

// A copy between device and host is over when it returns, unless it is asked to be asynchronous. The stream uses host
// memory that is pinned. Uses of other host memory are not recorded.
inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const std::string who = with_node("aten::copy_");
  bool crosses = !self.is_cuda() || !source.is_cuda();
  // What has other strides or another dtype goes through memory of its own, which the host fills or empties.
  bool staged = crosses && (self.scalar_type() != source.scalar_type() || !self.is_contiguous() ||
                            !source.is_contiguous() || self.sizes() != source.sizes());
  auto use = [&](const at::Tensor& tensor, bool write) {
    if (staged && !tensor.is_cuda()) {
      host_access(tensor, write, who);
    } else {
      touch(tensor, write, current_stream, who);
    }
  };
  timelines().launch(current_stream);
  use(source, false);
  use(self, true);
  if (self.is_cuda() && source.is_cuda()) {
    Aliases aliases;
    aliases.of(self).copy_(aliases.of(source));
  } else {
    cpu_alias(self).copy_(cpu_alias(source));
  }
  if (crosses && !non_blocking) timelines().synchronize(current_stream);
  return self;
}

inline at::Tensor& set_to_part(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

inline at::Tensor& set_to_storage(at::Tensor& self, at::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_to_part(self, std::move(source), 0, {numel}, {1});
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

}  // namespace simulated_gpu
