// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cublas/matmul_problem.h"

#include <dlpack/dlpack.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

namespace xpuruntime::cublas {
namespace {

using Slot = slots::Matmul;

// What a product without inner dimension is computed with; fp8 needs multiples of 16.
constexpr std::int64_t kZeroK = 16;
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

std::optional<Element> element_of(DType dtype) noexcept {
  if (dtype.lanes != 1) return std::nullopt;
  if (dtype.code == kDLFloat && dtype.bits == 64) return Element::kFp64;
  if (dtype.code == kDLFloat && dtype.bits == 32) return Element::kFp32;
  if (dtype.code == kDLFloat && dtype.bits == 16) return Element::kFp16;
  if (dtype.code == kDLBfloat && dtype.bits == 16) return Element::kBf16;
  if (dtype.code == kDLFloat8_e4m3fn && dtype.bits == 8) return Element::kFp8E4m3;
  return std::nullopt;
}

const char* word_of(Element element) noexcept {
  switch (element) {
    case Element::kFp64:
      return "float64";
    case Element::kFp32:
      return "float32";
    case Element::kFp16:
      return "float16";
    case Element::kBf16:
      return "bfloat16";
    case Element::kFp8E4m3:
      return "float8_e4m3fn";
  }
  return "";
}

std::string capability(const DeviceInfo& device) {
  return std::to_string(device.compute_capability.first) + "." +
         std::to_string(device.compute_capability.second);
}

std::int64_t round_up(std::int64_t value) noexcept { return (value + 15) / 16 * 16; }

// The two ways to see a strided matrix as columns: along its rows, or along its columns.
struct Side {
  std::int64_t inner = 0, outer = 0;
  std::int64_t inner_stride = 0, outer_stride = 0;

