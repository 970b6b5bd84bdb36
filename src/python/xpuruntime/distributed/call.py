# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Call`: one checked call of NCCL, and groups of them."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from xpuruntime.distributed.nccl import SUCCESS
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime._core import ArrayView, Stream
    from xpuruntime.distributed.communicator import Communicator

__all__ = ["Call", "group", "in_group", "launch"]


class Call:
    """One checked call: what NCCL gets, and the arrays whose order has to be kept.

    `op` is the name of the call here and of its function in nccl4py, whose communicator and stream come after
    `arguments`. `ordered` says whether the arrays have to be ordered before and after the call; it is false where their
    library works on `stream`.
    """

    __slots__ = ("arguments", "communicator", "op", "ordered", "reads", "stream", "writes")

    def __init__(
        self,
        communicator: Communicator,
        op: str,
        arguments: tuple[Any, ...],
        stream: Stream,
        reads: tuple[ArrayView, ...],
        writes: tuple[ArrayView, ...],
        ordered: bool,
    ) -> None:
        self.communicator, self.op, self.arguments = communicator, op, arguments
        self.stream, self.reads, self.writes, self.ordered = stream, reads, writes, ordered

    def order_before(self) -> None:
        """Let the stream wait for the arrays."""
        if self.ordered:
            for view in (*self.reads, *self.writes):
                view.order_before(self.stream)

    def start(self) -> int:
        """Hand it to NCCL and return NCCL's status."""
        communicator = self.communicator
        return communicator._library.status(self.op, *self.arguments, communicator._handle, self.stream.handle)

    def order_after(self) -> None:
        """Let the libraries of the arrays wait for the stream."""
        if self.ordered:
            for view in self.reads:
                view.order_after(self.stream, written=False)
            for view in self.writes:
                view.order_after(self.stream, written=True)


class _Open(threading.local):
    """The group that the thread is in."""

    calls: list[Call] | None = None


_open = _Open()


def launch(call: Call) -> None:
    """Hand a call to NCCL now, or when the group that the thread is in ends."""
    if _open.calls is not None:
        call.order_before()  # where the call stands, another stream may be current than at the end
        _open.calls.append(call)
        return
    communicator = call.communicator
    with communicator._lock:
        communicator._require_usable(call.op)
        call.order_before()
        communicator._settle(call.start(), call.op)
        communicator._note_work(call.stream)
        call.order_after()


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Collect the calls of a ``with`` block, and hand them to NCCL as one when it ends.

    Calls are checked where they are written; an exception in the block drops them all. Results are valid after the
    block. A group inside a group ends with the outer one. What is done with their arrays afterwards, freeing them as
    well, is ordered with the stream that is current in their library where the block ends.
    """
    if _open.calls is not None:
        yield
        return
    calls: list[Call] = []
    _open.calls = calls
    try:
        yield
    finally:
        _open.calls = None
    if calls:
        _launch_all(calls)


def in_group() -> bool:
    """Return whether the thread is in a group."""
    return _open.calls is not None


def _launch_all(calls: list[Call]) -> None:
    communicators = sorted({id(call.communicator): call.communicator for call in calls}.values(), key=id)
    if len({communicator.policy.blocking for communicator in communicators}) > 1:
        raise InputError(
            "a group has calls of communicators with blocking=True and blocking=False, which NCCL cannot join. Fix: "
            "make them with one value, or use a group for each"
        )
    words = " + ".join(dict.fromkeys(call.op for call in calls))
    with contextlib.ExitStack() as locks:
        for communicator in communicators:
            locks.enter_context(communicator._lock)
            communicator._require_usable(words)
        library = communicators[0]._library
        for call in calls:
            call.order_before()
        failed: dict[int, int] = {}
        library.status("group_start")
        try:
            for call in calls:
                status = call.start()
                if status != SUCCESS:
                    failed.setdefault(id(call.communicator), status)
        finally:
            ended = library.status("group_end")
        for communicator in communicators:
            communicator._settle(ended or failed.get(id(communicator), SUCCESS), words)
        for call in calls:
            call.communicator._note_work(call.stream)
            call.order_after()
