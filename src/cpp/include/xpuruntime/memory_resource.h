// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

/// What a pool needs to know about the order of work on streams. Thread-safe. Never changes the
/// caller's device.
class StreamOrder {
 public:
  using Event = std::uintptr_t;
  virtual ~StreamOrder() = default;
  /// Marks the work enqueued on `stream` until now. 0 when it cannot be marked (the stream is being
  /// captured into a graph, or is gone): nothing is known then.
  virtual Event record(StreamHandle stream) noexcept = 0;
  /// Whether the marked work is finished. A failed query says no.
  virtual bool finished(Event event) noexcept = 0;
  /// Lets later work on `stream` wait for the mark. False when that could not be enqueued.
  virtual bool wait(StreamHandle stream, Event event) noexcept = 0;
  /// Blocks the host until the marked work is finished. False when that cannot be known.
  virtual bool synchronize(Event event) noexcept = 0;
  /// Blocks the host until all work of the device is finished. False when that cannot be known.
  virtual bool synchronize_all() noexcept = 0;
  virtual void destroy(Event event) noexcept = 0;
};

/// Where a pool gets its memory: plain bytes, nothing counted or kept. Implement this to put a pool
/// on other memory. Thread-safe.
class MemoryResource {
 public:
  virtual ~MemoryResource() = default;
  /// The device that the memory serves.
  virtual DeviceId device() const noexcept = 0;
  /// Whether the host may read and write the memory.
  virtual bool host_accessible() const noexcept = 0;
  /// At least `bytes` (> 0) bytes, aligned to 256, usable in the order of `stream`; nullptr when
  /// memory is exhausted. Any other failure throws Error.
  virtual void* allocate(std::size_t bytes, StreamHandle stream) = 0;
  /// Gives back what `allocate` gave, in the order of `stream`.
  virtual void deallocate(void* pointer, std::size_t bytes, StreamHandle stream) noexcept = 0;
  /// Free and total bytes for the text of an error; zeros where unknown.
  virtual MemoryInfo memory_info() noexcept = 0;
  /// Bytes it holds from the device, where it keeps freed memory itself (the driver pool); else 0.
  virtual std::size_t held() noexcept { return 0; }
  /// Gives memory that it keeps itself back to the device, down to `keep` bytes.
  virtual void trim(std::size_t /*keep*/) noexcept {}
  /// The order of work on its streams; nullptr where all work is synchronous (the CPU).
  virtual StreamOrder* order() noexcept { return nullptr; }
};

/// Aligned host memory.
std::unique_ptr<MemoryResource> make_host_resource();
/// cudaMalloc. Throws CudaError (no such device) or UnsupportedOperationError (built without CUDA),
/// as do all below.
std::unique_ptr<MemoryResource> make_device_resource(int device);
/// cudaMallocAsync from a driver pool of its own, which keeps freed memory until it is trimmed.
std::unique_ptr<MemoryResource> make_driver_resource(int device);
/// cudaHostAlloc: host memory that `device` copies to and from without staging.
std::unique_ptr<MemoryResource> make_pinned_resource(int device);

}  // namespace xpuruntime
