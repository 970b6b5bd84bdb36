// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>

#include "cpu/dropout.h"
#include "cpu/view.h"
#include "xpuruntime/op.h"

namespace xpuruntime::cpu {

/// What attention and its gradient have in common. Indices: query head `h` of batch `b` reads the
/// head `h / group()` of k and v.
struct AttentionRows {
  View q, k, v, mask;
  Causal causal = Causal::kNone;
  double scale = 1.0;
  Dropout dropout;

  std::int64_t batch() const noexcept { return q.shape[0]; }
  std::int64_t heads() const noexcept { return q.shape[1]; }
  std::int64_t q_length() const noexcept { return q.shape[2]; }
  std::int64_t kv_length() const noexcept { return k.shape[2]; }
  std::int64_t head_dim() const noexcept { return q.shape[3]; }
  std::int64_t group() const noexcept { return heads() / k.shape[1]; }

  /// How many keys, counted from the first, the row may see.
  std::int64_t visible(std::int64_t row) const noexcept;
  /// Into `weights` (kv_length) the softmax of one row, before dropout, from its query in `query`
  /// (head_dim); `scratch` holds head_dim. A row that sees nothing gets zeros. Returns the natural
  /// logarithm of the sum of exponentials, -infinity for such a row.
  double softmax_weights(std::int64_t b, std::int64_t h, std::int64_t row, const double* query,
                         double* weights, double* scratch) const noexcept;
};

/// `rng` is the slot of seed and offset; they are read now.
AttentionRows attention_rows(const OpDesc& op, void* const* operands, std::size_t q, std::size_t k,
                             std::size_t v, std::size_t mask, std::size_t rng);

}  // namespace xpuruntime::cpu
