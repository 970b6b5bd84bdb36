// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <cstddef>

// cudnn-frontend includes <nvrtc.h> for one engine that is not used here. These are the types that
// it names there, for machines whose CUDA toolkit comes without NVRTC. Nothing of NVRTC is called.
using nvrtcProgram = struct _nvrtcProgram*;
enum nvrtcResult { NVRTC_SUCCESS = 0, NVRTC_ERROR_INTERNAL_ERROR = 11 };
