// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <dlpack/dlpack.h>

#include <initializer_list>
#include <string>

#include "cuda/check.h"
#include "cuda_raw/definitions.h"
#include "cuda_raw/norm/norm.h"

namespace xpuruntime::cuda_raw {
namespace {

std::string_view id_of(bool rms) noexcept {
  return rms ? "cuda_raw.rms_norm" : "cuda_raw.layer_norm";
}

bool type_of(DType dtype, NormType& type) noexcept {
  if (is_fp32(dtype)) return type = NormType::fp32, true;
  if (is_fp16(dtype)) return type = NormType::fp16, true;
  if (is_bf16(dtype)) return type = NormType::bf16, true;
  return false;
}

// [rows, columns] of the type of x; absent is fine.
Support take_rows(const OpDesc& op, std::size_t slot, const TensorDesc& x, std::int64_t& stride) {
  if (!op.has(slot)) return Support::yes();
  const TensorDesc& tensor = op[slot];
  const std::string name = "'" + std::string(slot_name(op.kind, slot)) + "'";
  if (tensor.rank != 2) return Support::no(name + " must be [rows, columns]");
  if (tensor.dtype != x.dtype) {
    return Support::no(name + " is " + to_string(tensor.dtype) + " and x is " + to_string(x.dtype) +
                       ": these kernels take one type");
  }
  if (tensor.shape[1] > 1 && tensor.strides[1] != 1) {
    return Support::no(name + " needs contiguous columns: copy it");
  }
  stride = tensor.strides[0];
  return Support::yes();
}

// [columns] of one type, or [rows] of fp32.
Support take_line(const OpDesc& op, std::size_t slot, DType wanted) {
  if (!op.has(slot)) return Support::yes();
  const TensorDesc& tensor = op[slot];
  const std::string name = "'" + std::string(slot_name(op.kind, slot)) + "'";
  if (tensor.dtype != wanted) {
    return Support::no(name + " is " + to_string(tensor.dtype) + " and must be " +
                       to_string(wanted) + " here");
  }
  if (!is_contiguous(tensor)) return Support::no(name + " must be contiguous");
  return Support::yes();
}

Support take_types(const OpDesc& op, std::size_t x, std::size_t first_line, std::size_t second_line,
                   NormType& type, NormType& weight_type, DType& line) {
  if (op.device.type != DeviceType::kCuda) return Support::no("cuda_raw serves CUDA devices only");
  line = op.has(first_line)    ? op[first_line].dtype
         : op.has(second_line) ? op[second_line].dtype
                               : op[x].dtype;
  if (!type_of(op[x].dtype, type) || !type_of(line, weight_type)) {
    return Support::no("these kernels normalize float32, float16 and bfloat16, and not " +
                       to_string(op[x].dtype) + " with weights of " + to_string(line));
  }
  return Support::yes();
}

Support first_no(std::initializer_list<Support> answers) {
  for (const Support& one : answers) {
    if (!one.ok) return one;
  }
  return Support::yes();
}

Support describe_forward(const OpDesc& op, const DeviceInfo& device, bool rms,
                         NormForwardArgs& args) {
  using Slot = slots::Norm;
  args = {};
  DType line{};
  if (Support types =
          take_types(op, Slot::kX, Slot::kWeight, Slot::kBias, args.type, args.weight_type, line);
      !types.ok) {
    return types;
  }
  const TensorDesc& x = op[Slot::kX];
  constexpr DType fp32{kDLFloat, 32, 1};
  if (Support layout =
          first_no({take_rows(op, Slot::kX, x, args.x_row_stride),
                    take_rows(op, Slot::kResidual, x, args.residual_row_stride),
                    take_rows(op, Slot::kY, x, args.y_row_stride),
                    take_rows(op, Slot::kSum, x, args.sum_row_stride),
                    take_line(op, Slot::kWeight, line), take_line(op, Slot::kBias, line),
                    take_line(op, Slot::kMean, fp32), take_line(op, Slot::kRstd, fp32)});
      !layout.ok) {
    return layout;
  }
  args.rows = x.shape[0];
  args.columns = x.shape[1];
  args.epsilon = static_cast<float>(op.attributes.epsilon);
  args.rms = rms;
  args.x = model_address(x);
  args.residual = model_address(op[Slot::kResidual]);
  args.weight = model_address(op[Slot::kWeight]);
  args.bias = model_address(op[Slot::kBias]);
  args.y = model_address(op[Slot::kY]);
  args.sum_out = model_address(op[Slot::kSum]);
  args.mean = static_cast<float*>(model_address(op[Slot::kMean]));
  args.rstd = static_cast<float*>(model_address(op[Slot::kRstd]));
  return support_of(norm_refusal(args, device.compute_capability.first));
}

Support describe_backward(const OpDesc& op, const DeviceInfo& device, bool rms,
                          NormBackwardArgs& args) {
  using Slot = slots::NormBackward;
  args = {};
  DType line{};
  const std::size_t other = op.has(Slot::kGradWeight) ? Slot::kGradWeight : Slot::kGradBias;
  if (Support types =
          take_types(op, Slot::kX, Slot::kWeight, other, args.type, args.weight_type, line);
      !types.ok) {
    return types;
  }
  const TensorDesc& x = op[Slot::kX];
  constexpr DType fp32{kDLFloat, 32, 1};
  if (Support layout =
          first_no({take_rows(op, Slot::kX, x, args.x_row_stride),
                    take_rows(op, Slot::kGradY, x, args.grad_y_row_stride),
                    take_rows(op, Slot::kGradSum, x, args.grad_sum_row_stride),
                    take_rows(op, Slot::kGradX, x, args.grad_x_row_stride),
                    take_line(op, Slot::kWeight, line), take_line(op, Slot::kGradWeight, line),
                    take_line(op, Slot::kGradBias, line), take_line(op, Slot::kMean, fp32),
                    take_line(op, Slot::kRstd, fp32)});
      !layout.ok) {
    return layout;
  }
  args.rows = x.shape[0];
  args.columns = x.shape[1];
  args.rms = rms;
  args.grad_y = model_address(op[Slot::kGradY]);
  args.x = model_address(x);
  args.weight = model_address(op[Slot::kWeight]);
  args.grad_sum = model_address(op[Slot::kGradSum]);
  args.mean = static_cast<const float*>(model_address(op[Slot::kMean]));
  args.rstd = static_cast<const float*>(model_address(op[Slot::kRstd]));
  args.grad_x = model_address(op[Slot::kGradX]);
  args.grad_weight = model_address(op[Slot::kGradWeight]);
  args.grad_bias = model_address(op[Slot::kGradBias]);
  return support_of(norm_refusal(args, device.compute_capability.first));
}

// A norm or its gradient, which `kDescribe` describes.
template <typename Args, auto kDescribe>
class EitherNorm : public LaunchDefinition<Args> {
 public:
  EitherNorm(BackendPointer backend, bool rms, OpKind op)
      : LaunchDefinition<Args>(std::move(backend), id_of(rms), op), rms_(rms) {}

