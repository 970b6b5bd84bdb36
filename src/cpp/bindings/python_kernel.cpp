// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "python_kernel.h"

#include <pybind11/stl.h>

#include <span>
#include <string>
#include <utility>

#include "bind.h"
#include "convert.h"
#include "gil.h"
#include "op_dict.h"
#include "python_object.h"
#include "xpuruntime/error.h"
#include "xpuruntime/tensor.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

// The C++ class of an error of xpuruntime.errors, so that it is treated as one of this library's;
// anything else goes on as it is.
[[noreturn]] void rethrow(const py::error_already_set& error, DeviceId device) {
  if (is_interruption(error))
    throw Interruption(error);  // NOLINT(bugprone-std-exception-baseclass)
  const py::module_ errors = py::module_::import("xpuruntime.errors");
  const std::string message = py::str(error.value());
  const std::string where = to_string(device);
  if (error.matches(errors.attr("UnsupportedOperationError"))) {
    throw UnsupportedOperationError(message, where);
  }
  if (error.matches(PyExc_MemoryError)) throw OutOfMemoryError(message, where, 0);
  if (error.matches(errors.attr("InputError"))) throw InputError(message, where);
  if (error.matches(errors.attr("CudaError"))) {
    const py::object status = py::getattr(error.value(), "status", py::none());
    throw CudaError(message, where, py::isinstance<py::int_>(status) ? status.cast<int>() : 0);
  }
  throw py::error_already_set(error);
}

// "yes" or "no, because", as (bool, str).
Support to_support(const py::object& answer, const std::string& who) {
  if (py::isinstance<py::tuple>(answer) && py::len(answer) == 2) {
    const auto pair = answer.cast<py::tuple>();
    const bool ok = py::cast<bool>(pair[0]);
    std::string reason = py::str(pair[1]);
    if (!ok && reason.empty()) reason = "it refuses and gives no reason";
    return {ok, std::move(reason)};
  }
  return Support::no(who + " answered " + std::string(py::str(py::repr(answer))) +
                     " instead of (bool, reason)");
}

std::string required(const py::object& object, const char* name, const char* what) {
  const py::object value = py::getattr(object, name, py::none());
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  throw InputError("the " + std::string(what) + " " + std::string(py::str(py::repr(object))) +
                   " has no text as its '" + name + "'");
}

DeviceType device_type_of(const std::string& name) {
  if (name == "cpu") return DeviceType::kCpu;
  if (name == "cuda") return DeviceType::kCuda;
  throw InputError("device_type of a kernel backend is '" + name + "'; expected 'cpu' or 'cuda'");
}

class PythonBackend final : public KernelBackend {
 public:
  explicit PythonBackend(const py::object& object)
      : object_(object),
        name_(required(object, "name", "kernel backend")),
        device_type_(device_type_of(required(object, "device_type", "kernel backend"))) {
    require_callable(object, "available", "kernel backend");
    require_callable(object, "version", "kernel backend");
  }
  std::string_view name() const noexcept override { return name_; }
  DeviceType device_type() const noexcept override { return device_type_; }
  py::handle object() const noexcept { return object_.get(); }
  Support available() const noexcept override {
    try {
      const AcquireGil locked;
      const char* asked = ".available()";
      try {
        Support answer = to_support(object_.get().attr("available")(), name_ + asked);
        asked = ".version()";
        if (answer.ok) (void)ask_version();
        return answer;
      } catch (const py::error_already_set& error) {
        Support no = Support::no(name_ + asked + " failed: " + current_reason());
        raise_later(error);
        return no;
      } catch (...) {
        return Support::no(name_ + asked + " failed: " + current_reason());
      }
    } catch (...) {
      return {false, {}};  // not even that could be said
    }
  }
  std::string version() const override {
    const AcquireGil locked;
    try {
      return ask_version();
    }
    XPURUNTIME_STOP_IF_UNWOUND
    catch (const py::error_already_set& error) {
      rethrow(error, {device_type_, 0});
    }
  }

 private:
  std::string ask_version() const {
    const py::object answer = object_.get().attr("version")();
    if (py::isinstance<py::str>(answer) && py::len(answer) > 0) return answer.cast<std::string>();
    throw InputError("it gave " + std::string(py::str(py::repr(answer))) + " instead of a text");
  }

  const Kept object_;
  const std::string name_;
  const DeviceType device_type_;
};

class PythonKernel final : public Kernel {
 public:
  PythonKernel(const py::object& function, const OpDesc& op)
      : function_(function),
        op_(op),
        config_(py::str(py::getattr(function, "config", py::str()))),
        repeatable_(py::cast<bool>(py::getattr(function, "repeatable", py::bool_(true)))) {}

  std::string config() const override { return config_; }
  bool repeatable() const noexcept override { return repeatable_; }

  void launch(void* const* operands, void* /*workspace*/, StreamHandle stream) const override {
    const AcquireGil locked;
    try {
      py::dict views;
      for (std::size_t slot = 0; slot < op_.slots; ++slot) {
        if (!op_.has(slot)) continue;
        const TensorDesc& tensor = op_[slot];
        views[py::str(slot_name(op_.kind, slot))] = py::cast(std::unique_ptr<Tensor, TensorDeleter>(
            new Tensor(std::make_shared<Storage>(), operands[slot], tensor.dtype,
                       Layout(std::span(tensor.shape).first(tensor.rank),
                              std::span(tensor.strides).first(tensor.rank)),
                       op_.device)));
      }
      function_.get()(views, stream);
    }
    XPURUNTIME_STOP_IF_UNWOUND
    catch (py::error_already_set& error) {
      rethrow(error, op_.device);
    }
  }

