# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Worker`: a process of any Python interpreter that functions are called in.

A worker that crashes, hangs, takes too much memory or ends is a `WorkerFailure` with its kind; its output is kept and
quoted. The worker and the processes that it starts are one process group, which is killed when the worker is closed,
when the parent is interrupted, and by the kernel when the parent itself is killed.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.runtime.cpu_and_memory import read_status

_BOOTSTRAP = Path(__file__).with_name("worker_bootstrap.py")
#: Run as text, since a script's own folder would come first where the worker imports from.
_START = (
    "import sys; f = sys.argv.pop(1); sys.path[:1] = []; exec(compile(open(f, encoding='utf-8').read(), f, 'exec'))"
)
#: Seconds until a worker has started, between two looks at its memory, and until a process that closed its pipe ends.
_START_SECONDS, _LOOK, _END_SECONDS = 60.0, 0.05, 2.0
_FIX = "Fix: give the path of a Python interpreter, 3.11 or later, such as VENV/bin/python"
#: Where Python finds modules; of no use to another interpreter.
_PATHS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
_CLEAN = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


def _sweep() -> None:
    if sys.is_finalizing():
        return
    import tempfile

    from xpuruntime.files.scratch import remove_dead

    remove_dead(Path(tempfile.gettempdir()))


class Worker:
    """A process of a Python interpreter that functions are called in, one at a time."""

    def __init__(
        self,
        python: str | os.PathLike[str] | None = None,
        *,
        pythonpath: Sequence[str | os.PathLike[str]] = (),
        environment: Mapping[str, str | None] | None = None,
        clean: bool = False,
        memory_limit: int | None = None,
        timeout: float = 600.0,
        folder: str | os.PathLike[str] | None = None,
        cores: Collection[int] = (),
        output_bytes: int = 1 << 16,
        answer_bytes: int = 1 << 26,
    ) -> None:
        self.python = os.fspath(python if python is not None else sys.executable)
        if not (Path(self.python).is_file() and os.access(self.python, os.X_OK)):
            raise InputError(f"{self.python} is not an executable file. {_FIX}")
        self.timeout = timeout
        self._limit, self._kept, self._longest, self._owner = memory_limit, output_bytes, answer_bytes, os.getpid()
        self._number = 0
        self._failure: WorkerFailure | None = None
        self._output = bytearray()
        self._received, self._searched = bytearray(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._fds: dict[str, int] = {}
        own = self.python == sys.executable
        #: The end of the error of an interpreter that does not start; empty for the running one, which is a Python.
        self._fix = "" if own else f". {_FIX}"
        env = _environment(environment or {}, pythonpath, clean=clean, own=own)
        try:
            self._start(env, folder, cores)
            starting = "starting" if own else f"starting {self.python}"
            #: ``python``, ``executable`` and ``pid`` of the worker.
            self.facts: dict[str, Any] = self._exchange(b"", _START_SECONDS, starting).get("hello", {})
            if not self.facts:
                self._end(FailureKind.PROTOCOL, f"{self.python} does not speak the worker's protocol")
            self._fix = ""
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether another call can be made."""
        return self._process is not None

    @property
    def output(self) -> str:
        """The end of what the worker wrote to stdout and stderr: `output_bytes` at most."""
        return bytes(self._output).decode(errors="replace")

    def call(
        self,
        function: str,
        /,
        *,
        timeout: float | None = None,
        serve: Callable[[Any], Any] | None = None,
        called: str | None = None,
        **arguments: Any,
    ) -> Any:
        """Call a function in the worker and return its value."""
        if self._failure is not None:
            raise self._failure
        what = function if called is None else called
        if self._process is None:
            msg = f"cannot call {what}: the worker is closed"
            raise WorkerFailure(FailureKind.EXITED, msg)
        self._number += 1
        request = {"id": self._number, "function": function, "arguments": arguments, "asks": serve is not None}
        limit = self.timeout if timeout is None else timeout
        end = time.monotonic() + limit
        try:
            answer = self._exchange(_line(request), limit, what)
            while serve is not None and "ask" in answer:
                answer = self._exchange(_line({"reply": serve(answer["ask"])}), limit, what, end)
        except WorkerFailure:
            raise
        except BaseException:
            self.close()  # the answer that is under way would be taken for that of the next call
            raise
        if answer.get("id") != self._number or not ("value" in answer) ^ ("error" in answer):
            self._end(FailureKind.PROTOCOL, f"the worker's answer to {what} is of another call")
        if "value" in answer:
            return answer["value"]
        error = answer["error"]
        kind = FailureKind.OUT_OF_MEMORY if "MemoryError" in error["kinds"] else FailureKind.EXCEPTION
        text = f"{error['kinds'][0]}: {error['message']}"
        raise WorkerFailure(
            kind, f"{what} raised {text}", exceptions=error["kinds"], error=text, traceback=error["traceback"]
        )

    def attempt(self, function: str, /, **arguments: Any) -> WorkerResult:
        """Call a function in the worker, with a failure as a value."""
        try:
            return WorkerResult(self.call(function, **arguments), None)
        except WorkerFailure as failure:
            return WorkerResult(None, failure)

    def kill(self) -> None:
        """Kill the process group, from any thread: a call that is under way in another one then fails."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process group, collect the exit status and close the pipes; once is enough."""
        process, self._process = self._process, None
        fds, self._fds = self._fds, {}
        try:
            if process is not None and self._owner == os.getpid():  # not in a child of a fork
                # Before the exit status is collected, so that the group's number is still this one's.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _sweep()
        finally:
            for fd in fds.values():
                os.close(fd)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()

    def _start(self, env: dict[str, str], folder: str | os.PathLike[str] | None, cores: Collection[int]) -> None:
        theirs: list[int] = []
        try:
            for name, ours in (("requests", 1), ("answers", 0), ("lifeline", 1), ("output", 0)):
                pair = os.pipe()
                self._fds[name] = pair[ours]
                theirs.append(pair[1 - ours])
                os.set_blocking(pair[ours], False)
            command = [self.python, "-c", _START, str(_BOOTSTRAP), *map(str, theirs[:3]), *map(str, cores)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=theirs[3], stderr=theirs[3], pass_fds=theirs[:3],
                start_new_session=True, env=env, cwd=folder,
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"cannot start {self.python}: {os.strerror(error.errno or 0)}{self._fix}") from error
        finally:
            for fd in theirs:
                os.close(fd)

    def _exchange(self, request: bytes, limit: float, what: str, end: float | None = None) -> dict[str, Any]:
        end, look = time.monotonic() + limit if end is None else end, 0.0
        rest = memoryview(request)
        with selectors.DefaultSelector() as waits:
            waits.register(self._fds["answers"], selectors.EVENT_READ, "answers")
            waits.register(self._fds["output"], selectors.EVENT_READ, "output")
            if rest:
                waits.register(self._fds["requests"], selectors.EVENT_WRITE, "requests")
            while not self._has_line():
                left = end - time.monotonic()
                if left <= 0:
                    self._end(FailureKind.TIMEOUT, f"{what} took more than {limit:g} s, and the worker was killed")
                ready = {key.data for key, _ in waits.select(min(left, _LOOK))}
                if "requests" in ready:
                    rest = rest[self._write(rest, what) :]
                    if not rest:
                        waits.unregister(self._fds["requests"])
                if "output" in ready and not self._read_output():
                    waits.unregister(self._fds["output"])
                if "answers" in ready and not self._read_answers():
                    self._ended(what)
                if "answers" not in ready and time.monotonic() >= look:
                    self._check(what)
                    look = time.monotonic() + _LOOK
        line, _, after = bytes(self._received).partition(b"\n")
        self._received, self._searched = bytearray(after), 0
        self._read_output()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._end(FailureKind.PROTOCOL, f"the worker's answer to {what} is not of its protocol: {line[:80]!r}")
        return answer

    def _write(self, data: memoryview, what: str) -> int:
        try:
            return os.write(self._fds["requests"], data)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            self._ended(what)

    def _has_line(self) -> bool:
        at = self._received.find(b"\n", self._searched)
        self._searched = at if at >= 0 else len(self._received)
        return at >= 0

    def _read_answers(self) -> bool:
        data = _read(self._fds["answers"])
        self._received += data or b""
        if len(self._received) > self._longest:
            self._end(FailureKind.PROTOCOL, f"an answer of the worker has more than {self._longest >> 20} MiB")
        return data != b""

    def _read_output(self) -> bool:
        while data := _read(self._fds["output"]):
            self._output += data
            del self._output[: -self._kept]
        return data is None

    def _check(self, what: str) -> None:
        assert self._process is not None
        if _has_ended(self._process.pid) and not (self._read_answers() and self._has_line()):
            self._ended(what)
        if self._limit is not None and (held := _resident(self._process.pid)) > self._limit:
            reason = (
                f"{what} held {held:,} bytes of memory, over the limit of {self._limit:,}, and the worker was killed"
            )
            self._end(FailureKind.OUT_OF_MEMORY, reason)

    def _ended(self, what: str) -> NoReturn:
        """Fail with how the process ended; its last answer may still be in the pipe."""
        assert self._process is not None
        pid, until = self._process.pid, time.monotonic() + _END_SECONDS
        while not _has_ended(pid) and time.monotonic() < until:
            self._read_output()
            time.sleep(0.002)
        if not _has_ended(pid):
            self._end(FailureKind.PROTOCOL, f"the worker closed the pipe of its answers in {what}")
        code = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert code is not None
        if code.si_code == os.CLD_EXITED:
            reason = f"the worker ended in {what} with exit status {code.si_status}"
            self._end(FailureKind.EXITED, reason, exit_code=code.si_status)
        name = _signal_name(code.si_status)
        by = ": by the operating system, which may have been out of memory, or by somebody" if name == "SIGKILL" else ""
        self._end(FailureKind.CRASHED, f"the worker was ended in {what} by {name}{by}", signal=name)

    def _end(self, kind: FailureKind, reason: str, **facts: Any) -> NoReturn:
        self._read_output()
        self._failure = WorkerFailure(kind, reason + self._fix, output=self.output, **facts)
        self.close()
        raise self._failure


def _environment(
    changes: Mapping[str, str | None], paths: Sequence[str | os.PathLike[str]], *, clean: bool, own: bool
) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not clean or name in _CLEAN}
    if not own:
        env = {name: value for name, value in env.items() if name not in _PATHS}
    if paths:
        inherited = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
        env["PYTHONPATH"] = os.pathsep.join([*(os.fspath(path) for path in paths), *inherited])
    env["PYTHONUNBUFFERED"] = "1"
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; its exit status stays uncollected, so that its number is not given away."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _resident(pid: int) -> int:
    total, todo = 0, [pid]
    while todo:
        folder = Path("/proc", str(todo.pop()))
        with contextlib.suppress(OSError):
            total += read_status((folder / "status").read_text(encoding="ascii", errors="replace")).resident or 0
            for task in (folder / "task").iterdir():
                todo += map(int, (task / "children").read_text(encoding="ascii").split())
    return total


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class FailureKind(enum.StrEnum):
    """How a call in a worker failed. After all but `EXCEPTION` and `OUT_OF_MEMORY` by an exception it has ended."""

    CRASHED = "crashed"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    EXITED = "exited"
    PROTOCOL = "protocol"
    EXCEPTION = "exception"


class WorkerFailure(XpuRuntimeError):  # noqa: N818  the name of a result, which is also raised
    """A call in a worker gave no value."""

    def __init__(
        self,
        kind: FailureKind,
        reason: str,
        *,
        signal: str | None = None,
        exit_code: int | None = None,
        exceptions: Sequence[str] = (),
        error: str = "",
        traceback: str = "",
        output: str = "",
    ) -> None:
        last = output.strip().splitlines()[-12:]
        super().__init__(reason + (f" (its last output: {' | '.join(last)})" if last else ""))
        self.kind, self.reason, self.signal, self.exit_code = kind, reason, signal, exit_code
        self.exceptions, self.error = tuple(exceptions), error
        self.traceback, self.output = traceback, output

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.kind, self.reason, self.__dict__)


def _rebuilt(kind: FailureKind, reason: str, attributes: dict[str, Any]) -> WorkerFailure:
    failure = WorkerFailure(kind, reason, output=attributes["output"])
    failure.__dict__.update(attributes)
    return failure


class WorkerResult(NamedTuple):
    """The value of a call in a worker, or how it failed."""

    value: Any
    failure: WorkerFailure | None
