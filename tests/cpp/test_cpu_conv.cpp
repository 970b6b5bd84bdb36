// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "cpu_kernels.h"
#include "xpuruntime/conv_op.h"

namespace xpuruntime::testing {
namespace {

struct Conv {
  std::int64_t images, channels, height, width, outputs, kernel_h, kernel_w;
  ConvOptions options;
  bool channels_last;
};

// Calls term(place in x, place in weight, place in the result) for each product, all in row-major
// order: every input goes to the outputs that it reaches.
template <typename Term>
void for_each_term(const Conv at, const Dims& shape, Term&& term) {
  const std::int64_t per_in = at.channels / at.options.groups;
  const std::int64_t per_out = at.outputs / at.options.groups;
  const std::int64_t rows = shape[2], columns = shape[3];
  std::size_t in = 0;
  for (std::int64_t n = 0; n < at.images; ++n) {
    for (std::int64_t c = 0; c < at.channels; ++c) {
      for (std::int64_t y = 0; y < at.height; ++y) {
        for (std::int64_t z = 0; z < at.width; ++z, ++in) {
          for (std::int64_t i = 0; i < at.kernel_h; ++i) {
            for (std::int64_t j = 0; j < at.kernel_w; ++j) {
              const std::int64_t oy = y + at.options.padding[0] - i * at.options.dilation[0];
              const std::int64_t oz = z + at.options.padding[1] - j * at.options.dilation[1];
              const std::int64_t row = oy / at.options.stride[0],
                                 column = oz / at.options.stride[1];
              if (oy < 0 || oz < 0 || row * at.options.stride[0] != oy ||
                  column * at.options.stride[1] != oz || row >= rows || column >= columns) {
                continue;
              }
              const std::int64_t first = c / per_in * per_out;
              for (std::int64_t channel = first; channel < first + per_out; ++channel) {
                term(in,
                     static_cast<std::size_t>(
                         ((channel * per_in + c % per_in) * at.kernel_h + i) * at.kernel_w + j),
                     static_cast<std::size_t>(((n * at.outputs + channel) * rows + row) * columns +
                                              column));
              }
            }
          }
        }
      }
    }
  }
}

void expect_sums(const std::string& id, const Array& found, const std::vector<double>& want,
                 const std::vector<double>& size) {
  ASSERT_TRUE(found.guards_hold());
  for (std::int64_t i = 0; i < found.count(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    ASSERT_NEAR(found.get(i), want[at], 4 * epsilon(found.dtype()) * size[at]) << id << " " << i;
  }
}

// Both gradients. `last_weight`: the gradient of the weight lies channels last too.
void check_gradients(const std::string& id, DType dtype, const Conv& at, bool last_weight) {
  std::mt19937 random(10);
  const auto first = std::vector<std::size_t>{0, 1, 2, 3};
  const auto order = at.channels_last ? std::vector<std::size_t>{0, 2, 3, 1} : first;
  Array x(dtype, {at.images, at.channels, at.height, at.width}, order);
  Array weight(dtype, {at.outputs, at.channels / at.options.groups, at.kernel_h, at.kernel_w});
  const OpCall forward = make_conv({x.operand("x"), weight.operand("weight"), {}}, at.options);
  const OutputSpec spec = forward.outputs()[0];
  Array grad(dtype, {spec.shape[0], spec.shape[1], spec.shape[2], spec.shape[3]}, order);
  for (Array* one : {&x, &weight, &grad}) one->fill(random);
  Array grad_x(dtype, x.shape(), order);
  Array grad_weight(dtype, weight.shape(),
                    last_weight ? std::vector<std::size_t>{0, 2, 3, 1} : first);
  OpCall input = make_conv_input_gradient(
      grad.operand("grad_out"), weight.operand("weight"),
      {static_cast<std::int32_t>(at.height), static_cast<std::int32_t>(at.width)}, at.options);
  set_outputs(input, {&grad_x});
  OpCall weights = make_conv_weight_gradient(
      grad.operand("grad_out"), x.operand("x"),
      {static_cast<std::int32_t>(at.kernel_h), static_cast<std::int32_t>(at.kernel_w)}, at.options);
  set_outputs(weights, {&grad_weight});
  for (OpCall* call : {&input, &weights}) {
    if (!call->empty()) run_kernel(cpu_registry(), id, *call);
  }
  const std::vector<double> xs = x.values(), ws = weight.values(), grads = grad.values();
  std::vector<double> want_x(xs.size()), size_x(xs.size());
  std::vector<double> want_w(ws.size()), size_w(ws.size());
  for_each_term(at, grad.shape(), [&](std::size_t in, std::size_t tap, std::size_t out) {
    const double to_x = grads[out] * ws[tap], to_weight = grads[out] * xs[in];
    want_x[in] += to_x;
    size_x[in] += std::abs(to_x);
    want_w[tap] += to_weight;
    size_w[tap] += std::abs(to_weight);
  });
  expect_sums(id + " input", grad_x, want_x, size_x);
  expect_sums(id + " weight", grad_weight, want_w, size_w);
}

void check_conv(const std::string& id, DType dtype, const Conv& at) {
  std::mt19937 random(9);
  const auto order = at.channels_last ? std::vector<std::size_t>{0, 2, 3, 1}
                                      : std::vector<std::size_t>{0, 1, 2, 3};
  Array x(dtype, {at.images, at.channels, at.height, at.width}, order);
  Array weight(dtype, {at.outputs, at.channels / at.options.groups, at.kernel_h, at.kernel_w});
  Array bias(dtype, {at.outputs});
  x.fill(random);
  weight.fill(random);
  bias.fill(random);
  OpCall call = make_conv(
      {.x = x.operand("x"), .weight = weight.operand("weight"), .bias = bias.operand("bias")},
      at.options);
  const OutputSpec spec = call.outputs()[0];
  Array out(dtype, {spec.shape[0], spec.shape[1], spec.shape[2], spec.shape[3]}, order);
  set_outputs(call, {&out});
  run_kernel(cpu_registry(), id, call);
  ASSERT_TRUE(out.guards_hold());
  std::vector<double> want(static_cast<std::size_t>(out.count()));
  std::vector<double> size(want.size());
  const Dims& shape = out.shape();
  const std::vector<double> xs = x.values(), ws = weight.values();
  for_each_term(at, shape, [&](std::size_t in, std::size_t tap, std::size_t sum) {
    const double term = xs[in] * ws[tap];
    want[sum] += term;
    size[sum] += std::abs(term);
  });
  for (std::int64_t i = 0; i < out.count(); ++i) {
    const double b = bias.get(i / (shape[2] * shape[3]) % shape[1]);
    double value = want[static_cast<std::size_t>(i)] + b;
    if (at.options.activation == Activation::kRelu) value = std::max(value, 0.0);
    ASSERT_NEAR(out.get(i), value,
                4 * epsilon(dtype) * (size[static_cast<std::size_t>(i)] + std::abs(b)))
        << id << " " << i;
  }
}

ConvOptions options(std::array<std::int32_t, 2> stride, std::array<std::int32_t, 4> padding,
                    std::array<std::int32_t, 2> dilation = {1, 1}, std::int32_t groups = 1) {
  ConvOptions out;
  out.stride = stride;
  out.padding = padding;
  out.dilation = dilation;
  out.groups = groups;
  out.activation = Activation::kRelu;
  return out;
}

// The parameter: whether channels come last in memory.
class CpuConvOfOrder : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Both, CpuConvOfOrder, ::testing::Bool());

TEST_P(CpuConvOfOrder, Conv) {
  const bool last = GetParam();
  const std::vector<Conv> cases = {
      {2, 3, 9, 11, 5, 3, 3, options({1, 1}, {1, 1, 1, 1}), last},
      {1, 4, 10, 7, 6, 3, 2, options({2, 3}, {0, 1, 2, 3}), last},
      {1, 4, 13, 12, 6, 3, 3, options({1, 2}, {2, 0, 1, 4}, {2, 3}, 2), last},
      {2, 6, 8, 8, 6, 3, 3, options({1, 1}, {1, 1, 1, 1}, {1, 1}, 6), last},
      {2, 5, 7, 9, 3, 1, 1, options({1, 1}, {0, 0, 0, 0}), last},
      {1, 6, 7, 9, 4, 1, 1, options({2, 2}, {0, 0, 0, 0}, {1, 1}, 2), last},
      {1, 2, 1, 1, 3, 1, 1, options({1, 1}, {4, 4, 4, 4}), last},
      {1, 1, 5, 40, 1, 5, 7, options({1, 1}, {6, 9, 6, 9}), last},
      {0, 3, 4, 4, 2, 3, 3, options({1, 1}, {0, 0, 0, 0}), last},
      {1, 0, 4, 4, 2, 3, 3, options({1, 1}, {0, 0, 0, 0}), last},
      {3, 8, 30, 31, 16, 3, 3, options({1, 1}, {1, 1, 1, 1}), last},
  };
  for (const Conv& at : cases) {
    for (const DType dtype : {kFp64, kFp32, kFp16, kBf16}) check_conv("cpu.reference", dtype, at);
    for (const DType dtype : {kFp64, kFp32}) check_conv("cpu.gemm_conv", dtype, at);
  }
}

TEST_P(CpuConvOfOrder, Gradients) {
  const auto plain = [](auto... given) {
    ConvOptions out = options(given...);
    out.activation = Activation::kNone;
    return out;
  };
  using Pair = std::array<std::int32_t, 2>;
  using Pads = std::array<std::int32_t, 4>;
  const bool last = GetParam();
  const std::vector<Conv> cases = {
      {2, 3, 9, 11, 5, 3, 3, plain(Pair{1, 1}, Pads{1, 1, 1, 1}), last},
      {1, 4, 10, 7, 6, 3, 2, plain(Pair{2, 3}, Pads{0, 1, 2, 3}), last},
      {1, 4, 13, 12, 6, 3, 3, plain(Pair{1, 2}, Pads{2, 0, 1, 4}, Pair{2, 3}, 2), last},
      {2, 6, 8, 8, 6, 3, 3, plain(Pair{1, 1}, Pads{1, 1, 1, 1}, Pair{1, 1}, 6), last},
      {2, 5, 7, 9, 3, 1, 1, plain(Pair{1, 1}, Pads{0, 0, 0, 0}), last},
      {1, 6, 7, 9, 4, 1, 1, plain(Pair{2, 2}, Pads{0, 0, 0, 0}, Pair{1, 1}, 2), last},
      {1, 2, 10, 11, 3, 2, 2, plain(Pair{4, 5}, Pads{0, 0, 0, 0}), last},  // some never reached
      {1, 2, 1, 1, 3, 1, 1, plain(Pair{1, 1}, Pads{4, 4, 4, 4}), last},
      {1, 1, 5, 40, 1, 5, 7, plain(Pair{1, 1}, Pads{6, 9, 6, 9}), last},
      {0, 3, 4, 4, 2, 3, 3, plain(Pair{1, 1}, Pads{0, 0, 0, 0}), last},  // weight: zeros
      {1, 0, 4, 4, 2, 3, 3, plain(Pair{1, 1}, Pads{0, 0, 0, 0}), last},
      {3, 8, 30, 31, 16, 3, 3, plain(Pair{1, 1}, Pads{1, 1, 1, 1}), last},
  };
  for (const Conv& at : cases) {
    for (const bool last_weight : {false, true}) {
      for (const DType dtype : {kFp64, kFp32, kFp16, kBf16}) {
        if (last_weight && dtype != kBf16) continue;  // it reads by strides alone
        check_gradients("cpu.reference", dtype, at, last_weight);
      }
      for (const DType dtype : {kFp64, kFp32}) {
        check_gradients("cpu.gemm_conv", dtype, at, last_weight);
      }
    }
  }
}

TEST(CpuConv, GradientsOfImagesOfSeveralBlocks) {
  ConvOptions padded;
  padded.padding = {2, 2, 2, 2};
  check_gradients("cpu.gemm_conv", kFp32, {2, 20, 64, 64, 1, 5, 5, padded, false}, false);
  check_gradients("cpu.gemm_conv", kFp32, {2, 20, 64, 64, 1, 5, 5, padded, true}, true);
}

TEST(CpuConv, WhatGemmCannotReadIsSaid) {
  const auto reason = [](OpCall& call) {
    for (const auto& one : cpu_registry().kernels(call.desc.kind)) {
      if (one->id() == "cpu.gemm_conv") return one->supports(call.desc, {}).reason;
    }
    return std::string("there is none");
  };
  Array grad(kFp32, {1, 4, 3, 3});
  Array weight(kFp32, {4, 2, 3, 3}, {0, 2, 3, 1});
  Array grad_x(kFp32, {1, 2, 5, 5});
  OpCall input =
      make_conv_input_gradient(grad.operand("grad_out"), weight.operand("weight"), {5, 5}, {});
  set_outputs(input, {&grad_x});
  EXPECT_EQ(reason(input), "needs 'weight' with its last three dimensions contiguous");
  Array x(kFp32, {1, 2, 5, 5});
  Array grad_weight(kFp32, {4, 2, 3, 3}, {1, 2, 3, 0});
  OpCall weights = make_conv_weight_gradient(grad.operand("grad_out"), x.operand("x"), {3, 3}, {});
  set_outputs(weights, {&grad_weight});
  EXPECT_EQ(reason(weights), "");  // its rows are its columns in memory
  Array odd(kFp32, {4, 2, 3, 3}, {2, 0, 1, 3});
  set_outputs(weights, {&odd});
  EXPECT_EQ(reason(weights), "needs 'grad_weight' contiguous or channels last");
  Array half(kFp16, {1, 4, 3, 3}), half_x(kFp16, {1, 2, 5, 5}), half_weight(kFp16, {4, 2, 3, 3});
  OpCall narrow =
      make_conv_weight_gradient(half.operand("grad_out"), half_x.operand("x"), {3, 3}, {});
  set_outputs(narrow, {&half_weight});
  EXPECT_EQ(reason(narrow), "OpenBLAS multiplies fp32 and fp64, and this is float16");
}

}  // namespace
}  // namespace xpuruntime::testing
