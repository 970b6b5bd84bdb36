# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model loaded by ONNX Runtime on the CPU provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.binding import HostBinding, HostBuffers, writes_cache
from xpuruntime.engines.host_model import HostModel
from xpuruntime.engines.model.shapes import shape_fits
from xpuruntime.engines.onnxruntime._private_api import (
    raw_binding,
    raw_session,
    value_from_array,
    value_from_dlpack,
)
from xpuruntime.engines.onnxruntime.device_arrays import ONNX_TYPES
from xpuruntime.engines.onnxruntime.opening import Opened, translate
from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from xpuruntime import _core
    from xpuruntime.engines.base import Binding, Observed
    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.model import ModelInfo


class CpuModel(HostModel):
    """Runs on the CPU provider; NumPy in, NumPy out, other frameworks through DLPack without copies."""

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
        inputs = {input_.name for input_ in info.inputs}
        self._passed = tuple(i for i, name in enumerate(self._outputs) if name in inputs)
        #: Options of the next run alone.
        self._once: Any = None

    def release_idle(self) -> None:
        """Have the next run shrink the arena, but for its first region."""
        import onnxruntime as ort

        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._once = options

    def _options(self) -> Any:
        options, self._once = self._once, None
        return options

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return `run` with everything looked up once; what it cannot take as it is goes through `run`."""
        if not self.plain or self._passed:
            return self.checked_run
        call, names = raw_session(self._handle).run, self._outputs

        def execute(feeds: dict[str, Any], _: tuple[Any, ...]) -> Sequence[Any]:
            once, self._once = self._once, None
            try:
                results: Sequence[Any] = call(names, feeds, once)
            except Exception as error:
                raise self._failed(error) from None
            return results

        return self.short_run(execute)

    def _execute(self, handle: Any, ready: Mapping[str, Any]) -> Sequence[Any]:
        try:
            results: list[Any] = raw_session(handle).run(self._outputs, ready, self._options())
        except Exception as error:
            raise self._failed(error) from None
        for position in self._passed:  # ONNX Runtime 1.24 returns the caller's own memory
            if np.may_share_memory(results[position], ready[self._outputs[position]]):
                results[position] = results[position].copy()
        return results

    def _execute_tensors(self, handle: Any, tensors: Mapping[str, _core.Tensor]) -> Sequence[_core.Tensor]:
        from xpuruntime import _core

        try:
            results = raw_session(handle).run_with_ort_values(_values(tensors), self._outputs, self._options())
        except Exception as error:
            raise self._failed(error) from None
        pointers = {tensor.data_ptr for tensor in tensors.values()}
        shared = (_core.Tensor.from_dlpack(value) for value in results)
        return [
            tensor.copy() if tensor.data_ptr in pointers else tensor for tensor in shared
        ]  # an output that is an input

    def _observed_feeds(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        ready, _ = self.ready(feeds)
        return _values(ready) if self._extended else ready

    def _failed(self, error: Exception) -> XpuRuntimeError:
        return translate(error, doing=f"running {self._info.path}", device="cpu")

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind NumPy buffers; see `InferenceSession.bind`."""
        self.check_bind(stream)
        return HostBinding(_CpuBuffers(self, inputs or {}, outputs or {}))


class _CpuBuffers(HostBuffers):
    """Buffers that ONNX Runtime writes straight into, except where it would not or must not."""

    # It makes an output that is an input, one whose sizes it knows otherwise, and one whose buffer shares memory with
    # an input that no operator writes in place; these are copied after each run where they have a buffer.

    def __init__(self, model: CpuModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        session = model._handle
        self._io = session.io_binding()
        self._call, self._raw, self._failed = (
            raw_session(session).run_with_iobinding,
            raw_binding(self._io),
            model._failed,
        )
        self._copies = isinstance(self._io, CopyingBinding)
        self._declared = {} if self._copies else {output.name: output.shape for output in session.get_outputs()}
        self._loose: list[tuple[int, str]] = []
        #: Outputs of sizes that no run has shown to be true.
        self._unproven: set[str] = set()
        super().__init__(model, inputs, outputs)

    def in_place(self, source: str, name: str) -> bool:
        mine, theirs = self.buffers.get(name), self.inputs[source]
        same = mine is not None and mine.ctypes.data == theirs.ctypes.data and mine.nbytes == theirs.nbytes
        return same and not self._copies and writes_cache(self._model._info, source, name)

    def arrange(self) -> None:
        import onnxruntime as ort

        for name, array in self.inputs.items():
            self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cpu", 0))
        self._loose = []
        for index, name in enumerate(self._model._outputs):
            if self._made_there(name):
                self._loose.append((index, name))
                self._io.bind_output(name, "cpu")
            else:
                self._io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(self.outputs[name], "cpu", 0))
        self._unproven = self.fixed.difference(self.buffers, {name for _, name in self._loose})

    def _made_there(self, name: str) -> bool:
        array = self.outputs.get(name)
        if array is None:
            return True
        if self._copies or name in self.inputs or name in self.copied:
            return True
        return not fits(array.shape, self._declared[name])

    def run(self) -> None:
        if self.changed:
            self.place()
        for _, name in self._loose:  # ONNX Runtime takes what it made in one run for a buffer in the next
            self._io.bind_output(name, "cpu")
        try:
            self._call(self._raw, None)
        except Exception as error:
            self._again(error)
        if self._unproven:
            self._unproven = set()
        if self._loose:
            values = self._io.get_outputs()
            for index, name in self._loose:
                self._take(name, values[index].numpy())

    def _take(self, name: str, result: np.ndarray[Any, Any]) -> None:
        if name in self.fixed or name in self.inputs:
            self.copy_result(name, result)
        else:
            self.outputs[name] = result

    def _again(self, error: Exception) -> None:
        """Run once more with outputs that ONNX Runtime makes, where the sizes in the file may be untrue; else raise."""
        places = [(index, name) for index, name in enumerate(self._model._outputs) if name in self._unproven]
        if not places:
            raise self._failed(error) from None
        for _, name in places:
            self._io.bind_output(name, "cpu")
        try:
            self._call(self._raw, None)
        except Exception:
            raise self._failed(error) from None
        values = self._io.get_outputs()
        for index, name in places:
            result = values[index].numpy()
            if result.shape != self.outputs[name].shape:
                self.untrue(name, result.shape)
                self.outputs[name] = result
            else:
                np.copyto(self.outputs[name], result)
        self.changed = True

    def close(self) -> None:
        super().close()
        self._io = self._raw = None


class CopyingBinding:
    """A binding whose session makes all results itself, to be copied into buffers after each run."""


def fits(shape: tuple[int, ...], declared: Sequence[Any] | None) -> bool:
    """Return whether ONNX Runtime takes a buffer of this shape for an output that is declared so."""
    return not declared or shape_fits(shape, declared)  # of rank 0, or not known


def _values(tensors: Mapping[str, _core.Tensor]) -> dict[str, Any]:
    return {name: _value(tensor) for name, tensor in tensors.items()}


def _value(tensor: _core.Tensor) -> Any:
    if not tensor.readonly:
        return value_from_dlpack(tensor.__dlpack__(), tensor.dtype == "bool")
    array = tensor.numpy()
    if tensor.dtype == "bfloat16":
        array = array.view(np.uint16)
    return value_from_array(array, ONNX_TYPES[tensor.dtype])
