// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include "bind.h"
#include "device_argument.h"
#include "gil.h"
#include "python_memory.h"
#include "xpuruntime/engine_allocator.h"
#include "xpuruntime/memory_manager.h"
#include "xpuruntime/strided_copy.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

py::dict stats_to_dict(const MemoryStats& stats) {
  py::dict out;
  out["requested"] = stats.requested;
  out["current"] = stats.current;
  out["peak"] = stats.peak;
  out["reserved"] = stats.reserved;
  out["peak_reserved"] = stats.peak_reserved;
  out["cached"] = stats.cached;
  out["pending"] = stats.pending;
  out["largest_free"] = stats.largest_free;
  out["allocations"] = stats.allocations;
  out["total_allocations"] = stats.total_allocations;
  out["upstream_allocations"] = stats.upstream_allocations;
  out["failures"] = stats.failures;
  out["fragmentation"] = stats.fragmentation();
  return out;
}

void bind_stats(py::module_& module) {
  py::class_<MemoryStats>(module, "MemoryStats",
                          "Bytes and counts of one pool, or the sum of several.")
      .def_readonly("requested", &MemoryStats::requested)
      .def_readonly("current", &MemoryStats::current)
      .def_readonly("peak", &MemoryStats::peak)
      .def_readonly("reserved", &MemoryStats::reserved)
      .def_readonly("peak_reserved", &MemoryStats::peak_reserved)
      .def_readonly("cached", &MemoryStats::cached)
      .def_readonly("pending", &MemoryStats::pending)
      .def_readonly("largest_free", &MemoryStats::largest_free)
      .def_readonly("allocations", &MemoryStats::allocations)
      .def_readonly("total_allocations", &MemoryStats::total_allocations)
      .def_readonly("upstream_allocations", &MemoryStats::upstream_allocations)
      .def_readonly("failures", &MemoryStats::failures)
      .def_property_readonly("fragmentation", &MemoryStats::fragmentation)
      .def("to_dict", stats_to_dict)
      .def("__eq__",
           [](const MemoryStats& self, const py::object& other) -> py::object {
             if (!py::isinstance<MemoryStats>(other)) {
               return py::reinterpret_borrow<py::object>(Py_NotImplemented);
             }
             return py::bool_(self == other.cast<const MemoryStats&>());
           })
      .def("__repr__",
           [](const MemoryStats& self) {
             return "MemoryStats(" + std::string(py::str(stats_to_dict(self))) + ")";
           })
      .attr("__hash__") = py::none();
}

void bind_manager(py::module_& module) {
  py::class_<MemoryManager, std::unique_ptr<MemoryManager, py::nodelete>>(
      module, "MemoryManager", "Makes pools and knows the live ones.")
      .def_static("instance", &MemoryManager::instance, py::return_value_policy::reference)
      .def(
          "default_pool",
          [](MemoryManager& self, const py::object& device) {
            return to_python(self.default_pool(device_argument(device)));
          },
          "device"_a, "The device's shared caching pool, without a limit.")
      .def(
          "pools",
          [](const MemoryManager& self, const py::object& device) {
            py::list out;
            for (auto& pool : self.pools(optional_device(device))) out.append(to_python(pool));
            return out;
          },
          "device"_a = py::none(), "Live pools in the order they were made; of one device, or all.")
      .def(
          "get_allocated_size",
          [](const MemoryManager& self, const py::object& device) {
            return self.get_allocated_size(optional_device(device));
          },
          "device"_a = py::none(), "Bytes in use, over live pools.")
      .def(
          "get_stats",
          [](const MemoryManager& self, const py::object& device) {
            return self.get_stats(optional_device(device));
          },
          "device"_a = py::none(), "Sums over live pools.")
      .def(
          "empty_cache",
          [](MemoryManager& self, const py::object& device) {
            const auto id = optional_device(device);
            const ReleaseGil unlocked;
            return self.empty_cache(id);
          },
          "device"_a = py::none(), "Give all unused memory back. Returns the bytes given back.");
}

