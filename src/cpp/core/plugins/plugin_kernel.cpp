// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "plugins/plugin_kernel.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "plugins/plugin_description.h"
#include "plugins/plugin_text.h"
#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

class PluginBackend final : public KernelBackend {
 public:
  PluginBackend(std::string name, DeviceType type, const XpuKernel& first)
      : name_(std::move(name)),
        version_(readable_text(first.version)),
        type_(type),
        available_(first.available) {}
  std::string_view name() const noexcept override { return name_; }
  DeviceType device_type() const noexcept override { return type_; }
  Support available() const noexcept override {
    if (available_ == nullptr) return Support::yes();
    PluginText reason;
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
    PluginText error;
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
  PluginDefinition(const PluginEntry& entry, std::shared_ptr<const KernelBackend> backend)
      : kernel_(entry.kernel), abi_(entry.abi), backend_(std::move(backend)) {
    for (std::uint32_t i = 0; i < kernel_.family_count; ++i) {
      families_.emplace_back(kernel_.families[i]);
    }
  }
  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return kernel_.id; }
  OpKind op() const noexcept override { return static_cast<OpKind>(kernel_.op); }
  std::vector<std::string> families() const override { return families_; }
  std::string description() const override { return readable_text(kernel_.description); }
  std::string limits() const override { return readable_text(kernel_.limits); }
  bool automatic() const noexcept override { return kernel_.explicit_only == 0; }

  Support supports(const OpDesc& op, const DeviceInfo& device) const override {
    if (abi_ == plugin_abi1::kVersion) {
      std::string why = plugin_abi1::why_not(op);
      if (!why.empty()) return Support::no(std::move(why));
    }
    const PluginDescription described(op, device, abi_);
    PluginText reason;
    if (kernel_.supports(described.get(), reason.text()) != 0) return Support::yes();
    return Support::no(reason.str("it refuses and gives no reason"));
  }

  Support favoured(const OpDesc& op, const DeviceInfo& device) const override {
    if (kernel_.favoured == nullptr) return Support::yes();
    const PluginDescription described(op, device, abi_);
    PluginText reason;
    if (kernel_.favoured(described.get(), reason.text()) != 0) return Support::yes();
    return Support::no(reason.str("it is slower here and gives no reason"));
  }

  std::vector<std::string> configs(const OpDesc& op, const DeviceInfo& device,
                                   std::size_t most) const override {
    if (kernel_.config == nullptr) return KernelDefinition::configs(op, device, most);
    const PluginDescription described(op, device, abi_);
    std::vector<std::string> all;
    while (all.size() < most) {
      PluginText config;
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
    PluginText error;
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
        PluginText text;
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
  std::string checked_config(PluginText& given, const char* function) const {
    std::string text = given.str("");
    const auto odd = [](char c) {
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
      return !letter && !(c >= '0' && c <= '9') &&
             std::string_view("_.:=,+-").find(c) == std::string_view::npos;
    };
    if (!text.empty() && !given.full() && std::none_of(text.begin(), text.end(), odd)) return text;
    throw InputError(std::string(kernel_.id) + "." + function + "() gave '" + text +
                     "', which is no configuration: up to 510 letters, digits and '_.:=,+-'");
  }

  const XpuKernel kernel_;
  const std::uint32_t abi_;
  const std::shared_ptr<const KernelBackend> backend_;
  std::vector<std::string> families_;
};

}  // namespace

std::shared_ptr<const KernelBackend> plugin_backend(std::string name, DeviceType type,
                                                    const XpuKernel& first) {
  return std::make_shared<PluginBackend>(std::move(name), type, first);
}

KernelRegistry::Definition plugin_definition(const PluginEntry& entry,
                                             std::shared_ptr<const KernelBackend> backend) {
  return std::make_shared<PluginDefinition>(entry, std::move(backend));
}

}  // namespace xpuruntime
