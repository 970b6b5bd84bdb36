// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string_view>
#include <vector>

#include "xpuruntime/kernel.h"
#include "xpuruntime/op.h"

namespace xpuruntime {

/// Knows which kernels there are: operation → kernels, in the order in which `first_supported`
/// tries them, which is the order of registration. Thread-safe.
class KernelRegistry {
 public:
  using Definition = std::shared_ptr<const KernelDefinition>;

  /// With the built-in backends of this build when `builtin`, else empty.
  explicit KernelRegistry(bool builtin = true);
  /// The default runtime's.
  static KernelRegistry& instance();

  /// A definition keeps its backend alive. Throws InputError for an id that is not "backend.name"
  /// with the name of its backend, or when the operation has a kernel of this id already.
  void add(Definition definition);
  /// Adds all or none. Besides what `add` refuses: a backend whose name another backend here has,
  /// so that a word of a policy goes on meaning what it did.
  void add_all(std::vector<Definition> definitions);
  /// Takes out every kernel of a backend; work that was prepared stays valid. Returns how many.
  std::size_t remove(std::string_view backend);

  /// Of one operation, all device types together.
  std::vector<Definition> kernels(OpKind op) const;
  /// Of all operations.
  std::vector<Definition> kernels() const;
  /// Those that a word of a KernelPolicy means: an id, a family, or a backend. Empty for none.
  std::vector<Definition> find(OpKind op, std::string_view word) const;

  /// Grows with every change.
  std::uint64_t version() const noexcept { return version_.load(std::memory_order_acquire); }

 private:
  mutable std::shared_mutex mutex_;
  std::vector<Definition> kernels_;
  std::atomic<std::uint64_t> version_{1};
};

/// Adds the kernels of every backend of this build; the one list of them.
void register_builtin_backends(KernelRegistry& registry);

/// Why a backend of this library that `word` names (its name, or an id or family that begins with
/// it) is not in this build; empty where it is, and for other words.
std::string why_not_built(std::string_view word);

}  // namespace xpuruntime
