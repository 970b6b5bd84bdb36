// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cuda_raw/register.h"

#include <dlpack/dlpack.h>

#include <algorithm>

#include "cuda_raw/definitions.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace cuda_raw {
namespace {

constexpr int kKiB = 1024;

}  // namespace

void Definition::check(const Support& support, const DeviceInfo& device,
                       const std::string& config) const {
  if (!config.empty()) {
    throw InputError(std::string(id_) + " has nothing to configure, and was given '" + config +
                     "': leave it out");
  }
  if (!support.ok) throw UnsupportedOperationError(support.reason, to_string(device.id));
}

bool is_fp32(DType dtype) noexcept { return dtype == DType{kDLFloat, 32, 1}; }
bool is_fp16(DType dtype) noexcept { return dtype == DType{kDLFloat, 16, 1}; }
bool is_bf16(DType dtype) noexcept { return dtype == DType{kDLBfloat, 16, 1}; }
bool is_bool(DType dtype) noexcept { return dtype == DType{kDLBool, 8, 1}; }

bool is_contiguous(const TensorDesc& tensor) noexcept {
  std::int64_t stride = 1;
  for (std::size_t i = tensor.rank; i-- > 0;) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != stride) return false;
    stride *= std::max<std::int64_t>(tensor.shape[i], 1);
  }
  return true;
}

int shared_memory_limit(std::pair<int, int> capability) noexcept {
  const auto [major, minor] = capability;
  if (major < 8) return 48 * kKiB;
  if (major == 8) return (minor == 0 || minor == 7 ? 163 : 99) * kKiB;
  if (major < 12) return 227 * kKiB;
  return 99 * kKiB;
}

}  // namespace cuda_raw

void register_cuda_raw(KernelRegistry& registry) {
  const auto backend = std::make_shared<const cuda_raw::Backend>();
  registry.add(cuda_raw::make_skinny(backend));
  registry.add(cuda_raw::make_depthwise_conv(backend));
  registry.add(cuda_raw::make_flash(backend));
  registry.add(cuda_raw::make_flash_backward(backend));
  for (const bool rms : {false, true}) {
    registry.add(cuda_raw::make_norm(backend, rms));
    registry.add(cuda_raw::make_norm_backward(backend, rms));
  }
}

}  // namespace xpuruntime
