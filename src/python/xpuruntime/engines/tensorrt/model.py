# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model loaded by TensorRT or TensorRT-RTX, and its bound buffers.

Each slot computes on a stream of its own. A run is put between two waits on the device: the slot's stream waits for the
caller's, and the caller's waits for the slot's. The host waits only where results go to NumPy. Outputs are tensors of
ours, in the order of the slot's stream, and are not given away before the caller's stream is done with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.arrays import Kind, kind_of, kind_of_feeds
from xpuruntime.engines.base import Binding, LoadedModel, Observed, Request, closed
from xpuruntime.engines.cuda_arrays import (
    DeviceArray,
    DeviceBuffers,
    as_kind,
    caller_stream,
    device_array,
    host_copies,
    made_current,
    several_devices,
    stream_owner,
)
from xpuruntime.engines.input_binding import ConversionLog, InputValidator, closed_binding, known_outputs
from xpuruntime.engines.model.shapes import with_shapes
from xpuruntime.engines.tensorrt.building import build, cache_file, prepare
from xpuruntime.engines.tensorrt.handle import Handle, Slot, Slots, unfit
from xpuruntime.engines.tensorrt.network import Cancel, interruptible
from xpuruntime.engines.tensorrt.options import TensorRtProduct, TensorRtSettings, bindings
from xpuruntime.engines.tensorrt.refusals import Record, SerializedEngine, read_artifact
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeError

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.evidence.records import Conversion


