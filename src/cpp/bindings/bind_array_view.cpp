// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "array_argument.h"
#include "bind.h"
#include "convert.h"
#include "xpuruntime/dtype.h"
#include "xpuruntime/error.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

// An ArrayArgument that Python holds, together with the array and the text of its name.
class ArrayView {
 public:
  ArrayView(py::object object, py::str name)
      : object_(std::move(object)),
        name_(std::move(name)),
        argument_(object_.ptr(), name_text(name_)) {
    if (!argument_.given()) throw InputError(std::string(name_) + " is None; expected an array");
  }

  const ArrayArgument& argument() const noexcept { return argument_; }
  const Operand& operand() const noexcept { return argument_.operand(); }
  const py::object& object() const noexcept { return object_; }

  py::object make_like(const std::vector<std::int64_t>& shape, const std::string& name,
                       const std::optional<Stream>& stream) const {
    if (shape.size() > Operand::kMaxRank) {
      throw InputError(name + " would have " + std::to_string(shape.size()) +
                       " dimensions, and at most " + std::to_string(Operand::kMaxRank) +
                       " are possible: reshape what it is made of");
    }
    OutputSpec spec;
    spec.name = name.c_str();
    spec.dtype = operand().dtype;
    spec.rank = static_cast<std::uint8_t>(shape.size());
    std::copy(shape.begin(), shape.end(), spec.shape.begin());
    Operand view;
    return argument_.hand_over(argument_.make_like(spec, stream, view));
  }

 private:
  static const char* name_text(const py::str& name) {
    const char* const text = PyUnicode_AsUTF8(name.ptr());
    if (text == nullptr) throw py::error_already_set();
    return text;
  }

  py::object object_;
  py::str name_;
  ArrayArgument argument_;
};

py::tuple shape_of(const ArrayView& view) {
  const Operand& operand = view.operand();
  py::tuple shape(operand.rank);
  for (std::size_t i = 0; i < operand.rank; ++i) shape[i] = py::int_(operand.shape[i]);
  return shape;
}

bool is_contiguous(const ArrayView& view) {
  const Operand& operand = view.operand();
  if (operand.elements() == 0) return true;
  std::int64_t dense = 1;
  for (std::size_t i = operand.rank; i-- > 0;) {
    if (operand.shape[i] != 1 && operand.strides[i] != dense) return false;
    dense *= operand.shape[i];
  }
  return true;
}

std::int64_t itemsize(const ArrayView& view) {
  const DType dtype = view.operand().dtype;
  return (static_cast<std::int64_t>(dtype.bits) * dtype.lanes + 7) / 8;
}

}  // namespace

void bind_array_view(py::module_& module) {
  py::class_<ArrayView>(module, "ArrayView", "An array of any library, seen by address and shape.")
      .def(py::init([](py::object object, py::str name) {
             return std::make_unique<ArrayView>(std::move(object), std::move(name));
           }),
           "array"_a, "name"_a)
      .def_property_readonly("array", &ArrayView::object)
      .def_property_readonly("data_ptr",
                             [](const ArrayView& self) {
                               return reinterpret_cast<std::uintptr_t>(self.operand().data);
                             })
      .def_property_readonly("shape", shape_of)
      .def_property_readonly("size",
                             [](const ArrayView& self) { return self.operand().elements(); })
      .def_property_readonly("itemsize", itemsize)
      .def_property_readonly("dtype",
                             [](const ArrayView& self) { return to_string(self.operand().dtype); })
      .def_property_readonly("device",
                             [](const ArrayView& self) { return to_string(self.operand().device); })
      .def_property_readonly("readonly",
                             [](const ArrayView& self) { return self.operand().readonly; })
      .def_property_readonly("is_contiguous", is_contiguous)
      .def_property_readonly("current_stream",
                             [](const ArrayView& self) { return self.argument().current_stream(); })
      .def(
          "same_library",
          [](const ArrayView& self, const ArrayView& other) {
            return self.argument().same_library(other.argument());
          },
          "other"_a)
      .def(
          "order_before",
          [](const ArrayView& self, const Stream& stream) { self.argument().order_before(stream); },
          "stream"_a)
      .def(
          "order_after",
          [](const ArrayView& self, const Stream& stream, bool written) {
            self.argument().order_after(stream, written);
          },
          "stream"_a, py::kw_only(), "written"_a)
      .def("make_like", &ArrayView::make_like, "shape"_a, "name"_a, "stream"_a = py::none());
}

}  // namespace xpuruntime::bindings
