// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "custom_ops.h"

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "op_kernel.h"
#include "shapes.h"

namespace xpuruntime::ort {
namespace {

/// The struct of the C interface, and behind it what its functions need to know. One for each type
/// that the first input, and so the output, may have: the types of other inputs may differ from it,
/// and ONNX Runtime would guess the output's from the last of them.
struct CustomOp : OrtCustomOp {
  CustomOp(const OrtApi& with, const OpSpec& of, DeviceType on,
           ONNXTensorElementDataType first) noexcept;
  const OrtApi& api;
  const OpSpec& spec;
  const DeviceType device;
  const ONNXTensorElementDataType type;
};

constexpr std::array kTypes{
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE};

const CustomOp& self(const OrtCustomOp* op) noexcept { return *static_cast<const CustomOp*>(op); }

OrtStatusPtr create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                    void** kernel) noexcept {
  const OpSpec& spec = self(op).spec;
  try {
    *kernel = std::make_unique<OpKernel>(*api, info, spec, self(op).device).release();
    return nullptr;
  } catch (...) {
    return current_status(*api, OpKernel::title(*api, info, spec));
  }
}

OrtStatusPtr compute(void* kernel, OrtKernelContext* context) noexcept {
  auto* const mine = static_cast<OpKernel*>(kernel);
  try {
    mine->compute(context);
    return nullptr;
  } catch (...) {
    return current_status(mine->api());
  }
}

OrtStatusPtr infer(const OrtCustomOp* op, OrtShapeInferContext* context) noexcept {
  try {
    infer_shape(self(op).api, self(op).spec, context);
    return nullptr;
  } catch (...) {
    return current_status(self(op).api, std::string("xpuruntime.") + self(op).spec.name);
  }
}

CustomOp::CustomOp(const OrtApi& with, const OpSpec& of, DeviceType on,
                   ONNXTensorElementDataType first) noexcept
    : OrtCustomOp{}, api(with), spec(of), device(on), type(first) {
  version = kApiVersion;
  GetName = [](const OrtCustomOp* op) { return self(op).spec.name; };
  GetExecutionProviderType = [](const OrtCustomOp* op) {
    return self(op).device == DeviceType::kCuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  };
  GetInputTypeCount = [](const OrtCustomOp* op) { return self(op).spec.inputs.size(); };
  GetOutputTypeCount = [](const OrtCustomOp*) { return std::size_t{1}; };
  // Undefined stands for any; OpKernel says which go together.
  GetInputType = [](const OrtCustomOp* op, std::size_t index) {
    return index == 0 ? self(op).type : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  };
  GetOutputType = [](const OrtCustomOp* op, std::size_t) { return self(op).type; };
  GetInputCharacteristic = [](const OrtCustomOp* op, std::size_t index) {
    return self(op).spec.inputs[index].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return INPUT_OUTPUT_REQUIRED; };
  GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
  GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = create;
  KernelComputeV2 = compute;
  KernelDestroy = [](void* kernel) { delete static_cast<OpKernel*>(kernel); };
  InferOutputShapeFn = infer;
}

/// What one loaded ONNX Runtime was given. It keeps views, so this is never destroyed.
struct Registration {
  OrtCustomOpDomain* domain = nullptr;
  std::vector<std::unique_ptr<const CustomOp>> ops;
};

std::unique_ptr<Registration> make_registration(const OrtApi& api) {
  auto made = std::make_unique<Registration>();
  check(api, api.CreateCustomOpDomain("xpuruntime", &made->domain));
  for (const OpSpec* spec : operators()) {
    for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
#ifndef XPURUNTIME_WITH_CUDA
      if (device == DeviceType::kCuda) continue;
#endif
      for (const ONNXTensorElementDataType type : kTypes) {
        made->ops.push_back(std::make_unique<const CustomOp>(api, *spec, device, type));
        check(api, api.CustomOpDomain_Add(made->domain, made->ops.back().get()));
      }
    }
  }
  return made;
}

OrtCustomOpDomain* domain_for(const OrtApi& api) {
  static std::mutex mutex;
  static auto* const made = new std::map<const OrtApi*, std::unique_ptr<Registration>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Registration>& mine = (*made)[&api];
  if (mine == nullptr) mine = make_registration(api);
  return mine->domain;
}

}  // namespace
}  // namespace xpuruntime::ort

OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace xpuruntime::ort;
  const OrtApi* const api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    const std::string version = base->GetVersionString();
    return base->GetApi(1)->CreateStatus(
        ORT_NOT_IMPLEMENTED,
        ("the operators of xpuruntime need ONNX Runtime 1." + std::to_string(kApiVersion) +
         " or newer; this is " + version + ": pip install --upgrade onnxruntime")
            .c_str());
  }
  try {
    check(*api, api->AddCustomOpDomain(options, domain_for(*api)));
    return nullptr;
  } catch (...) {
    return current_status(*api, "the operators of xpuruntime cannot be registered");
  }
}
