// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstring>
#include <memory>

#include "null/register.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace {

class NullBackend final : public KernelBackend {
 public:
  std::string_view name() const noexcept override { return "null"; }
  DeviceType device_type() const noexcept override { return DeviceType::kCpu; }
  Support available() const noexcept override { return Support::yes(); }
  std::string version() const override { return "null " XPURUNTIME_VERSION; }
};

void fill(const TensorDesc& tensor, std::size_t dim, std::byte* data) {
  const std::size_t itemsize = tensor.dtype.itemsize();
  if (dim == tensor.rank) {
    std::memset(data, 0, itemsize);
    return;
  }
  if (dim + 1U == tensor.rank && tensor.strides[dim] == 1) {
    std::memset(data, 0, itemsize * static_cast<std::size_t>(tensor.shape[dim]));
    return;
  }
  const std::ptrdiff_t step = tensor.strides[dim] * static_cast<std::ptrdiff_t>(itemsize);
  for (std::int64_t i = 0; i < tensor.shape[dim]; ++i) fill(tensor, dim + 1, data + i * step);
}

class NullKernel final : public Kernel {
 public:
  explicit NullKernel(const OpDesc& op) : op_(op) {}
  void launch(void* const* operands, void* /*workspace*/, StreamHandle /*stream*/) const override {
    for (std::size_t slot = 0; slot < op_.slots; ++slot) {
      if (!op_.has(slot) || !is_output(op_.kind, slot)) continue;
      fill(op_[slot], 0, static_cast<std::byte*>(operands[slot]));
    }
  }

 private:
  const OpDesc op_;
};

class NullDefinition final : public KernelDefinition {
 public:
  NullDefinition(std::shared_ptr<const NullBackend> backend, OpKind op)
      : backend_(std::move(backend)), op_(op) {}

  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return "null.null"; }
  OpKind op() const noexcept override { return op_; }
  std::string description() const override { return "computes nothing: the outputs become zeros"; }
  std::string limits() const override { return "any dtype, shape and strides; cpu"; }
  bool automatic() const noexcept override { return false; }

  Support supports(const OpDesc& op, const DeviceInfo& /*device*/) const override {
    if (op.device.type == DeviceType::kCpu) return Support::yes();
    return Support::no("serves cpu only");
  }

  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& /*device*/,
                                        const std::string& config) const override {
    if (!config.empty()) {
      throw InputError("null.null has nothing to configure, and was given '" + config +
                       "': leave out what stands after '@'");
    }
    return std::make_unique<NullKernel>(op);
  }

 private:
  const std::shared_ptr<const NullBackend> backend_;
  const OpKind op_;
};

}  // namespace

void register_null(KernelRegistry& registry) {
  const auto backend = std::make_shared<const NullBackend>();
  for (std::size_t op = 0; op < kOpKinds; ++op) {
    registry.add(std::make_shared<const NullDefinition>(backend, static_cast<OpKind>(op)));
  }
}

}  // namespace xpuruntime
