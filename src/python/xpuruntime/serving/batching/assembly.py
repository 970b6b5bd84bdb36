# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tensors of requests put into the input of one execution, each copied once, and its outputs taken apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xpuruntime.serving.batching.copying import copy_parts
from xpuruntime.serving.messages import InferTensor
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.engines.host_runner import HostRunner
    from xpuruntime.serving.batching.layout import InputLayout, Layout, OutputLayout
    from xpuruntime.serving.batching.requests import Feed

__all__ = ["Assembled", "Slice", "assemble", "joined", "take_apart", "whole_inputs", "whole_outputs"]


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
    """Put the rows of some requests of one group together.

    Parameters
    ----------
    layout : Layout
    slices : sequence of Slice
    fixed_rows : int
        Rows that the execution has; those that are missing repeat the last one. 0: as many as there are.
    runner : HostRunner, optional
        Gives the memory of inputs; default: the system's.

    Returns
    -------
    Assembled
        A tensor of a single request is passed as it is where it is whole, aligned and needs no padding, and the runner
        takes such memory as well; see `whole_inputs`.
    """
    empty = np.empty if runner is None else runner.empty
    copies = runner is not None and runner.copies_all
    own = sum(one.stop - one.start for one in slices)
    rows = fixed_rows or own
    feeds: dict[str, Any] = {}
    elements = total = 0
    for name in slices[0].feed.arrays:
        info = layout.inputs[name]
        parts = [_part(info, one) for one in slices]
        elements += sum(part.size for part in parts) if info.batch is not None else parts[0].size
        array = parts[0]
        first = slices[0].feed
        target = None
        if info.padding is not None:
            target = first.targets.get(name, max(one.feed.lengths[name] for one in slices))
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


def _part(info: InputLayout, one: Slice) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = one.feed.arrays[info.name]
    if info.batch is None or (one.start, one.stop) == (0, one.feed.rows):
        return array
    return array[_rows(info.batch, one.start, one.stop)]


def _rows(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(axis)), slice(start, stop))


def _joined_parts(
    info: InputLayout,
    parts: Sequence[np.ndarray[Any, Any]],
    rows: int,
    target: int | None,
    empty: Callable[[Sequence[int], Any], np.ndarray[Any, Any]],
) -> np.ndarray[Any, Any]:
    """Return a new array with the parts after each other along the batch, padded along one axis."""
    shape = list(parts[0].shape)
    if info.batch is None:
        parts = parts[:1]
    else:
        shape[info.batch] = rows
    if target is not None:
        assert info.padding is not None
        shape[info.padding.axis] = target
    made = empty(shape, info.dtype)
    if target is not None and any(part.shape[info.padding.axis] != target for part in parts):  # type: ignore[union-attr]
        made.fill(info.padding.value)  # type: ignore[union-attr]
    at = 0
    places = []
    for part in parts:
        place = [slice(size) for size in part.shape]
        if info.batch is not None:
            place[info.batch] = slice(at, at + part.shape[info.batch])
            at += part.shape[info.batch]
        places.append((tuple(place), part))
    copy_parts(made, places)
    if info.batch is not None and at < rows:
        made[_rows(info.batch, at, rows)] = made[_rows(info.batch, at - 1, at)]
    return made


def _for_engine(info: InputLayout, array: np.ndarray[Any, Any]) -> Any:
    if info.datatype == "BYTES":
        made = np.empty(array.shape, object)
        try:
            made.reshape(-1)[:] = [_text(one) for one in array.reshape(-1)]
        except UnicodeDecodeError as error:
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"input {info.name!r} has an element that is not UTF-8 text: {error.reason} at byte {error.start}. "
                "Fix: encode text as UTF-8",
            ) from None
        return made
    if info.datatype == "BF16":
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)
    return array


def _text(element: Any) -> str:
    return element.decode() if isinstance(element, bytes) else str(element)


def take_apart(layout: Layout, results: Mapping[str, Any], rows: int, slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """Return the outputs of each slice: views of the rows, cut back where the inputs were padded.

    Raises
    ------
    ServingError
        ``INTERNAL``: the model gave another number of rows than it got.
    """
    found: list[dict[str, Any]] = [{} for _ in slices]
    for name, info in layout.outputs.items():
        array = _checked(info, results[name], rows)
        at = 0
        for one, outputs in zip(slices, found, strict=True):
            count = one.stop - one.start
            if name in one.feed.outputs:
                place: list[Any] = [slice(None)] * array.ndim
                if info.batch is not None:
                    place[info.batch] = slice(at, at + count)
                for axis, source in info.cuts:
                    if source in one.feed.lengths and axis < array.ndim:
                        place[axis] = slice(one.feed.lengths[source])
                place.append(Ellipsis)  # keeps an array of no dimensions one
                outputs[name] = array[tuple(place)]
            at += count
    return found


def _checked(info: OutputLayout, result: Any, rows: int) -> np.ndarray[Any, Any]:
    """Return an output of an execution, with a row for each of its inputs."""
    array = _plain(result, info.datatype)
    if info.batch is not None and (array.ndim <= info.batch or array.shape[info.batch] != rows):
        raise ServingError(
            Status.INTERNAL,
            f"output {info.name!r} has the shape {list(array.shape)} for a batch of {rows} rows, so that its rows "
            "cannot be distinguished. Fix: state batching.max_batch_size: 0 for this model",
        )
    return array


def _plain(array: Any, datatype: str) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = np.asarray(array)
    if datatype == "BYTES":
        texts = np.empty(made.shape, object)
        texts.reshape(-1)[:] = [one.encode() if isinstance(one, str) else bytes(one) for one in made.reshape(-1)]
        return texts
    return made.view(np.uint16) if datatype == "BF16" else made


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
