# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The QNN engine's worker process, and the model that it runs."""

from __future__ import annotations

import base64
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.onnxruntime.cpu import CopyingBinding, CpuModel
from xpuruntime.engines.onnxruntime.opening import translate
from xpuruntime.engines.qnn.opening import Opening, decoded, encoded
from xpuruntime.errors import EngineError, EngineFailed, InputError, XpuRuntimeError
from xpuruntime.runtime.worker import FailureKind, Worker, WorkerFailure

if TYPE_CHECKING:
    import numpy as np

    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.model import ModelInfo


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


class WorkerFailed(Exception):  # noqa: N818 - what failed over there, to be translated here
    """What ONNX Runtime raised over there: the name of its class, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class SessionWorker:
    """A process that holds QNN sessions. Safe to use from many threads; calls are made one after the other.

    An interrupted call ends the process.
    """

    def __init__(self, *, log_bytes: int = 1 << 16) -> None:
        if not sys.executable:
            msg = "a second QNN chip needs a second process, and this Python does not know its own executable"
            raise EngineError(msg, engine="qnn", device="npu")
        self._lock, self._numbers, self._owner = threading.Lock(), itertools.count(), os.getpid()
        self._interrupted = False
        paths = [os.path.abspath(path) for path in sys.path if path]  # noqa: PTH100 - not resolved
        try:
            self._worker = Worker(pythonpath=paths, timeout=math.inf, output_bytes=log_bytes, answer_bytes=1 << 32)
        except XpuRuntimeError as error:
            msg = f"the QNN worker process cannot be started: {error}. Run `xrt doctor`"
            raise EngineFailed(msg, engine="qnn", device="npu") from None

    @property
    def pid(self) -> int:
        """The process."""
        return int(self._worker.facts["pid"])

    def open(self, model: str | bytes, opening: Opening) -> tuple[int, dict[str, Any]]:
        """Open a session over there; return its number, and its `outputs` and `placed`."""
        self._refuse_child()
        number = next(self._numbers)
        with self._lock:
            return number, self._call("open_session", number=number, **_model(model, opening))

    def run(self, session: int, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run a session on NumPy arrays; raises as `open`."""
        self._refuse_child()
        with self._lock:
            return decoded(self._call("run_session", number=session, feeds=encoded(feeds)))

    def drop(self, session: int) -> None:
        """Let go of a session."""
        self._refuse_child()
        with self._lock:
            self._call("drop_session", number=session)

    def compile(self, model: str | bytes, opening: Opening, out: str) -> None:
        """Compile a model into the file `out`; raises as `open`."""
        self._refuse_child()
        with self._lock:
            self._call("compile_session", out=out, **_model(model, opening))

    def log(self) -> str:
        """Return the end of what the process wrote to standard output and error."""
        return self._worker.output

    def close(self) -> None:
        """End the process after what it was asked so far. Idempotent."""
        if os.getpid() == self._owner:
            with self._lock:
                self._worker.close()

    def _call(self, function: str, **arguments: Any) -> Any:
        """Call a function over there. With the lock."""
        try:
            return self._worker.call(f"{_SIDE}:{function}", called=function, **arguments)
        except WorkerFailure as failure:
            if failure.kind is FailureKind.EXCEPTION:
                raise WorkerFailed(failure.exceptions[0], failure.error.partition(": ")[2]) from None
            reason = "a run in it was interrupted" if self._interrupted else failure
            msg = f"the QNN worker process {self.pid} has ended: {reason}. This session runs no more; open a new one"
            raise EngineFailed(msg, engine="qnn", device="npu") from None
        except BaseException:
            self._interrupted = True
            raise

    def _refuse_child(self) -> None:
        """Raise in a child of a fork, before the lock, which a thread of the parent may have held."""
        if os.getpid() != self._owner:
            msg = "this session was opened before a fork, and its QNN worker belongs to the parent; open it here again"
            raise EngineError(msg, engine="qnn", device="npu")


def _model(model: str | bytes, opening: Opening) -> dict[str, Any]:
    path = os.path.abspath(model) if isinstance(model, str) else None  # noqa: PTH100 - links stay as they are
    text = base64.b64encode(model).decode() if isinstance(model, bytes) else None
    return {"path": path, "text": text, "opening": msgspec.to_builtins(opening)}


#: The functions that are called over there.
_SIDE = "xpuruntime.engines.qnn.opening"
