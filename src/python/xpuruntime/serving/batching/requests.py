# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests on their way to an execution: checked against a model's layout, with a deadline and a level, as jobs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.errors import InputError, OutOfMemoryError, XpuRuntimeError
from xpuruntime.policies.document import did_you_mean
from xpuruntime.printable import printable
from xpuruntime.runtime.telemetry import named_logger
from xpuruntime.serving.batching.layout import shape_of
from xpuruntime.serving.batching.scheduler import Entry
from xpuruntime.serving.messages import InferResponse, ServingError, Status, without_folders

if TYPE_CHECKING:
    from xpuruntime.serving.batching.layout import InputLayout, Layout
    from xpuruntime.serving.batching.scheduler import Dispatch
    from xpuruntime.serving.batching.settings import BatchSettings
    from xpuruntime.serving.messages import InferRequest, InferTensor

#: Largest input without a batch dimension, in bytes, whose requests are compared in order to run together.
_COMPARED = 1024


@dataclass(slots=True)
class Feed:
    """The inputs of one request."""

    arrays: Mapping[str, Any]
    rows: int
    lengths: Mapping[str, int]
    targets: Mapping[str, int]
    group: Hashable
    outputs: tuple[str, ...]
    shapes: Hashable = None


def check_request(request: InferRequest, layout: Layout, *, fixed: bool = False) -> Feed:
    """Return the inputs of a request."""
    arrays: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    targets: dict[str, int] = {}
    sizes: dict[str, int] = {}
    rows: int | None = None
    group: list[tuple[str, Hashable, Hashable]] = []
    for tensor in request.inputs:
        info = layout.inputs.get(tensor.name)
        if info is None:
            raise _refuse(f"no input {tensor.name!r}{did_you_mean(tensor.name, layout.inputs, 'inputs')}")
        if tensor.name in arrays:
            raise _refuse(f"input {tensor.name!r} is there twice. Fix: send it once")
        if tensor.datatype != info.datatype:
            raise _refuse(
                f"input {tensor.name!r} has datatype {tensor.datatype}, and the model takes {info.datatype}. "
                f"Fix: send {info.datatype}"
            )
        shape = tuple(tensor.shape)
        _check_shape(info, shape, sizes)
        arrays[tensor.name] = tensor.data
        if info.batch is not None:
            if rows is None:
                rows = shape[info.batch]
                if rows < 1:
                    raise _refuse(f"input {tensor.name!r} has no rows: its shape is {list(shape)}. Fix: send one")
            elif rows != shape[info.batch]:
                raise _refuse(
                    f"input {tensor.name!r} has {shape[info.batch]} rows, and others have {rows}. Fix: send equal ones"
                )
        key = list(shape)
        if info.batch is not None:
            key[info.batch] = -1
        if info.padding is not None:
            axis = info.padding.axis
            lengths[tensor.name] = shape[axis]
            key[axis] = target = _target(info, shape[axis], fixed)
            if target >= 0:
                targets[tensor.name] = target
        content = _content(tensor) if layout.batched and info.batch is None else None
        group.append((tensor.name, tuple(key), content))
    _add_masks(layout, arrays, lengths, targets, group)
    missing = [name for name, info in layout.inputs.items() if info.required and name not in arrays]
    if missing:
        raise _refuse(f"input {missing[0]!r} is missing. Fix: send {', '.join(map(repr, missing))}")
    group.sort(key=itemgetter(0))  # clients may send inputs in any order
    shapes = tuple([(name, array.shape) for name, array in arrays.items()])
    return Feed(arrays, rows or 1, lengths, targets, tuple(group), _outputs(request, layout), shapes)


