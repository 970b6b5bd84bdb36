// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "operation.h"

#include <limits>

#include "xpuruntime/error.h"

namespace xpuruntime::ort {

std::span<const OpSpec* const> operators() noexcept {
  static constexpr std::array<const OpSpec*, 5> kAll{&kMatMul, &kConv, &kLayerNormalization,
                                                     &kRmsNormalization, &kAttention};
  return kAll;
}

Operand contiguous_output(const OpCall& call) {
  const OutputSpec& spec = call.outputs()[0];
  Operand made;
  made.name = spec.name;
  made.absent = false;
  made.dtype = spec.dtype;
  made.device = call.desc.device;
  made.rank = spec.rank;
  made.shape = spec.shape;
  set_dense_strides(made);
  return made;
}

Activation activation_of(const Attributes& attributes) {
  const std::optional<std::string> name = attributes.text("activation");
  return name ? parse_activation(*name) : Activation::kNone;
}

std::int32_t small_integer(std::int64_t value, const char* name) {
  if (value < std::numeric_limits<std::int32_t>::min() ||
      value > std::numeric_limits<std::int32_t>::max()) {
    throw InputError("the attribute '" + std::string(name) + "' has " + std::to_string(value) +
                     ", which is out of range");
  }
  return static_cast<std::int32_t>(value);
}

}  // namespace xpuruntime::ort
