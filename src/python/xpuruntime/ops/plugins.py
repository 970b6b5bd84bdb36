# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of third parties: Python objects and shared libraries, by the entry point group ``xpuruntime.kernels``."""

from __future__ import annotations

import os
import warnings
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.errors import InputError, XpuRuntimeWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["GROUP", "KernelBackend", "PythonKernel", "include_folder", "load_library", "load_plugins", "register"]

#: Entry points of this group name a function without arguments that registers kernels by `register` or `load_library`.
GROUP = "xpuruntime.kernels"


class KernelBackend:
    """Where kernels written in Python come from: one library, on one type of device.

    Parameters
    ----------
    name : str
        The word before the dot of its kernel ids.
    device_type : {"cpu", "cuda"}
    version : str
        Of what decides how fast and how exact its kernels are. Measured times hold for one version.

    Notes
    -----
    Override `available` where the library may be missing: return ``(False, "why, and what to install")``.
    """

    def __init__(self, name: str, device_type: str, version: str) -> None:
        self.name = name
        self.device_type = device_type
        self._version = version

    def available(self) -> tuple[bool, str]:
        """Say whether it can be used here, and if not why. Never raises."""
        return True, ""

    def version(self) -> str:
        """Return its version."""
        return self._version


class PythonKernel:
    """One kernel written in Python, for one operation. Subclass it.

    Attributes
    ----------
    id : str
        ``backend.name``.
    op : str
        The operation, such as ``"matmul"``, ``"layer_norm"`` or ``"attention_backward"``.
    description, limits : str
        One line each: what it is good for; dtypes, shapes and devices it serves.
    families : tuple of str
        Bare words of a policy that mean it too, besides its backend.
    automatic : bool
        Whether ``"auto"`` may choose it.

    Notes
    -----
    The methods are called with the GIL, from whatever thread calls the operation.
    """

    id: str
    op: str
    description: str
    limits: str
    families: tuple[str, ...] = ()
    automatic: bool = True

    def supports(self, op: Mapping[str, Any]) -> tuple[bool, str]:
        """Say whether it can do exactly this, and if not why. Touches no device.

        `op` has ``operands`` (name to ``dtype``, ``shape``, ``strides``, ``alignment``), ``attributes``, ``device``,
        ``phase``, and on CUDA ``compute_capability``.
        """
        raise NotImplementedError

    def prepare(self, op: Mapping[str, Any], config: str) -> Callable[[Mapping[str, _core.Tensor], int], None]:
        """Return the function that does it; slow.

        It is called with operand name to `Tensor`, and with the CUDA stream's handle (0 on the CPU). The tensors are
        views that are valid during the call only. It writes the outputs in the order of that stream, and neither
        allocates them nor waits. An attribute ``repeatable = False`` of the function says that its bits differ between
        runs.
        """
        raise NotImplementedError


def register(backend: KernelBackend, *kernels: PythonKernel) -> None:
    """Register kernels written in Python.

    Raises
    ------
    InputError
        For an id that is taken, or not of this backend, or a kernel that lacks something.
    """
    for kernel in kernels:
        _core.register_python_kernel(backend, kernel)


def load_library(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Register the kernels of a shared library that is written against ``xpuruntime/kernel_plugin.h``.

    Returns
    -------
    tuple of str
        Their ids.

    Raises
    ------
    InputError
        When it cannot be opened, is no such library, is of another version, or brings an id that is taken.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise InputError(f"the kernel library {file} does not exist")
    return tuple(_core.register_plugin_library(os.fspath(file)))


def include_folder() -> str:
    """Return the folder to compile kernel libraries with: it has ``xpuruntime/kernel_plugin.h``."""
    return os.fspath(Path(__file__).resolve().parent.parent / "include")


def load_plugins() -> None:
    """Load what installed packages name under the entry point group ``xpuruntime.kernels``; once a process.

    A plugin that fails is left out, with one `XpuRuntimeWarning` that names it and the reason.
    """
    for point in metadata.entry_points(group=GROUP):
        try:
            point.load()()
        except Exception as error:
            package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
            warnings.warn(
                f"the kernel plugin {point.name!r}{package} is left out, because it failed to load:"
                f" {type(error).__name__}: {error}",
                XpuRuntimeWarning,
                stacklevel=2,
            )
