// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cpu/vector_code.h"
#include "cpu_kernels.h"
#include "xpuruntime/norm_op.h"

namespace xpuruntime::testing {
namespace {

struct Norm {
  std::int64_t rows, columns;
  bool rms, residual, affine;
  DType weight_dtype;
};

void check_norm(const std::string& id, DType dtype, const Norm& at, double offset,
                bool in_place = false) {
  std::mt19937 random(static_cast<unsigned>(at.rows * 31 + at.columns));
  const std::vector<std::size_t> plain{0, 1};
  Array x(dtype, {at.rows, at.columns}, plain, 0, 5);
  Array residual(dtype, {at.rows, at.columns}, plain, 0, 2);
  Array weight(at.weight_dtype, {at.columns});
  Array bias(at.weight_dtype, {at.columns});
  Array y(dtype, {at.rows, at.columns}, plain, 0, 1);
  Array sum(dtype, {at.rows, at.columns});
  const DType stats_dtype = dtype == kFp64 ? kFp64 : kFp32;
  Array mean(stats_dtype, {at.rows}, {}, 1);
  Array rstd(stats_dtype, {at.rows});
  x.fill(random);
  for (std::int64_t i = 0; i < x.count(); ++i) x.set(i, x.get(i) + offset);
  residual.fill(random);
  weight.fill(random);
  bias.fill(random);
  const bool biased = at.affine && !at.rms;
  const Array x_before = x;
  OpCall call =
      make_norm({.x = x.operand("x"),
                 .residual = at.residual ? residual.operand("residual") : Operand{},
                 .weight = at.affine ? weight.operand("weight") : Operand{},
                 .bias = biased ? bias.operand("bias") : Operand{}},
                {.epsilon = 1e-5F, .rms = at.rms, .want_sum = at.residual, .want_stats = true});
  std::vector<Array*> outputs{in_place ? &x : &y};
  if (at.residual) outputs.push_back(&sum);
  if (!at.rms) outputs.push_back(&mean);
  outputs.push_back(&rstd);
  set_outputs(call, outputs);
  run_kernel(cpu_registry(), id, call);
  for (const Array* out : outputs) ASSERT_TRUE(out->guards_hold());
  for (std::int64_t i = 0; i < at.rows; ++i) {
    std::vector<double> s;
    double total = 0;
    double largest = 0;
    for (std::int64_t j = 0; j < at.columns; ++j) {
      s.push_back(x_before.at({i, j}) + (at.residual ? residual.at({i, j}) : 0.0));
      total += s.back();
      largest = std::max(largest, std::abs(s.back()));
    }
    const double middle = at.rms ? 0.0 : total / static_cast<double>(at.columns);
    double squares = 0;
    for (const double one : s) squares += (one - middle) * (one - middle);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(at.columns) + 1e-5);
    EXPECT_NEAR(rstd.get(i), factor, 1e-5 * factor + 1e-5 * offset * offset * 0x1p-20);
    if (!at.rms) {
      EXPECT_NEAR(mean.get(i), middle, 1e-6 * (1 + largest));
    }
    for (std::int64_t j = 0; j < at.columns; ++j) {
      const double normal = (s[static_cast<std::size_t>(j)] - middle) * factor;
      const double want = normal * (at.affine ? weight.get(j) : 1.0) + (biased ? bias.get(j) : 0.0);
      const double size =
          std::abs(want) + std::abs(normal) + 1.0 + 4 * 0x1p-24 / epsilon(dtype) * largest * factor;
      ASSERT_NEAR(outputs[0]->at({i, j}), want, 4 * epsilon(dtype) * size)
          << id << " " << i << " " << j;
      if (at.residual) {
        ASSERT_NEAR(sum.at({i, j}), s[static_cast<std::size_t>(j)],
                    epsilon(dtype) * (largest + 1e-3));
      }
    }
  }
}

TEST(CpuNorm, Norms) {
  for (const char* id : {"cpu.reference", "cpu.vectorised"}) {
    for (const DType dtype : {kFp32, kFp16, kBf16, kFp64}) {
      if (dtype == kFp64 && id == std::string("cpu.vectorised")) continue;
      for (const bool rms : {false, true}) {
        for (const bool residual : {false, true}) {
          for (const std::int64_t columns : {1, 2, 15, 16, 17, 64, 129, 1000}) {
            check_norm(id, dtype, {3, columns, rms, residual, true, dtype}, 0.0);
          }
          check_norm(id, dtype, {40, 33, rms, residual, true, kFp32}, 1.0);
          check_norm(id, dtype, {2, 20000, rms, residual, false, dtype}, 0.0);
          check_norm(id, dtype, {0, 7, rms, residual, true, dtype}, 0.0);
          check_norm(id, dtype, {70, 300, rms, residual, true, dtype}, 0.0, true);
        }
      }
    }
    check_norm(id, kFp32, {5, 999, false, false, true, kFp32}, 1e4);
  }
}

TEST(CpuNorm, NormsThatVectorsCannotServe) {
  Array x(kFp32, {4, 6}, {0, 1}, 1);
  Array y(kFp32, {4, 6});
  OpCall call = make_norm({.x = x.operand("x"), .residual = {}, .weight = {}, .bias = {}}, {});
  set_outputs(call, {&y});
  EXPECT_THROW(run_kernel(cpu_registry(), "cpu.vectorised", call), UnsupportedOperationError);
  run_kernel(cpu_registry(), "cpu.reference", call);
  Array wide(kFp64, {4, 6});
  OpCall other = make_norm({.x = wide.operand("x"), .residual = {}, .weight = {}, .bias = {}}, {});
  EXPECT_THROW(run_kernel(cpu_registry(), "cpu.vectorised", other), UnsupportedOperationError);
}

// loss = sum(grad_y * norm(x)) + sum(grad_sum * x), differentiated by small steps in fp64.
void check_norm_backward(const std::string& id, DType dtype, std::int64_t rows,
                         std::int64_t columns, bool rms, bool in_place) {
  std::mt19937 random(static_cast<unsigned>(rows * 7 + columns));
  Array x(dtype, {rows, columns}, {0, 1}, 0, 3);
  Array grad_y(dtype, {rows, columns}, {0, 1}, 0, 1);
  Array grad_sum(dtype, {rows, columns});
  Array weight(dtype, {columns});
  const DType stats_dtype = dtype == kFp64 ? kFp64 : kFp32;
  Array mean(stats_dtype, {rows});
  Array rstd(stats_dtype, {rows});
  Array grad_x(dtype, {rows, columns});
  Array grad_weight(dtype, {columns});
  Array grad_bias(dtype, {columns});
  x.fill(random);
  grad_y.fill(random);
  grad_sum.fill(random);
  weight.fill(random);
  const auto stats = [&](std::int64_t i, const std::vector<double>& row) {
    double m = 0;
    for (const double v : row) m += v / static_cast<double>(columns);
    if (rms) m = 0;
    double squares = 0;
    for (const double v : row) squares += (v - m) * (v - m);
    static_cast<void>(i);
    return std::pair{m, 1 / std::sqrt(squares / static_cast<double>(columns) + 1e-5)};
  };
  const auto row_of = [&](const Array& array, std::int64_t i) {
    std::vector<double> row;
    for (std::int64_t j = 0; j < columns; ++j) row.push_back(array.at({i, j}));
    return row;
  };
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto [m, r] = stats(i, row_of(x, i));
    mean.set(i, m);
    rstd.set(i, r);
  }
  const Array x0 = x;
  const Array g0 = grad_y;
  OpCall call = make_norm_backward({.grad_y = grad_y.operand("grad_y"),
                                    .x = x.operand("x"),
                                    .weight = weight.operand("weight"),
                                    .mean = rms ? Operand{} : mean.operand("mean"),
                                    .rstd = rstd.operand("rstd"),
                                    .grad_sum = grad_sum.operand("grad_sum")},
                                   {.rms = rms, .want_weight = true, .want_bias = !rms});
  Array& out = in_place ? grad_y : grad_x;
  std::vector<Array*> outputs{&out, &grad_weight};
  if (!rms) outputs.push_back(&grad_bias);
  set_outputs(call, outputs);
  run_kernel(cpu_registry(), id, call);
  for (const Array* one : outputs) ASSERT_TRUE(one->guards_hold());
  std::vector<double> of_weight(static_cast<std::size_t>(columns));
  std::vector<double> of_bias(static_cast<std::size_t>(columns));
  std::vector<double> sizes(static_cast<std::size_t>(columns), 1e-3);
  for (std::int64_t i = 0; i < rows; ++i) {
    std::vector<double> row = row_of(x0, i);
    const auto loss = [&] {
      const auto [m, r] = stats(i, row);
      double total = 0;
      for (std::int64_t j = 0; j < columns; ++j) {
        const double v = row[static_cast<std::size_t>(j)];
        total += g0.at({i, j}) * (v - m) * r * weight.get(j) + grad_sum.at({i, j}) * v;
      }
      return total;
    };
    const auto [m, r] = stats(i, row);
    for (std::int64_t j = 0; j < columns; ++j) {
      const auto at = static_cast<std::size_t>(j);
      const double term = g0.at({i, j}) * (row[at] - m) * r;
      of_weight[at] += term;
      of_bias[at] += g0.at({i, j});
      sizes[at] += std::abs(term) + std::abs(g0.at({i, j}));
      const double here = row[at];
      row[at] = here + 1e-4;
      const double up = loss();
      row[at] = here - 1e-4;
      const double down = loss();
      row[at] = here;
      const double slope = (up - down) / 2e-4;
      ASSERT_NEAR(out.at({i, j}), slope,
                  8 * (epsilon(dtype) + 2e-7) * (4 + std::abs(slope)) * (1 + r))
          << id << " " << i << " " << j;
    }
  }
  for (std::int64_t j = 0; j < columns; ++j) {
    const auto at = static_cast<std::size_t>(j);
    ASSERT_NEAR(grad_weight.get(j), of_weight[at], (epsilon(dtype) + 1e-6) * sizes[at]);
    if (!rms) {
      ASSERT_NEAR(grad_bias.get(j), of_bias[at], (epsilon(dtype) + 1e-6) * sizes[at]);
    }
  }
}

