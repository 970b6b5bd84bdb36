# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for arrays of other libraries."""

from collections.abc import Sequence
from typing import Any

from xpuruntime._core import Stream

class ArrayView:
    """An array of any library, or a `Tensor`, seen by address and shape without a copy or a synchronisation.

    It keeps the array. For code that hands addresses to a library of its own and has to keep the order of streams.

    Parameters
    ----------
    array : DLPack array or Tensor
    name : str
        For messages.

    Raises
    ------
    InputError
        If it is no array that can be shared, or has more than 8 dimensions.
    UnsupportedOperationError
        If it is complex, or a tensor whose gradient would be lost.
    """

    def __init__(self, array: Any, name: str) -> None: ...
    @property
    def array(self) -> Any: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int:
        """Elements."""

    @property
    def itemsize(self) -> int:
        """Bytes."""

    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def is_contiguous(self) -> bool: ...
    @property
    def current_stream(self) -> int | None:
        """The ``cudaStream_t`` that its library works on now; ``None`` for a `Tensor`, and off CUDA."""

    def same_library(self, other: ArrayView) -> bool:
        """Return whether both are of one library whose current stream orders them."""

    def order_before(self, stream: Stream) -> None:
        """Let later work on `stream` see what was written before."""

    def order_after(self, stream: Stream, *, written: bool) -> None:
        """Say that work given to `stream` so far reads the array, or with `written` writes it."""

    def make_like(self, shape: Sequence[int], name: str, stream: Stream | None = None) -> Any:
        """Return a new contiguous array of the same library, dtype and device, for use in the order of `stream`."""

def copy_arrays(targets: list[Any], sources: list[Any]) -> None:
    """Copy arrays into others of as many bytes, one after another and without the GIL.

    Parameters
    ----------
    targets, sources : list of array
        Contiguous, and of the buffer protocol.

    Raises
    ------
    InputError
        A target has another size than its source, or there are more of one.
    ValueError
        One has no buffer, or none that can be written.
    """
