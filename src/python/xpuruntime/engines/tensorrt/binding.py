# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Static device buffers of one session, with an execution context of their own; replayed as a CUDA graph if asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.arrays import kind_of_feeds
from xpuruntime.engines.base import Binding
from xpuruntime.engines.cuda_arrays import DeviceArray, DeviceBuffers
from xpuruntime.engines.input_binding import closed_binding, known_outputs
from xpuruntime.engines.tensorrt.handle import Slot, unfit
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeError

if TYPE_CHECKING:
    from xpuruntime.engines.tensorrt.model import TensorRtModel


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
