// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cpu/open_blas.h"

#include "xpuruntime/shared_library.h"

namespace xpuruntime::cpu {

const OpenBlas& OpenBlas::get() {
  static const OpenBlas blas = [] {
    const SharedLibrary library = SharedLibrary::open(
        {
#ifdef __APPLE__
            "libscipy_openblas.dylib"
#else
            "libscipy_openblas.so"
#endif
        },
        "pip install scipy-openblas32");
    OpenBlas found;
    found.sgemm = library.get<Sgemm>("scipy_cblas_sgemm");
    found.dgemm = library.get<Dgemm>("scipy_cblas_dgemm");
    const auto config = library.get<const char* (*)()>("scipy_openblas_get_config");
    const auto core = library.get<const char* (*)()>("scipy_openblas_get_corename");
    found.version = std::string(config()) + " on " + core();
    library.get<void (*)(int)>("scipy_openblas_set_num_threads")(1);
    return found;
  }();
  return blas;
}

}  // namespace xpuruntime::cpu
