// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpu/dropout.h"
#include "cpu_kernels.h"
#include "xpuruntime/attention_op.h"

namespace xpuruntime::testing {
namespace {

struct Attention {
  std::int64_t batch, heads, kv_heads, q, kv, dim;
  Causal causal;
  int mask;  // 0 none, 1 bool, 2 added
  float dropout;
};

// Scores, weights and output of one row, in the plainest form.
std::vector<double> attend(const Attention& at, const Array& q, const Array& k, const Array& mask,
                           double scale, std::int64_t b, std::int64_t h, std::int64_t i,
                           double* lse) {
  std::vector<double> weights;
  double sum = 0;
  for (std::int64_t j = 0; j < at.kv; ++j) {
    double score = 0;
    for (std::int64_t d = 0; d < at.dim; ++d) {
      score += scale * q.at({b, h, i, d}) * k.at({b, h / (at.heads / at.kv_heads), j, d});
    }
    bool seen =
        at.causal == Causal::kNone || j <= i + (at.causal == Causal::kTopLeft ? 0 : at.kv - at.q);
    if (at.mask == 1) seen = seen && mask.at({b, 0, i, j}) != 0.0;
    if (at.mask == 2) score += mask.at({b, 0, i, j});
    weights.push_back(seen ? std::exp(score) : 0.0);
    sum += weights.back();
  }
  *lse = std::log(sum);
  for (double& weight : weights) weight = sum == 0.0 ? 0.0 : weight / sum;
  return weights;
}

struct AttentionArrays {
  AttentionArrays(const Attention& at, DType dtype)
      : q(dtype, {at.batch, at.heads, at.q, at.dim}, {0, 2, 1, 3}),
        k(dtype, {at.batch, at.kv_heads, at.kv, at.dim}),
        v(dtype, {at.batch, at.kv_heads, at.kv, at.dim}, {0, 2, 1, 3}),
        mask(at.mask == 1 ? kBool : kFp32, {at.batch, 1, at.q, at.kv}),
        rng(kInt64, {2}) {
    std::mt19937 random(static_cast<unsigned>(at.q * 100 + at.kv));
    q.fill(random);
    k.fill(random);
    v.fill(random);
    rng.set(0, 77);
    rng.set(1, 5);
    for (std::int64_t i = 0; i < mask.count(); ++i) {
      const std::int64_t row =
          i / std::max<std::int64_t>(at.kv, 1) % std::max<std::int64_t>(at.q, 1);
      // Row 1 sees nothing.
      if (at.mask == 1) mask.set(i, row != 1 && random() % 3 != 0 ? 1 : 0);
      if (at.mask == 2) {
        mask.set(i, row == 1 || random() % 4 == 0 ? -std::numeric_limits<double>::infinity()
                                                  : 0.25 * static_cast<double>(random() % 9));
      }
    }
  }
  AttentionInputs inputs(const Attention& at) {
    return {.q = q.operand("q"),
            .k = k.operand("k"),
            .v = v.operand("v"),
            .mask = at.mask != 0 ? mask.operand("mask") : Operand{},
            .rng = at.dropout > 0 ? rng.operand("rng") : Operand{}};
  }
  Array q, k, v, mask, rng;
};

double keep(const Attention& at, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  if (at.dropout == 0.0F) return 1.0;
  return cpu::Dropout(at.dropout, 77, 5).factor(b * at.heads + h, i, j);
}

const std::vector<Attention> kAttentions = {
    {2, 2, 2, 5, 7, 8, Causal::kNone, 0, 0.0F},
    {1, 4, 2, 6, 6, 4, Causal::kTopLeft, 0, 0.0F},
    {1, 3, 1, 3, 9, 5, Causal::kBottomRight, 0, 0.0F},
    {1, 2, 1, 6, 3, 4, Causal::kBottomRight, 0, 0.0F},
    {2, 2, 1, 5, 6, 4, Causal::kNone, 1, 0.0F},
    {1, 2, 2, 4, 5, 3, Causal::kTopLeft, 2, 0.0F},
    {1, 2, 2, 9, 11, 4, Causal::kNone, 0, 0.3F},
    {1, 4, 2, 9, 10, 4, Causal::kTopLeft, 1, 0.2F},
    {1, 1, 1, 1, 1, 1, Causal::kNone, 0, 0.0F},
    {1, 2, 1, 3, 0, 4, Causal::kNone, 0, 0.0F},
    {0, 2, 1, 3, 4, 4, Causal::kNone, 0, 0.0F},
    {1, 2, 1, 0, 4, 4, Causal::kNone, 0, 0.0F},
};

TEST(CpuAttention, Attention) {
  for (const DType dtype : {kFp64, kFp32, kBf16}) {
    for (const Attention& at : kAttentions) {
      AttentionArrays arrays(at, dtype);
      AttentionOptions choices;
      choices.causal = at.causal;
      choices.dropout_p = at.dropout;
      choices.scale = 0.7F;
      choices.want_lse = true;
      OpCall call = make_attention(arrays.inputs(at), choices);
      Array out(dtype, {at.batch, at.heads, at.q, at.dim}, {0, 2, 1, 3});
      Array lse(kFp32, {at.batch, at.heads, at.q});
      set_outputs(call, {&out, &lse});
      run_kernel(cpu_registry(), "cpu.reference", call);
      ASSERT_TRUE(out.guards_hold());
      for (std::int64_t b = 0; b < at.batch; ++b) {
        for (std::int64_t h = 0; h < at.heads; ++h) {
          for (std::int64_t i = 0; i < at.q; ++i) {
            double want_lse = 0;
            const auto weights = attend(at, arrays.q, arrays.k, arrays.mask,
                                        static_cast<double>(0.7F), b, h, i, &want_lse);
            if (std::isinf(want_lse)) {
              EXPECT_EQ(lse.at({b, h, i}), want_lse);
            } else {
              EXPECT_NEAR(lse.at({b, h, i}), want_lse, 1e-6 * (1 + std::abs(want_lse)));
            }
            for (std::int64_t d = 0; d < at.dim; ++d) {
              double want = 0;
              for (std::int64_t j = 0; j < at.kv; ++j) {
                want += weights[static_cast<std::size_t>(j)] * keep(at, b, h, i, j) *
                        arrays.v.at({b, h / (at.heads / at.kv_heads), j, d});
              }
              ASSERT_NEAR(out.at({b, h, i, d}), want, 2 * epsilon(dtype) * (1 + std::abs(want)));
            }
          }
        }
      }
    }
  }
}

// loss = sum(grad_out * attention(q, k, v)), differentiated by small steps in fp64.
TEST(CpuAttention, AttentionBackward) {
  for (const Attention& at : kAttentions) {
    AttentionArrays arrays(at, kFp64);
    std::mt19937 random(4);
    const Dims q_shape{at.batch, at.heads, at.q, at.dim};
    const Dims kv_shape{at.batch, at.kv_heads, at.kv, at.dim};
    Array grad_out(kFp64, q_shape);
    grad_out.fill(random);
    Array out(kFp64, q_shape);
    Array lse(kFp32, {at.batch, at.heads, at.q});
    AttentionOptions choices;
    choices.causal = at.causal;
    choices.dropout_p = at.dropout;
    Array grad_q(kFp64, q_shape);
    Array grad_k(kFp64, kv_shape, {0, 2, 1, 3});
    Array grad_v(kFp64, kv_shape);
    OpCall call = make_attention_backward(grad_out.operand("grad_out"), arrays.inputs(at),
                                          out.operand("out"), lse.operand("lse"), choices);
    set_outputs(call, {&grad_q, &grad_k, &grad_v});
    run_kernel(cpu_registry(), "cpu.reference", call);
    const double scale = static_cast<double>(1.0F / std::sqrt(static_cast<float>(at.dim)));
    const auto loss = [&] {
      double total = 0;
      for (std::int64_t b = 0; b < at.batch; ++b) {
        for (std::int64_t h = 0; h < at.heads; ++h) {
          for (std::int64_t i = 0; i < at.q; ++i) {
            double ignored = 0;
            const auto weights =
                attend(at, arrays.q, arrays.k, arrays.mask, scale, b, h, i, &ignored);
            for (std::int64_t j = 0; j < at.kv; ++j) {
              for (std::int64_t d = 0; d < at.dim; ++d) {
                total += grad_out.at({b, h, i, d}) * weights[static_cast<std::size_t>(j)] *
                         keep(at, b, h, i, j) *
                         arrays.v.at({b, h / (at.heads / at.kv_heads), j, d});
              }
            }
          }
        }
      }
      return total;
    };
    for (const auto& [input, gradient] :
         {std::pair{&arrays.q, &grad_q}, {&arrays.k, &grad_k}, {&arrays.v, &grad_v}}) {
      ASSERT_TRUE(gradient->guards_hold());
      for (std::int64_t i = 0; i < input->count(); ++i) {
        const double here = input->get(i);
        input->set(i, here + 1e-5);
        const double up = loss();
        input->set(i, here - 1e-5);
        const double down = loss();
        input->set(i, here);
        const double slope = (up - down) / 2e-5;
        ASSERT_NEAR(gradient->get(i), slope, 1e-7 * (1 + std::abs(slope)));
      }
    }
  }
}

}  // namespace
}  // namespace xpuruntime::testing