def _check_shape(info: InputLayout, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    dims = info.dims
    if dims is None:
        return
    if len(shape) != len(dims):
        raise _refuse(
            f"input {info.name!r} has {len(shape)} dimensions, and the model takes {shape_of(dims)}. "
            "Fix: send that shape"
        )
    for axis, (size, dim) in enumerate(zip(shape, dims, strict=True)):
        known = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
        if known is None or size == known:
            continue
        why = f"{dim!r} is {known} in another input" if isinstance(dim, str) else f"the model takes {shape_of(dims)}"
        raise _refuse(
            f"input {info.name!r} has the shape {list(shape)}: dimension {axis} is {size}, and {why}. "
            "Fix: send a shape that fits"
        )


def _target(info: InputLayout, length: int, fixed: bool) -> int:
    """Return the size that an axis is padded to; -1 for the longest of the batch."""
    assert info.padding is not None
    sizes = info.padding.sizes
    if not sizes:
        return -1
    if length > sizes[-1]:
        raise _refuse(
            f"input {info.name!r} has {length} elements along axis {info.padding.axis}, and at most {sizes[-1]} are "
            "served. Fix: send less"
        )
    return sizes[-1] if fixed else next(size for size in sizes if size >= length)


def _content(tensor: InferTensor) -> Hashable:
    array: np.ndarray[Any, Any] = tensor.data
    if array.dtype != object and array.nbytes <= _COMPARED:
        return array.tobytes()
    return id(array)  # of a request that is still there, so no other has it


def _add_masks(
    layout: Layout,
    arrays: dict[str, Any],
    lengths: dict[str, int],
    targets: dict[str, int],
    group: list[tuple[str, Hashable, Hashable]],
) -> None:
    for name, source in layout.masks.items():
        if name in arrays or source not in arrays:
            continue
        arrays[name] = np.ones(arrays[source].shape, layout.inputs[name].dtype)
        lengths[name] = lengths[source]
        key = list(arrays[source].shape)
        batch, padding = layout.inputs[name].batch, layout.inputs[name].padding
        assert padding is not None
        if batch is not None:
            key[batch] = -1
        key[padding.axis] = targets.get(source, -1)
        if source in targets:
            targets[name] = targets[source]
        group.append((name, tuple(key), None))


def _outputs(request: InferRequest, layout: Layout) -> tuple[str, ...]:
    if not request.outputs:
        return tuple(layout.outputs)
    names = tuple(output.name for output in request.outputs)
    for name in names:
        if name not in layout.outputs:
            raise _refuse(f"no output {name!r}{did_you_mean(name, layout.outputs, 'outputs')}")
    if len(set(names)) < len(names):
        raise _refuse(f"an output is asked for twice: {', '.join(names)}. Fix: ask for each once")
    return names


def _refuse(reason: str) -> ServingError:
    return ServingError(Status.INVALID_ARGUMENT, reason)


class Admission:
    """Checks requests, and makes jobs of them."""

    def __init__(self, layout: Layout, settings: BatchSettings, name: str, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        self._layout, self._fixed = layout, settings.shapes == "fixed"
        self._timeout, self._delays = settings.timeout_us * 1e-6, settings.timeout_action == "delay"
        self._levels, self._default_level = settings.priority_levels, settings.default_level

    def accept(self, request: InferRequest) -> Job:
        """Return a request with its deadline and level."""
        feed = check_request(request, self._layout, fixed=self._fixed)
        now = self._clock()
        deadline = request.deadline
        overdue = None
        if self._timeout:
            if self._delays:
                overdue = now + self._timeout
            else:
                deadline = min(deadline, now + self._timeout) if deadline is not None else now + self._timeout
        if deadline is not None and deadline <= now:
            raise ServingError(
                Status.DEADLINE_EXCEEDED, "the deadline had passed when the request arrived. Fix: allow more time"
            )
        level = self._level(request.priority) if request.priority else self._default_level
        entry = Entry(feed.rows, feed.group, now, deadline, overdue, level)
        job = entry.payload = Job(request, feed, entry)
        return job

    def _level(self, priority: int) -> int:
        levels = self._levels
        if not 1 <= priority <= levels:
            has = f"has the levels 1 to {levels}" if levels else "has no levels"
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"priority {priority}: model {self._name!r} {has}. Fix: leave it out, or set batching.priority_levels",
            )
        return priority


_logger = named_logger("xpuruntime.serving")


@dataclass(slots=True)
class Execution:
    """What was measured of one execution: sizes, times in nanoseconds, and why it was sent."""

    batch: Dispatch
    rows: int = 0
    elements: int = 0
    padding: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    error: BaseException | None = None
    #: Of the devices of the model, the one that it ran on.
    place: int = 0

    @property
    def compute_ns(self) -> int:
        """Nanoseconds of the whole execution."""
        return self.input_ns + self.infer_ns + self.output_ns


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request."""

    request: InferRequest
    feed: Feed
    entry: Entry
    #: Made when the request is queued; one that runs inline has none.
    future: Future[InferResponse] = field(init=False)
    #: When the first of its rows was sent.
    began: float | None = None
    #: Outputs by first row, and the executions that made them.
    pieces: dict[int, dict[str, Any]] = field(default_factory=dict)
    executions: list[Execution] = field(default_factory=list)


class QueueState:
    """What a batcher does at one moment: requests that wait and run, and how long the first of them have."""

    __slots__ = ("executing", "oldest_deadline", "oldest_wait", "running", "waiting")

    def __init__(
        self, waiting: int, running: int, oldest_wait: float, oldest_deadline: float | None, executing: float
    ) -> None:
        self.waiting, self.running = waiting, running
        #: Seconds that the oldest request has waited, and seconds until its deadline; negative where that has passed.
        self.oldest_wait, self.oldest_deadline = oldest_wait, oldest_deadline
        #: Seconds that the longest execution has run so far.
        self.executing = executing


def answer(future: Future[InferResponse], response: InferResponse) -> bool:
    """Set the result, and return whether somebody still waits for it."""
    try:
        future.set_result(response)
    except InvalidStateError:
        return False
    return True


def fail(future: Future[InferResponse], error: BaseException) -> bool:
    """Set the error, and return whether somebody still waits for it."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        return False
    return True


def failure_of_run(error: BaseException, name: str) -> ServingError:
    """Return the error of a failed execution as clients get it.

    It keeps no tensor of the batch alive: tracebacks are dropped, and an error that is not of this package is logged
    with its traceback before.
    """
    if not isinstance(error, (XpuRuntimeError, MemoryError)):
        _logger.error("a batch of model %r failed", name, exc_info=error)
    exception: BaseException | None = error
    while exception is not None and exception.__traceback__ is not None:
        exception.__traceback__ = None
        exception = exception.__cause__ or exception.__context__
    if isinstance(error, ServingError):
        return error
    text = without_folders(printable(str(error))) or type(error).__name__
    if isinstance(error, InputError):
        status = Status.INVALID_ARGUMENT
    elif isinstance(error, (OutOfMemoryError, MemoryError)):
        status = Status.RESOURCE_EXHAUSTED
        text = f"{text}. Fix: lower batching.max_batch_size, or the number of models on the device"
    else:
        status = Status.INTERNAL
    failure = ServingError(status, f"model {name!r}: {text}")
    failure.__cause__ = error
    return failure
