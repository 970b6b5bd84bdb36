# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Repeated calls of a session, by `run` or bound buffers, and their times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.host_model import HostRunner, PinnedRunner
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.lockfile.measured import BatchTime
from xpuruntime.measuring.rounds import time_calls

if TYPE_CHECKING:
    from xpuruntime.engines.base import Binding
    from xpuruntime.inference.session import InferenceSession


class Calls(ABC):
    """Calls of a session with inputs by their index. For one thread."""

    #: What became of the CUDA graph of the first inputs; ``None`` for plain runs, which use none.
    graph: str | None = None

    @abstractmethod
    def prepared(self, index: int) -> Callable[[], Any]:
        """Return what runs these inputs, and returns when the results are there."""

    @abstractmethod
    def outputs(self, index: int, results: Any) -> dict[str, Any]:
        """Return the outputs on the host, of what the last call of these inputs returned."""

    def poison(self) -> None:
        """Overwrite results of earlier calls, so that they do not pass for those of a later one."""
        return

    def close(self) -> None:
        """Release buffers. Idempotent."""
        return


def open_calls(session: InferenceSession, feeds: Sequence[dict[str, Any]], call: str) -> Calls:
    """Return the calls of a session, ready for the first inputs."""
    if call not in ("run", "bind"):
        raise InputError(f"call: {call!r} is not a call. Fix: give 'run' or 'bind'")
    if call == "run":
        return _PlainCalls(session, feeds)
    device = session.plan.device
    calls = _CudaCalls(session, feeds, device) if device.startswith("cuda") else _BoundCalls(session, feeds)
    try:
        calls.prepared(0)
    except (InputError, UnsupportedOperationError) as error:
        raise UnsupportedOperationError(f"session.bind: {error}") from error
    return calls


class _PlainCalls(Calls):
    def __init__(self, session: InferenceSession, feeds: Sequence[dict[str, Any]]) -> None:
        self._runs = [partial(session.run, feed) for feed in feeds]

    def prepared(self, index: int) -> Callable[[], Any]:
        return self._runs[index]

    def outputs(self, index: int, results: Any) -> dict[str, Any]:
        del index
        return dict(results)


class _BoundCalls(Calls):
    """``session.bind``, once for each shape of inputs, with buffers on the host that inputs are written into."""

    def __init__(self, session: InferenceSession, feeds: Sequence[dict[str, Any]]) -> None:
        self._session, self._feeds = session, feeds
        self._bindings: dict[tuple[Any, ...], Binding] = {}

    def prepared(self, index: int) -> Callable[[], Any]:
        feeds = self._feeds[index]
        key = tuple((name, array.shape) for name, array in feeds.items())
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bound(index)
            self.graph = self.graph or binding.graph
        self._write(binding, index)
        return self._timed(binding)

    def outputs(self, index: int, results: Any) -> dict[str, Any]:
        del results
        key = tuple((name, array.shape) for name, array in self._feeds[index].items())
        return {name: self._read(array) for name, array in self._bindings[key].outputs.items()}

    def poison(self) -> None:
        for binding in self._bindings.values():
            for array in binding.outputs.values():
                self._poison(array)

    def close(self) -> None:
        while self._bindings:
            self._bindings.popitem()[1].close()

    def _bound(self, index: int) -> Binding:
        return self._session.bind({name: np.array(array) for name, array in self._feeds[index].items()})

    def _write(self, binding: Binding, index: int) -> None:
        for name, array in self._feeds[index].items():
            binding.inputs[name][...] = array

    def _timed(self, binding: Binding) -> Callable[[], Any]:
        return binding.run

    def _read(self, array: Any) -> Any:
        return np.array(array)

    def _poison(self, array: Any) -> None:
        poison(array)


