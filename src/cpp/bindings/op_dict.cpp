// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "op_dict.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device_argument.h"
#include "xpuruntime/error.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

template <typename Numbers>
py::tuple to_tuple(const Numbers& numbers, std::size_t count) {
  py::tuple tuple(count);
  for (std::size_t i = 0; i < count; ++i) tuple[i] = py::int_(numbers[i]);
  return tuple;
}

const char* causal_name(Causal causal) {
  switch (causal) {
    case Causal::kNone:
      return "none";
    case Causal::kTopLeft:
      return "top_left";
    case Causal::kBottomRight:
      return "bottom_right";
  }
  return "";
}

Causal parse_causal(const std::string& name) {
  for (const Causal causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
    if (name == causal_name(causal)) return causal;
  }
  throw InputError("causal is '" + name + "'; expected 'none', 'top_left' or 'bottom_right'");
}

Phase parse_phase(const std::string& name) {
  for (const Phase phase : {Phase::kInfer, Phase::kTrain, Phase::kBackward}) {
    if (name == to_string(phase)) return phase;
  }
  throw InputError("phase is '" + name + "'; expected 'infer', 'train' or 'backward'");
}

template <typename Value>
Value cast(const py::handle& value, const std::string& name) {
  try {
    return value.cast<Value>();
  } catch (const py::cast_error&) {
    throw InputError(name + " is " + std::string(py::str(py::repr(value))) +
                     ", which is of the wrong kind");
  }
}

template <typename Integer, std::size_t kCount>
void read_numbers(const py::handle& value, const std::string& name,
                  std::array<Integer, kCount>& into, std::size_t least, std::size_t& count) {
  const auto numbers = cast<std::vector<Integer>>(value, name);
  if (numbers.size() < least || numbers.size() > kCount) {
    throw InputError(name + " has " + std::to_string(numbers.size()) + " numbers; expected " +
                     (least == kCount ? "" : "at most ") + std::to_string(kCount));
  }
  std::copy(numbers.begin(), numbers.end(), into.begin());
  count = numbers.size();
}

py::dict attributes_of(const OpDesc& op) {
  const OpAttributes& given = op.attributes;
  py::dict dict;
  dict["scale"] = given.scale;
  dict["epsilon"] = given.epsilon;
  dict["dropout_p"] = given.dropout_p;
  dict["activation"] = to_string(given.activation);
  dict["causal"] = causal_name(given.causal);
  dict["allow_tf32"] = given.allow_tf32;
  dict["deterministic"] = given.deterministic;
  dict["groups"] = given.groups;
  dict["stride"] = to_tuple(given.stride, 2);
  dict["dilation"] = to_tuple(given.dilation, 2);
  dict["padding"] = to_tuple(given.padding, 4);
  return dict;
}

void read_attribute(const std::string& name, const py::handle& value, OpAttributes& into) {
  std::size_t count = 0;
  if (name == "scale") {
    into.scale = cast<double>(value, name);
  } else if (name == "epsilon") {
    into.epsilon = cast<double>(value, name);
  } else if (name == "dropout_p") {
    into.dropout_p = cast<float>(value, name);
  } else if (name == "activation") {
    into.activation = parse_activation(cast<std::string>(value, name));
  } else if (name == "causal") {
    into.causal = parse_causal(cast<std::string>(value, name));
  } else if (name == "allow_tf32") {
    into.allow_tf32 = cast<bool>(value, name);
  } else if (name == "deterministic") {
    into.deterministic = cast<bool>(value, name);
  } else if (name == "groups") {
    into.groups = cast<std::int32_t>(value, name);
  } else if (name == "stride") {
    read_numbers(value, name, into.stride, 2, count);
  } else if (name == "dilation") {
    read_numbers(value, name, into.dilation, 2, count);
  } else if (name == "padding") {
    read_numbers(value, name, into.padding, 4, count);
  } else {
    throw InputError("'" + name + "' is not an attribute of an operation");
  }
}

TensorDesc read_operand(const std::string& name, const py::dict& dict) {
  TensorDesc tensor;
  tensor.present = 1;
  if (!dict.contains("dtype") || !dict.contains("shape")) {
    throw InputError("operand '" + name + "' lacks 'dtype' or 'shape'");
  }
  tensor.dtype = parse_dtype(cast<std::string>(dict["dtype"], name + ".dtype"));
  std::size_t rank = 0;
  read_numbers(dict["shape"], name + ".shape", tensor.shape, 0, rank);
  tensor.rank = static_cast<std::uint8_t>(rank);
  if (dict.contains("strides")) {
    std::size_t count = 0;
    read_numbers(dict["strides"], name + ".strides", tensor.strides, rank, count);
  } else {
    std::int64_t stride = 1;
    for (std::size_t dim = rank; dim-- > 0;) {
      tensor.strides[dim] = stride;
      stride *= std::max<std::int64_t>(tensor.shape[dim], 1);
    }
  }
  const auto bytes =
      dict.contains("alignment") ? cast<int>(dict["alignment"], name + ".alignment") : 256;
  while (tensor.alignment < 8 && (2 << tensor.alignment) <= bytes) ++tensor.alignment;
  return tensor;
}

