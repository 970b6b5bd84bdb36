# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`HostModel`: what every engine that computes on host memory does with the caller's arrays."""

from __future__ import annotations

import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.arrays import Kind, from_host, kind_of, kind_of_feeds, to_tensor
from xpuruntime.engines.base import LoadedModel, Observed, closed
from xpuruntime.engines.input_binding import (
    ConversionLog,
    InputValidator,
    is_tensor,
    refuse_stream,
)
from xpuruntime.errors import InputError, XpuRuntimeError

if TYPE_CHECKING:
    from xpuruntime import _core
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.evidence.records import Conversion

#: A type that NumPy itself does not have: it travels through DLPack.
_EXTENDED = "bfloat16"


class HostModel(LoadedModel):
    """A model on host memory: NumPy in, NumPy out, other frameworks through DLPack without copies.

    A subclass runs checked arrays: `_execute` for NumPy, `_execute_tensors` for models with bfloat16 at their border.
    """

    def __init__(
        self,
        handle: Any,
        info: ModelInfo,
        outputs: Sequence[str],
        *,
        optional: Sequence[TensorInfo] = (),
        strict: bool,
        observer: Callable[[Mapping[str, Any], int], Observed],
        log: ConversionLog,
    ) -> None:
        self._handle = handle
        self._info = info
        self._outputs = list(outputs)
        self._strict = strict
        self._observer = observer
        self._log = log
        self._check = InputValidator((*info.inputs, *optional), [i.name for i in optional])
        self._extended = any(t.dtype == _EXTENDED for t in (*info.inputs, *info.outputs))

    @abstractmethod
    def _execute(self, handle: Any, ready: Mapping[str, Any]) -> Sequence[Any]:
        """Run checked, contiguous arrays and return the outputs in order; raise an XpuRuntimeError."""

    @abstractmethod
    def _execute_tensors(self, handle: Any, tensors: Mapping[str, _core.Tensor]) -> Sequence[_core.Tensor]:
        """Run checked, contiguous tensors and return the outputs in order; raise an XpuRuntimeError."""

    @property
    def plain(self) -> bool:
        """Whether all inputs are tensors of types that NumPy has, so that a fast path can take them as they are."""
        return not self._extended and all(is_tensor(info) and info.dtype != "string" for info in self._info.inputs)

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Check, run, and return results in the caller's kind; see `InferenceSession`."""
        handle = self._handle
        if handle is None:
            closed()
        refuse_stream(stream)
        ready, kind = self.ready(feeds)
        if self._extended:
            tensors = self._execute_tensors(handle, ready)
            return {name: _in_kind(value, kind) for name, value in zip(self._outputs, tensors, strict=True)}
        results = self._execute(handle, ready)
        return {name: from_host(value, kind) for name, value in zip(self._outputs, results, strict=True)}

    def short_run(
        self, execute: Callable[[dict[str, Any], tuple[Any, ...]], Sequence[Any]]
    ) -> Callable[..., dict[str, Any]]:
        """Return `run` with everything looked up once, for arrays in shapes that passed; others go through `run`.

        `execute` gets the inputs by name and their shapes in the order of the model; it returns the outputs.
        """
        slow, names, seen = self.checked_run, self._outputs, self._check._seen
        inputs = tuple((info.name, np.dtype(info.dtype)) for info in self._info.inputs)
        count, array_type = len(inputs), np.ndarray

        def run(
            feeds: Any = None, stream: Any = None, outputs: Sequence[str] | None = None, **other: Any
        ) -> dict[str, Any]:
            try:
                if len(feeds) != count or stream is not None or outputs is not None or other:
                    return slow(feeds, stream, outputs, **other)
                shapes = []
                for name, dtype in inputs:
                    array = feeds[name]
                    if type(array) is not array_type or array.dtype != dtype or not array.flags.c_contiguous:
                        return slow(feeds, stream, outputs, **other)
                    shapes.append(array.shape)
                key = tuple(shapes)
                if key not in seen:
                    return slow(feeds, stream, outputs, **other)
            except XpuRuntimeError:
                raise
            except Exception:  # such as IndexError of an array in place of a dict; `slow` says what is wrong
                return slow(feeds, stream, outputs, **other)
            return dict(zip(names, execute(feeds, key), strict=True))

        return run

    def ready(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], Kind]:
        """Return checked inputs as `_execute` or `_execute_tensors` takes them, and the kind results go back in."""
        self._check.names(feeds)
        kind = kind_of_feeds({n: a for n, a in feeds.items() if is_tensor(self._check.infos[n])})
        if self._extended:
            return self._tensors(feeds), kind
        ready = self._check.on_host(feeds, strict=self._strict, log=self._log)
        if len(ready) == len(self._info.inputs) and all(map(is_tensor, self._info.inputs)):
            self._check.remember(tuple(ready[i.name].shape for i in self._info.inputs))
        return ready, kind

    def _tensors(self, feeds: Mapping[str, Any]) -> dict[str, _core.Tensor]:
        tensors, described = {}, {}
        for name, array in feeds.items():
            tensor = to_tensor(name, array, kind_of(name, array))
            described[name] = (tensor.dtype, tuple(tensor.shape))
            if not tensor.is_contiguous:
                if self._strict:
                    msg = f"input {name!r} is not C-contiguous and the policy is strict. Fix: pass a contiguous tensor"
                    raise InputError(msg)
                self._log.add(f"input {name!r} copied once", "it was not C-contiguous")
                tensor = tensor.contiguous()
            tensors[name] = tensor
        self._check.full(described)
        return tensors

    def check_bind(self, stream: Any) -> None:
        """Refuse what `bind` cannot do here."""
        refuse_stream(stream)
        if self._handle is None:
            closed()
        if self._extended:
            msg = (
                "bind() on the CPU takes NumPy types only, and this model has bfloat16 inputs or outputs. "
                "Fix: use run()"
            )
            raise InputError(msg)

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run an instrumented copy; see `LoadedModel.observe`."""
        if self._handle is None:
            closed()
        return self._observer(self._observed_feeds(feeds), runs)

    def _observed_feeds(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.ready(feeds)[0]

    def conversions(self) -> Sequence[Conversion]:
        """Return what was copied so far."""
        return self._log.records()

    def close(self) -> None:
        """Drop the engine's model; runs in other threads finish first, since they hold it."""
        self._handle = None
        self._check.forget()


