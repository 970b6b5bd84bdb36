// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "operation.h"
#include "prepared_calls.h"
#include "stream_use.h"
#include "xpuruntime/dispatcher.h"

namespace xpuruntime::ort {

/// The kernel of one node in one session: an Operation and the CallSite that runs it, on the stream
/// that ONNX Runtime gives. Its output is ONNX Runtime's memory, its scratch memory xpuruntime's.
///
/// Many threads may compute at once. Under capture of ONNX Runtime's CUDA graph nothing is
/// measured; scratch memory is held by the graph (see Workspaces).
class OpKernel {
 public:
  /// Reads the attributes. Throws InputError for a wrong one and for inputs of types that do not
  /// go together, UnsupportedOperationError with what ONNX Runtime refuses.
  OpKernel(const OrtApi& api, const OrtKernelInfo* info, const OpSpec& spec, DeviceType type);

  /// Throws what CallSite::run throws and InputError naming the input.
  void compute(OrtKernelContext* context);

  const OrtApi& api() const noexcept { return api_; }

  /// "xpuruntime.MatMul 'name'": for messages while it is being made.
  static std::string title(const OrtApi& api, const OrtKernelInfo* info,
                           const OpSpec& spec) noexcept;

 private:
  struct Inputs {
    InputKeys keys;
    std::array<void*, OpSpec::kMaxInputs> data{};
  };
  void check_types(const OrtKernelInfo* info) const;
  void read_constants(const OrtKernelInfo* info);
  void read_shape(const OrtValue* value, InputKey& key) const;
  Inputs read(const OrtKernelContext* context) const;
  void* output(OrtKernelContext* context, const std::int64_t* shape, std::size_t rank) const;
  void describe_and_run(OrtKernelContext* context, const Inputs& inputs, std::size_t hash,
                        StreamHandle stream);

  const OrtApi& api_;
  const OpSpec& spec_;
  const DeviceId device_;
  std::size_t count_ = 0;  // of inputs that the node has, those left out at the end not counted
  std::array<std::optional<InputKey>, OpSpec::kMaxInputs> constants_;  // never another shape
  std::unique_ptr<const Operation> operation_;
  CallSite site_;
  PreparedCalls prepared_;
  StreamUse streams_;
};

}  // namespace xpuruntime::ort
