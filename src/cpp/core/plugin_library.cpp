// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/plugin_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>

#include "xpuruntime/error.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/kernel_plugin.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace {

constexpr const char* kEntry = "xpuruntime_kernels";

static_assert(XPURUNTIME_MAX_OPERANDS == kMaxSlots && XPURUNTIME_MAX_RANK == TensorDesc::kMaxRank);
static_assert(XPU_MATMUL == static_cast<int>(OpKind::kMatmul) &&
              XPU_ATTENTION == static_cast<int>(OpKind::kAttention) &&
              XPU_ATTENTION_BACKWARD == static_cast<int>(OpKind::kAttentionBackward) &&
              XPU_LAYER_NORM == static_cast<int>(OpKind::kLayerNorm) &&
              XPU_LAYER_NORM_BACKWARD == static_cast<int>(OpKind::kLayerNormBackward) &&
              XPU_RMS_NORM == static_cast<int>(OpKind::kRmsNorm) &&
              XPU_RMS_NORM_BACKWARD == static_cast<int>(OpKind::kRmsNormBackward) &&
              XPU_CONV == static_cast<int>(OpKind::kConv) &&
              XPU_CONV_INPUT_GRADIENT == static_cast<int>(OpKind::kConvInputGradient) &&
              XPU_CONV_WEIGHT_GRADIENT == static_cast<int>(OpKind::kConvWeightGradient) &&
              kOpKinds == 10);
static_assert(static_cast<int>(Phase::kInfer) == 0 && static_cast<int>(Phase::kTrain) == 1 &&
              static_cast<int>(Phase::kBackward) == 2);
static_assert(static_cast<int>(Activation::kRelu) == 1 &&
              static_cast<int>(Activation::kGelu) == 2 &&
              static_cast<int>(Activation::kGeluTanh) == 3 &&
              static_cast<int>(Activation::kSilu) == 4);
static_assert(static_cast<int>(Causal::kTopLeft) == 1 &&
              static_cast<int>(Causal::kBottomRight) == 2);

XpuOpDescription to_c(const OpDesc& op, const DeviceInfo& device) {
  XpuOpDescription out{};
  out.size = sizeof(XpuOpDescription);
  out.op = static_cast<std::int32_t>(op.kind);
  out.phase = static_cast<std::int32_t>(op.phase);
  out.device_type = op.device.type == DeviceType::kCuda ? XPU_CUDA : XPU_CPU;
  out.device_index = op.device.index;
  out.compute_capability = device.compute_capability.first * 10 + device.compute_capability.second;
  out.sm_count = device.sm_count;
  out.operand_count = op.slots;
  for (std::size_t slot = 0; slot < op.slots; ++slot) {
    const TensorDesc& from = op[slot];
    XpuTensor& to = out.operands[slot];
    to.present = from.present;
    to.code = from.dtype.code;
    to.bits = from.dtype.bits;
    to.lanes = from.dtype.lanes;
    to.rank = from.rank;
    to.alignment = 1 << from.alignment;
    std::copy(from.shape.begin(), from.shape.end(), to.shape);
    std::copy(from.strides.begin(), from.strides.end(), to.strides);
  }
  const OpAttributes& given = op.attributes;
  out.scale = static_cast<float>(given.scale);
  out.epsilon = static_cast<float>(given.epsilon);
  out.dropout_p = given.dropout_p;
  out.activation = static_cast<std::int32_t>(given.activation);
  out.causal = static_cast<std::int32_t>(given.causal);
  out.allow_tf32 = given.allow_tf32 ? 1 : 0;
  out.deterministic = given.deterministic ? 1 : 0;
  out.groups = given.groups;
  std::copy(given.stride.begin(), given.stride.end(), out.stride);
  std::copy(given.dilation.begin(), given.dilation.end(), out.dilation);
  std::copy(given.padding.begin(), given.padding.end(), out.padding);
  return out;
}

// How many bytes the first character of `text` has; 0 where it is none of UTF-8.
std::size_t character(std::string_view text) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t count = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < count) return 0;
  for (std::size_t at = 1; at < count; ++at) {
    if ((byte(at) & 0xC0U) != 0x80) return 0;
  }
  const bool too_long = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
  const bool no_number = (first == 0xED && byte(1) > 0x9F) || (first == 0xF4 && byte(1) > 0x8F);
  return too_long || no_number ? 0 : count;
}

