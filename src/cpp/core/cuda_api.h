// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/kernel.h"

// What the core asks of CUDA about devices. core/cuda implements it with the runtime, core/no_cuda
// for builds without.
namespace xpuruntime::cuda {

bool built() noexcept;

/// All CUDA devices. When there is none, `reason` says why and what fixes it. Creates no context.
std::vector<DeviceInfo> enumerate(std::string& reason);

/// The functions below need a device that exists.
MemoryInfo memory_info(int device);
int current_device();
void set_current_device(int device);
void synchronize(int device);

/// Makes `device` current for the calling thread until the result is dropped, on the same thread.
/// Then the device that was current before is so again, also where other code has changed it.
std::shared_ptr<void> enter_device(int device);

/// Launches with the device current.
void launch_kernel(int device, const Kernel& kernel, void* const* operands, void* workspace,
                   StreamHandle stream);

/// Calls `body` with the device current, and allowed to do what a capture of this thread forbids.
/// In a build without CUDA it is just called.
void outside_capture(int device, const std::function<void()>& body);

/// Size of the level 2 cache.
std::size_t cache_bytes(int device);

/// Enqueues the copy described in strided_copy.h; arguments are checked, and adjacent dimensions
/// are merged.
void copy_strided(int device, const void* source, void* destination, int rank,
                  const std::int64_t* shape, const std::int64_t* strides, std::size_t itemsize,
                  StreamHandle stream);

}  // namespace xpuruntime::cuda
