# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`QnnModel`: a model on QNN, in this process or in a worker; the caller cannot tell which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.onnxruntime.cpu import CopyingBinding, CpuModel
from xpuruntime.engines.onnxruntime.opening import translate
from xpuruntime.engines.qnn.worker import WorkerFailed
from xpuruntime.errors import InputError, XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.qnn.worker import SessionWorker

__all__ = ["QnnModel", "SessionHandle", "WorkerSession", "translated"]


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
    found = translate(error, doing=doing, device="npu")
    found.engine = "qnn"
    return found
