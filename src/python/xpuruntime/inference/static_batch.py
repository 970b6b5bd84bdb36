# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`StaticBatchModel`: a loaded model of one batch size that takes batches of up to that size.

Inputs are padded with copies of their last row, and the rows of the padding are cut off the outputs, so that the engine
runs one shape whatever comes in.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.engines.base import Binding, LoadedModel, Observed
from xpuruntime.engines.cuda_arrays import host_copies
from xpuruntime.engines.model.shapes import fixed_axes
from xpuruntime.engines.precision import probe_feeds, probing
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.evidence.records import Conversion, KeySeen

if TYPE_CHECKING:
    from xpuruntime.engines.host_model import HostRunner
    from xpuruntime.engines.model import ModelInfo


class StaticBatchModel(LoadedModel):
    """Runs a model of one batch size on batches of 1 row to that size."""

    def __init__(self, model: LoadedModel, info: ModelInfo, size: int) -> None:
        self._model, self._info, self._size = model, info, size
        self._inputs = fixed_axes(info.inputs)
        self._outputs = {output.name: 0 for output in info.outputs} | fixed_axes(info.outputs)
        self._run = model.runner()
        self._padded, self._lock = 0, threading.Lock()

    def check(self) -> None:
        """Test that rows do not depend on each other, on probe inputs."""
        feeds = host_copies(probe_feeds(self._info))
        axes = self._inputs
        for name, axis in axes.items():
            if feeds[name].shape[axis] != self._size:  # examples of a module
                feeds[name] = np.take(feeds[name], np.arange(self._size) % feeds[name].shape[axis], axis=axis)
        with probing(self._info, feeds):
            want = self._results(feeds)
        for name, array in want.items():
            axis = self._outputs[name]
            if array.ndim <= axis or array.shape[axis] != self._size:
                raise self._refusal(f"the output {name!r} has no batch dimension: its shape is {list(array.shape)}")
        size = self._size
        orders = (list(range(size))[::-1], [0] * size, [size - 1] * size, [(row + 1) % size for row in range(size)])
        for order in orders:
            got = self._results({n: np.take(a, order, axis=axes[n]) if n in axes else a for n, a in feeds.items()})
            for name, array in want.items():
                if np.take(array, order, axis=self._outputs[name]).tobytes() != got[name].tobytes():
                    raise self._refusal(
                        f"rows of the output {name!r} change with the other rows of the batch or their place in it"
                    )

    def _results(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        return {name: np.array(array) for name, array in self._model.run(feeds).items()}

    def _refusal(self, reason: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"execution.static_batch: {self._size} cannot be granted: {reason}; leave it out"
        )

    def padded(self, feeds: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """Return inputs of all rows, and how many of them are of the caller."""
        if not hasattr(feeds, "items"):
            return feeds, self._size  # the model itself refuses it
        counts = {
            name: int(array.shape[self._inputs[name]])
            for name, array in feeds.items()
            if name in self._inputs and len(getattr(array, "shape", ())) > self._inputs[name]
        }
        rows = max(counts.values(), default=self._size)
        if rows == self._size and len(set(counts.values())) <= 1:
            return feeds, rows
        for name, count in counts.items():
            if count != rows or not 1 <= count <= self._size:
                others = f", and others have {rows}" if count != rows else ""
                raise InputError(
                    f"input {name!r} has {count} rows{others}; execution.static_batch takes 1 to {self._size}, the "
                    "same number in all inputs"
                )
        return {
            name: _pad(name, array, self._inputs[name], self._size) if name in counts else array
            for name, array in feeds.items()
        }, rows

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Pad, run and cut; see `InferenceSession`."""
        full, rows = self.padded(feeds)
        outputs = self._run(full, stream)
        if rows == self._size:
            return outputs
        with self._lock:
            self._padded += 1
        return {name: _cut(array, self._outputs.get(name, 0), rows) for name, array in outputs.items()}

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind buffers of all rows; see `InferenceSession.bind`."""
        return self._model.bind(inputs, outputs, stream)

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Observe runs of the padded inputs."""
        observed = self._model.observe(self.padded(feeds)[0], runs)
        seen = KeySeen(
            observed=f"every run has {self._size} rows",
            status="honoured",
            reason="the session pads; at opening, rows of probe inputs did not depend on each other",
        )
        return msgspec.structs.replace(observed, keys={**observed.keys, "execution.static_batch": seen})

    def intermediates(self, feeds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
        """Return tensors inside of the model with all rows, those of the padding too."""
        return self._model.intermediates(self.padded(feeds)[0], names)

    def whole_batch(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the padded inputs."""
        return self.padded(feeds)[0]

    def conversions(self) -> Sequence[Conversion]:
        """Return those of the model, and how many batches were padded."""
        results = self._model.conversions()
        if not self._padded:
            return results
        what, reason = "batch padded", f"execution.static_batch: every run has {self._size} rows"
        return (*results, Conversion(what=what, reason=reason, count=self._padded))

    def memory(self) -> dict[str, int]:
        """Return that of the model."""
        return self._model.memory()

    def release_idle(self) -> None:
        """Have the model do so."""
        self._model.release_idle()

    def graph_refusal(self) -> str | None:
        """Return that of the model."""
        return self._model.graph_refusal()

    def host_runner(self) -> HostRunner | None:
        """Return that of the model, whose runs are padded and cut."""
        runner = self._model.host_runner()
        if runner is not None:
            run = runner.run

            def run_whole(feeds: dict[str, Any]) -> Mapping[str, Any]:
                full, rows = self.padded(feeds)
                outputs = run(dict(full))
                if rows == self._size:
                    return outputs
                return {name: _cut(array, self._outputs.get(name, 0), rows) for name, array in outputs.items()}

            runner.run = run_whole
        return runner

    def stop_async(self) -> None:
        """Cancel runs that wait, here and in the model."""
        super().stop_async()
        self._model.stop_async()

    def close(self) -> None:
        """Close the model."""
        self._model.close()

    def restore_thread(self) -> None:
        """Undo what the model changed in the calling thread."""
        self._model.restore_thread()


def _pad(name: str, array: Any, axis: int, size: int) -> Any:
    missing = size - int(array.shape[axis])
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        last = array.narrow(axis, int(array.shape[axis]) - 1, 1)
        return torch.cat((array, last.expand(*(missing if i == axis else -1 for i in range(array.ndim)))), dim=axis)
    if not isinstance(array, np.ndarray):
        raise InputError(
            f"input {name!r} is a {type(array).__name__} of {array.shape[axis]} rows; execution.static_batch pads "
            f"arrays of NumPy and PyTorch: give one of these, or all {size} rows"
        )
    return np.take(array, [*range(array.shape[axis]), *[array.shape[axis] - 1] * missing], axis=axis)


def _cut(array: Any, axis: int, rows: int) -> Any:
    region: tuple[slice, ...] = (*(slice(None) for _ in range(axis)), slice(rows))
    return array[region]
