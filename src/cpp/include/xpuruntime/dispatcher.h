// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xpuruntime/decision.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/kernel_rules.h"
#include "xpuruntime/op.h"
#include "xpuruntime/tuning_store.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

class DeviceManager;
class KernelRegistry;
class MemoryManager;
class Workspaces;

/// A prepared kernel and the decision that led to it.
struct Choice {
  std::shared_ptr<const Kernel> kernel;
  std::shared_ptr<const Decision> decision;
  std::size_t workspace_bytes = 0;
};

class Dispatcher;

/// One place that calls operations under one policy: the whole program under the ambient policy, or
/// one node of a graph, or one module. Keeps the choices made there, so that asking again costs a
/// hash and a look-up (at most 200 ns). Thread-safe: two threads that ask for something new prepare
/// it once.
class CallSite {
 public:
  /// `pin`: kernels that the call itself asks for, before the policy; `node` and `module` are the
  /// names that rules may ask for.
  CallSite(Dispatcher& dispatcher, std::shared_ptr<const KernelRules> rules, std::string node = {},
           std::string module = {}, std::vector<std::string> pin = {});
  ~CallSite();
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  /// The first time: decides, prepares, measures where the strategy says so, and records the
  /// decision. Slow then. `stream` is only asked whether it is capturing: nothing is measured
  /// then. Throws UnsupportedOperationError naming every candidate and its reason when the policy
  /// is strict and what it asks for cannot serve, or when nothing can.
  std::shared_ptr<const Choice> choose(const OpDesc& op, StreamHandle stream);

  /// Chooses, gets a workspace for the stream, launches, and counts the call. `operands` as for
  /// Kernel::launch. Makes the device current and restores the caller's.
  void run(const OpDesc& op, void* const* operands, StreamHandle stream);

  const KernelRules& rules() const noexcept { return *rules_; }
  Dispatcher& dispatcher() const noexcept { return dispatcher_; }

 private:
  struct Cache;
  Dispatcher& dispatcher_;
  std::shared_ptr<const KernelRules> rules_;
  std::string node_, module_;
  std::vector<std::string> pin_;
  std::unique_ptr<Cache> cache_;
};

/// Chooses kernels. Owns the log of decisions and the workspaces. Thread-safe.
class Dispatcher {
 public:
  Dispatcher(KernelRegistry& registry, DeviceManager& devices, MemoryManager& memory);
  ~Dispatcher();
  /// The default runtime's.
  static Dispatcher& instance();

  /// Decides without a cache: for planning and tests. A pure function of its arguments when the
  /// strategy is first_supported: with `prepare` false the kernel of the result is null, and no
  /// device is touched.
  Choice decide(const OpDesc& op, const KernelRules& rules, const DeviceInfo& device,
                const std::string& node, const std::string& module,
                const std::vector<std::string>& pin, bool prepare, bool may_measure);

  /// Distinct decisions since the start or the last clear, oldest first. At most 10,000 are kept:
  /// later ones are served and not recorded, and `dropped_decisions` counts them.
  std::vector<std::shared_ptr<const Decision>> decisions() const;
  std::uint64_t dropped_decisions() const;
  void clear_decisions();

  /// Where measured choices are kept between processes; null: in this process only.
  void set_tuning_store(std::shared_ptr<TuningStore> store);
  std::shared_ptr<TuningStore> tuning_store() const;

  KernelRegistry& registry() const noexcept { return registry_; }
  Workspaces& workspaces() const noexcept { return *workspaces_; }

 private:
  friend class CallSite;
  KernelRegistry& registry_;
  DeviceManager& devices_;
  MemoryManager& memory_;
  std::unique_ptr<Workspaces> workspaces_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Decision>> decisions_;
  std::uint64_t dropped_ = 0;
  std::shared_ptr<TuningStore> store_;
};

}  // namespace xpuruntime
