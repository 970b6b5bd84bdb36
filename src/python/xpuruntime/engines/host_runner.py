# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Host runners: how a server runs a loaded model on arrays of the host, and in which memory it puts them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["HostRunner", "PinnedArrays", "PinnedRunner"]


class HostRunner:
    """Runs a model on host arrays. Safe to call from many threads."""

    #: What the memory of `empty` is.
    memory = "pageable"
    #: Whether all inputs should be put into memory of `empty`, also those that could be passed as they came.
    copies_all = False
    #: Whether batches should be padded to a few sizes, because every other one costs a capture.
    pads_rows = False
    #: Whether the device computes runs one after the other: a second one beside only has its inputs prepared.
    serial = False

    def __init__(
        self, run: Callable[[dict[str, Any]], Mapping[str, Any]], release_idle: Callable[[], None] | None = None
    ) -> None:
        self.run, self.release_idle = run, release_idle

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return an array of any content to put inputs into. Keep it until the run that takes it has returned."""
        return np.empty(shape, dtype)


class PinnedArrays:
    """NumPy arrays in pinned memory, from a pool that takes it back with the last reference to an array."""

    def __init__(self, device: str, name: str) -> None:
        from xpuruntime import _core

        self._pool = _core.MemoryPool(device, "pinned", name=name)
        self._given: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def tensor(self, shape: Sequence[int], dtype: str) -> Any:
        """Return a tensor of any content."""
        from xpuruntime import _core

        return _core.Tensor.empty(tuple(shape), dtype, "cpu", pool=self._pool)

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return an array of any content."""
        array: np.ndarray[Any, Any] = self.tensor(shape, np.dtype(dtype).name).numpy()
        if array.size:
            self._given[_address(array)] = array
        return array

    def staged(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a tensor with the content of a contiguous array: on its memory where that is pinned, else a copy."""
        from xpuruntime import _core

        given = self._given.get(_address(array))
        if given is not None and given.nbytes >= array.nbytes:
            return _core.Tensor.from_numpy(array)
        made = self.tensor(array.shape, array.dtype.name)
        np.copyto(made.numpy(), array)
        return made


class PinnedRunner(HostRunner):
    """Runs a model whose engine copies inputs to a CUDA device itself, from pinned memory."""

    memory = "pinned"
    copies_all = True

    def __init__(self, run: Callable[[dict[str, Any]], Mapping[str, Any]], device: str, name: str) -> None:
        super().__init__(run)
        self._arrays = PinnedArrays(device, name)

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return a pinned array; see `HostRunner.empty`."""
        return self._arrays.empty(shape, dtype)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
