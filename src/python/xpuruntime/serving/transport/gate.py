# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Gate`: which requests are being answered, and whether new ones still are, while a server stops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Gate"]


class Gate:
    """A count of the requests that are being answered; a context manager around each. For one event loop."""

    def __init__(self) -> None:
        self.active = 0
        self.closed = False
        self._empty: asyncio.Event | None = None

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

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait for those that were accepted; return whether all were answered in time."""
        self.closed = True
        if self.active == 0:
            return True
        self._empty = asyncio.Event()
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True
