// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

#include "cudnn/library.h"

namespace xpuruntime::cudnn {

/// A handle that the calling thread has for itself until the lease is dropped.
class HandleLease {
 public:
  HandleLease(Handle handle, std::unique_lock<std::mutex> lock) noexcept
      : handle_(handle), lock_(std::move(lock)) {}
  Handle get() const noexcept { return handle_; }

 private:
  Handle handle_;
  std::unique_lock<std::mutex> lock_;
};

/// The handles of one device. Making one is slow and takes memory, and a handle is for one thread
/// at a time; so there are a few for launches, which take one for some microseconds each, and one
/// more for building plans, which takes seconds. They live as long as the process: whatever the
/// order of its end, cuDNN is not called then. Thread-safe.
class Handles {
 public:
  /// Makes them when first asked for. The device must be current. Throws CudaError,
  /// UnsupportedOperationError.
  static Handles& of(int device);

  /// Takes the first that is free, and waits for one when none is.
  HandleLease for_launch() noexcept;
  HandleLease for_building() noexcept;

 private:
  static constexpr std::size_t kForLaunches = 4;
  struct Slot {
    std::mutex mutex;
    Handle handle = nullptr;
  };
  explicit Handles(int device);

  std::array<Slot, kForLaunches> launching_;
  Slot building_;
};

}  // namespace xpuruntime::cudnn
