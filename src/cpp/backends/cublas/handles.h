// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <mutex>

#include "cublas/library.h"
#include "xpuruntime/types.h"

namespace xpuruntime::cublas {

/// The handle of cuBLASLt for a device: made on first use, shared by all threads, never destroyed,
/// as the device may be gone when the process ends. Throws as Library::check does.
cublasLtHandle_t lt_handle(const Library& library, int device);

/// The handle of cuBLAS for a device. It has one stream and one workspace at a time, so that
/// launches of many threads take turns. One, as each takes 64 MiB of the device.
class GemmHandle {
 public:
  /// Made on first use and never destroyed. Throws as Library::check does.
  static GemmHandle& of(const Library& library, int device);

  /// Holds the handle, set to a stream and a workspace of the caller's. Allocates nothing.
  class Lease {
   public:
    Lease(GemmHandle& owner, StreamHandle stream, void* workspace, std::size_t bytes);
    cublasHandle_t get() const noexcept { return handle_; }

   private:
    const std::lock_guard<std::mutex> lock_;
    const cublasHandle_t handle_;
  };

 private:
  GemmHandle(const Library& library, int device);

  const Library& library_;
  const int device_;
  cublasHandle_t handle_ = nullptr;
  std::mutex mutex_;
};

}  // namespace xpuruntime::cublas
