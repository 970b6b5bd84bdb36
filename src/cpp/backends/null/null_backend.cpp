// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstring>
#include <memory>
#include <span>

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

// Of the dimensions that are left.
void fill(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
          std::size_t itemsize, std::byte* data) {
  if (shape.empty()) {
    std::memset(data, 0, itemsize);
    return;
  }
  if (shape.size() == 1 && strides.front() == 1) {
    std::memset(data, 0, itemsize * static_cast<std::size_t>(shape.front()));
    return;
  }
  const std::ptrdiff_t step = strides.front() * static_cast<std::ptrdiff_t>(itemsize);
  for (std::int64_t i = 0; i < shape.front(); ++i) {
    fill(shape.subspan(1), strides.subspan(1), itemsize, data + i * step);
  }
}

class NullKernel final : public Kernel {
 public:
  explicit NullKernel(const OpDesc& op) : op_(op) {}
  void launch(void* const* operands, void* /*workspace*/, StreamHandle /*stream*/) const override {
    for (std::size_t slot = 0; slot < op_.slots; ++slot) {
      if (!op_.has(slot) || !is_output(op_.kind, slot)) continue;
      const TensorDesc& tensor = op_[slot];
      fill(std::span(tensor.shape).first(tensor.rank), std::span(tensor.strides).first(tensor.rank),
           tensor.dtype.itemsize(), static_cast<std::byte*>(operands[slot]));
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
