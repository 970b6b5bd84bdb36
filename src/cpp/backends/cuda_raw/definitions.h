// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "xpuruntime/kernel.h"

namespace xpuruntime::cuda_raw {

class Backend final : public KernelBackend {
 public:
  std::string_view name() const noexcept override { return "cuda_raw"; }
  DeviceType device_type() const noexcept override { return DeviceType::kCuda; }
  Support available() const noexcept override { return Support::yes(); }
  std::string version() const override { return "cuda_raw " XPURUNTIME_VERSION; }
};
using BackendPointer = std::shared_ptr<const Backend>;

/// The number by which kernels know an activation.
inline int code_of(Activation activation) noexcept {
  switch (activation) {
    case Activation::kNone:
      return 0;
    case Activation::kRelu:
      return 1;
    case Activation::kGelu:
      return 2;
    case Activation::kGeluTanh:
      return 3;
    case Activation::kSilu:
      return 4;
  }
  return 0;
}

/// What every definition here has in common: a name, and nothing to configure.
class Definition : public KernelDefinition {
 public:
  Definition(BackendPointer backend, std::string_view id, OpKind op)
      : backend_(std::move(backend)), id_(id), op_(op) {}

  const KernelBackend& backend() const noexcept final { return *backend_; }
  std::string_view id() const noexcept final { return id_; }
  OpKind op() const noexcept final { return op_; }

 protected:
  /// What `prepare` begins with: throws InputError for a configuration, and
  /// UnsupportedOperationError when the operation is not supported.
  void check(const Support& support, const DeviceInfo& device, const std::string& config) const;

 private:
  const BackendPointer backend_;
  const std::string_view id_;
  const OpKind op_;
};

/// A definition that supports what `describe` can put into the arguments of a launch.
template <typename Args>
class LaunchDefinition : public Definition {
 public:
  using Definition::Definition;

  Support supports(const OpDesc& op, const DeviceInfo& device) const final {
    Args args{};
    return describe(op, device, args);
  }

 protected:
  /// What `prepare` begins with: the arguments of its launches, but for the addresses. Throws as
  /// `check` does.
  Args described(const OpDesc& op, const DeviceInfo& device, const std::string& config) const {
    Args args{};
    check(describe(op, device, args), device, config);
    return args;
  }

 private:
  /// Fills `args`, with a model's addresses.
  virtual Support describe(const OpDesc& op, const DeviceInfo& device, Args& args) const = 0;
};

/// A kernel whose launch is a function of operands, workspace and stream.
template <typename Launch>
class FunctionKernel final : public Kernel {
 public:
  FunctionKernel(Launch launch, std::size_t workspace, bool repeatable)
      : launch_(std::move(launch)), workspace_(workspace), repeatable_(repeatable) {}
  std::size_t workspace_bytes() const noexcept override { return workspace_; }
  bool repeatable() const noexcept override { return repeatable_; }
  void launch(void* const* operands, void* workspace, StreamHandle stream) const override {
    launch_(operands, workspace, stream);
  }

 private:
  const Launch launch_;
  const std::size_t workspace_;
  const bool repeatable_;
};

template <typename Launch>
std::unique_ptr<const Kernel> make_kernel(Launch launch, std::size_t workspace = 0,
                                          bool repeatable = true) {
  return std::make_unique<const FunctionKernel<Launch>>(std::move(launch), workspace, repeatable);
}

/// An address that is aligned as the operand is, for checks that look at nothing else of it; null
/// when it is absent.
inline void* model_address(const TensorDesc& tensor) noexcept {
  return tensor.present != 0 ? reinterpret_cast<void*>(std::uintptr_t{1} << tensor.alignment)
                             : nullptr;
}

/// Yes when a refusal is empty.
inline Support support_of(std::string refusal) {
  return refusal.empty() ? Support::yes() : Support::no(std::move(refusal));
}

bool is_fp32(DType dtype) noexcept;
bool is_fp16(DType dtype) noexcept;
bool is_bf16(DType dtype) noexcept;
bool is_bool(DType dtype) noexcept;

/// Row-major without gaps.
bool is_contiguous(const TensorDesc& tensor) noexcept;
/// Bytes of shared memory that a block may ask for on devices of that compute capability.
int shared_memory_limit(std::pair<int, int> capability) noexcept;

std::shared_ptr<const KernelDefinition> make_skinny(BackendPointer backend);
std::shared_ptr<const KernelDefinition> make_norm(BackendPointer backend, bool rms);
std::shared_ptr<const KernelDefinition> make_norm_backward(BackendPointer backend, bool rms);
std::shared_ptr<const KernelDefinition> make_depthwise_conv(BackendPointer backend);
std::shared_ptr<const KernelDefinition> make_flash(BackendPointer backend);
std::shared_ptr<const KernelDefinition> make_flash_backward(BackendPointer backend);

}  // namespace xpuruntime::cuda_raw
