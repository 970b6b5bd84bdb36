# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs whose values OpenVINO computes otherwise than ONNX: sessions look at them, since no plan knows values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.arrays import Kind, from_host
from xpuruntime.engines.base import Binding, Observed, closed
from xpuruntime.engines.binding import HostBuffers
from xpuruntime.engines.host_model import HostModel
from xpuruntime.engines.input_binding import ConversionLog, closed_binding, empty_host_array, refuse_stream
from xpuruntime.engines.known_errors import applies_to, inputs_with_errors, known_errors
from xpuruntime.engines.openvino.probing import translate
from xpuruntime.engines.openvino.slots import Slot, SlotPool, infer_call, passed_on, port_order, share
from xpuruntime.errors import InputError, XpuRuntimeError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from xpuruntime import _core
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.run_threads import QueueLimits

#: OpenVINO computes these in 32 bits and wraps what does not fit, so what does not fit is refused.
_WIDE = ("int64", "uint64", "uint32")
_LEAST, _MOST = -(2**31), 2**31 - 1
_FLOATS = ("float32", "float64", "float16", "bfloat16")
#: Elements of which a sum of squares is quicker than a search.
_FEW = 8192
_FIX = "take another engine for such values (execution: {engine: onnxruntime, device: cpu})"


class InputValues:
    """Refuses values of a model's inputs that OpenVINO is known to compute wrongly."""

    def __init__(self, info: ModelInfo, device: str) -> None:
        self._wide = tuple(value.name for value in info.inputs if value.dtype in _WIDE)
        reached = functools.partial(_reached, info, device)
        floats = {value.name for value in info.inputs if value.dtype in _FLOATS}
        self._nodes = {name: node for name, node in reached("nan").items() if name in floats}
        self._empty = reached("empty")

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Refuse integers that would wrap, and NaN of which a node makes a number."""
        for name in self._wide:
            _check_range(name, _numpy(arrays[name]))
        for name, node in self._nodes.items():
            if _has_nan(_numpy(arrays[name])):
                msg = f"input {name!r} holds NaN, of which OpenVINO makes a number in {node}, where ONNX keeps it"
                raise InputError(msg, fix=f"{_FIX}, or replace NaN in {name!r}", engine="openvino")

    def check_sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse inputs without elements, over which a node reads memory that nobody wrote, or ends the process."""
        for name, node in self._empty.items():
            if 0 in shapes[name]:
                msg = (
                    f"input {name!r} has no elements (shape {list(shapes[name])}), and over nothing OpenVINO returns "
                    f"wrong numbers from {node}, or ends the process"
                )
                raise InputError(msg, fix=f"{_FIX}, or do not run for an empty {name!r}", engine="openvino")


def _reached(info: ModelInfo, device: str, values: str) -> dict[str, str]:
    import openvino

    rows = (row for row in known_errors("openvino") if row.values == values)
    reached = dict[str, str]()
    for row in rows:
        if applies_to(row, openvino.__version__, device):
            reached |= inputs_with_errors(info, row)
    return reached


