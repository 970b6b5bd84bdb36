# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Commands that a signal comes to at moments of theirs, each in a fork of one process: what they leave behind.

Run as a script: cases come as JSON on stdin, ``[{"arguments", "moment", "signal"}]``, and what became of each goes to
stdout. A moment is the name of an audit event, its number, and the seconds after it: ``["subprocess.Popen", 1, 0.2]``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

#: Seconds that a command may take.
_LONGEST = 60.0
#: What ONNX Runtime's wheel writes on import.
_OF_OTHERS = {".ses"}


def run(case: dict[str, Any], room: Path) -> None:
    """Run a command in this process, with a signal at a moment."""
    event, number, seconds = case["moment"]
    left = number

    def send() -> None:
        (room / "sent").touch()
        os.kill(os.getpid(), getattr(signal, case["signal"]))

    def hook(name: str, _: object) -> None:
        nonlocal left
        if name == event:
            left -= 1
            if not left and seconds:
                threading.Timer(seconds, send).start()
            elif not left:
                send()

    os.environ |= {"TMPDIR": str(room / "tmp"), "XPURUNTIME_CASE": str(room)}
    tempfile.tempdir = None
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, also below
    for name in ("tmp", "cwd"):
        (room / name).mkdir()
    os.chdir(room / "cwd")
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(room / name, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["xrt", *case["arguments"]]
    sys.addaudithook(hook)
    from xpuruntime_command import main

    main()


def processes_of(room: Path) -> list[str]:
    """Return the commands of the processes that a case has started and that are there."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"XPURUNTIME_CASE={room}".encode() in (path / "environ").read_bytes().split(b"\0"):
                processes.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
        except OSError:
            continue
    return processes


def start(case: dict[str, Any], room: Path) -> int:
    """Fork, and return the child's number."""
    child = os.fork()
    if child:
        return child
    try:
        run(case, room)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        (room / "raised").write_text(repr(error))
        code = 99
    sys.exit(code)  # through what is done at exit


def ended(room: Path, status: int, seconds: float) -> dict[str, Any]:
    """Return what became of a command."""
    until = time.monotonic() + 120
    while (processes := processes_of(room)) and time.monotonic() < until:  # they are killed as the command ends
        time.sleep(0.02)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "sent": (room / "sent").exists(),
        "left": sorted({path.name for path in (room / "tmp").iterdir()} - _OF_OTHERS),
        "written": sorted(path.name for path in (room / "cwd").iterdir()),
        "processes": processes,
        "seconds": seconds,
        "err": (room / "err").read_text(),
    }


def main() -> None:
    """Run the cases, as many at a time as there are processors."""
    import numpy  # noqa: F401
    import onnx  # noqa: F401

    import xpuruntime._core
    import xpuruntime.cli.app  # noqa: F401

    cases = json.load(sys.stdin)
    rooms = [Path(tempfile.mkdtemp(dir=sys.argv[1])) for _ in cases]
    running: dict[int, tuple[int, float]] = {}
    count: list[Any] = [None] * len(cases)
    waiting = list(range(len(cases)))
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            number = waiting.pop(0)
            running[start(cases[number], rooms[number])] = number, time.monotonic()
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            for late in [one for one, (_, begun) in running.items() if time.monotonic() - begun > _LONGEST]:
                os.kill(late, signal.SIGKILL)
            time.sleep(0.005)
            continue
        number, begun = running.pop(child)
        count[number] = ended(rooms[number], status, time.monotonic() - begun)
    json.dump(count, sys.stdout)


if __name__ == "__main__":
    main()
