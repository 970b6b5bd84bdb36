// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "shapes.h"

#include <memory>
#include <string>
#include <vector>

namespace xpuruntime::ort {
namespace {

using InfoHolder = std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)>;

SymbolicShape shape_of(const OrtApi& api, const OrtTensorTypeAndShapeInfo* info) {
  std::size_t rank = 0;
  check(api, api.GetDimensionsCount(info, &rank));
  // No shape and no dimension look the same here, and no input of these operators is a scalar.
  if (rank == 0) return std::nullopt;
  std::vector<std::int64_t> values(rank);
  std::vector<const char*> symbols(rank);
  check(api, api.GetDimensions(info, values.data(), rank));
  check(api, api.GetSymbolicDimensions(info, symbols.data(), rank));
  std::vector<Dim> dims(rank);
  for (std::size_t i = 0; i < rank; ++i) {
    dims[i].value = values[i] < 0 ? -1 : values[i];
    if (values[i] < 0 && symbols[i] != nullptr) dims[i].symbol = symbols[i];
  }
  return dims;
}

}  // namespace

void infer_shape(const OrtApi& api, const OpSpec& spec, OrtShapeInferContext* context) {
  std::size_t count = 0;
  check(api, api.ShapeInferContext_GetInputCount(context, &count));
  std::vector<SymbolicShape> inputs(OpSpec::kMaxInputs);
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  for (std::size_t i = 0; i < count && i < inputs.size(); ++i) {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // the context's
    check(api, api.ShapeInferContext_GetInputTypeShape(context, i, &info));
    inputs[i] = shape_of(api, info);
    if (i == 0) check(api, api.GetTensorElementType(info, &type));
  }
  const ShapeAttributes attributes(api, context);
  const SymbolicShape made = spec.make(attributes)->infer(inputs);
  if (!made) return;
  const std::string node = attributes.text("node").value_or("");
  std::vector<std::int64_t> values;
  std::vector<std::string> symbols;
  for (const Dim& dim : *made) {
    values.push_back(dim.value);
    symbols.push_back(dim.symbol);
    if (dim.known() || !dim.symbol.empty()) continue;
    if (node.empty()) return;
    symbols.back() = "xpuruntime." + node + "." + std::to_string(values.size() - 1);
  }
  std::vector<const char*> names;
  names.reserve(symbols.size());
  for (const std::string& symbol : symbols) names.push_back(symbol.c_str());
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api.CreateTensorTypeAndShapeInfo(&info));
  const InfoHolder holder(info, api.ReleaseTensorTypeAndShapeInfo);
  check(api, api.SetTensorElementType(info, type));
  check(api, api.SetDimensions(info, values.data(), values.size()));
  check(api, api.SetSymbolicDimensions(info, names.data(), names.size()));
  check(api, api.ShapeInferContext_SetOutputTypeShape(context, 0, info));
}

}  // namespace xpuruntime::ort
