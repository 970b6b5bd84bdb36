# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SlotPool`: inference requests of OpenVINO with the buffers they read, each for one run at a time."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.base import closed
from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from xpuruntime import _core
    from xpuruntime.engines.model import ModelInfo, TensorInfo

#: Bytes from which an input is shared and an output is made in memory of its own; below, copying is quicker than
#: giving OpenVINO another address, which costs it about 3 us.
SHARED_FROM = 1 << 16

Array = np.ndarray[Any, Any]


def share(array: Array, kind: Any = None) -> Any:
    """Return an ``openvino.Tensor`` on the memory of a C-contiguous array, which the caller must keep alive."""
    import openvino as ov

    if not array.flags.writeable:  # OpenVINO shares writable arrays only, also those that it only reads
        memory: Any = (ctypes.c_char * max(array.nbytes, 1)).from_address(array.__array_interface__["data"][0])
        array = np.frombuffer(memory, dtype=np.uint8, count=array.nbytes).view(array.dtype).reshape(array.shape)
    if kind is not None:
        return ov.Tensor(array, ov.Shape(array.shape), kind)
    return ov.Tensor(array, shared_memory=True)


def port_order(compiled: Any, info: ModelInfo) -> list[int]:
    """Return, for each input port, the position of its input: OpenVINO has no port for an input that nothing reads.

    Where a node that passes its input on was removed, the port has the names of what that node made alone.
    """
    positions = {tensor.name: index for index, tensor in enumerate(info.inputs)}
    return [_input_of(port.get_names(), positions, info) for port in compiled.inputs]


def _input_of(names: Iterable[str], positions: Mapping[str, int], info: ModelInfo) -> int:
    position = next((positions[name] for name in names if name in positions), None)
    if position is not None:
        return position
    above = {name: node.inputs for node in info.nodes if not node.graph for name in node.outputs if name}
    waiting = sorted(names)
    seen = set(waiting)
    for name in waiting:
        if name in positions:
            return positions[name]
        further = [source for source in above.get(name, ()) if source not in seen]
        seen.update(further)
        waiting += further
    raise EngineError(f"OpenVINO has an input called {', '.join(sorted(names))}, and the model has none of these names")


def infer_call(request: Any) -> Callable[..., Any]:
    """Return the call that runs a request on the tensors it holds: that below OpenVINO's Python layer.

    The layer above it looks through an empty set of inputs in each call, which costs more than a small model.
    """
    call: Callable[..., Any] = super(type(request), request).infer
    return call


def passed_on(request: Any, inputs: Iterable[Array]) -> set[int]:
    """Return the outputs of a request that ran which lie in the memory of its inputs, or have no memory.

    OpenVINO has one tensor for an output that is an input, or an input passed on. A tensor that is set for such an
    output takes the place of the input. Only outputs whose tensors OpenVINO has made itself can be distinguished so.
    """
    spans = [(array.__array_interface__["data"][0], array.nbytes) for array in inputs if array.nbytes]
    indexes = set()
    for index in range(len(request.model_outputs)):
        data = request.get_output_tensor(index).data
        address = data.__array_interface__["data"][0]
        if not data.nbytes or any(start <= address < start + size for start, size in spans):
            indexes.add(index)
    return indexes


class Generation:
    """One compiled model and the requests made of it, which are dropped together once a run of one has failed.

    A run that fails inside of OpenVINO can leave shapes of its inputs behind in the compiled model, which later runs
    then compute with: they fail too, or are wrong.
    """

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.free: deque[Slot] = deque()
        #: Requests made and not dropped, also those of bindings.
        self.created = 0
        #: Whether a run has failed.
        self.broken = False
        #: Whether it is not to be used again: broken, or closed.
        self.stale = False

    @property
    def busy(self) -> int:
        """Requests that may be running."""
        return self.created - len(self.free)


