# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model loaded by ONNX Runtime on the CPU provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.base import Binding
from xpuruntime.engines.conversion_log import ConversionLog
from xpuruntime.engines.host_model import HostModel, bound_buffers, overlapping
from xpuruntime.engines.input_binding import closed_binding
from xpuruntime.engines.model.shapes import shape_fits
from xpuruntime.engines.onnxruntime._private_api import (
    raw_binding,
    raw_session,
    value_from_array,
    value_from_dlpack,
)
from xpuruntime.engines.onnxruntime.device_arrays import ONNX_TYPES
from xpuruntime.engines.onnxruntime.failures import translate
from xpuruntime.errors import InputError, XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xpuruntime import _core
    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.onnxruntime.opening import Opened

__all__ = ["CopyingBinding", "CpuBinding", "CpuModel", "fits"]


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
        inputs = {one.name for one in info.inputs}
        self._passed = tuple(i for i, name in enumerate(self._outputs) if name in inputs)

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return `run` with everything looked up once; what it cannot take as it is goes through `run`."""
        slow = self.run
        if not self.plain or self._passed:
            return slow
        call = raw_session(self._handle).run
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
            results: list[Any] = raw_session(handle).run(self._outputs, ready, None)
        except Exception as error:
            raise self._failed(error) from None
        for position in self._passed:  # ONNX Runtime 1.23 returns the caller's own memory
            if np.may_share_memory(results[position], ready[self._outputs[position]]):
                results[position] = results[position].copy()
        return results

    def _execute_tensors(self, handle: Any, tensors: Mapping[str, _core.Tensor]) -> Sequence[_core.Tensor]:
        from xpuruntime import _core

        try:
            results = raw_session(handle).run_with_ort_values(_values(tensors), self._outputs, None)
        except Exception as error:
            raise self._failed(error) from None
        given = {tensor.data_ptr for tensor in tensors.values()}
        shared = (_core.Tensor.from_dlpack(value) for value in results)
        return [one.copy() if one.data_ptr in given else one for one in shared]  # an output that is an input

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
    """NumPy buffers bound to one `CpuModel`. Not for use by two threads at once.

    ONNX Runtime writes straight into the buffers, except where it would not or must not: an output that is an input, an
    output whose shape is not the one that the file declares, and a buffer that shares memory with an input. These are
    copied after each run.
    """

    def __init__(self, model: CpuModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        import onnxruntime as ort

        session = model._handle
        self.graph = "off"
        bound, made = bound_buffers(model, inputs, outputs)
        self.inputs, self.outputs = bound, made
        self._io = session.io_binding()
        for name, array in bound.items():
            self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cpu", 0))
        shared = overlapping(bound, made, strict=model._strict, log=model._log)
        loose = [] if isinstance(self._io, CopyingBinding) else _left_to_session(session, bound, made, shared)
        for name, array in made.items():
            if name in loose:
                self._io.bind_output(name, "cpu")
            else:
                self._io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array, "cpu", 0))
        call, io, failed = raw_session(session).run_with_iobinding, raw_binding(self._io), model._failed

        def run() -> None:
            try:
                call(io, None)
            except Exception as error:
                raise failed(error) from None

        places = [(list(made).index(name), name, made[name]) for name in loose]
        binding = self._io

        def run_and_copy() -> None:
            for name in loose:  # ONNX Runtime takes what it made in one run for a buffer in the next
                binding.bind_output(name, "cpu")
            run()
            values = binding.get_outputs()
            for place, name, target in places:
                _copy_result(name, values[place].numpy(), target)

        self.run = run_and_copy if loose else run

    def close(self) -> None:
        """Release the binding; the arrays live on while you hold them."""
        self.run = closed_binding
        self._io = None
        self.inputs, self.outputs = {}, {}


class CopyingBinding:
    """A binding that copies all results into its buffers after each run."""


def _left_to_session(session: Any, inputs: Iterable[str], made: Mapping[str, Any], shared: Iterable[str]) -> list[str]:
    """Return the outputs for which ONNX Runtime has to make the memory.

    It refuses a buffer of another shape than the file declares, and writes nothing into that of an output that is an
    input.
    """
    declared = {output.name: output.shape for output in session.get_outputs()}
    names = {*inputs, *shared}
    return [name for name, array in made.items() if name in names or not fits(array.shape, declared[name])]


def _copy_result(name: str, result: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """Copy the result of a run into its buffer.

    Raises
    ------
    InputError
        It has another shape.
    """
    if result.shape != target.shape:
        msg = (
            f"output {name!r} changed its shape from {list(target.shape)} to {list(result.shape)}: it depends on the "
            "values of the inputs, so it has no fixed buffer; use run()"
        )
        raise InputError(msg)
    np.copyto(target, result)


def fits(shape: tuple[int, ...], declared: Sequence[Any] | None) -> bool:
    """Return whether ONNX Runtime takes a buffer of this shape for an output that is declared so."""
    return not declared or shape_fits(shape, declared)  # of rank 0, or not known


def _values(tensors: Mapping[str, _core.Tensor]) -> dict[str, Any]:
    """Return tensors as ONNX Runtime takes them, sharing their memory."""
    return {name: _value(tensor) for name, tensor in tensors.items()}


def _value(tensor: _core.Tensor) -> Any:
    if not tensor.readonly:
        return value_from_dlpack(tensor.__dlpack__(), tensor.dtype == "bool")
    array = tensor.numpy()
    if tensor.dtype == "bfloat16":
        array = array.view(np.uint16)
    return value_from_array(array, ONNX_TYPES[tensor.dtype])
