// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attributes.h"
#include "xpuruntime/operand.h"

namespace xpuruntime::ort {

/// A dimension as far as it is known before a run: a number, or a name, or neither.
struct Dim {
  std::int64_t value = -1;
  std::string symbol;

  bool known() const noexcept { return value >= 0; }
  friend bool operator==(const Dim&, const Dim&) = default;
};
/// Nothing where not even the rank is known.
using SymbolicShape = std::optional<std::vector<Dim>>;

/// One call, described. Both ways of seeing its output are contiguous, or views of the same bytes.
struct Prepared {
  OpCall call;
  /// How the kernel sees the output; its address is still to be set.
  Operand out;
  /// How ONNX Runtime sees it.
  std::array<std::int64_t, Operand::kMaxRank> shape{};
  std::size_t rank = 0;
};

/// A contiguous operand as the only output of a call asks for it; its address is still to be set.
Operand contiguous_output(const OpCall& call);

/// What one node computes, its attributes read. Knows nothing of devices, kernels and streams.
/// Immutable.
class Operation {
 public:
  virtual ~Operation() = default;

  /// From OpSpec::kMaxInputs operands, by the places of OpSpec::inputs; what is left out is
  /// absent. Throws InputError naming the input.
  virtual Prepared prepare(std::span<const Operand> inputs) const = 0;
  /// The shape of the output, from as many inputs. A wrong input is not refused here: then nothing
  /// is known.
  virtual SymbolicShape infer(std::span<const SymbolicShape> inputs) const = 0;
};

/// Element types that an input may have.
enum class InputTypes : std::uint8_t {
  kSame,        ///< that of the first input, which is fp16, bf16, fp32 or fp64
  kSameOrFp32,  ///< that, or fp32
  kMask,        ///< those, or bool
};

struct InputSpec {
  const char* name = "";
  std::uint8_t slot = 0;  ///< of the operation
  InputTypes types = InputTypes::kSame;
  bool optional = false;
};

struct AttributeSpec {
  const char* name = "";
  const char* kind = "";  ///< "int", "ints", "float" or "string"
};

/// One operator of the domain `xpuruntime`.
struct OpSpec {
  static constexpr std::size_t kMaxInputs = 4;

  const char* name = "";
  std::span<const InputSpec> inputs;
  /// Besides `rules`, `node` and `deterministic`, which all have.
  std::span<const AttributeSpec> attributes;
  std::unique_ptr<const Operation> (*make)(const Attributes& attributes) = nullptr;
};

/// A folder's worth of operators, one file each. All of version 1.
extern const OpSpec kMatMul;
extern const OpSpec kConv;
extern const OpSpec kLayerNormalization;
extern const OpSpec kRmsNormalization;
extern const OpSpec kAttention;

/// All of them.
std::span<const OpSpec* const> operators() noexcept;

/// For the makers: attributes in range. Throw InputError naming the attribute.
Activation activation_of(const Attributes& attributes);
std::int32_t small_integer(std::int64_t value, const char* name);

}  // namespace xpuruntime::ort
