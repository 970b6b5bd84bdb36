# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Gate`: which requests are being answered, and whether new ones still are, while a server stops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from types import TracebackType

    from xpuruntime.serving.batching.inline import Soon

__all__ = ["Gate"]

#: Requests that have come one at a time, and for one model, before the next one is taken to do so.
_ONE_BY_ONE = 1


class Gate:
    """A count of the requests that are being answered; a context manager around each. For one event loop."""

    def __init__(self) -> None:
        self.active = 0
        self.closed = False
        self._empty: asyncio.Event | None = None
        #: How many of the last requests were for this model while no other one was being answered.
        self._alone, self._model = 0, ""

    def __enter__(self) -> None:
        if self.closed:
            raise ServingError(
                Status.UNAVAILABLE, "the server is stopping. Fix: send the request to another one", retry_after=1.0
            )
        self.active += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.active -= 1
        if self._empty is not None and self.active == 0:
            self._empty.set()

    def soon(self, model: str) -> Soon | None:
        """Return what calls a function later in the event loop, where requests come one at a time; else `None`.

        To be called once for each inference request, within the gate.
        """
        if self.active > 1 or model != self._model:
            self._alone, self._model = 0, model
            return None
        self._alone += 1
        return asyncio.get_running_loop().call_soon if self._alone > _ONE_BY_ONE else None

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait for those that were accepted; return whether all were answered in time."""
        self.closed = True
        if self.active == 0:
            return True
        self._empty = asyncio.Event()
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            return False
        return True