def _numpy(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.numpy()  # a Tensor


def _has_nan(array: Any) -> bool:
    if array.size <= _FEW and array.dtype in (np.float32, np.float64):
        flat = array.ravel()
        return bool(np.isnan(flat.dot(flat)))  # squares are not negative: their sum is NaN where one of them is
    if array.dtype == np.float16 or array.dtype.kind not in "f":
        return bool(np.isnan(array).any())
    return bool(array.size) and bool(np.isnan(array.min()))


def _check_range(name: str, array: np.ndarray[Any, Any]) -> None:
    if array.size and (array.max() > _MOST or array.min() < _LEAST):
        msg = (
            f"input {name!r} holds integers outside {_LEAST}..{_MOST}, and OpenVINO computes {array.dtype.name} in 32 "
            "bits. Fix: use the engine onnxruntime for such values"
        )
        raise InputError(msg)


class OpenVinoModel(HostModel):
    """Runs a compiled model. Each run takes one of its inference requests, and a new one where all are busy."""

    def __init__(
        self,
        compiled: Any,
        reopen: Callable[[], Any],
        info: ModelInfo,
        *,
        device: str,
        strict: bool,
        observer: Callable[[Mapping[str, Any], int], Observed],
        log: ConversionLog,
    ) -> None:
        outputs = [output.name for output in info.outputs]
        pool = SlotPool(compiled, functools.partial(_reopened, reopen, log))
        super().__init__(pool, info, outputs, strict=strict, observer=observer, log=log)
        self.device = device
        self._pool = pool
        #: The inputs in the order of the ports.
        self.names = [info.inputs[index].name for index in port_order(compiled, info)]
        self._failed = functools.partial(_failure, info.path, device)
        self.values = InputValues(info, device)
        self._side_by_side = _side_by_side(compiled)

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return `run` with everything looked up once; what it cannot take as it is goes through `run`."""
        if not self.plain or any(output.dtype == "bfloat16" for output in self._info.outputs):
            return self.checked_run
        names, check, pool, failed = self.names, self.values.check, self._pool, self._failed

        def execute(feeds: dict[str, Any], shapes: tuple[Any, ...]) -> Sequence[Any]:
            check(feeds)
            arrays = [feeds[name] for name in names]
            try:
                slot = pool.free.pop()
            except IndexError:
                slot = pool.take()
            try:
                results = slot.run(arrays, shapes)
            except Exception as error:
                results = _finished(pool, slot, error, arrays, shapes, failed)
            else:
                generation = slot.generation
                if generation.stale:
                    results = _finished(pool, slot, results, arrays, shapes, failed)
                else:
                    generation.free.append(slot)
            return results

        return self.short_run(execute)

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Check, run, and return results in the caller's kind; see `InferenceSession`."""
        self._refuse_constants(feeds)
        return super().run(feeds, stream)

    def run_async(
        self,
        feeds: Mapping[str, Any],
        stream: Any = None,
        *,
        limits: QueueLimits | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Future[dict[str, Any]]:
        """Check, and run in a thread, as many side by side as OpenVINO runs well; see `InferenceSession.run_async`."""
        if self._handle is None:
            closed()
        if self._extended:
            return super().run_async(feeds, stream, limits=limits, outputs=outputs)
        self._refuse_constants(feeds)
        refuse_stream(stream)
        ready, kind = self.ready(feeds)
        arrays = self._in_order(ready)
        names = self._outputs

        def run() -> dict[str, Any]:
            results = dict(zip(names, self._infer(ready, arrays), strict=True))
            return {name: from_host(results[name], kind) for name in (names if outputs is None else outputs)}

        return self.run_threads(self._side_by_side).submit(run, limits=limits)

    def ready(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], Kind]:
        """Return checked inputs; see `HostModel.ready`."""
        ready, kind = super().ready(feeds)
        try:
            self.values.check_sizes({name: tuple(array.shape) for name, array in ready.items()})
        except InputError:
            self._check.forget()  # shapes that passed are not looked at again
            raise
        return ready, kind

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind NumPy buffers; see `InferenceSession.bind`."""
        from xpuruntime.engines.binding import HostBinding

        self.check_bind(stream)
        self._refuse_constants(inputs or {})
        return HostBinding(OpenVinoBuffers(self, inputs or {}, outputs or {}))

    def close(self) -> None:
        """Drop the compiled model; requests that run finish first, those that wait are cancelled."""
        super().close()
        self._pool.close()

    def _observed_feeds(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        ready = super()._observed_feeds(feeds)
        self.values.check(ready)
        return ready

    def _execute(self, handle: Any, ready: Mapping[str, Any]) -> Sequence[Any]:
        del handle  # the pool
        return self._infer(ready, self._in_order(ready))

    def _infer(self, ready: Mapping[str, Any], arrays: Sequence[Any]) -> list[Any]:
        shapes = tuple(ready[info.name].shape for info in self._info.inputs)
        slot = self._pool.take()
        results: list[Any] | Exception
        try:
            results = slot.run(arrays, shapes)
        except Exception as error:
            results = error
        return _finished(self._pool, slot, results, arrays, shapes, self._failed)

    def _execute_tensors(self, handle: Any, tensors: Mapping[str, _core.Tensor]) -> Sequence[_core.Tensor]:
        from xpuruntime.engines.openvino.slots import run_tensors

        self.values.check(tensors)
        ordered = [tensors[name] for name in self.names]
        generation = handle.generation()
        for last in (False, True):
            try:
                results = run_tensors(generation.compiled, ordered, self._info.outputs)
                if last or not generation.broken:
                    break
            except Exception as error:
                if not handle.spoil(generation) or last:
                    raise self._failed(error) from None
            generation = handle.generation()
        handle.drop(generation)
        return results

    def _in_order(self, ready: Mapping[str, Any]) -> list[Any]:
        self.values.check(ready)
        return [ready[name] for name in self.names]

    def _refuse_constants(self, feeds: Mapping[str, Any]) -> None:
        """Refuse a value for an input with a default: OpenVINO makes it a constant when it reads the model."""
        for info in self._info.overridable_inputs:
            if hasattr(feeds, "keys") and info.name in feeds:
                msg = (
                    f"input {info.name!r} has a default in the model, and OpenVINO makes that a constant. "
                    "Fix: leave it "
                    "out, remove the default from the model, or use the engine onnxruntime"
                )
                raise InputError(msg)


def _failure(path: str, device: str, error: Exception) -> XpuRuntimeError:
    return translate(error, doing=f"running {path}", device=device)


def _reopened(reopen: Callable[[], Any], log: ConversionLog) -> Any:
    log.add("model compiled again", "a run failed inside of OpenVINO, which then keeps shapes of its inputs")
    return reopen()


def _finished(
    pool: SlotPool,
    slot: Slot,
    results: list[Any] | Exception,
    arrays: Sequence[Any],
    shapes: tuple[tuple[int, ...], ...],
    failed: Callable[[Exception], XpuRuntimeError],
) -> list[Any]:
    try:
        return pool.finish(slot, results, arrays, shapes)
    except Exception as error:
        raise failed(error) from None


def _side_by_side(compiled: Any) -> int:
    try:
        return max(1, int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")))
    except RuntimeError:
        return 1


class OpenVinoBuffers(HostBuffers):
    """NumPy buffers of one request.

    Where the model fixes the shape of an output, OpenVINO writes straight into its buffer, from the second run on: the
    first shows which outputs have memory of their own. Where the model does not, OpenVINO writes to memory that it
    sizes itself, since it would write past the end of a buffer that is too small; the result is looked at after each
    run, and copied where there is a buffer. An output that is an input passed on has the memory of the input, and one
    whose buffer shares memory with an input would be written while that is read: both are copied after each run.
    """

    def __init__(self, model: OpenVinoModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self._pool, self._failed = model._pool, model._failed
        self._names = model.names
        self._values = model.values
        ports = self._pool.compiled.outputs
        self._ports = dict(zip(model._outputs, ports, strict=True))
        self._static = {name for name, port in self._ports.items() if port.get_partial_shape().is_static}
        #: Tensors that OpenVINO sizes: those whose memory is that of an output, and those that are copied.
        self._tensors: dict[str, Any] = {}
        self._sized: dict[str, Any] = {}
        self._generation: Any = None
        self._set: dict[str, Any] = {}
        #: Outputs in the memory of an input, ``None`` before the first run of a request.
        self._passed: set[str] | None = None
        super().__init__(model, inputs, outputs)

    def _made(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if name in self._static:
            return super()._made(name, shape)
        held = self.outputs.get(name)
        tensor = self._tensors.get(name)
        if tensor is None or held is None or held.shape != shape or self._is_input(held):
            empty_host_array(name, shape, np.uint8)  # raises where there is no room
            self._tensors[name] = tensor = self._tensor(name, shape)
            tensor.data.fill(0)
        array: np.ndarray[Any, Any] = tensor.data
        return array

    def _tensor(self, name: str, shape: tuple[int, ...] = (0,)) -> Any:
        import openvino as ov

        port = self._ports[name]
        return ov.Tensor(port.get_element_type(), port.get_shape() if name in self._static else ov.Shape(shape))

    def arrange(self) -> None:
        """Hand buffers to the request; make another where it cannot be used, or has outputs in memory of an input."""
        self._values.check_sizes({name: array.shape for name, array in self.inputs.items()})
        if self._generation is None or self._generation.broken or self._passed:
            self._drop()
            self._generation = self._pool.generation()
            self._request = self._generation.compiled.create_infer_request()
            self._call = infer_call(self._request)
            self._set, self._passed = {}, None
        try:
            for port, name in enumerate(self._names):
                if self._set.get(name) is not self.inputs[name]:
                    self._request.set_input_tensor(port, share(self.inputs[name]))
                    self._set[name] = self.inputs[name]
            self._set_outputs()
        except Exception as error:
            raise self._failed(error) from None

    def _set_outputs(self) -> None:
        """Choose the memory of outputs, once a run has shown which are in that of an input."""
        self._fresh, self._copies = [], []
        for index, name in enumerate(self._model._outputs):
            if self._passed is None or name in self._passed:
                self._copies.append((index, name, None))
            elif name not in self.fixed:
                self._fresh.append((index, name))
            elif name in self._static and name not in self.copied:
                self._request.set_output_tensor(index, share(self.outputs[name]))
            elif name in self.buffers or name in self.copied:
                if name not in self._sized:
                    self._sized[name] = self._tensor(name, self.outputs[name].shape)
                self._request.set_output_tensor(index, self._sized[name])
                self._copies.append((index, name, self._sized[name]))
            else:
                self._request.set_output_tensor(index, self._tensors[name])
                self._copies.append((index, name, self._tensors[name]))

    def run(self) -> None:
        """Run, and take what OpenVINO made."""
        self._values.check(self.inputs)
        if self.changed:
            self.place()
        try:
            if self._generation.broken:
                self.arrange()
            self._infer()
        except Exception as error:
            self._again(error)
        else:
            if self._generation.broken:
                self._again(None)
        self._take()

    def _take(self) -> None:
        for _, name, tensor in self._new:
            self.outputs[name] = tensor.data
        known = len(self.fixed)
        for index, name, tensor in self._copies:
            data = (self._request.get_output_tensor(index) if tensor is None else tensor).data
            if tensor is None or tensor is not self._tensors.get(name):
                self.copy_result(name, data)
            elif data.shape != self.outputs[name].shape:
                self.untrue(name, data.shape)
                self.outputs[name] = data.copy()
        if self._passed is None:
            passed = passed_on(self._request, self.inputs.values())
            self._passed = {name for index, name in enumerate(self._model._outputs) if index in passed}
            self._set_outputs()
        elif len(self.fixed) != known:
            self._set_outputs()

    def _again(self, error: Exception | None) -> None:
        if not self._pool.spoil(self._generation) and error is not None:
            raise self._failed(error) from None
        try:
            self.arrange()
            self._infer()
        except Exception as second:
            self._pool.spoil(self._generation)
            raise self._failed(second) from None

    def _infer(self) -> None:
        self._new = [(index, name, self._tensor(name)) for index, name in self._fresh]
        for index, _, tensor in self._new:
            self._request.set_output_tensor(index, tensor)
        self._call({}, True, False)

    def _drop(self) -> None:
        if self._generation is not None:
            self._pool.drop(self._generation)
        self._generation = None

    def close(self) -> None:
        """Forget the buffers and the request."""
        super().close()
        self._drop()
        self._request, self._call = None, closed_binding
        self._set, self._tensors, self._sized, self._copies, self._new = {}, {}, {}, [], []
