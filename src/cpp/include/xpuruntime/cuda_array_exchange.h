// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xpuruntime/storage.h"
#include "xpuruntime/stream.h"
#include "xpuruntime/tensor.h"

namespace xpuruntime {

/// The entries of `__cuda_array_interface__`, version 3. Strides count bytes; without them the
/// array is contiguous. The data is readable in the order of `stream` (1 the legacy default stream,
/// 2 the per-thread one, else a handle), and at once without one.
struct CudaArray {
  void* data = nullptr;
  bool readonly = false;
  std::string typestr;
  std::vector<std::int64_t> shape;
  std::optional<std::vector<std::int64_t>> strides;
  std::optional<std::int64_t> stream;
};

/// Throws UnsupportedOperationError for a tensor on the CPU and for types without a typestr, such
/// as bfloat16.
CudaArray to_cuda_array(const Tensor& tensor);

/// Shares the memory; the device is the one the address is on. The tensor is readable in the order
/// of the array's stream. When it returns, `release(owner)` will be called once, and never when it
/// throws. Throws InputError and UnsupportedOperationError for what makes no sense.
Tensor from_cuda_array(const CudaArray& array, void* owner, Storage::Release release);

}  // namespace xpuruntime
