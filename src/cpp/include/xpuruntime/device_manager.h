// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xpuruntime/types.h"

namespace xpuruntime {

/// Bytes of a device, at the time of the call.
struct MemoryInfo {
  std::size_t free = 0;
  std::size_t total = 0;
};

/// Fixed facts of one device. What does not apply is 0 or empty. Reading them creates no CUDA
/// context.
struct DeviceInfo {
  DeviceId id;
  std::string name;
  std::size_t total_memory = 0;
  /// Types the device computes in natively: "fp64", "fp32", "tf32", "fp16", "bf16", "fp8_e4m3",
  /// "int8", "int4". On the CPU: what it has vector arithmetic for. On CUDA: by compute capability;
  /// "int4" only where tensor cores have it (7.5 to 8.9).
  std::vector<std::string> dtypes;

  /// CPU only: logical cores, and instruction set extensions that the processor has and the system
  /// enables, such as "sse4_2", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile";
  /// on ARM "neon", "sve", ...
  int cores = 0;
  std::vector<std::string> features;

  /// CUDA only. Versions are (major, minor); `driver_version` is the newest CUDA the driver serves.
  std::pair<int, int> compute_capability{0, 0};
  int sm_count = 0;
  std::pair<int, int> driver_version{0, 0};
  std::pair<int, int> runtime_version{0, 0};
  std::string pci_id;
};

/// Knows what devices there are. `cpu` always is; CUDA devices are looked for once, on first use,
/// never at import.
///
/// Every call restores the caller's current device, except `set_current_device`, whose purpose it
/// is to change it. Thread-safe. Errors: CudaError when a CUDA device does not exist (the message
/// names those that do, or why there is none) or a CUDA call fails; InputError for a negative index
/// or a CPU index other than 0.
class DeviceManager {
 public:
  static DeviceManager& instance();

  /// Number of devices of one type, or of all.
  int get_device_count(std::optional<DeviceType> type = std::nullopt);
  /// `cpu` first, then the CUDA devices by index.
  std::vector<DeviceInfo> get_all_devices();
  const DeviceInfo& get_device_info(DeviceId device);

  /// Whether this build has the CUDA core.
  static bool built_with_cuda() noexcept;
  /// Why there is no CUDA device, and what fixes it: a build without CUDA, no driver, a driver too
  /// old for the built runtime, or no device. Empty when there is one.
  const std::string& cuda_reason();

  /// Free and total bytes now. On CUDA this creates the device's context (some hundred MiB, tens of
  /// milliseconds) if there is none yet. On the CPU free is what the system says is available
  /// without swapping.
  MemoryInfo memory_info(DeviceId device);

  /// The calling thread's current CUDA device, or `cpu` when there is none.
  DeviceId get_current_device();
  /// Makes a CUDA device current for the calling thread, and creates its context. `cpu` is accepted
  /// only where there is no CUDA device: there it is current anyway.
  void set_current_device(DeviceId device);
  /// Makes a CUDA device current for the calling thread until the result is dropped, which must
  /// happen on the same thread. For libraries that expect it and that may change it: afterwards the
  /// device that was current before is so again. Nothing on `cpu`.
  std::shared_ptr<void> enter(DeviceId device);

  /// Waits for all work of a device. `cpu`: returns at once, work there is synchronous.
  void synchronize(DeviceId device);

  /// Throws unless the device exists.
  void require(DeviceId device);

 private:
  void probe();

  std::once_flag probed_;
  DeviceInfo cpu_;
  std::vector<DeviceInfo> cuda_;
  std::string cuda_reason_;
};

}  // namespace xpuruntime
