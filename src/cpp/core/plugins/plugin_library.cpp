// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/plugin_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "plugins/plugin_description.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/kernel_plugin.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace {

constexpr const char* kEntry = "xpuruntime_kernels";

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
  // Whether the text may have been cut.
  bool full() const noexcept { return std::strlen(room_.data()) + 1 == room_.size(); }

 private:
  std::array<char, 512> room_{};
};

// One kernel of a library: its fields, zero where the library's header has fewer, and the version
// of the descriptions that its functions read.
struct Entry {
  XpuKernel kernel{};
  std::uint32_t abi = XPURUNTIME_KERNEL_ABI;
};

class PluginBackend final : public KernelBackend {
 public:
  PluginBackend(std::string name, DeviceType type, const XpuKernel& first)
      : name_(std::move(name)),
        version_(readable(first.version)),
        type_(type),
        available_(first.available) {}
  std::string_view name() const noexcept override { return name_; }
  DeviceType device_type() const noexcept override { return type_; }
  Support available() const noexcept override {
    if (available_ == nullptr) return Support::yes();
    Said reason;
    if (available_(reason.text()) != 0) return Support::yes();
    try {
      return Support::no(reason.str("it is not available and gives no reason"));
    } catch (...) {
      return {false, {}};
    }
  }
  std::string version() const override { return version_; }

 private:
  const std::string name_, version_;
  const DeviceType type_;
  int32_t (*const available_)(XpuText reason);
};

class PluginKernel final : public Kernel {
 public:
  PluginKernel(const XpuKernel& kernel, void* prepared, std::size_t workspace, DeviceId device,
               std::string config)
      : kernel_(kernel),
        prepared_(prepared),
        workspace_(workspace),
        device_(device),
        config_(std::move(config)) {}
  ~PluginKernel() override { kernel_.destroy(prepared_); }
  PluginKernel(const PluginKernel&) = delete;
  PluginKernel& operator=(const PluginKernel&) = delete;

  std::size_t workspace_bytes() const noexcept override { return workspace_; }
  std::string config() const override { return config_; }
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
  const XpuKernel kernel_;
  void* const prepared_;
  const std::size_t workspace_;
  const DeviceId device_;
  const std::string config_;
};

class PluginDefinition final : public KernelDefinition {
 public:
  PluginDefinition(const Entry& entry, std::shared_ptr<const KernelBackend> backend)
      : kernel_(entry.kernel), abi_(entry.abi), backend_(std::move(backend)) {
    for (std::uint32_t i = 0; i < kernel_.family_count; ++i) {
      families_.emplace_back(kernel_.families[i]);
    }
  }
  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return kernel_.id; }
  OpKind op() const noexcept override { return static_cast<OpKind>(kernel_.op); }
  std::vector<std::string> families() const override { return families_; }
  std::string description() const override { return readable(kernel_.description); }
  std::string limits() const override { return readable(kernel_.limits); }
  bool automatic() const noexcept override { return kernel_.explicit_only == 0; }

  Support supports(const OpDesc& op, const DeviceInfo& device) const override {
    if (abi_ == plugin_abi1::kVersion) {
      std::string why = plugin_abi1::why_not(op);
      if (!why.empty()) return Support::no(std::move(why));
    }
    const PluginDescription described(op, device, abi_);
    Said reason;
    if (kernel_.supports(described.get(), reason.text()) != 0) return Support::yes();
    return Support::no(reason.str("it refuses and gives no reason"));
  }

  Support favoured(const OpDesc& op, const DeviceInfo& device) const override {
    if (kernel_.favoured == nullptr) return Support::yes();
    const PluginDescription described(op, device, abi_);
    Said reason;
    if (kernel_.favoured(described.get(), reason.text()) != 0) return Support::yes();
    return Support::no(reason.str("it is slower here and gives no reason"));
  }

  std::vector<std::string> configs(const OpDesc& op, const DeviceInfo& device,
                                   std::size_t most) const override {
    if (kernel_.config == nullptr) return KernelDefinition::configs(op, device, most);
    const PluginDescription described(op, device, abi_);
    std::vector<std::string> all;
    while (all.size() < most) {
      Said config;
      const auto index = static_cast<std::uint32_t>(all.size());
      if (kernel_.config(described.get(), index, config.text()) == 0) break;
      all.push_back(checked_config(config, "config"));
    }
    return all;
  }

  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    if (!config.empty() && kernel_.prepare_config == nullptr) {
      throw InputError(std::string(kernel_.id) + " has no configurations, and '" + config +
                       "' is asked for");
    }
    const PluginDescription described(op, device, abi_);
    Said error;
    std::size_t workspace = 0;
    void* const prepared =
        config.empty()
            ? kernel_.prepare(described.get(), &workspace, error.text())
            : kernel_.prepare_config(described.get(), config.c_str(), &workspace, error.text());
    if (prepared == nullptr) {
      throw UnsupportedOperationError(std::string(kernel_.id) + " cannot be prepared" +
                                          (config.empty() ? "" : " as '" + config + "'") + ": " +
                                          error.str("it gives no reason"),
                                      to_string(op.device));
    }
    try {
      std::string chosen = config;
      if (config.empty() && kernel_.chosen_config != nullptr) {
        Said text;
        kernel_.chosen_config(prepared, text.text());
        chosen = checked_config(text, "chosen_config");
      }
      return std::make_unique<PluginKernel>(kernel_, prepared, workspace, op.device,
                                            std::move(chosen));
    } catch (...) {
      kernel_.destroy(prepared);
      throw;
    }
  }

 private:
  // A policy must be able to name it.
  std::string checked_config(Said& said, const char* function) const {
    std::string text = said.str("");
    const auto odd = [](char c) {
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
      return !letter && !(c >= '0' && c <= '9') &&
             std::string_view("_.:=,+-").find(c) == std::string_view::npos;
    };
    if (!text.empty() && !said.full() && std::none_of(text.begin(), text.end(), odd)) return text;
    throw InputError(std::string(kernel_.id) + "." + function + "() gave '" + text +
                     "', which is no configuration: up to 510 letters, digits and '_.:=,+-'");
  }

  const XpuKernel kernel_;
  const std::uint32_t abi_;
  const std::shared_ptr<const KernelBackend> backend_;
  std::vector<std::string> families_;
};

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw InputError("the kernel library " + path + " " + why);
}

