// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cstdint>
#include <cstdlib>
#include <string>

#include "cuda_raw/norm/norm.h"
#include "cuda_raw/norm/norm_launch.h"

namespace xpuruntime::cuda_raw {
namespace {

constexpr std::int64_t kMaxColumns = std::int64_t{1} << 30;

std::string refuse_sizes(std::int64_t rows, std::int64_t columns, int cc_major) {
  if (cc_major < 8) {
    return "the device has compute capability " + std::to_string(cc_major) +
           ".x and these kernels need 8.0: use another kernel";
  }
  if (rows < 0) return "rows is " + std::to_string(rows) + ": give 0 or more";
  if (columns < 1 || columns > kMaxColumns) {
    return "columns is " + std::to_string(columns) + ": give 1 to 2^30";
  }
  return {};
}

enum class Role { kInput, kOutput };

struct Named {
  Role role;
  const char* name;
  const void* pointer;
  std::int64_t stride;
  int size;
  bool required;
};

std::string refuse_tensor(const Named& tensor, std::int64_t rows, std::int64_t columns) {
  const std::string name = tensor.name;
  if (tensor.pointer == nullptr) {
    return tensor.required && rows > 0 ? name + " is null: give its device address" : "";
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.pointer) % static_cast<unsigned>(tensor.size) != 0) {
    return name + " is not aligned to its own element of " + std::to_string(tensor.size) +
           " bytes: copy it to aligned memory";
  }
  if (tensor.role == Role::kOutput && rows > 1 && std::abs(tensor.stride) < columns) {
    return name + " is written with row stride " + std::to_string(tensor.stride) + ", less than " +
           std::to_string(columns) + " columns, so that rows overlap: make it contiguous";
  }
  return {};
}

std::string refuse_weight_type(NormType type, NormType weight_type) {
  if (weight_type == NormType::fp32 || weight_type == type) return {};
  return "weight and bias are neither fp32 nor of the type of x: convert them";
}

constexpr std::int64_t kNoRows = INT64_MAX;

template <std::size_t kCount>
std::string refuse_tensors(const Named (&tensors)[kCount], std::int64_t rows,
                           std::int64_t columns) {
  for (const Named& tensor : tensors) {
    std::string refusal = refuse_tensor(tensor, rows, columns);
    if (!refusal.empty()) return refusal;
  }
  return {};
}

}  // namespace

std::string norm_refusal(const NormForwardArgs& args, int cc_major) {
  std::string refusal = refuse_sizes(args.rows, args.columns, cc_major);
  if (refusal.empty()) refusal = refuse_weight_type(args.type, args.weight_type);
  if (!refusal.empty()) return refusal;
  if (args.rms && args.bias != nullptr) return "bias is given and RMS norm has none: leave it out";
  if (args.rms && args.mean != nullptr) return "mean is given and RMS norm has none: leave it out";
  if (args.sum_out != nullptr && args.residual == nullptr) {
    return "sum_out is given without residual, so it would be x: leave it out";
  }
  if (!(args.epsilon >= 0.0F)) return "epsilon is negative or not a number: give 0 or more";
  const int size = norm::size_of(args.type);
  const int weight_size = norm::size_of(args.weight_type);
  const Named tensors[] = {
      {Role::kInput, "x", args.x, args.x_row_stride, size, true},
      {Role::kInput, "residual", args.residual, args.residual_row_stride, size, false},
      {Role::kOutput, "y", args.y, args.y_row_stride, size, true},
      {Role::kOutput, "sum_out", args.sum_out, args.sum_row_stride, size, false},
      {Role::kInput, "weight", args.weight, kNoRows, weight_size, false},
      {Role::kInput, "bias", args.bias, kNoRows, weight_size, false},
      {Role::kOutput, "mean", args.mean, kNoRows, 4, false},
      {Role::kOutput, "rstd", args.rstd, kNoRows, 4, false}};
  return refuse_tensors(tensors, args.rows, args.columns);
}

std::string norm_refusal(const NormBackwardArgs& args, int cc_major) {
  std::string refusal = refuse_sizes(args.rows, args.columns, cc_major);
  if (refusal.empty()) refusal = refuse_weight_type(args.type, args.weight_type);
  if (!refusal.empty()) return refusal;
  if (args.rms && args.grad_bias != nullptr) {
    return "grad_bias is given and RMS norm has no bias: leave it out";
  }
  const int size = norm::size_of(args.type);
  const int weight_size = norm::size_of(args.weight_type);
  const Named tensors[] = {
      {Role::kInput, "grad_y", args.grad_y, args.grad_y_row_stride, size, true},
      {Role::kInput, "x", args.x, args.x_row_stride, size, true},
      {Role::kInput, "grad_sum", args.grad_sum, args.grad_sum_row_stride, size, false},
      {Role::kOutput, "grad_x", args.grad_x, args.grad_x_row_stride, size, true},
      {Role::kInput, "weight", args.weight, kNoRows, weight_size, false},
      {Role::kOutput, "grad_weight", args.grad_weight, kNoRows, weight_size, false},
      {Role::kOutput, "grad_bias", args.grad_bias, kNoRows, weight_size, false},
      {Role::kInput, "mean", args.mean, kNoRows, 4, !args.rms},
      {Role::kInput, "rstd", args.rstd, kNoRows, 4, true}};
  return refuse_tensors(tensors, args.rows, args.columns);
}

}  // namespace xpuruntime::cuda_raw
