// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstdint>

namespace xpuruntime::cpu {

/// Which attention weights are dropped: a pure function of (seed, offset, batch * heads + head,
/// row, column), the same as on CUDA, by Philox4x32-10 (Salmon et al., "Parallel random numbers: as
/// easy as 1, 2, 3"). One evaluation gives the words of (row, row + 8) x (column, column + 1);
/// counter and key are those of cuda_raw/philox.cuh.
class Dropout {
 public:
  Dropout() = default;
  /// `p` in [0, 1).
  Dropout(float p, std::int64_t seed, std::int64_t offset)
      : threshold_(static_cast<std::uint32_t>(static_cast<double>(p) * 4294967296.0)),
        factor_(1.0 / (1.0 - static_cast<double>(p))),
        offset_(low(offset)),
        keys_{low(seed), high(seed) ^ high(offset)} {}

  /// What multiplies the weight: 0 or 1 / (1 - p).
  double factor(std::int64_t head, std::int64_t row, std::int64_t column) const noexcept {
    if (threshold_ == 0) return factor_;
    const std::array<std::uint32_t, 4> words =
        philox({low(column) & ~1U, low(row) & ~8U, low(head), offset_});
    const std::size_t word = 2 * ((low(row) >> 3U) & 1U) + (low(column) & 1U);
    return words[word] >= threshold_ ? factor_ : 0.0;
  }

 private:
  static std::uint32_t low(std::int64_t x) noexcept {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x));
  }
  static std::uint32_t high(std::int64_t x) noexcept {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x) >> 32U);
  }

  std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> c) const noexcept {
    std::array<std::uint32_t, 2> k = keys_;
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t a = std::uint64_t{c[0]} * 0xD2511F53U;
      const std::uint64_t b = std::uint64_t{c[2]} * 0xCD9E8D57U;
      c = {static_cast<std::uint32_t>(b >> 32U) ^ c[1] ^ k[0], static_cast<std::uint32_t>(b),
           static_cast<std::uint32_t>(a >> 32U) ^ c[3] ^ k[1], static_cast<std::uint32_t>(a)};
      k = {k[0] + 0x9E3779B9U, k[1] + 0xBB67AE85U};
    }
    return c;
  }

  std::uint32_t threshold_ = 0;
  double factor_ = 1.0;
  std::uint32_t offset_ = 0;
  std::array<std::uint32_t, 2> keys_{};
};

}  // namespace xpuruntime::cpu
