# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs of a search: real ones, batched to the size asked for, or generated ones."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xpuruntime.engines.accuracy import GENERATED
from xpuruntime.engines.arrays import digest_parts
from xpuruntime.engines.conversion_log import ConversionLog
from xpuruntime.engines.input_binding import InputValidator
from xpuruntime.engines.model.static_batch import batch_axes
from xpuruntime.engines.precision import probe_feeds
from xpuruntime.engines.quantisation.sample_error import SampleError
from xpuruntime.engines.quantisation.sample_sources import open_source
from xpuruntime.errors import InputError
from xpuruntime.locks.determinism.batches import NoBatch, other_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.engines.model import ModelInfo

__all__ = ["RANDOM", "Samples", "read_samples"]

RANDOM = "random"
#: Inputs that outputs are compared for at most; those that are generated.
_MOST, _MADE = 64, 8


class Samples(NamedTuple):
    """Inputs of single runs, where they are from, a digest over all, and a note on them."""

    feeds: list[dict[str, Any]]
    origin: str
    digest: str
    note: str | None


def read_samples(data: Any, model: ModelInfo, *, batch: int, seed: int) -> Samples:
    """Return the inputs of runs."""
    if data is None:
        raise InputError(
            "a search needs inputs like those that the model will get. Fix: give an .npz file or a folder of them, or "
            "'random' to have some generated"
        )
    note: str | None
    if isinstance(data, str) and data == RANDOM:
        feeds, origin = _made_up(model, batch, seed), GENERATED
        note = f"the inputs were generated (seed {seed}): times and errors of real ones may differ"
    else:
        feeds, origin, left = _given(data, model, batch)
        note = f"of {left} inputs, the first {len(feeds)} were used" if left > len(feeds) else None
    if len(feeds) == 1:  # outputs of the input before would be right
        feeds.append(other_inputs(feeds[0], NoBatch("one input"))[0])
    digest = hashlib.sha256()
    for one in feeds:
        for part in digest_parts(one):
            digest.update(part)
    return Samples(feeds, origin, digest.hexdigest(), note)


def _made_up(model: ModelInfo, batch: int, seed: int) -> list[dict[str, Any]]:
    key, axes = batch_axes(model.inputs)
    name = key if key is not None else f"{next(iter(axes))}.0" if axes else None
    if name is None and batch > 1:
        _refuse_batch(model, batch)
    dims = None if name is None else {name: batch}
    return [probe_feeds(model, seed=seed + index, dims=dims) for index in range(_MADE)]


def _given(data: Any, model: ModelInfo, batch: int) -> tuple[list[dict[str, Any]], str, int]:
    """Return batches of the first samples, where they are from, and how many batches there are."""
    axes = batch_axes(model.inputs)[1]
    if batch > 1 and not axes:
        _refuse_batch(model, batch)
        batch = 1  # the model fixes that batch: each sample is one
    first = next(iter(axes), "")
    samples: list[dict[str, Any]] = []
    rows = 0  # of all samples; those that no batch needs are counted, and not kept
    try:
        source = open_source(data, model)
        for one in _checked(source, model):
            if rows < _MOST * batch:
                samples.append(one)
            rows += one[first].shape[axes[first]] if batch > 1 else 1
    except SampleError as error:
        raise InputError(f"inputs: {error.reason}") from None
    if not samples:
        raise InputError(f"inputs: {source.origin} holds no samples. Fix: give at least one")
    if batch == 1:
        return samples, source.origin, rows
    if rows < batch:
        raise InputError(
            f"inputs: {source.origin} has {rows} rows, and a batch of {batch} is asked for. Fix: give {batch} rows or "
            "more, or a smaller objective.batch"
        )
    joined = {
        name: np.concatenate([one[name] for one in samples], axes[name]) if name in axes else array
        for name, array in samples[0].items()
    }
    count = rows // batch
    batches = [
        {
            name: np.take(array, range(index * batch, (index + 1) * batch), axes[name]) if name in axes else array
            for name, array in joined.items()
        }
        for index in range(min(count, _MOST))
    ]
    return batches, source.origin, count


def _refuse_batch(model: ModelInfo, batch: int) -> None:
    """Refuse a batch that a model without an open batch does not have."""
    first = next((one.shape[0] for one in model.inputs if one.shape), None)
    if first != batch:
        raise InputError(
            f"a batch of {batch} is asked for, and the model has no open batch dimension: its inputs begin with "
            f"{first}. Fix: state objective.batch: {first or 1}"
        )


def _checked(source: Any, model: ModelInfo) -> Iterator[dict[str, Any]]:
    check = InputValidator((*model.inputs, *model.overridable_inputs), [one.name for one in model.overridable_inputs])
    log = ConversionLog()
    for index, (place, sample) in enumerate(source):
        try:
            ready = check.on_host(sample, strict=False, log=log)
        except InputError as error:
            raise InputError(f"inputs: sample {index} ({place}): {error}") from None
        wrong = [name for name, array in ready.items() if not isinstance(array, np.ndarray)]
        if wrong:
            raise InputError(
                f"inputs: sample {index} ({place}): input {wrong[0]!r} is not an array. Fix: give a tensor"
            )
        yield {name: np.array(array) for name, array in ready.items()}
