# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Start one process for each rank, and end all of them whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WORK = Path(__file__).with_name("nccl_work.py")


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all that it started; torchrun gives its workers sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_commands(
    commands: list[list[str]], *, seconds: float, env: dict[str, str] | None = None, expected: tuple[int, ...] = ()
) -> list[str]:
    """Run commands side by side and return what each printed.

    Each is a process group of its own, which is killed at the end. Fails with all their output when one has not ended
    after `seconds`, or ends with another code than expected (0 where nothing is said).
    """
    files = [tempfile.TemporaryFile("w+") for _ in commands]  # noqa: SIM115 - closed below
    processes = [
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
        for command, file in zip(commands, files, strict=True)
    ]
    deadline = time.monotonic() + seconds
    wanted = expected or (0,) * len(commands)
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            failed = [p for p, code in zip(processes, wanted, strict=True) if p.poll() not in (None, code)]
            if failed:
                deadline = min(deadline, time.monotonic() + 10)  # the others may have something to say
            time.sleep(0.05)
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    finally:
        for process in processes:
            end(process)
    said = []
    for file in files:
        file.seek(0)
        said.append(file.read()[-20000:])
        file.close()
    codes = tuple(process.returncode for process in processes)
    everything = "\n".join(f"--- rank {rank}, code {codes[rank]}:\n{text}" for rank, text in enumerate(said))
    assert not late, f"rank {late} had not ended after {seconds} s\n{everything}"
    assert codes == wanted, everything
    return said


def run_ranks(
    name: str,
    *arguments: str,
    ranks: int = 2,
    seconds: float = 120,
    env: dict[str, str] | None = None,
    expected: tuple[int, ...] = (),
) -> list[str]:
    """Run one function of nccl_work.py on every rank and return what each printed."""
    port = free_port()
    commands = [
        [sys.executable, "-u", str(WORK), name, str(rank), str(ranks), str(port), *arguments] for rank in range(ranks)
    ]
    return run_commands(commands, seconds=seconds, env=env, expected=expected)
