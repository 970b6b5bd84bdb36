// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "python_tuning.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "gil.h"
#include "op_dict.h"
#include "python_object.h"
#include "xpuruntime/error.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

class PythonStore final : public TuningStore {
 public:
  explicit PythonStore(const py::object& object) : object_(object) {
    require_callable(object, "find", "tuning store");
    require_callable(object, "put", "tuning store");
  }

  std::optional<TunedEntry> find(const std::string& key,
                                 const std::map<std::string, std::string>& validators,
                                 std::string& note) noexcept override {
    return guarded("find", note, [&]() -> std::optional<TunedEntry> {
      auto [found, text] =
          object_.get().attr("find")(key, validators).cast<std::pair<py::object, std::string>>();
      note = std::move(text);
      if (found.is_none()) return std::nullopt;
      const auto dict = found.cast<py::dict>();
      TunedEntry entry;
      entry.validators = dict["validators"].cast<std::map<std::string, std::string>>();
      for (const py::handle one : dict["times"]) {
        const auto time = one.cast<py::dict>();
        TunedTime kept;
        kept.kernel = time["kernel"].cast<std::string>();
        kept.config = time["config"].cast<std::string>();
        kept.microseconds = time["microseconds"].cast<double>();
        read(time, "ratio", kept.ratio);
        read(time, "low", kept.low);
        read(time, "high", kept.high);
        read(time, "verdict", kept.verdict);
        entry.times.push_back(std::move(kept));
      }
      read(dict, "rounds", entry.rounds);
      read(dict, "seconds", entry.seconds);
      read(dict, "undecided", entry.undecided);
      return entry;
    });
  }

  void put(const std::string& key, const TunedEntry& entry, std::string& note) noexcept override {
    (void)guarded("put", note, [&] {
      py::list times;
      for (const TunedTime& one : entry.times) {
        py::dict time;
        time["kernel"] = one.kernel;
        time["config"] = one.config;
        time["microseconds"] = one.microseconds;
        time["ratio"] = one.ratio;
        time["low"] = one.low;
        time["high"] = one.high;
        time["verdict"] = one.verdict;
        times.append(time);
      }
      py::dict dict;
      dict["times"] = times;
      dict["validators"] = entry.validators;
      dict["rounds"] = entry.rounds;
      dict["seconds"] = entry.seconds;
      dict["undecided"] = entry.undecided;
      note = py::str(object_.get().attr("put")(key, dict));
      return true;
    });
  }

 private:
  // What a store does not know of an entry stays as it is.
  template <typename Value>
  static void read(const py::dict& dict, const char* key, Value& value) {
    if (dict.contains(key)) value = dict[key].cast<Value>();
  }

  // What `body` gives, with the GIL; nothing, and a note, where it raises.
  template <typename Body>
  static auto guarded(const char* what, std::string& note, const Body& body) noexcept
      -> decltype(body()) {
    try {
      const AcquireGil locked;
      try {
        return body();
      } catch (const py::error_already_set& error) {
        note = std::string("the tuning store's ") + what + " failed: " + current_reason();
        raise_later(error);
      } catch (...) {
        note = std::string("the tuning store's ") + what + " failed: " + current_reason();
      }
    } catch (...) {  // NOLINT(bugprone-empty-catch): not even that could be said
    }
    return {};
  }

  const Kept object_;
};

}  // namespace

std::shared_ptr<TuningStore> make_python_store(const py::object& store) {
  return std::make_shared<PythonStore>(store);
}

TuningWatch make_python_watch(const py::object& function) {
  if (function.is_none()) return nullptr;
  if (!PyCallable_Check(function.ptr())) throw InputError("the tuning watch cannot be called");
  return [kept = Kept(function)](const TunerProgress& progress) {
    return with_gil([&] {
      try {
        const py::str op(progress.op.data(), progress.op.size());
        const auto callee = py::reinterpret_borrow<py::object>(kept.get());
        return callee(op, progress.candidates, progress.rounds, progress.most_rounds,
                      progress.seconds)
            .cast<bool>();
      } catch (const py::error_already_set& error) {
        raise_later(error);
        return true;
      }
    });
  };
}

KernelAdvisor make_python_advisor(const py::object& function,
                                  std::set<std::string, std::less<>> kernels) {
  if (!PyCallable_Check(function.ptr())) throw InputError("the advisor cannot be called");
  return [kept = Kept(function), kernels = std::move(kernels)](
             const KernelDefinition& kernel, const OpDesc& op, const DeviceInfo& device) {
    if (!kernels.contains(kernel.id())) return Support::yes();
    const std::string version = kernel.backend().version();
    return with_gil([&] {
      try {
        const auto callee = py::reinterpret_borrow<py::object>(kept.get());
        const auto why =
            callee(std::string(kernel.id()), version, to_dict(op, &device)).cast<std::string>();
        return why.empty() ? Support::yes() : Support::no(why);
      } catch (const py::error_already_set& error) {
        Support failed = Support::no("the advisor failed: " + current_reason());
        raise_later(error);
        return failed;
      }
    });
  };
}

TuningRule read_tuning_rule(const py::dict& stated) {
  TuningRule rule;
  for (const auto& [key, value] : stated) {
    const auto name = key.cast<std::string>();
    const auto number = value.cast<double>();
    if (name == "min_effect" && number >= 0 && number < 1) {
      rule.min_effect = number;
    } else if (name == "confidence" && number > 0 && number < 1) {
      rule.confidence = number;
    } else if (name == "budget" && number > 0) {
      rule.seconds = number;
    } else {
      throw InputError("tuning: '" + name +
                       "' is unknown or out of range; expected min_effect and confidence between "
                       "0 and 1, and budget in seconds");
    }
  }
  return rule;
}

}  // namespace xpuruntime::bindings