 private:
  const Kept function_;
  const OpDesc op_;
  const std::string config_;
  const bool repeatable_;
};

class PythonDefinition final : public KernelDefinition {
 public:
  PythonDefinition(std::shared_ptr<const PythonBackend> backend, const py::object& object)
      : backend_(std::move(backend)),
        object_(object),
        id_(required(object, "id", "kernel")),
        op_(parse_op_kind(required(object, "op", "kernel"))),
        description_(required(object, "description", "kernel")),
        limits_(required(object, "limits", "kernel")),
        automatic_(py::cast<bool>(py::getattr(object, "automatic", py::bool_(true)))),
        has_configs_(py::hasattr(object, "configs")) {
    require_callable(object, "supports", "kernel");
    require_callable(object, "prepare", "kernel");
    const py::object families = py::getattr(object, "families", py::tuple());
    if (!py::isinstance<py::tuple>(families) && !py::isinstance<py::list>(families)) {
      throw InputError("the families of kernel " + id_ + " are " +
                       std::string(py::str(py::repr(families))) + "; expected a tuple of words");
    }
    for (const py::handle family : families) families_.emplace_back(py::str(family));
  }

  const std::shared_ptr<const PythonBackend>& python_backend() const noexcept { return backend_; }
  const KernelBackend& backend() const noexcept override { return *backend_; }
  std::string_view id() const noexcept override { return id_; }
  OpKind op() const noexcept override { return op_; }
  std::vector<std::string> families() const override { return families_; }
  std::string description() const override { return description_; }
  std::string limits() const override { return limits_; }
  bool automatic() const noexcept override { return automatic_; }

  Support supports(const OpDesc& op, const DeviceInfo& device) const override {
    const AcquireGil locked;
    try {
      return to_support(object_.get().attr("supports")(to_dict(op, &device)), id_ + ".supports()");
    }
    XPURUNTIME_STOP_IF_UNWOUND
    catch (const py::error_already_set& error) {
      if (is_interruption(error))
        throw Interruption(error);  // NOLINT(bugprone-std-exception-baseclass)
      return Support::no(id_ + ".supports() failed: " + current_reason());
    }
    catch (...) {
      return Support::no(id_ + ".supports() failed: " + current_reason());
    }
  }

  std::vector<std::string> configs(const OpDesc& op, const DeviceInfo& device,
                                   std::size_t most) const override {
    if (!has_configs_) return KernelDefinition::configs(op, device, most);
    const AcquireGil locked;
    try {
      std::vector<std::string> all;
      for (const py::handle config : object_.get().attr("configs")(to_dict(op, &device), most)) {
        if (all.size() < most) all.emplace_back(py::str(config));
      }
      return all;
    }
    XPURUNTIME_STOP_IF_UNWOUND
    catch (py::error_already_set& error) {
      rethrow(error, op.device);
    }
  }

  std::unique_ptr<const Kernel> prepare(const OpDesc& op, const DeviceInfo& device,
                                        const std::string& config) const override {
    const AcquireGil locked;
    try {
      const py::object function = object_.get().attr("prepare")(to_dict(op, &device), config);
      if (PyCallable_Check(function.ptr()) == 0) {
        throw UnsupportedOperationError(id_ + ".prepare() gave " +
                                        std::string(py::str(py::repr(function))) +
                                        ", which cannot be called");
      }
      auto made = std::make_unique<PythonKernel>(function, op);
      if (!config.empty() && made->config() != config) {
        throw InputError(id_ + " has no configuration '" + config + "'" +
                         (made->config().empty() ? "" : "; it prepared '" + made->config() + "'"));
      }
      return made;
    }
    XPURUNTIME_STOP_IF_UNWOUND
    catch (py::error_already_set& error) {
      rethrow(error, op.device);
    }
  }

 private:
  const std::shared_ptr<const PythonBackend> backend_;
  const Kept object_;
  const std::string id_;
  const OpKind op_;
  const std::string description_, limits_;
  const bool automatic_, has_configs_;
  std::vector<std::string> families_;
};

}  // namespace

void register_python_kernels(KernelRegistry& registry, const py::object& backend,
                             const py::args& kernels) {
  std::shared_ptr<const PythonBackend> shared;
  for (const auto& known : registry.kernels()) {
    const auto* const other = dynamic_cast<const PythonDefinition*>(known.get());
    if (other != nullptr && other->python_backend()->object().is(backend)) {
      shared = other->python_backend();
      break;
    }
  }
  if (shared == nullptr) shared = std::make_shared<PythonBackend>(backend);
  std::vector<KernelRegistry::Definition> made;
  for (const py::handle kernel : kernels) {
    made.push_back(
        std::make_shared<PythonDefinition>(shared, py::reinterpret_borrow<py::object>(kernel)));
  }
  registry.add_all(std::move(made));
}

}  // namespace xpuruntime::bindings
