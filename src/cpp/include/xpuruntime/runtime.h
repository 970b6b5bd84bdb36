// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>

namespace xpuruntime {

class DeviceManager;
class Dispatcher;
class KernelRegistry;
class MemoryManager;
class StreamManager;

/// Owner of the managers. Making one touches no device and loads nothing.
///
/// There is one default instance, made on first use and kept until the process ends, so that
/// objects destroyed late still find it; `X::instance()` of a manager is the default runtime's.
/// Tests make their own. Thread-safe: the references never change.
class Runtime {
 public:
  Runtime();
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  static Runtime& instance();

  DeviceManager& devices() noexcept { return *devices_; }
  MemoryManager& memory() noexcept { return *memory_; }
  StreamManager& streams() noexcept { return *streams_; }
  KernelRegistry& kernels() noexcept { return *kernels_; }
  Dispatcher& dispatcher() noexcept { return *dispatcher_; }

 private:
  std::unique_ptr<DeviceManager> devices_;
  std::unique_ptr<MemoryManager> memory_;
  std::unique_ptr<StreamManager> streams_;  // after the pools, which hear when a stream ends
  std::unique_ptr<KernelRegistry> kernels_;
  std::unique_ptr<Dispatcher> dispatcher_;
};

}  // namespace xpuruntime
