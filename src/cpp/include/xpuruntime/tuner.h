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
#include "xpuruntime/paired_comparison.h"
#include "xpuruntime/tuning_rule.h"

namespace xpuruntime {

class MemoryManager;

struct TunerOptions {
  /// Most memory for operands, unless a single set of them is larger: that may take up to half of
  /// what is free.
  std::size_t memory = std::size_t{1} << 30U;
  TuningRule rule;
  /// Rounds before the first look at the times, and the most.
  std::size_t first_look = 7, rounds = 61;
  TuningWatch watch = nullptr;
};

/// What became of one candidate.
struct TunerTime {
  std::optional<double> microseconds;  ///< of one launch, the median; nothing for a rejected one
  std::string reason;                  ///< why it was rejected, or dropped after two rounds
  /// With the first candidate that works; nothing for that one itself, and what left early.
  std::optional<PairedComparison> comparison;
};

struct TunerResult {
  std::vector<TunerTime> times;  ///< one for each candidate
  /// The first that works, or the one that is the fastest of those that are faster than it by the
  /// margin, with confidence. Nothing when all were rejected.
  std::optional<std::size_t> best;
  /// Of some candidate it is not known whether it is faster, and none is known to be.
  bool undecided = false;
  bool cancelled = false;         ///< by the watch
  std::size_t sets = 0;           ///< of operands, in turn
  std::size_t operand_bytes = 0;  ///< of all sets together
  std::size_t rounds = 0;         ///< that were run
};

/// Measures prepared kernels for one operation on operands of the described types, shapes, strides
/// and alignments, on a device of this machine.
///
/// Inputs hold random values. Several sets of operands are used in turn, more than twice the size
/// of the last cache together, so that every launch reads from memory, as it would between other
/// work. A round runs every candidate once, and the first that works, the control, twice. The order
/// is rotated from pair to pair of rounds and reversed in the second of each pair, as in the Python
/// package's measuring.rounds. What takes more than twice the time of the best in both of the first
/// two rounds is dropped, but for the control. After some rounds (`look_rounds`) each candidate is
/// compared with the control; no more rounds are run once it is decided of each whether it is
/// faster by the margin.
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
