// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "device_argument.h"
#include "gil.h"
#include "op_dict.h"
#include "python_kernel.h"
#include "python_tuning.h"
#include "xpuruntime/dispatcher.h"
#include "xpuruntime/kernel_registry.h"
#include "xpuruntime/paired_comparison.h"
#include "xpuruntime/plugin_library.h"
#include "xpuruntime/shared_library.h"
#include "xpuruntime/workspaces.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

using Unlocked = py::call_guard<ReleaseGil>;

py::dict to_dict(const KernelDefinition& kernel) {
  Support available;
  std::string version;
  {
    const ReleaseGil unlocked;  // may open a library
    available = kernel.backend().available();
    if (available.ok) version = kernel.backend().version();
  }
  py::dict dict;
  dict["id"] = kernel.id();
  dict["op"] = to_string(kernel.op());
  dict["backend"] = kernel.backend().name();
  dict["device_type"] = kernel.backend().device_type() == DeviceType::kCpu ? "cpu" : "cuda";
  dict["description"] = kernel.description();
  dict["limits"] = kernel.limits();
  dict["families"] = kernel.families();
  dict["automatic"] = kernel.automatic();
  dict["available"] = available.ok;
  dict["reason"] = available.reason;
  dict["version"] = version;
  return dict;
}

py::list list_kernels(const KernelRegistry& registry, const std::optional<std::string>& op) {
  py::list all;
  for (const auto& kernel : op ? registry.kernels(parse_op_kind(*op)) : registry.kernels()) {
    all.append(to_dict(*kernel));
  }
  return all;
}

using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;

std::optional<IntRange> to_range(const Range& range) {
  if (!range) return std::nullopt;
  return IntRange{range->first, range->second};
}

KernelRule to_rule(const py::dict& dict) {
  KernelRule rule;
  rule.use = dict["use"].cast<std::vector<std::string>>();
  rule.source = dict["source"].cast<std::string>();
  if (rule.use.empty()) throw InputError(rule.source + " names no kernel");
  KernelMatch& match = rule.match;
  const std::map<std::string, std::optional<IntRange>*> ranges{{"m", &match.m},
                                                               {"n", &match.n},
                                                               {"k", &match.k},
                                                               {"head_dim", &match.head_dim},
                                                               {"kv", &match.kv}};
  const std::map<std::string, std::string*> texts{{"op", &match.op}, {"device", &match.device}};
  for (const auto& [key, value] : dict["match"].cast<py::dict>()) {
    const auto name = key.cast<std::string>();
    if (const auto range = ranges.find(name); range != ranges.end()) {
      *range->second = to_range(value.cast<Range>());
    } else if (const auto text = texts.find(name); text != texts.end()) {
      *text->second = value.cast<std::string>();
    } else if (name == "dtypes") {
      match.dtypes = value.cast<std::vector<std::string>>();
    } else if (name == "phases") {
      match.phases = value.cast<std::vector<std::string>>();
    } else {
      throw InputError("'" + name + "' is not a key that rules match by");
    }
  }
  return rule;
}

std::shared_ptr<KernelRules> make_rules(const std::vector<py::dict>& rules,
                                        const std::vector<py::dict>& defaults,
                                        const std::string& enforcement, const std::string& strategy,
                                        std::shared_ptr<DecisionLog> log,
                                        const std::optional<py::dict>& tuning) {
  auto made = std::make_shared<KernelRules>();
  for (const py::dict& rule : rules) made->rules.push_back(to_rule(rule));
  for (const py::dict& rule : defaults) made->defaults.push_back(to_rule(rule));
  if (enforcement != "strict" && enforcement != "prefer") {
    throw InputError("enforcement is '" + enforcement + "'; expected 'strict' or 'prefer'");
  }
  if (strategy != "first_supported" && strategy != "best_performance") {
    throw InputError("auto_strategy is '" + strategy +
                     "'; expected 'first_supported' or 'best_performance'");
  }
  if (enforcement == "strict") made->enforcement = Enforcement::kStrict;
  if (strategy == "best_performance") made->strategy = AutoStrategy::kBestPerformance;
  made->log = std::move(log);
  if (tuning) made->tuning = read_tuning_rule(*tuning);
  return made;
}

// The device of an operation as this machine knows it, or as the caller describes it.
DeviceInfo device_of(const OpDesc& op, const std::optional<std::pair<int, int>>& capability) {
  DeviceManager& devices = DeviceManager::instance();
  if (!capability) return devices.get_device_info(op.device);
  DeviceInfo info;
  info.id = op.device;
  info.name = "described";
  info.compute_capability = *capability;
  return info;
}

py::list to_list(const DecisionLog& log) {
  py::list all;
  for (const auto& decision : log.decisions()) all.append(bindings::to_dict(*decision));
  return all;
}

