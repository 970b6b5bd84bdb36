// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

namespace xpuruntime::cuda {

/// The address of a function of the NVIDIA driver, in the form that CUDA 12.0 gave it. The driver's
/// library is not linked: the CUDA runtime knows where it is. Any thread. Throws CudaError, naming
/// the function and what to install, where the driver has none of this name.
void* driver_address(const char* name);

/// The same with its type.
template <typename Function>
Function* driver_function(const char* name) {
  return reinterpret_cast<Function*>(driver_address(name));
}

}  // namespace xpuruntime::cuda
