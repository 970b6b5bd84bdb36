# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Static device buffers of one CUDA session, replayed as a CUDA graph where the policy asks for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.arrays import kind_of_feeds
from xpuruntime.engines.base import Binding
from xpuruntime.engines.cuda_arrays import DeviceArray, DeviceBuffers, device_array
from xpuruntime.engines.input_binding import closed_binding, known_outputs
from xpuruntime.engines.onnxruntime._private_api import raw_binding, raw_session
from xpuruntime.engines.onnxruntime.cpu import fits
from xpuruntime.engines.onnxruntime.device_arrays import (
    capturing_alone,
    element_type,
    host_inputs,
    item_size,
    no_capture,
    overlap,
)
from xpuruntime.errors import InputError, UnsupportedOperationError

if TYPE_CHECKING:
    from xpuruntime.engines.model import TensorInfo
    from xpuruntime.engines.onnxruntime.cuda import CudaModel

_WARM_RUNS = 2


class _Copy(NamedTuple):
    """What is copied into the buffer of an output after each run: its address, ``None`` for what ONNX Runtime made."""

    name: str
    source: int | None
    target: DeviceArray


class CudaBinding(Binding):
    """Device buffers bound to one `CudaModel`. Not for use by two threads at once.

    ONNX Runtime writes straight into the buffers, except where it would not or must not: an output that is an input, an
    output whose shape is not the one that the file declares, and a buffer that shares memory with an input. These are
    copied on the device after each run. Inputs that it reads on the host, such as the condition of an ``If``, it copies
    there when they are bound: they are bound again before each run.
    """

    def __init__(self, model: CudaModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        self._model = model
        self.stream = model.stream
        with no_capture():  # of another thread: buffers are made ready on the stream that it captures
            self._bind(inputs, outputs, stream)
        if self._graph_id is not None:
            for _ in range(_WARM_RUNS):
                self.run()
            self.graph = "captured"

    def _bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        model = self._model
        arrays = {n: a for n, a in inputs.items() if not isinstance(a, tuple)}
        kind = kind_of_feeds(arrays)
        buffers = DeviceBuffers(model.device, model.stream, kind)
        caller = model.foreign(stream, buffers.kind)
        check = model.check
        check.names({**dict.fromkeys(check.required), **inputs})
        self._io = model.session.io_binding()
        self._keep: list[Any] = []
        self._items: dict[str, DeviceArray] = {}
        wanted = [name for name in check.infos if name in check.required or name in inputs]
        self.inputs = {name: self._input(check.infos[name], inputs.get(name), buffers) for name in wanted}
        check.full(self._described)
        model.enter()
        self._copies: list[_Copy] = []
        self.outputs = self._make_outputs(outputs, buffers)
        self.graph = model.graph_refused or "off"
        self._graph_id: str | None = model.next_graph_id() if model.graphs and self._can_be_captured() else None
        options = model.run_options(sync=model.stream is None, graph_id=self._graph_id or "-1")
        self.run = self._compile(caller, options)

    def _compile(self, caller: Any, options: Any) -> Any:
        model = self._model
        call, io = raw_session(model.session).run_with_iobinding, raw_binding(self._io)
        own, turn = model.stream, model.turn
        if on_host := [name for name in host_inputs(model.session) if name in self._items]:
            call = self._binding_anew(call, on_host, own if own is not None else caller)
        if self._copies:
            call = self._copying(call, own if own is not None else caller)

        def run_here() -> None:
            try:
                call(io, options)
            except Exception as error:
                if own is not None:
                    own.abort_capture()  # which ONNX Runtime leaves open, so that no later run could use the stream
                raise model.failed(error) from None

        def run_between() -> None:
            own.wait_stream(caller)
            try:
                run_here()
            finally:
                caller.wait_stream(own)

        def run_alone() -> None:
            with turn, model.on_device():
                caller.synchronize()
                run_here()

        if own is None:
            return run_alone
        run = run_here if caller == own else run_between

        def run_in_turn() -> None:
            with turn:
                run()

        def run_on_device() -> None:
            with turn, model.on_device():
                run()

        in_turn = run_on_device if model.several else run_in_turn
        return in_turn if self._graph_id is None else self._capturing_first(run, in_turn)

    def _capturing_first(self, run: Any, in_turn: Any) -> Any:
        """Return `in_turn`, with the first calls of a thread alone: ONNX Runtime captures a graph for each thread."""
        model, local = self._model, threading.local()

        def run_captured() -> None:
            runs = getattr(local, "runs", 0)
            if runs >= _WARM_RUNS:
                in_turn()
                return
            with capturing_alone(), model.on_device():
                model.captured = True
                run()
            local.runs = runs + 1

        return run_captured

    def _binding_anew(self, call: Any, names: list[str], stream: Any) -> Any:
        """Return `call` with inputs bound before it, when what was written into them on a stream has arrived."""
        index = self._model.index
        values = [(name, self._items[name]) for name in names]
        codes = [
            (name, "cuda", index, element_type(name, item.dtype), item.shape, item.pointer) for name, item in values
        ]

        def run(io: Any, options: Any) -> None:
            stream.synchronize()
            for code in codes:
                self._io.bind_input(*code)
            call(io, options)

        return run

    def _can_be_captured(self) -> bool:
        """Say whether every run uses the same memory; `graph` then says why not."""
        loose = next((copy.name for copy in self._copies if copy.source is None), None)
        if loose is None:
            return True
        model = self._model
        self.graph = f"the file declares another shape for output {loose!r} than it has"
        if model.settings.graph == "require":
            msg = (
                f"{model.info.path} cannot be captured as a CUDA graph: {self.graph}. Correct the shape in the file, "
                "or state cuda_graph: prefer to run it without"
            )
            raise UnsupportedOperationError(msg, engine="onnxruntime", device=model.device)
        return False

    def _copying(self, call: Any, stream: Any) -> Any:
        from xpuruntime import _core

        model, copies = self._model, self._copies
        loose = {copy.name: model.output_names.index(copy.name) for copy in copies if copy.source is None}

        def run(io: Any, options: Any) -> None:
            for name in loose:  # ONNX Runtime takes what it made in one run for a buffer in the next
                io.bind_output(name, model.where)
            call(io, options)
            values = io.get_outputs() if loose else []
            for copy in copies:
                shape, address = copy.target.shape, copy.source
                if address is None:
                    value = values[loose[copy.name]]
                    shape, address = tuple(value.shape()), value.data_ptr()
                if shape != copy.target.shape:
                    msg = (
                        f"output {copy.name!r} changed its shape from {list(copy.target.shape)} to {list(shape)}: it "
                        "depends on the values of the inputs, so it has no fixed buffer. Fix: use run()"
                    )
                    raise InputError(msg)
                if address and copy.target.pointer and 0 not in shape:
                    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
                    size = item_size(copy.target.dtype)
                    _core.copy_to_contiguous(model.device, address, copy.target.pointer, shape, strides, size, stream)

        return run

    def _bind_output(self, name: str, item: DeviceArray) -> None:
        """Bind a buffer, or memory that is copied into it after each run."""
        from xpuruntime import _core

        model = self._model
        input_item = self._items.get(name)
        if input_item is not None:
            self._copies.append(_Copy(name, input_item.pointer, item))
            if not fits(item.shape, self._declared[name]):
                return
        elif not fits(item.shape, self._declared[name]):
            self._copies.append(_Copy(name, None, item))
            return
        elif any(overlap(item, input_) for input_ in self._items.values()):
            tensor = _core.Tensor.empty(item.shape, item.dtype, model.device, stream=model.stream)
            self._copies.append(_Copy(name, tensor.data_ptr, item))
            item = device_array(name, tensor, "tensor", model.device, model.stream)
            self._keep.append((item, tensor))
        self._io.bind_output(name, "cuda", model.index, element_type(name, item.dtype), item.shape, item.pointer)

    @property
    def _described(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (item.dtype, item.shape) for name, item in self._items.items()}

    def _input(self, info: TensorInfo, buffer: Any, buffers: DeviceBuffers) -> Any:
        model = self._model
        array, item = buffers.input(info, buffer)
        self._items[info.name] = item
        self._keep.append((item, array))
        self._io.bind_input(
            info.name, "cuda", model.index, element_type(info.name, item.dtype), item.shape, item.pointer
        )
        return array

    def _make_outputs(self, stated_outputs: Mapping[str, Any], buffers: DeviceBuffers) -> dict[str, Any]:
        model = self._model
        known_outputs(stated_outputs, model.output_names)
        probe = raw_binding(self._io)
        for name in model.output_names:
            probe.bind_output(name, model.where)
        try:
            with model.turn, model.on_device():
                raw_session(model.session).run_with_iobinding(probe, model.run_options(sync=True))
        except Exception as error:
            raise model.failed(error) from None
        capsules = model.take(probe)
        outputs: dict[str, Any] = {}
        placed: dict[str, DeviceArray] = {}
        self._declared = {output.name: output.shape for output in model.session.get_outputs()}
        for name, capsule in zip(model.output_names, capsules, strict=True):
            expected = model.output(capsule, "tensor", self.stream)
            array, item = buffers.output(name, expected.dtype, tuple(expected.shape), stated_outputs.get(name))
            self._keep.append((item, array))
            outputs[name] = array
            for other, buffer in placed.items():
                if overlap(item, buffer):
                    msg = f"the buffers of outputs {other!r} and {name!r} share memory. Fix: give each its own"
                    raise InputError(msg)
            placed[name] = item
            self._bind_output(name, item)
        return outputs

    def close(self) -> None:
        """Release the captured graph and the buffers this binding made."""
        try:
            if self._graph_id is not None and self._io is not None:
                with no_capture():
                    session = self._model._session  # None after the session was closed, which another thread may do
                    if session is not None:
                        session.release_captured_graph(int(self._graph_id))
        finally:
            self.run = closed_binding
            self._io = None
            self._keep.clear()
            self.inputs, self.outputs = {}, {}
