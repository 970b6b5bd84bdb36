// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cublas/lt_problem.h"

#include <algorithm>
#include <string>

#include "cublas/handles.h"
#include "xpuruntime/error.h"

namespace xpuruntime::cublas {
namespace {

using LtPreference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, LtDelete<&Library::lt_preference_destroy>>;

cublasLtEpilogue_t epilogue_of(const MatmulProblem& problem) noexcept {
  switch (problem.activation) {
    case Activation::kRelu:
      return problem.has_bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case Activation::kGeluTanh:
      return problem.has_bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default:
      return problem.has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
}

// Partial sums are added in the type of the computation, never in a narrower one of the result.
std::uint32_t reductions_of(const MatmulProblem& problem) noexcept {
  const std::uint32_t exact = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const bool wide = problem.out.element == Element::kFp32 || problem.out.element == Element::kFp64;
  return wide ? std::uint32_t{CUBLASLT_REDUCTION_SCHEME_MASK} : exact;
}

// Of each setting of an algorithm, in the order of LtConfig.
template <typename Config, typename Visit>
void visit_settings(Config& config, Visit visit) {
  visit(CUBLASLT_ALGO_CONFIG_TILE_ID, "tile", config.tile);
  visit(CUBLASLT_ALGO_CONFIG_STAGES_ID, "stages", config.stages);
  visit(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, "splitk", config.splitk);
  visit(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, "reduction", config.reduction);
  visit(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, "swizzle", config.swizzle);
  visit(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, "custom", config.custom);
  visit(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, "inner", config.inner);
  visit(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, "cluster", config.cluster);
}

}  // namespace

LtProblem::LtProblem(const Library& library, const MatmulProblem& problem, const DeviceInfo& device)
    : library_(library),
      problem_(problem),
      device_(device.id.index),
      most_workspace_(recommended_workspace(device)),
      handle_(lt_handle(library, device.id.index)),
      first_(make_layout(problem.first)),
      second_(make_layout(problem.second)),
      out_(make_layout(problem.out)) {}

LtLayout LtProblem::make_layout(const Matrix& matrix) const {
  cublasLtMatrixLayout_t made = nullptr;
  library_.check(library_.lt_layout_create(
                     &made, type_of(matrix.element), static_cast<std::uint64_t>(matrix.rows),
                     static_cast<std::uint64_t>(matrix.columns), matrix.leading),
                 "cublasLtMatrixLayoutCreate", device_);
  LtLayout layout(made, {&library_});
  if (problem_.batch > 1) {
    const auto batch = static_cast<std::int32_t>(problem_.batch);
    library_.check(
        library_.lt_layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
        "cublasLtMatrixLayoutSetAttribute", device_);
    library_.check(library_.lt_layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                          &matrix.batch_stride, sizeof matrix.batch_stride),
                   "cublasLtMatrixLayoutSetAttribute", device_);
  }
  return layout;
}

LtDesc LtProblem::make_desc() const {
  cublasLtMatmulDesc_t made = nullptr;
  library_.check(library_.lt_desc_create(&made, compute_type(problem_), scale_type(problem_)),
                 "cublasLtMatmulDescCreate", device_);
  LtDesc desc(made, {&library_});
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    library_.check(library_.lt_desc_set(made, attribute, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute", device_);
  };
  const std::int32_t transpose = CUBLAS_OP_T;
  if (problem_.first.transposed) set(CUBLASLT_MATMUL_DESC_TRANSA, transpose);
  if (problem_.second.transposed) set(CUBLASLT_MATMUL_DESC_TRANSB, transpose);
  const auto epilogue = static_cast<std::uint32_t>(epilogue_of(problem_));
  if (epilogue != CUBLASLT_EPILOGUE_DEFAULT) set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  if (problem_.has_bias) {
    const auto type = static_cast<std::int32_t>(type_of(problem_.bias));
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
  }
  return desc;
}

void LtProblem::set_pointer(const LtDesc& desc, cublasLtMatmulDescAttributes_t attribute,
                            const void* pointer) const {
  library_.check(library_.lt_desc_set(desc.get(), attribute, &pointer, sizeof pointer),
                 "cublasLtMatmulDescSetAttribute", device_);
}

LtDesc LtProblem::make_model_desc() const {
  LtDesc desc = make_desc();
  const auto address = [](std::uint32_t alignment) {
    return reinterpret_cast<const void*>(std::uintptr_t{alignment});
  };
  if (problem_.has_bias) {
    set_pointer(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, address(problem_.bias_alignment));
  }
  if (problem_.scale_a) set_pointer(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, address(4));
  if (problem_.scale_b) set_pointer(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, address(4));
  return desc;
}

std::vector<LtAlgorithm> LtProblem::search(std::size_t most) const {
  cublasLtMatmulPreference_t made = nullptr;
  library_.check(library_.lt_preference_create(&made), "cublasLtMatmulPreferenceCreate", device_);
  const LtPreference preference(made, {&library_});
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    library_.check(library_.lt_preference_set(made, attribute, &value, sizeof value),
                   "cublasLtMatmulPreferenceSetAttribute", device_);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{most_workspace_});
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions_of(problem_));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem_.first.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem_.second.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem_.out.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem_.out.alignment);

  const LtDesc desc = make_model_desc();
  std::vector<cublasLtMatmulHeuristicResult_t> results(std::max<std::size_t>(most, 1));
  int found = 0;
  const cublasStatus_t status =
      library_.lt_heuristic(handle_, desc.get(), first(), second(), out(), out(), made,
                            static_cast<int>(results.size()), results.data(), &found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) {
    library_.check(status, "cublasLtMatmulAlgoGetHeuristic", device_);
  }
  std::vector<LtAlgorithm> algorithms;
  for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<std::size_t>(i)];
    if (result.state != CUBLAS_STATUS_SUCCESS) continue;
    LtAlgorithm one{result.algo, read(result.algo)};
    one.config.workspace = result.workspaceSize;
    const bool known = std::any_of(algorithms.begin(), algorithms.end(),
                                   [&](const auto& other) { return other.config == one.config; });
    if (!known) algorithms.push_back(one);
  }
  if (algorithms.empty()) {
    throw UnsupportedOperationError(
        "cuBLASLt " + library_.version + " has no algorithm for this product on cuda:" +
            std::to_string(device_) + " (" + library_.lt_status_name(status) +
            "): its sizes, strides or alignment fit none; pad them, or use another kernel",
        "cuda:" + std::to_string(device_));
  }
  return algorithms;
}

