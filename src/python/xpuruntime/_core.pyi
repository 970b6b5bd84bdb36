# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Types and documentation of the C++ core. Users find these classes in `xpuruntime`."""

from typing import Any, TypeAlias

# Each describes a part of it.
from xpuruntime._core_stubs.array import *  # noqa: F403
from xpuruntime._core_stubs.device import *  # noqa: F403
from xpuruntime._core_stubs.interruption import *  # noqa: F403
from xpuruntime._core_stubs.kernels import *  # noqa: F403
from xpuruntime._core_stubs.memory import *  # noqa: F403
from xpuruntime._core_stubs.onnxruntime import *  # noqa: F403
from xpuruntime._core_stubs.ops import *  # noqa: F403
from xpuruntime._core_stubs.profiler import *  # noqa: F403
from xpuruntime._core_stubs.sockets import *  # noqa: F403
from xpuruntime._core_stubs.stream import *  # noqa: F403
from xpuruntime._core_stubs.tensor import *  # noqa: F403

#: A device name such as ``"cuda:0"``, a CUDA index, or any object whose ``str()`` is such a name.
DeviceLike: TypeAlias = object
#: A `Stream`, a stream of another library, or a ``cudaStream_t``.
StreamLike: TypeAlias = Any

__version__: str

def why_not_built(word: str) -> str:
    """Return why the backend that a kernel's name begins with is not in this build; empty where it is.

    Parameters
    ----------
    word : str
        A kernel id or family of a policy, such as ``"cublas.cublasLt"``.
    """

def build_info() -> dict[str, bool | str]:
    """Return what was built into this module.

    ``"cuda"``, ``"cublas"`` and ``"cudnn"`` say whether the CUDA core and the kernels of each library are in it,
    ``"cupti"`` whether the work of devices can be traced, ``"onnxruntime"`` whether the operators for ONNX Runtime are.
    ``"architectures"`` names the GPU architectures that device code was compiled for, as CMake does, and is empty
    without CUDA.
    """
