// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#if defined(XPURUNTIME_WITH_CUDNN)
#include <gtest/gtest.h>

#include <string>

#include "backend_operands.h"
#include "cudnn/conv_rules.h"
#include "cudnn/plan_name.h"
#include "cudnn/register.h"
#include "xpuruntime/attention_op.h"
#include "xpuruntime/conv_op.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"

// What this backend says without cuDNN and without a device.
namespace xpuruntime {
namespace {

using namespace testing;

Dims channels_last(const Dims& s) { return {s[1] * s[2] * s[3], 1, s[1] * s[3], s[1]}; }

void set_all(OpCall& call) {
  std::uintptr_t address = 0;
  for (const OutputSpec& spec : call.outputs()) {
    address += std::uintptr_t{1} << 40;
    const Dims shape(spec.dims().begin(), spec.dims().end());
    call.set_output(spec,
                    operand(spec.name, spec.dtype, shape,
                            spec.channels_last ? channels_last(shape) : packed(shape), address));
  }
}

struct AttentionCase {
  DType dtype = kHalf;
  std::int64_t q_length = 128, kv_length = 192, head_dim = 64;
  std::uintptr_t q_address = 0x10000;
  Dims q_strides{};
  Operand mask{};
  AttentionOptions options{};

  AttentionInputs inputs() const {
    const Dims q{2, 4, q_length, head_dim};
    const Dims kv{2, 2, kv_length, head_dim};
    AttentionInputs made;
    made.q = operand("q", dtype, q, q_strides.empty() ? packed(q) : q_strides, q_address);
    made.k = operand("k", dtype, kv);
    made.v = operand("v", dtype, kv);
    made.mask = mask;
    if (options.dropout_p > 0.0F) made.rng = operand("rng", kInt64, {2});
    return made;
  }
  OpDesc forward() const {
    OpCall call = make_attention(inputs(), options);
    set_all(call);
    return call.desc;
  }
  OpDesc backward() const {
    const Dims q{2, 4, q_length, head_dim};
    OpCall call =
        make_attention_backward(operand("grad_out", dtype, q), inputs(), operand("out", dtype, q),
                                operand("lse", kSingle, {2, 4, q_length}), options);
    set_all(call);
    return call.desc;
  }
};

class CudnnBackend : public ::testing::Test {
 protected:
  CudnnBackend() : registry_(false) { register_cudnn(registry_); }

  KernelRegistry::Definition find(OpKind op, std::string_view word) const {
    const auto found = registry_.find(op, word);
    return found.size() == 1 ? found[0] : nullptr;
  }
  std::string why_not(const OpDesc& op, const DeviceInfo& device = device_of(9, 0)) const {
    const Support support = registry_.kernels(op.kind).at(0)->supports(op, device);
    return support.ok ? "supported" : support.reason;
  }

