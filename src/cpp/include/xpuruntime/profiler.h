// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "xpuruntime/stream.h"
#include "xpuruntime/types.h"

namespace xpuruntime {

/// What a device did, or what the host did with one.
enum class WorkKind : std::uint8_t {
  kKernel,
  kCopy,        ///< between host and device, or inside one; bytes, and from where to where
  kFill,        ///< a memset
  kWait,        ///< the host, or a stream, waits for a device
  kAllocation,  ///< of device memory, by the driver; bytes
  kRelease,
};
std::string_view to_string(WorkKind kind) noexcept;

/// A named piece of the host's time. Times here and below are nanoseconds since the epoch.
struct RangeRecord {
  std::uint64_t id = 0;
  std::uint64_t parent = 0;  ///< the range of the same thread around it; 0: none
  std::string name;
  std::string category;
  std::int64_t thread = 0;  ///< as the system numbers threads
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  bool finished = true;  ///< false: it went on when the profile ended
};

/// A name that many records share.
using SharedName = std::shared_ptr<const std::string>;

/// One piece of work of a device.
struct WorkRecord {
  WorkKind kind = WorkKind::kKernel;
  SharedName name;  ///< a kernel's, demangled; else what was done, such as "copy"
  int device = 0;
  std::uint32_t stream = 0;  ///< as the recorder numbers streams
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::uint64_t range = 0;        ///< the innermost range that it was started in; 0: none
  std::uint32_t correlation = 0;  ///< of the call of the host that started it; 0: not known
  std::uint32_t graph = 0;        ///< the CUDA graph that it is a node of; 0: none
  std::uint64_t bytes = 0;
  /// Of a copy: "host (pageable)", "host (pinned)", "device", ... What a fill or an allocation is
  /// of is its destination. Static text.
  std::string_view source, destination;
};

/// A call of CUDA's by which the host gave work to a device, or waited for it.
struct CallRecord {
  SharedName name;
  std::int64_t thread = 0;
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::uint32_t correlation = 0;
};

/// Where the records of devices come from.
enum class WorkSource : std::uint8_t {
  kNone,    ///< ranges only
  kCupti,   ///< NVIDIA's tracing interface: everything that any library starts
  kEvents,  ///< CUDA events around the kernels that this library dispatches, and nothing else
};
std::string_view to_string(WorkSource source) noexcept;

/// What was recorded.
struct Recording {
  WorkSource source = WorkSource::kNone;
  std::string
      reason;  ///< why it is not kCupti; empty where it is, or where devices were not asked for
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  std::vector<RangeRecord> ranges;  ///< in the order in which they began
  std::vector<WorkRecord> work;     ///< in the order in which it began
  std::vector<CallRecord> calls;
  std::uint64_t dropped = 0;  ///< records beyond the limit, which are lost
};

/// Records ranges of the host, and the work of CUDA devices. One recording at a time in a process.
/// Thread-safe. Ranges are shown by tools of NVIDIA's too (NVTX) while a recording goes on.
class Profiler {
 public:
  /// Ranges, and pieces of work, and calls: of each, this many are kept at most.
  static constexpr std::size_t kDefaultLimit = 1'000'000;

  static Profiler& instance();

  /// Whether a recording goes on: one load, for code that is asked often.
  static bool active() noexcept { return active_.load(std::memory_order_relaxed); }

  /// Starts a recording. With `devices` the work of CUDA devices is recorded by CUPTI or, where
  /// that cannot be had (another tool has it, its library or a right is missing), by events.
  /// Without a device there is nothing to record, and ranges alone are. Throws InputError when a
  /// recording goes on already.
  void start(bool devices, std::size_t limit = kDefaultLimit);
  /// Waits for the devices, ends the recording and hands it over. Throws InputError when none goes
  /// on; CudaError when a device failed: the recording has ended then, too.
  Recording stop();

  /// Begins a range on the calling thread and returns its id; 0 when no recording goes on or the
  /// limit is reached.
  std::uint64_t begin(std::string_view name, std::string_view category);
  /// The same for work that is given to `stream` of a device until its end. Where devices are timed
  /// by events, two are recorded around it, unless the stream is being captured.
  std::uint64_t begin(std::string_view name, std::string_view category, DeviceId device,
                      StreamHandle stream);
  /// Ends it; on the thread that began it. Nothing happens for 0, or after the recording.
  void end(std::uint64_t id) noexcept;

 private:
  Profiler();
  ~Profiler();
  struct State;
  static std::atomic<bool> active_;
  std::unique_ptr<State> state_;
};

/// A range for as long as this lives. Costs one load where no recording goes on.
class ProfiledRange {
 public:
  template <typename Name>
  ProfiledRange(Name&& name, std::string_view category, DeviceId device, StreamHandle stream) {
    if (Profiler::active()) [[unlikely]] {
      id_ = Profiler::instance().begin(name(), category, device, stream);
    }
  }
  ~ProfiledRange() {
    if (id_ != 0) [[unlikely]] {
      Profiler::instance().end(id_);
    }
  }
  ProfiledRange(const ProfiledRange&) = delete;
  ProfiledRange& operator=(const ProfiledRange&) = delete;

 private:
  std::uint64_t id_ = 0;
};

}  // namespace xpuruntime
