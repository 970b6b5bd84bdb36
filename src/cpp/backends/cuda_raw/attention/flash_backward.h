// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace xpuruntime::cuda_raw {

/// One call of the gradient of scaled dot product attention, the FlashAttention-2 algorithm.
///
/// With S = scale * q k^T + mask, P = softmax(S) over the keys and out = dropout(P) v, fills
/// grad_q, grad_k and grad_v from grad_out. P is recomputed from q, k and lse.
///
/// All tensors are device memory of the current device, fp16 or bf16 unless said otherwise, with
/// last dimension contiguous. Strides count elements and are [batch, head, row]. Inputs may overlap
/// each other and have stride 0; outputs overlap nothing. Products are summed in fp32.
struct FlashBackwardArgs {
  const void* q = nullptr;         ///< [batch, heads, q_length, head_dim]
  const void* k = nullptr;         ///< [batch, kv_heads, kv_length, head_dim]
  const void* v = nullptr;         ///< as k
  const void* out = nullptr;       ///< as q: what the forward returned
  const void* grad_out = nullptr;  ///< as q
  const float* lse = nullptr;      ///< [batch, heads, q_length] contiguous: logarithm (base e) of
                                   ///< the row sums of exp(S); -inf for a fully masked row
  void* grad_q = nullptr;          ///< as q; every element is written
  void* grad_k = nullptr;          ///< as k; summed over the query heads that share a key head
  void* grad_v = nullptr;          ///< as k

  /// 0 none; 1 bytes, nonzero takes part; 2 added to S, dtype of q; 3 added to S, fp32.
  /// The mask gets no gradient.
  int mask_kind = 0;
  const void* mask = nullptr;
  std::int64_t mask_strides[4] = {};  ///< [batch, head, row, key]; 0 where it is broadcast

  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;  ///< divides heads: query head h uses key head h / (heads / kv_heads)
  std::int64_t q_length = 0;
  std::int64_t kv_length = 0;
  int head_dim = 0;

  std::int64_t q_strides[3] = {};
  std::int64_t k_strides[3] = {};
  std::int64_t v_strides[3] = {};
  std::int64_t out_strides[3] = {};
  std::int64_t grad_out_strides[3] = {};
  std::int64_t grad_q_strides[3] = {};
  std::int64_t grad_k_strides[3] = {};
  std::int64_t grad_v_strides[3] = {};

  float scale = 1.0F;
  bool causal = false;
  /// Whether row i sees keys up to i + kv_length - q_length (true) or up to i (false).
  bool causal_bottom_right = false;
  bool bfloat16 = true;  ///< otherwise fp16

  /// Probability of dropping an element of P, in [0, 1). Not 0: rng is the device address of
  /// {seed, offset} as the forward used them.
  float dropout_p = 0.0F;
  const std::int64_t* rng = nullptr;

  /// Bitwise the same result on every run, at some cost in speed: the sums of grad_q are then
  /// taken in one fixed order. grad_k and grad_v are repeatable always.
  bool deterministic = false;
};

/// What of the device the choice of kernel depends on.
struct FlashBackwardDevice {
  int cc_major = 0;
  int cc_minor = 0;
  int sm_count = 0;
  int shared_memory = 0;  ///< most bytes a block may ask for (opt-in)
};

/// Empty, or one sentence why the call cannot be served on this device and what to do. Pure: reads
/// no device memory, calls nothing of CUDA.
std::string flash_backward_refusal(const FlashBackwardArgs& args,
                                   const FlashBackwardDevice& device);

/// Bytes of device memory, aligned to 256, that `flash_backward` needs while it runs. Depends on
/// batch, heads, q_length, kv_length and head_dim only.
std::size_t flash_backward_workspace(const FlashBackwardArgs& args);

/// Enqueues the gradient on `stream` of the current device. The workspace may be reused by later
/// work of the same stream; what it holds need not be initialised. Allocates nothing, never
/// synchronises, may be captured in a CUDA graph. Calls are independent: any thread, any stream.
/// Precondition: `flash_backward_refusal` is empty. Errors: CudaError.
void flash_backward(const FlashBackwardArgs& args, void* workspace,
                    const FlashBackwardDevice& device, cudaStream_t stream);

}  // namespace xpuruntime::cuda_raw
