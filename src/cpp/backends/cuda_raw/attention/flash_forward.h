// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace xpuruntime::cuda_raw {

// Attention forward, out = dropout(softmax(scale * q k^T + mask)) v, without the score matrix in
// memory. fp16 or bf16 in and out, products and softmax accumulated in fp32.
//
//   q    [batch, heads, q_length, head_dim]
//   k, v [batch, kv_heads, kv_length, head_dim]     heads is a multiple of kv_heads: query head h
//                                                   reads kv head h / (heads / kv_heads)
//   out  [batch, heads, q_length, head_dim]
//   lse  [batch, heads, q_length], contiguous       natural logarithm of the sum of exp(score)
//
// A query row that may attend to nothing (kv_length 0, or all of it masked) gives zeros and an lse
// of -infinity. The same arguments on the same device give the same bits in every run.

/// How FlashForwardArgs::mask is read.
enum MaskKind : int {
  kMaskNone = 0,
  kMaskBoolean = 1,   ///< bytes; nonzero: the row may attend to the column
  kMaskAdditive = 2,  ///< in the dtype of q, added to the scaled score
  kMaskFloat32 = 3,   ///< fp32, added to the scaled score
};

/// Plain pointers to device memory: nothing is owned. Strides are in elements; the last dimension
/// of q, k, v and out has stride 1. A stride may be 0 or negative where the layout says so.
struct FlashForwardArgs {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;        ///< may be null
  const void* mask;  ///< null for kMaskNone
  int mask_kind;
  std::int64_t mask_strides[4];  ///< batch, head, row, column; 0 broadcasts
  std::int64_t batch;
  std::int64_t heads;
  std::int64_t kv_heads;
  std::int64_t q_length;
  std::int64_t kv_length;
  int head_dim;
  std::int64_t q_strides[3];  ///< batch, head, row
  std::int64_t k_strides[3];
  std::int64_t v_strides[3];
  std::int64_t out_strides[3];
  float scale;
  bool causal;               ///< row i attends to columns 0 ... i
  bool causal_bottom_right;  ///< with causal: to columns 0 ... i + kv_length - q_length
  bool bfloat16;             ///< else fp16
  /// Probability with which an attention weight is dropped, 0 for none. Which ones follows from
  /// philox.cuh alone, so the backward pass drops the same.
  float dropout_p;
  const std::int64_t* rng;  ///< {seed, offset} in device memory; may be null without dropout
};

/// Which of the kernels serves a call. Both compute the same function.
enum class FlashPath {
  kMma,    ///< mma.sync: any GPU from compute capability 8.0, everything above
  kWgmma,  ///< wgmma and the bulk copy engine: compute capability 9.0, no negative strides
};

/// Why the arguments cannot be served on a GPU of that compute capability: one sentence naming the
/// thing and the fix, empty when they can be. Reads no device memory and calls no CUDA function.
/// What it asks: head_dim a multiple of 8 from 32 to 256, pointers to q, k, v and out aligned to 16
/// bytes and their strides multiples of 8 elements (of dimensions longer than 1), lengths below
/// 2^31 - 256, dropout_p in [0, 1), a finite scale.
std::string flash_forward_refusal(const FlashForwardArgs& args, int cc_major, int cc_minor);

/// The kernel that flash_forward takes for these arguments, which flash_forward_refusal accepted.
FlashPath flash_forward_path(const FlashForwardArgs& args, int cc_major, int cc_minor);

/// Enqueues the attention on `stream` of the current device. No allocation, no synchronisation; can
/// be captured in a CUDA graph. Any thread. The arguments are those that flash_forward_refusal
/// accepts. Throws CudaError when the launch fails.
void flash_forward(const FlashForwardArgs& args, int cc_major, int cc_minor, int sm_count,
                   cudaStream_t stream);

/// The two kernels by themselves; flash_forward chooses.
void flash_forward_mma(const FlashForwardArgs& args, cudaStream_t stream);
void flash_forward_wgmma(const FlashForwardArgs& args, int sm_count, cudaStream_t stream);

}  // namespace xpuruntime::cuda_raw
