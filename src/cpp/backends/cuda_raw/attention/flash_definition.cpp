// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <dlpack/dlpack.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>

#include "cuda/check.h"
#include "cuda_raw/attention/flash_backward.h"
#include "cuda_raw/attention/flash_forward.h"
#include "cuda_raw/definitions.h"

namespace xpuruntime::cuda_raw {
namespace {

constexpr std::string_view kId = "cuda_raw.flash_attention_v2";
constexpr const char* kLimits =
    "fp16, bf16; head_dim 32 to 256 in steps of 8; causal, masks, dropout, grouped heads; CUDA "
    "from "
    "8.0";

// Of the four dimensions, the last of which must be contiguous.
Support take_strides(const OpDesc& op, std::size_t slot, std::int64_t (&strides)[3]) {
  const TensorDesc& tensor = op[slot];
  const std::string name = "'" + std::string(slot_name(op.kind, slot)) + "'";
  if (tensor.rank != 4 || (!is_fp16(tensor.dtype) && !is_bf16(tensor.dtype))) {
    return Support::no("flash attention takes float16 and bfloat16 of 4 dimensions, and " + name +
                       " is " + to_string(tensor.dtype));
  }
  if (tensor.shape[3] > 1 && tensor.strides[3] != 1) {
    return Support::no(name + " needs a contiguous last dimension: copy it");
  }
  for (std::size_t i = 0; i < 3; ++i) strides[i] = tensor.strides[i];
  return Support::yes();
}

Support take_line(const OpDesc& op, std::size_t slot, DType wanted) {
  if (!op.has(slot)) return Support::yes();
  const TensorDesc& tensor = op[slot];
  if (tensor.dtype == wanted && is_contiguous(tensor)) return Support::yes();
  return Support::no("'" + std::string(slot_name(op.kind, slot)) + "' must be contiguous " +
                     to_string(wanted));
}

template <typename Args>
Support take_mask(const OpDesc& op, std::size_t slot, DType data, Args& args) {
  if (!op.has(slot)) return Support::yes();
  const TensorDesc& mask = op[slot];
  if (is_bool(mask.dtype)) {
    args.mask_kind = kMaskBoolean;
  } else if (mask.dtype == data) {
    args.mask_kind = kMaskAdditive;
  } else if (is_fp32(mask.dtype)) {
    args.mask_kind = kMaskFloat32;
  } else {
    return Support::no("'mask' must be bool, float32 or of the type of q, and is " +
                       to_string(mask.dtype));
  }
  if (mask.rank != 4) return Support::no("'mask' must have 4 dimensions");
  for (std::size_t i = 0; i < 4; ++i) {
    args.mask_strides[i] = mask.shape[i] == 1 ? 0 : mask.strides[i];
  }
  args.mask = model_address(mask);
  return Support::yes();
}

template <typename Args>
void take_shape(const OpDesc& op, std::size_t q, std::size_t k, Args& args) {
  args.batch = op[q].shape[0];
  args.heads = op[q].shape[1];
  args.q_length = op[q].shape[2];
  args.head_dim =
      static_cast<int>(std::min<std::int64_t>(op[q].shape[3], std::numeric_limits<int>::max()));
  args.kv_heads = op[k].shape[1];
  args.kv_length = op[k].shape[2];
  args.scale = static_cast<float>(op.attributes.scale);
  args.causal = op.attributes.causal != Causal::kNone;
  args.causal_bottom_right = op.attributes.causal == Causal::kBottomRight;
  args.bfloat16 = is_bf16(op[q].dtype);
  args.dropout_p = op.attributes.dropout_p;
}

Support first_no(std::initializer_list<Support> answers) {
  for (const Support& one : answers) {
    if (!one.ok) return one;
  }
  return Support::yes();
}

constexpr DType kFloat32{kDLFloat, 32, 1};
constexpr DType kInt64{kDLInt, 64, 1};

Support describe_forward(const OpDesc& op, const DeviceInfo& device, FlashForwardArgs& args) {
  using Slot = slots::Attention;
  args = {};
  if (op.device.type != DeviceType::kCuda) return Support::no("cuda_raw serves CUDA devices only");
  if (Support layout = first_no(
          {take_strides(op, Slot::kQ, args.q_strides), take_strides(op, Slot::kK, args.k_strides),
           take_strides(op, Slot::kV, args.v_strides),
           take_strides(op, Slot::kOut, args.out_strides),
           take_mask(op, Slot::kMask, op[Slot::kQ].dtype, args),
           take_line(op, Slot::kLse, kFloat32), take_line(op, Slot::kRng, kInt64)});
      !layout.ok) {
    return layout;
  }
  take_shape(op, Slot::kQ, Slot::kK, args);
  args.q = model_address(op[Slot::kQ]);
  args.k = model_address(op[Slot::kK]);
  args.v = model_address(op[Slot::kV]);
  args.out = model_address(op[Slot::kOut]);
  args.lse = static_cast<float*>(model_address(op[Slot::kLse]));
  args.rng = static_cast<const std::int64_t*>(model_address(op[Slot::kRng]));
  const auto [major, minor] = device.compute_capability;
  return support_of(flash_forward_refusal(args, major, minor));
}

FlashBackwardDevice device_of(const DeviceInfo& device) noexcept {
  return {device.compute_capability.first, device.compute_capability.second, device.sm_count,
          shared_memory_limit(device.compute_capability)};
}

Support describe_backward(const OpDesc& op, const DeviceInfo& device, FlashBackwardArgs& args) {
  using Slot = slots::AttentionBackward;
  args = {};
  if (op.device.type != DeviceType::kCuda) return Support::no("cuda_raw serves CUDA devices only");
  if (Support layout = first_no(
          {take_strides(op, Slot::kGradOut, args.grad_out_strides),
           take_strides(op, Slot::kQ, args.q_strides), take_strides(op, Slot::kK, args.k_strides),
           take_strides(op, Slot::kV, args.v_strides),
           take_strides(op, Slot::kOut, args.out_strides),
           take_strides(op, Slot::kGradQ, args.grad_q_strides),
           take_strides(op, Slot::kGradK, args.grad_k_strides),
           take_strides(op, Slot::kGradV, args.grad_v_strides),
           take_mask(op, Slot::kMask, op[Slot::kQ].dtype, args),
           take_line(op, Slot::kLse, kFloat32), take_line(op, Slot::kRng, kInt64)});
      !layout.ok) {
    return layout;
  }
  take_shape(op, Slot::kQ, Slot::kK, args);
  args.deterministic = op.attributes.deterministic;
  args.grad_out = model_address(op[Slot::kGradOut]);
  args.q = model_address(op[Slot::kQ]);
  args.k = model_address(op[Slot::kK]);
  args.v = model_address(op[Slot::kV]);
  args.out = model_address(op[Slot::kOut]);
  args.lse = static_cast<const float*>(model_address(op[Slot::kLse]));
  args.grad_q = model_address(op[Slot::kGradQ]);
  args.grad_k = model_address(op[Slot::kGradK]);
  args.grad_v = model_address(op[Slot::kGradV]);
  args.rng = static_cast<const std::int64_t*>(model_address(op[Slot::kRng]));
  return support_of(flash_backward_refusal(args, device_of(device)));
}

// Beside cuDNN's attention, as measured on an H200.
Support favour(const OpDesc& op, const DeviceInfo& device, std::size_t q, std::size_t mask,
               std::int64_t most_head_dim) {
  if (device.compute_capability.first != 9) {
    return Support::no("its fast path is for compute capability 9.0");
  }
  if (op[q].shape[3] > most_head_dim) {
    return Support::no("its fast path is for a head_dim of at most " +
                       std::to_string(most_head_dim));
  }
  if (op.has(mask) || op.attributes.dropout_p > 0.0F) {
    return Support::no("its fast path is for attention without mask and dropout");
  }
  return Support::yes();
}

class FlashDefinition final : public LaunchDefinition<FlashForwardArgs> {
 public:
  explicit FlashDefinition(BackendPointer backend)
      : LaunchDefinition(std::move(backend), kId, OpKind::kAttention) {}

