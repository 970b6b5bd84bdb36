// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "op_kernel.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "named_rules.h"
#include "xpuruntime/error.h"

namespace xpuruntime::ort {
namespace {

std::uint8_t alignment_of(const void* data) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return static_cast<std::uint8_t>(std::countr_zero(address | 256U));
}

// The device whose memory a kernel of this node works on.
DeviceId device_of(const OrtApi& api, const OrtKernelInfo* info, DeviceType type) {
  if (type == DeviceType::kCpu) return {};
  OrtAllocator* allocator = nullptr;
  check(api, api.KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator));
  const OrtMemoryInfo* memory = nullptr;
  int index = 0;
  OrtStatus* status = api.AllocatorGetInfo(allocator, &memory);
  if (status == nullptr) status = api.MemoryInfoGetId(memory, &index);
  api.ReleaseAllocator(allocator);
  check(api, status);
  return {type, index};
}

std::string name_of(const OrtApi& api, const OrtKernelInfo* info) {
  std::size_t size = 0;
  check(api, api.KernelInfo_GetNodeName(info, nullptr, &size));
  std::string name(size, '\0');
  check(api, api.KernelInfo_GetNodeName(info, name.data(), &size));
  name.resize(size == 0 ? 0 : size - 1);
  return name;
}

// The name in the model that the user knows, which rules ask for.
std::string source_name(const OrtApi& api, const OrtKernelInfo* info) {
  const std::optional<std::string> given = KernelAttributes(api, info).text("node");
  return given && !given->empty() ? *given : name_of(api, info);
}

// Undefined for an input that was left out in the middle, which only shows in its having no type.
ONNXTensorElementDataType type_of(const OrtApi& api, const OrtKernelInfo* info, std::size_t index,
                                  bool optional) {
  OrtTypeInfo* type = nullptr;
  if (OrtStatus* missing = api.KernelInfo_GetInputTypeInfo(info, index, &type)) {
    if (!optional) check(api, missing);
    api.ReleaseStatus(missing);
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  }
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  ONNXTensorElementDataType element = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  OrtStatus* status = api.CastTypeInfoToTensorInfo(type, &tensor);
  if (status == nullptr && tensor != nullptr) status = api.GetTensorElementType(tensor, &element);
  api.ReleaseTypeInfo(type);
  check(api, status);
  return element;
}

Operand operand_of(const InputSpec& spec, const InputKey& key, DeviceId device, void* data) {
  Operand made;
  made.name = spec.name;
  if (key.present == 0) return made;
  made.absent = false;
  made.rank = key.rank;
  made.dtype = key.dtype;
  made.device = device;
  made.data = data;
  made.shape = key.shape;
  set_dense_strides(made);
  return made;
}

}  // namespace

OpKernel::OpKernel(const OrtApi& api, const OrtKernelInfo* info, const OpSpec& spec,
                   DeviceType type)
    : api_(api),
      spec_(spec),
      device_(device_of(api, info, type)),
      operation_(spec.make(KernelAttributes(api, info))),
      site_(Dispatcher::instance(),
            NamedRules::find(KernelAttributes(api, info).text("rules").value_or(""),
                             source_name(api, info)),
            source_name(api, info)),
      streams_(device_) {
  check(api, api.KernelInfo_GetInputCount(info, &count_));
  if (count_ > spec.inputs.size()) {
    throw InputError("it has " + std::to_string(count_) + " inputs; expected at most " +
                     std::to_string(spec.inputs.size()));
  }
  check_types(info);
  read_constants(info);
}

std::string OpKernel::title(const OrtApi& api, const OrtKernelInfo* info,
                            const OpSpec& spec) noexcept {
  try {
    return std::string("xpuruntime.") + spec.name + " '" + source_name(api, info) + "'";
  } catch (...) {
    return {};
  }
}

// Said when the session is made, and not in the first run.
void OpKernel::check_types(const OrtKernelInfo* info) const {
  const DType first = to_dtype(type_of(api_, info, 0, false));
  for (std::size_t i = 0; i < count_; ++i) {
    const InputSpec& input = spec_.inputs[i];
    const ONNXTensorElementDataType type = type_of(api_, info, i, input.optional);
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) continue;
    const DType dtype = to_dtype(type);
    constexpr DType kFloat32{2, 32, 1};
    constexpr DType kBool{6, 8, 1};
    const bool fits = (is_real(dtype) && dtype == first) ||
                      (dtype == kFloat32 && input.types != InputTypes::kSame) ||
                      (dtype == kBool && input.types == InputTypes::kMask);
    if (fits) continue;
    throw InputError("input '" + std::string(input.name) + "' is " + to_string(dtype) +
                     " and input '" + std::string(spec_.inputs[0].name) + "' is " +
                     to_string(first) +
                     ": these are not computed together, and nothing is converted silently; put a "
                     "Cast before it");
  }
}

