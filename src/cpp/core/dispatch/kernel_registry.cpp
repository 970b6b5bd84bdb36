// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/kernel_registry.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <string>
#include <utility>

#include "xpuruntime/error.h"
#include "xpuruntime/runtime.h"

namespace xpuruntime {
namespace {

bool is_word(std::string_view text) {
  const auto letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  return !text.empty() && letter(text.front()) &&
         std::all_of(text.begin(), text.end(),
                     [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
}

void check_id(std::string_view id, std::string_view backend) {
  const std::size_t dot = id.find('.');
  if (dot != std::string_view::npos && is_word(id.substr(0, dot)) && is_word(id.substr(dot + 1)) &&
      id.substr(0, dot) == backend) {
    return;
  }
  throw InputError("kernel id '" + std::string(id) + "' of backend '" + std::string(backend) +
                   "' is not one: an id is 'backend.name', two words of letters, digits and '_' of "
                   "which the first is the name of the backend");
}

void check(const KernelRegistry::Definition& definition) {
  if (definition == nullptr) throw InputError("there is no kernel to register: it is null");
  check_id(definition->id(), definition->backend().name());
}

void refuse_same(const KernelDefinition& known, const KernelDefinition& added) {
  if (known.op() != added.op() || known.id() != added.id()) return;
  throw InputError("kernel '" + std::string(added.id()) + "' is registered already for " +
                   std::string(to_string(added.op())) +
                   ": give it another id, or remove its backend first");
}

void refuse_other_backend(const KernelDefinition& known, const KernelDefinition& added) {
  if (&known.backend() == &added.backend() || known.backend().name() != added.backend().name()) {
    return;
  }
  throw InputError("kernel '" + std::string(added.id()) + "' is of a backend that is not the '" +
                   std::string(known.backend().name()) + "' of " + std::string(known.id()) +
                   ": give its backend a name of its own");
}

bool is_meant(const KernelDefinition& kernel, std::string_view word) {
  if (kernel.id() == word || kernel.backend().name() == word) return true;
  const std::vector<std::string> families = kernel.families();
  return std::find(families.begin(), families.end(), word) != families.end();
}

}  // namespace

KernelRegistry::KernelRegistry(bool builtin) {
  if (builtin) register_builtin_backends(*this);
}

KernelRegistry& KernelRegistry::instance() { return Runtime::instance().kernels(); }

void KernelRegistry::add(Definition definition) {
  check(definition);
  const std::unique_lock lock(mutex_);
  for (const Definition& other : kernels_) refuse_same(*other, *definition);
  kernels_.push_back(std::move(definition));
  version_.fetch_add(1, std::memory_order_release);
}

void KernelRegistry::add_all(std::vector<Definition> definitions) {
  for (auto one = definitions.begin(); one != definitions.end(); ++one) {
    check(*one);
    std::for_each(definitions.begin(), one,
                  [&](const Definition& other) { refuse_same(*other, **one); });
  }
  const std::unique_lock lock(mutex_);
  for (const Definition& one : definitions) {
    for (const Definition& other : kernels_) refuse_same(*other, *one);
    for (const Definition& other : kernels_) refuse_other_backend(*other, *one);
  }
  kernels_.reserve(kernels_.size() + definitions.size());
  std::move(definitions.begin(), definitions.end(), std::back_inserter(kernels_));
  version_.fetch_add(1, std::memory_order_release);
}

std::size_t KernelRegistry::remove(std::string_view backend) {
  std::vector<Definition> removed;  // destroyed without the lock: a definition may be anybody's
  {
    const std::unique_lock lock(mutex_);
    const auto first = std::stable_partition(
        kernels_.begin(), kernels_.end(),
        [&](const Definition& kernel) { return kernel->backend().name() != backend; });
    removed.assign(std::make_move_iterator(first), std::make_move_iterator(kernels_.end()));
    kernels_.erase(first, kernels_.end());
    if (!removed.empty()) version_.fetch_add(1, std::memory_order_release);
  }
  return removed.size();
}

std::vector<KernelRegistry::Definition> KernelRegistry::kernels(OpKind op) const {
  std::vector<Definition> found;
  const std::shared_lock lock(mutex_);
  for (const Definition& kernel : kernels_) {
    if (kernel->op() == op) found.push_back(kernel);
  }
  return found;
}

std::vector<KernelRegistry::Definition> KernelRegistry::kernels() const {
  const std::shared_lock lock(mutex_);
  return kernels_;
}

std::vector<KernelRegistry::Definition> KernelRegistry::find(OpKind op,
                                                             std::string_view word) const {
  std::vector<Definition> found = kernels(op);
  std::erase_if(found, [&](const Definition& kernel) { return !is_meant(*kernel, word); });
  return found;
}

}  // namespace xpuruntime