py::dict operand_dict(const TensorDesc& tensor) {
  py::dict dict;
  dict["dtype"] = to_string(tensor.dtype);
  dict["shape"] = to_tuple(tensor.shape, tensor.rank);
  dict["strides"] = to_tuple(tensor.strides, tensor.rank);
  dict["alignment"] = 1 << tensor.alignment;
  return dict;
}

}  // namespace

py::dict to_dict(const OpDesc& op, const DeviceInfo* info) {
  py::dict operands;
  for (std::size_t slot = 0; slot < op.slots; ++slot) {
    if (op.has(slot)) operands[py::str(slot_name(op.kind, slot))] = operand_dict(op[slot]);
  }
  py::dict dict;
  dict["op"] = to_string(op.kind);
  dict["phase"] = to_string(op.phase);
  dict["device"] = to_string(op.device);
  dict["operands"] = operands;
  dict["attributes"] = attributes_of(op);
  dict["text"] = describe(op);
  if (info != nullptr) {
    dict["compute_capability"] = info->compute_capability;
    dict["sm_count"] = info->sm_count;
    dict["device_name"] = info->name;
  }
  return dict;
}

OpDesc op_from_dict(const py::dict& dict) {
  for (const char* key : {"op", "device", "operands"}) {
    if (!dict.contains(key)) throw InputError("the description lacks '" + std::string(key) + "'");
  }
  OpDesc op;
  op.kind = parse_op_kind(cast<std::string>(dict["op"], "op"));
  op.slots = static_cast<std::uint8_t>(slot_count(op.kind));
  op.device = device_argument(dict["device"]);
  if (dict.contains("phase")) op.phase = parse_phase(cast<std::string>(dict["phase"], "phase"));
  if (dict.contains("attributes")) {
    for (const auto& [name, value] : cast<py::dict>(dict["attributes"], "attributes")) {
      read_attribute(cast<std::string>(name, "attributes"), value, op.attributes);
    }
  }
  for (const auto& [key, value] : cast<py::dict>(dict["operands"], "operands")) {
    const auto name = cast<std::string>(key, "operands");
    std::size_t slot = 0;
    while (slot < op.slots && slot_name(op.kind, slot) != name) ++slot;
    if (slot == op.slots) {
      throw InputError("'" + name + "' is not an operand of " + std::string(to_string(op.kind)));
    }
    op.tensors[slot] = read_operand(name, cast<py::dict>(value, name));
  }
  return op;
}

py::dict to_dict(const Decision& decision) {
  const auto& op = decision.op;
  py::list candidates;
  for (const Candidate& one : decision.candidates) {
    py::dict candidate;
    candidate["id"] = one.id;
    candidate["config"] = one.config;
    candidate["accepted"] = one.accepted;
    candidate["reason"] = one.reason;
    candidate["measured_us"] = one.measured_us;
    candidates.append(candidate);
  }
  py::dict shapes;
  for (std::size_t slot = 0; slot < op.slots; ++slot) {
    if (op.has(slot)) {
      shapes[py::str(slot_name(op.kind, slot))] = to_tuple(op[slot].shape, op[slot].rank);
    }
  }
  py::dict dict;
  dict["op"] = to_string(op.kind);
  dict["phase"] = to_string(op.phase);
  dict["device"] = to_string(op.device);
  dict["dtype"] = facts_of(op).dtype;
  dict["shapes"] = shapes;
  dict["description"] = describe(op);
  dict["node"] = decision.node;
  dict["module"] = decision.module;
  dict["asked"] = decision.asked;
  dict["asked_by"] = decision.asked_by;
  dict["candidates"] = candidates;
  dict["chosen"] = decision.chosen;
  dict["config"] = decision.config;
  dict["source"] = to_string(decision.source);
  dict["notes"] = decision.notes;
  dict["count"] = decision.count.load(std::memory_order_relaxed);
  dict["text"] = explain(decision);
  return dict;
}

}  // namespace xpuruntime::bindings
