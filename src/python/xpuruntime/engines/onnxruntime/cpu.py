# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model loaded by ONNX Runtime on the CPU provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.base import Binding
from xpuruntime.engines.feeds import ConversionLog, closed_binding
from xpuruntime.engines.host_model import HostModel, bound_buffers
from xpuruntime.engines.onnxruntime.failures import translate
from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime import _core
    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.onnxruntime.opening import Opened

__all__ = ["CpuBinding", "CpuModel"]


class CpuModel(HostModel):
    """Runs on the CPU provider; NumPy in, NumPy out, other frameworks through DLPack without copies.

    Parameters
    ----------
    opened : Opened
    info : ModelInfo
    strict : bool
        Refuse what would need a copy instead of copying once and saying so.
    observer : callable
        ``observer(feeds, runs) -> Observed``.
    log : ConversionLog
    """

    def __init__(
        self,
        opened: Opened,
        info: ModelInfo,
        *,
        strict: bool,
        observer: Callable[[Mapping[str, Any], int], Observed],
        log: ConversionLog,
    ) -> None:
        super().__init__(
            opened.session,
            info,
            [o.name for o in opened.session.get_outputs()],
            optional=info.overridable_inputs,
            strict=strict,
            observer=observer,
            log=log,
        )

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return `run` with everything looked up once; what it cannot take as it is goes through `run`."""
        slow = self.run
        if not self.plain:
            return slow
        call = self._handle._sess.run
        names = self._outputs
        seen = self._check._seen
        inputs = tuple((info.name, np.dtype(info.dtype)) for info in self._info.inputs)
        count = len(inputs)
        array_type = np.ndarray

        def run(feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
            try:
                if len(feeds) != count or stream is not None:
                    return slow(feeds, stream)
                shapes = []
                for name, dtype in inputs:
                    array = feeds[name]
                    if type(array) is not array_type or array.dtype != dtype or not array.flags.c_contiguous:
                        return slow(feeds, stream)
                    shapes.append(array.shape)
                if tuple(shapes) not in seen:
                    return slow(feeds, stream)
            except XpuRuntimeError:
                raise
            except Exception:  # such as IndexError of an array in place of a dict; `slow` says what is wrong
                return slow(feeds, stream)
            try:
                return dict(zip(names, call(names, feeds, None), strict=True))
            except Exception as error:
                raise self._failed(error) from None

        return run

    def _execute(self, handle: Any, ready: Mapping[str, Any]) -> Sequence[Any]:
        try:
            results: Sequence[Any] = handle._sess.run(self._outputs, ready, None)
        except Exception as error:
            raise self._failed(error) from None
        return results

    def _execute_tensors(self, handle: Any, tensors: Mapping[str, _core.Tensor]) -> Sequence[_core.Tensor]:
        from xpuruntime import _core

        try:
            results = handle._sess.run_with_ort_values(_values(tensors), self._outputs, None)
        except Exception as error:
            raise self._failed(error) from None
        return [_core.Tensor.from_dlpack(value) for value in results]

    def _observed_feeds(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        ready, _ = self.ready(feeds)
        return _values(ready) if self._extended else ready

    def _failed(self, error: Exception) -> XpuRuntimeError:
        return translate(error, doing=f"running {self._info.path}", device="cpu")

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind NumPy buffers; see `InferenceSession.bind`."""
        self.check_bind(stream)
        return CpuBinding(self, inputs or {}, outputs or {})


class CpuBinding(Binding):
    """NumPy buffers bound to one `CpuModel`. Not for use by two threads at once."""

    def __init__(self, model: CpuModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        import onnxruntime as ort

        session = model._handle
        self.graph = "off"
        bound, made = bound_buffers(model, inputs, outputs)
        self.inputs, self.outputs = bound, made
        self._io = session.io_binding()
        for name, array in bound.items():
            self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cpu", 0))
        for name, array in made.items():
            self._io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array, "cpu", 0))
        call, io, failed = session._sess.run_with_iobinding, self._io._iobinding, model._failed

        def run() -> None:
            try:
                call(io, None)
            except Exception as error:
                raise failed(error) from None

        self.run = run

    def close(self) -> None:
        """Release the binding; the arrays live on while you hold them."""
        self.run = closed_binding
        self._io = None
        self.inputs, self.outputs = {}, {}


def _values(tensors: Mapping[str, _core.Tensor]) -> dict[str, Any]:
    """Return tensors as ONNX Runtime takes them, sharing their memory."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return {n: state.OrtValue.from_dlpack(t.__dlpack__(), t.dtype == "bool") for n, t in tensors.items()}
