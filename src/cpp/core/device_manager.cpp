// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/device_manager.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "cpu_facts.h"
#include "cuda_api.h"
#include "xpuruntime/error.h"
#include "xpuruntime/runtime.h"

namespace xpuruntime {
namespace {

std::size_t system_memory() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0) return 0;
  return static_cast<std::size_t>(pages) * static_cast<std::size_t>(page);
}

std::size_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::size_t kibibytes = 0;
  std::string unit;
  while (file >> key >> kibibytes) {
    if (key == "MemAvailable:") return kibibytes * 1024;
    std::getline(file, unit);
  }
  return 0;
}

std::vector<std::string> cpu_dtypes(const std::vector<std::string>& features) {
  const auto has = [&](std::string_view name) {
    return std::find(features.begin(), features.end(), name) != features.end();
  };
  std::vector<std::string> dtypes{"fp64", "fp32"};
  if (has("avx512_fp16") || has("amx_fp16") || has("fp16")) dtypes.emplace_back("fp16");
  if (has("avx512_bf16") || has("amx_bf16") || has("bf16")) dtypes.emplace_back("bf16");
  if (has("avx2") || has("neon")) dtypes.emplace_back("int8");
  return dtypes;
}

DeviceInfo describe_cpu() {
  DeviceInfo info;
  info.name = cpu::processor_name();
  if (info.name.empty()) {
    utsname system{};
    info.name = uname(&system) == 0 ? system.machine : "cpu";
  }
  info.total_memory = system_memory();
  info.cores = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  info.features = cpu::features();
  info.dtypes = cpu_dtypes(info.features);
  return info;
}

}  // namespace

DeviceManager& DeviceManager::instance() { return Runtime::instance().devices(); }

void DeviceManager::probe() {
  std::call_once(probed_, [this] {
    cpu_ = describe_cpu();
    cuda_ = cuda::enumerate(cuda_reason_);
  });
}

int DeviceManager::get_device_count(std::optional<DeviceType> type) {
  if (type == DeviceType::kCpu) return 1;
  probe();
  const int devices = static_cast<int>(cuda_.size());
  return type == DeviceType::kCuda ? devices : devices + 1;
}

std::vector<DeviceInfo> DeviceManager::get_all_devices() {
  probe();
  std::vector<DeviceInfo> all{cpu_};
  all.insert(all.end(), cuda_.begin(), cuda_.end());
  return all;
}

const DeviceInfo& DeviceManager::get_device_info(DeviceId device) {
  require(device);
  return device.type == DeviceType::kCpu ? cpu_ : cuda_[static_cast<std::size_t>(device.index)];
}

bool DeviceManager::built_with_cuda() noexcept { return cuda::built(); }

const std::string& DeviceManager::cuda_reason() {
  probe();
  return cuda_reason_;
}

void DeviceManager::require(DeviceId device) {
  probe();
  const int count = static_cast<int>(cuda_.size());
  const std::string exist =
      count == 0 ? "this machine has 'cpu' only; " + cuda_reason_
      : count == 1
          ? std::string("this machine has 'cpu' and 'cuda:0'")
          : "this machine has 'cpu' and 'cuda:0' to 'cuda:" + std::to_string(count - 1) + "'";
  if (device.index < 0) {
    throw InputError("device index " + std::to_string(device.index) +
                     " is negative: indices start at 0; " + exist);
  }
  if (device.type == DeviceType::kCpu) {
    if (device.index == 0) return;
    throw InputError("device 'cpu:" + std::to_string(device.index) +
                     "' does not exist: the processor is one device, 'cpu'");
  }
  if (device.index >= count) {
    throw CudaError("device '" + to_string(device) + "' does not exist: " + exist,
                    to_string(device), 0);
  }
}

MemoryInfo DeviceManager::memory_info(DeviceId device) {
  require(device);
  if (device.type == DeviceType::kCpu) return {available_memory(), cpu_.total_memory};
  return cuda::memory_info(device.index);
}

DeviceId DeviceManager::get_current_device() {
  if (get_device_count(DeviceType::kCuda) == 0) return {};
  return {DeviceType::kCuda, cuda::current_device()};
}

std::shared_ptr<void> DeviceManager::enter(DeviceId device) {
  require(device);
  return device.type == DeviceType::kCuda ? cuda::enter_device(device.index) : nullptr;
}

void DeviceManager::set_current_device(DeviceId device) {
  require(device);
  if (device.type == DeviceType::kCuda) {
    cuda::set_current_device(device.index);
  } else if (!cuda_.empty()) {
    throw InputError(
        "the current device is a CUDA setting and cannot be 'cpu' on a machine with a "
        "CUDA device: name 'cpu' where you use it instead",
        "cpu");
  }
}

void DeviceManager::synchronize(DeviceId device) {
  require(device);
  if (device.type == DeviceType::kCuda) cuda::synchronize(device.index);
}

}  // namespace xpuruntime
