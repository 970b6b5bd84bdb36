// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/dlpack_exchange.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "xpuruntime/error.h"
#include "xpuruntime/stream_manager.h"

namespace xpuruntime {
namespace {

// What an exported tensor hands out: the struct that consumers see, and what keeps it true.
template <typename Managed>
struct Exported {
  Managed managed{};
  Tensor tensor;
};

DLDataType to_dl(DType dtype) noexcept { return {dtype.code, dtype.bits, dtype.lanes}; }

template <typename Managed>
Managed* export_as(const Tensor& tensor) {
  auto exported =
      std::make_unique<Exported<Managed>>(Exported<Managed>{.managed = {}, .tensor = tensor});
  Managed& managed = exported->managed;
  managed.dl_tensor = dlpack_view(exported->tensor);
  managed.manager_ctx = exported.get();
  managed.deleter = [](Managed* self) {
    delete static_cast<Exported<Managed>*>(self->manager_ctx);
  };
  exported.release();
  return &managed;
}

template <typename Managed>
void release_managed(void* context) noexcept {
  auto* const managed = static_cast<Managed*>(context);
  if (managed->deleter != nullptr) managed->deleter(managed);
}

template <typename Managed>
Tensor import_from(Managed* managed, bool readonly, const std::optional<Stream>& ready_on) {
  const DLTensor& dl = managed->dl_tensor;
  const DType dtype{dl.dtype.code, dl.dtype.bits, dl.dtype.lanes};
  if (!is_known(dtype)) {
    throw UnsupportedOperationError(
        "a DLPack tensor of type " + to_string(dtype) +
        " cannot be imported: only types of one lane and whole bytes can");
  }
  if (dl.ndim < 0 || (dl.ndim > 0 && dl.shape == nullptr)) {
    throw InputError("a DLPack tensor has " + std::to_string(dl.ndim) + " dimensions and " +
                     (dl.shape == nullptr ? "no" : "a") + " shape: its producer is broken");
  }
  const std::span<const std::int64_t> shape(dl.shape, static_cast<std::size_t>(dl.ndim));
  const DeviceId device = from_dlpack_device(dl.device);
  const MemoryKind kind = dl.device.device_type == kDLCUDAHost      ? MemoryKind::kPinned
                          : dl.device.device_type == kDLCUDAManaged ? MemoryKind::kManaged
                                                                    : MemoryKind::kPlain;
  Layout layout = dl.strides == nullptr || dl.ndim == 0 ? Layout(shape)
                                                        : Layout(shape, {dl.strides, shape.size()});
  if (dl.data == nullptr && layout.elements() != 0) {
    throw InputError("a DLPack tensor with elements has no memory: its producer is broken");
  }
  auto storage = std::make_shared<Storage>();
  if (device.type == DeviceType::kCuda) {
    if (ready_on) require_stream_of(device, *ready_on);
    storage->ready_in_order_of(ready_on ? *ready_on
                                        : StreamManager::instance().default_stream(device));
  }
  void* const data =
      dl.data == nullptr ? nullptr : static_cast<std::byte*>(dl.data) + dl.byte_offset;
  Tensor tensor(storage, data, dtype, std::move(layout), device, readonly, kind);
  storage->on_release(managed, release_managed<Managed>);
  return tensor;
}

bool on_host(DLDevice device) noexcept {
  return device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
}

}  // namespace

DLDevice dlpack_device(const Tensor& tensor) noexcept {
  switch (tensor.kind()) {
    case MemoryKind::kPinned:
      return {kDLCUDAHost, 0};
    case MemoryKind::kManaged:
      return {kDLCUDAManaged, tensor.device().index};
    case MemoryKind::kPlain:
      break;
  }
  return {tensor.device().type == DeviceType::kCuda ? kDLCUDA : kDLCPU, tensor.device().index};
}

DeviceId from_dlpack_device(DLDevice device) {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      return {DeviceType::kCpu, 0};
    case kDLCUDA:
    case kDLCUDAManaged:
      if (device.device_id < 0) break;
      return {DeviceType::kCuda, device.device_id};
    default:
      break;
  }
  throw UnsupportedOperationError(
      "DLPack device (" + std::to_string(device.device_type) + ", " +
      std::to_string(device.device_id) +
      ") is not served by the core, which knows CPU (1, 0) and CUDA (2, N) memory: copy "
      "the data to one of these first");
}