LtConfig LtProblem::read(const cublasLtMatmulAlgo_t& algorithm) const {
  LtConfig config;
  const auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, const char* /*name*/,
                       auto& value) {
    std::size_t written = 0;
    library_.check(library_.lt_config_get(&algorithm, attribute, &value, sizeof value, &written),
                   "cublasLtMatmulAlgoConfigGetAttribute", device_);
  };
  get(CUBLASLT_ALGO_CONFIG_ID, "algo", config.algo);
  visit_settings(config, get);
  return config;
}

LtAlgorithm LtProblem::rebuild(const LtConfig& config) const {
  const auto refuse = [&](const std::string& what, cublasStatus_t status) {
    throw UnsupportedOperationError(
        "cublas.cublasLt cannot do this product with " + to_string(config) + ": cuBLASLt " +
            library_.version + " does not take " + what + " (" + library_.lt_status_name(status) +
            "); a configuration holds for the product, library and device it was found for: tune "
            "again",
        "cuda:" + std::to_string(device_));
  };
  LtAlgorithm one;
  one.config = config;
  cublasStatus_t status = library_.lt_algo_init(
      handle_, compute_type(problem_), scale_type(problem_), type_of(problem_.first.element),
      type_of(problem_.second.element), type_of(problem_.out.element),
      type_of(problem_.out.element), config.algo, &one.algorithm);
  if (status != CUBLAS_STATUS_SUCCESS) refuse("algo", status);
  visit_settings(config, [&](cublasLtMatmulAlgoConfigAttributes_t attribute, const char* name,
                             const auto& value) {
    const cublasStatus_t set =
        library_.lt_config_set(&one.algorithm, attribute, &value, sizeof value);
    if (set != CUBLAS_STATUS_SUCCESS) refuse(name, set);
  });
  const LtDesc desc = make_model_desc();
  cublasLtMatmulHeuristicResult_t result{};
  status = library_.lt_algo_check(handle_, desc.get(), first(), second(), out(), out(),
                                  &one.algorithm, &result);
  if (status != CUBLAS_STATUS_SUCCESS) refuse("these settings for it", status);
  if (result.state != CUBLAS_STATUS_SUCCESS) refuse("these settings for it", result.state);
  if (result.workspaceSize > config.workspace) {
    refuse("a workspace of less than " + std::to_string(result.workspaceSize) + " bytes for it",
           CUBLAS_STATUS_INVALID_VALUE);
  }
  return one;
}

}  // namespace xpuruntime::cublas