  std::string limits() const final {
    return "fp32, fp16, bf16, weights of the same type or fp32; contiguous columns; CUDA from 8.0";
  }

 private:
  Support describe(const OpDesc& op, const DeviceInfo& device, Args& args) const final {
    return kDescribe(op, device, rms_, args);
  }

  const bool rms_;
};

class NormDefinition final : public EitherNorm<NormForwardArgs, describe_forward> {
 public:
  NormDefinition(BackendPointer backend, bool rms)
      : EitherNorm(std::move(backend), rms, rms ? OpKind::kRmsNorm : OpKind::kLayerNorm) {}

  std::string description() const override {
    return "one pass over memory, with the residual added on the way";
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    using Slot = slots::Norm;
    return make_kernel(
        [shape = described(op, device, config), major = device.compute_capability.first,
         sms = device.sm_count](void* const* operands, void* /*workspace*/, StreamHandle stream) {
          NormForwardArgs args = shape;
          args.x = operands[Slot::kX];
          args.residual = operands[Slot::kResidual];
          args.weight = operands[Slot::kWeight];
          args.bias = operands[Slot::kBias];
          args.y = operands[Slot::kY];
          args.sum_out = operands[Slot::kSum];
          args.mean = static_cast<float*>(operands[Slot::kMean]);
          args.rstd = static_cast<float*>(operands[Slot::kRstd]);
          norm_forward(args, major, sms, cuda::as_stream(stream));
        });
  }
};

class NormBackwardDefinition final : public EitherNorm<NormBackwardArgs, describe_backward> {
 public:
  NormBackwardDefinition(BackendPointer backend, bool rms)
      : EitherNorm(std::move(backend), rms,
                   rms ? OpKind::kRmsNormBackward : OpKind::kLayerNormBackward) {}

  std::string description() const override {
    return "one pass over memory, with all gradients in it";
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    using Slot = slots::NormBackward;
    const NormBackwardArgs shape = described(op, device, config);
    const auto launch = [shape, major = device.compute_capability.first, sms = device.sm_count](
                            void* const* operands, void* workspace, StreamHandle stream) {
      NormBackwardArgs args = shape;
      args.grad_y = operands[Slot::kGradY];
      args.x = operands[Slot::kX];
      args.weight = operands[Slot::kWeight];
      args.grad_sum = operands[Slot::kGradSum];
      args.mean = static_cast<const float*>(operands[Slot::kMean]);
      args.rstd = static_cast<const float*>(operands[Slot::kRstd]);
      args.grad_x = operands[Slot::kGradX];
      args.grad_weight = operands[Slot::kGradWeight];
      args.grad_bias = operands[Slot::kGradBias];
      norm_backward(args, workspace, major, sms, cuda::as_stream(stream));
    };
    return make_kernel(launch, norm_backward_workspace(shape, device.sm_count));
  }
};

}  // namespace

std::shared_ptr<const KernelDefinition> make_norm(BackendPointer backend, bool rms) {
  return std::make_shared<const NormDefinition>(std::move(backend), rms);
}

std::shared_ptr<const KernelDefinition> make_norm_backward(BackendPointer backend, bool rms) {
  return std::make_shared<const NormBackwardDefinition>(std::move(backend), rms);
}

}  // namespace xpuruntime::cuda_raw
