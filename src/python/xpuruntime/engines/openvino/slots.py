# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Slot`: one inference request of OpenVINO with the buffers it reads, for one run at a time."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.base import closed
from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo

__all__ = ["SHARED_FROM", "Slot", "SlotPool", "infer_call", "port_order", "share"]

#: Bytes from which an input is shared and an output is made in memory of its own; below, copying is quicker than
#: telling OpenVINO of another address, which costs it about 3 us.
SHARED_FROM = 1 << 16

Array = np.ndarray[Any, Any]


def share(array: Array, kind: Any = None) -> Any:
    """Return an ``openvino.Tensor`` on the memory of a C-contiguous array, which the caller must keep alive.

    Parameters
    ----------
    array : numpy.ndarray
        It is read only, or written by the engine where it is bound as an output.
    kind : openvino.Type, optional
        The type of the tensor where NumPy lacks it: `array` then holds elements of its size.
    """
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
    found = next((positions[name] for name in names if name in positions), None)
    if found is not None:
        return found
    above = {name: node.inputs for node in info.nodes if not node.graph for name in node.outputs if name}
    waiting = sorted(names)
    seen = set(waiting)
    for name in waiting:
        if name in positions:
            return positions[name]
        further = [one for one in above.get(name, ()) if one not in seen]
        seen.update(further)
        waiting += further
    raise EngineError(f"OpenVINO has an input called {', '.join(sorted(names))}, and the model has none of these names")


def infer_call(request: Any) -> Callable[..., Any]:
    """Return the call that runs a request on the tensors it holds: that below OpenVINO's Python layer.

    The layer above it looks through an empty set of inputs in each call, which costs more than a small model.
    """
    call: Callable[..., Any] = super(type(request), request).infer
    return call


class Slot:
    """One request. Not for use by two threads at once; what it was given last is held until the next run.

    Parameters
    ----------
    compiled : openvino.CompiledModel
    """

    def __init__(self, compiled: Any) -> None:
        self.request = compiled.create_infer_request()
        self._infer = infer_call(self.request)
        #: Type and size of each output; one that is not known yet is sized by OpenVINO.
        self._outputs = [(port.get_element_type(), _sizes(port)) for port in compiled.outputs]
        self._fresh_outputs: list[Any] = []
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        #: The buffers of small inputs, by position; large ones are shared.
        self._staged: list[tuple[int, Array]] = []
        self._shared: list[int] = []
        self._bound: list[Any] = []
        self._large = False

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

    def start(self) -> None:
        """Start what was prepared, and return at once."""
        self.request.start_async()

    def wait(self) -> list[Array]:
        """Wait for what was started, and return its outputs."""
        self.request.wait()
        if self._large:
            return self.collect()
        results = [np.array(self.request.get_output_tensor(i).data) for i in range(len(self._outputs))]
        self._notice(results)
        return results

    def collect(self) -> list[Array]:
        """Return the outputs that were made in fresh memory, which they keep alive."""
        return [tensor.data for tensor in self._fresh_outputs]

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
        if not self._large and any(result.nbytes >= SHARED_FROM for result in results):
            self._large = True

    def _fresh(self) -> None:
        """Give the request new output tensors, which OpenVINO sizes itself."""
        import openvino as ov

        self._fresh_outputs = [ov.Tensor(kind, ov.Shape(sizes)) for kind, sizes in self._outputs]
        for index, tensor in enumerate(self._fresh_outputs):
            self.request.set_output_tensor(index, tensor)


class SlotPool:
    """The free slots of one compiled model; a new one is made where all are busy. Safe to use from many threads."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.free: deque[Slot] = deque()

    def take(self) -> Slot:
        """Return a slot that nobody else has.

        Raises
        ------
        XpuRuntimeError
            After `close`.
        """
        try:
            return self.free.pop()
        except IndexError:
            compiled = self._compiled
            if compiled is None:
                closed()
            return Slot(compiled)

    def close(self) -> None:
        """Drop the free slots; those in use are dropped with the model."""
        self._compiled = None
        self.free.clear()


def _sizes(port: Any) -> list[int]:
    shape = port.get_partial_shape()
    return list(shape.to_shape()) if shape.is_static else [0]