  bool fits() const noexcept {
    return (inner <= 1 || inner_stride == 1) &&
           (outer <= 1 || outer_stride >= std::max<std::int64_t>(inner, 1));
  }
  // The distance of columns does not matter where there is one: then one that is well aligned.
  std::int64_t leading() const noexcept {
    return outer > 1 ? outer_stride : round_up(std::max<std::int64_t>(inner, 1));
  }
};

std::string layout_reason(const char* name, const TensorDesc& tensor) {
  const std::size_t last = tensor.rank - 1U;
  return std::string("'") + name + "' has the strides [" +
         std::to_string(tensor.strides[last - 1]) + ", " + std::to_string(tensor.strides[last]) +
         "]: one of them must be 1 and the other at least the length of that dimension, as in a "
         "matrix, its transpose or a slice of its rows or columns; make it contiguous";
}

// Plain: the columns run along the last dimension. Else the matrix enters transposed.
bool take(const TensorDesc& tensor, bool prefer_plain, Matrix& matrix) {
  const std::size_t last = tensor.rank - 1U;
  const Side plain{tensor.shape[last], tensor.shape[last - 1], tensor.strides[last],
                   tensor.strides[last - 1]};
  const Side turned{plain.outer, plain.inner, plain.outer_stride, plain.inner_stride};
  const bool use_plain = plain.fits() && (prefer_plain || !turned.fits());
  if (!use_plain && !turned.fits()) return false;
  const Side& side = use_plain ? plain : turned;
  matrix.transposed = !use_plain;
  matrix.rows = side.inner;
  matrix.columns = side.outer;
  matrix.leading = side.leading();
  return true;
}

Support take_batch(const char* name, const TensorDesc& tensor, std::int64_t batch, Matrix& matrix) {
  if (tensor.rank < 3 || tensor.shape[0] == 1) return Support::yes();
  if (tensor.shape[0] != batch) {
    return Support::no(std::string("'") + name + "' has a batch of " +
                       std::to_string(tensor.shape[0]) + " and the result one of " +
                       std::to_string(batch));
  }
  if (tensor.strides[0] < 0) {
    return Support::no(std::string("'") + name +
                       "' has a negative batch stride: make it contiguous");
  }
  matrix.batch_stride = tensor.strides[0];
  return Support::yes();
}

Support take_alignment(const char* name, const TensorDesc& tensor, Matrix& matrix) {
  matrix.alignment = 1U << tensor.alignment;
  const std::size_t size = size_of(matrix.element);
  if (matrix.alignment % size == 0) return Support::yes();
  return Support::no(std::string("the address of '") + name + "' is no multiple of the " +
                     std::to_string(size) + " bytes of its elements: copy it");
}

Support check_types(const OpDesc& op, const DeviceInfo& device, MatmulProblem& problem) {
  const auto a = element_of(op[Slot::kA].dtype);
  const auto out = element_of(op[Slot::kOut].dtype);
  if (!a || op[Slot::kB].dtype != op[Slot::kA].dtype) {
    return Support::no(
        "cuBLAS multiplies float64, float32, float16, bfloat16 and float8_e4m3fn, two "
        "of one kind, and not " +
        to_string(op[Slot::kA].dtype) + " by " + to_string(op[Slot::kB].dtype));
  }
  const bool fp8 = *a == Element::kFp8E4m3;
  const bool half = *a == Element::kFp16 || *a == Element::kBf16;
  const bool narrow_out = out == Element::kFp16 || out == Element::kBf16;
  if (!out ||
      (out != a && !(half && out == Element::kFp32) &&
       !(fp8 && (narrow_out || out == Element::kFp32))) ||
      (fp8 && out == a)) {
    return Support::no(std::string("cuBLAS gives no ") + to_string(op[Slot::kOut].dtype) +
                       " from " + word_of(*a));
  }
  const int major = device.compute_capability.first;
  if (*a == Element::kBf16 && major < 8) {
    return Support::no("bfloat16 needs compute capability 8.0, and this device has " +
                       capability(device) + ": use float16 or float32");
  }
  if (fp8 && device.compute_capability < std::pair(8, 9)) {
    return Support::no("float8 needs compute capability 8.9, and this device has " +
                       capability(device) + ": use bfloat16 or float16");
  }
  problem.first.element = problem.second.element = *a;
  problem.out.element = *out;
  problem.tf32 = op.attributes.allow_tf32 && *a == Element::kFp32 && major >= 8;
  return Support::yes();
}

Support check_bias(const OpDesc& op, MatmulProblem& problem) {
  if (!op.has(Slot::kBias)) return Support::yes();
  const TensorDesc& bias = op[Slot::kBias];
  const auto element = element_of(bias.dtype);
  // cuBLASLt reads the bias in the type of the result, but for fp8 with a result of fp32 in bf16.
  const bool fp8 = problem.first.element == Element::kFp8E4m3;
  const Element wanted =
      fp8 && problem.out.element == Element::kFp32 ? Element::kBf16 : problem.out.element;
  if (element != wanted) {
    return Support::no(std::string("cuBLASLt adds a bias of ") + word_of(wanted) + " to " +
                       word_of(problem.out.element) + " from " + word_of(problem.first.element) +
                       ", and this one is " + to_string(bias.dtype));
  }
  if (bias.shape[0] > 1 && bias.strides[0] != 1) {
    return Support::no("'bias' has the stride " + std::to_string(bias.strides[0]) +
                       " and must be contiguous");
  }
  problem.has_bias = true;
  problem.bias = *element;
  problem.bias_alignment = 1U << bias.alignment;
  if (problem.bias_alignment % size_of(*element) != 0) {
    return Support::no("the address of 'bias' is no multiple of its element size: copy it");
  }
  return Support::yes();
}

Matrix zeros(Element element, std::int64_t columns) {
  Matrix matrix;
  matrix.element = element;
  matrix.rows = matrix.leading = kZeroK;
  matrix.columns = columns;
  matrix.alignment = 256;
  return matrix;
}

void replace_by_zeros(MatmulProblem& problem) {
  problem.first = zeros(problem.first.element, problem.n);
  problem.first.transposed = true;
  problem.second = zeros(problem.second.element, problem.m);
  const auto bytes = static_cast<std::size_t>(kZeroK * std::max(problem.m, problem.n)) *
                     size_of(problem.first.element);
  problem.zero_bytes = (bytes + 255) / 256 * 256;
  problem.k = kZeroK;
}

}  // namespace

std::size_t size_of(Element element) noexcept {
  switch (element) {
    case Element::kFp64:
      return 8;
    case Element::kFp32:
      return 4;
    case Element::kFp16:
    case Element::kBf16:
      return 2;
    case Element::kFp8E4m3:
      return 1;
  }
  return 1;
}

Support describe_matmul(const OpDesc& op, const DeviceInfo& device, MatmulProblem& problem) {
  problem = {};
  if (op.kind != OpKind::kMatmul) return Support::no("cuBLAS serves matmul only");
  if (op.device.type != DeviceType::kCuda) return Support::no("cuBLAS serves CUDA devices only");
  if (Support types = check_types(op, device, problem); !types.ok) return types;

  const TensorDesc& a = op[Slot::kA];
  const TensorDesc& b = op[Slot::kB];
  const TensorDesc& out = op[Slot::kOut];
  for (const TensorDesc* tensor : {&a, &b, &out}) {
    if (tensor->rank < 2 || tensor->rank > 3) {
      return Support::no("cuBLAS takes matrices and batches of matrices with one batch dimension");
    }
  }
  problem.m = a.shape[a.rank - 2U];
  problem.k = a.shape[a.rank - 1U];
  problem.n = b.shape[b.rank - 1U];
  problem.batch = out.rank == 3 ? out.shape[0] : 1;
  for (const auto& [name, length] :
       {std::pair("m", problem.m), std::pair("n", problem.n), std::pair("k", problem.k),
        std::pair("batch", problem.batch)}) {
    if (length > kMost) {
      return Support::no(std::string(name) + " is " + std::to_string(length) +
                         ", and cuBLAS counts to 2^31 - 1: split the product");
    }
  }
  problem.activation = op.attributes.activation;
  problem.scale_a = op.has(Slot::kScaleA);
  problem.scale_b = op.has(Slot::kScaleB);
  if (Support bias = check_bias(op, problem); !bias.ok) return bias;
  if (problem.empty()) return Support::yes();

  if (!take(out, true, problem.out) || problem.out.transposed) {
    return Support::no("'out' has the strides [" + std::to_string(out.strides[out.rank - 2U]) +
                       ", " + std::to_string(out.strides[out.rank - 1U]) +
                       "]: its rows must be contiguous and not overlap");
  }
  if (Support batch = take_batch("out", out, problem.batch, problem.out); !batch.ok) return batch;
  if (Support place = take_alignment("out", out, problem.out); !place.ok) return place;
  if (problem.batch > 1 && problem.out.batch_stride == 0) {
    return Support::no("the matrices of 'out' share memory");
  }
  if (problem.k == 0) {
    replace_by_zeros(problem);
    return Support::yes();
  }
  // fp8 is multiplied along contiguous k only. Else the longer side is better for wide loads.
  const bool fp8 = problem.first.element == Element::kFp8E4m3;
  if (!take(b, !fp8 && problem.n >= problem.k, problem.first)) {
    return Support::no(layout_reason("b", b));
  }
  if (!take(a, fp8 || problem.k >= problem.m, problem.second)) {
    return Support::no(layout_reason("a", a));
  }
  if (Support batch = take_batch("b", b, problem.batch, problem.first); !batch.ok) return batch;
  if (Support batch = take_batch("a", a, problem.batch, problem.second); !batch.ok) return batch;
  if (Support place = take_alignment("b", b, problem.first); !place.ok) return place;
  return take_alignment("a", a, problem.second);
}

Support check_for_lt(const MatmulProblem& problem, const DeviceInfo& device) {
  if (problem.activation == Activation::kGelu) {
    return Support::no(
        "cuBLASLt has GELU by tanh only, and not by erf: ask for gelu_tanh, or apply it "
        "after the product");
  }
  if (problem.activation == Activation::kSilu) {
    return Support::no("cuBLASLt has no SiLU: apply it after the product");
  }
  if (problem.activation == Activation::kGeluTanh && problem.out.element == Element::kFp64) {
    return Support::no(
        "the GELU of cuBLASLt is exact to ten digits only in float64: apply it after the product");
  }
  if (problem.first.element != Element::kFp8E4m3) {
    if (problem.scale_a || problem.scale_b) return Support::no("only float8 inputs have scales");
    return Support::yes();
  }
  if (problem.empty()) return Support::yes();
  const bool any_layout = device.compute_capability.first == 10;
  if (!any_layout && (!problem.first.transposed || problem.second.transposed)) {
    return Support::no(
        "float8 is multiplied here only along contiguous k: 'a' must be row-major, and "
        "'b' the transpose of a row-major matrix");
  }
  const auto row = static_cast<std::int64_t>(size_of(problem.out.element)) * problem.n;
  if (problem.k % 16 != 0 || row % 16 != 0) {
    return Support::no(
        "float8 needs k in multiples of 16 and rows of the result in multiples of 16 "
        "bytes, and k is " +
        std::to_string(problem.k) + ", n " + std::to_string(problem.n) + ": pad them with zeros");
  }
  for (const auto& [name, matrix] :
       {std::pair("b", &problem.first), std::pair("a", &problem.second),
        std::pair("out", &problem.out)}) {
    const auto size = static_cast<std::int64_t>(size_of(matrix->element));
    if (matrix->alignment < 16 || matrix->leading * size % 16 != 0 ||
        matrix->batch_stride * size % 16 != 0) {
      return Support::no(std::string("float8 needs addresses and strides in multiples of 16 bytes, "
                                     "and '") +
                         name + "' has others: copy it to one that is padded");
    }
  }
  return Support::yes();
}

Support check_for_gemm(const MatmulProblem& problem) {
  if (problem.first.element == Element::kFp8E4m3) {
    return Support::no("cuBLAS has no float8: cublas.cublasLt has");
  }
  if (problem.has_bias) {
    return Support::no("cuBLAS adds no bias: cublas.cublasLt does");
  }
  if (problem.activation != Activation::kNone) {
    return Support::no("cuBLAS applies no activation: cublas.cublasLt has relu and gelu_tanh");
  }
  return Support::yes();
}

}  // namespace xpuruntime::cublas
