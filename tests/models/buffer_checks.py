# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks that a session neither writes the caller's arrays nor changes its results later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from buffer_cases import BufferCase

    import xpuruntime as xrt

__all__ = ["check_bound", "check_runs", "layouts", "on_device"]

Array = np.ndarray[Any, Any]

#: Of values, relative and absolute.
TOLERANCE = 1e-5


def _unaligned(array: Array) -> Array:
    memory = np.empty(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _apart(array: Array) -> Array:
    wide = np.full((*array.shape, 2), 3, array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


#: Name to what makes another array of the same values.
layouts: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda array: array,
    "read_only": _read_only,
    "unaligned": _unaligned,
    "strided": _apart,
    "fortran": lambda array: np.asfortranarray(array) if array.ndim else array,
    "negative_strides": lambda array: np.ascontiguousarray(array[::-1])[::-1] if array.ndim else array,
}


def on_device(array: Array) -> Any:
    """Return a tensor of PyTorch on the CUDA device with the values of `array`."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)).to("cuda:0")


def _host(value: Any) -> Array:
    return value.cpu().numpy() if hasattr(value, "cpu") else np.asarray(value)


def _writable(value: Any) -> bool:
    return not isinstance(value, np.ndarray) or bool(value.flags.writeable)


def _equal(got: Any, want: Array, what: str) -> None:
    got = _host(got)
    assert got.shape == want.shape, what
    assert got.dtype == want.dtype, what
    np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def _scribble(array: Any) -> None:
    if _writable(array):
        array[...] = 1 if str(array.dtype).endswith("bool") else 77


def _same(arrays: Mapping[str, Any], kept: Mapping[str, Array], what: str) -> None:
    for name, array in arrays.items():
        np.testing.assert_array_equal(_host(array), kept[name], err_msg=f"{what}: input {name}")


def check_runs(
    call: Callable[[dict[str, Any]], Mapping[str, Any]],
    case: BufferCase,
    rows: tuple[int, ...],
    *,
    layout: Callable[[Array], Any] = layouts["contiguous"],
    zeros: bool = False,
) -> list[tuple[dict[str, Any], dict[str, Array]]]:
    """Run `case` with one number of rows after another, and look at all arrays after each run and at the end.

    Returns the results with what they must be, so that a caller can look again after `close`.
    """
    all_results: list[tuple[dict[str, Any], dict[str, Array]]] = []
    for step, count in enumerate(rows):
        what = f"{case.name}, run {step} of {count} rows"
        feeds = {name: layout(array) for name, array in case.feeds(step, count).items()}
        flags = {name: _writable(array) for name, array in feeds.items()}
        kept = {name: _host(array).copy() for name, array in feeds.items()}
        want = {name: np.array(array) for name, array in case.compute(kept).items()}
        if zeros:
            want = {name: np.zeros_like(array) for name, array in want.items()}
        results = dict(call(feeds))
        assert set(results) == set(want), what
        for name, array in want.items():
            _equal(results[name], array, f"{what}: output {name}")
        _same(feeds, kept, what)
        assert {name: _writable(array) for name, array in feeds.items()} == flags, what
        for array in feeds.values():  # the caller uses its arrays again
            _scribble(array)
        all_results.append((results, want))
        for number, (earlier, values) in enumerate(all_results):
            for name, array in values.items():
                _equal(earlier[name], array, f"{what}: output {name} of run {number}, later")
    move = on_device if layout is on_device else layouts["contiguous"]
    _check_apart(call, case, {name: move(array) for name, array in case.feeds(99, rows[-1]).items()}, zeros)
    return all_results


def _check_apart(call: Callable[..., Mapping[str, Any]], case: BufferCase, feeds: dict[str, Any], zeros: bool) -> None:
    """Write into each result: no other result, no input and no later run may change."""
    kept = {name: _host(array).copy() for name, array in feeds.items()}
    want = {name: np.array(array) for name, array in case.compute(kept).items()}
    if zeros:
        want = {name: np.zeros_like(array) for name, array in want.items()}
    for victim in want:
        results = dict(call(feeds))
        victims = results[victim]
        _scribble(victims if hasattr(victims, "cpu") else np.asarray(victims))
        for name, array in want.items():
            if name != victim:
                _equal(results[name], array, f"{case.name}: output {name} after output {victim} was written")
        _same(feeds, kept, f"{case.name}: after output {victim} was written")
    results = dict(call(feeds))
    for name, array in want.items():
        _equal(results[name], array, f"{case.name}: output {name} after results were written")


def check_bound(
    session: xrt.InferenceSession,
    case: BufferCase,
    rows: int,
    *,
    zeros: bool = False,
    move: Callable[[Array], Any] = layouts["contiguous"],
) -> None:
    """Bind arrays of the caller's and check several runs."""

    def expected(arrays: Mapping[str, Any]) -> dict[str, Array]:
        feeds = {name: _host(array).copy() for name, array in arrays.items()}
        want = {name: np.array(array) for name, array in case.compute(feeds).items()}
        return {name: np.zeros_like(array) for name, array in want.items()} if zeros else want

    arrays = {name: move(array) for name, array in case.feeds(0, rows).items()}
    buffers = {name: move(np.full(array.shape, 1, array.dtype)) for name, array in expected(arrays).items()}
    given = session.bind(dict(arrays), dict(buffers) if case.truly_declared else None)
    made = session.bind(dict(arrays))
    for step in range(3):
        what = f"{case.name}, bound run {step}"
        for name, array in case.feeds(step, rows).items():
            arrays[name][...] = move(array[tuple(slice(size) for size in arrays[name].shape)])
        kept = {name: _host(array).copy() for name, array in arrays.items()}
        want = expected(arrays)
        for binding in (given, made):
            binding.run()
            _same(arrays, kept, what)
            for name, array in want.items():
                _equal(binding.outputs[name], array, f"{what}: output {name}")
        for name, array in buffers.items():
            if case.truly_declared:
                _equal(array, want[name], f"{what}: buffer {name}")
    earlier = {name: _host(array).copy() for name, array in made.outputs.items()}
    session.run(case.feeds(50, rows))
    for name, array in earlier.items():
        _equal(made.outputs[name], array, f"{case.name}: bound output {name} after another run")
    given.close()
    made.close()
