// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <string>

#include "cuda/check.h"
#include "cuda_raw/definitions.h"
#include "cuda_raw/gemm/skinny_matmul.h"

namespace xpuruntime::cuda_raw {
namespace {

using Slot = slots::Matmul;

// Whether elements along `inner` lie next to each other and lines do not overlap.
bool in_lines(std::int64_t inner, std::int64_t inner_stride, std::int64_t outer,
              std::int64_t outer_stride) noexcept {
  return (inner <= 1 || inner_stride == 1) && (outer <= 1 || outer_stride >= inner);
}

Support take_batch(const char* name, const TensorDesc& tensor, std::int64_t batch,
                   std::int64_t& stride) {
  stride = 0;
  if (tensor.rank > 3) return Support::no(std::string("'") + name + "' has more than one batch");
  if (tensor.rank < 3 || tensor.shape[0] == 1) return Support::yes();
  if (tensor.shape[0] != batch || tensor.strides[0] < 0) {
    return Support::no(std::string("the batch of '") + name + "' does not fit, or runs backwards");
  }
  stride = tensor.strides[0];
  return Support::yes();
}

SkinnyMatmulDevice device_of(const DeviceInfo& device) noexcept {
  return {device.compute_capability.first, device.sm_count,
          shared_memory_limit(device.compute_capability)};
}

Support describe_skinny(const OpDesc& op, const DeviceInfo& device, SkinnyMatmulArgs& args) {
  args = {};
  if (op.device.type != DeviceType::kCuda) return Support::no("cuda_raw serves CUDA devices only");
  const TensorDesc& a = op[Slot::kA];
  const TensorDesc& b = op[Slot::kB];
  const TensorDesc& out = op[Slot::kOut];
  if ((!is_fp16(a.dtype) && !is_bf16(a.dtype)) || b.dtype != a.dtype || out.dtype != a.dtype ||
      (op.has(Slot::kBias) && op[Slot::kBias].dtype != a.dtype)) {
    return Support::no(
        "cuda_raw.skinny multiplies float16 and bfloat16, with bias and result of the "
        "same type, and not " +
        to_string(a.dtype) + " to " + to_string(out.dtype));
  }
  if (op.has(Slot::kScaleA) || op.has(Slot::kScaleB)) {
    return Support::no("cuda_raw.skinny takes no scales");
  }
  args.bfloat16 = is_bf16(a.dtype);
  args.activation = code_of(op.attributes.activation);
  args.m = a.shape[a.rank - 2U];
  args.k = a.shape[a.rank - 1U];
  args.n = b.shape[b.rank - 1U];
  args.batch = out.rank == 3 ? out.shape[0] : 1;
  args.lda = a.strides[a.rank - 2U];
  args.ldout = out.strides[out.rank - 2U];
  if (!in_lines(args.k, a.strides[a.rank - 1U], args.m, args.lda)) {
    return Support::no("cuda_raw.skinny needs the rows of 'a' contiguous: copy it");
  }
  if (!in_lines(args.n, out.strides[out.rank - 1U], args.m, args.ldout)) {
    return Support::no("cuda_raw.skinny needs the rows of 'out' contiguous");
  }
  const std::int64_t down = b.strides[b.rank - 2U];
  const std::int64_t across = b.strides[b.rank - 1U];
  const bool plain = in_lines(args.n, across, args.k, down);
  const bool turned = in_lines(args.k, down, args.n, across);
  if (!plain && !turned) {
    return Support::no("cuda_raw.skinny needs the rows or the columns of 'b' contiguous: copy it");
  }
  args.b_is_transposed = turned && (!plain || args.k >= args.n);
  args.ldb = args.b_is_transposed ? across : down;
  if (Support batch = take_batch("a", a, args.batch, args.a_batch); !batch.ok) return batch;
  if (Support batch = take_batch("b", b, args.batch, args.b_batch); !batch.ok) return batch;
  if (Support batch = take_batch("out", out, args.batch, args.out_batch); !batch.ok) return batch;
  if (op.has(Slot::kBias) && !is_contiguous(op[Slot::kBias])) {
    return Support::no("cuda_raw.skinny needs 'bias' contiguous");
  }
  args.a = model_address(a);
  args.b = model_address(b);
  args.bias = model_address(op[Slot::kBias]);
  args.out = model_address(out);
  return support_of(skinny_matmul_refusal(args, device_of(device)));
}

class SkinnyDefinition final : public LaunchDefinition<SkinnyMatmulArgs> {
 public:
  explicit SkinnyDefinition(BackendPointer backend)
      : LaunchDefinition(std::move(backend), "cuda_raw.skinny", OpKind::kMatmul) {}

  std::string description() const override {
    return "few rows by a large matrix, as in decoding: as fast as the matrix can be read";
  }
  std::string limits() const override {
    return "fp16, bf16; m up to " + std::to_string(kSkinnyMaxM) +
           ", any n and k; bias and every activation; CUDA from 8.0";
  }
  Support favoured(const OpDesc& op, const DeviceInfo& device) const override {
    SkinnyMatmulArgs args;
    (void)describe_skinny(op, device, args);
    constexpr std::int64_t kFewRows = 16;
    constexpr std::int64_t kElements = 8;  // in 16 bytes
    if (args.m > kFewRows) return Support::no("from 17 rows on a library's kernel may be faster");
    if (args.ldb % kElements != 0 || op[Slot::kB].alignment < 4) {
      return Support::no("rows of 'b' that do not begin at multiples of 16 bytes are read slowly");
    }
    return Support::yes();
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    const SkinnyMatmulArgs shape = described(op, device, config);
    const auto launch = [shape, on = device_of(device)](void* const* operands, void* workspace,
                                                        StreamHandle stream) {
      if (shape.m == 0 || shape.n == 0 || shape.batch == 0) return;
      SkinnyMatmulArgs args = shape;
      args.a = operands[Slot::kA];
      args.b = operands[Slot::kB];
      args.bias = operands[Slot::kBias];
      args.out = operands[Slot::kOut];
      skinny_matmul(args, workspace, on, cuda::as_stream(stream));
    };
    return make_kernel(launch, skinny_matmul_workspace(shape));
  }

 private:
  Support describe(const OpDesc& op, const DeviceInfo& device,
                   SkinnyMatmulArgs& args) const override {
    return describe_skinny(op, device, args);
  }
};

}  // namespace

std::shared_ptr<const KernelDefinition> make_skinny(BackendPointer backend) {
  return std::make_shared<const SkinnyDefinition>(std::move(backend));
}

}  // namespace xpuruntime::cuda_raw
