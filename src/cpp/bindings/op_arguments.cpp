// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "op_arguments.h"

#include <algorithm>
#include <limits>

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

Order settle_order(DeviceId device, std::initializer_list<const ArrayArgument*> inputs,
                   PyObject* stream, bool all_tables) {
  if (device.type != DeviceType::kCuda) {
    if (stream != Py_None) {
      const auto given = stream_argument(stream, device);
      if (given) require_stream_of(device, *given);
    }
    return {};
  }
  if (stream != Py_None) {
    const Stream given = *stream_argument(stream, device);
    require_stream_of(device, given);
    return {given.handle(), given};
  }
  for (const ArrayArgument* input : inputs) {
    if (!input->given()) continue;
    if (const auto current = input->current_stream()) {
      if (all_tables) return {*current, std::nullopt};
      return {*current, Stream::wrap(device, *current)};
    }
  }
  const Stream given = StreamManager::instance().default_stream(device);
  return {given.handle(), given};
}

}  // namespace

py::object run_call(CallSite& site, OpCall& call,
                    std::initializer_list<const ArrayArgument*> inputs,
                    std::initializer_list<PyObject*> outputs, PyObject* stream) {
  bool all_tables = true;
  const ArrayArgument* lead = nullptr;
  for (const ArrayArgument* input : inputs) {
    if (!input->given()) continue;
    if (lead == nullptr) lead = input;
    all_tables = all_tables && input->kind() == ArrayArgument::Kind::kTable;
  }
  for (PyObject* const output : outputs) {
    if (output != nullptr && output != Py_None) all_tables = false;
  }
  const Order order = settle_order(call.desc.device, inputs, stream, all_tables);
  if (order.stream) {
    for (const ArrayArgument* input : inputs) {
      if (input->given()) input->order_before(*order.stream);
    }
  }
  std::array<std::optional<ArrayArgument>, 4> views;
  std::array<py::object, 4> results;
  std::array<bool, 4> made{};
  const auto specs = call.outputs();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    PyObject* const given = i < outputs.size() ? outputs.begin()[i] : nullptr;
    if (given != nullptr && given != Py_None) {
      results[i] = py::reinterpret_borrow<py::object>(given);
      views[i].emplace(given, specs[i].name);
      if (order.stream) views[i]->order_before(*order.stream);
    } else {
      results[i] = lead->make_like(specs[i], order.stream, views[i]);
      made[i] = true;
    }
    call.set_output(specs[i], views[i]->operand());
  }
  if (!call.empty()) {
    const py::gil_scoped_release unlocked;
    site.run(call.desc, call.data.data(), order.handle);
  }
  if (order.stream) {
    for (std::size_t i = 0; i < specs.size(); ++i) views[i]->order_after(*order.stream, true);
    for (const ArrayArgument* input : inputs) {
      if (input->given()) input->order_after(*order.stream, false);
    }
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (made[i]) results[i] = lead->hand_over(std::move(results[i]));
  }
  if (specs.size() == 1) return std::move(results[0]);
  py::tuple all(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) all[i] = std::move(results[i]);
  return all;
}

PositionalArguments::PositionalArguments(PyObject* const* values, Py_ssize_t count,
                                         Py_ssize_t expected, const char* function)
    : values_(values) {
  if (count == expected) return;
  throw py::type_error(std::string(function) + "() takes " + std::to_string(expected) +
                       " arguments, and got " + std::to_string(count));
}

CallSite& PositionalArguments::next_site() { return py::handle(next()).cast<CallSite&>(); }

float PositionalArguments::next_float(const char* name) {
  PyObject* const value = next();
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw InputError(std::string(name) + " is " + std::string(py::str(py::repr(value))) +
                     "; expected a number");
  }
  return static_cast<float>(number);
}

std::optional<float> PositionalArguments::next_optional_float(const char* name) {
  if (values_[at_] == Py_None) {
    ++at_;
    return std::nullopt;
  }
  return next_float(name);
}

Activation PositionalArguments::next_activation() {
  PyObject* const value = next();
  return value == Py_None ? Activation::kNone : parse_activation(text_of(value, "activation"));
}

std::optional<DType> PositionalArguments::next_dtype() {
  PyObject* const value = next();
  if (value == Py_None) return std::nullopt;
  return parse_dtype(text_of(value, "out_dtype"));
}

Phase PositionalArguments::next_phase() {
  PyObject* const value = next();
  if (value == Py_None) return Phase::kInfer;
  const std::string name = text_of(value, "phase");
  for (const Phase phase : {Phase::kInfer, Phase::kTrain, Phase::kBackward}) {
    if (name == to_string(phase)) return phase;
  }
  throw InputError("phase is '" + name + "'; expected 'infer', 'train' or 'backward'");
}

Causal PositionalArguments::next_causal() {
  PyObject* const value = next();
  if (value == Py_False || value == Py_None) return Causal::kNone;
  if (value == Py_True) return Causal::kTopLeft;
  const std::string name = text_of(value, "is_causal");
  if (name == "top_left") return Causal::kTopLeft;
  if (name == "bottom_right") return Causal::kBottomRight;
  throw InputError("is_causal is '" + name +
                   "'; expected True or 'top_left', 'bottom_right', or False");
}

void PositionalArguments::read_integers(std::span<std::int32_t> values, const char* name) {
  PyObject* const given = next();
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

}  // namespace xpuruntime::bindings
