// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

// The boundary between `xpuruntime._core`, which knows nothing of PyTorch's C++, and the addon,
// which is built with the headers of one PyTorch. Plain functions in two tables, each in a capsule;
// no type of C++ and no exception crosses it. Both sides compare the version and refuse another
// one.

namespace xpuruntime::torch_abi {

constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kBackends = 5;  ///< of scaled dot product attention, by PyTorch's numbers

constexpr const char* kCoreCapsule = "xpuruntime.torch_guards";
constexpr const char* kAddonCapsule = "xpuruntime.torch_addon";

/// What may be done with a call before Python has looked at it; see guard_state.h.
enum Verdict : int { kError = -1, kAsk = 0, kNative = 1, kQuick = 2, kAlways = 3 };

/// What `_core` knows of calls, for the kernels of the addon.
struct GuardFunctions {
  std::uint32_t version;
  std::uint32_t size;

  // Without the GIL, too.
  std::uint64_t (*next_guard)();
  std::uint64_t (*first_fact)(std::uint64_t guard);
  /// Whether PyTorch's kernel is known to serve a call; `request`: what it wants of the SDP
  /// backends.
  bool (*find_native)(const std::uint64_t* facts, std::size_t count, std::uint64_t* request);
  std::uint64_t (*state_number)();
  void (*begin_scope)(std::uint64_t request);
  void (*end_scope)();

  // With the GIL.
  /// The place of the kernel of xpuruntime that is known to serve a call, borrowed; or null.
  PyObject* (*find_quick)(const std::uint64_t* facts, std::size_t count);
  /// kError with an error of Python's set. `place`: a new reference where it is kQuick. `phase` and
  /// `request` as in guard_state.h.
  Verdict (*judge)(PyObject* name, PyObject* const* arrays, std::size_t count, PyObject* out,
                   const char* phase, PyObject** place, std::uint64_t* request);
  void (*keep_native)(const std::uint64_t* facts, std::size_t count, std::uint64_t number,
                      std::uint64_t request);
  void (*keep_quick)(const std::uint64_t* facts, std::size_t count, PyObject* place,
                     std::uint64_t number);
  /// The phase of the call that runs, as text or None; borrowed.
  PyObject* (*phase)();
};

/// What PyTorch knows, for `_core`.
struct AddonFunctions {
  std::uint32_t version;
  std::uint32_t size;

  // Without the GIL, too.
  bool (*records_gradients)();
  std::int64_t (*running_backward)();  ///< its number, or -1
  std::uint64_t (*next_node)();        ///< the sequence number of the next node of autograd
  std::uint64_t (*this_thread)();      ///< as nodes have it
  /// Sequence number and thread of the node that runs in this thread; false where none does.
  bool (*running_node)(std::uint64_t* number, std::uint64_t* thread);
  void (*read_backends)(bool* enabled);
  void (*write_backend)(std::size_t backend, bool enabled);

  // With the GIL.
  /// A new tensor on the device of another one, and where its memory is; null with an error set.
  PyObject* (*empty_like)(PyObject* like, std::size_t rank, const std::int64_t* sizes,
                          const std::int64_t* strides, std::uint8_t dlpack_code,
                          std::uint8_t dlpack_bits, void** data);
};

}  // namespace xpuruntime::torch_abi
