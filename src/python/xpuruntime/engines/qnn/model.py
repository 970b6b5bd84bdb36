# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The QNN engine's worker process, and the model that it runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.onnxruntime.cpu import CopyingBinding, CpuModel
from xpuruntime.engines.onnxruntime.opening import translate
from xpuruntime.engines.qnn.worker_main import receive, send
from xpuruntime.errors import EngineError, EngineFailed, InputError, XpuRuntimeError
from xpuruntime.runtime.interruptible_waits import Latch, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.qnn.opening import Opening

__all__ = [
    "QnnModel",
    "SessionHandle",
    "SessionWorker",
    "WorkerFailed",
    "WorkerSession",
    "translated",
]


class SessionHandle(NamedTuple):
    """A session as `CpuModel` takes it."""

    session: Any


class _Output(NamedTuple):
    name: str


class WorkerSession:
    """A session in a worker, with the calls of ONNX Runtime's session that `CpuModel` makes."""

    def __init__(self, worker: SessionWorker, number: int, outputs: Sequence[str]) -> None:
        self.worker, self._number = worker, number
        self._outputs = [_Output(name) for name in outputs]

    @property
    def _sess(self) -> WorkerSession:
        return self

    def get_outputs(self) -> list[_Output]:
        """Return the outputs, each with a `name`."""
        return self._outputs

    def run(self, names: Sequence[str], feeds: Mapping[str, Any], _: object = None) -> list[Any]:
        """Run on NumPy arrays and return the outputs in order."""
        for name, array in feeds.items():
            if array.dtype.kind not in "biufc":
                msg = (
                    f"input {name!r} has dtype {array.dtype}, which QNN does not take; convert it to a type of numbers"
                )
                raise InputError(msg)
        results = self.worker.run(self._number, feeds)
        return [results[name] for name in names]

    def io_binding(self) -> _Buffers:
        """Return an empty binding."""
        return _Buffers()

    def run_with_iobinding(self, buffers: _Buffers, _: object = None) -> None:
        """Run on the inputs of a binding, and leave the results there."""
        buffers.results = [
            _Result(array) for array in self.run([output.name for output in self._outputs], buffers.inputs)
        ]


class _Result(NamedTuple):
    array: np.ndarray[Any, Any]

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array


class _Buffers(CopyingBinding):
    """What ONNX Runtime's binding is for a session here: the inputs by name, and the results of the last run."""

    def __init__(self) -> None:
        self.inputs: dict[str, np.ndarray[Any, Any]] = {}
        self.results: list[_Result] = []

    @property
    def _iobinding(self) -> _Buffers:
        return self

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.inputs[name] = value.numpy()

    def bind_output(self, name: str, place: str) -> None:
        """Do nothing: every result is made over there."""

    def get_outputs(self) -> list[_Result]:
        return self.results


class QnnModel(CpuModel):
    """Runs on QNN; NumPy in, NumPy out, other frameworks through DLPack. Calls return when the work is done."""

    def __init__(
        self,
        session: Any,
        info: ModelInfo,
        *,
        where: str,
        strict: bool,
        observer: Callable[[Mapping[str, Any], int], Observed],
        log: ConversionLog,
    ) -> None:
        super().__init__(SessionHandle(session), info, strict=strict, observer=observer, log=log)  # type: ignore[arg-type]
        self._where = where

    @property
    def worker(self) -> SessionWorker | None:
        """The process that holds the session, where it is not this one."""
        return self._handle.worker if isinstance(self._handle, WorkerSession) else None

    def _failed(self, error: Exception) -> XpuRuntimeError:
        return translated(error, doing=f"running {self._info.path} for {self._where}")

    def close(self) -> None:
        """Drop the session; runs in other threads finish first. A worker is waited for."""
        session = self._handle
        super().close()
        if isinstance(session, WorkerSession):
            session.worker.close()


def translated(error: Exception, *, doing: str) -> XpuRuntimeError:
    """Return an exception of ONNX Runtime, here or in a worker, as an xpuruntime error; those stay as they are."""
    if isinstance(error, XpuRuntimeError):
        return error
    if isinstance(error, WorkerFailed):
        kind = type(error.kind, (Exception,), {})
        error = kind(str(error))
    failure = translate(error, doing=doing, device="npu")
    failure.engine = "qnn"
    return failure


_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from xpuruntime.engines.qnn.worker_main import main; main()"
)
#: Seconds that a new process has to come up, and that one has to end before it is killed.
_COMING, _LEAVING = 120.0, 10.0
_TAIL = 2000


