// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "bind.h"
#include "convert.h"
#include "gil.h"
#include "xpuruntime/error.h"
#include "xpuruntime/event.h"
#include "xpuruntime/graph.h"
#include "xpuruntime/stream.h"
#include "xpuruntime/stream_manager.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

using Unlocked = py::call_guard<ReleaseGil>;

// What `with graph.capture(stream)` holds.
struct Capture {
  Graph graph;
  Stream stream;
  bool instantiate;
};

std::pair<int, int> as_pair(PriorityRange range) { return {range.least, range.greatest}; }

Stream wrap(const py::object& device, const py::object& stream, const py::object& owner) {
  const StreamHandle handle = to_stream(stream.ptr());
  const py::object kept = owner.is_none() ? stream : owner;
  return Stream::wrap(device_argument(device), handle,
                      std::shared_ptr<void>(kept.inc_ref().ptr(), release_object));
}

std::pair<int, StreamHandle> cuda_stream(const Stream& self) {
  if (self.device().type == DeviceType::kCpu) {
    throw UnsupportedOperationError(
        "a CPU stream has no cudaStream_t: use a stream of a CUDA device", "cpu");
  }
  return {0, self.handle()};
}

std::string describe(const Stream& stream) {
  return "Stream(device='" + to_string(stream.device()) +
         "', handle=" + std::to_string(stream.handle()) + (stream.owned() ? ")" : ", foreign)");
}

void bind_stream_class(py::module_& module) {
  py::class_<Stream>(module, "Stream", "An in-order queue of work on one device.")
      .def(py::init([](const py::object& device, int priority, bool non_blocking) {
             return Stream::create(device_argument(device),
                                   {.priority = priority, .non_blocking = non_blocking});
           }),
           "device"_a = "cuda:0", py::kw_only(), "priority"_a = 0, "non_blocking"_a = true)
      .def_static("wrap", wrap, "device"_a, "stream"_a, py::kw_only(), "owner"_a = py::none(),
                  "A stream that someone else owns: a handle, or a stream object, which is kept.")
      .def_static(
          "default",
          [](const py::object& device) {
            return StreamManager::instance().default_stream(device_argument(device));
          },
          "device"_a = "cuda:0", "The device's legacy default stream.")
      .def_static(
          "priority_range",
          [](const py::object& device) {
            return as_pair(Stream::priority_range(device_argument(device)));
          },
          "device"_a = "cuda:0",
          "(lowest, highest) priority; a smaller number is a higher priority.")
      .def_property_readonly("device", [](const Stream& self) { return to_string(self.device()); })
      .def_property_readonly("handle", &Stream::handle,
                             "The `cudaStream_t` as an integer; 0 on the CPU.")
      .def_property_readonly("owned", &Stream::owned,
                             "Whether this library made the stream and will destroy it.")
      .def_property_readonly("priority", &Stream::priority)
      .def_property_readonly("non_blocking", &Stream::non_blocking)
      .def_property_readonly("capturing", &Stream::capturing,
                             "Whether its work is being recorded into a graph.")
      .def("abort_capture", &Stream::abort_capture, Unlocked(),
           "End a capture that was left open on this stream, and drop what was recorded.")
      .def("synchronize", &Stream::synchronize, Unlocked(),
           "Block until all work given so far is done.")
      .def("query", &Stream::query, Unlocked(), "Whether all work given so far is done.")
      .def("wait_event", &Stream::wait_event, "event"_a, Unlocked(),
           "Later work here starts after `event`.")
      .def("wait_stream", &Stream::wait_stream, "other"_a, Unlocked(),
           "Later work here starts after all work given to `other` so far.")
      .def("record", &Stream::record, py::kw_only(), "timing"_a = false, Unlocked(),
           "A new event, recorded here.")
      .def("__cuda_stream__", cuda_stream)
      .def("__eq__",
           [](const Stream& self, const py::object& other) {
             return py::isinstance<Stream>(other) && self == other.cast<const Stream&>();
           })
      .def("__hash__",
           [](const Stream& self) {
             return py::hash(py::make_tuple(to_string(self.device()), self.handle()));
           })
      .def("__repr__", describe);
}

void bind_event_class(py::module_& module) {
  py::class_<Event>(module, "Event", "A point in a stream's work. On the CPU, a time.")
      .def(py::init([](const py::object& device, bool timing) {
             return Event(device_argument(device), timing);
           }),
           "device"_a = "cuda:0", py::kw_only(), "timing"_a = false)
      .def_property_readonly("device", [](const Event& self) { return to_string(self.device()); })
      .def_property_readonly("timing", &Event::timing)
      .def_property_readonly("handle", &Event::handle,
                             "The `cudaEvent_t` as an integer; 0 on the CPU.")
      .def("record", &Event::record, "stream"_a, Unlocked(),
           "Move the event to the end of the stream's work so far.")
      .def("synchronize", &Event::synchronize, Unlocked(),
           "Block until the work before the event is done.")
      .def("query", &Event::query, Unlocked(), "Whether the work before the event is done.")
      .def("elapsed_us", &Event::elapsed_us, "end"_a, Unlocked(),
           "Microseconds from this event to `end`.")
      .def("__repr__", [](const Event& self) {
        return "Event(device='" + to_string(self.device()) +
               "', timing=" + (self.timing() ? "True)" : "False)");
      });
}

