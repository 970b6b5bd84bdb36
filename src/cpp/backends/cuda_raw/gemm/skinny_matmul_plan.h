// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_raw/gemm/skinny_matmul_shape.h"

// Which kernel serves a skinny matmul, and in which shape: a pure function of stated facts, so that
// the same call gets the same sums. What it weighs was fitted to runs on an H200.
namespace xpuruntime::cuda_raw::skinny {

struct Facts {
  std::int64_t m, n, k, batch;
  bool transposed;  // b lies in memory as [n, k]
  bool aligned;     // the copy engine can read both operands
  bool hopper;      // compute capability 9.0 or later
  int sm_count;
  int shared_memory_limit;  // bytes a block
};

struct Plan {
  bool bulk;     // by the copy engine, else by all threads
  int columns;   // of a tile
  int stages;    // chunks in flight, with the copy engine
  int split;     // blocks of a cluster that share the k of one tile
  int prefetch;  // bytes of each row of b to bring into the L2 cache early
};

inline constexpr int kSharedOfSm = 227 * 1024;
inline constexpr int kReservedOfBlock = 1024;

/// Calls visit.operator()<Shape>() for the shapes of the kernel that uses the copy engine, narrow
/// tiles first. Wide tiles read a less often and do not fill the device where n is small.
template <int kMTiles, typename Visit>
void for_bulk_shapes_of(bool transposed, Visit&& visit) {
  if (transposed) {
    visit.template operator()<Shape<kMTiles, 2, 1, 8, 256, true>>();
    visit.template operator()<Shape<kMTiles, 2, 2, 4, 128, true>>();
    visit.template operator()<Shape<kMTiles, 2, 3, 2, 128, true>>();
    visit.template operator()<Shape<kMTiles, 2, 4, 2, 128, true>>();
  } else {
    visit.template operator()<Shape<kMTiles, 2, 2, 4, 128, false>>();
    visit.template operator()<Shape<kMTiles, 2, 4, 2, 64, false>>();
  }
}
template <typename Visit>
void for_bulk_shapes(std::int64_t m, bool transposed, Visit&& visit) {
  if (m <= 8) return for_bulk_shapes_of<1>(transposed, visit);
  if (m <= 16) return for_bulk_shapes_of<2>(transposed, visit);
  if (m <= 32) return for_bulk_shapes_of<4>(transposed, visit);
  for_bulk_shapes_of<8>(transposed, visit);
}

/// Calls visit.operator()<Shape>() for the shape of the kernel that does not use it.
template <typename Visit>
void with_gather_shape(std::int64_t m, bool transposed, Visit&& visit) {
  if (transposed) {
    if (m <= 8) return visit.template operator()<Shape<1, 2, 2, 4, 256, true>>();
    if (m <= 16) return visit.template operator()<Shape<2, 2, 2, 4, 256, true>>();
    if (m <= 32) return visit.template operator()<Shape<4, 2, 2, 4, 128, true>>();
    return visit.template operator()<Shape<8, 2, 2, 4, 128, true>>();
  }
  if (m <= 8) return visit.template operator()<Shape<1, 2, 8, 1, 64, false>>();
  if (m <= 16) return visit.template operator()<Shape<2, 2, 8, 1, 64, false>>();
  if (m <= 32) return visit.template operator()<Shape<4, 2, 8, 1, 64, false>>();
  return visit.template operator()<Shape<8, 2, 8, 1, 64, false>>();
}

/// The most blocks of which all clusters are on the device at once: large ones leave SMs out.
inline std::int64_t blocks_at_once(int split, std::int64_t sm_count) {
  if (split <= 2) return sm_count;
  return split == 4 ? sm_count * 10 / 11 : sm_count * 11 / 13;
}

inline std::int64_t tiles_of(const Facts& facts, int columns) {
  return (facts.n + columns - 1) / columns * facts.batch;
}

/// About how many microseconds the copy engine's kernel takes.
inline double estimate(const Facts& facts, int columns, int split) {
  constexpr double kStart = 1.9;        // from the end of the kernel ahead to the first sum
  constexpr double kWave = 0.1;         // for each wave of blocks after the first
  constexpr double kDevice = 4.4e6;     // bytes a microsecond from memory,
  constexpr double kCache = 5.5e6;      // from the L2 cache,
  constexpr double kExchange = 2.0e4;   // and between the blocks of a cluster
  constexpr double kUnevenness = 0.25;  // how much of SMs idle in the last wave is felt
  const double of_sm = facts.m <= 8 ? 6.0e4 : facts.m <= 16 ? 5.5e4 : facts.m <= 32 ? 4.3e4 : 2.8e4;
  const double exchange = split == 1 ? 0.0 : split == 2 ? 0.4 : split == 4 ? 0.6 : 0.8;

  const auto number = [](std::int64_t x) { return static_cast<double>(x); };
  const std::int64_t tiles = tiles_of(facts, columns);
  const double b = 2.0 * number(facts.n) * number(facts.k) * number(facts.batch);
  const double a = 2.0 * number(facts.m) * number(facts.k) * number(tiles);
  const std::int64_t waves = (tiles * split + facts.sm_count - 1) / facts.sm_count;
  const double uneven = number(waves * facts.sm_count) / number(tiles * split);
  // The next kernel's blocks, which start early, fit beside few without sharing SMs unevenly.
  const bool few = 2 * tiles * split <= facts.sm_count;
  const double idle = few ? 0.0 : kUnevenness * (uneven - 1.0);
  const double stream = std::max(b / kDevice, (a + b) / kCache) * (1.0 + idle);
  const double busiest_sm = number(waves) * 2.0 * columns * number(facts.k) / split / of_sm;
  return kStart + exchange + kWave * number(waves - 1) + std::max(stream, busiest_sm) +
         4.0 * columns * number(facts.m) * (split - 1) / split / kExchange;
}

/// The plan for one shape of the copy engine's kernel; `bulk` is false where it does not fit.
template <typename S>
Plan plan_bulk(const Facts& facts) {
  const std::int64_t tiles = tiles_of(facts, S::kColumns);
  const std::int64_t chunks = (facts.k + S::kChunk - 1) / S::kChunk;
  Plan plan{};
  plan.columns = S::kColumns;
  plan.split = 1;
  for (const int split : {2, 4, 8}) {
    if (split > chunks || tiles * split > blocks_at_once(split, facts.sm_count)) break;
    if (estimate(facts, S::kColumns, split) < estimate(facts, S::kColumns, plan.split)) {
      plan.split = split;
    }
  }
  // Several waves want two blocks an SM, and so do few blocks: the next kernel's then start early.
  // Between the two, where long blocks would share SMs with the next kernel's unevenly, three do
  // best.
  const std::int64_t blocks = tiles * plan.split;
  const std::int64_t chunks_of_block = (chunks + plan.split - 1) / plan.split;
  const bool one_wave = blocks <= facts.sm_count;
  int blocks_of_sm = 2;
  if (one_wave && 4 * blocks >= 3 * facts.sm_count) {
    blocks_of_sm = 1;
  } else if (one_wave && 3 * blocks >= 2 * facts.sm_count && chunks_of_block > 8) {
    blocks_of_sm = 3;
  }
  const int most = std::min(facts.shared_memory_limit,
                            (kSharedOfSm + kReservedOfBlock) / blocks_of_sm - kReservedOfBlock);
  const int fixed = bulk_fixed_bytes<S>(plan.split);
  int stages = (most - fixed) / S::kStageBytes;
  if (stages < 2) stages = (facts.shared_memory_limit - fixed) / S::kStageBytes;
  // With much of a to read as well, more in flight only crowds the L2 cache.
  if (S::kMTiles > 4) stages = std::min(stages, 4);
  plan.stages =
      static_cast<int>(std::min({chunks_of_block, std::int64_t{stages}, std::int64_t{kMaxStages}}));
  plan.prefetch = facts.transposed ? 512 : 0;
  plan.bulk = plan.stages >= 1 &&
              bulk_shared_bytes<S>(plan.stages, plan.split) <= facts.shared_memory_limit;
  return plan;
}

inline Plan choose_plan(const Facts& facts) {
  Plan best{};
  if (facts.aligned && facts.hopper) {
    double least = 0;
    for_bulk_shapes(facts.m, facts.transposed, [&]<typename S>() {
      const Plan plan = plan_bulk<S>(facts);
      const double time = estimate(facts, plan.columns, plan.split);
      if (plan.bulk && (!best.bulk || time < least)) {
        best = plan;
        least = time;
      }
    });
    if (best.bulk) return best;
  }
  with_gather_shape(facts.m, facts.transposed, [&]<typename S>() {
    const std::int64_t tiles = tiles_of(facts, S::kColumns);
    const std::int64_t chunks = (facts.k + S::kChunk - 1) / S::kChunk;
    const std::int64_t sms = std::int64_t{kGatherBlocksOfSm<S>} * facts.sm_count;
    best.columns = S::kColumns;
    best.split = 1;
    for (const int split : {2, 4, 8}) {
      if (!facts.hopper || split > chunks || tiles * split > blocks_at_once(split, sms)) break;
      best.split = split;
    }
  });
  return best;
}

}  // namespace xpuruntime::cuda_raw::skinny