class WorkerFailed(Exception):  # noqa: N818 - what failed over there, to be translated here
    """What ONNX Runtime raised over there: the name of its class, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class _Question:
    """A message on its way, and the answer when it is there."""

    def __init__(self, head: dict[str, Any], arrays: Mapping[str, Any]) -> None:
        self.head, self.arrays = head, arrays
        self.done = Latch()
        self.answer: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.failure: str | None = None


class _Link:
    """The process and the pipes; held by the thread that serves it, so that a dropped worker can be collected."""

    def __init__(self, process: subprocess.Popen[bytes], log: Any) -> None:
        self.process, self.log = process, log
        self.waiting: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self.dead: str | None = None
        self._said = ""
        self.up = Latch()

    def serve(self) -> None:
        """Carry one question after the other; the only thread that touches the pipes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if receive(self.process.stdout) is None:  # type: ignore[arg-type]
                self._bury("did not come up")
            self.up.set()
            while self.dead is None:
                question = self.waiting.get()
                if question is None:
                    break
                self._ask(question)
        finally:
            self._leave()

    def _ask(self, question: _Question) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            send(self.process.stdin, question.head, question.arrays)  # type: ignore[arg-type]
            question.answer = receive(self.process.stdout)  # type: ignore[arg-type]
        except OSError:
            question.answer = None
        if question.answer is None:
            self._bury(f"ended while it was asked to {question.head['verb']}")
            question.failure = self.dead
        question.done.set()

    def _bury(self, what: str) -> None:
        try:
            code: int | str = self.process.wait(_LEAVING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"was killed by signal {-code}" if isinstance(code, int) and code < 0 else f"ended with status {code}"
        tail = self.text()[-_TAIL:].strip()
        self.dead = f"the QNN worker process {self.process.pid} {what}: it {how}" + (
            f". It last said: {tail}" if tail else ""
        )

    def _leave(self) -> None:
        """End the process and answer whoever still waits."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # it may hold the rest of a message that nobody reads
                self.process.stdin.close()
        try:
            self.process.wait(_LEAVING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._said = self.text()
        self.log.close()
        self.dead = self.dead or "the QNN worker process was closed"
        self.up.set()
        while True:
            try:
                question = self.waiting.get_nowait()
            except queue.Empty:
                break
            if question is not None:
                question.failure = self.dead
                question.done.set()

    def text(self) -> str:
        """Return what the process wrote to its log so far."""
        if self.log.closed:
            return self._said
        size = os.fstat(self.log.fileno()).st_size
        if sys.platform == "win32":
            self.log.seek(0)
            return bytes(self.log.read(size)).decode(errors="replace")
        return os.pread(self.log.fileno(), size, 0).decode(errors="replace")  # the place in the file is shared


class SessionWorker:
    """A process that holds QNN sessions. Safe to use from many threads; questions are answered one after the other."""

    def __init__(self) -> None:
        if not sys.executable:
            msg = "a second QNN chip needs a second process, and this Python does not know its own executable"
            raise EngineError(msg, engine="qnn", device="npu")
        self._log = tempfile.TemporaryFile(prefix="xpuruntime-qnn-")  # noqa: SIM115 - read while the process lives
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)  # noqa: PTH100 - not resolved
        # Ctrl-C in a terminal goes to all of its processes, and this one is not the user's.
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, "PYTHONPATH": paths},
                **apart,
            )
        except OSError as error:
            self._log.close()
            msg = f"the QNN worker process cannot be started: {error}"
            raise EngineError(msg, engine="qnn", device="npu") from None
        self._link = _Link(process, self._log)
        self._numbers = itertools.count()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._link.serve, name=f"qnn-worker-{process.pid}", daemon=True)
        uninterrupted(self._begin)
        if not self._link.up.wait(_COMING):
            process.kill()
        if self._link.dead is not None:
            reason = self._link.dead
            self.close()
            raise EngineFailed(f"{reason}. Run `xrt doctor`", engine="qnn", device="npu")

    def _begin(self) -> None:
        self._thread.start()
        self._finish = weakref.finalize(self, _end, self._link, self._thread, self._owner)

    @property
    def pid(self) -> int:
        """The process."""
        return self._link.process.pid

    def open(self, model: str | bytes, opening: Opening) -> tuple[int, dict[str, Any]]:
        """Open a session over there; return its number, and its `outputs` and `placed`."""
        number = next(self._numbers)
        reply, _ = self._ask({"verb": "open", "session": number, **_model(model, opening)}, _weights(model))
        return number, reply

    def run(self, session: int, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run a session on NumPy arrays; raises as `open`."""
        return self._ask({"verb": "run", "session": session}, feeds)[1]

    def drop(self, session: int) -> None:
        """Let go of a session."""
        self._ask({"verb": "drop", "session": session}, {})

    def compile(self, model: str | bytes, opening: Opening, out: str) -> None:
        """Compile a model into the file `out`; raises as `open`."""
        self._ask({"verb": "compile", "out": out, **_model(model, opening)}, _weights(model))

    def log(self) -> str:
        """Return what the process wrote to standard output and error so far."""
        return self._link.text()

    def close(self) -> None:
        """End the process after what it was asked so far, and wait for it. Idempotent."""
        self._finish()

    def _ask(self, head: dict[str, Any], arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if os.getpid() != self._owner:
            msg = "this session was opened before a fork, and its QNN worker belongs to the parent; open it here again"
            raise EngineError(msg, engine="qnn", device="npu")
        question = _Question(head, arrays)
        if self._link.dead is None:
            self._link.waiting.put(question)
            # The serving thread answers all that is queued when the process dies, but for what is queued right after.
            while not question.done.wait(0.5) and self._thread.is_alive():
                pass
        if question.answer is None:
            reason = question.failure or self._link.dead or "the QNN worker process is gone"
            raise EngineFailed(f"{reason}. This session runs no more; open a new one", engine="qnn", device="npu")
        reply, results = question.answer
        if "error" in reply:
            raise WorkerFailed(reply["error"]["type"], reply["error"]["text"])
        return reply, results


def _end(link: _Link, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:
        return
    link.waiting.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _model(model: str | bytes, opening: Opening) -> dict[str, Any]:
    path = os.path.abspath(model) if isinstance(model, str) else None  # noqa: PTH100 - links stay as they are
    return {"path": path, "opening": msgspec.to_builtins(opening)}


def _weights(model: str | bytes) -> dict[str, Any]:
    return {"model": model} if isinstance(model, bytes) else {}
