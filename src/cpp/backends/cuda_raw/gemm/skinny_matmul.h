// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace xpuruntime::cuda_raw {

/// out[i, j] = activation(sum over l of a[i, l] * b[l, j] + bias[j]) for few rows i, as in
/// decoding: `batch` times, with sums in fp32, each rounded once. All of one 2-byte type.
///
/// Shapes: a [m, k], b [k, n], out [m, n], bias [n] or null; m at most kSkinnyMaxM, any n and k, 0
/// too. Strides are in elements and at least as long as a row; where a dimension is 1 or 0 long its
/// stride is not looked at; a batch stride of 0 gives every product the same operand. out overlaps
/// nothing. Whatever the alignment, every call is served; the fast kernel, for compute capability
/// 9.0 and later, takes a and b on 16 bytes with strides that are multiples of 8 elements.
///
/// The same call on the same device gives the same bits each time: no sum depends on which block
/// finishes first.
struct SkinnyMatmulArgs {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  void* out = nullptr;
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  std::int64_t lda = 0, ldb = 0, ldout = 0;
  std::int64_t a_batch = 0, b_batch = 0, out_batch = 0;
  /// Element (l, j) of b lies at j * ldb + l (the weight [n, k] of a linear layer) instead of at
  /// l * ldb + j.
  bool b_is_transposed = false;
  int activation = 0;     ///< 0 none, 1 ReLU, 2 GELU, 3 GELU by tanh, 4 SiLU
  bool bfloat16 = false;  ///< else IEEE half
  /// The caller's word that no work still pending on the stream writes b: it may then be read
  /// before that work is finished. Without it only hints are issued that early, which is always
  /// right.
  bool weights_are_constant = false;
};

inline constexpr std::int64_t kSkinnyMaxM = 64;

/// What the device is. The limit is cudaDevAttrMaxSharedMemoryPerBlockOptin.
struct SkinnyMatmulDevice {
  int cc_major = 0;
  int sm_count = 0;
  int shared_memory_limit = 0;  ///< bytes a block
};

/// Empty, or one sentence that says why these shapes, strides and this device cannot be served.
/// Looks at no pointer and touches no device.
std::string skinny_matmul_refusal(const SkinnyMatmulArgs& args, const SkinnyMatmulDevice& device);

/// Bytes of workspace a call needs: none, as blocks that share sums do so within a cluster.
std::size_t skinny_matmul_workspace(const SkinnyMatmulArgs& args);

/// Enqueues the product on the current device; never synchronises, never allocates, may be
/// captured. On compute capability 9.0 and later the kernel may start before the one ahead of it on
/// the stream is finished, and then waits for it itself. Throws InputError with the refusal if
/// there is one, and CudaError if the launch fails.
void skinny_matmul(const SkinnyMatmulArgs& args, void* workspace, const SkinnyMatmulDevice& device,
                   cudaStream_t stream);

}  // namespace xpuruntime::cuda_raw
