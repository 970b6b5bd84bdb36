// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace xpuruntime {

/// A vendor's library, opened while the program runs, so that nothing is needed where it is not
/// used. Never closed: other parts of the process may hold its functions.
///
/// Thread-safe.
class SharedLibrary {
 public:
  /// None: `try_find` and `find` on it find nothing. Take one from `open`.
  SharedLibrary() noexcept = default;

  /// Folders that `open` searches, in order, after what the process has loaded already and before
  /// the system's own. Set by the Python side, which knows where wheels put libraries.
  static void set_search_folders(std::vector<std::string> folders);
  static std::vector<std::string> search_folders();

  /// Opens the first of `names` ("libcublasLt.so.13", ...) that can be: one that is loaded already
  /// is taken as it is. Functions are bound when they are first called, and stay private to it.
  /// Throws UnsupportedOperationError naming the library, every place searched, and `fix`, what to
  /// install.
  static SharedLibrary open(const std::vector<std::string>& names, std::string_view fix);

  /// Throws UnsupportedOperationError naming the function and the library's path.
  void* find(const char* function) const;
  /// Null when there is none.
  void* try_find(const char* function) const noexcept;
  template <typename Function>
  Function get(const char* function) const {
    return reinterpret_cast<Function>(find(function));
  }
  const std::string& path() const noexcept { return path_; }

 private:
  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace xpuruntime
