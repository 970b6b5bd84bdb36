// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cublas/backend.h"

#include <exception>

#include "cublas/library.h"
#include "cublas/register.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace cublas {
namespace {

class EmptyKernel final : public Kernel {
 public:
  void launch(void* const* /*operands*/, void* /*workspace*/,
              StreamHandle /*stream*/) const override {}
};

}  // namespace

Support Backend::available() const noexcept {
  try {
    (void)Library::get();
    return Support::yes();
  } catch (const std::exception& error) {
    return Support::no(error.what());
  }
}

std::string Backend::version() const {
  return available().ok ? "cublasLt " + Library::get().version : std::string();
}

void require(const Support& support, const DeviceInfo& device) {
  if (!support.ok) throw UnsupportedOperationError(support.reason, to_string(device.id));
}

std::unique_ptr<const Kernel> make_empty_kernel() { return std::make_unique<EmptyKernel>(); }

}  // namespace cublas

void register_cublas(KernelRegistry& registry) {
  const auto backend = std::make_shared<const cublas::Backend>();
  registry.add(cublas::make_lt_definition(backend));
  registry.add(cublas::make_gemm_definition(backend));
}

}  // namespace xpuruntime
