// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/tensor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "streams/stream_calls.h"
#include "xpuruntime/error.h"
#include "xpuruntime/memory_manager.h"
#include "xpuruntime/stream_manager.h"
#include "xpuruntime/strided_copy.h"

namespace xpuruntime {
namespace {

bool is_cuda(DeviceId device) noexcept { return device.type == DeviceType::kCuda; }

std::string shape_text(const Layout& layout) {
  std::string text = "(";
  for (const std::int64_t length : layout.shape()) {
    text.append(text.size() > 1 ? ", " : "").append(std::to_string(length));
  }
  return text + (layout.rank() == 1 ? ",)" : ")");
}

std::size_t byte_count(const Layout& layout, DType dtype) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<std::size_t>(layout.elements()), dtype.itemsize(),
                             &bytes)) {
    throw InputError("a tensor of shape " + shape_text(layout) + " and dtype " + to_string(dtype) +
                     " has more bytes than can be addressed: check its shape");
  }
  return bytes;
}

Stream work_stream(DeviceId device, const std::optional<Stream>& stream) {
  if (!stream) return StreamManager::instance().default_stream(device);
  require_stream_of(device, *stream);
  return *stream;
}

}  // namespace

Tensor::Tensor(std::shared_ptr<Storage> storage, void* data, DType dtype, Layout layout,
               DeviceId device, bool readonly, MemoryKind kind)
    : storage_(std::move(storage)),
      data_(data),
      dtype_(dtype),
      device_(device),
      kind_(kind),
      readonly_(readonly),
      layout_(std::move(layout)) {
  (void)byte_count(layout_, dtype_);
}

Tensor Tensor::empty(std::span<const std::int64_t> shape, DType dtype, DeviceId device,
                     std::shared_ptr<MemoryPool> pool, const std::optional<Stream>& stream) {
  Layout layout(shape);
  const std::size_t bytes = byte_count(layout, dtype);
  if (!pool) pool = MemoryManager::instance().default_pool(device);
  const bool pinned = is_cuda(pool->device()) && pool->host_accessible();
  const DeviceId memory = pinned ? DeviceId{} : pool->device();
  if (memory != device) {
    throw InputError("pool '" + pool->name() + "' has memory on " + to_string(memory) +
                         ", so it cannot hold a tensor on " + to_string(device) +
                         ": choose the pool of that device, or device '" + to_string(memory) + "'",
                     to_string(device));
  }
  std::optional<Stream> home;
  if (is_cuda(pool->device())) {
    home = stream ? *stream : StreamManager::instance().default_stream(pool->device());
  } else {
    home = stream;
  }
  if (home) require_stream_of(pool->device(), *home);
  Buffer buffer = pool->allocate(bytes, home ? home->handle() : 0);
  void* const data = buffer.data();
  auto storage = std::make_shared<Storage>(std::move(buffer), home);
  if (is_cuda(device)) storage->ready_in_order_of(*home);
  return {std::move(storage),
          data,
          dtype,
          std::move(layout),
          device,
          false,
          pinned ? MemoryKind::kPinned : MemoryKind::kPlain};
}

std::size_t Tensor::nbytes() const noexcept {
  return static_cast<std::size_t>(layout_.elements()) * dtype_.itemsize();
}

std::string Tensor::describe() const {
  std::string text = "Tensor(shape=" + shape_text(layout_) + ", dtype=" + to_string(dtype_) +
                     ", device=" + to_string(device_);
  if (!is_contiguous()) text += ", strided";
  if (readonly_) text += ", read-only";
  if (kind_ == MemoryKind::kPinned) text += ", pinned";
  if (kind_ == MemoryKind::kManaged) text += ", managed";
  return text + ")";
}

Tensor Tensor::to(DeviceId target, const std::optional<Stream>& stream) const {
  if (target == device_) return *this;
  if (!is_contiguous()) {
    throw InputError(describe() + " is not contiguous, so it cannot be copied to " +
                         to_string(target) + " as it is: call contiguous() first",
                     to_string(device_));
  }
  const Stream work = work_stream(is_cuda(target) ? target : device_, stream);
  Tensor result = empty(layout_.shape(), dtype_, target, nullptr,
                        is_cuda(target) ? std::optional(work) : std::nullopt);
  result.copy_from(*this, work);
  return result;
}

Tensor Tensor::copy(const std::optional<Stream>& stream) const {
  const Stream work = work_stream(device_, stream);
  Tensor result = empty(layout_.shape(), dtype_, device_, nullptr,
                        is_cuda(device_) ? std::optional(work) : std::nullopt);
  result.copy_from(*this, work);
  return result;
}

Tensor Tensor::contiguous(const std::optional<Stream>& stream) const {
  return is_contiguous() ? *this : copy(stream);
}

void Tensor::copy_from(const Tensor& source, const std::optional<Stream>& stream) const {
  const auto refuse = [&](const std::string& why) {
    throw InputError("cannot copy " + source.describe() + " to " + describe() + ": " + why,
                     to_string(device_));
  };
  if (readonly_) refuse("the destination is read-only");
  if (dtype_ != source.dtype_) refuse("the dtypes differ; convert one of them first");
  if (!std::ranges::equal(layout_.shape(), source.layout_.shape())) refuse("the shapes differ");
  if (!is_contiguous()) refuse("the destination is not contiguous");
  const bool strided = !source.is_contiguous();
  if (strided && device_ != source.device_) {
    refuse("the source is not contiguous and on another device; call contiguous() on it first");
  }
  const Stream work = work_stream(is_cuda(device_) ? device_ : source.device_, stream);
  if (nbytes() == 0) return;
  if (!is_cuda(work.device())) {
    source.require_host_readable("copied on the CPU");
    require_host_readable("overwritten on the CPU");
  } else {
    source.storage_->make_wait(work);
    storage_->make_wait(work);
  }
  if (strided) {
    copy_to_contiguous(device_, source.data_, data_, layout_.shape(), source.layout_.strides(),
                       dtype_.itemsize(), work.handle());
  } else if (is_cuda(work.device())) {
    calls::copy_async(work.device().index, data_, source.data_, nbytes(), work.handle());
  } else {
    std::memmove(data_, source.data_, nbytes());
  }
  if (!is_cuda(work.device())) return;
  source.storage_->used_by(work);
  storage_->used_by(work);
  storage_->ready_after(work);
  // CUDA has finished a copy to pageable memory by now. Memory that only looks pageable, because
  // another library pinned it, gets the same promise.
  if (!is_cuda(device_) && kind_ == MemoryKind::kPlain) synchronize();
}

void Tensor::order_on(const Stream& stream) const {
  require_stream_of(device_, stream);
  storage_->make_wait(stream);
  storage_->ready_in_order_of(stream);
}

void Tensor::record(const Stream& stream) const {
  storage_->used_by(stream);
  storage_->ready_after(stream);
}

void Tensor::synchronize() const {
  if (const auto event = storage_->ready_event()) event->synchronize();
}

void Tensor::require_host_readable(const std::string& purpose) const {
  if (is_cuda(device_)) {
    throw UnsupportedOperationError(describe() + " cannot be " + purpose +
                                        ", because its memory is on a device: copy "
                                        "it with .to(\"cpu\") first",
                                    to_string(device_));
  }
  const auto event = storage_->ready_event();
  if (event && !event->query()) {
    throw UnsupportedOperationError(
        describe() + " cannot be " + purpose +
            " yet, because a copy to it is still on its "
            "way: call synchronize() on the tensor or on the copy's stream first",
        to_string(device_));
  }
}

}  // namespace xpuruntime
