// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "xpuruntime/device_manager.h"
#include "xpuruntime/kernel.h"
#include "xpuruntime/op.h"

namespace xpuruntime {

class MemoryManager;

struct TunerOptions {
  /// Most memory for operands, unless a single set of them is larger: that may take up to half of
  /// what is free.
  std::size_t memory = std::size_t{1} << 30U;
  /// Rounds after the first, in which every candidate that is left runs once.
  int rounds = 9;
  /// No round is begun after this time.
  double seconds = 3.0;
};

/// What became of one candidate.
struct TunerTime {
  std::optional<double> microseconds;  ///< of one launch, the median; nothing for a rejected one
  std::string reason;                  ///< why it was rejected, or dropped after two rounds
};

struct TunerResult {
  std::vector<TunerTime> times;  ///< one for each candidate
  /// The fastest; of those within 1 % of it, the first. Nothing when all were rejected.
  std::optional<std::size_t> best;
  std::size_t sets = 0;           ///< of operands, in turn
  std::size_t operand_bytes = 0;  ///< of all sets together
  int rounds = 0;                 ///< that were run
};

/// Measures prepared kernels for one operation on operands of the described types, shapes, strides
/// and alignments, on a device of this machine.
///
/// Inputs hold random values. Several sets of operands are used in turn, more than twice the size
/// of the last cache together, so that every launch reads from memory, as it would between other
/// work. A round runs every candidate once, in an order that changes from round to round in the
/// same way every time; what takes more than twice the time of the best in both of the first two
/// rounds is dropped, and no more rounds are run once every time of the best is below those of all
/// others.
///
/// On CUDA a candidate's launches are captured into a graph, which runs between two events on a
/// stream of the tuner's own: what the host costs does not count. What this thread captures on
/// other streams is disturbed unless its capture mode is relaxed. On the CPU the launches run in
/// the calling thread.
///
/// One measurement at a time in a process; others wait, except for those that a candidate itself
/// asks for, by calling an operation in its first launch. Holds memory of the device's default pool
/// while it runs. A candidate that fails is rejected with its reason. Errors: OutOfMemoryError when
/// there is no room for one set of operands; CudaError when the device fails outside of a
/// candidate.
class Tuner {
 public:
  Tuner(DeviceManager& devices, MemoryManager& memory) : devices_(devices), memory_(memory) {}

  TunerResult measure(const OpDesc& op, std::span<const std::shared_ptr<const Kernel>> candidates,
                      const TunerOptions& options = {});

 private:
  DeviceManager& devices_;
  MemoryManager& memory_;
};

}  // namespace xpuruntime