void bind_engine_allocator(py::module_& module) {
  py::class_<EngineAllocatorStats>(module, "EngineAllocatorStats",
                                   "Numbers of one engine allocator.")
      .def_readonly("current", &EngineAllocatorStats::current)
      .def_readonly("peak", &EngineAllocatorStats::peak)
      .def_readonly("allocations", &EngineAllocatorStats::allocations)
      .def_readonly("total_allocations", &EngineAllocatorStats::total_allocations)
      .def_readonly("failures", &EngineAllocatorStats::failures)
      .def_readonly("foreign_frees", &EngineAllocatorStats::foreign_frees);

  using Holder = std::unique_ptr<EngineAllocator>;
  struct Slot {
    Holder allocator;
    EngineAllocator& get() const {
      if (allocator == nullptr) {
        throw UnsupportedOperationError("this engine allocator is closed: make a new one");
      }
      return *allocator;
    }
  };
  py::class_<Slot>(module, "EngineAllocator",
                   "Lets an engine that takes C allocation functions allocate from a pool.")
      .def(py::init([](const py::object& pool, const py::object& stream) {
             return Slot{std::make_unique<EngineAllocator>(to_pool(pool), to_stream(stream.ptr()))};
           }),
           "pool"_a, "stream"_a = py::none())
      .def_property_readonly("alloc_address",
                             [](const Slot& self) { return self.get().alloc_address(); })
      .def_property_readonly("free_address",
                             [](const Slot& self) { return self.get().free_address(); })
      .def_property_readonly("empty_cache_address",
                             [](const Slot& self) { return self.get().empty_cache_address(); })
      .def_property_readonly("pool", [](const Slot& self) { return to_python(self.get().pool()); })
      .def_property_readonly("stream", [](const Slot& self) { return self.get().stream(); })
      .def_property_readonly("closed", [](const Slot& self) { return self.allocator == nullptr; })
      .def("stats", [](const Slot& self) { return self.get().stats(); })
      .def(
          "take_failure",
          [](const Slot& self) -> std::optional<std::string> {
            EngineAllocator::Failure failure = self.get().take_failure();
            if (failure.reason.empty()) return std::nullopt;
            return std::move(failure.reason);
          },
          "Why the last allocation failed, or None. Forgets it.")
      .def(
          "raise_failure",
          [](const Slot& self) {
            const EngineAllocator::Failure failure = self.get().take_failure();
            if (failure.reason.empty()) return;
            throw OutOfMemoryError(failure.reason, to_string(self.get().pool()->device()),
                                   failure.requested);
          },
          "Raise OutOfMemoryError when an allocation failed since the last call.")
      .def(
          "close", [](Slot& self) { self.allocator.reset(); },
          "Give the slot back. Memory that the engine still holds stays valid until it frees it.")
      .def_static("available", &EngineAllocator::available, "Slots free now.");
}

void bind_strided_copy(py::module_& module) {
  module.def(
      "copy_to_contiguous",
      [](const py::object& device, std::uintptr_t source, std::uintptr_t destination,
         const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
         std::size_t itemsize, const py::object& stream) {
        const DeviceId id = device_argument(device);
        const StreamHandle handle = to_stream(stream.ptr());
        const ReleaseGil unlocked;
        copy_to_contiguous(id, reinterpret_cast<const void*>(source),
                           reinterpret_cast<void*>(destination), shape, strides, itemsize, handle);
      },
      "device"_a, "source"_a, "destination"_a, "shape"_a, "strides"_a, "itemsize"_a,
      "stream"_a = py::none(),
      "Copy a strided array to a contiguous one by address; strides count elements.");
}

}  // namespace

void bind_memory(py::module_& module) {
  bind_stats(module);
  add_buffer_type(module);
  add_pool_type(module);
  bind_manager(module);
  bind_engine_allocator(module);
  bind_strided_copy(module);
}

}  // namespace xpuruntime::bindings
