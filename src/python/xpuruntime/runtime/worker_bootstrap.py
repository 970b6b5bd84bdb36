# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Worker side of the protocol, which needs the standard library alone.

`Worker` starts this file in another interpreter, which need not have xpuruntime, and speaks JSON lines with it over two
pipes: ``{"id", "function", "arguments"}`` comes in, ``{"id", "value"}`` or ``{"id", "error"}`` goes out. In between, a
function that was called with ``"asks"`` may send ``{"ask"}``, and gets ``{"reply"}``. A third pipe, whose other end
only the parent has, ends when the parent does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback


def follow_parent(lifeline: int) -> None:
    """Have the process group killed when the parent ends, however that ends and whatever this process does then.

    The kernel sends the signal as the pipe closes (`F_SETSIG`), so native code that holds the GIL does not prevent it.
    `PR_SET_PDEATHSIG` would not do: it means the parent's thread, not the parent.
    """
    import fcntl

    try:
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError, ValueError):  # not Linux
        threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)


def _wait_for_end(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class Pipes:
    """The two pipes to the parent, line by line."""

    def __init__(self, requests: object, answers: object) -> None:
        self._requests, self._answers, self._rest = requests, answers, bytearray()
        self._asking, self._process = threading.Lock(), os.getpid()

    def send(self, text: str) -> None:
        """Write a line."""
        data = memoryview(text.encode() + b"\n")
        while data:
            data = data[self._answers.write(data) :]  # type: ignore[attr-defined]

    def receive(self) -> bytes:
        """Return the next line without its end; nothing once the parent has closed its end."""
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            searched = len(self._rest)
            data = self._requests.read(1 << 20)  # type: ignore[attr-defined]
            if not data:
                return b""
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    def ask(self, value: object) -> object:
        """Return the parent's reply, from any thread of this process."""
        if os.getpid() != self._process:
            raise RuntimeError("the parent cannot be asked in a child of its worker process")
        with self._asking:
            self.send(json.dumps({"ask": value}))
            line = self.receive()
        if not line:
            os._exit(1)
        return json.loads(line)["reply"]


def answer(line: bytes, pipes: Pipes) -> str:
    """Call the function that a request names, and return the line of the answer."""
    request = json.loads(line)
    try:
        if request.get("asks"):
            request["arguments"]["ask"] = pipes.ask
        module, _, name = request["function"].partition(":")
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        value = function(**request["arguments"])  # type: ignore[operator]
        return json.dumps({"id": request["id"], "value": value})
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__[:-1]]
        text = traceback.format_exc(limit=-12)
        return json.dumps({"id": request["id"], "error": {"kinds": kinds, "message": str(error), "traceback": text}})


def main(requests: int, answers: int, lifeline: int, *cores: int) -> None:
    """Serve calls until the parent closes its end."""
    if cores:  # before anything is imported that starts threads
        os.sched_setaffinity(0, cores)
    for fd in (requests, answers, lifeline):
        os.set_inheritable(fd, False)
    follow_parent(lifeline)
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable()
    facts = {"python": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable, "pid": os.getpid()}
    with os.fdopen(requests, "rb", buffering=0) as lines, os.fdopen(answers, "wb", buffering=0) as out:
        pipes = Pipes(lines, out)
        pipes.send(json.dumps({"hello": facts}))
        while True:
            line = pipes.receive()
            if not line:
                return
            text = answer(line, pipes)
            with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or replaced by the function
                sys.stdout.flush()
                sys.stderr.flush()
            pipes.send(text)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
