// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace xpuruntime::cuda_raw {

// The dropout mask of attention is a pure function of (seed, offset, bh, row, column), where
// bh = batch * heads + head, row is the query's and column the key's index:
//
//   words = Philox4x32-10 with
//     counter = { column & ~1, row & ~8, low32(bh), low32(offset) }
//     key     = { low32(seed), high32(seed) ^ high32(offset) }
//   word    = words[2 * (row >> 3 & 1) + (column & 1)]
//   the weight is kept, and multiplied by 1 / (1 - p), when word >= dropout_threshold(p)
//
// So one evaluation serves the 2 x 2 elements (row, row + 8) x (column, column + 1) that one thread
// holds of an accumulator of the tensor cores.

struct PhiloxWords {
  std::uint32_t word[4];
};

/// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
__host__ __device__ inline PhiloxWords philox4x32(std::uint32_t c0, std::uint32_t c1,
                                                  std::uint32_t c2, std::uint32_t c3,
                                                  std::uint32_t k0, std::uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = static_cast<std::uint64_t>(c0) * 0xD2511F53u;
    const std::uint64_t b = static_cast<std::uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(b);
    c3 = static_cast<std::uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// The words of the 2 x 2 block that holds (row, column): see above.
__host__ __device__ inline PhiloxWords dropout_words(std::int64_t seed, std::int64_t offset,
                                                     std::int64_t bh, std::uint32_t row,
                                                     std::uint32_t column) {
  const auto low = [](std::int64_t x) {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x));
  };
  const auto high = [](std::int64_t x) {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(x) >> 32);
  };
  return philox4x32(column & ~1u, row & ~8u, low(bh), low(offset), low(seed),
                    high(seed) ^ high(offset));
}

/// The smallest word that keeps a weight: p * 2^32. `p` is in [0, 1).
__host__ __device__ inline std::uint32_t dropout_threshold(float p) {
  return static_cast<std::uint32_t>(static_cast<double>(p) * 4294967296.0);
}

}  // namespace xpuruntime::cuda_raw
