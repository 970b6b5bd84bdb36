# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""List of the kernels that there are."""

from __future__ import annotations

from typing import Any

import msgspec

from xpuruntime import _core
from xpuruntime.argument_types import TEXT, check_types
from xpuruntime.ops.call_context import prepare

__all__ = ["KernelInfo", "kernels"]


class KernelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel that a policy can ask for.

    Attributes
    ----------
    id : str
        ``backend.name``.
    op : str
        Operation it computes; gradients are operations of their own.
    backend : str
    device_type : str
        ``"cpu"`` or ``"cuda"``.
    description, limits : str
        What it is good for; dtypes, shapes and devices it serves.
    families : tuple of str
        Bare words of a policy that mean it too, besides its backend.
    automatic : bool
        Whether ``"auto"`` may choose it.
    available : bool
        Whether its library can be loaded here, and there is a device of its type.
    reason : str
        Why not, and what to install; empty where it is available.
    version : str
        Of the library and of xpuruntime's code; tuned times hold for one version.
    """

    id: str
    op: str
    backend: str
    device_type: str
    description: str
    limits: str
    families: tuple[str, ...]
    automatic: bool
    available: bool
    reason: str
    version: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def kernels(op: str | None = None) -> tuple[KernelInfo, ...]:
    """Return the kernels of this process, plugins included, in the order in which ``first_supported`` tries them.

    Opens the libraries of the vendors, to say whether they can be loaded.

    Parameters
    ----------
    op : str, optional
        Only of this operation, such as ``"matmul"`` or ``"attention_backward"``.

    Raises
    ------
    InputError
        For an unknown operation; lists the known ones.
    """
    check_types({"op": TEXT}, {"op": op}, optional=["op"])
    prepare()
    found = tuple(msgspec.convert(one, KernelInfo) for one in _core.KernelRegistry.instance().kernels(op))
    missing = _core.DeviceManager.instance().cuda_reason()
    return tuple(_on_this_machine(one, missing) for one in found)


def _on_this_machine(kernel: KernelInfo, missing: str) -> KernelInfo:
    """Return a kernel of CUDA as not available where there is no CUDA device, and why: `missing`."""
    if kernel.device_type != "cuda" or not kernel.available or not missing:
        return kernel
    return msgspec.structs.replace(kernel, available=False, reason=f"there is no CUDA device: {missing}")
