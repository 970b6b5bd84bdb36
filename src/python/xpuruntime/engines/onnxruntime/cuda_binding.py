# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Static device buffers of one CUDA session, replayed as a CUDA graph where the policy asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.arrays import kind_of, kind_of_feeds
from xpuruntime.engines.base import Binding
from xpuruntime.engines.cuda_arrays import as_kind, device_array
from xpuruntime.engines.feeds import closed_binding, fixed_shape, known_outputs
from xpuruntime.engines.onnxruntime.device_arrays import element_type
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.arrays import Kind
    from xpuruntime.engines.model import TensorInfo
    from xpuruntime.engines.onnxruntime.cuda import CudaModel

__all__ = ["CudaBinding"]

_WARM_RUNS = 2


class CudaBinding(Binding):
    """Device buffers bound to one `CudaModel`. Not for use by two threads at once.

    Parameters
    ----------
    model : CudaModel
    inputs, outputs : mapping
        Name to CUDA array, whose memory is bound, or to a shape, for which memory is made.
    stream : stream, optional
        The stream on which the caller writes inputs and reads outputs; default: the caller's current stream.

    Attributes
    ----------
    stream : Stream or None
        The stream that `run` computes on. Work the caller puts there needs no waits. ``None`` where the session has
        a memory pool of ours.
    """

    def __init__(self, model: CudaModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        session = model.session
        self._model = model
        self.stream = model.stream
        arrays = {n: a for n, a in inputs.items() if not isinstance(a, tuple)}
        kind = kind_of_feeds(arrays)
        self._kind: Kind = "tensor" if kind == "numpy" else kind
        caller = model.foreign(stream, self._kind)
        check = model.check
        check.names({**dict.fromkeys(check.required), **inputs})
        self._io = session.io_binding()
        self._keep: list[Any] = []
        wanted = [name for name in check.infos if name in check.required or name in inputs]
        self.inputs = {name: self._input(check.infos[name], inputs.get(name)) for name in wanted}
        check.full(self._described)
        model.enter()
        self.outputs = self._make_outputs(outputs)
        self._graph_id = model.next_graph_id() if model.graphs else None
        self.graph = model.graph_refused or "off"
        options = model.run_options(sync=model.stream is None, graph_id=self._graph_id or "-1")
        self.run = self._compile(caller, options)
        if self._graph_id is not None:
            for _ in range(_WARM_RUNS):
                self.run()
            self.graph = "captured"

    def _compile(self, caller: Any, options: Any) -> Any:
        model = self._model
        call, io, failed = model.session._sess.run_with_iobinding, self._io._iobinding, model.failed
        own, turn = model.stream, model.turn

        def run_here() -> None:
            try:
                call(io, options)
            except Exception as error:
                raise failed(error) from None

        def run_between() -> None:
            own.wait_stream(caller)
            try:
                call(io, options)
            except Exception as error:
                raise failed(error) from None
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

        return run_on_device if model.several else run_in_turn

    @property
    def _described(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (item.dtype, item.shape) for name, item in self._items.items()}

    def _input(self, info: TensorInfo, given: Any) -> Any:
        from xpuruntime import _core

        model = self._model
        if not hasattr(self, "_items"):
            self._items: dict[str, Any] = {}
        if given is None or isinstance(given, tuple):
            shape = fixed_shape(info, given)
            tensor = _core.Tensor.empty(shape, info.dtype, model.device, stream=model.stream)
            array = as_kind(tensor, self._kind)
            item = device_array(info.name, tensor, "tensor", model.device, model.stream)
        else:
            array = given
            if kind_of(info.name, given) == "numpy":
                msg = (
                    f"input {info.name!r} is a NumPy array, whose memory cannot be bound on {model.device}; pass "
                    "its shape, or a CUDA array"
                )
                raise InputError(msg)
            item = device_array(info.name, given, kind_of(info.name, given), model.device, model.stream)
        if not item.contiguous:
            msg = (
                f"input {info.name!r} is not C-contiguous, so its memory cannot be bound; pass a contiguous "
                "array, or its shape"
            )
            raise InputError(msg)
        self._items[info.name] = item
        self._keep.append((item, array))
        self._io.bind_input(
            info.name, "cuda", model.index, element_type(info.name, item.dtype), item.shape, item.pointer
        )
        return array

    def _make_outputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        from xpuruntime import _core

        model = self._model
        known_outputs(given, model.output_names)
        probe = self._io._iobinding
        for name in model.output_names:
            probe.bind_output(name, model.where)
        try:
            with model.turn, model.on_device():
                model.session._sess.run_with_iobinding(probe, model.run_options(sync=True))
        except Exception as error:
            raise model.failed(error) from None
        capsules = model.take(probe)
        made: dict[str, Any] = {}
        for name, capsule in zip(model.output_names, capsules, strict=True):
            expected = model.output(capsule, "tensor", self.stream)
            if name in given:
                array = given[name]
                item = device_array(name, array, kind_of(name, array), model.device, model.stream)
                if (item.dtype, item.shape) != (expected.dtype, tuple(expected.shape)):
                    msg = (
                        f"output {name!r} is {expected.dtype} {list(expected.shape)} for these inputs, got "
                        f"{item.dtype} {list(item.shape)}"
                    )
                    raise InputError(msg)
                if not item.contiguous:
                    msg = f"output {name!r} must be C-contiguous to be bound"
                    raise InputError(msg)
            else:
                tensor = _core.Tensor.empty(tuple(expected.shape), expected.dtype, model.device, stream=model.stream)
                array = as_kind(tensor, self._kind)
                item = device_array(name, tensor, "tensor", model.device, model.stream)
            self._keep.append((item, array))
            made[name] = array
            self._io.bind_output(name, "cuda", model.index, element_type(name, item.dtype), item.shape, item.pointer)
        return made

    def close(self) -> None:
        """Release the captured graph and the buffers this binding made."""
        session = self._model._session
        if session is not None and self._graph_id is not None and self._io is not None:
            session.release_captured_graph(int(self._graph_id))
        self.run = closed_binding
        self._io = None
        self._keep.clear()
        self.inputs, self.outputs = {}, {}
