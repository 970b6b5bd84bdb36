# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model loaded by ONNX Runtime on the CPU provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.arrays import from_host, kind_of, kind_of_feeds, to_host
from xpuruntime.engines.base import Binding, LoadedModel, closed
from xpuruntime.engines.feeds import (
    ConversionLog,
    FeedCheck,
    closed_binding,
    fixed_shape,
    is_tensor,
    known_outputs,
    refuse_stream,
    room,
    type_name,
)
from xpuruntime.engines.onnxruntime.failures import translate
from xpuruntime.errors import InputError, XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.engines.onnxruntime.opening import Opened
    from xpuruntime.evidence.records import Conversion

__all__ = ["CpuBinding", "CpuModel"]

#: A type that NumPy itself does not have: it travels through DLPack.
_EXTENDED = "bfloat16"


class CpuModel(LoadedModel):
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
        self._session: Any = opened.session
        self._info = info
        self._strict = strict
        self._observer = observer
        self._log = log
        self._outputs = [o.name for o in self._session.get_outputs()]
        defaults = info.overridable_inputs
        self._check = FeedCheck((*info.inputs, *defaults), [i.name for i in defaults])
        self._extended = any(t.dtype == _EXTENDED for t in (*info.inputs, *info.outputs))

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return `run` with everything looked up once; what it cannot take as it is goes through `run`."""
        call = self._session._sess.run
        names = self._outputs
        seen = self._check._seen
        slow = self.run
        infos = self._info.inputs
        if self._extended or not all(is_tensor(info) and info.dtype != "string" for info in infos):
            return slow
        inputs = tuple((info.name, np.dtype(info.dtype)) for info in infos)
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
            except (KeyError, TypeError):
                return slow(feeds, stream)
            try:
                return dict(zip(names, call(names, feeds, None), strict=True))
            except Exception as error:
                raise self._failed(error) from None

        return run

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Check, run, and return results in the caller's kind; see `InferenceSession`."""
        session = self._session
        if session is None:
            closed()
        refuse_stream(stream)
        self._check.names(feeds)
        kind = kind_of_feeds({n: a for n, a in feeds.items() if is_tensor(self._check.infos[n])})
        if self._extended:
            return self._run_dlpack(feeds, kind)
        ready = self._check.on_host(feeds, strict=self._strict, log=self._log)
        if len(ready) == len(self._info.inputs) and all(map(is_tensor, self._info.inputs)):
            self._check.remember(tuple(ready[i.name].shape for i in self._info.inputs))
        try:
            results = session._sess.run(self._outputs, ready, None)
        except Exception as error:
            raise self._failed(error) from None
        return {name: from_host(value, kind) for name, value in zip(self._outputs, results, strict=True)}

    def _run_dlpack(self, feeds: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        values = self._through_dlpack(feeds)
        try:
            results = self._session._sess.run_with_ort_values(values, self._outputs, None)
        except Exception as error:
            raise self._failed(error) from None
        return {name: _result(value, kind) for name, value in zip(self._outputs, results, strict=True)}

    def _through_dlpack(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        from xpuruntime import _core

        values, described = {}, {}
        for name, array in feeds.items():
            tensor = array
            if kind_of(name, array) == "numpy":
                tensor = _core.Tensor.from_numpy(array)
            else:
                tensor = _core.Tensor.from_dlpack(array)
            described[name] = (tensor.dtype, tuple(tensor.shape))
            if tensor.device != "cpu":
                msg = f"input {name!r} is on {tensor.device}, but this session runs on the CPU; move it first"
                raise InputError(msg)
            if not tensor.is_contiguous:
                if self._strict:
                    msg = f"input {name!r} is not C-contiguous and the policy is strict; pass a contiguous tensor"
                    raise InputError(msg)
                self._log.add(f"input {name!r} copied once", "it was not C-contiguous")
                tensor = tensor.contiguous()
            values[name] = state.OrtValue.from_dlpack(tensor.__dlpack__(), tensor.dtype == "bool")
        self._check.full(described)
        return values

    def _failed(self, error: Exception) -> XpuRuntimeError:
        return translate(error, doing=f"running {self._info.path}", device="cpu")

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind NumPy buffers; see `InferenceSession.bind`."""
        refuse_stream(stream)
        if self._session is None:
            closed()
        if self._extended:
            msg = "bind() on the CPU takes NumPy types only, and this model has bfloat16 inputs or outputs; use run()"
            raise InputError(msg)
        return CpuBinding(self, inputs or {}, outputs or {})

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run an instrumented copy; see `LoadedModel.observe`."""
        if self._session is None:
            closed()
        if self._extended:
            return self._observer(self._through_dlpack(feeds), runs)
        return self._observer(self._check.on_host(feeds, strict=self._strict, log=self._log), runs)

    def conversions(self) -> Sequence[Conversion]:
        """Return what was copied so far."""
        return self._log.records()

    def close(self) -> None:
        """Drop the session; runs in other threads finish first, since they hold it."""
        self._session = None
        self._check.forget()


class CpuBinding(Binding):
    """NumPy buffers bound to one `CpuModel`. Not for use by two threads at once."""

    def __init__(self, model: CpuModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        import onnxruntime as ort

        session = model._session
        check = model._check
        self.graph = "off"
        check.names({**dict.fromkeys(check.required), **inputs})
        wanted = [name for name in check.infos if name in check.required or name in inputs]
        bound = {name: _input_buffer(check.infos[name], inputs.get(name)) for name in wanted}
        check.full({name: (type_name(a, check.infos[name]), a.shape) for name, a in bound.items()})
        known_outputs(outputs, model._outputs)
        shapes = _output_shapes(model, bound)
        made = {name: _output_buffer(name, shapes[name], outputs.get(name)) for name in model._outputs}
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


def _result(value: Any, kind: Any) -> Any:
    import sys

    from xpuruntime import _core

    tensor = _core.Tensor.from_dlpack(value)
    if kind == "torch":
        return sys.modules["torch"].from_dlpack(tensor)
    return tensor if kind == "tensor" else tensor.numpy()


def _input_buffer(info: TensorInfo, given: Any) -> np.ndarray[Any, Any]:
    if given is None or isinstance(given, tuple) or info.dtype == "string" or not is_tensor(info):
        return room(info.name, fixed_shape(info, given), np.dtype(info.dtype))
    array = to_host(info.name, given, kind_of(info.name, given))
    if not array.flags.c_contiguous:
        msg = (
            f"input {info.name!r} is not C-contiguous, so its memory cannot be bound; pass "
            "np.ascontiguousarray(x), or its shape"
        )
        raise InputError(msg)
    return array


def _output_shapes(model: CpuModel, bound: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return name to (shape, dtype), by running once: the only way that is right for every model."""
    results = model.run(dict(bound))
    for name, value in results.items():
        if not isinstance(value, np.ndarray):
            msg = f"output {name!r} is no tensor, so it has no fixed buffer; use run()"
            raise InputError(msg)
    return {name: (value.shape, value.dtype) for name, value in results.items()}


def _output_buffer(name: str, expected: tuple[tuple[int, ...], Any], given: Any) -> np.ndarray[Any, Any]:
    shape, dtype = expected
    if dtype.kind == "O":
        msg = f"output {name!r} holds strings, which have no fixed buffer; use run()"
        raise InputError(msg)
    if given is None:
        return room(name, shape, dtype)
    if not hasattr(given, "__dlpack__"):
        msg = f"output {name!r} is given as a {type(given).__name__}; pass an array to write into, or leave it out"
        raise InputError(msg)
    array = to_host(name, given, kind_of(name, given))
    if array.dtype != dtype or array.shape != shape:
        msg = (
            f"output {name!r} is {dtype.name} {list(shape)} for these inputs, got {array.dtype.name} "
            f"{list(array.shape)}"
        )
        raise InputError(msg)
    if not array.flags.c_contiguous or not array.flags.writeable:
        msg = f"output {name!r} must be C-contiguous and writable to be bound"
        raise InputError(msg)
    return array
