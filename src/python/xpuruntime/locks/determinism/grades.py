# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Grades of determinism: what each compares, with which batches and in which process, and where results differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from xpuruntime.engines.model.shapes import batch_axes
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.evidence.determinism import FirstDifference
from xpuruntime.evidence.tolerances import differing, kept, ulp_distance
from xpuruntime.inference.calls import poison
from xpuruntime.locks.worker_side.xrt_session_worker import read_arrays, write_arrays
from xpuruntime.printable import error_line
from xpuruntime.runtime.worker import Worker

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo, NodeInfo, TensorInfo
    from xpuruntime.inference import InferenceSession

    Feeds = Mapping[str, "Array"]
    Run = Callable[[Feeds], Mapping[str, Any]]
    #: Repeats the failing test with the tensors of these names; ``None`` where it passes.
    Repeat = Callable[[Sequence[str]], "Mismatch | None"]

Array = np.ndarray[Any, Any]

#: Sizes of batches that are compared with rows alone, where neither the call nor the policy states any.
DEFAULT_SIZES = (2, 3, 4, 8, 16)
#: Rows of the batch whose rows change places.
_PERMUTED = 8


class NoBatch(NamedTuple):
    """Why a model has no batch dimension that can be tested."""

    reason: str


class Batch(NamedTuple):
    """A batch dimension."""

    dimension: str
    axes: dict[str, int]
    rows: dict[str, Array]
    total: int
    sizes: tuple[int, ...]
    permuted: int

    def take(self, index: Sequence[int]) -> dict[str, Array]:
        """Return inputs of these rows."""
        return {
            name: np.take(array, list(index), axis=self.axes[name]) if name in self.axes else array
            for name, array in self.rows.items()
        }


def find_batch(
    inputs: Sequence[TensorInfo], feeds: Mapping[str, Array], sizes: Sequence[int] | None, dimension: str | None
) -> Batch | NoBatch:
    """Find the batch dimension and make rows for it.

    It is the first open dimension of the first input that begins with one, or the one that is named, wherever the
    inputs have it. Where no input begins with an open dimension and all begin with the same fixed size of more than
    one, that is a batch whose size cannot change.
    """
    tensors = [tensor for tensor in inputs if tensor.name in feeds and feeds[tensor.name].ndim]
    key, axes = _axes(tensors, dimension)
    if not axes:
        return _fixed(tensors, feeds)
    name = key if isinstance(key, str) else f"{next(iter(axes))}.0"
    low, high = _limits(tensors, axes)
    wanted = tuple(sorted(set(sizes))) if sizes else _default_sizes(low, high)
    for size in wanted:
        if not low <= size <= high:
            raise InputError(
                f"batch size {size}: the policy allows {low} to {high} for the dimension {name!r}. Fix: give other "
                "sizes, or change execution.shapes"
            )
    if low > 1:
        return NoBatch(f"the policy allows no batch of one row: {name!r} is {low} at least")
    wanted = tuple(size for size in wanted if size > 1)
    if not wanted:
        return NoBatch(f"the policy allows one row alone in the dimension {name!r}")
    permuted = max((size for size in wanted if size <= _PERMUTED), default=wanted[0])
    count = max(wanted)
    present = {feeds[name].shape[axis] for name, axis in axes.items()}
    if len(present) != 1:
        return NoBatch(f"the inputs have different sizes {sorted(present)} in the dimension {name!r}")
    rows = {name: _rows(array, axes[name], count) if name in axes else array for name, array in feeds.items()}
    return Batch(name, axes, rows, count, wanted, permuted)


def other_inputs(feeds: Mapping[str, Array], batch: Batch | NoBatch) -> list[dict[str, Array]]:
    """Return inputs to run in between: two of the same shapes with other values, and one of another batch size."""
    inputs = [{name: _varied(array, step) for name, array in feeds.items()} for step in (1, 2)]
    if isinstance(batch, Batch) and batch.sizes:
        size = next(iter(feeds[name].shape[axis] for name, axis in batch.axes.items()))
        inputs.append(batch.take(range(next((other for other in batch.sizes if other != size), 1))))
    return inputs


def _axes(tensors: Sequence[TensorInfo], dimension: str | None) -> tuple[str | None, dict[str, int]]:
    """Return the open size that is the batch, a name or ``None``, and its axis in each input that has it."""
    if dimension is not None:
        axes = {
            tensor.name: tensor.shape.index(dimension)
            for tensor in tensors
            if tensor.shape and dimension in tensor.shape
        }
        first, dot, index = dimension.rpartition(".")
        if not axes and dot and index == "0":
            axes = {
                tensor.name: 0
                for tensor in tensors
                if tensor.name == first and tensor.shape and tensor.shape[0] is None
            }
            return None, axes
        if not axes:
            raise InputError(f"the model has no open dimension {dimension!r}")
        return dimension, axes
    return batch_axes(tensors)


