// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cublas/library.h"

#include <vector>

#include "xpuruntime/error.h"
#include "xpuruntime/shared_library.h"

namespace xpuruntime::cublas {
namespace {

constexpr std::string_view kFix =
    "install them with: pip install \"xpuruntime[cuda]\", or put their folder on LD_LIBRARY_PATH";

template <typename Function>
void bind(const SharedLibrary& from, Function& function, const char* name) {
  function = from.get<Function>(name);
}

// The major version of the file, which both libraries share.
std::vector<std::string> partner_of(const std::string& path) {
  const std::size_t at = path.rfind(".so.");
  const std::string major = at == std::string::npos ? "" : path.substr(at + 4);
  if (major.starts_with("13")) return {"libcublas.so.13"};
  if (major.starts_with("12")) return {"libcublas.so.12"};
  return {"libcublas.so.13", "libcublas.so.12"};
}

Library load() {
  const SharedLibrary lt = SharedLibrary::open({"libcublasLt.so.13", "libcublasLt.so.12"}, kFix);
  const SharedLibrary blas = SharedLibrary::open(partner_of(lt.path()), kFix);
  Library table{};
  bind(lt, table.lt_create, "cublasLtCreate");
  bind(lt, table.lt_status_name, "cublasLtGetStatusName");
  bind(lt, table.lt_matmul, "cublasLtMatmul");
  bind(lt, table.lt_desc_create, "cublasLtMatmulDescCreate");
  bind(lt, table.lt_desc_destroy, "cublasLtMatmulDescDestroy");
  bind(lt, table.lt_desc_set, "cublasLtMatmulDescSetAttribute");
  bind(lt, table.lt_layout_create, "cublasLtMatrixLayoutCreate");
  bind(lt, table.lt_layout_destroy, "cublasLtMatrixLayoutDestroy");
  bind(lt, table.lt_layout_set, "cublasLtMatrixLayoutSetAttribute");
  bind(lt, table.lt_preference_create, "cublasLtMatmulPreferenceCreate");
  bind(lt, table.lt_preference_destroy, "cublasLtMatmulPreferenceDestroy");
  bind(lt, table.lt_preference_set, "cublasLtMatmulPreferenceSetAttribute");
  bind(lt, table.lt_heuristic, "cublasLtMatmulAlgoGetHeuristic");
  bind(lt, table.lt_algo_init, "cublasLtMatmulAlgoInit");
  bind(lt, table.lt_algo_check, "cublasLtMatmulAlgoCheck");
  bind(lt, table.lt_config_set, "cublasLtMatmulAlgoConfigSetAttribute");
  bind(lt, table.lt_config_get, "cublasLtMatmulAlgoConfigGetAttribute");
  bind(blas, table.create, "cublasCreate_v2");
  bind(blas, table.destroy, "cublasDestroy_v2");
  bind(blas, table.set_stream, "cublasSetStream_v2");
  bind(blas, table.set_workspace, "cublasSetWorkspace_v2");
  bind(blas, table.set_math_mode, "cublasSetMathMode");
  bind(blas, table.gemm, "cublasGemmEx_64");
  bind(blas, table.gemm_batched, "cublasGemmStridedBatchedEx_64");

  const std::size_t version = lt.get<decltype(&::cublasLtGetVersion)>("cublasLtGetVersion")();
  table.version = std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
                  "." + std::to_string(version % 100);
  return table;
}

}  // namespace

const Library& Library::get() {
  static const Library library = load();
  return library;
}

void Library::check(cublasStatus_t status, const char* call, int device) const {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const std::string where = "cuda:" + std::to_string(device);
  const std::string text = std::string(call) + " of cuBLAS " + version + " failed on " + where +
                           ": " + lt_status_name(status);
  if (status == CUBLAS_STATUS_ALLOC_FAILED) {
    throw OutOfMemoryError(text + "; free memory on the device", where, 0);
  }
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_ARCH_MISMATCH) {
    throw UnsupportedOperationError(text, where);
  }
  throw CudaError(text, where, static_cast<int>(cudaGetLastError()));
}

cudaDataType_t type_of(Element element) noexcept {
  switch (element) {
    case Element::kFp64:
      return CUDA_R_64F;
    case Element::kFp32:
      return CUDA_R_32F;
    case Element::kFp16:
      return CUDA_R_16F;
    case Element::kBf16:
      return CUDA_R_16BF;
    case Element::kFp8E4m3:
      return CUDA_R_8F_E4M3;
  }
  return CUDA_R_32F;
}

cublasComputeType_t compute_type(const MatmulProblem& problem) noexcept {
  if (problem.first.element == Element::kFp64) return CUBLAS_COMPUTE_64F;
  return problem.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

cudaDataType_t scale_type(const MatmulProblem& problem) noexcept {
  return problem.first.element == Element::kFp64 ? CUDA_R_64F : CUDA_R_32F;
}

const void* one(const MatmulProblem& problem) noexcept {
  static constexpr float kSingle = 1;
  static constexpr double kDouble = 1;
  if (problem.first.element == Element::kFp64) return &kDouble;
  return &kSingle;
}

const void* zero(const MatmulProblem& /*problem*/) noexcept {
  static constexpr double kZero = 0;  // as a float too
  return &kZero;
}

std::size_t recommended_workspace(const DeviceInfo& device) noexcept {
  constexpr std::size_t kMiB = std::size_t{1} << 20U;
  switch (device.compute_capability.first) {
    case 9:
      return 32 * kMiB;
    case 10:
    case 12:
      return 12 * kMiB;
    default:
      return 4 * kMiB;
  }
}

}  // namespace xpuruntime::cublas