void bind_graph_class(py::module_& module) {
  py::class_<GraphUpdate>(module, "GraphUpdate", "What `Graph.update` did.")
      .def_readonly("in_place", &GraphUpdate::in_place)
      .def_property_readonly("reason",
                             [](const GraphUpdate& self) -> py::object {
                               if (self.in_place) return py::none();
                               return py::str(self.reason);
                             })
      .def("__repr__", [](const GraphUpdate& self) {
        return self.in_place ? std::string("GraphUpdate(in_place=True)")
                             : "GraphUpdate(in_place=False, reason='" + self.reason + "')";
      });

  py::class_<Capture>(module, "GraphCapture", "What `with graph.capture(stream)` holds.")
      .def("__enter__",
           [](Capture& self) {
             self.graph.begin_capture(self.stream);
             return self.graph;
           })
      .def("__exit__", [](Capture& self, const py::object& type, const py::args&) {
        if (!type.is_none()) return self.graph.abort_capture();
        const ReleaseGil unlocked;
        self.graph.end_capture();
        if (self.instantiate) self.graph.instantiate();
      });

  py::class_<Graph>(module, "Graph",
                    "Work recorded from a CUDA stream, to be launched again as a whole.")
      .def(py::init<>())
      .def(
          "capture",
          [](const Graph& self, const Stream& stream, bool instantiate) {
            return Capture{.graph = self, .stream = stream, .instantiate = instantiate};
          },
          "stream"_a, py::kw_only(), "instantiate"_a = true, "Record the work of a `with` block.")
      .def("begin_capture", &Graph::begin_capture, "stream"_a, Unlocked(),
           "Start to record a stream's work.")
      .def("end_capture", &Graph::end_capture, Unlocked(), "Stop recording.")
      .def("abort_capture", &Graph::abort_capture, Unlocked(),
           "Stop recording and drop what was recorded.")
      .def("instantiate", &Graph::instantiate, Unlocked(), "Make the graph ready to run. Slow.")
      .def("replay", &Graph::replay, "stream"_a, Unlocked(), "Launch all of it on a stream.")
      .def("update", &Graph::update, "newer"_a, Unlocked(),
           "Take over the work of a newly captured graph.")
      .def_property_readonly("capturing", &Graph::capturing)
      .def_property_readonly("captured", &Graph::captured)
      .def_property_readonly("instantiated", &Graph::instantiated)
      .def_property_readonly("node_count", &Graph::node_count)
      .def_property_readonly("device",
                             [](const Graph& self) -> py::object {
                               const auto device = self.device();
                               if (!device) return py::none();
                               return py::str(to_string(*device));
                             })
      .def("__repr__", [](const Graph& self) {
        const char* state = self.capturing()      ? "capturing"
                            : self.instantiated() ? "instantiated"
                            : self.captured()     ? "captured"
                                                  : "empty";
        return "Graph(" + std::string(state) + ", nodes=" + std::to_string(self.node_count()) + ")";
      });
}

void bind_manager_class(py::module_& module) {
  py::class_<StreamManager, std::unique_ptr<StreamManager, py::nodelete>>(
      module, "StreamManager", "The streams that the parts of a program share.")
      .def_static("instance", &StreamManager::instance, py::return_value_policy::reference,
                  "The process's default manager.")
      .def(
          "create",
          [](const StreamManager& self, const py::object& device, int priority, bool non_blocking) {
            return self.create(device_argument(device),
                               {.priority = priority, .non_blocking = non_blocking});
          },
          "device"_a = "cuda:0", py::kw_only(), "priority"_a = 0, "non_blocking"_a = true,
          "A stream of your own.")
      .def(
          "default_stream",
          [](StreamManager& self, const py::object& device) {
            return self.default_stream(device_argument(device));
          },
          "device"_a = "cuda:0", "The device's legacy default stream.")
      .def(
          "pooled",
          [](StreamManager& self, const py::object& device, int priority) {
            return self.pooled(device_argument(device), priority);
          },
          "device"_a = "cuda:0", py::kw_only(), "priority"_a = 0,
          "One of a few shared streams, in turn.")
      .def(
          "priority_range",
          [](const StreamManager& self, const py::object& device) {
            return as_pair(self.priority_range(device_argument(device)));
          },
          "device"_a = "cuda:0", "(lowest, highest) priority.");
}

}  // namespace

void bind_stream(py::module_& module) {
  bind_stream_class(module);
  bind_event_class(module);
  bind_graph_class(module);
  bind_manager_class(module);
}

}  // namespace xpuruntime::bindings
