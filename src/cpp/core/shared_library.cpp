// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "xpuruntime/shared_library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <mutex>
#include <utility>

#include "xpuruntime/error.h"

namespace xpuruntime {
namespace {

struct Folders {
  std::mutex mutex;
  std::vector<std::string> list;
};

Folders& folders() {
  static Folders* const made = new Folders;
  return *made;
}

std::string last_error() {
  const char* const text = dlerror();  // NOLINT(concurrency-mt-unsafe): per thread in glibc
  return text == nullptr ? "no reason was given" : text;
}

std::string path_of(void* handle, const std::string& name) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr &&
      map->l_name != nullptr && *map->l_name != '\0') {
    return map->l_name;
  }
  return name;
}

std::string join(const std::vector<std::string>& words, std::string_view between) {
  std::string text;
  for (const std::string& word : words) text.append(text.empty() ? "" : between).append(word);
  return text;
}

}  // namespace

void SharedLibrary::set_search_folders(std::vector<std::string> given) {
  const std::lock_guard lock(folders().mutex);
  folders().list = std::move(given);
}

std::vector<std::string> SharedLibrary::search_folders() {
  const std::lock_guard lock(folders().mutex);
  return folders().list;
}

SharedLibrary SharedLibrary::open(const std::vector<std::string>& names, std::string_view fix) {
  SharedLibrary library;
  const auto take = [&library](void* handle, const std::string& name) {
    library.handle_ = handle;
    if (handle != nullptr) library.path_ = path_of(handle, name);
    return handle != nullptr;
  };
  for (const std::string& name : names) {
    if (take(dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD), name)) return library;
  }
  (void)dlerror();  // NOLINT(concurrency-mt-unsafe): that it is not loaded yet is no error
  std::vector<std::string> failures;
  const std::vector<std::string> searched = search_folders();
  for (const std::string& folder : searched) {
    for (const std::string& name : names) {
      std::string path = folder;
      path.append("/").append(name);
      if (access(path.c_str(), F_OK) != 0) continue;
      if (take(dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL), path)) return library;
      failures.push_back(last_error());
    }
  }
  for (const std::string& name : names) {
    if (take(dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL), name)) return library;
    failures.push_back(last_error());
  }
  throw UnsupportedOperationError(
      join(names, " or ") + " cannot be opened: it was looked for in " +
      (searched.empty() ? std::string() : join(searched, ", ") + " and ") +
      "the system's own folders (" + join(failures, "; ") + "); " + std::string(fix));
}

void* SharedLibrary::try_find(const char* function) const noexcept {
  if (handle_ == nullptr) return nullptr;
  void* const found = dlsym(handle_, function);
  if (found == nullptr) (void)dlerror();  // NOLINT(concurrency-mt-unsafe): per thread in glibc
  return found;
}

void* SharedLibrary::find(const char* function) const {
  void* const found = try_find(function);
  if (found != nullptr) return found;
  throw UnsupportedOperationError(std::string("the library ") +
                                  (path_.empty() ? "(none opened)" : path_) + " has no function '" +
                                  function +
                                  "': it is of another version than the one this was built for");
}

}  // namespace xpuruntime
