// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

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

/// The number of a place among those of all names at all keys, or none.
template <std::size_t kNames, std::size_t kKeys>
std::optional<std::size_t> place_of(const std::array<std::string_view, kNames>& names,
                                    const std::array<std::string_view, kKeys>& keys,
                                    std::string_view name, std::string_view key) {
  for (std::size_t i = 0; i < kNames; ++i) {
    for (std::size_t j = 0; j < kKeys; ++j) {
      if (names[i] == name && keys[j] == key) return i * kKeys + j;
    }
  }
  return std::nullopt;
}

/// What removes functions, and then what is below them, when it is called; once.
pybind11::object removal(std::function<void()> remove, pybind11::object below);

}  // namespace xpuruntime::bindings