class TensorRtModel(LoadedModel):
    """CUDA arrays in, CUDA arrays of the caller's kind out; NumPy in, NumPy out."""

    def __init__(
        self,
        handle: Handle,
        info: ModelInfo,
        *,
        request: Request,
        log: ConversionLog,
    ) -> None:
        self.handle = handle
        self.device = handle.device
        self.index = int(handle.device.partition(":")[2] or 0)
        self.settings = handle.settings
        self._info = info
        self._request = request
        self._log = log
        self.check = InputValidator(info.inputs, equal=True)
        self.borders = handle.borders()
        self.output_names = [output.name for output in info.outputs]
        on_host = [name for name, border in self.borders.items() if border.host]
        if on_host:
            msg = (
                f"the engine of {info.path} wants {on_host[0]!r} on the host, as it decides sizes. "
                "Fix: make it a constant"
            )
            raise UnsupportedOperationError(msg, engine=handle.product.name, device=self.device)
        self.slots = Slots(lambda: Slot(handle), int(handle.settings.options.get("contexts", "1")))
        self._several = several_devices()
        self._open = True

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Check, run, and return results in the caller's kind; see `InferenceSession`."""
        if not self._open:
            closed()
        self.check.names(feeds)
        kinds = {name: kind_of(name, array) for name, array in feeds.items()}
        kind: Kind = next((kind for kind in kinds.values() if kind != "numpy"), "numpy")
        if kind == "numpy" and stream is not None:
            msg = "stream= orders device arrays, and these inputs are NumPy, for which run() waits itself. Leave it out"
            raise InputError(msg)
        with self.on_device(), self.slots.slot() as slot:
            if kind == "numpy":
                return self._run_host(slot, feeds)
            caller = self.foreign(stream, kind)
            slot.stream.wait_stream(caller)
            try:
                items = {name: self._item(name, array, kinds[name], slot.stream) for name, array in feeds.items()}
                self.check.admit({name: (item.dtype, item.shape) for name, item in items.items()})
                results = self._execute(slot, items)
                self._used(slot, items, kinds)
            finally:
                caller.wait_stream(slot.stream)
            for tensor in results.values():
                tensor.record_use(caller)
            return {name: as_kind(tensor, kind) for name, tensor in results.items()}

    @staticmethod
    def _used(slot: Slot, items: Mapping[str, DeviceArray], kinds: Mapping[str, Kind]) -> None:
        """See to it that nobody gets the memory of inputs before the run has read them."""
        # Torch and CuPy give memory away in the order of the caller's stream, which waits for the run.
        from xpuruntime import _core

        for item in items.values():
            if isinstance(item.owner, _core.Tensor):
                item.owner.record_use(slot.stream)
        slot.keep([items[name].owner for name, kind in kinds.items() if kind in ("dlpack", "jax")])

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Make the session's device current: the library expects it, and does not see to it in each call."""
        return made_current(self.device, several=self._several)

    def _run_host(self, slot: Slot, feeds: Mapping[str, Any]) -> dict[str, Any]:
        hosts = self.check.on_host(feeds, strict=self.settings.strict, log=self._log)
        items = {name: self.upload(array, slot.stream) for name, array in hosts.items()}
        results = self._execute(slot, items)
        # A copy to memory of the host that is not pinned has ended when it returns.
        return {name: tensor.to("cpu", stream=slot.stream).numpy() for name, tensor in results.items()}

    def upload(self, host: Any, stream: Any) -> DeviceArray:
        """Return a host array copied to the device in the order of `stream`."""
        from xpuruntime import _core

        tensor = _core.Tensor.from_numpy(host).to(self.device, stream=stream)
        return DeviceArray(tensor.data_ptr, tensor.dtype, tuple(tensor.shape), True, tensor)

    def _item(self, name: str, array: Any, kind: Kind, stream: Any) -> DeviceArray:
        if kind == "numpy":
            host = self.check.contiguous(name, array, strict=self.settings.strict, log=self._log)
            self._log.add(f"input {name!r} copied to {self.device}", "it was a NumPy array among device arrays")
            return self.upload(host, stream)
        item = device_array(name, array, kind, self.device, stream)
        reason = unfit(item)
        if reason is None:
            return item
        if self.settings.strict:
            msg = f"input {name!r} {reason} and the policy is strict. Fix: pass x.clone() (torch) or a copy"
            raise InputError(msg)
        from xpuruntime import _core

        self._log.add(f"input {name!r} copied once", f"it {reason}")
        tensor = _core.Tensor.from_dlpack(item.owner, stream=stream).copy(stream=stream)
        return DeviceArray(tensor.data_ptr, tensor.dtype, tuple(tensor.shape), True, tensor)

    def _execute(self, slot: Slot, items: Mapping[str, DeviceArray]) -> dict[str, Any]:
        """Enqueue a run; its results are xpuruntime tensors, ready in the order of the slot's stream."""
        shapes = self.place(slot, items)
        results: dict[str, Any] = {}
        unknown: dict[str, Any] = {}
        for name, shape in shapes.items():
            if shape is None:
                unknown[name] = slot.output_memory(name)
            else:
                results[name] = self.room(name, shape, slot.stream)
                slot.address(name, results[name].data_ptr)
        slot.enqueue()
        for tensor in results.values():
            tensor.record(slot.stream)
        for name, memory in unknown.items():
            results[name] = self._collected(name, memory, slot)
        return {name: results[name] for name in self.output_names}

    def place(self, slot: Slot, items: Mapping[str, DeviceArray]) -> dict[str, tuple[int, ...] | None]:
        """Tell a slot where its inputs are and how large; return the shape of each output, where it follows."""
        for name, item in items.items():
            slot.address(name, item.pointer or 0)
        shapes = {name: item.shape for name, item in items.items() if self.borders[name].dynamic}
        return slot.shape(shapes, self.output_names)

    def room(self, name: str, shape: tuple[int, ...], stream: Any) -> Any:
        """Return a tensor for an output."""
        from xpuruntime import _core

        return _core.Tensor.empty(shape, self.borders[name].dtype, self.device, stream=stream)

    def _collected(self, name: str, memory: Any, slot: Slot) -> Any:
        """Return an output whose size only the run could tell: copied from the memory that was allocated for it."""
        from xpuruntime import _core

        if memory.failure is not None or memory.shape is None:
            raise self.handle.failed("running", [memory.failure or f"the size of output {name!r} was not reported"])
        self._log.add(f"output {name!r} copied once", "its size is known only after the run")
        tensor = self.room(name, memory.shape, slot.stream)
        if tensor.nbytes:
            stride = [1] * len(memory.shape)
            for axis in range(len(memory.shape) - 2, -1, -1):
                stride[axis] = stride[axis + 1] * memory.shape[axis + 1]
            source = memory.tensor.data_ptr
            _core.copy_to_contiguous(
                self.device, source, tensor.data_ptr, memory.shape, stride, tensor.itemsize, slot.stream.handle
            )
        tensor.record(slot.stream)
        return tensor

    def foreign(self, stream: Any, kind: Kind) -> Any:
        """Return the caller's stream as an `_core.Stream`."""
        from xpuruntime import _core

        handle = caller_stream(stream, kind, self.index)
        return _core.Stream.wrap(stream=handle, device=self.device, owner=stream_owner(stream, kind))

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind device buffers; see `InferenceSession.bind`."""
        if not self._open:
            closed()
        return TensorRtBinding(self, inputs or {}, outputs or {}, stream)

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run an instrumented context; see `LoadedModel.observe`. Device arrays are copied to the host first."""
        if not self._open:
            closed()
        from xpuruntime import _core
        from xpuruntime.engines.tensorrt.observing import observe

        ready = self.check.on_host(host_copies(feeds), strict=self.settings.strict, log=self._log)
        with _core.DeviceScope(self.device):
            return observe(self, self._request, ready, runs)

    def conversions(self) -> Sequence[Conversion]:
        """Return what was converted or copied so far."""
        return self._log.records()

    def memory(self) -> dict[str, int]:
        """Return bytes by owner."""
        return self.handle.memory() if self._open else {}

    def close(self) -> None:
        """Drop the engine; runs in other threads finish first. Keeps the runtime cache, where there is one."""
        if not self._open:
            return
        self._open = False
        self.check.forget()
        self.slots.close()
        try:
            self.handle.keep_cache()
        finally:
            self.handle.close()


