// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "bind.h"
#include "onnxruntime/named_rules.h"
#include "onnxruntime/operation.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

py::dict list_operators() {
  py::dict all;
  py::list providers;
  providers.append("CPUExecutionProvider");
#ifdef XPURUNTIME_WITH_CUDA
  providers.append("CUDAExecutionProvider");
#endif
  for (const ort::OpSpec* spec : ort::operators()) {
    py::list inputs;
    py::list optional;
    for (const ort::InputSpec& input : spec->inputs) {
      (input.optional ? optional : inputs).append(input.name);
    }
    py::dict attributes;
    attributes["rules"] = "string";
    attributes["node"] = "string";
    attributes["deterministic"] = "int";
    for (const ort::AttributeSpec& attribute : spec->attributes) {
      attributes[attribute.name] = attribute.kind;
    }
    py::dict one;
    one["inputs"] = inputs;
    one["optional_inputs"] = optional;
    one["attributes"] = attributes;
    one["providers"] = py::list(providers);
    all[spec->name] = one;
  }
  return all;
}

}  // namespace

void bind_onnxruntime(py::module_& module) {
  py::class_<ort::NamedRules>(module, "OnnxRuntimeRules",
                              "KernelRules under a name that nodes can carry.")
      .def(py::init([](std::shared_ptr<KernelRules> rules,
                       const std::map<std::string, std::shared_ptr<KernelRules>>& nodes) {
             return std::make_unique<ort::NamedRules>(
                 std::move(rules), ort::NamedRules::ByNode(nodes.begin(), nodes.end()));
           }),
           "rules"_a, "nodes"_a = std::map<std::string, std::shared_ptr<KernelRules>>())
      .def_property_readonly("key", &ort::NamedRules::key);
  module.def("onnxruntime_ops", list_operators,
             "Operators of the domain `xpuruntime` that this module holds, by name.");
}

}  // namespace xpuruntime::bindings
