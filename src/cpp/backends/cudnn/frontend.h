// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <dlfcn.h>

// The only place that includes cudnn-frontend. It is large: include this in few files.
//
// cudnn-frontend looks up every function that it calls by name, so that nothing is linked. Here its
// look-ups are answered by the functions below: those of cuDNN from the library that Library
// opened, those of the CUDA runtime from the one that is linked into this program (it would
// otherwise open whichever libcudart it finds), and no other library is opened.
namespace xpuruntime::cudnn {

void* open_for_frontend(const char* library, int flags) noexcept;
void* find_for_frontend(void* library, const char* function) noexcept;

}  // namespace xpuruntime::cudnn

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define NV_CUDNN_FRONTEND_DISABLE_LOGGING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define dlopen ::xpuruntime::cudnn::open_for_frontend
#define dlsym ::xpuruntime::cudnn::find_for_frontend
#include <cudnn_frontend.h>
#undef dlsym
#undef dlopen
