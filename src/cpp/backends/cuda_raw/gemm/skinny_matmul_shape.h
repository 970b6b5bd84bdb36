// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

namespace xpuruntime::cuda_raw::skinny {

constexpr int kPanel = 64;  // elements

/// A block computes kColumns columns of out, for up to 8 * kMTiles rows of it, by kWarps warps:
/// kWarpsN of them side by side over the columns (16 * kRowTiles each), kWarpsK over the k of a
/// chunk, which is kChunk long.
template <int kMTilesOf, int kRowTilesOf, int kWarpsNOf, int kWarpsKOf, int kChunkOf,
          bool kTransposedOf>
struct Shape {
  static constexpr int kMTiles = kMTilesOf;
  static constexpr int kRowTiles = kRowTilesOf;
  static constexpr int kWarpsN = kWarpsNOf;
  static constexpr int kWarpsK = kWarpsKOf;
  static constexpr int kChunk = kChunkOf;
  static constexpr bool kTransposed = kTransposedOf;
  static constexpr int kWarps = kWarpsN * kWarpsK;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = 16 * kRowTiles * kWarpsN;
  static constexpr int kMaxM = 8 * kMTiles;
  // Of b as it lies in memory: rows are of n where it is transposed, else of k.
  static constexpr int kRows = kTransposed ? kColumns : kChunk;
  static constexpr int kRowLength = kTransposed ? kChunk : kColumns;
  static constexpr int kBytesB = 2 * kRows * kRowLength;
  static constexpr int kBytesA = 2 * kMaxM * kChunk;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kFragments = kRowTiles * kMTiles;  // that a warp accumulates
  static constexpr int kFragmentsOfWarp = (kFragments + kWarpsK - 1) / kWarpsK;  // and sums up
  static_assert(kChunk % (32 * kWarpsK) == 0 && kRowLength % kPanel == 0 && kChunk % kPanel == 0);
};

/// Shared memory for the partial sums of a block's warps.
template <typename S>
constexpr int partial_bytes() {
  return S::kWarps * S::kFragments * 512;
}

/// Shared memory in which a block receives the partial sums of its cluster.
template <typename S>
constexpr int receive_bytes(int split) {
  return split == 1 ? 0 : S::kWarps * ((S::kFragmentsOfWarp + split - 1) / split) * split * 512;
}

// Of the kernel that uses the copy engine. Partial sums lie where the ring was.
constexpr int kBarrierBytes = 1024;
constexpr int kMaxStages = 16;

/// Shared memory of a block before its ring.
template <typename S>
constexpr int bulk_fixed_bytes(int split) {
  return kBarrierBytes + receive_bytes<S>(split);
}
template <typename S>
constexpr int bulk_shared_bytes(int stages, int split) {
  const int ring = stages * S::kStageBytes;
  return bulk_fixed_bytes<S>(split) + (ring > partial_bytes<S>() ? ring : partial_bytes<S>());
}

/// Of the kernel that does not; the same. Blocks that fit on an SM: one loads while the other
/// multiplies, where registers suffice.
template <typename S>
inline constexpr int kGatherBlocksOfSm = S::kMTiles <= 2 ? 2 : 1;
template <typename S>
constexpr int gather_fixed_bytes(int split) {
  return receive_bytes<S>(split);
}
template <typename S>
constexpr int gather_shared_bytes(int split) {
  const int ring = 2 * S::kStageBytes;
  return gather_fixed_bytes<S>(split) + (ring > partial_bytes<S>() ? ring : partial_bytes<S>());
}

}  // namespace xpuruntime::cuda_raw::skinny
