// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <cuda_runtime_api.h>

#include <string_view>

#include "cudnn/library.h"

namespace cudnn_frontend {
/// What cudnn-frontend takes for the handle of libcudnn. Nothing looks into it.
void* cudnn_dlhandle = &cudnn_dlhandle;
}  // namespace cudnn_frontend

namespace xpuruntime::cudnn {
namespace {

struct RuntimeFunction {
  const char* name;
  void* address;
};

template <typename Function>
void* address_of(Function* function) noexcept {
  return reinterpret_cast<void*>(function);
}

void* find_runtime_function(std::string_view name) noexcept {
  static const RuntimeFunction functions[] = {
      {"cudaGetDevice", address_of(&cudaGetDevice)},
      {"cudaDeviceGetAttribute",
       address_of<cudaError_t(int*, cudaDeviceAttr, int)>(&cudaDeviceGetAttribute)},
      {"cudaRuntimeGetVersion", address_of(&cudaRuntimeGetVersion)},
      {"cudaGetErrorString", address_of(&cudaGetErrorString)},
      {"cudaGetLastError", address_of(&cudaGetLastError)},
      {"cudaMemcpyAsync", address_of(&cudaMemcpyAsync)},
      {"cudaMemsetAsync", address_of(&cudaMemsetAsync)},
      {"cudaStreamIsCapturing", address_of(&cudaStreamIsCapturing)},
      {"cudaThreadExchangeStreamCaptureMode", address_of(&cudaThreadExchangeStreamCaptureMode)},
#if CUDART_VERSION >= 13000
      {"cudaStreamGetCaptureInfo",
       address_of<cudaError_t(cudaStream_t, cudaStreamCaptureStatus*, unsigned long long*,
                              cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                              std::size_t*)>(&cudaStreamGetCaptureInfo)},
#else
      {"cudaStreamGetCaptureInfo_v2",
       address_of<cudaError_t(cudaStream_t, cudaStreamCaptureStatus*, unsigned long long*,
                              cudaGraph_t*, const cudaGraphNode_t**, std::size_t*)>(
           &cudaStreamGetCaptureInfo_v2)},
#endif
      {"cudaUserObjectCreate", address_of(&cudaUserObjectCreate)},
      {"cudaUserObjectRelease", address_of(&cudaUserObjectRelease)},
      {"cudaGraphRetainUserObject", address_of(&cudaGraphRetainUserObject)},
#if CUDART_VERSION >= 12080
      {"cudaGetDriverEntryPointByVersion",
       address_of<cudaError_t(const char*, void**, unsigned int, unsigned long long,
                              cudaDriverEntryPointQueryResult*)>(
           &cudaGetDriverEntryPointByVersion)},
#else
      {"cudaGetDriverEntryPoint",
       address_of<cudaError_t(const char*, void**, unsigned long long,
                              cudaDriverEntryPointQueryResult*)>(&cudaGetDriverEntryPoint)},
#endif
  };
  for (const RuntimeFunction& function : functions) {
    if (name == function.name) return function.address;
  }
  return nullptr;
}

// Stands for the CUDA runtime that is linked in.
char linked_runtime;

}  // namespace

void* open_for_frontend(const char* library, int flags) noexcept;
void* find_for_frontend(void* library, const char* function) noexcept;

// It tries the names of two versions, and complains when it finds both.
void* open_for_frontend(const char* library, int /*flags*/) noexcept {
  constexpr std::string_view kOther =
      CUDART_VERSION >= 13000 ? "libcudart.so.12" : "libcudart.so.13";
  const std::string_view name = library == nullptr ? "" : library;
  if (name == kOther || name.find("cudart") == std::string_view::npos) return nullptr;
  return &linked_runtime;
}

void* find_for_frontend(void* library, const char* function) noexcept {
  if (library == &linked_runtime) return find_runtime_function(function);
  if (library != cudnn_frontend::cudnn_dlhandle) return nullptr;
  try {
    return Library::get().try_find(function);
  } catch (...) {
    return nullptr;
  }
}

}  // namespace xpuruntime::cudnn