def _fixed(tensors: Sequence[TensorInfo], feeds: Mapping[str, Array]) -> Batch | NoBatch:
    first = {feeds[tensor.name].shape[0] for tensor in tensors}
    if not tensors:
        return NoBatch("no input has a dimension")
    size = next(iter(first))
    if len(first) != 1 or size < 2:
        return NoBatch("no input begins with an open dimension, and a batch of one fixed size has one row")
    axes = {tensor.name: 0 for tensor in tensors}
    rows = {name: _rows(array, 0, size) if name in axes else array for name, array in feeds.items()}
    return Batch(f"{tensors[0].name}.0", axes, rows, size, (), size)


def _limits(tensors: Sequence[TensorInfo], axes: Mapping[str, int]) -> tuple[int, int]:
    low, high = 1, 1 << 31
    for tensor in tensors:
        if tensor.name in axes and tensor.limits and (limit := tensor.limits[axes[tensor.name]]) is not None:
            low, high = max(low, limit[0]), min(high, limit[1])
    return low, high


def _default_sizes(low: int, high: int) -> tuple[int, ...]:
    ends = {low, high} if high < 1 << 31 else set()
    return tuple(sorted({size for size in DEFAULT_SIZES if low <= size <= high} | ends))


def _rows(array: Array, axis: int, count: int) -> Array:
    """Return an array with `count` different rows: its own first, then its own with the values moved along."""
    own = array.shape[axis]
    if own == 0:
        raise InputError("an input has no rows. Fix: give one row or more")
    parts = [np.take(_varied(array, step), range(own), axis=axis) for step in range(-(-count // own))]
    return np.take(np.concatenate(parts, axis=axis), range(count), axis=axis)


def _varied(array: Array, step: int) -> Array:
    """Return values that the model takes too: the same in another order along the last axis, floats smaller as well."""
    if not step or array.dtype.kind not in "biufV":
        return array
    moved = np.roll(array, step, axis=-1) if array.ndim else array
    return (moved * array.dtype.type(1 - step / 64)).astype(array.dtype) if array.dtype.kind == "f" else moved


#: Runs that are in flight at once.
IN_FLIGHT = 4


class Mismatch(NamedTuple):
    """Two sets of tensors that must be the same and are not, and the two situations in words."""

    want: dict[str, Array]
    got: dict[str, Array]
    what: str


TrialResult = tuple[int, Mismatch | None]


def _compared(want: dict[str, Array], got: dict[str, Array], what: str) -> Mismatch | None:
    return Mismatch(want, got, what) if differing(want, got) else None


def run_to_run(run: Run, feeds: Feeds, others: Sequence[Feeds], trials: int) -> TrialResult:
    """Run the same inputs again and again, with other inputs in between."""
    want = kept(run(feeds))
    for trial in range(trials):
        run(others[trial % len(others)])
        wrong = _compared(want, kept(run(feeds)), f"run 1 and run {trial + 2} of the same inputs differ")
        if wrong is not None:
            return trial + 1, wrong
    return trials, None


def poisoned(binding: Any, feeds: Feeds, others: Sequence[Feeds], want: dict[str, Array], trials: int) -> TrialResult:
    """Run the same inputs in bound buffers whose outputs are filled with NaN before each run."""
    for trial in range(trials):
        for inputs in (others[trial % len(others)], feeds):
            for name, array in inputs.items():
                binding.inputs[name][...] = array
            for array in binding.outputs.values():
                poison(array)
            binding.run()
        got = kept({name: binding.outputs[name] for name in want})
        what = f"a run and run {trial + 1} with bound outputs that were filled with NaN before differ"
        wrong = _compared(want, got, what)
        if wrong is not None:
            return trial + 1, wrong
    return trials, None


def concurrency(run: Run, feeds: Feeds, others: Sequence[Feeds], trials: int) -> TrialResult:
    """Run the same inputs in several threads, each of which runs other inputs in between."""
    want = kept(run(feeds))
    each = -(-trials // IN_FLIGHT)
    start = threading.Barrier(IN_FLIGHT)
    mismatches: list[Mismatch] = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            start.wait()
            for trial in range(each):
                got = kept(run(feeds))
                wrong = _compared(want, got, f"a run alone and a run with {IN_FLIGHT - 1} others in flight differ")
                if wrong is not None:
                    mismatches.append(wrong)
                if mismatches or failed:
                    return
                run(others[(number + trial) % len(others)])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return each * IN_FLIGHT, mismatches[0] if mismatches else None


def rows_of(name: str, array: Array, size: int, axes: Mapping[str, int]) -> Array | None:
    """Return an output with its rows first; ``None`` where it has not one row for each of the batch."""
    axis = axes.get(name, 0)
    return np.moveaxis(array, axis, 0) if array.ndim > axis and array.shape[axis] == size else None


def batch_position(run: Run, batch: Batch, axes: Mapping[str, int], trials: int) -> TrialResult:
    """Permute the rows of a batch, and give a batch of equal rows: each row must stay as it is.

    `axes` has the axis of the batch in each output where that is not the first.
    """
    size = batch.permuted

    def rows(index: Sequence[int]) -> dict[str, Array]:
        outputs = kept(run(batch.take(index)))
        rows_by_name = {name: rows_of(name, array, size, axes) for name, array in outputs.items()}
        return {name: array for name, array in rows_by_name.items() if array is not None}

    want = rows(range(size))
    count = 0
    for index, what in _places(size, trials):
        got = rows(index)
        moved = {name: array[list(index)] for name, array in want.items() if name in got}
        count += 1
        wrong = _compared(moved, got, what)
        if wrong is not None:
            return count, wrong
    return count, None


def _places(size: int, trials: int) -> Iterator[tuple[list[int], str]]:
    """Yield orders of rows to try: equal rows of each kind, reversed, rotated, and random ones."""
    for row in range(min(size, 2)):
        yield [row] * size, f"row {row} and the rows of a batch of {size} times row {row} differ"
    yield list(range(size))[::-1], f"rows of a batch of {size} differ when it is reversed"
    for step in range(1, min(size, 4)):
        yield [(row + step) % size for row in range(size)], f"rows of a batch of {size} differ when moved by {step}"
    random = np.random.default_rng(0)
    for _ in range(max(0, trials - 2 - min(size, 4))):
        yield random.permutation(size).tolist(), f"rows of a batch of {size} differ when they change places"


def batch_invariant(run: Run, batch: Batch, axes: Mapping[str, int]) -> TrialResult:
    """Compare the rows of batches of each size with the rows alone."""

    def rows(index: Sequence[int]) -> dict[str, Array]:
        outputs = kept(run(batch.take(index)))
        rows_by_name = {name: rows_of(name, array, len(index), axes) for name, array in outputs.items()}
        return {name: array for name, array in rows_by_name.items() if array is not None}

    alone = [rows([row]) for row in range(batch.total)]
    count = 0
    for size in batch.sizes:
        for index in dict.fromkeys((tuple(range(size)), tuple(range(batch.total - size, batch.total)))):
            got = rows(index)
            shared = [name for name in got if all(name in alone[row] for row in index)]
            want = {name: np.concatenate([alone[row][name] for row in index]) for name in shared}
            count += size
            wrong = _compared(want, got, f"rows alone and the rows of a batch of {size} differ")
            if wrong is not None:
                return count, wrong
    return count, None


#: A variable of no meaning, whose length moves the stack of the process.
_PADDING = "XPURUNTIME_RESTART_PADDING"
#: Seconds that one process may take.
_LIMIT = 1800.0


def why_not_fresh(session: InferenceSession) -> str | None:
    """Return why a session cannot be opened in a fresh process, or ``None``."""
    from xpuruntime.engines.registry import default_registry

    engine = session._engine
    if session.model.source is not None and not Path(session.model.file).exists():
        return "the model is a module of this process; export it to a file to test a restart"
    known = default_registry()
    if engine.name not in known or type(known.get(engine.name)) is not type(engine):
        return f"the engine {engine.name} is known to this process alone; install it as a plugin"
    return None


def fresh_job(session: InferenceSession, folder: Path, *, trust: bool) -> dict[str, Any]:
    """Return what opens the same session in a fresh process; its calibration is written into `folder`."""
    artifact = session._artifact
    execution = session.policy.execution.replace(
        engine=session.plan.engine, device=session.plan.device, fallback="error"
    )
    calibration = None
    if session._request.calibration is not None:
        samples = folder / "calibration"
        samples.mkdir()
        for index, sample in enumerate(session._request.calibration):
            np.savez(samples / f"{index:08}.npz", **sample)
        calibration = str(samples)
    stated = artifact is not None and session.policy.execution.artifacts.cache == "off"
    return {
        "model": str(artifact.folder if stated and artifact is not None else session.model.file),
        "policy": session.policy.replace(execution=execution).to_dict(),
        "trust": trust,
        "calibration": calibration,
    }


def run_fresh(job: Mapping[str, Any], feeds: Mapping[str, Array], number: int, folder: Path) -> dict[str, Array]:
    """Open the session in a fresh process and run it."""
    write_arrays(folder / "inputs", feeds)
    environment = {"PYTHONHASHSEED": str(number), _PADDING: "x" * (1021 * number)}
    with Worker(environment=environment, timeout=_LIMIT) as worker:
        worker.call(f"{__name__}:run_job", folder=str(folder), **job)
    return read_arrays(folder / "outputs")


def run_job(
    folder: str, model: str, policy: dict[str, Any], names: list[str], calibration: str | None, *, trust: bool
) -> None:
    """Run a session on the inputs in a folder, and write its outputs there: what the fresh process does."""
    import warnings

    from xpuruntime.errors import XpuRuntimeWarning
    from xpuruntime.inference import InferenceSession

    room = Path(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        with InferenceSession(model, policy=policy, trust=trust, calibration=calibration) as session:
            feeds = read_arrays(room / "inputs")
            outputs = dict(session.run(feeds))
            if names:
                outputs |= session.intermediates(feeds, names)
    write_arrays(room / "outputs", outputs)


def locate(info: ModelInfo, mismatch: Mismatch, repeat: Repeat, compared: Collection[str] | None) -> FirstDifference:
    """Find the first node whose tensors differ."""
    name = differing(mismatch.want, mismatch.got)[0]
    output = FirstDifference(unit=None, tensor=name, ulp_max=ulp_distance(mismatch.want[name], mismatch.got[name]))
    makers = {
        tensor: node
        for node in info.nodes
        if not node.graph and node.op != "Constant"
        for tensor in node.outputs
        if tensor
    }
    if not makers:
        return msgspec.structs.replace(output, note="the model shows no nodes")
    search = _Search(repeat)
    divergence = search.first(list(makers))
    if divergence is None:
        why = search.refused or (
            "no tensor inside differs while all are outputs too, which keeps the engine from fusing nodes: the "
            "difference is in nodes that it fuses"
        )
        return msgspec.structs.replace(output, note=why)
    tensor, ulp = divergence
    node, note = makers[tensor], f"some tensors were not seen: {search.refused}" if search.refused else ""
    hidden = None if compared is None else _first_hidden(info, tensor, makers, compared)
    if hidden is not None:
        note = (
            f"from there on tensors have no rows that could be compared; the first that does and differs is {tensor!r} "
            f"of {node.name} ({node.op})"
        )
        node = hidden
    return FirstDifference(unit=node.name, op=node.op, tensor=tensor, ulp_max=ulp, note=note)


def _first_hidden(
    info: ModelInfo, tensor: str, makers: Mapping[str, NodeInfo], rows: Collection[str]
) -> NodeInfo | None:
    """Return the first node between the tensors with rows and `tensor` whose results have no rows."""
    # A node that reads no tensor with rows, such as one that prepares a weight, is none of them.
    entries: list[NodeInfo] = []
    waiting, done = list(makers[tensor].inputs), set[str]()
    while waiting:
        name = waiting.pop()
        if name in rows or name in done or name not in makers:
            continue
        done.add(name)
        if any(input_ in rows for input_ in makers[name].inputs):
            entries.append(makers[name])
        waiting.extend(makers[name].inputs)
    order = {node.name: index for index, node in enumerate(info.nodes)}
    return min(entries, key=lambda node: order[node.name], default=None)


class _Search:
    def __init__(self, repeat: Repeat) -> None:
        self.repeat = repeat
        self.refused = ""

    def first(self, names: Sequence[str]) -> tuple[str, int | None] | None:
        """Return the first of some tensors that differs; where an engine refuses them together, those of each half."""
        try:
            difference = self.repeat(names)
        except XpuRuntimeError as error:
            if len(names) == 1:
                self.refused = self.refused or error_line(error)
                return None
            middle = len(names) // 2
            return self.first(names[:middle]) or self.first(names[middle:])
        if difference is None:
            return None
        wrong = set(differing(difference.want, difference.got))
        name = next((name for name in names if name in wrong), None)
        return None if name is None else (name, ulp_distance(difference.want[name], difference.got[name]))
