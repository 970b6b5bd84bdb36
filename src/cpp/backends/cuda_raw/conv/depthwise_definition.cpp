// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <string>

#include "cuda/check.h"
#include "cuda_raw/conv/depthwise_conv.h"
#include "cuda_raw/definitions.h"

namespace xpuruntime::cuda_raw {
namespace {

using Slot = slots::Conv;

bool type_of(DType dtype, ConvType& type) noexcept {
  if (is_fp32(dtype)) return type = ConvType::fp32, true;
  if (is_fp16(dtype)) return type = ConvType::fp16, true;
  if (is_bf16(dtype)) return type = ConvType::bf16, true;
  return false;
}

Support describe_depthwise(const OpDesc& op, const DeviceInfo& device, DepthwiseConvArgs& args) {
  args = {};
  if (op.device.type != DeviceType::kCuda) return Support::no("cuda_raw serves CUDA devices only");
  const TensorDesc& x = op[Slot::kX];
  const TensorDesc& weight = op[Slot::kWeight];
  const TensorDesc& bias = op[Slot::kBias];
  const TensorDesc& out = op[Slot::kOut];
  if (!type_of(x.dtype, args.type)) {
    return Support::no("this kernel is for float32, float16 and bfloat16, not " +
                       to_string(x.dtype));
  }
  for (const std::size_t slot :
       {std::size_t{Slot::kWeight}, std::size_t{Slot::kBias}, std::size_t{Slot::kOut}}) {
    if (!op.has(slot) || op[slot].dtype == x.dtype) continue;
    return Support::no("'" + std::string(slot_name(op.kind, slot)) + "' is " +
                       to_string(op[slot].dtype) + " and x is " + to_string(x.dtype) +
                       ": this kernel takes one type");
  }
  const std::int64_t groups = op.attributes.groups;
  if (groups != x.shape[1] || weight.shape[0] != groups) {
    return Support::no("it is depthwise, one filter for each channel, and the convolution has " +
                       std::to_string(x.shape[1]) + " channels in " + std::to_string(groups) +
                       " groups and " + std::to_string(weight.shape[0]) + " filters");
  }
  args.batch = x.shape[0];
  args.channels = x.shape[1];
  for (std::size_t i = 0; i < 2; ++i) {
    args.size[i] = x.shape[2 + i];
    args.out_size[i] = out.shape[2 + i];
    args.kernel[i] = weight.shape[2 + i];
    args.stride[i] = op.attributes.stride[i];
    args.dilation[i] = op.attributes.dilation[i];
    args.padding[i] = op.attributes.padding[i];
    args.weight_strides[1 + i] = weight.strides[2 + i];
  }
  args.weight_strides[0] = weight.strides[0];
  args.bias_stride = bias.strides[0];
  std::copy(x.strides.begin(), x.strides.end(), args.x_strides);
  std::copy(out.strides.begin(), out.strides.end(), args.out_strides);
  args.activation = code_of(op.attributes.activation);
  args.x = model_address(x);
  args.weight = model_address(weight);
  args.bias = model_address(bias);
  args.out = model_address(out);
  return support_of(depthwise_conv_refusal(args, device.compute_capability.first));
}

class DepthwiseDefinition final : public LaunchDefinition<DepthwiseConvArgs> {
 public:
  explicit DepthwiseDefinition(BackendPointer backend)
      : LaunchDefinition(std::move(backend), "cuda_raw.depthwise_conv", OpKind::kConv) {}

  std::string description() const override {
    return "depthwise convolution, as in MobileNet, EfficientNet and ConvNeXt, with bias and "
           "activation in the same pass";
  }
  std::string limits() const override {
    return "fp32, fp16, bf16; one filter a channel; NCHW and channels last, any strides; bias and "
           "every activation; fast for 3x3, 5x5 and 7x7 with stride 1 or 2; CUDA from 8.0";
  }
  Support favoured(const OpDesc& /*op*/, const DeviceInfo& /*device*/) const override {
    return Support::no(
        "a library's kernel may be faster; auto_strategy 'best_performance' measures which is");
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    return make_kernel([shape = described(op, device, config), sms = device.sm_count](
                           void* const* operands, void* /*workspace*/, StreamHandle stream) {
      DepthwiseConvArgs args = shape;
      args.x = operands[Slot::kX];
      args.weight = operands[Slot::kWeight];
      args.bias = operands[Slot::kBias];
      args.out = operands[Slot::kOut];
      depthwise_conv(args, sms, cuda::as_stream(stream));
    });
  }

 private:
  Support describe(const OpDesc& op, const DeviceInfo& device,
                   DepthwiseConvArgs& args) const override {
    return describe_depthwise(op, device, args);
  }
};

}  // namespace

std::shared_ptr<const KernelDefinition> make_depthwise_conv(BackendPointer backend) {
  return std::make_shared<const DepthwiseDefinition>(std::move(backend));
}

}  // namespace xpuruntime::cuda_raw
