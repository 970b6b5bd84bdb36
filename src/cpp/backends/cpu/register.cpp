// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/register.h"

#include <memory>

#include "cpu/definition.h"
#include "cpu/reference.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace {

/// The kernels that need no library.
class CpuBackend final : public KernelBackend {
 public:
  std::string_view name() const noexcept override { return "cpu"; }
  DeviceType device_type() const noexcept override { return DeviceType::kCpu; }
  Support available() const noexcept override { return Support::yes(); }
  std::string version() const override { return "cpu " XPURUNTIME_VERSION; }
};

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
       }) {
    registry.add(
        cpu::define(backend, {.id = "cpu.reference",
                              .op = entry.op,
                              .description = "the definition, in double precision: slow and exact",
                              .limits = entry.limits,
                              .families = {"reference"},
                              .supports = [](const OpDesc&) { return Support::yes(); },
                              .prepare = entry.prepare}));
  }
}

}  // namespace

void register_cpu(KernelRegistry& registry) {
  const auto backend = std::make_shared<const CpuBackend>();
  add_references(registry, backend);
}

}  // namespace xpuruntime
