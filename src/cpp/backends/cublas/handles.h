// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <memory>
#include <mutex>

#include "cublas/library.h"
#include "xpuruntime/types.h"

namespace xpuruntime::cublas {

/// The handle of cuBLASLt for a device: made on first use, shared by all threads, never destroyed,
/// as the device may be gone when the process ends. Throws as Library::check does.
cublasLtHandle_t lt_handle(const Library& library, int device);

/// A few handles of cuBLAS for one device, which launches of many threads take turns in: a handle
/// has one stream and one workspace at a time. All are made at once, so that no launch allocates.
class GemmHandles {
 public:
  /// Made on first use and never destroyed. Throws as Library::check does.
  static GemmHandles& of(const Library& library, int device);

  /// Holds a handle set to a stream and a workspace of the caller's.
  class Lease {
   public:
    Lease(GemmHandles& handles, StreamHandle stream, void* workspace, std::size_t bytes);
    cublasHandle_t get() const noexcept { return handle_; }

   private:
    std::unique_lock<std::mutex> lock_;
    cublasHandle_t handle_ = nullptr;
  };

 private:
  struct Slot {
    std::mutex mutex;
    cublasHandle_t handle = nullptr;
  };
  GemmHandles(const Library& library, int device);

  const Library& library_;
  int device_;
  std::array<Slot, 4> slots_;
};

}  // namespace xpuruntime::cublas
