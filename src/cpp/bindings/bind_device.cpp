// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include "bind.h"
#include "device_argument.h"
#include "gil.h"
#include "xpuruntime/device_manager.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

std::optional<DeviceType> type_argument(const std::optional<std::string>& type) {
  if (!type) return std::nullopt;
  if (*type == "cpu") return DeviceType::kCpu;
  if (*type == "cuda") return DeviceType::kCuda;
  throw InputError("device type '" + *type +
                   "' is not known: take 'cpu' or 'cuda', or None for all");
}

// One use of `with scope:`, on one thread.
struct Scope {
  DeviceId device;
  std::shared_ptr<void> held;
};

}  // namespace

void bind_device(py::module_& module) {
  py::class_<Scope>(module, "DeviceScope",
                    "A CUDA device made current for the thread of a `with` block.")
      .def(py::init(
               [](const py::object& device) { return Scope{device_argument(device), nullptr}; }),
           "device"_a)
      .def("__enter__",
           [](Scope& self) { self.held = DeviceManager::instance().enter(self.device); })
      .def("__exit__", [](Scope& self, const py::args&) { self.held.reset(); });
  py::class_<DeviceInfo>(module, "DeviceInfo",
                         "Fixed facts of one device. What does not apply is 0 or empty.")
      .def_property_readonly("device", [](const DeviceInfo& self) { return to_string(self.id); })
      .def_property_readonly("index", [](const DeviceInfo& self) { return self.id.index; })
      .def_readonly("name", &DeviceInfo::name)
      .def_readonly("total_memory", &DeviceInfo::total_memory)
      .def_readonly("dtypes", &DeviceInfo::dtypes)
      .def_readonly("cores", &DeviceInfo::cores)
      .def_readonly("features", &DeviceInfo::features)
      .def_readonly("compute_capability", &DeviceInfo::compute_capability)
      .def_readonly("sm_count", &DeviceInfo::sm_count)
      .def_readonly("driver_version", &DeviceInfo::driver_version)
      .def_readonly("runtime_version", &DeviceInfo::runtime_version)
      .def_readonly("pci_id", &DeviceInfo::pci_id)
      .def("__repr__", [](const DeviceInfo& self) {
        return "<DeviceInfo " + to_string(self.id) + ": " + self.name + ">";
      });

  py::class_<DeviceManager, std::unique_ptr<DeviceManager, py::nodelete>>(
      module, "DeviceManager", "Knows what devices there are.")
      .def_static("instance", &DeviceManager::instance, py::return_value_policy::reference)
      .def_static("built_with_cuda", &DeviceManager::built_with_cuda,
                  "Whether this build has the CUDA core.")
      .def(
          "get_device_count",
          [](DeviceManager& self, const std::optional<std::string>& type) {
            return self.get_device_count(type_argument(type));
          },
          "type"_a = py::none(), "Number of devices of one type, or of all, the CPU included.")
      .def("get_all_devices", &DeviceManager::get_all_devices, "The CPU, then the CUDA devices.")
      .def(
          "get_device_info",
          [](DeviceManager& self, const py::object& device) {
            return self.get_device_info(device_argument(device));
          },
          "device"_a, "Facts of one device, named 'cpu', 'cuda:N' or N.")
      .def("cuda_reason", &DeviceManager::cuda_reason,
           "Why there is no CUDA device; empty when there is one.")
      .def(
          "memory_info",
          [](DeviceManager& self, const py::object& device) {
            const DeviceId id = device_argument(device);
            const ReleaseGil unlocked;
            const MemoryInfo info = self.memory_info(id);
            return std::pair(info.free, info.total);
          },
          "device"_a, "Free and total bytes now. Creates the CUDA context of the device.")
      .def("get_current_device",
           [](DeviceManager& self) { return to_string(self.get_current_device()); })
      .def(
          "set_current_device",
          [](DeviceManager& self, const py::object& device) {
            const DeviceId id = device_argument(device);
            const ReleaseGil unlocked;
            self.set_current_device(id);
          },
          "device"_a, "Make a CUDA device current for this thread. Creates its context.")
      .def(
          "synchronize",
          [](DeviceManager& self, const py::object& device) {
            const auto given = optional_device(device);
            const DeviceId id = given ? *given : self.get_current_device();
            const ReleaseGil unlocked;
            self.synchronize(id);
          },
          "device"_a = py::none(), "Wait for all work of a device; by default the current one.");
}

}  // namespace xpuruntime::bindings
