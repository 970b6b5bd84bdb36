// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <memory>
#include <vector>

#include "cublas/library.h"
#include "cublas/lt_config.h"

namespace xpuruntime::cublas {

/// Destroys what cuBLASLt made.
template <auto Destroy>
struct LtDelete {
  const Library* library = nullptr;
  template <typename Object>
  void operator()(Object* object) const noexcept {
    (void)(library->*Destroy)(object);
  }
};
using LtDesc = std::unique_ptr<cublasLtMatmulDescOpaque_t, LtDelete<&Library::lt_desc_destroy>>;
using LtLayout =
    std::unique_ptr<cublasLtMatrixLayoutOpaque_t, LtDelete<&Library::lt_layout_destroy>>;

struct LtAlgorithm {
  cublasLtMatmulAlgo_t algorithm{};
  LtConfig config;
};

/// A product as cuBLASLt describes it. Immutable; every member may be called from any thread.
/// Throws as Library::check does.
class LtProblem {
 public:
  LtProblem(const Library& library, const MatmulProblem& problem, const DeviceInfo& device);

  /// At most `most` algorithms, what cuBLASLt expects to be fastest first. Throws
  /// UnsupportedOperationError when there is none.
  std::vector<LtAlgorithm> search(std::size_t most) const;
  /// Throws UnsupportedOperationError when this version or device does not take it.
  LtAlgorithm rebuild(const LtConfig& config) const;

  /// A description of the operation, for one launch at a time: bias and scales are set in it.
  LtDesc make_desc() const;
  void set_pointer(const LtDesc& desc, cublasLtMatmulDescAttributes_t attribute,
                   const void* pointer) const;

  const Library& library() const noexcept { return library_; }
  const MatmulProblem& matmul() const noexcept { return problem_; }
  cublasLtHandle_t handle() const noexcept { return handle_; }
  int device() const noexcept { return device_; }
  cublasLtMatrixLayout_t first() const noexcept { return first_.get(); }
  cublasLtMatrixLayout_t second() const noexcept { return second_.get(); }
  cublasLtMatrixLayout_t out() const noexcept { return out_.get(); }

 private:
  LtLayout make_layout(const Matrix& matrix) const;
  /// As the heuristics want it: with addresses that are aligned as the real ones.
  LtDesc make_model_desc() const;
  LtConfig read(const cublasLtMatmulAlgo_t& algorithm) const;

  const Library& library_;
  const MatmulProblem problem_;
  const int device_;
  const std::size_t most_workspace_;
  cublasLtHandle_t handle_;
  LtLayout first_, second_, out_;
};

}  // namespace xpuruntime::cublas
