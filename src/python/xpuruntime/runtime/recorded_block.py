# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RecordedBlock`: base of context managers that record a ``with`` block, and end the recording on any exception."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from xpuruntime import _core
from xpuruntime.errors import InputError, XpuRuntimeWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BlockWatch", "RecordedBlock", "warn_beside"]


class BlockWatch(Protocol):
    """What watches a block: hooks, a profiler, or both."""

    def start(self) -> None:
        """Begin."""
        ...

    def abandon(self) -> None:
        """End at any point, also when nothing was begun, and keep nothing."""
        ...


W = TypeVar("W", bound=BlockWatch)


class RecordedBlock(Generic[W]):
    """What ``explain`` and both ``profile`` share.

    A class derived from it has ``__enter__ = _core.guarded(_enter, _abandon, _check)`` and
    ``__exit__ = _core.guarded(_exit, _abandon)``.
    """

    _watch: W | None = None
    _loss: _core.OnLoss | None = None

    def _start(self, watch: W) -> None:
        self._watch = watch
        self._loss = _core.OnLoss(watch.abandon)
        watch.start()

    def _abandon(self) -> None:
        if self._watch is not None:
            self._watch.abandon()
            if self._loss is not None:
                self._loss.disarm()
            self._watch = self._loss = None

    def _running(self) -> W:
        """Return what watches the block. Raises InputError outside of it."""
        if self._watch is None:
            name = type(self).__name__
            msg = f"this {name}() is not entered, or its with block has been left already"
            raise InputError(msg)
        return self._watch


@contextlib.contextmanager
def warn_beside(error: BaseException | None) -> Iterator[None]:
    """Finish a profile; where its block has failed with `error`, a failure of the profile is a warning."""
    try:
        yield
    except Exception as failure:
        if error is None:
            raise
        msg = f"the block failed, and so did its profile: {failure}"
        warnings.warn(msg, XpuRuntimeWarning, stacklevel=4)
