// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/register.h"

#include <memory>
#include <string>

#include "cpu/blas.h"
#include "cpu/definition.h"
#include "cpu/open_blas.h"
#include "cpu/reference.h"
#include "cpu/vector_code.h"
#include "cpu/vectorised.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace {

/// The kernels that need no library.
class CpuBackend final : public KernelBackend {
 public:
  std::string_view name() const noexcept override { return "cpu"; }
  DeviceType device_type() const noexcept override { return DeviceType::kCpu; }
  Support available() const noexcept override { return Support::yes(); }
  std::string version() const override {
    return std::string("cpu " XPURUNTIME_VERSION " ") + cpu::vector_code().instructions;
  }
};

/// Those that need OpenBLAS.
class BlasBackend final : public KernelBackend {
 public:
  std::string_view name() const noexcept override { return "cpu"; }
  DeviceType device_type() const noexcept override { return DeviceType::kCpu; }
  Support available() const noexcept override {
    try {
      cpu::OpenBlas::get();
      return Support::yes();
    } catch (const Error& error) {
      return Support::no(error.what());
    }
  }
  std::string version() const override {
    try {
      return "cpu " XPURUNTIME_VERSION ", " + cpu::OpenBlas::get().version;
    } catch (const UnsupportedOperationError&) {
      return {};
    }
  }
};

void add_blas(KernelRegistry& registry, const std::shared_ptr<const KernelBackend>& backend) {
  registry.add(cpu::define(
      backend, {.id = "cpu.blas",
                .op = OpKind::kMatmul,
                .description = "OpenBLAS on all cores, bias and activation while in the cache",
                .limits = "fp64, fp32; either of the last two strides 1; cpu",
                .families = {},
                .supports = cpu::blas_matmul_supports,
                .prepare = cpu::blas_matmul}));
  registry.add(cpu::define(
      backend, {.id = "cpu.gemm_conv",
                .op = OpKind::kConv,
                .description = "convolution as matrix products by OpenBLAS",
                .limits = "fp64, fp32; any x, contiguous weight and rows of images; cpu",
                .families = {},
                .supports = cpu::gemm_conv_supports,
                .prepare = cpu::gemm_conv}));
  registry.add(cpu::define(
      backend, {.id = "cpu.gemm_conv",
                .op = OpKind::kConvInputGradient,
                .description = "gradient of a convolution as matrix products by OpenBLAS",
                .limits = "fp64, fp32; any grad_x, contiguous weight and rows of images; cpu",
                .families = {},
                .supports = cpu::gemm_conv_input_gradient_supports,
                .prepare = cpu::gemm_conv_input_gradient}));
  registry.add(cpu::define(
      backend, {.id = "cpu.gemm_conv",
                .op = OpKind::kConvWeightGradient,
                .description = "gradient of a convolution as matrix products by OpenBLAS",
                .limits = "fp64, fp32; any x, contiguous grad_weight and rows of images; cpu",
                .families = {},
                .supports = cpu::gemm_conv_weight_gradient_supports,
                .prepare = cpu::gemm_conv_weight_gradient}));
}

void add_vectorised(KernelRegistry& registry, const std::shared_ptr<const KernelBackend>& backend) {
  for (const OpKind op : {OpKind::kLayerNorm, OpKind::kRmsNorm, OpKind::kLayerNormBackward,
                          OpKind::kRmsNormBackward}) {
    const bool forward = op == OpKind::kLayerNorm || op == OpKind::kRmsNorm;
    registry.add(cpu::define(
        backend, {.id = "cpu.vectorised",
                  .op = op,
                  .description = "one pass over memory with the widest vectors of the processor",
                  .limits = "fp32, fp16, bf16; columns next to each other; cpu",
                  .families = {},
                  .supports = forward ? cpu::vectorised_norm_supports
                                      : cpu::vectorised_norm_backward_supports,
                  .prepare = forward ? cpu::vectorised_norm : cpu::vectorised_norm_backward}));
  }
}

void add_references(KernelRegistry& registry, const std::shared_ptr<const KernelBackend>& backend) {
  struct Entry {
    OpKind op;
    const char* limits;
    std::unique_ptr<const Kernel> (*prepare)(const OpDesc&);
  };
  constexpr const char* kReal = "fp64, fp32, fp16, bf16; any shape and strides; cpu";
  for (const Entry& entry : {
           Entry{OpKind::kMatmul,
                 "fp64, fp32, fp16, bf16, fp8 e4m3 and e5m2; any shape and strides; cpu",
                 cpu::reference_matmul},
           Entry{OpKind::kAttention, kReal, cpu::reference_attention},
           Entry{OpKind::kAttentionBackward, kReal, cpu::reference_attention_backward},
           Entry{OpKind::kLayerNorm, kReal, cpu::reference_norm},
           Entry{OpKind::kLayerNormBackward, kReal, cpu::reference_norm_backward},
           Entry{OpKind::kRmsNorm, kReal, cpu::reference_norm},
           Entry{OpKind::kRmsNormBackward, kReal, cpu::reference_norm_backward},
           Entry{OpKind::kConv, kReal, cpu::reference_conv},
           Entry{OpKind::kConvInputGradient, kReal, cpu::reference_conv_input_gradient},
           Entry{OpKind::kConvWeightGradient, kReal, cpu::reference_conv_weight_gradient},
       }) {
    registry.add(
        cpu::define(backend, {.id = "cpu.reference",
                              .op = entry.op,
                              .description = "the definition, in double precision: slow and exact",
                              .limits = entry.limits,
                              .families = {},
                              .supports = [](const OpDesc&) { return Support::yes(); },
                              .prepare = entry.prepare}));
  }
}

}  // namespace

void register_cpu(KernelRegistry& registry) {
  const auto backend = std::make_shared<const CpuBackend>();
  add_blas(registry, std::make_shared<const BlasBackend>());
  add_vectorised(registry, backend);
  add_references(registry, backend);
}

}  // namespace xpuruntime
