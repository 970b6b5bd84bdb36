# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Loading QNN's HTP library before the provider does: for an error that says what is wrong, and without its greeting.

The simulator's library prints a line to standard output when it is loaded, which would be in the middle of whatever the
program writes there, such as JSON. No setting stops it.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.errors import EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["load_backend"]

_GREETING = b"LIBNATIVE:"


def load_backend(folder: Path) -> None:
    """Load the HTP library of the wheel in `folder` into this process; the provider finds it there."""
    if sys.platform == "win32":  # there the provider sets up the search path itself
        return
    library = folder / "libQnnHtp.so"
    try:
        with _without_greeting():
            ctypes.CDLL(str(library))
    except OSError as error:
        fix = "pip install --force-reinstall --no-deps onnxruntime-qnn"
        raise EngineUnavailable(
            f"QNN's HTP library cannot be loaded: {error}. {fix}", engine="qnn", device="npu"
        ) from None


@contextlib.contextmanager
def _without_greeting() -> Iterator[None]:
    """Have the C library's `stdout` write into memory for a moment; all but the greeting is passed on afterwards.

    File descriptor 1 is left alone, so that nothing that Python or other processes write is touched. The stream in
    memory is never closed: another thread may hold it, and what it writes late is then lost instead of a crash.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    for name, count in (("fflush", 1), ("fwrite", 4), ("open_memstream", 2)):
        getattr(libc, name).argtypes = [ctypes.c_void_p] * count
    libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    current = ctypes.c_void_p.in_dll(libc, "stdout")
    real = current.value
    room, size = ctypes.c_void_p(), ctypes.c_size_t()
    memory = libc.open_memstream(ctypes.byref(room), ctypes.byref(size))
    if not memory or not real:
        yield
        return
    libc.fflush(real)
    current.value = memory
    try:
        yield
    finally:
        current.value = real
        libc.fflush(memory)
        said = ctypes.string_at(room, size.value) if room.value else b""
        kept = b"".join(line for line in said.splitlines(keepends=True) if _GREETING not in line)
        if kept:
            libc.fwrite(kept, 1, len(kept), real)
            libc.fflush(real)
        _kept_alive.append((room, size))


#: Where the stream in memory puts its buffer: it may still write to these.
_kept_alive: list[tuple[ctypes.c_void_p, ctypes.c_size_t]] = []