void bind_log(py::module_& module) {
  py::class_<DecisionLog, std::shared_ptr<DecisionLog>>(module, "DecisionLog",
                                                        "Decisions under some rules, apart.")
      .def(py::init())
      .def("decisions", to_list, "Distinct decisions, oldest first, as dicts.")
      .def("counts", &DecisionLog::counts, "How many calls each of them has served.")
      .def_property_readonly("dropped", &DecisionLog::dropped)
      .def("clear", &DecisionLog::clear, Unlocked());
}

void bind_rules(py::module_& module) {
  py::class_<KernelRules, std::shared_ptr<KernelRules>>(module, "KernelRules",
                                                        "Rules of one place. Immutable.")
      .def(py::init(&make_rules), py::kw_only(), "rules"_a = std::vector<py::dict>(),
           "defaults"_a = std::vector<py::dict>(), "enforcement"_a = "prefer",
           "auto_strategy"_a = "first_supported", "log"_a = py::none(), "tuning"_a = py::none())
      .def(
          "choose",
          [](const KernelRules& self, const py::dict& desc,
             const std::optional<std::pair<int, int>>& capability) {
            const OpDesc op = op_from_dict(desc);
            const Preference found = self.choose(op, device_of(op, capability));
            return std::pair(py::tuple(py::cast(found.use)), found.source);
          },
          "desc"_a, py::kw_only(), "compute_capability"_a = py::none(),
          "The kernels asked for an operation, in order, and the key that asks.");
}

void bind_registry(py::module_& module) {
  py::class_<KernelRegistry, std::unique_ptr<KernelRegistry, py::nodelete>>(
      module, "KernelRegistry", "Knows which kernels there are.")
      .def_static("instance", &KernelRegistry::instance, py::return_value_policy::reference)
      .def("kernels", list_kernels, "op"_a = py::none(),
           "Kernels in the order of registration, as dicts. May open the vendors' libraries.")
      .def(
          "find",
          [](const KernelRegistry& self, const std::string& op, const std::string& word) {
            std::vector<std::string> ids;
            for (const auto& kernel : self.find(parse_op_kind(op), word)) {
              ids.emplace_back(kernel->id());
            }
            return ids;
          },
          "op"_a, "word"_a, "Ids of the kernels that a word of a KernelPolicy means.")
      .def(
          "supports",
          [](const KernelRegistry& self, const py::dict& desc,
             const std::optional<std::pair<int, int>>& capability) {
            const OpDesc op = op_from_dict(desc);
            const DeviceInfo device = device_of(op, capability);
            py::list all;
            for (const auto& kernel : self.kernels(op.kind)) {
              Support fit = Support::no("serves another kind of device");
              if (kernel->backend().device_type() == op.device.type) {
                const ReleaseGil unlocked;
                fit = kernel->supports(op, device);
              }
              all.append(py::make_tuple(kernel->id(), fit.ok, fit.reason));
            }
            return all;
          },
          "desc"_a, py::kw_only(), "compute_capability"_a = py::none(),
          "Id, whether it can serve, and if not why, of each kernel; opens no library.")
      .def(
          "remove",
          [](KernelRegistry& self, const std::string& backend) { return self.remove(backend); },
          "backend"_a, Unlocked(), "Take out every kernel of a backend. Returns how many.")
      .def_property_readonly("version", &KernelRegistry::version);
}

void bind_call_site(py::module_& module) {
  py::class_<CallSite>(module, "CallSite", "One place that calls operations under one policy.")
      .def(py::init([](std::shared_ptr<KernelRules> rules, std::string node,
                       std::string module_name, std::vector<std::string> pin) {
             return std::make_unique<CallSite>(Dispatcher::instance(), std::move(rules),
                                               std::move(node), std::move(module_name),
                                               std::move(pin));
           }),
           "rules"_a, py::kw_only(), "node"_a = "", "module"_a = "",
           "pin"_a = std::vector<std::string>())
      .def(
          "choose",
          [](CallSite& self, const py::dict& desc, StreamHandle stream) {
            const OpDesc op = op_from_dict(desc);
            std::shared_ptr<const Choice> choice;
            {
              const ReleaseGil unlocked;
              choice = self.choose(op, stream);
            }
            return bindings::to_dict(*choice->decision);
          },
          "desc"_a, "stream"_a = 0,
          "Choose and prepare the kernel for an operation; the decision as a dict.")
      .def(
          "decisions",
          [](const CallSite& self) {
            std::vector<std::shared_ptr<const Decision>> found;
            {
              const ReleaseGil unlocked;
              found = self.decisions();
            }
            py::list all;
            for (const auto& decision : found) all.append(bindings::to_dict(*decision));
            return all;
          },
          "What it has decided and remembers, as dicts, also where the log is full.");
}