def _in_kind(tensor: _core.Tensor, kind: Kind) -> Any:
    if kind == "torch":
        return sys.modules["torch"].from_dlpack(tensor)
    return tensor if kind == "tensor" else tensor.numpy()


class HostRunner:
    """Runs a model on host arrays. Safe to call from many threads."""

    #: What the memory of `empty` is.
    memory = "pageable"
    #: Whether all inputs should be put into memory of `empty`, also those that could be passed as they came.
    copies_all = False
    #: Whether batches should be padded to a few sizes, because every other one costs a capture.
    pads_rows = False
    #: Whether the device computes runs one after the other: a second one beside only has its inputs prepared.
    serial = False

    def __init__(
        self, run: Callable[[dict[str, Any]], Mapping[str, Any]], release_idle: Callable[[], None] | None = None
    ) -> None:
        self.run, self.release_idle = run, release_idle

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return an array of any content to put inputs into. Keep it until the run that takes it has returned."""
        return np.empty(shape, dtype)


class PinnedArrays:
    """NumPy arrays in pinned memory, from a pool that takes it back with the last reference to an array."""

    def __init__(self, device: str, name: str) -> None:
        from xpuruntime import _core

        self._pool = _core.MemoryPool(device, "pinned", name=name)
        self._given: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def tensor(self, shape: Sequence[int], dtype: str) -> Any:
        """Return a tensor of any content."""
        from xpuruntime import _core

        return _core.Tensor.empty(tuple(shape), dtype, "cpu", pool=self._pool)

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return an array of any content."""
        array: np.ndarray[Any, Any] = self.tensor(shape, np.dtype(dtype).name).numpy()
        if array.size:
            self._given[_address(array)] = array
        return array

    def staged(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a tensor with the content of a contiguous array: on its memory where that is pinned, else a copy."""
        from xpuruntime import _core

        caller_tensor = self._given.get(_address(array))
        if caller_tensor is not None and caller_tensor.nbytes >= array.nbytes:
            return _core.Tensor.from_numpy(array)
        staging = self.tensor(array.shape, array.dtype.name)
        np.copyto(staging.numpy(), array)
        return staging


class PinnedRunner(HostRunner):
    """Runs a model whose engine copies inputs to a CUDA device itself, from pinned memory."""

    memory = "pinned"
    copies_all = True

    def __init__(self, run: Callable[[dict[str, Any]], Mapping[str, Any]], device: str, name: str) -> None:
        super().__init__(run)
        self._arrays = PinnedArrays(device, name)

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        """Return a pinned array; see `HostRunner.empty`."""
        return self._arrays.empty(shape, dtype)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
