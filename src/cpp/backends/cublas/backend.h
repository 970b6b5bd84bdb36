// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>

#include "xpuruntime/kernel.h"

namespace xpuruntime::cublas {

// Both kernels give the same bits in every run: cuBLAS documents that for one version, one model of
// device and a workspace that no other stream uses, which holds here. How the parts of k are added
// up where it is split is settled by the algorithm. Parts are added in fp32 (fp64) also where the
// result is narrower, which for some odd sizes is up to 8 % slower than adding them in fp16 or
// bf16. Where it is split and the result is fp16 or bf16, cuBLASLt may round the sum before it adds
// the bias and applies the activation, as two operations would.

class Backend final : public KernelBackend {
 public:
  std::string_view name() const noexcept override { return "cublas"; }
  DeviceType device_type() const noexcept override { return DeviceType::kCuda; }
  Support available() const noexcept override;
  std::string version() const override;
};

/// "cublas.cublasLt": with the epilogues bias, relu and gelu_tanh, fp8, and a choice of algorithms.
std::shared_ptr<const KernelDefinition> make_lt_definition(std::shared_ptr<const Backend> backend);
/// "cublas.cublas": cublasGemmEx, which chooses for itself.
std::shared_ptr<const KernelDefinition> make_gemm_definition(
    std::shared_ptr<const Backend> backend);

/// Throws UnsupportedOperationError with the reason when it is no.
void require(const Support& support, const DeviceInfo& device);

/// The work of a product without elements.
std::unique_ptr<const Kernel> make_empty_kernel();

}  // namespace xpuruntime::cublas
