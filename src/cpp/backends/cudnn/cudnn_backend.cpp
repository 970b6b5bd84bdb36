// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cudnn_frontend_version.h>

#include <memory>
#include <utility>

#include "cudnn/attention_rules.h"
#include "cudnn/conv_rules.h"
#include "cudnn/graph_kernel.h"
#include "cudnn/library.h"
#include "cudnn/register.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace {

class CudnnBackend final : public KernelBackend {
 public:
  std::string_view name() const noexcept override { return "cudnn"; }
  DeviceType device_type() const noexcept override { return DeviceType::kCuda; }
  Support available() const noexcept override {
    try {
      (void)cudnn::Library::get();
      return Support::yes();
    } catch (const std::exception& error) {
      return Support::no(error.what());
    }
  }
  std::string version() const override {
    if (!available().ok) return {};
    return cudnn::Library::get().name() + " frontend " +
           std::to_string(CUDNN_FRONTEND_MAJOR_VERSION) + "." +
           std::to_string(CUDNN_FRONTEND_MINOR_VERSION);
  }
};

class CudnnDefinition : public KernelDefinition {
 public:
  explicit CudnnDefinition(std::shared_ptr<const CudnnBackend> backend)
      : backend_(std::move(backend)) {}
  const KernelBackend& backend() const noexcept override { return *backend_; }

 protected:
  void require(const OpDesc& of, const DeviceInfo& device) const {
    const Support support = supports(of, device);
    if (support.ok) return;
    throw UnsupportedOperationError(
        std::string(id()) + " cannot do " + describe(of) + ": " + support.reason,
        to_string(of.device));
  }

 private:
  const std::shared_ptr<const CudnnBackend> backend_;
};

class SdpaDefinition final : public CudnnDefinition {
 public:
  SdpaDefinition(std::shared_ptr<const CudnnBackend> backend, OpKind op)
      : CudnnDefinition(std::move(backend)), op_(op) {}

  std::string_view id() const noexcept override { return "cudnn.sdpa"; }
  OpKind op() const noexcept override { return op_; }
  std::string description() const override {
    return "cuDNN's fused attention, fast for long sequences; a new shape takes some 50 ms to "
           "prepare";
  }
  std::string limits() const override {
    return op_ == OpKind::kAttention
               ? "fp16, bf16; head_dim a multiple of 8 up to 256; added masks; compute "
                 "capability 8.0+"
               : "fp16, bf16; head_dim a multiple of 8 up to 128 (256 on 9.0); added masks; "
                 "compute "
                 "capability 8.0+";
  }
  Support supports(const OpDesc& of, const DeviceInfo& device) const override {
    return cudnn::check_attention(of, device);
  }
  Support favoured(const OpDesc& of, const DeviceInfo& /*device*/) const override {
    constexpr std::int64_t kDecoding = 16;
    const bool forward = of.kind == OpKind::kAttention;
    const TensorDesc& q =
        of[forward ? std::size_t{slots::Attention::kQ} : std::size_t{slots::AttentionBackward::kQ}];
    if (q.shape[2] > kDecoding) return Support::yes();
    return Support::no(
        "it builds a plan for each kv_length, 40 ms and more, which decoding would pay in each "
        "step");
  }
  std::vector<std::string> configs(const OpDesc& of, const DeviceInfo& device,
                                   std::size_t most) const override {
    require(of, device);
    return cudnn::plans_that_build(of, cudnn::Search::kQuick, most);
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& of, const DeviceInfo& device,
                                        const std::string& config) const override {
    require(of, device);
    return cudnn::prepare_first(of, cudnn::Search::kQuick, config);
  }

 private:
  const OpKind op_;
};

/// How a convolution comes to its plan.
struct ConvChoice {
  std::string_view id;
  const char* family;
  const char* description;
  cudnn::Search search;
  bool timed;          ///< by timing all plans on the device
  bool deterministic;  ///< only plans that give the same bits in every run
};

constexpr ConvChoice kConvChoices[] = {
    {"cudnn.conv_heuristic", "cudnn_heuristic",
     "cuDNN's convolution, by its precise heuristics: the same plan in every run",
     cudnn::Search::kPrecise, false, false},
    {"cudnn.conv_default", "cudnn_default",
     "cuDNN's convolution, by its quick heuristics among deterministic plans",
     cudnn::Search::kQuick, false, true},
    {"cudnn.conv_exhaustive", "cudnn_exhaustive",
     "cuDNN's convolution, the fastest of all plans by timing them when it is prepared: takes "
     "seconds, and may choose differently in another run",
     cudnn::Search::kAll, true, false},
};

class ConvDefinition final : public CudnnDefinition {
 public:
  ConvDefinition(std::shared_ptr<const CudnnBackend> backend, OpKind op, const ConvChoice& choice)
      : CudnnDefinition(std::move(backend)), op_(op), choice_(choice) {}

  std::string_view id() const noexcept override { return choice_.id; }
  OpKind op() const noexcept override { return op_; }
  std::vector<std::string> families() const override { return {choice_.family}; }
  std::string description() const override { return choice_.description; }
  std::string limits() const override {
    return op_ == OpKind::kConv
               ? "fp32, fp16, bf16; NCHW and channels last; bias and activations where cuDNN fuses "
                 "them; up to 1 GiB of workspace; compute capability 7.5+"
               : "fp32, fp16, bf16; NCHW and channels last; up to 1 GiB of workspace; compute "
                 "capability 7.5+";
  }
  // Where the choice is free, a tuner times the plans of the others itself.
  bool automatic() const noexcept override { return !choice_.timed; }
  Support supports(const OpDesc& of, const DeviceInfo& device) const override {
    return cudnn::check_conv(of, device);
  }
  std::vector<std::string> configs(const OpDesc& of, const DeviceInfo& device,
                                   std::size_t most) const override {
    require(of, device);
    return cudnn::plans_that_build(settled(of), choice_.search, most);
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& of, const DeviceInfo& device,
                                        const std::string& config) const override {
    require(of, device);
    if (choice_.timed && config.empty()) return cudnn::prepare_fastest(settled(of));
    return cudnn::prepare_first(settled(of), choice_.search, config);
  }

 private:
  OpDesc settled(OpDesc of) const {
    of.attributes.deterministic = of.attributes.deterministic || choice_.deterministic;
    return of;
  }

  const OpKind op_;
  const ConvChoice& choice_;
};

}  // namespace

void register_cudnn(KernelRegistry& registry) {
  const auto backend = std::make_shared<const CudnnBackend>();
  for (const OpKind op : {OpKind::kAttention, OpKind::kAttentionBackward}) {
    registry.add(std::make_shared<const SdpaDefinition>(backend, op));
  }
  for (const OpKind op : {OpKind::kConv, OpKind::kConvInputGradient, OpKind::kConvWeightGradient}) {
    for (const ConvChoice& choice : kConvChoices) {
      registry.add(std::make_shared<const ConvDefinition>(backend, op, choice));
    }
  }
}

}  // namespace xpuruntime
