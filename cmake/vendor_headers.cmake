# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Finds the headers of cuBLAS, cuDNN, cudnn-frontend, CUPTI and NVTX: in the CUDA toolkit, on the system, or in the wheels
# nvidia-cublas, nvidia-cudnn-cu13, nvidia-cudnn-frontend, nvidia-cuda-cupti and nvidia-nvtx of the Python that builds.
# Only headers: the libraries are opened while the program runs. What has no headers here is left out, and `xrt doctor`
# says so. Sets XPURUNTIME_WITH_CUBLAS, XPURUNTIME_WITH_CUDNN and XPURUNTIME_WITH_CUPTI.

set(wheel_includes "")
find_package(Python 3.11 QUIET COMPONENTS Interpreter)
if(Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import glob, sys, sysconfig
paths = dict.fromkeys([p for p in sys.path if p] + [sysconfig.get_path('purelib'), sysconfig.get_path('platlib')])
folders = [f for p in paths for f in sorted(glob.glob(glob.escape(p) + '/nvidia/*/include')) + [p + '/include']]
print(';'.join([sys.prefix + '/include'] + folders))"
    OUTPUT_VARIABLE wheel_includes OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
# What an earlier run found may be gone, with the environment that it lay in.
foreach(name CUBLAS CUDNN CUDNN_FRONTEND CUPTI NVTX)
  if(XPURUNTIME_${name}_INCLUDE_DIR AND NOT EXISTS "${XPURUNTIME_${name}_INCLUDE_DIR}")
    unset(XPURUNTIME_${name}_INCLUDE_DIR CACHE)
  endif()
endforeach()
find_path(XPURUNTIME_CUBLAS_INCLUDE_DIR cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${wheel_includes})
find_path(XPURUNTIME_CUDNN_INCLUDE_DIR cudnn_graph.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${wheel_includes})
find_path(XPURUNTIME_CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${wheel_includes})
find_path(XPURUNTIME_CUPTI_INCLUDE_DIR cupti.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} ${CUDAToolkit_LIBRARY_ROOT}/extras/CUPTI/include PATHS ${wheel_includes})
find_path(XPURUNTIME_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${wheel_includes})

set(XPURUNTIME_WITH_CUPTI OFF)
if(XPURUNTIME_CUPTI_INCLUDE_DIR AND XPURUNTIME_NVTX_INCLUDE_DIR)
  set(XPURUNTIME_WITH_CUPTI ON)
endif()
set(XPURUNTIME_WITH_CUBLAS OFF)
if(XPURUNTIME_CUBLAS_INCLUDE_DIR)
  set(XPURUNTIME_WITH_CUBLAS ON)
endif()
set(XPURUNTIME_WITH_CUDNN OFF)
if(XPURUNTIME_CUDNN_INCLUDE_DIR AND XPURUNTIME_CUDNN_FRONTEND_INCLUDE_DIR)
  set(XPURUNTIME_WITH_CUDNN ON)
endif()
message(STATUS "xpuruntime: cuBLAS ${XPURUNTIME_WITH_CUBLAS} (${XPURUNTIME_CUBLAS_INCLUDE_DIR}), "
  "cuDNN ${XPURUNTIME_WITH_CUDNN} (${XPURUNTIME_CUDNN_INCLUDE_DIR}, ${XPURUNTIME_CUDNN_FRONTEND_INCLUDE_DIR}), "
  "CUPTI ${XPURUNTIME_WITH_CUPTI} (${XPURUNTIME_CUPTI_INCLUDE_DIR})")
