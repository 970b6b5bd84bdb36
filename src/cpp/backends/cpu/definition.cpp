// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/definition.h"

#include <utility>

#include "cpu/element.h"
#include "xpuruntime/error.h"

namespace xpuruntime::cpu {
namespace {

class Definition final : public KernelDefinition {
 public:
  Definition(std::shared_ptr<const KernelBackend> backend, KernelFacts facts)
      : backend_(std::move(backend)), facts_(std::move(facts)) {}

  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return facts_.id; }
  OpKind op() const noexcept override { return facts_.op; }
  std::vector<std::string> families() const override { return facts_.families; }
  std::string description() const override { return facts_.description; }
  std::string limits() const override { return facts_.limits; }

  Support supports(const OpDesc& op, const DeviceInfo& /*device*/) const override {
    if (op.device.type != DeviceType::kCpu) return Support::no("serves cpu only");
    for (std::size_t slot = 0; slot < op.slots; ++slot) {
      if (op.has(slot) && !element_of(op[slot].dtype)) {
        return Support::no("has no arithmetic for " + to_string(op[slot].dtype));
      }
    }
    return facts_.supports(op);
  }

  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& /*device*/,
                                        const std::string& config) const override {
    if (!config.empty()) {
      throw InputError(std::string(facts_.id) + " has nothing to configure, and was given '" +
                       config + "': leave out what stands after '@'");
    }
    return facts_.prepare(op);
  }

 private:
  const std::shared_ptr<const KernelBackend> backend_;
  const KernelFacts facts_;
};

}  // namespace

std::shared_ptr<const KernelDefinition> define(std::shared_ptr<const KernelBackend> backend,
                                               KernelFacts facts) {
  return std::make_shared<const Definition>(std::move(backend), std::move(facts));
}

}  // namespace xpuruntime::cpu