// What version 1 of the header had. Version 2 has more, so that the size tells them apart also
// where a library does not look at the number that it is given.
constexpr std::size_t kFirstSize =
    offsetof(XpuKernel, destroy) + sizeof(decltype(XpuKernel::destroy));
static_assert(kFirstSize == 88 && offsetof(XpuKernel, repeatable) == 48,
              "libraries that are built already have this layout");

bool is_missing(const char* text) { return text == nullptr || *text == '\0'; }

using Families = std::map<std::string, std::vector<std::string>>;

void check_families(const std::string& path, const XpuKernel& kernel, const std::string& which,
                    const Families& known) {
  if (kernel.family_count != 0 && kernel.families == nullptr) {
    refuse(path, which + " with " + std::to_string(kernel.family_count) + " families and no list");
  }
  const std::string op(to_string(static_cast<OpKind>(kernel.op)));
  const auto names = known.find(op);
  for (std::uint32_t i = 0; i < kernel.family_count; ++i) {
    if (is_missing(kernel.families[i])) refuse(path, which + " with a family missing");
    if (names == known.end() || std::find(names->second.begin(), names->second.end(),
                                          kernel.families[i]) != names->second.end()) {
      continue;
    }
    std::string list;
    for (const std::string& name : names->second) {
      if (!list.empty()) list += ", ";
      list += name;
    }
    std::string why = which;
    why += " as one of the family '";
    why += readable(kernel.families[i]);
    why += "', which no policy can name for ";
    why += op;
    why += ": the families are ";
    why += list;
    refuse(path, why);
  }
}

void check(const std::string& path, const XpuKernel& kernel, std::size_t index, std::size_t stride,
           const Families& families) {
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
  if ((kernel.config != nullptr || kernel.chosen_config != nullptr) &&
      kernel.prepare_config == nullptr) {
    refuse(path, which + " with configurations and no function prepare_config");
  }
  check_families(path, kernel, which, families);
}

// The library's own size says where the next struct is, and which fields it has.
Entry entry_at(const XpuKernel* first, std::size_t index, std::size_t stride, std::uint32_t abi) {
  const auto* const at = reinterpret_cast<const std::byte*>(first) + index * stride;
  Entry entry;
  std::uint32_t size = 0;
  std::memcpy(&size, at, sizeof size);
  entry.abi = stride <= kFirstSize ? plugin_abi1::kVersion : abi;
  const std::size_t known = entry.abi == plugin_abi1::kVersion ? kFirstSize : sizeof(XpuKernel);
  std::memcpy(&entry.kernel, at, std::min({std::size_t{size}, stride, known}));
  return entry;
}

// The kernels at `first`, with one backend.
std::vector<KernelRegistry::Definition> define(const std::string& path, const XpuKernel* first,
                                               std::size_t count, std::uint32_t abi,
                                               const Families& families) {
  const std::size_t stride = first->size;
  std::vector<KernelRegistry::Definition> made;
  std::shared_ptr<const KernelBackend> backend;
  int32_t (*available)(XpuText) = nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    const Entry entry = entry_at(first, i, stride, abi);
    const XpuKernel& kernel = entry.kernel;
    check(path, kernel, i, stride, families);
    const std::string_view id = kernel.id;
    const std::string name(id.substr(0, id.find('.')));
    const auto type = kernel.device_type == XPU_CUDA ? DeviceType::kCuda : DeviceType::kCpu;
    if (backend == nullptr) {
      backend = std::make_shared<PluginBackend>(name, type, kernel);
      available = kernel.available;
    } else if (backend->name() != name || backend->device_type() != type ||
               backend->version() != readable(kernel.version)) {
      refuse(path, "has kernels of several backends, device types or versions, " +
                       std::string(made.front()->id()) + " and " + std::string(id) +
                       ": make a library for each");
    } else if (kernel.available != available) {
      refuse(path, "has several functions 'available', in " + std::string(made.front()->id()) +
                       " and " + std::string(id) + ": give all kernels the same one");
    }
    made.push_back(std::make_shared<PluginDefinition>(entry, backend));
  }
  return made;
}

struct Close {
  void operator()(void* handle) const noexcept { (void)dlclose(handle); }
};

}  // namespace

std::vector<std::string> register_plugin_library(KernelRegistry& registry, const std::string& path,
                                                 const Families& families) {
  // Closed where it is refused, so that it can be loaded once it is repaired.
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
  std::uint32_t abi = XPURUNTIME_KERNEL_ABI;
  const XpuKernel* kernels = entry(abi, &count);
  if (kernels == nullptr) {
    abi = plugin_abi1::kVersion;
    kernels = entry(abi, &count);
  }
  if (kernels == nullptr) {
    refuse(path, "has no kernels for version " + std::to_string(XPURUNTIME_KERNEL_ABI) +
                     " of kernel_plugin.h, nor for version 1: build it with this one");
  }
  if (count == 0) refuse(path, "has no kernels: it says that their number is 0");
  std::vector<KernelRegistry::Definition> made = define(path, kernels, count, abi, families);
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
