# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A server's runs of host arrays on a CUDA session, copied through pinned memory on streams of their own.

ONNX Runtime itself copies host arrays outside of the session's stream, into memory that earlier runs may still use, so
that such a run has the session to itself until its results are there. Here the session's stream only computes: inputs
are copied into device memory of the run, and results out of it, on a stream that no other run uses meanwhile. Copies of
one run go on beside the work of another, and a thread holds the session's lock only while it queues work.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.arrays import torch_dtype_name
from xpuruntime.engines.cuda_arrays import torch_stream
from xpuruntime.engines.host_model import HostRunner, PinnedArrays
from xpuruntime.engines.onnxruntime._private_api import raw_session
from xpuruntime.engines.onnxruntime.device_arrays import (
    ONNX_TYPES,
    DLPackArray,
    between_captures,
    element_type,
    host_inputs,
)
from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime.cuda import CudaModel
    from xpuruntime.engines.onnxruntime.cuda_binding import CudaBinding

#: Types that NumPy, DLPack and ONNX Runtime's device memory all have.
_DTYPES = frozenset(
    {"float16", "float32", "float64", "bool"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
#: Bytes of all inputs of a run that are staged at most: pinned memory is taken from everybody.
_LARGEST = 256 << 20
#: Shapes that one thread of a server has CUDA graphs of, at most.
_MOST_GRAPHS = 64


class HostRuns:
    """Runs of host arrays of one session, each on a stream of its own. Safe to call from many threads."""

    def __init__(self, model: CudaModel) -> None:
        from xpuruntime import _core

        name = f"session {Path(model.info.path).name}, host arrays"
        self._model = model
        self.pinned = PinnedArrays(model.device, name)
        self._memory = _core.MemoryPool(model.device, "caching", name=name)
        self._idle: list[Any] = []

    @classmethod
    def of(cls, model: CudaModel) -> HostRuns | None:
        """Return them, or ``None`` where ONNX Runtime has to copy itself.

        That is for types of its own, for inputs that it reads on the host, for outputs that are inputs, and beside an
        xpuruntime pool, where it takes no stream.
        """
        info = model.info
        types = {tensor.dtype for tensor in (*model.check.infos.values(), *info.outputs)}
        known = {output.name for output in info.outputs}.issuperset(model.output_names)
        if model.stream is None or model.passed or not known or not types <= _DTYPES:
            return None
        return None if host_inputs(model.session) else cls(model)

    def takes(self, feeds: Mapping[str, Any]) -> bool:
        """Say whether a run can be staged: plain arrays with content, and not too large."""
        total = 0
        for array in feeds.values():
            if type(array) is not np.ndarray or not array.size:
                return False
            total += array.nbytes
        return total <= _LARGEST

    @contextlib.contextmanager
    def stream(self) -> Iterator[Any]:
        """Lend a stream that nobody else uses meanwhile; all work on it has ended afterwards."""
        try:
            lent = self._idle.pop()
        except IndexError:
            lent = self._model.own_stream()
        try:
            yield lent
        finally:
            lent.synchronize()  # memory of the host, and results of ONNX Runtime, are given back after this
            self._idle.append(lent)

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run checked, contiguous host arrays, and return results in pinned memory of their own."""
        model = self._model
        session = model.session
        binding = model.thread_binding()
        with between_captures(), self.stream() as stream:
            hosts = {name: self.pinned.staged(array) for name, array in feeds.items()}
            arrays = {name: self._sent(host, stream) for name, host in hosts.items()}
            with model.turn, model.on_device():
                model.enter()
                model.stream.wait_stream(stream)
                try:
                    for name, tensor in arrays.items():
                        code = element_type(name, tensor.dtype)
                        binding.bind_input(name, model.where, code, tuple(tensor.shape), tensor.data_ptr)
                    for name in model.output_names:
                        binding.bind_output(name, model.where)
                    raw_session(session).run_with_iobinding(binding, model.device_options)
                    capsules = model.take(binding)
                except XpuRuntimeError:
                    raise
                except Exception as error:
                    raise model.failed(error) from None
                finally:
                    stream.wait_stream(model.stream)  # before the memory of inputs is given back
                    binding.clear_binding_inputs()
                    binding.clear_binding_outputs()
            tensors = [self._tensor(capsule, stream) for capsule in capsules]
            outputs = [self.received(tensor, stream) for tensor in tensors]
            stream.synchronize()
            return {name: output.numpy() for name, output in zip(model.output_names, outputs, strict=True)}

    def _sent(self, host: Any, stream: Any) -> Any:
        from xpuruntime import _core

        tensor = _core.Tensor.empty(tuple(host.shape), host.dtype, self._model.device, pool=self._memory, stream=stream)
        return tensor.copy_(host, stream=stream)

    def _tensor(self, capsule: Any, stream: Any) -> Any:
        from xpuruntime import _core

        return _core.Tensor.from_dlpack(DLPackArray(capsule, self._model.index), stream=stream)

    def received(self, tensor: Any, stream: Any) -> Any:
        """Return a pinned tensor that a device tensor is copied into, on a stream."""
        return self.pinned.tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor, stream=stream)


class CudaHostRunner(HostRunner):
    """Runs of a server: inputs and results in pinned memory, and CUDA graphs where the policy states them.

    A captured graph belongs to the thread that captured it, as ONNX Runtime keeps it, and so do its buffers.
    """

    memory = "pinned"
    copies_all = True
    serial = True  # on the session's stream

    def __init__(self, model: CudaModel, runs: HostRuns) -> None:
        super().__init__(self._run)
        self._model, self._runs = model, runs
        self.pads_rows = model.graphs
        self._local = threading.local()

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return a pinned array; see `HostRunner.empty`."""
        return self._runs.pinned.empty(shape, dtype)

    def _run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        model, runs = self._model, self._runs
        model.check.names(feeds)
        ready = model.hosts(feeds)
        if not runs.takes(ready):
            return model.run(feeds)
        if model.graphs:
            replay = self._replay(ready)
            if replay is not None:
                return replay.run(ready)
        return runs.run(ready)

    def _replay(self, feeds: Mapping[str, Any]) -> _Replay | None:
        """Return the graph of these shapes, captured with their first run in this thread; ``None``: there is none."""
        known: dict[Any, _Replay | None] | None = getattr(self._local, "graphs", None)
        if known is None:
            known = self._local.graphs = {}
        key = tuple((name, array.shape) for name, array in feeds.items())
        if key not in known:
            if len(known) >= _MOST_GRAPHS:
                return None
            known[key] = _Replay.of(self._model, self._runs, feeds)
        return known[key]


class _Replay:
    """A captured graph with its buffers on the device and a stream, for one thread."""

    def __init__(self, runs: HostRuns, binding: CudaBinding, stream: Any) -> None:
        self._runs, self._binding, self._stream = runs, binding, stream

    @classmethod
    def of(cls, model: CudaModel, runs: HostRuns, feeds: Mapping[str, Any]) -> _Replay | None:
        """Bind and capture. ``None`` where the policy only prefers a graph, and there can be none of these shapes."""
        from xpuruntime.engines.onnxruntime.cuda_binding import CudaBinding

        stream = model.own_stream()
        try:
            binding = CudaBinding(model, {name: array.shape for name, array in feeds.items()}, {}, stream)
        except XpuRuntimeError as error:
            if model.settings.graph == "require":
                raise
            model.log.add("no CUDA graph for the shapes of a batch", str(error))
            return None
        if binding.graph == "captured":
            return cls(runs, binding, stream)
        model.log.add("no CUDA graph for the shapes of a batch", binding.graph)
        binding.close()
        return None

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        runs, stream, binding = self._runs, self._stream, self._binding
        hosts = {name: runs.pinned.staged(array) for name, array in feeds.items()}
        with between_captures():  # this thread has captured
            try:
                for name, host in hosts.items():
                    binding.inputs[name].copy_(host, stream=stream)
                binding.run()
                outputs = {name: runs.received(output, stream) for name, output in binding.outputs.items()}
            finally:
                stream.synchronize()
            return {name: output.numpy() for name, output in outputs.items()}


def torch_runner(model: CudaModel) -> Callable[..., dict[str, Any]]:
    """Return what `model.run` does, with everything looked up once.

    It takes contiguous torch tensors on the session's device, in shapes that `model.run` has accepted before. What it
    cannot take goes through `model.run`, which also says what is wrong.
    """
    slow = model.checked_run
    infos = model.check.infos
    if len(infos) != len(model.check.required) or any(info.dtype not in ONNX_TYPES for info in infos.values()):
        return slow
    call, options, index, where = (
        raw_session(model.session).run_with_iobinding,
        model.device_options,
        model.index,
        model.where,
    )
    inputs = [(name, info.dtype, ONNX_TYPES[info.dtype]) for name, info in infos.items()]
    count, names, turn, own = len(inputs), model.output_names, model.turn, model.stream
    seen: set[tuple[Any, ...]] = set()

    def run(
        feeds: Any = None, stream: Any = None, outputs: Sequence[str] | None = None, **other: Any
    ) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        if (
            torch is None
            or stream is not None
            or outputs is not None
            or other
            or model.closed
            or type(feeds) is not dict
            or len(feeds) != count
        ):
            return slow(feeds, stream, outputs, **other)
        tensor_type = torch.Tensor
        items, shapes = [], []
        for name, dtype, code in inputs:
            x: Any = feeds.get(name)
            if (
                type(x) is not tensor_type
                or x.get_device() != index
                or torch_dtype_name(x.dtype) != dtype
                or x.requires_grad
                or not x.is_contiguous()
            ):
                return slow(feeds, stream)
            shape = x.shape
            shapes.append(shape)
            items.append((name, code, shape, x.data_ptr()))
        key = tuple(shapes)
        if key not in seen:
            results = slow(feeds, stream)
            model.remember_in(seen, key)
            return results
        caller = model.known_stream(torch_stream(index))
        binding = model.thread_binding()
        with turn, model.on_device():
            model.enter()
            try:
                for name, code, shape, pointer in items:
                    binding.bind_input(name, where, code, shape, pointer)
                for name in names:
                    binding.bind_output(name, where)
                call(binding, options)
                capsules = model.take(binding)
            except Exception as error:
                raise model.failed(error) from None
            finally:
                if caller is not own:
                    caller.wait_stream(own)
                binding.clear_binding_inputs()
                binding.clear_binding_outputs()
        convert = torch.from_dlpack
        return {name: convert(capsule) for name, capsule in zip(names, capsules, strict=True)}

    return run