std::optional<Stream> consumer_stream(DeviceId device, std::int64_t number) {
  if (number == -1) return std::nullopt;
  if (number < 1) {
    throw InputError("stream=" + std::to_string(number) + " has no meaning for DLPack on " +
                         to_string(device) +
                         ": pass 1 for the legacy default stream, 2 for the per-thread one, -1 for "
                         "no ordering, or a "
                         "cudaStream_t",
                     to_string(device));
  }
  if (number == 1) return StreamManager::instance().default_stream(device);
  return Stream::wrap(device, static_cast<StreamHandle>(number));
}

std::pair<Tensor, bool> prepare_export(const Tensor& tensor, const DlpackRequest& request) {
  const DLDevice own = dlpack_device(tensor);
  const DLDevice wanted = request.device.value_or(own);
  const bool same_place =
      (wanted.device_type == own.device_type && wanted.device_id == own.device_id) ||
      (on_host(wanted) && on_host(own));
  if (!same_place && request.copy == false) {
    throw UnsupportedOperationError(
        tensor.describe() + " is not on DLPack device (" + std::to_string(wanted.device_type) +
            ", " + std::to_string(wanted.device_id) +
            "), and copy=False forbids to copy it there: ask for its own device",
        to_string(tensor.device()));
  }
  const DeviceId target = from_dlpack_device(wanted);
  if (target.type == DeviceType::kCpu && request.stream.value_or(-1) != -1) {
    throw InputError("stream=" + std::to_string(*request.stream) +
                         " was asked for on the CPU, which has no streams: "
                         "pass None",
                     "cpu");
  }
  std::optional<Stream> consumer;
  if (target.type == DeviceType::kCuda)
    consumer = consumer_stream(target, request.stream.value_or(1));
  const bool copied = request.copy.value_or(!same_place);
  if (copied) {
    const Tensor result = same_place ? tensor.copy(consumer) : tensor.to(target, consumer);
    if (target.type == DeviceType::kCpu) result.synchronize();
    return {result, true};
  }
  if (target.type == DeviceType::kCpu) {
    tensor.require_host_readable("shared by DLPack");
  } else if (consumer) {
    tensor.storage().make_wait(*consumer);
    // The default stream never goes away, so the memory can be held back for its work. A foreign
    // stream may be gone by then: its consumer keeps the tensor, as DLPack wants.
    if (consumer->handle() == 0) tensor.storage().used_by(*consumer);
  }
  return {tensor, false};
}

DLTensor dlpack_view(const Tensor& tensor) noexcept {
  const Layout& layout = tensor.layout();
  // DLPack's pointers are not const; consumers do not write through these two.
  return {.data = layout.elements() == 0 ? nullptr : tensor.data(),
          .device = dlpack_device(tensor),
          .ndim = static_cast<std::int32_t>(layout.rank()),
          .dtype = to_dl(tensor.dtype()),
          .shape = const_cast<std::int64_t*>(layout.shape().data()),
          .strides = const_cast<std::int64_t*>(layout.strides().data()),
          .byte_offset = 0};
}

DLManagedTensorVersioned* to_dlpack(const Tensor& tensor, bool copied) {
  auto* const managed = export_as<DLManagedTensorVersioned>(tensor);
  managed->version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed->flags = (tensor.readonly() ? DLPACK_FLAG_BITMASK_READ_ONLY : 0U) |
                   (copied ? DLPACK_FLAG_BITMASK_IS_COPIED : 0U);
  return managed;
}

DLManagedTensor* to_dlpack_legacy(const Tensor& tensor) {
  if (tensor.readonly()) {
    throw UnsupportedOperationError(tensor.describe() +
                                        " is read-only, which unversioned DLPack cannot say: ask "
                                        "with max_version=(1, 0), or share a copy (copy=True)",
                                    to_string(tensor.device()));
  }
  return export_as<DLManagedTensor>(tensor);
}

Tensor from_dlpack(DLManagedTensorVersioned* managed, const std::optional<Stream>& ready_on) {
  if (managed->version.major != DLPACK_MAJOR_VERSION) {
    throw UnsupportedOperationError(
        "a tensor of DLPack " + std::to_string(managed->version.major) + "." +
        std::to_string(managed->version.minor) + " cannot be read: this library knows " +
        std::to_string(DLPACK_MAJOR_VERSION) + ".x; ask the producer for that version");
  }
  return import_from(managed, (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0, ready_on);
}

Tensor from_dlpack(DLManagedTensor* managed, const std::optional<Stream>& ready_on) {
  return import_from(managed, false, ready_on);
}

}  // namespace xpuruntime
