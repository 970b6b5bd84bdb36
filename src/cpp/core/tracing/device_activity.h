// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "xpuruntime/profiler.h"

// The work of CUDA devices as CUPTI records it, and ranges for NVIDIA's tools. core/cupti
// implements it; core/no_cupti is for builds without CUPTI's headers, where `start` says that. One
// recording at a time; the profiler sees to that.
namespace xpuruntime::activity {

struct Collected {
  std::vector<WorkRecord> work;
  std::vector<CallRecord> calls;
  std::uint64_t dropped = 0;
};

/// Empty when it records from now on; else why it cannot, and what fixes it.
std::string start(std::size_t limit);
/// Waits for all devices that this process uses and ends the recording. Throws CudaError, and the
/// recording has ended then, too.
Collected stop();

/// What the calling thread starts belongs to the range `id` until `leave`. Nest.
void enter(std::uint64_t id) noexcept;
void leave() noexcept;

/// The same for tools that show NVTX; nothing where there are none.
void show(const char* name) noexcept;
void hide() noexcept;

}  // namespace xpuruntime::activity