  std::vector<std::string> families() const override { return {"flash_v2"}; }
  std::string description() const override {
    return "the FlashAttention-2 algorithm on tensor cores, without the score matrix in memory";
  }
  std::string limits() const override { return kLimits; }
  Support favoured(const OpDesc& op, const DeviceInfo& device) const override {
    return favour(op, device, slots::Attention::kQ, slots::Attention::kMask, 256);
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    using Slot = slots::Attention;
    return make_kernel(
        [shape = described(op, device, config), capability = device.compute_capability,
         sms = device.sm_count](void* const* operands, void* /*workspace*/, StreamHandle stream) {
          FlashForwardArgs args = shape;
          args.q = operands[Slot::kQ];
          args.k = operands[Slot::kK];
          args.v = operands[Slot::kV];
          args.mask = operands[Slot::kMask];
          args.rng = static_cast<const std::int64_t*>(operands[Slot::kRng]);
          args.out = operands[Slot::kOut];
          args.lse = static_cast<float*>(operands[Slot::kLse]);
          flash_forward(args, capability.first, capability.second, sms, cuda::as_stream(stream));
        });
  }

 private:
  Support describe(const OpDesc& op, const DeviceInfo& device,
                   FlashForwardArgs& args) const override {
    return describe_forward(op, device, args);
  }
};

class FlashBackwardDefinition final : public LaunchDefinition<FlashBackwardArgs> {
 public:
  explicit FlashBackwardDefinition(BackendPointer backend)
      : LaunchDefinition(std::move(backend), kId, OpKind::kAttentionBackward) {}