void OpKernel::read_constants(const OrtKernelInfo* info) {
  for (std::size_t i = 0; i < count_; ++i) {
    int constant = 0;
    const OrtValue* value = nullptr;
    check(api_, api_.KernelInfoGetConstantInput_tensor(info, i, &constant, &value));
    if (constant != 0 && value != nullptr) read_shape(value, constants_[i].emplace());
  }
}

void OpKernel::read_shape(const OrtValue* value, InputKey& key) const {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api_, api_.GetTensorTypeAndShape(value, &info));
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::size_t rank = 0;
  OrtStatus* status = api_.GetTensorElementType(info, &type);
  if (status == nullptr) status = api_.GetDimensionsCount(info, &rank);
  const bool fits = rank <= key.shape.size();
  if (status == nullptr && fits) status = api_.GetDimensions(info, key.shape.data(), rank);
  api_.ReleaseTensorTypeAndShapeInfo(info);
  check(api_, status);
  if (!fits) {
    throw InputError("an input has " + std::to_string(rank) + " dimensions, and at most " +
                     std::to_string(key.shape.size()) + " are possible here");
  }
  key.dtype = to_dtype(type);
  key.rank = static_cast<std::uint8_t>(rank);
  key.present = 1;
}

OpKernel::Inputs OpKernel::read(const OrtKernelContext* context) const {
  Inputs inputs;
  for (std::size_t i = 0; i < count_; ++i) {
    const OrtValue* value = nullptr;
    check(api_, api_.KernelContext_GetInput(context, i, &value));
    if (value == nullptr) continue;
    InputKey& key = inputs.keys[i];
    if (constants_[i]) {
      key = *constants_[i];
    } else {
      read_shape(value, key);
    }
    check(api_, api_.GetTensorMutableData(const_cast<OrtValue*>(value), &inputs.data[i]));
    key.alignment = alignment_of(inputs.data[i]);
  }
  return inputs;
}

void* OpKernel::output(OrtKernelContext* context, const std::int64_t* shape,
                       std::size_t rank) const {
  OrtValue* value = nullptr;
  check(api_, api_.KernelContext_GetOutput(context, 0, shape, rank, &value));
  void* data = nullptr;
  check(api_, api_.GetTensorMutableData(value, &data));
  return data;
}

void OpKernel::compute(OrtKernelContext* context) {
  StreamHandle stream = 0;
  if (device_.type == DeviceType::kCuda) {
    void* given = nullptr;
    check(api_, api_.KernelContext_GetGPUComputeStream(context, &given));
    stream = reinterpret_cast<StreamHandle>(given);
    streams_.note(stream);
  }
  const Inputs inputs = read(context);
  const std::size_t hash = PreparedCalls::hash(inputs.keys, count_);
  const PreparedCall* const call = prepared_.find(inputs.keys, count_, hash);
  if (call == nullptr) {
    describe_and_run(context, inputs, hash, stream);
    return;
  }
  void* const out = output(context, call->shape.data(), call->rank);
  if (call->empty) return;
  std::array<void*, kMaxSlots> data{};
  for (std::size_t i = 0; i < count_; ++i) data[spec_.inputs[i].slot] = inputs.data[i];
  data[call->out_slot] = out;
  if (alignment_of(out) == call->desc.tensors[call->out_slot].alignment) {
    site_.run(call->desc, data.data(), stream);
    return;
  }
  OpDesc desc = call->desc;
  desc.tensors[call->out_slot].alignment = alignment_of(out);
  site_.run(desc, data.data(), stream);
}

void OpKernel::describe_and_run(OrtKernelContext* context, const Inputs& inputs, std::size_t hash,
                                StreamHandle stream) {
  std::array<Operand, OpSpec::kMaxInputs> operands;
  for (std::size_t i = 0; i < spec_.inputs.size(); ++i) {
    operands[i] = operand_of(spec_.inputs[i], inputs.keys[i], device_, inputs.data[i]);
  }
  Prepared made = operation_->prepare(operands);
  made.out.data = output(context, made.shape.data(), made.rank);
  const OutputSpec& spec = made.call.outputs()[0];
  made.call.set_output(spec, made.out);
  auto call = std::make_unique<PreparedCall>();
  call->inputs = inputs.keys;
  call->hash = hash;
  call->desc = made.call.desc;
  call->out_slot = spec.slot;
  call->empty = made.call.empty();
  call->shape = made.shape;
  call->rank = made.rank;
  if (!call->empty) site_.run(made.call.desc, made.call.data.data(), stream);
  prepared_.keep(std::move(call));
}

}  // namespace xpuruntime::ort
