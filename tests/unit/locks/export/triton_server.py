# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Triton Inference Server of the wheel nvidia-pytriton, run on a model repository with this interpreter's packages.

The variable ``TRITON_FOLDER`` names a virtual environment that has the wheel, tritonclient, and NumPy 1 in ``numpy1``:
``make test-triton`` makes one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def triton_folder() -> Path:
    """Return the environment that has Triton, or skip the test."""
    named = os.environ.get("TRITON_FOLDER")
    if not named:
        pytest.skip("TRITON_FOLDER names no environment with nvidia-pytriton; `make test-triton` makes one")
    stub = tritonserver(Path(named)) / "python_backend_stubs" / _VERSION / "triton_python_backend_stub"
    if not stub.is_file():
        pytest.skip(f"{named} has no stub of Triton's Python backend for Python {_VERSION}")
    linked = subprocess.run(["ldd", str(stub)], capture_output=True, text=True, check=False).stdout
    if "not found" in linked:  # LD_LIBRARY_PATH would be another environment than that of the locks
        pytest.skip(
            f"the stub of Triton's Python backend needs libpython{_VERSION}.so.1.0 where the system looks for it"
        )
    return Path(named)


def tritonserver(folder: Path) -> Path:
    return folder / "lib" / f"python{_VERSION}" / "site-packages" / "pytriton" / "tritonserver"


class TritonServer:
    """A server that was started; `stop` ends it."""

    def __init__(self, repository: Path, work: Path, *options: str, numpy1: bool = True) -> None:
        work.mkdir(parents=True)
        self.folder = triton_folder()
        self.log_file = work / "log"
        http, grpc = _free_ports(2)
        self.url, self.http, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        binary = tritonserver(self.folder) / "bin" / "tritonserver"
        command = [
            str(binary), "--model-repository=.", f"--backend-directory={_backends(self.folder, work)}",
            "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", f"--http-port={http}", f"--grpc-port={grpc}",
            "--allow-metrics=false", *options,
        ]  # fmt: skip
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=repository, stdout=log, stderr=log, env=_environment(self.folder, work, numpy1=numpy1)
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def started(self) -> TritonServer:
        """Wait until the server answers."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log[-4000:]
            with contextlib.suppress(OSError):
                if self.ask("GET", "/v2/health/live")[0] == 200:
                    return self
            time.sleep(0.05)
        raise AssertionError(self.log[-4000:])

    def ask(self, method: str, path: str) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        request = urllib.request.Request(self.url + path, data=b"" if method == "POST" else None, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, body = error.code, error.read()
        return status, json.loads(body or b"null")

    def infer(self, transport: str, model: str, inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Return what Triton's own client gets: ``outputs``, or ``status`` and ``message`` of an error."""
        call = {"transport": transport, "model": model, "inputs": inputs, **more}
        done = subprocess.run(
            [str(self.folder / "bin" / "python"), str(_HERE / "triton_infer.py"), self.http, self.grpc],
            input=json.dumps(call), capture_output=True, text=True, check=False, timeout=120,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def stop(self) -> int:
        """End the server as an orchestrator does, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _backends(folder: Path, work: Path) -> Path:
    """Return a folder of backends with the stub for this interpreter."""
    made = work / "backends" / "python"
    made.mkdir(parents=True)
    parts = tritonserver(folder)
    for path in (parts / "backends" / "python").iterdir():
        (made / path.name).symlink_to(path)
    stub = parts / "python_backend_stubs" / _VERSION / "triton_python_backend_stub"
    (made / stub.name).symlink_to(stub)
    return made.parent


def _environment(folder: Path, work: Path, *, numpy1: bool) -> dict[str, str]:
    """Return variables with which the stub has the packages of this interpreter.

    It ignores PYTHONPATH, and takes the packages of the environment whose python3 comes first in PATH.
    """
    home = Path(sys.base_prefix) / "bin"
    venv = work / "venv"
    site = venv / "lib" / f"python{_VERSION}" / "site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python3").symlink_to(home / f"python{_VERSION}")
    (venv / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    first = [str(folder / "numpy1")] if numpy1 else []
    first += [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    own = sysconfig.get_paths()["purelib"]
    (site / "tests.pth").write_text(f"import site, sys; sys.path[:0] = {first}; site.addsitedir({own!r})\n")
    return {**os.environ, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
