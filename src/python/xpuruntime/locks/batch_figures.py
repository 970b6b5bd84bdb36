# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Figures that a lock keeps for servers: times by batch size, and the memory that one more session takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.shapes import batch_axes
from xpuruntime.errors import InputError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.inference.calls import host_runner, time_batches
from xpuruntime.inference.locked import probe_at
from xpuruntime.lockfile.measured import SessionMemory
from xpuruntime.locks.session_worker import MODULE, session_worker
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.runtime.worker import WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.inference import InferenceSession
    from xpuruntime.lockfile.measured import BatchTime
    from xpuruntime.policies import Policy

__all__ = ["check_batches", "memory_of_session", "times_of_batches"]

_MOST = 1 << 20


def check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    """Return batch sizes in ascending order. Raises `InputError` for what is none."""
    for rows in batches:
        if type(rows) is not int or not 1 <= rows <= _MOST:
            raise InputError(f"batches: {rows!r} is not a batch size; expected whole numbers from 1 to {_MOST:,}")
    return tuple(sorted(set(batches)))


def times_of_batches(
    session: InferenceSession, shapes: Mapping[str, Sequence[int]], batches: Sequence[int]
) -> tuple[BatchTime, ...]:
    """Return times of runs by batch size, with all other sizes as they are in `shapes`."""
    return time_batches(host_runner(session), lambda rows: feeds_of_rows(session, shapes, rows), batches)


def feeds_of_rows(session: InferenceSession, shapes: Mapping[str, Sequence[int]], rows: int) -> dict[str, Any]:
    """Return probe inputs of a batch of so many rows."""
    axes = batch_axes(session.inputs)[1]
    if not axes:
        raise InputError(
            "batches: no input of the model begins with an open dimension. Fix: leave batches out, or export the model "
            "with an open batch dimension"
        )
    sizes = {name: list(shape) for name, shape in shapes.items()}
    for name, axis in axes.items():
        if name in sizes:
            sizes[name][axis] = rows
    return probe_at(session.model, sizes)


def memory_of_session(
    session: InferenceSession,
    model: Any,
    policy: Policy,
    shapes: Mapping[str, Sequence[int]],
    rows: int,
    *,
    trust: bool,
) -> SessionMemory | None:
    """Return what one more session of the model takes of its device, once it has run a batch of so many rows.

    A process of this interpreter opens two, and the second counts: libraries and the context of a device are there by
    then. ``None`` where the model is a module in memory, the process fails, or the system does not say.
    """
    if not isinstance(model, (str, os.PathLike)):
        return None
    arguments = {"policy": policy.replace(verify=None).to_dict(), "trust": trust}
    with ScratchFolder("lock") as folder:
        inputs = Path(folder, "inputs")
        write_arrays(inputs, feeds_of_rows(session, shapes, rows))
        place = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
        with session_worker(sys.executable) as worker:
            try:
                found = worker.call(f"{MODULE}:session_memory", model=place, inputs=str(inputs), arguments=arguments)
            except WorkerFailure:
                return None
    return None if found is None else SessionMemory(device=found["device"], bytes=found["bytes"], rows=rows)