void bind_dispatcher(py::module_& module) {
  py::class_<Dispatcher, std::unique_ptr<Dispatcher, py::nodelete>>(module, "Dispatcher",
                                                                    "Chooses kernels.")
      .def_static("instance", &Dispatcher::instance, py::return_value_policy::reference)
      .def(
          "plan",
          [](Dispatcher& self, const KernelRules& rules, const py::dict& desc,
             const std::string& node, const std::string& module_name,
             const std::vector<std::string>& pin,
             const std::optional<std::pair<int, int>>& capability) {
            const OpDesc op = op_from_dict(desc);
            const DeviceInfo device = device_of(op, capability);
            Choice choice;
            {
              const ReleaseGil unlocked;
              choice = self.decide(op, rules, device, node, module_name, pin, false, false);
            }
            return bindings::to_dict(*choice.decision);
          },
          "rules"_a, "desc"_a, py::kw_only(), "node"_a = "", "module"_a = "",
          "pin"_a = std::vector<std::string>(), "compute_capability"_a = py::none(),
          "Decide without preparing anything; the decision as a dict.")
      .def(
          "decisions", [](const Dispatcher& self) { return to_list(self.log()); },
          "Distinct decisions since the start or the last clear, oldest first, as dicts.")
      .def_property_readonly("dropped_decisions",
                             [](const Dispatcher& self) { return self.log().dropped(); })
      .def(
          "clear_decisions", [](Dispatcher& self) { self.log().clear(); }, Unlocked())
      .def(
          "set_tuning_store",
          [](Dispatcher& self, const py::object& store) {
            std::shared_ptr<TuningStore> made =
                store.is_none() ? nullptr : make_python_store(store);
            const ReleaseGil unlocked;
            self.set_tuning_store(std::move(made));
          },
          "store"_a, "Keep measured choices in an object with `find` and `put`; None: nowhere.")
      .def(
          "set_tuning_watch",
          [](Dispatcher& self, const py::object& function) {
            TuningWatch watch = make_python_watch(function);
            const ReleaseGil unlocked;
            self.set_tuning_watch(std::move(watch));
          },
          "function"_a,
          "Before every round, call a function with the operation, candidates, rounds, the most "
          "rounds and seconds; it returns whether to end there. None: nobody.")
      .def(
          "set_advisor",
          [](Dispatcher& self, const py::object& function, std::set<std::string, std::less<>> ids) {
            KernelAdvisor advisor = make_python_advisor(function, std::move(ids));
            const ReleaseGil unlocked;
            self.set_advisor(std::move(advisor));
          },
          "function"_a, "kernels"_a,
          "Call a function with the id, the version of the backend and the operation before one of "
          "these kernels is chosen; it returns why not, or nothing.")
      .def("forget_measurements", &Dispatcher::forget_measurements, Unlocked(),
           "Forget what was measured in this process.")
      .def(
          "workspace_bytes", [](const Dispatcher& self) { return self.workspaces().bytes(); },
          Unlocked(), "Bytes of scratch memory that are held for kernels.")
      .def(
          "clear_workspaces", [](const Dispatcher& self) { self.workspaces().clear(); }, Unlocked(),
          "Give scratch memory back that no graph holds.");
}

void bind_comparison(py::module_& module) {
  module.def(
      "compare_paired",
      [](const std::vector<double>& times, const std::vector<double>& control,
         const std::vector<double>& twin, double relative, double absolute_us, double confidence,
         std::size_t looks, std::size_t family) {
        const PairedComparison found = compare_paired(times, control, twin, {relative, absolute_us},
                                                      {confidence, looks, family});
        py::dict dict;
        dict["ratio"] = found.ratio;
        dict["low"] = found.low;
        dict["high"] = found.high;
        dict["margin"] = found.margin;
        dict["rounds"] = found.rounds;
        dict["verdict"] = to_string(found.verdict);
        dict["not_faster"] = found.not_faster;
        return dict;
      },
      "times"_a, "control"_a, "twin"_a, py::kw_only(), "relative"_a = Margin().relative,
      "absolute_us"_a = 0.0, "confidence"_a = 0.99, "looks"_a = 1, "family"_a = 1,
      "How the core's tuner decides on microseconds of the same rounds.");
  module.def("look_rounds", &look_rounds, "first"_a, "last"_a, py::kw_only(), "confidence"_a = 0.99,
             "family"_a = 1, "After how many rounds the core's tuner looks at its times.");
}

}  // namespace

void bind_kernels(py::module_& module) {
  bind_log(module);
  bind_rules(module);
  bind_registry(module);
  bind_call_site(module);
  bind_dispatcher(module);
  bind_comparison(module);
  module.def(
      "register_python_kernel",
      [](const py::object& backend, const py::args& kernels) {
        register_python_kernels(KernelRegistry::instance(), backend, kernels);
      },
      "backend"_a, "Register kernels that Python objects define, all or none.");
  module.def(
      "register_plugin_library",
      [](const std::string& path, const std::map<std::string, std::vector<std::string>>& families) {
        const ReleaseGil unlocked;
        return register_plugin_library(KernelRegistry::instance(), path, families);
      },
      "path"_a, "families"_a,
      "Register the kernels of a shared library; see kernel_plugin.h. Returns their ids.");
  module.def("set_search_folders", &SharedLibrary::set_search_folders, "folders"_a,
             "Folders in which vendors' libraries are looked for, in order.");
  module.def("search_folders", &SharedLibrary::search_folders);
}

}  // namespace xpuruntime::bindings
