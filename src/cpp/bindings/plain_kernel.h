// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <functional>
#include <string>

#include "torch_dispatcher.h"

namespace xpuruntime::bindings {

/// The native kernel under functions of ours that PyTorch calls as it calls its own, and what under
/// it takes values of PyTorch's interpreter. One for each place, and never dropped, since a thread
/// may still be inside a function that has been taken away.
class NativeKernel {
 public:
  /// `Arguments` as PyTorch's function takes them, references as references.
  template <typename Result, typename... Arguments>
  Result run(TorchKeys keys, Arguments... arguments) const {
    using Function = Result (*)(void*, TorchKeys, Arguments...);
    return reinterpret_cast<Function>(plain_.load(std::memory_order_relaxed))(
        functor_.load(std::memory_order_relaxed), keys, arguments...);
  }
  void run_boxed(const void* op, TorchKeys keys, void* stack) const {
    using Function = void (*)(void*, const void*, TorchKeys, void*);
    reinterpret_cast<Function>(boxed_.load())(boxed_functor_.load(), op, keys, stack);
  }

  /// Puts `over` over what stands in an operator's place now, which `below` takes away. Returns
  /// what removes both. With the GIL. Throws std::runtime_error in PyTorch's words, with nothing in
  /// place.
  pybind11::object place(const std::string& name, const std::string& key,
                         const TorchFunctions& native, const TorchFunctions& over,
                         const pybind11::object& below);

 private:
  std::atomic<void*> functor_{nullptr};
  std::atomic<void*> plain_{nullptr};
  std::atomic<void*> boxed_functor_{nullptr};
  std::atomic<void*> boxed_{nullptr};
};

/// What removes functions, and then what is below them, when it is called; once.
pybind11::object removal(std::function<void()> remove, pybind11::object below);

}  // namespace xpuruntime::bindings