// The text with '?' for every byte that is not UTF-8: it may have been cut within a character.
std::string readable(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t count = character(text);
    out.append(count == 0 ? "?" : text.substr(0, count));
    text.remove_prefix(std::max<std::size_t>(count, 1));
  }
  return out;
}

// Room for what a plugin has to say.
class Said {
 public:
  XpuText text() noexcept { return {room_.data(), room_.size()}; }
  std::string str(const char* otherwise) {
    room_.back() = '\0';
    return room_.front() == '\0' ? otherwise : readable(room_.data());
  }

 private:
  std::array<char, 512> room_{};
};

class PluginBackend final : public KernelBackend {
 public:
  PluginBackend(std::string name, DeviceType type, std::string version)
      : name_(std::move(name)), version_(std::move(version)), type_(type) {}
  std::string_view name() const noexcept override { return name_; }
  DeviceType device_type() const noexcept override { return type_; }
  Support available() const noexcept override { return Support::yes(); }
  std::string version() const override { return version_; }

 private:
  const std::string name_, version_;
  const DeviceType type_;
};

class PluginKernel final : public Kernel {
 public:
  PluginKernel(const XpuKernel& kernel, void* prepared, std::size_t workspace, DeviceId device)
      : kernel_(kernel), prepared_(prepared), workspace_(workspace), device_(device) {}
  ~PluginKernel() override { kernel_.destroy(prepared_); }
  PluginKernel(const PluginKernel&) = delete;
  PluginKernel& operator=(const PluginKernel&) = delete;

  std::size_t workspace_bytes() const noexcept override { return workspace_; }
  bool repeatable() const noexcept override { return kernel_.repeatable != 0; }
  void launch(void* const* operands, void* workspace, StreamHandle stream) const override {
    Said error;
    const std::int32_t status = kernel_.launch(prepared_, operands, workspace,
                                               reinterpret_cast<void*>(stream), error.text());
    if (status == 0) return;
    const std::string message = std::string(kernel_.id) + " failed with " + std::to_string(status) +
                                ": " + error.str("it gives no reason");
    if (device_.type == DeviceType::kCuda) throw CudaError(message, to_string(device_), status);
    throw Error(message, to_string(device_));
  }

 private:
  const XpuKernel& kernel_;
  void* const prepared_;
  const std::size_t workspace_;
  const DeviceId device_;
};

class PluginDefinition final : public KernelDefinition {
 public:
  PluginDefinition(const XpuKernel& kernel, std::shared_ptr<const KernelBackend> backend)
      : kernel_(kernel), backend_(std::move(backend)) {}
  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return kernel_.id; }
  OpKind op() const noexcept override { return static_cast<OpKind>(kernel_.op); }
  std::string description() const override { return readable(kernel_.description); }
  std::string limits() const override { return readable(kernel_.limits); }
  Support supports(const OpDesc& op, const DeviceInfo& device) const override {
    const XpuOpDescription described = to_c(op, device);
    Said reason;
    if (kernel_.supports(&described, reason.text()) != 0) return Support::yes();
    return Support::no(reason.str("it refuses and gives no reason"));
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    if (!config.empty()) {
      throw InputError(std::string(kernel_.id) + " has no configurations, and '" + config +
                       "' is asked for");
    }
    const XpuOpDescription described = to_c(op, device);
    Said error;
    std::size_t workspace = 0;
    void* const prepared = kernel_.prepare(&described, &workspace, error.text());
    if (prepared == nullptr) {
      throw UnsupportedOperationError(
          std::string(kernel_.id) + " cannot be prepared: " + error.str("it gives no reason"),
          to_string(op.device));
    }
    try {
      return std::make_unique<PluginKernel>(kernel_, prepared, workspace, op.device);
    } catch (...) {
      kernel_.destroy(prepared);
      throw;
    }
  }

 private:
  const XpuKernel& kernel_;
  const std::shared_ptr<const KernelBackend> backend_;
};

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw InputError("the kernel library " + path + " " + why);
}

// What the first version of the header had; fields after that are there as far as `size` says.
constexpr std::size_t kFirstSize =
    offsetof(XpuKernel, destroy) + sizeof(decltype(XpuKernel::destroy));

