// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "op_arguments.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "gil.h"
#include "xpuruntime/error.h"
#include "xpuruntime/stream_manager.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

std::string text_of(PyObject* value, const char* name) {
  if (PyUnicode_Check(value) == 0) {
    throw InputError(std::string(name) + " is " + std::string(py::str(py::repr(value))) +
                     "; expected a name");
  }
  return py::handle(value).cast<std::string>();
}

// The order in which the work of a call stands.
struct Order {
  StreamHandle handle = 0;
  /// Nothing where no library has to wait for another.
  std::optional<Stream> stream;
};

Order settle_order(DeviceId device, std::span<const ArrayArgument> inputs, PyObject* stream,
                   bool one_library) {
  if (stream != Py_None) {
    const Stream given = *stream_argument(stream, device);
    require_stream_of(device, given);
    if (device.type != DeviceType::kCuda) return {};
    return {given.handle(), given};
  }
  if (device.type != DeviceType::kCuda) return {};
  for (const ArrayArgument& input : inputs) {
    if (!input.given()) continue;
    if (const auto current = input.current_stream()) {
      if (one_library) return {*current, std::nullopt};
      return {*current, Stream::wrap(device, *current)};
    }
  }
  const Stream given = StreamManager::instance().default_stream(device);
  return {given.handle(), given};
}

// The arrays that a call writes to, given or made.
struct Results {
  std::array<py::object, 4> objects;
  std::array<std::optional<ArrayArgument>, 4> views;
  std::array<bool, 4> made{};
};

}  // namespace

py::object run_call(CallSite& site, OpCall& call, std::span<const ArrayArgument> inputs,
                    std::initializer_list<PyObject*> outputs, PyObject* stream) {
  const auto specs = call.outputs();
  Results results;
  for (std::size_t i = 0; i < std::min(specs.size(), outputs.size()); ++i) {
    PyObject* const given = outputs.begin()[i];
    if (given == Py_None) continue;
    results.objects[i] = py::reinterpret_borrow<py::object>(given);
    results.views[i].emplace(given, specs[i].name);
    call.set_output(specs[i], results.views[i]->operand());
  }
  const ArrayArgument* lead = nullptr;
  bool one_library = true;
  for (const ArrayArgument& input : inputs) {
    if (!input.given()) continue;
    if (lead == nullptr) lead = &input;
    one_library = one_library && lead->same_library(input);
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (results.views[i]) one_library = one_library && lead->same_library(*results.views[i]);
  }
  const Order order = settle_order(call.desc.device, inputs, stream, one_library);
  if (order.stream) {
    for (const ArrayArgument& input : inputs) {
      if (input.given()) input.order_before(*order.stream);
    }
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (results.views[i]) {
      if (order.stream) results.views[i]->order_before(*order.stream);
      continue;
    }
    Operand view;
    results.objects[i] = lead->make_like(specs[i], order.stream, view);
    results.made[i] = true;
    call.set_output(specs[i], view);
  }
  if (!call.empty()) {
    const ReleaseGil unlocked;
    site.run(call.desc, call.data.data(), order.handle);
  }
  if (order.stream) {
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (results.made[i]) {
        lead->order_made(results.objects[i], *order.stream);
      } else {
        results.views[i]->order_after(*order.stream, true);
      }
    }
    for (const ArrayArgument& input : inputs) {
      if (input.given()) input.order_after(*order.stream, false);
    }
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (results.made[i]) results.objects[i] = lead->hand_over(std::move(results.objects[i]));
  }
  if (specs.size() == 1) return std::move(results.objects[0]);
  py::tuple all(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) all[i] = std::move(results.objects[i]);
  return all;
}

void refuse_count(const char* function, Py_ssize_t given, std::span<const char* const> parameters) {
  std::string text = function;
  text += "() takes " + std::to_string(parameters.size()) + " arguments, and got ";
  text += std::to_string(given) + ":";
  for (const char* const name : parameters) text.append(" ").append(name);
  throw py::type_error(text);
}

namespace argument {

bool flag(PyObject* value) {
  const int truth = PyObject_IsTrue(value);
  if (truth < 0) throw py::error_already_set();
  return truth == 1;
}

double number(PyObject* value, const char* name) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw InputError(std::string(name) + " is " + std::string(py::str(py::repr(value))) +
                     "; expected a number");
  }
  return number;
}

std::optional<double> optional_number(PyObject* value, const char* name) {
  if (value == Py_None) return std::nullopt;
  return number(value, name);
}

Activation activation(PyObject* value) {
  return value == Py_None ? Activation::kNone : parse_activation(text_of(value, "activation"));
}

std::optional<DType> out_dtype(PyObject* value) {
  if (value == Py_None) return std::nullopt;
  const std::string name = text_of(value, "out_dtype");
  try {
    return parse_dtype(name);
  } catch (const InputError& error) {
    throw InputError(std::string("out_dtype: ") + error.what());
  }
}

Phase phase(PyObject* value) {
  if (value == Py_None) return Phase::kInfer;
  const std::string name = text_of(value, "phase");
  for (const Phase one : {Phase::kInfer, Phase::kTrain, Phase::kBackward}) {
    if (name == to_string(one)) return one;
  }
  if (name == "prefill" || name == "decode") return Phase::kInfer;  // parts of it
  throw InputError("phase is '" + name +
                   "'; expected 'infer', 'prefill', 'decode', 'train' or 'backward'");
}

Causal causal(PyObject* value) {
  if (value == Py_False || value == Py_None) return Causal::kNone;
  if (value == Py_True) return Causal::kTopLeft;
  if (PyUnicode_Check(value) != 0) {
    const auto name = py::handle(value).cast<std::string>();
    if (name == "top_left") return Causal::kTopLeft;
    if (name == "bottom_right") return Causal::kBottomRight;
  }
  throw InputError("is_causal is " + std::string(py::str(py::repr(value))) +
                   "; expected True or 'top_left', 'bottom_right', or False");
}

void integers(PyObject* given, std::span<std::int32_t> values, const char* name) {
  const py::object items =
      py::reinterpret_steal<py::object>(PySequence_Fast(given, "expected a sequence"));
  bool right = items.ptr() != nullptr &&
               PySequence_Fast_GET_SIZE(items.ptr()) == static_cast<Py_ssize_t>(values.size());
  for (std::size_t i = 0; right && i < values.size(); ++i) {
    const long value =
        PyLong_AsLong(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)));
    right = PyErr_Occurred() == nullptr && value >= 0 &&
            value <= std::numeric_limits<std::int32_t>::max();
    values[i] = static_cast<std::int32_t>(value);
  }
  if (right) return;
  PyErr_Clear();
  throw InputError(std::string(name) + " is " + std::string(py::str(py::repr(given))) +
                   "; expected whole numbers that are not negative");
}

}  // namespace argument
}  // namespace xpuruntime::bindings
