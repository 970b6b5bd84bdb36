// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/attention_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace xpuruntime::cpu {

std::int64_t AttentionRows::visible(std::int64_t row) const noexcept {
  switch (causal) {
    case Causal::kNone:
      return kv_length();
    case Causal::kTopLeft:
      return std::min(kv_length(), row + 1);
    case Causal::kBottomRight:
      return std::clamp<std::int64_t>(row + 1 + kv_length() - q_length(), 0, kv_length());
  }
  return kv_length();
}

double AttentionRows::softmax_weights(std::int64_t b, std::int64_t h, std::int64_t row,
                                      const double* query, double* weights,
                                      double* scratch) const noexcept {
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  const std::int64_t seen = visible(row);
  double largest = kNothing;
  for (std::int64_t j = 0; j < seen; ++j) {
    const double masked = mask ? mask.get(b, h, row, j) : 0.0;
    if (mask && mask.element == Element::kBool && masked == 0.0) {
      weights[j] = kNothing;
      continue;
    }
    k.get_row(b, h / group(), j, scratch);
    double score = 0;
    for (std::int64_t d = 0; d < head_dim(); ++d) score += query[d] * scratch[d];
    score *= scale;
    if (mask && mask.element != Element::kBool) score += masked;
    weights[j] = score;
    // A NaN must not be lost in the comparison.
    if (!(score <= largest)) largest = score;
  }
  if (largest == kNothing) {
    std::fill(weights, weights + kv_length(), 0.0);
    return kNothing;
  }
  double sum = 0;
  for (std::int64_t j = 0; j < seen; ++j) sum += weights[j] = std::exp(weights[j] - largest);
  for (std::int64_t j = 0; j < seen; ++j) weights[j] /= sum;
  std::fill(weights + seen, weights + kv_length(), 0.0);
  return largest + std::log(sum);
}

AttentionRows attention_rows(const OpDesc& op, void* const* operands, std::size_t q, std::size_t k,
                             std::size_t v, std::size_t mask, std::size_t rng) {
  AttentionRows rows;
  rows.q = view(op, q, operands);
  rows.k = view(op, k, operands);
  rows.v = view(op, v, operands);
  rows.mask = view(op, mask, operands);
  rows.causal = op.attributes.causal;
  rows.scale = op.attributes.scale;
  if (op.attributes.dropout_p > 0.0F) {
    const auto* words = static_cast<const std::int64_t*>(operands[rng]);
    rows.dropout = Dropout(op.attributes.dropout_p, words[0], words[1]);
  }
  return rows;
}

}  // namespace xpuruntime::cpu