class _CudaCalls(_BoundCalls):
    """Bound runs whose inputs and results stay on the device, on a stream of their own."""

    def __init__(self, session: InferenceSession, feeds: Sequence[dict[str, Any]], device: str) -> None:
        from xpuruntime.runtime.stream import Stream

        super().__init__(session, feeds)
        self._device, self._stream = device, Stream(device)
        self._there: dict[int, dict[str, Any]] = {}

    def _bound(self, index: int) -> Binding:
        buffers = {name: array.copy(stream=self._stream) for name, array in self._sent(index).items()}
        self._stream.synchronize()
        return self._session.bind(buffers, stream=self._stream)

    def _sent(self, index: int) -> dict[str, Any]:
        """Return inputs on the device: they are copied there once."""
        from xpuruntime.runtime.stream import Tensor

        if index not in self._there:
            self._there[index] = {
                name: Tensor.from_numpy(np.asarray(array, order="C")).to(self._device, stream=self._stream)
                for name, array in self._feeds[index].items()
            }
        return self._there[index]

    def _write(self, binding: Binding, index: int) -> None:
        for name, array in self._sent(index).items():
            self._tensor(binding.inputs[name]).copy_(array, stream=self._stream)
        self._stream.synchronize()

    def _timed(self, binding: Binding) -> Callable[[], Any]:
        run, wait = binding.run, self._stream.synchronize

        def run_and_wait() -> None:
            run()
            wait()

        return run_and_wait

    def _read(self, array: Any) -> Any:
        host = self._tensor(array).to("cpu", stream=self._stream)
        self._stream.synchronize()
        return np.array(host.numpy())

    def _poison(self, array: Any) -> None:
        from xpuruntime.runtime.stream import Tensor

        host = self._read(array)
        poison(host)
        self._tensor(array).copy_(Tensor.from_numpy(host), stream=self._stream)
        self._stream.synchronize()

    def _tensor(self, array: Any) -> Any:
        from xpuruntime.runtime.stream import as_tensor

        return as_tensor(array, stream=self._stream)


def poison(array: np.ndarray[Any, Any]) -> None:
    """Fill an array with NaN, and with the largest value where it has none."""
    kind = array.dtype.kind
    if kind in "fc":
        array.fill(np.nan)
    elif kind in "iu":
        array.fill(np.iinfo(array.dtype).max)
    elif kind == "b":
        array.fill(True)
    elif kind == "V":
        array.view(np.uint8)[...] = 0xFF


def host_runner(session: InferenceSession) -> HostRunner:
    """Return what runs a session on host arrays: on CUDA through pinned memory, elsewhere its `run`."""
    own = session._open().host_runner()
    if own is not None:
        return own
    device = session.plan.device
    if device.startswith("cuda") and _is_there(device):
        return PinnedRunner(session.run, device, f"inputs of {Path(session.model.path).name}")
    return HostRunner(session.run, session._open().release_idle)


def _is_there(device: str) -> bool:
    """Say whether this process can use a CUDA device: an engine that computes nothing runs without."""
    from xpuruntime import _core

    return _core.DeviceManager.instance().get_device_count("cuda") > int(device.partition(":")[2] or 0)


#: Executions of one batch size, and of them those that warm it up; seconds after which no more are made.
_RUNS, _WARM, _BUDGET = 21, 2, 1.0


def time_batches(
    runner: HostRunner, feeds_of: Callable[[int], dict[str, Any]], sizes: Iterable[int]
) -> tuple[BatchTime, ...]:
    """Time executions as a server makes them: `feeds_of` gives the inputs of each of the batch sizes."""
    batch_times = []
    for rows in sizes:
        feeds = feeds_of(rows)

        def run(feeds: dict[str, Any] = feeds) -> Any:
            return runner.run(feeds)

        first = time_calls(run, 1, _WARM)[-1]
        runs = max(3, min(_RUNS, int(_BUDGET / max(first, 1e-9))))
        times = time_calls(run, 1, runs)
        batch_times.append(
            BatchTime(rows=rows, median_us=1e6 * float(np.median(times)), longest_us=1e6 * max(times), runs=runs)
        )
    return tuple(batch_times)
