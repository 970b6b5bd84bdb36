// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <mutex>
#include <optional>
#include <utility>

#include "cublas/backend.h"
#include "cublas/lt_problem.h"
#include "cuda/capture.h"
#include "cuda/check.h"

namespace xpuruntime::cublas {
namespace {

using Slot = slots::Matmul;

// How many algorithms are asked for where the first that works is taken.
constexpr std::size_t kDefaultSearch = 8;

class LtKernel final : public Kernel {
 public:
  LtKernel(std::unique_ptr<const LtProblem> problem, const LtAlgorithm& algorithm)
      : problem_(std::move(problem)), algorithm_(algorithm) {
    spare_.reserve(64);
    spare_.push_back(problem_->make_desc());
  }

  std::size_t workspace_bytes() const noexcept override {
    return padded_workspace() + problem_->matmul().zero_bytes;
  }
  std::string config() const override { return to_string(algorithm_.config); }

  void launch(void* const* operands, void* workspace, StreamHandle stream) const override {
    const MatmulProblem& p = problem_->matmul();
    const void* first = operands[Slot::kB];
    const void* second = operands[Slot::kA];
    if (p.zero_bytes != 0) {
      void* const zeros = static_cast<std::byte*>(workspace) + padded_workspace();
      cuda::check(cudaMemsetAsync(zeros, 0, p.zero_bytes, cuda::as_stream(stream)),
                  "cudaMemsetAsync", problem_->device());
      first = second = zeros;
    }
    LtDesc desc = take_desc();
    if (p.has_bias) {
      problem_->set_pointer(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands[Slot::kBias]);
    }
    if (p.scale_a) {
      problem_->set_pointer(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands[Slot::kScaleA]);
    }
    if (p.scale_b) {
      problem_->set_pointer(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands[Slot::kScaleB]);
    }
    void* const out = operands[Slot::kOut];
    const cublasStatus_t status = problem_->library().lt_matmul(
        problem_->handle(), desc.get(), one(p), first, problem_->first(), second,
        problem_->second(), zero(p), out, problem_->out(), out, problem_->out(),
        &algorithm_.algorithm, workspace, algorithm_.config.workspace, cuda::as_stream(stream));
    give_back(std::move(desc));
    problem_->library().check(status, "cublasLtMatmul", problem_->device());
  }

 private:
  std::size_t padded_workspace() const noexcept {
    return (static_cast<std::size_t>(algorithm_.config.workspace) + 255) / 256 * 256;
  }

  // Threads that launch at once need one each, as the addresses of bias and scales are set in it.
  LtDesc take_desc() const {
    {
      const std::lock_guard lock(mutex_);
      if (!spare_.empty()) {
        LtDesc desc = std::move(spare_.back());
        spare_.pop_back();
        return desc;
      }
    }
    return problem_->make_desc();
  }
  void give_back(LtDesc desc) const {
    const std::lock_guard lock(mutex_);
    if (spare_.size() < spare_.capacity()) spare_.push_back(std::move(desc));
  }

  const std::unique_ptr<const LtProblem> problem_;
  const LtAlgorithm algorithm_;
  mutable std::mutex mutex_;
  mutable std::vector<LtDesc> spare_;
};

class LtDefinition final : public KernelDefinition {
 public:
  explicit LtDefinition(std::shared_ptr<const Backend> backend) : backend_(std::move(backend)) {}

  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return "cublas.cublasLt"; }
  OpKind op() const noexcept override { return OpKind::kMatmul; }
  std::vector<std::string> families() const override { return {"cublasLt"}; }
  std::string description() const override {
    return "cublasLtMatmul: bias, relu and gelu_tanh in the same kernel, fp8, a choice of "
           "algorithms";
  }
  std::string limits() const override {
    return "fp64, fp32, tf32, fp16, bf16, fp8 e4m3 (from 8.9); one batch dimension; CUDA";
  }

  Support supports(const OpDesc& op, const DeviceInfo& device) const override {
    MatmulProblem problem;
    Support support = describe_matmul(op, device, problem);
    return support.ok ? check_for_lt(problem, device) : support;
  }

  std::vector<std::string> configs(const OpDesc& op, const DeviceInfo& device,
                                   std::size_t most) const override {
    if (most == 0) return {};
    const MatmulProblem problem = checked(op, device);
    if (problem.empty()) return {std::string()};
    const cuda::DeviceGuard guard(device.id.index);
    const cuda::OutsideCapture outside;
    std::vector<std::string> texts;
    for (const LtAlgorithm& one : LtProblem(Library::get(), problem, device).search(most)) {
      texts.push_back(to_string(one.config));
    }
    return texts;
  }

  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    std::optional<LtConfig> wanted;
    if (!config.empty()) wanted = parse_lt_config(config);
    const MatmulProblem problem = checked(op, device);
    if (problem.empty()) return make_empty_kernel();
    const cuda::DeviceGuard guard(device.id.index);
    const cuda::OutsideCapture outside;
    auto described = std::make_unique<const LtProblem>(Library::get(), problem, device);
    const LtAlgorithm chosen =
        wanted ? described->rebuild(*wanted) : described->search(kDefaultSearch).front();
    return std::make_unique<LtKernel>(std::move(described), chosen);
  }

 private:
  static MatmulProblem checked(const OpDesc& op, const DeviceInfo& device) {
    MatmulProblem problem;
    require(describe_matmul(op, device, problem), device);
    require(check_for_lt(problem, device), device);
    return problem;
  }

  const std::shared_ptr<const Backend> backend_;
};

}  // namespace

std::shared_ptr<const KernelDefinition> make_lt_definition(std::shared_ptr<const Backend> backend) {
  return std::make_shared<const LtDefinition>(std::move(backend));
}

}  // namespace xpuruntime::cublas
