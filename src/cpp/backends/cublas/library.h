// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include <string>

#include "cublas/matmul_problem.h"

namespace xpuruntime::cublas {

/// The functions used here of the cuBLAS and cuBLASLt that the process has loaded, or else of those
/// found first. Both are of one version.
struct Library {
  decltype(&::cublasLtCreate) lt_create;
  decltype(&::cublasLtGetStatusName) lt_status_name;
  decltype(&::cublasLtMatmul) lt_matmul;
  decltype(&::cublasLtMatmulDescCreate) lt_desc_create;
  decltype(&::cublasLtMatmulDescDestroy) lt_desc_destroy;
  decltype(&::cublasLtMatmulDescSetAttribute) lt_desc_set;
  decltype(&::cublasLtMatrixLayoutCreate) lt_layout_create;
  decltype(&::cublasLtMatrixLayoutDestroy) lt_layout_destroy;
  decltype(&::cublasLtMatrixLayoutSetAttribute) lt_layout_set;
  decltype(&::cublasLtMatmulPreferenceCreate) lt_preference_create;
  decltype(&::cublasLtMatmulPreferenceDestroy) lt_preference_destroy;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) lt_preference_set;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) lt_heuristic;
  decltype(&::cublasLtMatmulAlgoInit) lt_algo_init;
  decltype(&::cublasLtMatmulAlgoCheck) lt_algo_check;
  decltype(&::cublasLtMatmulAlgoConfigSetAttribute) lt_config_set;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) lt_config_get;

  decltype(&::cublasCreate_v2) create;
  decltype(&::cublasDestroy_v2) destroy;
  decltype(&::cublasSetStream_v2) set_stream;
  decltype(&::cublasSetWorkspace_v2) set_workspace;
  decltype(&::cublasSetMathMode) set_math_mode;
  decltype(&::cublasGemmEx_64) gemm;
  decltype(&::cublasGemmStridedBatchedEx_64) gemm_batched;

  std::string version;  ///< "13.1.0", of cuBLASLt itself

  /// Opens the libraries on first use; after a failure the next call tries again. Thread-safe.
  /// Throws UnsupportedOperationError naming library, places searched and what to install.
  static const Library& get();

  /// Throws for a status that is not success: OutOfMemoryError, UnsupportedOperationError where
  /// cuBLAS says that it does not support the call on this device, else CudaError.
  void check(cublasStatus_t status, const char* call, int device) const;
};

cudaDataType_t type_of(Element element) noexcept;
cublasComputeType_t compute_type(const MatmulProblem& problem) noexcept;
/// Of alpha and beta.
cudaDataType_t scale_type(const MatmulProblem& problem) noexcept;

/// 1 and 0 in that type, at addresses that stay.
const void* one(const MatmulProblem& problem) noexcept;
const void* zero(const MatmulProblem& problem) noexcept;

/// The workspace that NVIDIA recommends for a device.
std::size_t recommended_workspace(const DeviceInfo& device) noexcept;

}  // namespace xpuruntime::cublas
