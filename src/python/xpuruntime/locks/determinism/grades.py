# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The test of each determinism grade, on anything that runs a model.

A test returns how many results it compared and the first `Mismatch`. It takes the run as a callable, so that the same
test runs on the session and on a copy of it that also returns tensors inside of the model.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xpuruntime.inference.calls import poison
from xpuruntime.locks.determinism.bits import differing, kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xpuruntime.locks.determinism.batches import Batch

    Array = np.ndarray[Any, Any]
    Feeds = Mapping[str, Array]
    Run = Callable[[Feeds], Mapping[str, Any]]

__all__ = [
    "IN_FLIGHT",
    "Mismatch",
    "batch_invariant",
    "batch_position",
    "concurrency",
    "poisoned",
    "rows_of",
    "run_to_run",
]

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
    found: list[Mismatch] = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            start.wait()
            for trial in range(each):
                got = kept(run(feeds))
                wrong = _compared(want, got, f"a run alone and a run with {IN_FLIGHT - 1} others in flight differ")
                if wrong is not None:
                    found.append(wrong)
                if found or failed:
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
    return each * IN_FLIGHT, found[0] if found else None


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
        found = {name: rows_of(name, array, size, axes) for name, array in outputs.items()}
        return {name: array for name, array in found.items() if array is not None}

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
        found = {name: rows_of(name, array, len(index), axes) for name, array in outputs.items()}
        return {name: array for name, array in found.items() if array is not None}

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