TEST(CpuNorm, NormBackward) {
  for (const char* id : {"cpu.reference", "cpu.vectorised"}) {
    for (const DType dtype : {kFp32, kBf16, kFp16}) {
      for (const bool rms : {false, true}) {
        for (const std::int64_t columns : {2, 16, 19, 130}) {
          check_norm_backward(id, dtype, 3, columns, rms, false);
        }
        check_norm_backward(id, dtype, 200, 33, rms, true);
        check_norm_backward(id, dtype, 0, 5, rms, false);
      }
    }
  }
}

// Every instruction set that this processor has gives what the widest gives.
TEST(CpuNorm, InstructionSetsAgree) {
  constexpr std::int64_t columns = 77;
  constexpr std::int64_t length = cpu::padded(columns);
  std::mt19937 random(8);
  Array x(kFp32, {6, columns});
  Array grad(kFp32, {6, columns});
  x.fill(random);
  grad.fill(random);
  const auto* const x_data = static_cast<const float*>(x.operand("x").data);
  const std::vector<float> weight(length, 1.5F);
  const std::vector<float> bias(length, -0.25F);
  const auto results = [&](const cpu::VectorCode& code) {
    std::vector<float> out(static_cast<std::size_t>(3 * 6 * columns + 12 + 2 * length));
    float* const y = out.data();
    float* const grad_x = y + 6 * columns;
    float* const finished = grad_x + 6 * columns;
    float* const mean = finished + 6 * columns;
    float* const rstd = mean + 6;
    std::vector<float> scratch(2 * length);
    cpu::NormRows rows{};
    rows.columns = columns;
    rows.centred = true;
    rows.epsilon = 1e-5F;
    rows.x = x_data;
    rows.y = y;
    rows.mean = mean;
    rows.rstd = rstd;
    rows.weight = weight.data();
    rows.bias = bias.data();
    rows.x_stride = rows.y_stride = columns;
    rows.mean_stride = rows.rstd_stride = 1;
    code.norm[0](rows, 0, 6, scratch.data());
    cpu::NormBackwardRows back{};
    back.columns = columns;
    back.centred = true;
    back.grad_y = grad.operand("grad").data;
    back.x = x_data;
    back.weight = weight.data();
    back.mean = mean;
    back.rstd = rstd;
    back.grad_x = grad_x;
    back.grad_y_stride = back.x_stride = back.grad_x_stride = columns;
    back.mean_stride = back.rstd_stride = 1;
    code.norm_backward[0](back, 0, 6, scratch.data(), rstd + 6);
    std::copy(x_data, x_data + 6 * columns, finished);
    code.finish({.data = finished,
                 .rows = 6,
                 .columns = columns,
                 .stride = columns,
                 .row_bias = nullptr,
                 .column_bias = bias.data(),
                 .activation = Activation::kGelu});
    return out;
  };
  const std::vector<float> want = results(cpu::vector_code());
  const cpu::VectorCodes codes = cpu::all_vector_code();
  int checked = 0;
  for (int i = 0; i < codes.count; ++i) {
    if (!cpu::can_run(*codes.code[i])) continue;
    const std::vector<float> got = results(*codes.code[i]);
    for (std::size_t j = 0; j < want.size(); ++j) {
      ASSERT_NEAR(got[j], want[j], 1e-5F) << codes.code[i]->instructions << " " << j;
    }
    ++checked;
  }
  EXPECT_GE(checked, 1);
}

}  // namespace
}  // namespace xpuruntime::testing
