// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <optional>

#include "streams/stream_calls.h"

namespace xpuruntime {

/// What the torch allocators ask CUDA about captures. Tests put others in their place, before any
/// allocation.
struct CaptureCalls {
  std::optional<calls::Capture> (*of)(int device, StreamHandle stream) = calls::capture_of;
  void (*keep)(int device, calls::GraphHandle graph, void* object,
               void (*release)(void*)) = calls::keep_in_graph;

  static CaptureCalls& instance();
};

}  // namespace xpuruntime
