// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace xpuruntime::bindings {

/// What one call of scaled dot product attention wants of PyTorch's switches for its backends: 0,
/// as the program has set them; else the number of a backend and 1, which is to be the only one;
/// with `kOnlyIfEnabled` where the program lets it be chosen at all, else as it has set them.
using SdpaWish = std::uint64_t;
inline constexpr SdpaWish kAsSet = 0;
inline constexpr SdpaWish kOnlyIfEnabled = 8;

/// As long as it lives, PyTorch's switches are as the call of this thread wants them. They belong
/// to the process, so calls of other threads that want the same go on meanwhile, and those that
/// want something else wait. Inside of another one, kAsSet leaves things as they are; any other
/// wish holds until it ends, and what surrounds it gives way. Switches that somebody else has set
/// meanwhile stay as they are. Needs no GIL; one that is held is given away while it waits.
class SdpaTurn {
 public:
  explicit SdpaTurn(SdpaWish wish) { begin(wish); }
  SdpaTurn(const SdpaTurn&) = delete;
  SdpaTurn& operator=(const SdpaTurn&) = delete;
  ~SdpaTurn() { end(); }

  /// For Python, where a block is no scope of C++: in one thread, each begin with its end.
  static void begin(SdpaWish wish);
  static void end() noexcept;
  /// Whether this thread is in one.
  static bool within() noexcept;

  /// What reads and writes the switches where there is no addon, by the number of a backend:
  /// functions in C that let no other thread have the GIL. With the GIL, as all turns are then.
  static void use_python(const pybind11::tuple& read, const pybind11::tuple& write);
  /// In a child that Python has forked, in which the thread that called fork is alone.
  static void after_fork();
};

}  // namespace xpuruntime::bindings
