# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`compare_with_lock`: what differs between a lock and another lock, a report, or an interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model import read_model
from xpuruntime.errors import InputError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.inference.locked import shapes_that_fit
from xpuruntime.lockfile.records import Lock
from xpuruntime.lockfile.rules import policy_of
from xpuruntime.locks.diff.locked_levels import locked_levels
from xpuruntime.locks.diff.recorded import of_lock, of_report
from xpuruntime.locks.diff.result import Diff
from xpuruntime.locks.diff.side import FileSide, LockSide, call, start_worker
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.lockfile.records import Identity
    from xpuruntime.locks.diff.recorded import RecordedSide
    from xpuruntime.locks.diff.side import PythonSide

__all__ = ["compare_with_lock"]


def compare_with_lock(
    sides: Sequence[FileSide | LockSide | PythonSide],
    model: str | os.PathLike[str] | None,
    *,
    inputs: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
) -> Diff:
    """Say what differs between two sides of which one is a lock."""
    read = {place: side.lock() for place, side in enumerate(sides) if isinstance(side, LockSide)}
    first, lock = next(iter(read.items()))
    like = lock.identity
    found: list[RecordedSide] = []
    with ScratchFolder("diff") as folder:
        for place, side in enumerate(sides):
            if isinstance(side, LockSide):
                found.append(of_lock(side.name, read[place]))
                continue
            if like.subject != "inference":
                msg = f"a lock of {like.subject} can be compared with another lock alone. Fix: give two locks"
                raise InputError(msg)
            if isinstance(side, FileSide):
                found.append(of_report(side.name, side.report(), like))
            else:
                assert model is not None
                found.append(_locked_there(side, model, sides[first].name, like, inputs, arguments, Path(folder)))
    _check_comparable(found)
    levels, notes = locked_levels(*found)
    return Diff(
        before=sides[0].name,
        after=sides[1].name,
        model=os.fspath(model) if model is not None else like.model.name if like.model is not None else "",
        levels=levels,
        notes=notes,
    )


def _locked_there(
    side: PythonSide,
    model: str | os.PathLike[str],
    where: str,
    like: Identity,
    inputs: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    folder: Path,
) -> RecordedSide:
    """Lock the model in an interpreter as the lock `like`, of the file `where`, was made."""
    stated = dict(arguments)
    if like.policy is not None and all(
        stated.get(name) is None for name in ("policy", "device", "engine", "precision")
    ):
        stated["policy"] = policy_of(like.policy, where).to_dict()
    written = None
    if inputs is not None:
        written = str(folder / "inputs")
        write_arrays(Path(written), inputs)
    elif like.shapes:
        stated["shapes"] = shapes_that_fit(read_model(model), dict(like.shapes[0].inputs)) or None
    place = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
    with start_worker(side, folder) as worker:
        plain = call(worker, side.name, "lock", model=place, inputs=written, arguments=stated)
    return of_lock(side.name, msgspec.convert(plain, Lock))


def _check_comparable(found: Sequence[RecordedSide]) -> None:
    """Refuse locks of different subjects, and of models that have nothing in common."""
    one, other = (side.identity for side in found)
    if one.subject != other.subject:
        msg = (
            f"'{found[0].name}' is a lock of {one.subject}, '{found[1].name}' of {other.subject}: give two of one kind"
        )
        raise InputError(msg)
    nodes = [
        {node for entry in side.entries for node in entry.sources} | {call.node or call.op for call in side.calls}
        for side in (one, other)
    ]
    if all(nodes) and nodes[0].isdisjoint(nodes[1]):
        msg = f"'{found[0].name}' and '{found[1].name}' are of different models and have no source node in common"
        raise InputError(f"{msg}. Fix: give two locks of one model")
