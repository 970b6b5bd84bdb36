// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "torch_library.h"

#include <cstdint>
#include <utility>

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// The version of PyTorch's C functions whose forms are used here.
constexpr std::uint64_t kTorchVersion = std::uint64_t{2} << 56U | std::uint64_t{10} << 48U;

}  // namespace

py::object open_torch_library(const char* space, const std::string& key, const std::string& name,
                              TorchKernel kernel) {
  const TorchShim& torch = *torch_shim();
  void* library = nullptr;
  if (torch.open_library(space, key.c_str(), "xpuruntime", 0, &library) != 0) return py::none();
  if (torch.implement(library, (std::string(space) + "::" + name).c_str(), kernel, kTorchVersion) !=
      0) {
    torch.close_library(library);
    return py::none();
  }
  return py::cpp_function([library, closed = false]() mutable {
    if (!std::exchange(closed, true)) torch_shim()->close_library(library);
  });
}

}  // namespace xpuruntime::bindings
