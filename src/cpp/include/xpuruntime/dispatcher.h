// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "xpuruntime/decision.h"
#include "xpuruntime/decision_log.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/kernel_rules.h"
#include "xpuruntime/op.h"
#include "xpuruntime/tuning_rule.h"
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
  /// The strategy asks for measuring, which could not be done now: worth deciding again.
  bool unmeasured = false;
};

/// Says no to a kernel that is known to compute an operation wrongly on a device. Thread-safe.
using KernelAdvisor =
    std::function<Support(const KernelDefinition&, const OpDesc&, const DeviceInfo&)>;

class Dispatcher;

/// One place that calls operations under one policy: the whole program under the ambient policy, or
/// one node of a graph, or one module. Keeps the choices made there, so that asking again costs a
/// hash and a look-up (at most 200 ns), without a lock. Thread-safe: threads that ask for the same
/// new thing prepare it once and wait for nothing else; an error is reported to all of them and not
/// kept. At most kMost choices are kept; with one more, all are forgotten and made anew when asked
/// for. All are forgotten as well when kernels are registered or removed.
class CallSite {
 public:
  static constexpr std::size_t kMost = 8192;

  /// `pin`: kernels that the call itself asks for, before the policy; when none of them can serve,
  /// the call is refused, however strict the policy is. `rules` are those of this place; `node` and
  /// `module` are its names, for the decisions. Decisions are recorded in the log of the rules;
  /// without one, in that of the dispatcher.
  CallSite(Dispatcher& dispatcher, std::shared_ptr<const KernelRules> rules, std::string node = {},
           std::string module = {}, std::vector<std::string> pin = {});
  ~CallSite();
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  /// The first time: decides, prepares, measures where the strategy says so, and records the
  /// decision. Slow then. `stream` is only asked whether it is capturing: nothing is measured
  /// then, and the first kernel that can serve is taken until a call comes outside of a capture.
  /// Throws UnsupportedOperationError with every candidate and its reason when the policy
  /// is strict and what it asks for cannot serve, or when nothing can.
  std::shared_ptr<const Choice> choose(const OpDesc& op, StreamHandle stream);

  /// Chooses, gets a workspace for the stream, launches, and counts the call. `operands` as for
  /// Kernel::launch. Makes the device current and restores the caller's. Throws as `choose` does,
  /// and what Workspaces and Kernel::launch throw.
  void run(const OpDesc& op, void* const* operands, StreamHandle stream);
  /// The same where the choice is made already; otherwise does nothing and says no. Waits for
  /// nobody but threads that give work to the same stream, so that callers with a lock of their own
  /// (Python's) can keep it.
  bool try_run(const OpDesc& op, void* const* operands, StreamHandle stream);

  /// What it has decided and remembers, also where the log is full.
  std::vector<std::shared_ptr<const Decision>> decisions() const;

  const KernelRules& rules() const noexcept { return *rules_; }
  Dispatcher& dispatcher() const noexcept { return dispatcher_; }
  const std::string& node() const noexcept { return node_; }
  const std::string& module() const noexcept { return module_; }

 private:
  struct Cache;
  struct Entry;
  Entry* cached(const OpDesc& op, std::size_t hash) const;
  void note(Entry& entry, std::uint64_t epoch) const;
  std::shared_ptr<const Choice> decide(const OpDesc& op, std::size_t hash, StreamHandle stream);
  std::shared_ptr<const Choice> make(const OpDesc& op, bool may_measure) const;
  void launch(const Choice& choice, const OpDesc& op, void* const* operands,
              StreamHandle stream) const;

  Dispatcher& dispatcher_;
  std::shared_ptr<const KernelRules> rules_;
  DecisionLog* log_;  // that of the rules, or the dispatcher's
  std::string node_, module_;
  std::vector<std::string> pin_;
  std::unique_ptr<Cache> cache_;
};

/// Chooses kernels. Owns the log of decisions and the workspaces. Thread-safe.
class Dispatcher {
 public:
  Dispatcher(KernelRegistry& registry, DeviceManager& devices, MemoryManager& memory);
  ~Dispatcher();
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;
  /// The default runtime's.
  static Dispatcher& instance();

  /// Decides without a cache: for planning and tests.
  ///
  /// A pure function of its arguments and of what is registered and loadable here when the strategy
  /// is first_supported and `prepare` is false: the kernel of the result is null then, and no
  /// device is touched. With `prepare`, kernels that cannot be prepared after all are passed over.
  /// Measures only with both `prepare` and `may_measure`; the tuning store is asked in any case.
  ///
  /// Throws UnsupportedOperationError as CallSite::choose does; InputError for a config after "@"
  /// that cannot be read; CudaError and OutOfMemoryError as they come.
  Choice decide(const OpDesc& op, const KernelRules& rules, const DeviceInfo& device,
                const std::string& node, const std::string& module,
                const std::vector<std::string>& pin, bool prepare, bool may_measure);

  /// Decisions of the process, but for those under rules that name a log of their own.
  DecisionLog& log() noexcept { return log_; }
  const DecisionLog& log() const noexcept { return log_; }

  /// Where measured choices are kept between processes; null: in this process only.
  void set_tuning_store(std::shared_ptr<TuningStore> store);
  std::shared_ptr<TuningStore> tuning_store() const;
  /// Asked before every round of a measurement, in whatever thread; null: nobody. What it ends is
  /// not kept, and is measured when it is asked for again.
  void set_tuning_watch(TuningWatch watch);
  TuningWatch tuning_watch() const;
  /// Asked of each kernel that could serve, where a choice is made; null: nobody.
  void set_advisor(KernelAdvisor advisor);
  KernelAdvisor advisor() const;
  /// Forgets what was measured in this process; stores and choices that were made stay.
  void forget_measurements();

  KernelRegistry& registry() const noexcept { return registry_; }
  DeviceManager& devices() const noexcept { return devices_; }
  MemoryManager& memory() const noexcept { return memory_; }
  Workspaces& workspaces() const noexcept { return *workspaces_; }

 private:
  friend class CallSite;
  friend class Chooser;
  std::optional<TunedEntry> measured(const std::string& key) const;
  void keep_measured(const std::string& key, const TunedEntry& entry);

  KernelRegistry& registry_;
  DeviceManager& devices_;
  MemoryManager& memory_;
  std::unique_ptr<Workspaces> workspaces_;
  DecisionLog log_;
  mutable std::mutex mutex_;
  std::shared_ptr<TuningStore> store_;
  TuningWatch watch_;
  KernelAdvisor advisor_;
  std::map<std::string, TunedEntry> measured_;
};

}  // namespace xpuruntime
