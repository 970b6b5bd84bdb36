# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sockets: bytes received in threads of the core."""

from typing import Any

class SocketReceiver:
    """Receives from sockets into buffers, in threads of its own.

    Parameters
    ----------
    threads : int

    Raises
    ------
    XpuRuntimeError
        The process has no file descriptor left.
    """

    def __init__(self, threads: int) -> None: ...
    def fileno(self) -> int:
        """Return a file descriptor that can be read while `received` has something to return."""

    def receive(self, owner: object, socket: int, buffer: memoryview, seconds: float) -> None:
        """Begin to fill a buffer from a connected socket, for at most so many seconds.

        Nothing else may read the socket meanwhile; to close it is allowed. The buffer is kept.

        Raises
        ------
        InputError
            `socket` is no socket, or the receiver is closed.
        """

    def received(self) -> list[tuple[Any, int]]:
        """Return the owner of each buffer that has ended since the last call, and how many bytes of it came."""

    def close(self) -> None:
        """End the threads. What had not ended never does."""
