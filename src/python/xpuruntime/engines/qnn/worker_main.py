# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Worker process of `SessionWorker`: opens sessions and runs them, as its standard input asks.

A message is a length of four bytes, that many bytes of JSON, and the bytes of the arrays that the JSON lists.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

    import numpy as np

__all__ = ["main", "receive", "send"]

_LENGTH = struct.Struct("<I")


def send(stream: BinaryIO, head: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any] | bytes]) -> None:
    """Write one message."""
    import numpy as np

    parts = []
    listed = []
    for name, value in arrays.items():
        data = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        listed.append({"name": name, "dtype": data.dtype.str, "shape": data.shape, "bytes": isinstance(value, bytes)})
        if data.size:
            parts.append(data.tobytes() if not data.shape else data.data.cast("B"))
    text = msgspec.json.encode({**head, "arrays": listed})
    stream.write(_LENGTH.pack(len(text)))
    stream.write(text)
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Read one message; ``None`` when the other side is gone."""
    import numpy as np

    start = stream.read(_LENGTH.size)
    if len(start) < _LENGTH.size:
        return None
    text = stream.read(_LENGTH.unpack(start)[0])
    try:
        head: dict[str, Any] = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    arrays: dict[str, Any] = {}
    for header in head.pop("arrays"):
        array = np.empty(header["shape"], np.dtype(header["dtype"]))
        if array.size and not _fill(stream, array.reshape(-1)):
            return None
        arrays[header["name"]] = array.tobytes() if header["bytes"] else array
    return head, arrays


def _fill(stream: BinaryIO, flat: np.ndarray[Any, Any]) -> bool:
    room = flat.data.cast("B")
    have = 0
    while have < len(room):
        count = stream.readinto(room[have:])  # type: ignore[attr-defined]
        if not count:
            return False
        have += count
    return True


class _Sessions:
    """The sessions of this process, by number."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}

    def answer(self, verb: str, head: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if verb == "run":
            from xpuruntime.engines.onnxruntime._private_api import raw_session

            session = self._open[head["session"]]
            names = [output.name for output in session.get_outputs()]
            return {}, dict(zip(names, raw_session(session).run(names, arrays, None), strict=True))
        if verb == "drop":
            self._open.pop(head["session"], None)
            return {}, {}
        from xpuruntime.engines.qnn.opening import Opening, compile_file, construct, placements

        opening = msgspec.convert(head["opening"], Opening)
        model = head["path"] if head["path"] is not None else arrays["model"]
        if verb == "compile":
            compile_file(model, opening, head["out"])
            return {}, {}
        session = construct(model, opening)
        self._open[head["session"]] = session
        return {
            "outputs": [output.name for output in session.get_outputs()],
            "placed": [msgspec.to_builtins(placement) for placement in placements(session)],
        }, {}


def main() -> None:
    """Answer until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's; it closes standard input when it is done
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what vendor libraries print must not come between the messages
    questions = sys.stdin.buffer
    sessions = _Sessions()
    send(answers, {"ready": os.getpid()}, {})
    while True:
        message = receive(questions)
        if message is None:
            break
        head, arrays = message
        try:
            reply, results = sessions.answer(head["verb"], head, arrays)
        except Exception as error:  # sent to the caller, who raises it as an exception of xpuruntime
            reply, results = {"error": {"type": type(error).__name__, "text": str(error)}}, {}
        send(answers, reply, results)
    # Leave by the short way: the vendor's libraries have been seen to hang in their own destructors.
    sessions._open.clear()
    sys.stderr.flush()
    os._exit(0)
