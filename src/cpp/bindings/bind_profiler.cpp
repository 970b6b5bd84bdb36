// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <pybind11/stl.h>

#include <string>
#include <unordered_map>

#include "bind.h"
#include "gil.h"
#include "xpuruntime/profiler.h"

namespace py = pybind11;
using namespace py::literals;

namespace xpuruntime::bindings {
namespace {

// One Python string for each name, however many records have it.
class Names {
 public:
  py::str operator()(const SharedName& name) {
    const auto [found, fresh] = made_.try_emplace(name.get());
    if (fresh) found->second = name == nullptr ? py::str("") : py::str(*name);
    return found->second;
  }

 private:
  std::unordered_map<const std::string*, py::str> made_;
};

py::tuple to_tuple(const RangeRecord& range) {
  return py::make_tuple(range.id, range.parent, range.name, range.category, range.thread,
                        range.start_ns, range.end_ns, range.finished);
}

py::tuple to_tuple(const WorkRecord& work, Names& names) {
  return py::make_tuple(std::string(to_string(work.kind)), names(work.name), work.device,
                        work.stream, work.start_ns, work.end_ns, work.range, work.correlation,
                        work.graph, work.bytes, std::string(work.source),
                        std::string(work.destination));
}

py::tuple to_tuple(const CallRecord& call, Names& names) {
  return py::make_tuple(names(call.name), call.thread, call.start_ns, call.end_ns,
                        call.correlation);
}

py::dict stop() {
  Recording found;
  {
    const ReleaseGil unlocked;
    found = Profiler::instance().stop();
  }
  Names names;
  py::list ranges, work, calls;
  for (const RangeRecord& range : found.ranges) ranges.append(to_tuple(range));
  for (const WorkRecord& one : found.work) work.append(to_tuple(one, names));
  for (const CallRecord& call : found.calls) calls.append(to_tuple(call, names));
  return py::dict("source"_a = std::string(to_string(found.source)), "reason"_a = found.reason,
                  "start_ns"_a = found.start_ns, "end_ns"_a = found.end_ns, "ranges"_a = ranges,
                  "work"_a = work, "calls"_a = calls, "dropped"_a = found.dropped);
}

}  // namespace

void bind_profiler(py::module_& module) {
  module.attr("PROFILER_LIMIT") = Profiler::kDefaultLimit;
  module.def("profiler_active", &Profiler::active, "Whether a recording goes on.");
  module.def(
      "profiler_start",
      [](bool devices, std::size_t limit) { Profiler::instance().start(devices, limit); },
      "devices"_a, "limit"_a = Profiler::kDefaultLimit, py::call_guard<ReleaseGil>(),
      "Start a recording.");
  module.def("profiler_stop", &stop, "End the recording and return it.");
  module.def(
      "profiler_begin",
      [](std::string_view name, std::string_view category) {
        return Profiler::active() ? Profiler::instance().begin(name, category) : 0;
      },
      "name"_a, "category"_a, "Begin a range on this thread; its id, or 0.");
  module.def(
      "profiler_end", [](std::uint64_t id) { Profiler::instance().end(id); }, "range"_a,
      "End a range.");
}

}  // namespace xpuruntime::bindings
