// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/plugin_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "plugins/plugin_description.h"
#include "plugins/plugin_kernel.h"
#include "plugins/plugin_text.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_plugin.h"
#include "xpuruntime/kernel_registry.h"

namespace xpuruntime {
namespace {

constexpr const char* kEntry = "xpuruntime_kernels";

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw InputError("the kernel library " + path + " " + why);
}

// What version 1 of the header had. Version 2 has more, so that the size distinguishes them also
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
    why += readable_text(kernel.families[i]);
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
PluginEntry entry_at(const XpuKernel* first, std::size_t index, std::size_t stride,
                     std::uint32_t abi) {
  const auto* const at = reinterpret_cast<const std::byte*>(first) + index * stride;
  PluginEntry entry;
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
    const PluginEntry entry = entry_at(first, i, stride, abi);
    const XpuKernel& kernel = entry.kernel;
    check(path, kernel, i, stride, families);
    const std::string_view id = kernel.id;
    const std::string name(id.substr(0, id.find('.')));
    const auto type = kernel.device_type == XPU_CUDA ? DeviceType::kCuda : DeviceType::kCpu;
    if (backend == nullptr) {
      backend = plugin_backend(name, type, kernel);
      available = kernel.available;
    } else if (backend->name() != name || backend->device_type() != type ||
               backend->version() != readable_text(kernel.version)) {
      refuse(path, "has kernels of several backends, device types or versions, " +
                       std::string(made.front()->id()) + " and " + std::string(id) +
                       ": make a library for each");
    } else if (kernel.available != available) {
      refuse(path, "has several functions 'available', in " + std::string(made.front()->id()) +
                       " and " + std::string(id) + ": give all kernels the same one");
    }
    made.push_back(plugin_definition(entry, backend));
  }
  return made;
}

struct CloseLibrary {
  void operator()(void* handle) const noexcept { (void)dlclose(handle); }
};

}  // namespace

std::vector<std::string> register_plugin_library(KernelRegistry& registry, const std::string& path,
                                                 const Families& families) {
  // Closed where it is refused, so that it can be loaded once it is repaired.
  std::unique_ptr<void, CloseLibrary> library(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL));
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
