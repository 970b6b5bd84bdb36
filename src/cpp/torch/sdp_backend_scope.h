// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace xpuruntime::bindings {

/// What one call of scaled dot product attention wants of PyTorch's switches for its backends: 0,
/// as the program has set them; else the number of a backend and 1, which is to be the only one;
/// with `kOnlyIfEnabled` where the program lets it be chosen at all, else as it has set them.
using SdpBackendRequest = std::uint64_t;
inline constexpr SdpBackendRequest kAsSet = 0;
inline constexpr SdpBackendRequest kOnlyIfEnabled = 8;

/// RAII: while it lives, PyTorch's process-wide SDP backends satisfy this call. They belong
/// to the process, so calls of other threads that want the same go on meanwhile, and those that
/// want something else wait. Inside of another one, kAsSet leaves things as they are; any other
/// request holds until it ends, and what surrounds it gives way. Switches that somebody else has
/// set meanwhile stay as they are. Needs no GIL; one that is held is given away while it waits.
class SdpBackendScope {
 public:
  explicit SdpBackendScope(SdpBackendRequest request) { begin(request); }
  SdpBackendScope(const SdpBackendScope&) = delete;
  SdpBackendScope& operator=(const SdpBackendScope&) = delete;
  ~SdpBackendScope() { end(); }

  /// For Python, where a block is no scope of C++: in one thread, each begin with its end.
  static void begin(SdpBackendRequest request);
  static void end() noexcept;
  /// Whether this thread is in one.
  static bool within() noexcept;

  /// What reads and writes the switches where there is no addon, by the number of a backend:
  /// functions in C that let no other thread have the GIL. With the GIL, as all scopes are then.
  static void use_python(const pybind11::tuple& read, const pybind11::tuple& write);
  /// In a child that Python has forked, in which the thread that called fork is alone.
  static void after_fork();
};

}  // namespace xpuruntime::bindings