class Slot:
    """One request. Not for use by two threads at once; what it was given last is held until the next run."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        compiled = generation.compiled
        self.request = compiled.create_infer_request()
        self._infer = infer_call(self.request)
        #: Type and size of each output; one that is not known yet is sized by OpenVINO.
        self._outputs = [(port.get_element_type(), _sizes(port)) for port in compiled.outputs]
        #: Outputs that get memory of their own in each run, by position; the others are copied.
        self._fresh_outputs: dict[int, Any] = {}
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        #: The buffers of small inputs, by position; large ones are shared.
        self._staged: list[tuple[int, Array]] = []
        self._shared: list[int] = []
        self._bound: list[Any] = []
        #: Outputs that were large once and whose memory is not that of an input, by position.
        self._large: set[int] = set()
        self._passed: set[int] = set()

    def run(self, arrays: Sequence[Array], shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
        """Run on C-contiguous arrays and return outputs that belong to the caller."""
        self.prepare(arrays, shapes)
        if self._large:
            self._infer({}, True, False)
            return self.collect()
        results = list(self._infer({}, False, False).values())
        self._notice(results)
        return results

    def prepare(self, arrays: Sequence[Array], shapes: tuple[tuple[int, ...], ...]) -> None:
        """Hand the inputs over: small ones are copied into buffers that stay bound, large ones are shared."""
        if shapes != self._shapes:
            self._arrange(arrays, shapes)
        for index, buffer in self._staged:
            buffer[...] = arrays[index]
        for index in self._shared:
            if self._bound[index] is not arrays[index]:
                self.request.set_input_tensor(index, share(arrays[index]))
                self._bound[index] = arrays[index]
        if self._large:
            self._fresh()

    def collect(self) -> list[Array]:
        """Return the outputs: those in memory of their own, which they keep alive, and copies of the others."""
        fresh, get = self._fresh_outputs, self.request.get_output_tensor
        results = [
            fresh[index].data if index in fresh else np.array(get(index).data) for index in range(len(self._outputs))
        ]
        if len(fresh) + len(self._passed) < len(results):
            self._notice(results)
        return results

    def _arrange(self, arrays: Sequence[Array], shapes: tuple[tuple[int, ...], ...]) -> None:
        self._shapes = None
        self._staged, self._shared, self._bound = [], [], [None] * len(arrays)
        for index, array in enumerate(arrays):
            if array.nbytes >= SHARED_FROM:
                self._shared.append(index)
                continue
            buffer = np.empty(array.shape, array.dtype)
            self.request.set_input_tensor(index, share(buffer))
            self._staged.append((index, buffer))
        self._shapes = shapes

    def _notice(self, results: Sequence[Array]) -> None:
        known = self._large | self._passed
        large = {i for i, result in enumerate(results) if result.nbytes >= SHARED_FROM} - known
        if large:
            inputs = [self._bound[index] for index in self._shared] + [buffer for _, buffer in self._staged]
            passed = passed_on(self.request, inputs)
            self._passed |= large & passed
            self._large |= large - passed

    def _fresh(self) -> None:
        import openvino as ov

        for index in self._large:
            kind, sizes = self._outputs[index]
            tensor = ov.Tensor(kind, ov.Shape(sizes))
            self.request.set_output_tensor(index, tensor)
            self._fresh_outputs[index] = tensor


class SlotPool:
    """The free slots of a model; a new one is made where all are busy. Safe to use from many threads."""

    def __init__(self, compiled: Any, reopen: Callable[[], Any]) -> None:
        self._reopen: Callable[[], Any] | None = reopen
        self._lock = threading.Lock()
        self._generation = Generation(compiled)
        #: Those of the present generation.
        self.free = self._generation.free

    @property
    def compiled(self) -> Any:
        """The compiled model of the present generation."""
        return self._generation.compiled

    def take(self) -> Slot:
        """Return a slot that nobody else has."""
        try:
            return self.free.pop()
        except IndexError:
            return Slot(self.generation())

    def generation(self) -> Generation:
        """Return the compiled model for one more request, compiled again where a run of it has failed.

        Raises as `take`.
        """
        with self._lock:
            if self._reopen is None:
                closed()
            if self._generation.broken:
                self._generation = Generation(self._reopen())
                self.free = self._generation.free
            self._generation.created += 1
            return self._generation

    def drop(self, generation: Generation) -> None:
        """Count one request less."""
        with self._lock:
            generation.created -= 1

    def spoil(self, generation: Generation) -> bool:
        """Give up a compiled model in which a run has failed; say whether another run may have been the cause."""
        with self._lock:
            others = generation.broken or generation.busy > 1
            generation.broken = generation.stale = True
            generation.free.clear()
            return others

    def finish(
        self,
        slot: Slot,
        results: list[Array] | Exception,
        arrays: Sequence[Array],
        shapes: tuple[tuple[int, ...], ...],
    ) -> list[Array]:
        """Return the results of a run, or raise; run once more where another run may have spoiled this one."""
        generation = slot.generation
        if isinstance(results, Exception):
            if not self.spoil(generation):
                raise results
        elif not generation.broken:
            if not generation.stale:
                generation.free.append(slot)
            return results
        slot = self.take()
        try:
            results = slot.run(arrays, shapes)
        except Exception:
            self.spoil(slot.generation)
            raise
        slot.generation.free.append(slot)
        return results

    def close(self) -> None:
        """Drop the free slots; those in use are dropped with the model."""
        with self._lock:
            self._reopen = None
            self._generation.stale = True
            self._generation.free.clear()
            self._generation = Generation(None)
            self.free = self._generation.free


def _sizes(port: Any) -> list[int]:
    shape = port.get_partial_shape()
    return list(shape.to_shape()) if shape.is_static else [0]


def borders(tensor: _core.Tensor) -> tuple[np.ndarray[Any, Any], Any]:
    """Return the memory of a contiguous tensor as an array that OpenVINO takes, and its type where NumPy has none."""
    import openvino as ov

    array = tensor.numpy()
    return (array.view(np.uint16), ov.Type.bf16) if tensor.dtype == "bfloat16" else (array, None)


def run_tensors(compiled: Any, tensors: Sequence[_core.Tensor], outputs: Sequence[TensorInfo]) -> list[_core.Tensor]:
    """Run once, on a request of its own, and return outputs in memory of their own."""
    import ml_dtypes

    from xpuruntime import _core

    request = compiled.create_infer_request()
    kept = [borders(tensor) for tensor in tensors]
    for index, (array, kind) in enumerate(kept):
        request.set_input_tensor(index, share(array, kind))
    infer_call(request)({}, True, False)
    results = []
    for index, info in enumerate(outputs):
        array = np.array(request.get_output_tensor(index).data)
        if info.dtype == "bfloat16":  # OpenVINO shows it as another type of two bytes
            array = array.view(np.uint16).view(ml_dtypes.bfloat16)
        results.append(_core.Tensor.from_numpy(array))
    return results