  KernelRegistry registry_;
};

TEST_F(CudnnBackend, NamesEveryKernelAndFamily) {
  ASSERT_NE(find(OpKind::kAttention, "cudnn.sdpa"), nullptr);
  ASSERT_NE(find(OpKind::kAttention, "cudnn"), nullptr);
  ASSERT_NE(find(OpKind::kAttentionBackward, "cudnn.sdpa"), nullptr);
  EXPECT_EQ(registry_.find(OpKind::kConv, "cudnn").size(), 3U);
  EXPECT_EQ(find(OpKind::kConv, "cudnn_heuristic")->id(), "cudnn.conv_heuristic");
  EXPECT_EQ(find(OpKind::kConv, "cudnn_default")->id(), "cudnn.conv_default");
  EXPECT_EQ(find(OpKind::kConv, "cudnn_exhaustive")->id(), "cudnn.conv_exhaustive");
  for (const OpKind op : {OpKind::kConvInputGradient, OpKind::kConvWeightGradient}) {
    EXPECT_EQ(registry_.find(op, "cudnn").size(), 3U);
    EXPECT_EQ(find(op, "cudnn_heuristic")->id(), "cudnn.conv_heuristic");
    EXPECT_FALSE(find(op, "cudnn_exhaustive")->automatic());
  }
  EXPECT_TRUE(registry_.find(OpKind::kMatmul, "cudnn").empty());
}

TEST_F(CudnnBackend, TimesPlansOnlyWhenAsked) {
  EXPECT_TRUE(find(OpKind::kConv, "cudnn_heuristic")->automatic());
  EXPECT_TRUE(find(OpKind::kConv, "cudnn_default")->automatic());
  EXPECT_FALSE(find(OpKind::kConv, "cudnn_exhaustive")->automatic());
}

TEST_F(CudnnBackend, SaysWhatToInstallOrItsVersion) {
  const KernelBackend& backend = registry_.kernels().at(0)->backend();
  const Support available = backend.available();
  if (available.ok) {
    EXPECT_TRUE(backend.version().starts_with("cuDNN 9.")) << backend.version();
  } else {
    EXPECT_TRUE(contains(available.reason, "libcudnn.so.9")) << available.reason;
    EXPECT_TRUE(contains(available.reason, "nvidia-cudnn-cu13")) << available.reason;
    EXPECT_EQ(backend.version(), "");
  }
}

TEST_F(CudnnBackend, ServesOrdinaryAttention) {
  for (const DType dtype : {kHalf, kBfloat}) {
    for (const Causal causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
      AttentionCase one;
      one.dtype = dtype;
      one.options.causal = causal;
      one.options.want_lse = true;
      EXPECT_EQ(why_not(one.forward()), "supported");
      EXPECT_EQ(why_not(one.backward()), "supported");
    }
  }
}

TEST_F(CudnnBackend, RefusesDtypesAndDevicesOfAttention) {
  AttentionCase one;
  EXPECT_TRUE(contains(why_not(one.forward(), device_of(7, 5)), "8.0 or newer"));
  one.dtype = kSingle;
  EXPECT_TRUE(contains(why_not(one.forward()), "float32"));
}

TEST_F(CudnnBackend, RefusesHeadDims) {
  AttentionCase one;
  one.head_dim = 36;
  EXPECT_TRUE(contains(why_not(one.forward()), "head_dim is 36"));
  one.head_dim = 264;
  EXPECT_TRUE(contains(why_not(one.forward()), "up to 256"));
  one.head_dim = 192;
  EXPECT_EQ(why_not(one.forward()), "supported");
  EXPECT_EQ(why_not(one.backward(), device_of(9, 0)), "supported");
  EXPECT_TRUE(contains(why_not(one.backward(), device_of(8, 0)), "up to 128"));
}

TEST_F(CudnnBackend, RefusesStridesAndAddresses) {
  AttentionCase one;
  one.q_strides = {4 * 128 * 64, 128 * 64, 1, 128};
  EXPECT_TRUE(contains(why_not(one.forward()), "strides of 'q' are [32768, 8192, 1, 128]"));
  one.q_strides = {4 * 128 * 68, 128 * 68, 68, 1};
  EXPECT_TRUE(contains(why_not(one.forward()), "multiples of 16 bytes"));
  one.q_strides = {4 * 128 * 72, 128 * 72, 72, 1};
  EXPECT_EQ(why_not(one.forward()), "supported");
  one.q_strides = {64, 64 * 2, 4 * 2 * 64, 1};  // [length, heads, batch, head_dim] in memory
  EXPECT_EQ(why_not(one.forward()), "supported");
  one.q_strides.clear();
  one.q_address = 0x10008;
  EXPECT_TRUE(contains(why_not(one.forward()), "address of 'q'"));
}

TEST_F(CudnnBackend, RefusesRowsThatSeeNothing) {
  AttentionCase one;
  one.q_length = 256;
  one.options.causal = Causal::kTopLeft;
  EXPECT_EQ(why_not(one.forward()), "supported");
  one.options.causal = Causal::kBottomRight;
  EXPECT_TRUE(contains(why_not(one.forward()), "see nothing"));
  one.q_length = 192;
  EXPECT_EQ(why_not(one.forward()), "supported");
}

TEST_F(CudnnBackend, RefusesMasksThatAreNotAdded) {
  AttentionCase one;
  one.mask = operand("mask", kBool, {128, 192});
  EXPECT_TRUE(contains(why_not(one.forward()), "bool"));
  one.mask = operand("mask", kHalf, {4, 128, 1});
  EXPECT_TRUE(contains(why_not(one.forward()), "broadcast along kv_length"));
}

TEST_F(CudnnBackend, RefusesExtrasOfBottomRight) {
  AttentionCase one;
  one.options.causal = Causal::kBottomRight;
  one.options.dropout_p = 0.1F;
  EXPECT_TRUE(contains(why_not(one.forward()), "dropout"));
  one.options.causal = Causal::kTopLeft;
  EXPECT_EQ(why_not(one.forward()), "supported");
}

TEST_F(CudnnBackend, RefusesBackwardOfOneByOne) {
  AttentionCase one;
  one.q_length = one.kv_length = 1;
  EXPECT_EQ(why_not(one.forward()), "supported");
  EXPECT_TRUE(contains(why_not(one.backward()), "q_length = kv_length = 1"));
}

OpDesc conv(DType dtype, const Dims& x_strides, const Dims& weight_strides,
            const Dims& x_shape = {2, 16, 9, 9}, const Dims& weight_shape = {8, 16, 3, 3}) {
  ConvInputs inputs;
  inputs.x = operand("x", dtype, x_shape, x_strides);
  inputs.weight = operand("weight", dtype, weight_shape, weight_strides);
  OpCall call = make_conv(inputs, {});
  set_all(call);
  return call.desc;
}

TEST_F(CudnnBackend, ServesOrdinaryConvolution) {
  const Dims x{2, 16, 9, 9};
  const Dims weight{8, 16, 3, 3};
  for (const DType dtype : {kSingle, kHalf, kBfloat}) {
    EXPECT_EQ(why_not(conv(dtype, packed(x), packed(weight))), "supported");
    EXPECT_EQ(why_not(conv(dtype, channels_last(x), channels_last(weight))), "supported");
  }
  EXPECT_TRUE(contains(why_not(conv(kDouble, packed(x), packed(weight))), "float64"));
  EXPECT_TRUE(
      contains(why_not(conv(kBfloat, packed(x), packed(weight)), device_of(7, 5)), "bfloat16"));
  Dims broadcast = packed(x);
  broadcast[0] = 0;
  EXPECT_TRUE(contains(why_not(conv(kHalf, broadcast, packed(weight))), "strides of 'x'"));
  EXPECT_TRUE(contains(why_not(conv(kHalf, packed({0, 16, 9, 9}), packed(weight), {0, 16, 9, 9})),
                       "no element"));
}

/// Both gradients of a convolution of 3 x 3, of operands that lie alike.
std::vector<OpDesc> gradients(DType dtype, bool last, const Dims& x = {2, 16, 9, 9}) {
  const Dims grad{x[0], 8, x[2] - 2, x[3] - 2};
  const Dims weight{8, x[1], 3, 3};
  const auto lies = [last](const Dims& shape) {
    return last ? channels_last(shape) : packed(shape);
  };
  const Operand arriving = operand("grad_out", dtype, grad, lies(grad));
  std::vector<OpDesc> made;
  OpCall call = make_conv_input_gradient(
      arriving, operand("weight", dtype, weight, lies(weight)),
      {static_cast<std::int32_t>(x[2]), static_cast<std::int32_t>(x[3])}, {});
  set_all(call);
  made.push_back(call.desc);
  call = make_conv_weight_gradient(arriving, operand("x", dtype, x, lies(x)), {3, 3}, {});
  set_all(call);
  made.push_back(call.desc);
  return made;
}

TEST_F(CudnnBackend, ServesGradientsOfConvolutions) {
  for (const bool last : {false, true}) {
    for (const DType dtype : {kSingle, kHalf, kBfloat}) {
      for (const OpDesc& op : gradients(dtype, last)) EXPECT_EQ(why_not(op), "supported");
    }
    for (const OpDesc& op : gradients(kDouble, last)) {
      EXPECT_TRUE(contains(why_not(op), "not float64")) << why_not(op);
    }
    for (const OpDesc& op : gradients(kBfloat, last)) {
      EXPECT_TRUE(contains(why_not(op, device_of(7, 5)), "bfloat16"));
    }
  }
  EXPECT_TRUE(contains(why_not(gradients(kHalf, false, {0, 16, 9, 9})[1]), "no element"));
  OpDesc broadcast = gradients(kHalf, false)[0];
  broadcast.tensors[slots::ConvInputGradient::kGradOut].strides[3] = 0;
  EXPECT_TRUE(contains(why_not(broadcast), "strides of 'grad_out'")) << why_not(broadcast);
}

TEST_F(CudnnBackend, GradientsLieAsTheirConvolution) {
  const std::vector<OpDesc> last = gradients(kHalf, true);
  for (const OpDesc& op : last) {
    const cudnn::ConvStrides found = cudnn::conv_strides(op);
    EXPECT_EQ(found.x, (cudnn::Strides4{1296, 1, 144, 16}));
    EXPECT_EQ(found.weight, (cudnn::Strides4{144, 1, 48, 16}));
    EXPECT_EQ(found.out, (cudnn::Strides4{392, 1, 56, 8}));
  }
  for (const OpDesc& op : gradients(kHalf, false)) {
    EXPECT_EQ(cudnn::conv_strides(op).weight, (cudnn::Strides4{144, 9, 3, 1}));
  }
}

TEST_F(CudnnBackend, NeedsAlignedAddressesToFuse) {
  const auto why = [this](DType dtype, std::uintptr_t bias_address, bool allow_tf32, bool fused) {
    ConvInputs inputs;
    const std::uintptr_t odd = fused ? 0 : dtype.itemsize();
    inputs.x = operand("x", dtype, {2, 16, 9, 9}, packed({2, 16, 9, 9}), 0x10000 + odd);
    inputs.weight = operand("weight", dtype, {8, 16, 3, 3});
    if (fused) inputs.bias = operand("bias", dtype, {8}, {1}, bias_address);
    ConvOptions options;
    options.allow_tf32 = allow_tf32;
    OpCall call = make_conv(inputs, options);
    set_all(call);
    return why_not(call.desc);
  };
  EXPECT_EQ(why(kHalf, 0x20000, false, true), "supported");
  EXPECT_TRUE(contains(why(kHalf, 0x20008, false, true), "address of 'bias' is a multiple of 8"));
  EXPECT_TRUE(contains(why(kSingle, 0x20004, true, true), "address of 'bias' is a multiple of 4"));
  EXPECT_EQ(why(kSingle, 0x20004, false, true), "supported");
  EXPECT_EQ(why(kHalf, 0, false, false), "supported");
}

TEST_F(CudnnBackend, SettlesTheLayoutThatDimensionsOfOneLeaveOpen) {
  const Dims x{2, 16, 9, 9};
  // A kernel of 1 x 1 lies both ways: it follows x.
  OpDesc op = conv(kHalf, channels_last(x), packed({8, 16, 1, 1}), x, {8, 16, 1, 1});
  EXPECT_EQ(cudnn::conv_strides(op).weight, (cudnn::Strides4{16, 1, 16, 16}));
  op = conv(kHalf, packed(x), packed({8, 16, 1, 1}), x, {8, 16, 1, 1});
  EXPECT_EQ(cudnn::conv_strides(op).weight, (cudnn::Strides4{16, 1, 1, 1}));
  // One channel leaves x open, and the output is laid out channels first.
  const Dims one{2, 1, 9, 9};
  op = conv(kHalf, packed(one), packed({8, 1, 3, 3}), one, {8, 1, 3, 3});
  EXPECT_EQ(cudnn::conv_strides(op).x, (cudnn::Strides4{81, 81, 9, 1}));
  // Strides that are neither stay as they are.
  const Dims view{16 * 100, 100, 10, 1};
  op = conv(kHalf, view, packed({8, 16, 3, 3}));
  EXPECT_EQ(cudnn::conv_strides(op).x, (cudnn::Strides4{1600, 100, 10, 1}));
}

TEST_F(CudnnBackend, ReadsPlanNames) {
  for (const char* good : {"eng0", "eng4_k2=1_k13=0", "eng38_k2=-1"}) {
    EXPECT_EQ(cudnn::check_plan_name(good), good);
  }
  for (const char* bad : {"", "eng", "4", "eng4_", "eng4_k2", "eng4_k2=", "eng4_k=1", "eng4 ",
                          "eng4_k2=1,k3=0", "engine4", "eng4_k2=--1"}) {
    EXPECT_THROW((void)cudnn::check_plan_name(bad), InputError) << bad;
  }
}

TEST_F(CudnnBackend, RefusesABadConfigBeforeItTouchesADevice) {
  const OpDesc op = AttentionCase().forward();
  const auto definition = find(OpKind::kAttention, "cudnn.sdpa");
  EXPECT_THROW((void)definition->prepare(op, device_of(9, 0), "fastest"), InputError);
}

TEST_F(CudnnBackend, PrepareRepeatsTheReason) {
  AttentionCase one;
  one.head_dim = 36;
  const auto definition = find(OpKind::kAttention, "cudnn.sdpa");
  try {
    (void)definition->prepare(one.forward(), device_of(9, 0), "");
    FAIL();
  } catch (const UnsupportedOperationError& error) {
    EXPECT_TRUE(contains(error.what(), "cudnn.sdpa")) << error.what();
    EXPECT_TRUE(contains(error.what(), "head_dim is 36")) << error.what();
    EXPECT_EQ(error.device(), "cuda:0");
  }
}

}  // namespace
}  // namespace xpuruntime
#endif
