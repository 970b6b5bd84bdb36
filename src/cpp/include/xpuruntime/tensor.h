// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "xpuruntime/dtype.h"
#include "xpuruntime/layout.h"
#include "xpuruntime/storage.h"
#include "xpuruntime/stream.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

class MemoryPool;

/// How memory was had. Pinned memory is on the CPU, managed memory counts as that of a CUDA device.
enum class MemoryKind : std::uint8_t { kPlain, kPinned, kManaged };

/// Typed, shaped bytes on a device.
///
/// A value that shares its bytes: a copy of a Tensor is another handle to the same memory, which is
/// given back with the last one. Nothing converts, copies or makes contiguous unless asked.
///
/// Streams: each storage knows from which point in a stream's work on its bytes are readable. Work
/// that this class starts waits for that point on the device, never on the host. A missing `stream`
/// argument means the default stream of the CUDA device concerned.
///
/// Threads: a tensor may be used from any thread; its description never changes. Errors: InputError
/// for what does not fit together, UnsupportedOperationError, OutOfMemoryError, CudaError.
class Tensor {
 public:
  /// `data` is the address of element (0, ..., 0).
  Tensor(std::shared_ptr<Storage> storage, void* data, DType dtype, Layout layout, DeviceId device,
         bool readonly = false, MemoryKind kind = MemoryKind::kPlain);

  /// Contiguous and uninitialised, from `pool` or the device's default pool. A pinned pool gives
  /// tensors on the CPU. On CUDA it is for use in the order of `stream`.
  static Tensor empty(std::span<const std::int64_t> shape, DType dtype, DeviceId device,
                      std::shared_ptr<MemoryPool> pool = nullptr,
                      const std::optional<Stream>& stream = std::nullopt);

  void* data() const noexcept { return data_; }
  DType dtype() const noexcept { return dtype_; }
  const Layout& layout() const noexcept { return layout_; }
  DeviceId device() const noexcept { return device_; }
  MemoryKind kind() const noexcept { return kind_; }
  bool readonly() const noexcept { return readonly_; }
  std::size_t nbytes() const noexcept;
  bool is_contiguous() const noexcept { return layout_.is_contiguous(); }
  Storage& storage() const noexcept { return *storage_; }
  /// Whether this is the only handle to its bytes.
  bool is_last_owner() const noexcept { return storage_.use_count() == 1; }
  /// "Tensor(shape=(2, 3), dtype=float32, device=cuda:0)".
  std::string describe() const;

  /// This tensor itself where it is on `target` already, else a copy there. Copies contiguous
  /// tensors only. The stream is one of the target device, or of the source where the target is the
  /// CPU.
  Tensor to(DeviceId target, const std::optional<Stream>& stream = std::nullopt) const;
  /// A contiguous copy on the same device.
  Tensor copy(const std::optional<Stream>& stream = std::nullopt) const;
  /// This tensor itself where it is contiguous, else a contiguous copy.
  Tensor contiguous(const std::optional<Stream>& stream = std::nullopt) const;
  /// Overwrites the bytes with those of `source`, which has the same shape and dtype. Both
  /// contiguous; on one device the source may have any strides. A copy to pageable host memory is
  /// complete on return. Nothing else blocks: a source in pinned memory is kept, and left as it is,
  /// by the caller until the stream has done the copy.
  void copy_from(const Tensor& source, const std::optional<Stream>& stream = std::nullopt) const;

  /// Makes the bytes readable in the order of `stream`: it waits for the point from which they are.
  void order_on(const Stream& stream) const;
  /// Says that work given to `stream` so far writes the bytes.
  void record(const Stream& stream) const;
  /// Blocks until the bytes are readable.
  void synchronize() const;
  /// Throws UnsupportedOperationError where the host cannot read the bytes: on a device, or a copy
  /// is on its way.
  void require_host_readable(const std::string& purpose) const;

 private:
  std::shared_ptr<Storage> storage_;
  void* data_;
  DType dtype_;
  DeviceId device_;
  MemoryKind kind_;
  bool readonly_;
  Layout layout_;
};

}  // namespace xpuruntime
