// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <vector>

#include "xpuruntime/types.h"

namespace xpuruntime {

/// What a buffer points at. Pools derive from it. Written under the lock of its pool.
struct Block {
  void* pointer = nullptr;
  std::size_t size = 0;       // occupied
  std::size_t requested = 0;  // asked for
  StreamHandle stream = 0;
  std::vector<StreamHandle> used_on;  // other streams, as recorded
};

}  // namespace xpuruntime