def load_model(
    request: Request, settings: TensorRtSettings, product: TensorRtProduct, target: dict[str, str], chip: str
) -> LoadedModel:
    """Return the loaded model; leaves nothing behind when it fails."""
    log = ConversionLog()
    ready = _plan(request, settings, product, target, log)
    handle = Handle(bindings(product), product, request.device, settings, ready.record, request.model.path)
    stripped = settings.options.get("strip_plan") == "1" and request.artifact is None
    weights = prepare(request, settings, log) if stripped else None
    runtime_cache = settings.options.get("runtime_cache")
    file = cache_file(runtime_cache, "runtime", {**target, "compute_capability": chip})
    info = with_shapes(request.model, request.policy)

    def work() -> TensorRtModel:
        from xpuruntime import _core

        with _core.DeviceScope(request.device):
            try:
                handle.open(ready.plan, file, weights)
                return TensorRtModel(handle, info, request=request, log=log)
            except BaseException:
                handle.close()
                raise

    # The library logs into Python while it loads: see `background`.
    model = interruptible(work, Cancel())
    if handle.cache_note is not None:
        log.add(*handle.cache_note)
    return model


def _plan(
    request: Request, settings: TensorRtSettings, product: TensorRtProduct, target: dict[str, str], log: ConversionLog
) -> SerializedEngine:
    if request.artifact is not None:
        return read_artifact(request.artifact, product, target)
    built = build(request, settings, product, target, log)
    return SerializedEngine(built.plan, Record.of(built, target))


class TensorRtBinding(Binding):
    """Device buffers bound to one `TensorRtModel`. Not for use by two threads at once."""

    def __init__(
        self, model: TensorRtModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any
    ) -> None:
        from xpuruntime import _core

        self._model = model
        kind = kind_of_feeds({name: array for name, array in inputs.items() if not isinstance(array, tuple)})
        caller = model.foreign(stream, "tensor" if kind == "numpy" else kind)
        check = model.check
        check.names({**dict.fromkeys(check.required), **inputs})
        known_outputs(outputs, model.output_names)
        with _core.DeviceScope(model.device):
            self._slot = Slot(model.handle)
            self.stream = self._slot.stream
            try:
                self._bind(inputs, outputs, DeviceBuffers(model.device, self.stream, kind, unfit))
                self._graph = self._capture(caller)
            except BaseException:
                self._slot.close()
                raise
        self.run = self._compile(caller)

    def _bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], buffers: DeviceBuffers) -> None:
        model, slot = self._model, self._slot
        items: dict[str, DeviceArray] = {}
        bound: dict[str, Any] = {}
        for info in model.check.infos.values():
            bound[info.name], items[info.name] = buffers.input(info, inputs.get(info.name))
        self.inputs = bound
        model.check.full({name: (item.dtype, item.shape) for name, item in items.items()})
        bound_outputs: dict[str, Any] = {}
        self._keep = list(items.values())
        for name, shape in model.place(slot, items).items():
            if shape is None:
                msg = (
                    f"the size of output {name!r} is known only after a run, so it has no fixed buffer. Fix: use run()"
                )
                raise InputError(msg)
            bound_outputs[name], item = buffers.output(name, model.borders[name].dtype, shape, outputs.get(name))
            self._keep.append(item)
            slot.address(name, item.pointer or 0)
        self.outputs = bound_outputs

    def _capture(self, caller: Any) -> Any:
        """Return the captured graph, or ``None``; `graph` then says why."""
        from xpuruntime import _core

        wanted = self._model.settings.graph
        self.graph = "off"
        if wanted == "off":
            return None
        slot = self._slot
        slot.stream.wait_stream(caller)
        try:
            # The first run with new shapes does work that cannot be captured.
            slot.enqueue()
            slot.stream.synchronize()
            ask = getattr(slot.context, "is_stream_capturable", None)
            if ask is not None and not ask(slot.stream.handle):
                msg = "the engine says that its runs cannot be captured, as for sizes that depend on values"
                raise UnsupportedOperationError(msg, device=self._model.device)
            graph = _core.Graph()
            with graph.capture(slot.stream):
                slot.enqueue()
        except XpuRuntimeError as error:
            if wanted == "require":
                raise
            self.graph = str(error)
            return None
        self.graph = "captured"
        return graph

    def _compile(self, caller: Any) -> Any:
        own, slot, graph = self.stream, self._slot, self._graph

        if graph is not None:

            def work() -> None:
                graph.replay(own)

        else:
            on_device = self._model.on_device

            def work() -> None:
                with on_device():
                    slot.enqueue()

        if caller == own:
            return work

        def run() -> None:
            own.wait_stream(caller)
            try:
                work()
            finally:
                caller.wait_stream(own)

        return run

    def close(self) -> None:
        """Release the graph, the context and the buffers this binding made. Idempotent."""
        self.run = closed_binding
        self._slot.close()
        self._graph = None
        self._keep = []
        self.inputs, self.outputs = {}, {}
