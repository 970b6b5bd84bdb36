// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include "xpuruntime/error.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

inline constexpr StreamHandle kLegacyStream = 1;
inline constexpr StreamHandle kPerThreadStream = 2;

/// 0 for both names of the legacy default stream; refuses the per-thread one.
inline StreamHandle checked_stream(StreamHandle stream) {
  if (stream == kLegacyStream) return 0;
  if (stream == kPerThreadStream) {
    throw InputError(
        "stream 2 (the per-thread default stream) is a different stream on every thread, so a pool "
        "cannot "
        "order its memory by it: make a stream and pass that");
  }
  return stream;
}

}  // namespace xpuruntime
