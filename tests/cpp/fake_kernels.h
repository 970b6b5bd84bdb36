// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/dispatcher.h"
#include "xpuruntime/error.h"
#include "xpuruntime/kernel_registry.h"
#include "xpuruntime/memory_manager.h"

namespace xpuruntime::testing {

class FakeBackend final : public KernelBackend {
 public:
  explicit FakeBackend(std::string name, DeviceType device = DeviceType::kCpu)
      : name_(std::move(name)), device_(device) {}
  std::string_view name() const noexcept override { return name_; }
  DeviceType device_type() const noexcept override { return device_; }
  Support available() const noexcept override {
    ++asked;
    return missing.empty() ? Support::yes() : Support::no(missing);
  }
  std::string version() const override { return name_ + " " + number; }

  std::string missing;
  std::string number = "1";
  mutable std::atomic<int> asked{0};

 private:
  const std::string name_;
  const DeviceType device_;
};

class FakeKernel final : public Kernel {
 public:
  std::size_t workspace_bytes() const noexcept override { return workspace; }
  std::string config() const override { return settled; }
  bool repeatable() const noexcept override { return repeats; }
  void launch(void* const* operands, void* scratch, StreamHandle stream) const override {
    if (work) work(operands, scratch, stream);
  }

  std::size_t workspace = 0;
  std::string settled;
  bool repeats = true;
  std::function<void(void* const*, void*, StreamHandle)> work;
};

/// What it does is in its members, which are set before it is used by several threads.
class FakeDefinition final : public KernelDefinition {
 public:
  FakeDefinition(std::shared_ptr<const FakeBackend> of, std::string id, OpKind op = OpKind::kMatmul)
      : backend_(std::move(of)), id_(std::move(id)), op_(op) {}

  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return id_; }
  OpKind op() const noexcept override { return op_; }
  std::vector<std::string> families() const override { return words; }
  std::string description() const override { return "for tests"; }
  std::string limits() const override { return "none"; }
  bool automatic() const noexcept override { return by_itself; }
  Support supports(const OpDesc& op, const DeviceInfo& /*device*/) const override {
    return refuses ? refuses(op) : Support::yes();
  }
  std::vector<std::string> configs(const OpDesc& op, const DeviceInfo& device,
                                   std::size_t most) const override {
    return choices.empty() ? KernelDefinition::configs(op, device, most) : choices;
  }
  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& /*device*/,
                                        const std::string& config) const override {
    ++prepared;
    auto kernel = std::make_unique<FakeKernel>();
    kernel->settled = config;
    if (make) make(op, config, *kernel);
    return kernel;
  }

  std::vector<std::string> words, choices;
  bool by_itself = true;
  std::function<Support(const OpDesc&)> refuses;
  std::function<void(const OpDesc&, const std::string&, FakeKernel&)> make;
  mutable std::atomic<int> prepared{0};

 private:
  const std::shared_ptr<const FakeBackend> backend_;
  const std::string id_;
  const OpKind op_;
};

inline OpDesc matmul(std::int64_t m, std::int64_t n, std::int64_t k,
                     DType dtype = parse_dtype("float32"), DeviceId device = {}) {
  OpDesc op;
  op.kind = OpKind::kMatmul;
  op.slots = slots::Matmul::kCount;
  op.device = device;
  const auto set = [&](std::size_t slot, std::int64_t rows, std::int64_t columns) {
    TensorDesc& tensor = op.tensors[slot];
    tensor.present = 1;
    tensor.dtype = dtype;
    tensor.rank = 2;
    tensor.alignment = 8;
    tensor.shape = {rows, columns};
    tensor.strides = {columns, 1};
  };
  set(slots::Matmul::kA, m, k);
  set(slots::Matmul::kB, k, n);
  set(slots::Matmul::kOut, m, n);
  return op;
}

/// A dispatcher of its own with nothing registered.
struct Bench {
  Bench() : dispatcher(registry, devices, memory) {}

  std::shared_ptr<FakeDefinition> add(const std::string& id, OpKind op = OpKind::kMatmul,
                                      DeviceType device = DeviceType::kCpu) {
    const std::string name = id.substr(0, id.find('.'));
    backends.push_back(std::make_shared<FakeBackend>(name, device));
    auto made = std::make_shared<FakeDefinition>(backends.back(), id, op);
    registry.add(made);
    return made;
  }

  KernelRegistry registry{false};
  DeviceManager devices;
  MemoryManager memory;
  Dispatcher dispatcher;
  std::vector<std::shared_ptr<FakeBackend>> backends;
};

/// A match that `change` fills in.
template <typename Change>
KernelMatch match_with(const Change& change) {
  KernelMatch match;
  change(match);
  return match;
}
inline KernelMatch match_of(std::string op) {
  return match_with([&](KernelMatch& match) { match.op = std::move(op); });
}

inline KernelRules asking(std::vector<std::string> use,
                          Enforcement enforcement = Enforcement::kPrefer) {
  KernelRules rules;
  rules.enforcement = enforcement;
  rules.defaults.push_back({{}, std::move(use), "kernels.matmul"});
  return rules;
}

inline std::shared_ptr<const KernelRules> shared(KernelRules rules) {
  return std::make_shared<const KernelRules>(std::move(rules));
}

/// What the dispatcher of a bench chooses for an operation.
inline Choice decide(Bench& bench, const KernelRules& rules, std::vector<std::string> pin = {},
                     const OpDesc& op = matmul(2, 3, 4)) {
  return bench.dispatcher.decide(op, rules, bench.devices.get_device_info({}), {}, {}, pin, true,
                                 true);
}

/// The candidate of a choice that has this id, which must be there.
inline const Candidate& candidate(const Choice& choice, const std::string& id) {
  const auto& all = choice.decision->candidates;
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Candidate& one) { return one.id == id; });
  EXPECT_NE(found, all.end()) << id;
  return *found;
}

/// Text of the UnsupportedOperationError that `body` throws; empty when it throws none.
template <typename Body>
std::string refusal_of(const Body& body) {
  try {
    body();
  } catch (const UnsupportedOperationError& error) {
    return error.what();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace xpuruntime::testing
