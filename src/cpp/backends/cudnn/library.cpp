// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cudnn/library.h"

#include "xpuruntime/error.h"

namespace xpuruntime::cudnn {
namespace {

constexpr std::size_t kOldest = 90000;
constexpr const char* kFix =
    "install the package nvidia-cudnn-cu13 (part of the extra xpuruntime[cuda])";

std::string dotted(std::size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

const Library& Library::get() {
  static const Library library;
  return library;
}

Library::Library() : library_(SharedLibrary::open({"libcudnn.so.9"}, kFix)) {
  version_ = library_.get<std::size_t (*)()>("cudnnGetVersion")();
  if (version_ < kOldest) {
    throw UnsupportedOperationError(library_.path() + " is cuDNN " + dotted(version_) +
                                    ", and 9.0 or newer is needed: " + kFix);
  }
  create_ = library_.get<int (*)(Handle*)>("cudnnCreate");
  set_stream_ = library_.get<int (*)(Handle, void*)>("cudnnSetStream");
  error_string_ = library_.get<const char* (*)(int)>("cudnnGetErrorString");
}

std::string Library::name() const { return "cuDNN " + dotted(version_); }

void Library::check(int status, const char* call, int device) const {
  if (status == 0) return;
  const std::string on = "cuda:" + std::to_string(device);
  throw CudaError(std::string(call) + " failed on " + on + ": " + error_string_(status) + " (" +
                      name() + ", " + path() + ")",
                  on, status);
}

Handle Library::create_handle(int device) const {
  Handle handle = nullptr;
  check(create_(&handle), "cudnnCreate", device);
  return handle;
}

void Library::set_stream(Handle handle, void* stream, int device) const {
  check(set_stream_(handle, stream), "cudnnSetStream", device);
}

}  // namespace xpuruntime::cudnn
