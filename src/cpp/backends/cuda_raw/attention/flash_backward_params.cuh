// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda_raw/attention/flash_backward.h"

namespace xpuruntime::cuda_raw {

/// Rows of grad_q are summed in tiles of this many rows; lengths are padded to it in the workspace.
inline constexpr int kFlashRowTile = 128;

/// Where the pieces of the workspace lie. `columns` is head_dim rounded up to what the kernels
/// compute with: 64, 96 (128 on sm_90, for which there is room too), 128, 192 or 256.
///
/// The fp32 sums of grad_q are kept in the order of matrix fragments, so that a warp adds 512
/// adjacent bytes at a time: [batch * heads][rows / 16][columns / 8][lane 32][4], where lane l and
/// item i are row l / 4 + 8 * (i / 2) and column 2 * (l % 4) + i % 2 of that 16 x 8 piece.
struct FlashBackwardWorkspace {
  explicit FlashBackwardWorkspace(const FlashBackwardArgs& args);

  std::int64_t rows;  ///< q_length padded to kFlashRowTile
  int columns;
  std::size_t lse;     ///< float [batch * heads][rows]
  std::size_t delta;   ///< float [batch * heads][rows]
  std::size_t sums;    ///< float, see above; zero before the main kernel, with what follows
  std::size_t turns;   ///< int [batch * heads][rows / 32], the order of additions to the sums
  std::size_t ticket;  ///< int, the order in which blocks started
  std::size_t bytes;
};

/// What the kernels take by value.
struct FlashBackwardParams {
  FlashBackwardArgs args;
  float* lse;    ///< of each row: +inf where the row takes no part (masked fully, or padding);
                 ///< otherwise lse, times log2(e) unless the mask is added to S
  float* delta;  ///< sum of grad_out * out over each row
  float* sums;
  int* turns;
  int* ticket;
  int rows;
  int columns;
  int q_length;
  int kv_length;
  int heads;
  int group;      ///< query heads that share a key head
  int kv_blocks;  ///< thread blocks along the keys
  int section;    ///< key heads whose blocks run side by side
  int shift;      ///< causal: row i sees keys up to i + shift
  float scale_log2;
};

/// sm_80 and newer; `shared_memory` as in FlashBackwardDevice.
void flash_backward_mma(const FlashBackwardParams& params, int shared_memory, cudaStream_t stream);

/// Bytes of shared memory a block needs there at least, for the padded head_dim `columns`.
int flash_backward_mma_shared_memory(int columns);

/// Whether `flash_backward_sm90` serves the call: compute capability 9.0, no mask, no dropout,
/// head_dim up to 128, strides that the bulk copy engine takes.
bool flash_backward_sm90_serves(const FlashBackwardArgs& args, const FlashBackwardDevice& device);
/// Sets params.columns to what it computes with, which the later kernels need.
void flash_backward_sm90(FlashBackwardParams& params, cudaStream_t stream);

/// Fills lse and delta of the workspace.
void flash_backward_rows(const FlashBackwardParams& params, cudaStream_t stream);

/// grad_q from the sums.
void flash_backward_grad_q(const FlashBackwardParams& params, cudaStream_t stream);

}  // namespace xpuruntime::cuda_raw
