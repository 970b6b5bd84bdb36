// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api.h"

namespace xpuruntime::ort {

/// Attributes of a node, by name. What the node does not state is nothing; a value of another kind
/// than is asked for is an InputError where ONNX Runtime reports it.
class Attributes {
 public:
  virtual ~Attributes() = default;
  virtual std::optional<std::int64_t> integer(const char* name) const = 0;
  virtual std::optional<std::vector<std::int64_t>> integers(const char* name) const = 0;
  virtual std::optional<float> number(const char* name) const = 0;
  virtual std::optional<std::string> text(const char* name) const = 0;

  bool flag(const char* name) const { return integer(name).value_or(0) != 0; }
};

/// Of a node whose kernel is being made. The views must outlive it.
class KernelAttributes final : public Attributes {
 public:
  KernelAttributes(const OrtApi& api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  std::optional<std::int64_t> integer(const char* name) const override;
  std::optional<std::vector<std::int64_t>> integers(const char* name) const override;
  std::optional<float> number(const char* name) const override;
  std::optional<std::string> text(const char* name) const override;

 private:
  bool found(const char* name, OrtStatus* status) const;
  const OrtApi& api_;
  const OrtKernelInfo* info_;
};

/// Of a node whose output shape is asked for. The views must outlive it.
class ShapeAttributes final : public Attributes {
 public:
  ShapeAttributes(const OrtApi& api, const OrtShapeInferContext* context)
      : api_(api), context_(context) {}
  std::optional<std::int64_t> integer(const char* name) const override;
  std::optional<std::vector<std::int64_t>> integers(const char* name) const override;
  std::optional<float> number(const char* name) const override;
  std::optional<std::string> text(const char* name) const override;

 private:
  const OrtOpAttr* find(const char* name) const;
  const OrtApi& api_;
  const OrtShapeInferContext* context_;
};

}  // namespace xpuruntime::ort