bool is_missing(const char* text) { return text == nullptr || *text == '\0'; }

void check(const std::string& path, const XpuKernel& kernel, std::size_t index,
           std::size_t stride) {
  const std::string which = "describes kernel " + std::to_string(index);
  if (kernel.size < kFirstSize) {
    refuse(path, which + " with a struct of " + std::to_string(kernel.size) +
                     " bytes instead of at least " + std::to_string(kFirstSize) +
                     ": set size to sizeof(XpuKernel)");
  }
  if (kernel.size != stride || stride % alignof(XpuKernel) != 0) {
    refuse(path, which + " with a struct of " + std::to_string(kernel.size) +
                     " bytes, and the first one with " + std::to_string(stride) +
                     ": set size to sizeof(XpuKernel)");
  }
  if (is_missing(kernel.id) || is_missing(kernel.description) || is_missing(kernel.limits) ||
      is_missing(kernel.version) || kernel.supports == nullptr || kernel.prepare == nullptr ||
      kernel.launch == nullptr || kernel.destroy == nullptr) {
    refuse(path, which + " with a text or a function missing");
  }
  if (kernel.op < 0 || kernel.op >= static_cast<std::int32_t>(kOpKinds)) {
    refuse(path, which + " for the unknown operation " + std::to_string(kernel.op));
  }
  if (kernel.device_type != XPU_CPU && kernel.device_type != XPU_CUDA) {
    refuse(path, which + " for the unknown device type " + std::to_string(kernel.device_type));
  }
}

// The kernels at `first`, with one backend.
std::vector<KernelRegistry::Definition> define(const std::string& path, const XpuKernel* first,
                                               std::size_t count) {
  // A newer kernel_plugin.h has longer structs: the library's own size says where the next one is.
  const std::size_t stride = first->size;
  std::vector<KernelRegistry::Definition> made;
  std::shared_ptr<const KernelBackend> backend;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& kernel =
        *reinterpret_cast<const XpuKernel*>(reinterpret_cast<const std::byte*>(first) + i * stride);
    check(path, kernel, i, stride);
    const std::string_view id = kernel.id;
    const std::string name(id.substr(0, id.find('.')));
    const auto type = kernel.device_type == XPU_CUDA ? DeviceType::kCuda : DeviceType::kCpu;
    if (backend == nullptr) {
      backend = std::make_shared<PluginBackend>(name, type, readable(kernel.version));
    } else if (backend->name() != name || backend->device_type() != type ||
               backend->version() != readable(kernel.version)) {
      refuse(path, "has kernels of several backends, device types or versions, " +
                       std::string(made.front()->id()) + " and " + std::string(id) +
                       ": make a library for each");
    }
    made.push_back(std::make_shared<PluginDefinition>(kernel, backend));
  }
  return made;
}

struct Close {
  void operator()(void* handle) const noexcept { (void)dlclose(handle); }
};

}  // namespace

std::vector<std::string> register_plugin_library(KernelRegistry& registry,
                                                 const std::string& path) {
  // Closed where it is refused, so that it can be loaded once it is mended.
  std::unique_ptr<void, Close> library(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL));
  if (library == nullptr) {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): glibc keeps it by thread
    refuse(path, "cannot be opened: " + std::string(dlerror()));
  }
  const auto entry = reinterpret_cast<XpuKernels>(dlsym(library.get(), kEntry));
  if (entry == nullptr) {
    refuse(path, std::string("exports no function ") + kEntry + "; see kernel_plugin.h");
  }
  std::size_t count = 0;
  const XpuKernel* const kernels = entry(XPURUNTIME_KERNEL_ABI, &count);
  if (kernels == nullptr) {
    refuse(path, "has no kernels for version " + std::to_string(XPURUNTIME_KERNEL_ABI) +
                     " of kernel_plugin.h: build it with this one");
  }
  if (count == 0) refuse(path, "has no kernels: it says that their number is 0");
  std::vector<KernelRegistry::Definition> made = define(path, kernels, count);
  std::vector<std::string> ids;
  ids.reserve(made.size());
  for (const auto& one : made) ids.emplace_back(one->id());
  try {
    registry.add_all(std::move(made));
  } catch (const InputError& error) {
    refuse(path, std::string("is refused: ") + error.what());
  }
  (void)library.release();
  return ids;
}

}  // namespace xpuruntime
