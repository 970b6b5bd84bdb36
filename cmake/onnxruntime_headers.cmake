# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Finds the C header of ONNX Runtime: where XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR says, where `make ort-headers` puts it, or
# on the system. Nothing is linked: the library that loads us hands its functions over, and serves every version of
# its interface up to its own. Sets XPURUNTIME_WITH_ONNXRUNTIME.

# What an earlier run found may be gone.
if(XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR AND NOT EXISTS "${XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR}/onnxruntime_c_api.h")
  unset(XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR CACHE)
endif()
find_path(XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR onnxruntime_c_api.h
  HINTS ${PROJECT_SOURCE_DIR}/build/onnxruntime-headers
  PATH_SUFFIXES onnxruntime onnxruntime/core/session)

set(XPURUNTIME_WITH_ONNXRUNTIME OFF)
if(XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR)
  file(STRINGS "${XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR}/onnxruntime_c_api.h" ort_version REGEX "^#define ORT_API_VERSION [0-9]+")
  string(REGEX MATCH "[0-9]+" ort_version "${ort_version}")
  if(ort_version GREATER_EQUAL 21)
    set(XPURUNTIME_WITH_ONNXRUNTIME ON)
  else()
    message(STATUS "xpuruntime: the headers of ONNX Runtime in ${XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR} are of API version "
      "${ort_version}; 21 or later is needed")
  endif()
endif()
message(STATUS "xpuruntime: operators for ONNX Runtime ${XPURUNTIME_WITH_ONNXRUNTIME} (${XPURUNTIME_ONNXRUNTIME_INCLUDE_DIR})")
