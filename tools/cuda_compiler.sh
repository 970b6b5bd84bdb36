#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# A CUDA compiler and the headers of CUDA's libraries, from the packages of PyPI: for build machines without the toolkit.
#
#     tools/cuda_compiler.sh FOLDER [PYTHON]      then build with CUDACXX=FOLDER/nvidia/cu13/bin/nvcc and
#                                               CMAKE_INCLUDE_PATH=FOLDER/nvidia/cudnn/include:FOLDER/include
set -euo pipefail
folder=${1:?usage: tools/cuda_compiler.sh FOLDER [PYTHON]} python=${2:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --upgrade "pip>=25.1"
(cd "$root" && "$folder/venv/bin/python" -m pip install --quiet --no-deps --target "$folder" --group cuda-compiler --group cuda-headers)
toolkit=$folder/nvidia/cu13
# nvcc looks for its libraries in lib64, and the linker for a name without a version.
ln -sfn lib "$toolkit/lib64"
ln -sfn libcudart.so.13 "$toolkit/lib/libcudart.so"
"$toolkit/bin/nvcc" --version | tail -n 2
