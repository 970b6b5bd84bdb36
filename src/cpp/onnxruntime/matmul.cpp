// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <algorithm>
#include <utility>

#include "operation.h"
#include "xpuruntime/error.h"
#include "xpuruntime/matmul_op.h"

namespace xpuruntime::ort {
namespace {

using Slot = slots::Matmul;

Operand transposed(Operand matrix, bool wanted) {
  if (wanted && !matrix.absent && matrix.rank >= 2) {
    std::swap(matrix.shape[matrix.rank - 1U], matrix.shape[matrix.rank - 2U]);
    std::swap(matrix.strides[matrix.rank - 1U], matrix.strides[matrix.rank - 2U]);
  }
  return matrix;
}

Dim broadcast(const Dim& left, const Dim& right) {
  if (left == right || right.value == 1) return left;
  if (left.value == 1) return right;
  // Of two that fit, one that is known to be more than 1 is the result.
  if (left.known()) return left;
  return right.known() ? right : Dim{};
}

class MatMul final : public Operation {
 public:
  explicit MatMul(const Attributes& attributes)
      : trans_a_(attributes.flag("trans_a")), trans_b_(attributes.flag("trans_b")) {
    options_.activation = activation_of(attributes);
    options_.allow_tf32 = attributes.flag("allow_tf32");
    options_.deterministic = attributes.flag("deterministic");
  }

  Prepared prepare(std::span<const Operand> inputs) const override {
    Prepared made;
    made.call = make_matmul(
        {transposed(inputs[0], trans_a_), transposed(inputs[1], trans_b_), inputs[2], {}, {}},
        options_);
    made.out = contiguous_output(made.call);
    made.shape = made.out.shape;
    made.rank = made.out.rank;
    return made;
  }

  SymbolicShape infer(std::span<const SymbolicShape> inputs) const override {
    if (!inputs[0] || !inputs[1]) return std::nullopt;
    std::vector<Dim> a = *inputs[0];
    std::vector<Dim> b = *inputs[1];
    if (a.size() < 2 || b.size() < 2) return std::nullopt;
    if (trans_a_) std::swap(a[a.size() - 1], a[a.size() - 2]);
    if (trans_b_) std::swap(b[b.size() - 1], b[b.size() - 2]);
    const std::size_t rank = std::max(a.size(), b.size());
    std::vector<Dim> out(rank);
    for (std::size_t i = 2; i < rank; ++i) {  // from the end
      if (i >= a.size() || i >= b.size()) {
        out[rank - 1 - i] = i >= a.size() ? b[b.size() - 1 - i] : a[a.size() - 1 - i];
      } else {
        out[rank - 1 - i] = broadcast(a[a.size() - 1 - i], b[b.size() - 1 - i]);
      }
    }
    out[rank - 2] = a[a.size() - 2];
    out[rank - 1] = b[b.size() - 1];
    return out;
  }

 private:
  MatmulOptions options_;
  bool trans_a_, trans_b_;
};

constexpr std::array kInputs{InputSpec{"A", Slot::kA}, InputSpec{"B", Slot::kB},
                             InputSpec{"bias", Slot::kBias, InputTypes::kSame, true}};
constexpr std::array kAttributes{AttributeSpec{"activation", "string"},
                                 AttributeSpec{"trans_a", "int"}, AttributeSpec{"trans_b", "int"},
                                 AttributeSpec{"allow_tf32", "int"}};

std::unique_ptr<const Operation> make(const Attributes& attributes) {
  return std::make_unique<MatMul>(attributes);
}

}  // namespace

const OpSpec kMatMul{"MatMul", kInputs, kAttributes, make};

}  // namespace xpuruntime::ort
