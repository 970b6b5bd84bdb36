// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "attributes.h"

#include <string_view>

#include "xpuruntime/error.h"

namespace xpuruntime::ort {

// The interface has no call that asks whether an attribute is there; only the text of the status
// distinguishes a missing one from one of another kind.
bool KernelAttributes::found(const char* name, OrtStatus* status) const {
  if (status == nullptr) return true;
  const std::string message = api_.GetErrorMessage(status);
  api_.ReleaseStatus(status);
  if (message.find("match") != std::string::npos) {
    throw InputError("the attribute '" + std::string(name) + "' is of another kind (" + message +
                     ")");
  }
  return false;
}

std::optional<std::int64_t> KernelAttributes::integer(const char* name) const {
  std::int64_t value = 0;
  if (!found(name, api_.KernelInfoGetAttribute_int64(info_, name, &value))) return std::nullopt;
  return value;
}

std::optional<std::vector<std::int64_t>> KernelAttributes::integers(const char* name) const {
  std::size_t count = 0;
  if (!found(name, api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &count))) {
    return std::nullopt;
  }
  if (count == 0) {  // what an attribute of another kind looks like too
    throw InputError("the attribute '" + std::string(name) +
                     "' is no list of ints, or an empty one: leave it out for its default");
  }
  std::vector<std::int64_t> values(count);
  check(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, values.data(), &count));
  return values;
}

std::optional<float> KernelAttributes::number(const char* name) const {
  float value = 0.0F;
  if (!found(name, api_.KernelInfoGetAttribute_float(info_, name, &value))) return std::nullopt;
  return value;
}

std::optional<std::string> KernelAttributes::text(const char* name) const {
  std::size_t size = 0;
  if (!found(name, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size))) {
    return std::nullopt;
  }
  std::string value(size, '\0');
  check(api_, api_.KernelInfoGetAttribute_string(info_, name, value.data(), &size));
  value.resize(size == 0 ? 0 : size - 1);  // without the final zero
  return value;
}

const OrtOpAttr* ShapeAttributes::find(const char* name) const {
  const OrtOpAttr* found = nullptr;
  OrtStatus* const status = api_.ShapeInferContext_GetAttribute(context_, name, &found);
  if (status == nullptr) return found;
  api_.ReleaseStatus(status);
  return nullptr;
}

std::optional<std::int64_t> ShapeAttributes::integer(const char* name) const {
  const OrtOpAttr* const found = find(name);
  if (found == nullptr) return std::nullopt;
  std::int64_t value = 0;
  std::size_t size = 0;
  check(api_, api_.ReadOpAttr(found, ORT_OP_ATTR_INT, &value, sizeof value, &size));
  return value;
}

std::optional<std::vector<std::int64_t>> ShapeAttributes::integers(const char* name) const {
  const OrtOpAttr* const found = find(name);
  if (found == nullptr) return std::nullopt;
  std::vector<std::int64_t> values(16);
  std::size_t size = 0;
  check(api_, api_.ReadOpAttr(found, ORT_OP_ATTR_INTS, values.data(),
                              values.size() * sizeof(std::int64_t), &size));
  values.resize(size / sizeof(std::int64_t));
  return values;
}

std::optional<float> ShapeAttributes::number(const char* name) const {
  const OrtOpAttr* const found = find(name);
  if (found == nullptr) return std::nullopt;
  float value = 0.0F;
  std::size_t size = 0;
  check(api_, api_.ReadOpAttr(found, ORT_OP_ATTR_FLOAT, &value, sizeof value, &size));
  return value;
}

std::optional<std::string> ShapeAttributes::text(const char* name) const {
  const OrtOpAttr* const found = find(name);
  if (found == nullptr) return std::nullopt;
  std::size_t size = 0;
  char none = '\0';
  // Refused with the size that is needed.
  if (OrtStatus* status = api_.ReadOpAttr(found, ORT_OP_ATTR_STRING, &none, 0, &size)) {
    api_.ReleaseStatus(status);
  }
  std::string value(size, '\0');
  if (size != 0) {
    check(api_, api_.ReadOpAttr(found, ORT_OP_ATTR_STRING, value.data(), size, &size));
  }
  while (!value.empty() && value.back() == '\0') value.pop_back();
  return value;
}

}  // namespace xpuruntime::ort
