// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_raw/skinny_matmul_shape.h"

// Which kernel serves a skinny matmul, and in which shape: a pure function of stated facts. The
// numbers in it were measured on an H200.
namespace xpuruntime::cuda_raw::skinny {

struct Facts {
  std::int64_t m, n, k, batch;
  bool transposed;  // b lies in memory as [n, k]
  bool aligned;     // the copy engine can read both operands
  bool hopper;      // compute capability 9.0 or later
  int sm_count;
  int shared_memory_limit;
};

struct Plan {
  bool bulk;     // by the copy engine, else by all threads
  int stages;    // chunks in flight, for the former
  int split;     // blocks of a cluster that share the k of one tile
  int prefetch;  // bytes of each row of b to bring into the L2 cache early
};

/// Calls `body` with the shape of the kernel that uses the copy engine.
template <typename Body>
auto with_bulk_shape(std::int64_t m, bool transposed, Body&& body) {
  if (transposed) {
    if (m <= 8) return body.template operator()<Shape<1, 2, 1, 8, 256, true>>();
    if (m <= 16) return body.template operator()<Shape<2, 2, 2, 4, 128, true>>();
    if (m <= 32) return body.template operator()<Shape<4, 2, 2, 4, 128, true>>();
    return body.template operator()<Shape<8, 2, 2, 4, 128, true>>();
  }
  if (m <= 8) return body.template operator()<Shape<1, 2, 2, 4, 128, false>>();
  if (m <= 16) return body.template operator()<Shape<2, 2, 2, 4, 128, false>>();
  if (m <= 32) return body.template operator()<Shape<4, 2, 2, 4, 128, false>>();
  return body.template operator()<Shape<8, 2, 2, 4, 128, false>>();
}

/// The same for the kernel that does not.
template <typename Body>
auto with_gather_shape(std::int64_t m, bool transposed, Body&& body) {
  if (transposed) {
    if (m <= 8) return body.template operator()<Shape<1, 2, 2, 4, 256, true>>();
    if (m <= 16) return body.template operator()<Shape<2, 2, 2, 4, 256, true>>();
    if (m <= 32) return body.template operator()<Shape<4, 2, 2, 4, 128, true>>();
    return body.template operator()<Shape<8, 2, 2, 4, 128, true>>();
  }
  if (m <= 8) return body.template operator()<Shape<1, 2, 8, 1, 64, false>>();
  if (m <= 16) return body.template operator()<Shape<2, 2, 8, 1, 64, false>>();
  if (m <= 32) return body.template operator()<Shape<4, 2, 8, 1, 64, false>>();
  return body.template operator()<Shape<8, 2, 8, 1, 64, false>>();
}

/// The number of blocks that share a tile: as many as fill the device once, each with a chunk at
/// least. A cluster of more than two does not find room on every SM, so some are left out.
inline int choose_split(std::int64_t tiles, std::int64_t chunks, int sm_count) {
  int split = 1;
  for (const int next : {2, 4, 8}) {
    const std::int64_t room = next == 2 ? sm_count : sm_count - sm_count / 8;
    if (tiles * next > room || next > chunks) break;
    split = next;
  }
  return split;
}

inline Plan choose_plan(const Facts& facts) {
  constexpr int kSharedOfSm = 227 * 1024;
  constexpr int kReservedOfBlock = 1024;
  Plan plan{};
  if (facts.aligned && facts.hopper) {
    with_bulk_shape(facts.m, facts.transposed, [&]<typename S>() {
      const std::int64_t tiles = (facts.n + S::kColumns - 1) / S::kColumns * facts.batch;
      const std::int64_t chunks = (facts.k + S::kChunk - 1) / S::kChunk;
      plan.split = choose_split(tiles, chunks, facts.sm_count);
      const int fixed = bulk_fixed_bytes<S>(plan.split);
      // Two blocks an SM: the second is often the next kernel's, waiting for this one.
      const int room = std::min(facts.shared_memory_limit, kSharedOfSm / 2 - kReservedOfBlock);
      const std::int64_t per_block = (chunks + plan.split - 1) / plan.split;
      int stages = (room - fixed) / S::kStageBytes;
      if (stages < 2) stages = (facts.shared_memory_limit - fixed) / S::kStageBytes;
      plan.stages = static_cast<int>(
          std::min({per_block, static_cast<std::int64_t>(stages), std::int64_t{kMaxStages}}));
      plan.prefetch = facts.transposed && plan.split == 1 ? 1024 : 0;
      plan.bulk = plan.stages >= 1 &&
                  bulk_shared_bytes<S>(plan.stages, plan.split) <= facts.shared_memory_limit;
    });
    if (plan.bulk) return plan;
  }
  plan = Plan{};
  with_gather_shape(facts.m, facts.transposed, [&]<typename S>() {
    const std::int64_t tiles = (facts.n + S::kColumns - 1) / S::kColumns * facts.batch;
    const std::int64_t chunks = (facts.k + S::kChunk - 1) / S::kChunk;
    plan.split = facts.hopper ? choose_split(tiles, chunks, facts.sm_count) : 1;
  });
  return plan;
}

}  // namespace xpuruntime::cuda_raw::skinny