  std::vector<std::string> families() const override { return {"flash_v2"}; }
  std::string description() const override {
    return "gradients by the FlashAttention-2 algorithm, recomputing the scores; repeatable on "
           "demand";
  }
  std::string limits() const override { return kLimits; }
  Support favoured(const OpDesc& op, const DeviceInfo& device) const override {
    return favour(op, device, slots::AttentionBackward::kQ, slots::AttentionBackward::kMask, 128);
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    using Slot = slots::AttentionBackward;
    const FlashBackwardArgs shape = described(op, device, config);
    const auto launch = [shape, on = device_of(device)](void* const* operands, void* workspace,
                                                        StreamHandle stream) {
      FlashBackwardArgs args = shape;
      args.grad_out = operands[Slot::kGradOut];
      args.q = operands[Slot::kQ];
      args.k = operands[Slot::kK];
      args.v = operands[Slot::kV];
      args.out = operands[Slot::kOut];
      args.lse = static_cast<const float*>(operands[Slot::kLse]);
      args.mask = operands[Slot::kMask];
      args.rng = static_cast<const std::int64_t*>(operands[Slot::kRng]);
      args.grad_q = operands[Slot::kGradQ];
      args.grad_k = operands[Slot::kGradK];
      args.grad_v = operands[Slot::kGradV];
      flash_backward(args, workspace, on, cuda::as_stream(stream));
    };
    return make_kernel(launch, flash_backward_workspace(shape), shape.deterministic);
  }

 private:
  Support describe(const OpDesc& op, const DeviceInfo& device,
                   FlashBackwardArgs& args) const override {
    return describe_backward(op, device, args);
  }
};

}  // namespace

std::shared_ptr<const KernelDefinition> make_flash(BackendPointer backend) {
  return std::make_shared<const FlashDefinition>(std::move(backend));
}

std::shared_ptr<const KernelDefinition> make_flash_backward(BackendPointer backend) {
  return std::make_shared<const FlashBackwardDefinition>(std::move(backend));
}

}  // namespace xpuruntime::cuda_raw
