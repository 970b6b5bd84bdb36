# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`HostModel`: what every engine that computes on host memory does with the caller's arrays."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.arrays import from_host, kind_of, kind_of_feeds, to_host, to_tensor
from xpuruntime.engines.base import LoadedModel, closed
from xpuruntime.engines.conversion_log import ConversionLog
from xpuruntime.engines.input_binding import (
    InputValidator,
    empty_host_array,
    fixed_shape,
    host_array,
    is_tensor,
    known_outputs,
    refuse_stream,
    type_name,
)
from xpuruntime.errors import InputError
from xpuruntime.runtime.instrumented_calls import instrumented_method

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime import _core
    from xpuruntime.engines.arrays import Kind
    from xpuruntime.engines.base import Observed
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.evidence.records import Conversion

__all__ = ["HostModel", "bound_buffers", "overlapping"]

#: A type that NumPy itself does not have: it travels through DLPack.
_EXTENDED = "bfloat16"


class HostModel(LoadedModel):
    """A model on host memory: NumPy in, NumPy out, other frameworks through DLPack without copies.

    A subclass runs checked arrays: `_execute` for NumPy, `_execute_tensors` for models with bfloat16 at their border.

    Parameters
    ----------
    handle : object
        What the engine runs; dropped by `close`. Runs in other threads finish first, since they hold it.
    info : ModelInfo
    outputs : sequence of str
        Output names in the engine's order.
    optional : sequence of TensorInfo
        Inputs with a default, which a caller may leave out.
    strict : bool
        Refuse what would need a copy instead of copying once and saying so.
    observer : callable
        ``observer(feeds, runs) -> Observed``.
    log : ConversionLog
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
                    msg = f"input {name!r} is not C-contiguous and the policy is strict; pass a contiguous tensor"
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
            msg = "bind() on the CPU takes NumPy types only, and this model has bfloat16 inputs or outputs; use run()"
            raise InputError(msg)

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run an instrumented copy; see `LoadedModel.observe`."""
        if self._handle is None:
            closed()
        return self._observer(self._observed_feeds(feeds), runs)

    def _observed_feeds(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return checked inputs as the observer takes them."""
        return self.ready(feeds)[0]

    def conversions(self) -> Sequence[Conversion]:
        """Return what was copied so far."""
        return self._log.records()

    def close(self) -> None:
        """Drop the engine's model; runs in other threads finish first, since they hold it."""
        self._handle = None
        self._check.forget()


def bound_buffers(
    model: HostModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]]]:
    """Return the input and output buffers of a binding: those given, and others made.

    The model is run once: that is the only way to the shapes of outputs that is right for every model.

    Raises
    ------
    InputError
        A buffer has the wrong name, dtype, shape or layout.
    """
    check = model._check
    check.names({**dict.fromkeys(check.required), **inputs})
    wanted = [name for name in check.infos if name in check.required or name in inputs]
    bound = {name: _input_buffer(check.infos[name], inputs.get(name)) for name in wanted}
    check.full({name: (type_name(a, check.infos[name]), a.shape) for name, a in bound.items()})
    known_outputs(outputs, model._outputs)
    results = instrumented_method(model, "run")(dict(bound))
    made = {name: _output_buffer(name, results[name], outputs.get(name)) for name in model._outputs}
    return bound, made


def overlapping(
    inputs: Mapping[str, np.ndarray[Any, Any]],
    outputs: Mapping[str, np.ndarray[Any, Any]],
    *,
    strict: bool,
    log: ConversionLog,
) -> frozenset[str]:
    """Return the outputs whose buffers share memory with an input: an engine must not write there while it reads.

    Parameters
    ----------
    inputs, outputs : mapping of str to numpy.ndarray
        The contiguous buffers of a binding.
    strict : bool
        Refuse such outputs, since each run has to copy them.
    log : ConversionLog
        Called with the copies.

    Raises
    ------
    InputError
        Two outputs share memory; or an output shares memory with an input and the policy is strict.
    """
    found = set()
    for name, array in outputs.items():
        for other, buffer in outputs.items():
            if other != name and np.may_share_memory(array, buffer):
                raise InputError(f"the buffers of outputs {name!r} and {other!r} share memory; give each its own")
        source = next((other for other, buffer in inputs.items() if np.may_share_memory(array, buffer)), None)
        if source is None:
            continue
        if strict:
            msg = (
                f"the buffer of output {name!r} shares memory with input {source!r}, so that each run would copy the "
                "result, and the policy is strict; give the output a buffer of its own"
            )
            raise InputError(msg)
        log.add(f"output {name!r} copied after each bound run", f"its buffer shares memory with input {source!r}")
        found.add(name)
    return frozenset(found)


def _in_kind(tensor: _core.Tensor, kind: Kind) -> Any:
    if kind == "torch":
        return sys.modules["torch"].from_dlpack(tensor)
    return tensor if kind == "tensor" else tensor.numpy()


def _input_buffer(info: TensorInfo, given: Any) -> np.ndarray[Any, Any]:
    if given is None or isinstance(given, tuple) or info.dtype == "string" or not is_tensor(info):
        return empty_host_array(info.name, fixed_shape(info, given), np.dtype(info.dtype))
    if isinstance(given, list) and all(isinstance(size, int) for size in given):
        msg = f"input {info.name!r}: a shape is a tuple; pass bind({{{info.name!r}: {tuple(given)}}})"
        raise InputError(msg)
    array = host_array(info, given)
    if not array.flags.c_contiguous:
        msg = (
            f"input {info.name!r} is not C-contiguous, so its memory cannot be bound; pass "
            "np.ascontiguousarray(x), or its shape"
        )
        raise InputError(msg)
    return array


def _output_buffer(name: str, expected: Any, given: Any) -> np.ndarray[Any, Any]:
    if not isinstance(expected, np.ndarray):
        msg = f"output {name!r} is no tensor, so it has no fixed buffer; use run()"
        raise InputError(msg)
    shape, dtype = expected.shape, expected.dtype
    if dtype.kind == "O":
        msg = f"output {name!r} holds strings, which have no fixed buffer; use run()"
        raise InputError(msg)
    if given is None:
        return empty_host_array(name, shape, dtype)
    if not hasattr(given, "__dlpack__"):
        msg = f"output {name!r} is given as a {type(given).__name__}; pass an array to write into, or leave it out"
        raise InputError(msg)
    array = to_host(name, given, kind_of(name, given))
    if array.dtype != dtype or array.shape != shape:
        msg = (
            f"output {name!r} is {dtype.name} {list(shape)} for these inputs, got {array.dtype.name} "
            f"{list(array.shape)}; pass such an array, or leave the output out"
        )
        raise InputError(msg)
    if not array.flags.c_contiguous or not array.flags.writeable:
        msg = f"output {name!r} must be C-contiguous and writable to be bound; pass np.empty(shape, dtype)"
        raise InputError(msg)
    return array
