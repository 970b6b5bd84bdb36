// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cuda.h>

#include <cstdint>

namespace xpuruntime::cuda_raw {

/// A tensor in device memory as the bulk copy engine of sm_90 is to read it: fp16 or bf16, four
/// dimensions with the innermost one first, in boxes that it puts into shared memory in rows of 128
/// bytes, swizzled. What a box has beyond the end of the tensor is filled with zeros.
struct TensorMapSource {
  const char* name;  ///< what error messages call it
  const void* data;  ///< aligned to 16 bytes
  bool bfloat16;     ///< else fp16
  std::int64_t lengths[4];
  /// In elements, of dimensions 1 to 3; the innermost one is contiguous. Multiples of 8 above 0 and
  /// below 2^39. Of a dimension of length 1 it is never used and may be anything.
  std::int64_t strides[3];
  int box[4];                      ///< box[0] is 64
  CUtensorMapL2promotion fetched;  ///< how much is brought into the L2 cache at a time
};

/// The map of it, for the copies of a kernel that takes it as a __grid_constant__. Reads no device
/// memory. Any thread; a CUDA context must be current. Throws CudaError where the driver cannot
/// encode tensor maps (it is older than CUDA 12.0) or refuses this one, naming the tensor.
CUtensorMap encode_tensor_map(const TensorMapSource& source);

/// The same for a tensor of attention, lengths [batch, heads, rows, head_dim] and strides [batch,
/// head, row], in boxes of `box_rows` rows by 64 elements of one head.
CUtensorMap encode_heads_map(const char* name, const void* data, bool bfloat16,
                             const std::int64_t (&lengths)[4], const std::int64_t (&strides)[3],
                             int box_rows);

}  // namespace xpuruntime::cuda_raw
