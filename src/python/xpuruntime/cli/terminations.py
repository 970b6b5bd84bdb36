# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SIGTERM and SIGHUP in a long command: what it opened is closed first, then the process ends by the signal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["close_before_end"]


class _Terminated(KeyboardInterrupt):
    """A signal came that ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def close_before_end() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block where SIGTERM or SIGHUP comes, and end by that signal once it was left.

    The next one ends the process at once. A signal that is ignored, as `nohup` has it, or that has a handler is left
    alone; so are all outside of the main thread.
    """
    here = threading.current_thread() is threading.main_thread()
    names = ("SIGTERM", "SIGHUP") if here else ()
    watched = [getattr(signal, name) for name in names if hasattr(signal, name)]
    watched = [one for one in watched if signal.getsignal(one) is signal.SIG_DFL]

    def restore() -> None:
        for one in watched:
            signal.signal(one, signal.SIG_DFL)

    def end(number: int, frame: Any) -> NoReturn:
        del frame
        restore()
        raise _Terminated(number)

    for one in watched:
        signal.signal(one, end)
    try:
        yield
    except _Terminated as ended:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.kill(os.getpid(), ended.number)
        raise
    finally:
        restore()
