// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace xpuruntime::cuda_raw {

// Layer norm and RMS norm over the last dimension, with an optional residual added before, forward
// and backward, for devices of compute capability 8.0 and later.
//
//   h = x + residual                            rounded to the type of x, as sum_out holds it
//   layer norm  y = (h - mean) * rstd * weight + bias     rstd = 1 / sqrt(var + epsilon)
//   RMS norm    y = h * rstd * weight                     rstd = 1 / sqrt(mean(h * h) + epsilon)
//
// Arithmetic is fp32 with one rounding to the type of y. The variance is the mean of squared
// distances from the mean, never a difference of two large sums. Squares larger than the largest
// fp32 number overflow: such a row has rstd 0.
//
// Memory: every function only enqueues on the stream, allocates nothing, waits for nothing, and can
// be captured in a CUDA graph. Results have the same bits from run to run on one model of device.
//  * Forward: every input is read once and every output written once, with the row in registers, up
//    to 65536 columns of fp16 and bf16 and 32768 of fp32 when the rows are aligned (below), and up
//    to 16384 columns otherwise. Longer rows are read twice; the second read mostly finds the L2
//    cache.
//  * Backward: once as well, up to 16384 columns when the rows are aligned and 4096 otherwise.
//    Longer rows are read three times when gradients of weight or bias are wanted, else twice.
// Aligned: the columns and each row stride are a whole number of 16 bytes, and each pointer but
// those of mean, rstd, grad_weight and grad_bias is a multiple of 16 bytes. Everything else works
// too, with one element an access, more slowly.
//
// Pointers are device pointers on the current device, aligned to their own element. The columns of
// a row are adjacent. Row strides are in elements: any for an input (0 repeats one row), at least
// `columns` in size for an output. Outputs may alias an input exactly (same pointer, same stride)
// where said below and may not overlap in any other way.

/// Element type of x, residual, y, sum_out and their gradients; weight and bias have this type too,
/// or fp32.
enum class NormType : std::uint8_t { fp32, fp16, bf16 };

struct NormForwardArgs {
  const void* x = nullptr;
  const void* residual = nullptr;  ///< Or null: nothing is added.
  const void* weight = nullptr;    ///< Or null: ones.
  const void* bias = nullptr;      ///< Or null: zeros. Layer norm only.
  void* y = nullptr;               ///< May alias x or residual.
  void* sum_out = nullptr;         ///< Or null. May alias x or residual; needs a residual.
  float* mean = nullptr;           ///< Or null. One a row. Layer norm only.
  float* rstd = nullptr;           ///< Or null. One a row.
  std::int64_t rows = 0;           ///< 0 or more: with 0, nothing is enqueued.
  std::int64_t columns = 0;        ///< 1 to 2^30.
  std::int64_t x_row_stride = 0;
  std::int64_t residual_row_stride = 0;
  std::int64_t y_row_stride = 0;
  std::int64_t sum_row_stride = 0;
  float epsilon = 1e-5F;
  bool rms = false;
  NormType type = NormType::fp32;
  NormType weight_type = NormType::fp32;
};

struct NormBackwardArgs {
  const void* grad_y = nullptr;
  const void* x = nullptr;         ///< What was normalized: sum_out where a residual was added.
  const void* weight = nullptr;    ///< Or null: ones.
  const void* grad_sum = nullptr;  ///< Or null. The gradient arriving at sum_out; added to grad_x.
  const float* mean = nullptr;     ///< As forward wrote it. Layer norm only.
  const float* rstd = nullptr;     ///< As forward wrote it.
  void* grad_x = nullptr;          ///< May alias grad_y, x or grad_sum.
  void* grad_weight = nullptr;     ///< Or null. `columns` elements of weight_type, overwritten.
  void* grad_bias = nullptr;       ///< Or null. As grad_weight. Layer norm only.
  std::int64_t rows = 0;           ///< With 0, grad_weight and grad_bias are zeros.
  std::int64_t columns = 0;
  std::int64_t grad_y_row_stride = 0;
  std::int64_t x_row_stride = 0;
  std::int64_t grad_sum_row_stride = 0;
  std::int64_t grad_x_row_stride = 0;
  bool rms = false;
  NormType type = NormType::fp32;
  NormType weight_type = NormType::fp32;
};

/// Empty, or one sentence saying why the call cannot be served and what to change. Pure: needs no
/// device.
std::string norm_refusal(const NormForwardArgs& args, int cc_major);
std::string norm_refusal(const NormBackwardArgs& args, int cc_major);

/// Bytes that norm_backward needs: fp32 partial sums of grad_weight and grad_bias, added up in a
/// fixed order. 0 where neither is wanted. Pure: looks at rows, columns, type and whether the two
/// are null, at no address and no stride.
std::size_t norm_backward_workspace(const NormBackwardArgs& args, int sm_count);

/// Enqueues on `stream`. The arguments must be ones that norm_refusal accepts. Throws CudaError
/// when a launch fails.
void norm_forward(const NormForwardArgs& args, int cc_major, int sm_count, cudaStream_t stream);

/// Enqueues on `stream`. `workspace` has norm_backward_workspace bytes, aligned to 16, and belongs
/// to this call until the stream has passed it; its contents do not matter. Throws CudaError when a
/// launch fails.
void norm_backward(const NormBackwardArgs& args, void* workspace, int cc_major, int sm_count,
                   cudaStream_t stream);

}  // namespace xpuruntime::cuda_raw
