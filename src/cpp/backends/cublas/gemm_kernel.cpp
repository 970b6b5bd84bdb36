// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <utility>

#include "cublas/backend.h"
#include "cublas/handles.h"
#include "cuda/check.h"
#include "xpuruntime/error.h"

namespace xpuruntime::cublas {
namespace {

using Slot = slots::Matmul;

cublasOperation_t operation(const Matrix& matrix) noexcept {
  return matrix.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

class GemmKernel final : public Kernel {
 public:
  GemmKernel(const MatmulProblem& problem, const DeviceInfo& device)
      : library_(Library::get()),
        handle_(GemmHandle::of(library_, device.id.index)),
        problem_(problem),
        device_(device.id.index),
        workspace_(recommended_workspace(device)) {}

  std::size_t workspace_bytes() const noexcept override { return workspace_ + problem_.zero_bytes; }

  void launch(void* const* operands, void* workspace, StreamHandle stream) const override {
    const MatmulProblem& p = problem_;
    const void* first = operands[Slot::kB];
    const void* second = operands[Slot::kA];
    if (p.zero_bytes != 0) {
      void* const zeros = static_cast<std::byte*>(workspace) + workspace_;
      cuda::check(cudaMemsetAsync(zeros, 0, p.zero_bytes, cuda::as_stream(stream)),
                  "cudaMemsetAsync", device_);
      first = second = zeros;
    }
    const GemmHandle::Lease lease(handle_, stream, workspace, workspace_);
    if (p.batch == 1) {
      library_.check(library_.gemm(lease.get(), operation(p.first), operation(p.second), p.n, p.m,
                                   p.k, one(p), first, type_of(p.first.element), p.first.leading,
                                   second, type_of(p.second.element), p.second.leading, zero(p),
                                   operands[Slot::kOut], type_of(p.out.element), p.out.leading,
                                   compute_type(p), CUBLAS_GEMM_DEFAULT),
                     "cublasGemmEx", device_);
      return;
    }
    library_.check(library_.gemm_batched(
                       lease.get(), operation(p.first), operation(p.second), p.n, p.m, p.k, one(p),
                       first, type_of(p.first.element), p.first.leading, p.first.batch_stride,
                       second, type_of(p.second.element), p.second.leading, p.second.batch_stride,
                       zero(p), operands[Slot::kOut], type_of(p.out.element), p.out.leading,
                       p.out.batch_stride, p.batch, compute_type(p), CUBLAS_GEMM_DEFAULT),
                   "cublasGemmStridedBatchedEx", device_);
  }

 private:
  const Library& library_;
  GemmHandle& handle_;
  const MatmulProblem problem_;
  const int device_;
  const std::size_t workspace_;
};

class GemmDefinition final : public KernelDefinition {
 public:
  explicit GemmDefinition(std::shared_ptr<const Backend> backend) : backend_(std::move(backend)) {}

  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return "cublas.cublas"; }
  OpKind op() const noexcept override { return OpKind::kMatmul; }
  std::vector<std::string> families() const override { return {"cublas"}; }
  std::string description() const override {
    return "cublasGemmEx: plain products, the algorithm is cuBLAS's own choice";
  }
  std::string limits() const override {
    return "fp64, fp32, tf32, fp16, bf16; one batch dimension; no bias, no activation; CUDA";
  }

  Support supports(const OpDesc& op, const DeviceInfo& device) const override {
    MatmulProblem problem;
    Support support = describe_matmul(op, device, problem);
    return support.ok ? check_for_gemm(problem) : support;
  }

  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    if (!config.empty()) {
      throw InputError(
          "cublas.cublas chooses its algorithm itself and takes no configuration, and was "
          "given '" +
          config + "': pin cublas.cublasLt instead, or leave it out");
    }
    MatmulProblem problem;
    require(describe_matmul(op, device, problem), device);
    require(check_for_gemm(problem), device);
    if (problem.empty()) return make_empty_kernel();
    return std::make_unique<GemmKernel>(problem, device);
  }

 private:
  const std::shared_ptr<const Backend> backend_;
};

}  // namespace

std::shared_ptr<const KernelDefinition> make_gemm_definition(
    std::shared_ptr<const Backend> backend) {
  return std::make_shared<const GemmDefinition>(std::move(backend));
}

}  // namespace xpuruntime::cublas
