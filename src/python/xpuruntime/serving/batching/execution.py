# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Execution of batches: inputs put together, the run of the model, outputs taken apart, the times."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xpuruntime import _core
from xpuruntime.runtime.cpu_and_memory import cpu_cores
from xpuruntime.runtime.session_registry import reset_in_child
from xpuruntime.serving.batching.requests import Execution, Job, failure_of_run
from xpuruntime.serving.batching.settings import batch_sizes
from xpuruntime.serving.messages import InferTensor, ServingError, Status
from xpuruntime.serving.protocol.datatypes import INLINE_BYTES

if TYPE_CHECKING:
    from xpuruntime.engines.host_model import HostRunner
    from xpuruntime.serving.batching.layout import InputLayout, Layout, OutputLayout
    from xpuruntime.serving.batching.requests import Feed
    from xpuruntime.serving.batching.scheduler import Dispatch, EntryRows
    from xpuruntime.serving.batching.settings import BatchSettings

    Place = tuple[slice, ...]

#: Bytes up to which waking other threads takes longer than copying.
_SMALL = 1 << 20
#: Threads that copy, beside those that need it, at most; one for so many processors.
_MOST, _PROCESSORS = 3, 4


class _Copiers:
    """Threads that are started when they are first needed, also in a child of a fork, which has not its parent's."""

    def __init__(self) -> None:
        self.in_child()
        reset_in_child(self)
        self.count = min(_MOST, cpu_cores().logical // _PROCESSORS)

    def in_child(self) -> None:
        """Begin anew; see `Forks`."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="xpuruntime-copy")
            return self._pool


_copiers = _Copiers()


def copy_parts(buffer: np.ndarray[Any, Any], parts: Iterable[tuple[Place, np.ndarray[Any, Any]]]) -> None:
    """Copy each part to its place in an array. Returns when all are there.

    The core copies several parts without the GIL in between, which NumPy needs after each: a thread would wait for it
    behind those that take requests and give answers.
    """
    left = list(parts)
    if buffer.nbytes < _SMALL or len(left) < 2 or buffer.dtype.hasobject or not _copiers.count:
        _copy_all(buffer, left)
        return
    shares = [left[start :: _copiers.count + 1] for start in range(min(_copiers.count + 1, len(left)))]
    helping: list[Future[None]] = []
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        for share in shares[1:]:
            helping.append(_copiers.pool().submit(_copy_all, buffer, share))
    try:
        for share in (shares[0], *shares[1 + len(helping) :]):
            _copy_all(buffer, share)
    finally:
        failures = [entry.exception() for entry in helping]  # none writes any more
    for failure in failures:
        if failure is not None:
            raise failure


def _copy_all(buffer: np.ndarray[Any, Any], parts: Sequence[tuple[Place, np.ndarray[Any, Any]]]) -> None:
    targets: list[Any] = []
    sources: list[Any] = []
    for region, part in parts:
        target = buffer[region]
        if (
            target.shape == part.shape
            and target.flags.c_contiguous
            and part.flags.c_contiguous
            and _same_bytes(buffer, part)
        ):
            targets.append(target)
            sources.append(part)
        else:
            target[...] = part
    _core.copy_arrays(targets, sources)


def _same_bytes(buffer: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> bool:
    """Whether the bytes of a part are those of the array: of one dtype, and one that buffers have."""
    return buffer.dtype == part.dtype and buffer.dtype.kind in "biufc"


class Slice(NamedTuple):
    """Rows of one request."""

    feed: Feed
    start: int
    stop: int


class Assembled(NamedTuple):
    """The inputs of one execution, how many rows it has, and how many of its elements are real ones and padding."""

    feeds: dict[str, Any]
    rows: int
    elements: int
    padding: int


def assemble(
    layout: Layout, slices: Sequence[Slice], fixed_rows: int = 0, runner: HostRunner | None = None
) -> Assembled:
    """Put the rows of some requests of one group together."""
    empty = np.empty if runner is None else runner.empty
    copies = runner is not None and runner.copies_all
    own = sum(slice_.stop - slice_.start for slice_ in slices)
    rows = fixed_rows or own
    feeds: dict[str, Any] = {}
    elements = total = 0
    for name in slices[0].feed.arrays:
        info = layout.inputs[name]
        parts = [_part(info, slice_) for slice_ in slices]
        elements += sum(part.size for part in parts) if info.batch is not None else parts[0].size
        array = parts[0]
        first = slices[0].feed
        target = None
        if info.padding is not None:
            target = first.targets.get(name, max(slice_.feed.lengths[name] for slice_ in slices))
        alone = len(slices) == 1 or info.batch is None
        if not (
            alone
            and (info.batch is None or rows == own)
            and (target is None or target == first.lengths[name])
            and array.flags.aligned
            and array.flags.c_contiguous
            and (not copies or info.datatype == "BYTES")
        ):
            array = _joined_parts(info, parts, rows, target, np.empty if info.datatype == "BYTES" else empty)
        total += array.size
        feeds[name] = _for_engine(info, array)
    return Assembled(feeds, rows, elements, total - elements)


def whole_inputs(layout: Layout, feed: Feed) -> tuple[dict[str, Any], int]:
    """Return the inputs of a request that runs alone and is not padded, and how many elements they have."""
    feeds: dict[str, Any] = {}
    elements = 0
    for name, array in feed.arrays.items():
        flags = array.flags
        if not (flags.aligned and flags.c_contiguous):
            array = array.copy()
        elements += array.size
        feeds[name] = _for_engine(layout.inputs[name], array)
    return feeds, elements


def whole_outputs(layout: Layout, results: Mapping[str, Any], feed: Feed) -> dict[str, Any]:
    """Return the outputs that a request which ran alone has asked for; raises as `take_apart`."""
    return {name: _checked(layout.outputs[name], results[name], feed.rows) for name in feed.outputs}


def _part(info: InputLayout, slice_: Slice) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = slice_.feed.arrays[info.name]
    if info.batch is None or (slice_.start, slice_.stop) == (0, slice_.feed.rows):
        return array
    return array[_rows(info.batch, slice_.start, slice_.stop)]


def _rows(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(axis)), slice(start, stop))


def _joined_parts(
    info: InputLayout,
    parts: Sequence[np.ndarray[Any, Any]],
    rows: int,
    target: int | None,
    empty: Callable[[Sequence[int], Any], np.ndarray[Any, Any]],
) -> np.ndarray[Any, Any]:
    shape = list(parts[0].shape)
    if info.batch is None:
        parts = parts[:1]
    else:
        shape[info.batch] = rows
    if target is not None:
        assert info.padding is not None
        shape[info.padding.axis] = target
    joined = empty(shape, info.dtype)
    if target is not None and any(part.shape[info.padding.axis] != target for part in parts):  # type: ignore[union-attr]
        joined.fill(info.padding.value)  # type: ignore[union-attr]
    at = 0
    places = []
    for part in parts:
        region = [slice(size) for size in part.shape]
        if info.batch is not None:
            region[info.batch] = slice(at, at + part.shape[info.batch])
            at += part.shape[info.batch]
        places.append((tuple(region), part))
    copy_parts(joined, places)
    if info.batch is not None and at < rows:
        joined[_rows(info.batch, at, rows)] = joined[_rows(info.batch, at - 1, at)]
    return joined


def _for_engine(info: InputLayout, array: np.ndarray[Any, Any]) -> Any:
    if info.datatype == "BYTES":
        engine = np.empty(array.shape, object)
        try:
            engine.reshape(-1)[:] = [_text(element) for element in array.reshape(-1)]
        except UnicodeDecodeError as error:
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"input {info.name!r} has an element that is not UTF-8 text: {error.reason} at byte {error.start}. "
                "Fix: encode text as UTF-8",
            ) from None
        return engine
    if info.datatype == "BF16":
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


def _text(element: Any) -> str:
    return element.decode() if isinstance(element, bytes) else str(element)


def take_apart(layout: Layout, results: Mapping[str, Any], rows: int, slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """Return the outputs of each slice: views of the rows, cut back where the inputs were padded."""
    slice_outputs: list[dict[str, Any]] = [{} for _ in slices]
    for name, info in layout.outputs.items():
        array = _checked(info, results[name], rows)
        at = 0
        for slice_, outputs in zip(slices, slice_outputs, strict=True):
            count = slice_.stop - slice_.start
            if name in slice_.feed.outputs:
                region: list[Any] = [slice(None)] * array.ndim
                if info.batch is not None:
                    region[info.batch] = slice(at, at + count)
                for axis, source in info.cuts:
                    if source in slice_.feed.lengths and axis < array.ndim:
                        region[axis] = slice(slice_.feed.lengths[source])
                region.append(Ellipsis)  # keeps an array of no dimensions one
                outputs[name] = array[tuple(region)]
            at += count
    return slice_outputs


def _checked(info: OutputLayout, result: Any, rows: int) -> np.ndarray[Any, Any]:
    array = _plain(result, info.datatype)
    if info.batch is not None and (array.ndim <= info.batch or array.shape[info.batch] != rows):
        raise ServingError(
            Status.INTERNAL,
            f"output {info.name!r} has the shape {list(array.shape)} for a batch of {rows} rows, so that its rows "
            "cannot be distinguished. Fix: state batching.max_batch_size: 0 for this model",
        )
    return array


def _plain(array: Any, datatype: str) -> np.ndarray[Any, Any]:
    plain_array: np.ndarray[Any, Any] = np.asarray(array)
    if datatype == "BYTES":
        texts = np.empty(plain_array.shape, object)
        texts.reshape(-1)[:] = [
            element.encode() if isinstance(element, str) else bytes(element) for element in plain_array.reshape(-1)
        ]
        return texts
    return plain_array.view(np.uint16) if datatype == "BF16" else plain_array


def joined(layout: Layout, feed: Feed, pieces: Mapping[int, Mapping[str, Any]]) -> list[InferTensor]:
    """Return the outputs of a request as tensors, of the pieces that were run, by their first row."""
    tensors = []
    for name in feed.outputs:
        info = layout.outputs[name]
        if len(pieces) == 1:
            (only,) = pieces.values()
            array = only[name]
            if not array.flags.c_contiguous:
                array = array.copy()
        else:
            parts = [outputs[name] for _, outputs in sorted(pieces.items())]
            assert info.batch is not None
            array = np.concatenate(parts, axis=info.batch)
        tensors.append(InferTensor(name, info.datatype, tuple(array.shape), array))
    return tensors


_tick = time.perf_counter_ns


class BatchExecutor:
    """Runs batches. Safe to call from many threads."""

    def __init__(
        self, runner: HostRunner, layout: Layout, settings: BatchSettings, name: str, short: ShortRuns | None = None
    ) -> None:
        self._runner, self._layout, self._name, self._short = runner, layout, name, short
        self._fixed_rows = settings.max_batch_size if settings.shapes == "fixed" else 0
        #: Whether a request that runs alone is passed to the engine as it came.
        self._passes = not self._fixed_rows and not runner.copies_all
        #: Rows that executions have where the runner wants few sizes; the least that fits is taken.
        self._sizes: tuple[int, ...] = ()
        if runner.pads_rows and settings.max_batch_size:
            self._sizes = batch_sizes(settings.max_batch_size, settings.preferred_batch_size)

    def execute(self, batch: Dispatch, jobs: Sequence[Job], now: float) -> Execution:
        """Run a batch of the parts of these jobs; what it raises is in the result."""
        execution = Execution(batch)
        parts = batch.parts
        for job in jobs:
            if job.began is None:
                job.began = now
            job.executions.append(execution)
        feed = jobs[0].feed
        covers_feed = len(parts) == 1 and parts[0].stop - parts[0].start == feed.rows
        try:
            if covers_feed and self._passes and not feed.lengths:
                self._run_whole(jobs[0], execution)
            else:
                self._run_parts(parts, jobs, execution)
        except BaseException as error:  # of this batch alone: the thread serves on
            execution.error = failure_of_run(error, self._name)
        else:
            if self._short is not None and batch.reason != "inline":
                arrays = (array for job in jobs for outputs in job.pieces.values() for array in outputs.values())
                if sum(array.nbytes for array in arrays) <= INLINE_BYTES:  # they are encoded where it ran
                    self._short.queued(feed.shapes, execution.compute_ns * 1e-9)
        return execution

    def probe(self, feeds: Mapping[str, Any]) -> None:
        """Run inputs, and drop the outputs."""
        self._runner.run(dict(feeds))

    def _run_whole(self, job: Job, execution: Execution) -> None:
        begin = _tick()
        feeds, execution.elements = whole_inputs(self._layout, job.feed)
        execution.rows = job.feed.rows
        copied = _tick()
        results = self._runner.run(feeds)
        ran = _tick()
        job.pieces[0] = whole_outputs(self._layout, results, job.feed)
        execution.input_ns, execution.infer_ns, execution.output_ns = copied - begin, ran - copied, _tick() - ran

    def _run_parts(self, parts: Sequence[EntryRows], jobs: Sequence[Job], execution: Execution) -> None:
        begin = _tick()
        slices = [Slice(job.feed, part.start, part.stop) for job, part in zip(jobs, parts, strict=True)]
        assembly = assemble(self._layout, slices, self._fixed_rows or self._padded(slices), self._runner)
        execution.rows, execution.elements, execution.padding = assembly.rows, assembly.elements, assembly.padding
        copied = _tick()
        results = self._runner.run(assembly.feeds)
        ran = _tick()
        pieces = take_apart(self._layout, results, assembly.rows, slices)
        execution.input_ns, execution.infer_ns, execution.output_ns = copied - begin, ran - copied, _tick() - ran
        for job, part, outputs in zip(jobs, parts, pieces, strict=True):
            job.pieces[part.start] = outputs

    def _padded(self, slices: Sequence[Slice]) -> int:
        rows = sum(slice_.stop - slice_.start for slice_ in slices)
        return next((size for size in self._sizes if size >= rows), 0)


#: Microseconds that two wake-ups of threads take at least.
_HAND_OVER_US = 50
#: Shapes that are remembered.
_MOST_SHAPES = 1024
#: An inline run above the limit is followed by so many times as long without any.
_PAUSE = 20


class ShortRuns:
    """Which requests are short enough to run in the thread that received them, by the shapes of their inputs.

    The shortest execution of a shape decides, because waiting for a processor or for the interpreter only adds to it.
    Those with large outputs are not noted: to encode them takes long, however short the execution.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._best: dict[Hashable, float] = {}
        self._until = 0.0

    @classmethod
    def of(cls, settings: BatchSettings) -> ShortRuns | None:
        """Return the times that settings ask for; `None` where requests are better queued, such as to wait for others.

        Those that could run together are inline where an execution costs less than the way to a thread and back.
        """
        microseconds = settings.inline_below_us
        if settings.max_batch_size > 1:
            microseconds = 0 if settings.max_queue_delay_us else min(microseconds, _HAND_OVER_US)
        return cls(microseconds * 1e-6) if microseconds else None

    def allow(self, shapes: Hashable, now: float) -> bool:
        """Return whether a request of these shapes may run inline."""
        return self._until <= now and self._best.get(shapes, self.limit + 1) <= self.limit

    def queued(self, shapes: Hashable, seconds: float) -> None:
        """Take the time of an execution that was not inline."""
        best = self._best.get(shapes)
        if best is None or seconds < best:
            if best is None and len(self._best) >= _MOST_SHAPES:
                self._best.clear()
            self._best[shapes] = seconds

    def ran(self, seconds: float, now: float) -> None:
        """Take an inline execution that has just ended."""
        if seconds > self.limit:
            self._until = now + _PAUSE * seconds
