// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/torch_allocator.h"
#include "bind.h"
#include "python_memory.h"
#include "xpuruntime/error.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

// One that can be closed before Python forgets it.
struct Closable {
  std::unique_ptr<TorchAllocator> allocator;
  TorchAllocator& get() const {
    if (allocator == nullptr) {
      throw UnsupportedOperationError("this torch allocator is closed: make a new one");
    }
    return *allocator;
  }
};

Closable make(const py::iterable& pools, bool throws) {
  std::vector<std::shared_ptr<MemoryPool>> found;
  for (const py::handle pool : pools) found.push_back(to_pool(pool));
  return {std::make_unique<TorchAllocator>(
      std::move(found), throws ? TorchAllocator::Failing::kThrow : TorchAllocator::Failing::kNull)};
}

void bind_stats(py::module_& module) {
  py::class_<TorchAllocatorStats>(module, "TorchAllocatorStats",
                                  "Numbers of one torch allocator, in bytes and counts.")
      .def_readonly("current", &TorchAllocatorStats::current)
      .def_readonly("peak", &TorchAllocatorStats::peak)
      .def_readonly("in_graphs", &TorchAllocatorStats::in_graphs)
      .def_readonly("allocations", &TorchAllocatorStats::allocations)
      .def_readonly("total_allocations", &TorchAllocatorStats::total_allocations)
      .def_readonly("failures", &TorchAllocatorStats::failures)
      .def_readonly("foreign_frees", &TorchAllocatorStats::foreign_frees)
      .def("to_dict", [](const TorchAllocatorStats& self) {
        py::dict out;
        out["current"] = self.current;
        out["peak"] = self.peak;
        out["in_graphs"] = self.in_graphs;
        out["allocations"] = self.allocations;
        out["total_allocations"] = self.total_allocations;
        out["failures"] = self.failures;
        out["foreign_frees"] = self.foreign_frees;
        return out;
      });
}

}  // namespace

void bind_allocator(py::module_& module) {
  bind_stats(module);
  py::class_<Closable>(module, "TorchAllocator",
                       "PyTorch's CUDAPluggableAllocator over xpuruntime pools.")
      .def(py::init(&make), "pools"_a, py::kw_only(), "throws"_a = false)
      .def_property_readonly("slot", [](const Closable& self) { return self.get().slot(); })
      .def_property_readonly("alloc_address",
                             [](const Closable& self) { return self.get().alloc_address(); })
      .def_property_readonly("free_address",
                             [](const Closable& self) { return self.get().free_address(); })
      .def_property_readonly(
          "record_stream_address",
          [](const Closable& self) { return self.get().record_stream_address(); })
      .def_property_readonly("empty_cache_address",
                             [](const Closable& self) { return self.get().empty_cache_address(); })
      .def_property_readonly(
          "memory_fraction_address",
          [](const Closable& self) { return self.get().memory_fraction_address(); })
      .def_property_readonly("pools",
                             [](const Closable& self) {
                               py::list out;
                               for (const auto& pool : self.get().pools()) {
                                 out.append(to_python(pool));
                               }
                               return out;
                             })
      .def_property_readonly("throws",
                             [](const Closable& self) {
                               return self.get().failing() == TorchAllocator::Failing::kThrow;
                             })
      .def_property_readonly("closed",
                             [](const Closable& self) { return self.allocator == nullptr; })
      .def(
          "stats",
          [](const Closable& self, std::optional<int> device) { return self.get().stats(device); },
          "device"_a = py::none(), "Numbers of all devices, or of the one with this index.")
      .def(
          "take_failure",
          [](const Closable& self) -> std::optional<std::string> {
            TorchAllocator::Failure failure = self.get().take_failure();
            if (failure.reason.empty()) return std::nullopt;
            return std::move(failure.reason);
          },
          "Why the last allocation failed, or None. Forgets it.")
      .def(
          "close", [](Closable& self) { self.allocator.reset(); },
          "Let go of the slot. Memory that PyTorch still holds stays valid until it frees it.")
      .def_static("available", &TorchAllocator::available, "Slots free now.");
}

}  // namespace xpuruntime::bindings
