// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <limits>
#include <string>

#include "cpu/blas.h"
#include "cpu/element.h"
#include "cpu/gemm.h"
#include "cpu/thread_pool.h"
#include "cpu/view.h"

namespace xpuruntime::cpu {
namespace {

using Slot = slots::Matmul;

// Elements of a block that bias and activation are applied to while it is in the cache.
constexpr std::int64_t kHotBlock = 256 * 1024;
// Multiplications that take about as long as one step of parallel_for.
constexpr std::int64_t kPerStep = 64;

/// How a product is cut.
struct Grid {
  std::int64_t rows = 1, columns = 1;  ///< of one block
};

std::int64_t pieces(std::int64_t length, std::int64_t piece) {
  return (length + piece - 1) / piece;
}

/// At least `parts` blocks of whole multiples of 16, as square as can be, none above `most`.
Grid cut(std::int64_t m, std::int64_t n, std::int64_t parts, std::int64_t most) {
  const auto block = [](std::int64_t length, std::int64_t count) {
    return std::clamp<std::int64_t>((pieces(length, count) + 15) / 16 * 16, 1,
                                    std::max<std::int64_t>(length, 1));
  };
  Grid best{block(m, 1), block(n, 1)};
  std::int64_t best_area = best.rows * best.columns;
  for (std::int64_t i = 1; i <= parts; ++i) {
    const Grid grid{block(m, i), block(n, pieces(parts, i))};
    const std::int64_t area = grid.rows * grid.columns;
    if (area < best_area ||
        (area == best_area && grid.rows + grid.columns < best.rows + best.columns)) {
      best = grid;
      best_area = area;
    }
  }
  while (best.rows * best.columns > most) {
    std::int64_t& longer = best.rows > best.columns ? best.rows : best.columns;
    longer = (longer / 2 + 15) / 16 * 16;
  }
  return best;
}

template <typename T>
class BlasMatmul final : public Kernel {
 public:
  explicit BlasMatmul(const OpDesc& op) : op_(op), blas_(OpenBlas::get()) {
    const View a = view(op, Slot::kA, nullptr);
    const View b = view(op, Slot::kB, nullptr);
    const View c = view(op, Slot::kOut, nullptr);
    product_.m = c.shape[2];
    product_.n = c.shape[3];
    product_.k = a.shape[3];
    product_.a_layout = *matrix_layout(product_.m, product_.k, a.strides[2], a.strides[3]);
    product_.b_layout = *matrix_layout(product_.k, product_.n, b.strides[2], b.strides[3]);
    product_.c_layout = *matrix_layout(product_.m, product_.n, c.strides[2], c.strides[3]);
    product_.activation = op.attributes.activation;
    batch_ = c.shape[1];
    batch_strides_[0] = a.strides[1];
    batch_strides_[1] = b.strides[1];
    batch_strides_[2] = c.strides[1];
    const bool finishes = op.has(Slot::kBias) || op.attributes.activation != Activation::kNone;
    const std::int64_t threads = thread_count();
    const std::int64_t parts =
        batch_ >= threads ? 1 : pieces(threads, std::max<std::int64_t>(batch_, 1));
    grid_ = cut(product_.m, product_.n, parts,
                finishes ? kHotBlock : std::numeric_limits<std::int64_t>::max());
  }

  void launch(void* const* operands, void* /*workspace*/, StreamHandle /*stream*/) const override {
    Product<T> whole = product_;
    whole.column_bias = static_cast<const T*>(operands[Slot::kBias]);
    const std::int64_t rows = pieces(whole.m, grid_.rows);
    const std::int64_t columns = pieces(whole.n, grid_.columns);
    const std::int64_t steps = batch_ * (whole.m * whole.n * whole.k / kPerStep + 64);
    parallel_for(batch_ * rows * columns, steps, [&](std::int64_t task, int) {
      const std::int64_t batch = task / (rows * columns);
      const std::int64_t row = task % rows * grid_.rows;
      const std::int64_t column = task / rows % columns * grid_.columns;
      Product<T> product = whole;
      product.a = static_cast<const T*>(operands[Slot::kA]) + batch * batch_strides_[0];
      product.b = static_cast<const T*>(operands[Slot::kB]) + batch * batch_strides_[1];
      product.c = static_cast<T*>(operands[Slot::kOut]) + batch * batch_strides_[2];
      multiply_block(blas_, product, row, std::min(grid_.rows, whole.m - row), column,
                     std::min(grid_.columns, whole.n - column));
    });
  }

 private:
  const OpDesc op_;
  const OpenBlas& blas_;
  Product<T> product_;
  std::int64_t batch_ = 1;
  std::int64_t batch_strides_[3] = {};
  Grid grid_;
};

}  // namespace

Support blas_matmul_supports(const OpDesc& op) {
  const Element element = *element_of(op[Slot::kA].dtype);
  if (element != Element::kFp32 && element != Element::kFp64) {
    return Support::no("OpenBLAS multiplies fp32 and fp64, and this is " +
                       to_string(op[Slot::kA].dtype));
  }
  for (const std::size_t slot :
       {std::size_t{Slot::kA}, std::size_t{Slot::kB}, std::size_t{Slot::kOut}}) {
    const View matrix = view(op, slot, nullptr);
    if (matrix_layout(matrix.shape[2], matrix.shape[3], matrix.strides[2], matrix.strides[3])) {
      continue;
    }
    return Support::no(
        "needs one of the last two strides of '" + std::string(slot_name(op.kind, slot)) +
        "' to be 1 and the other at least as long as a row, and they are " +
        std::to_string(matrix.strides[2]) + " and " + std::to_string(matrix.strides[3]));
  }
  const View bias = view(op, Slot::kBias, nullptr);
  if (bias && bias.shape[3] > 1 && bias.strides[3] != 1) {
    return Support::no("needs a contiguous bias, and its stride is " +
                       std::to_string(bias.strides[3]));
  }
  return Support::yes();
}

std::unique_ptr<const Kernel> blas_matmul(const OpDesc& op) {
  if (*element_of(op[Slot::kA].dtype) == Element::kFp64) {
    return std::make_unique<BlasMatmul<double>>(op);
  }
  return std::make_unique<BlasMatmul<float>>(op);
}

}  // namespace xpuruntime::cpu
