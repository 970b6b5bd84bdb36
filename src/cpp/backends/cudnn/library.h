// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <string>

#include "xpuruntime/shared_library.h"

// No header of cuDNN or of cudnn-frontend is used here.
namespace xpuruntime::cudnn {

/// A `cudnnHandle_t`.
using Handle = void*;

/// libcudnn, opened on first use and never closed. Thread-safe.
class Library {
 public:
  /// Throws UnsupportedOperationError when it cannot be opened, saying where it was looked for and
  /// what to install, or is older than 9.0. After a failure the next call tries again.
  static const Library& get();

  /// 92800 for 9.28.0.
  std::size_t version() const noexcept { return version_; }
  /// "cuDNN 9.28.0".
  std::string name() const;
  const std::string& path() const noexcept { return library_.path(); }
  void* try_find(const char* function) const noexcept { return library_.try_find(function); }

  /// A handle of the current device. Slow. Throws CudaError.
  Handle create_handle(int device) const;
  /// Work given to `handle` from now on goes to `stream`. Throws CudaError.
  void set_stream(Handle handle, void* stream, int device) const;

 private:
  Library();
  void check(int status, const char* call, int device) const;

  SharedLibrary library_;
  std::size_t version_ = 0;
  int (*create_)(Handle*) = nullptr;
  int (*set_stream_)(Handle, void*) = nullptr;
  const char* (*error_string_)(int) = nullptr;
};

}  // namespace xpuruntime::cudnn
