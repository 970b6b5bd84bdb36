# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Native` and `Override`: a kernel of PyTorch's dispatcher, and what stands in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TRACING", "Native", "Override", "native_kernel"]

#: In place of a dispatch key: the function stands in for an operator only while `torch.compile` traces.
TRACING = "Tracing"

#: An alias of many dispatch keys has no kernel of its own; that of this one is the same.
_ALIASES = {"CompositeImplicitAutograd": "CPU"}


def native_kernel(name: str, key: str) -> Any:
    """Return the kernel that is registered now for an operator without namespace. Raises `RuntimeError` if none is."""
    return torch.library.get_kernel(f"aten::{name}", _ALIASES.get(key, key))


class Native:
    """The kernel that an operator had at a dispatch key when ours was put over it.

    Called with the keyset of the dispatcher, then the operator's own arguments.

    Parameters
    ----------
    name : str
        Operator and overload without namespace, such as ``"mm.out"``.
    key : str
        Dispatch key, such as ``"CUDA"``.

    Notes
    -----
    It may be another library's override. When that is taken away, PyTorch makes the handle invalid; `refresh` is
    called then, which takes what is below ours now.
    """

    __slots__ = ("call", "direct", "key", "name", "refresh")

    def __init__(self, name: str, key: str, refresh: Callable[[Native], None]) -> None:
        self.name = name
        self.key = key
        self.refresh = refresh
        #: Whether what stands in its place is called without a keyset.
        self.direct = False
        #: The bare kernel. What calls it hands an error to `again`.
        self.call: Any = None
        self.take()

    def take(self) -> None:
        """Take the kernel that is registered now. Ours may not be."""
        self.call = native_kernel(self.name, self.key).call_boxed

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        try:
            return self.call(keyset, *args, **kwargs)
        except RuntimeError as error:
            return self.again(error, keyset, *args, **kwargs)

    def again(self, error: RuntimeError, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what is below ours now, where `error` of a call says that what was there is gone. Else raise it."""
        if "has been invalidated" not in str(error):
            raise error
        self.refresh(self)
        return self.call(keyset, *args, **kwargs)


class Override(NamedTuple):
    """One kernel of ours over one of PyTorch's.

    Attributes
    ----------
    name : str
        Operator and overload without namespace: ``"mm"``, ``"mm.out"``.
    op : str
        Operation of a `KernelPolicy` that decides it.
    keys : tuple of str
        Dispatch keys: ``("CPU", "CUDA")`` for kernels below autograd, ``("CompositeImplicitAutograd",)`` above it;
        ``(TRACING,)`` for code that is being compiled alone.
    make : callable
        From the native kernel to ours. Ours is called with the keyset, then the operator's arguments; at `TRACING`, it
        and the native one are called without the keyset.
    """

    name: str
    op: str
    keys: tuple[str, ...]
    make: Callable[[Any], Any]
