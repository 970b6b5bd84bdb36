# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Outputs of probe inputs: what a lock keeps of them, and whether those of a session are the same."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.shapes import shape_fits
from xpuruntime.errors import InputError, OutOfMemoryError, PolicyError
from xpuruntime.lockfile.codes import DriftCode
from xpuruntime.lockfile.differences import compare_outputs, samples_agree, unseen
from xpuruntime.lockfile.drift import LockDrift, drift_error, shown
from xpuruntime.lockfile.measured import OutputSample
from xpuruntime.lockfile.records import SHAPES_ID, LockedOutput
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.errors import XpuRuntimeError
    from xpuruntime.inference.locked import LockInForce
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.lockfile.records import Lock, LockedShapes

__all__ = ["check_outputs", "compare_results", "observed_outputs", "probe_at", "shapes_that_fit"]

_PROBE = "probe:0"
#: Values of an output that are kept to compare within a tolerance.
_SAMPLES = 64


def probe_at(info: ModelInfo, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return probe inputs of a model in given shapes. Raises `InputError` where none can be made."""
    from xpuruntime.engines.cuda_arrays import host_copies
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.engines.precision import probe_feeds

    known = {tensor.name for tensor in info.inputs}
    sizes = {name: tuple(shape) for name, shape in shapes.items() if shape and name in known}
    if sizes:
        info = with_shapes(info, Policy.coerce({"execution": {"shapes": {k: list(v) for k, v in sizes.items()}}}))
    return host_copies(probe_feeds(info))  # examples of a module may lie on a device


def shapes_that_fit(info: ModelInfo, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a lock where a model still has such inputs; nothing where it has others."""
    known = {tensor.name: tensor.shape for tensor in (*info.inputs, *info.overridable_inputs)}
    for name, sizes in shapes.items():
        dims = known.get(name, ())
        if name not in known or (dims is not None and not shape_fits(sizes, dims)):
            return {}
    return {name: tuple(sizes) for name, sizes in shapes.items()}


def observed_outputs(
    runs: Sequence[Mapping[str, Any]],
    *,
    rtol: float,
    atol: float,
    at: str = SHAPES_ID,
    random: Collection[str] = (),
) -> tuple[tuple[LockedOutput, ...], tuple[OutputSample, ...]]:
    """Return what a lock has of the outputs of several runs on the same inputs.

    Where their bits differ, an output is compared within a tolerance, with samples of its values; those that depend on
    random numbers are not compared.
    """
    outputs, samples = [], []
    for name in sorted(runs[0]):
        bits = {_digest(one[name]) for one in runs}
        first = _array(runs[0][name])
        if name in random:
            outputs.append(
                LockedOutput(input=_PROBE, at=at, name=name, dtype=str(first.dtype), shape=(), grade="random")
            )
            continue
        shape = tuple(int(size) for size in first.shape)
        bitwise = len(bits) == 1
        outputs.append(
            LockedOutput(
                input=_PROBE,
                at=at,
                name=name,
                dtype=str(first.dtype),
                shape=shape,
                grade="bitwise" if bitwise else "tolerance",
                sha256=bits.pop() if bitwise else "",
                rtol=0.0 if bitwise else rtol,
                atol=0.0 if bitwise else atol,
            )
        )
        if not bitwise:
            samples.append(OutputSample(name=name, at=at, values=_samples(first)))
    return tuple(outputs), tuple(samples)


def _array(value: Any) -> Any:
    import numpy as np

    return np.asarray(value)


def _digest(value: Any) -> str:
    import numpy as np

    array = np.ascontiguousarray(_array(value))
    data = json.dumps(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return hashlib.sha256(data).hexdigest()


def _samples(array: Any) -> tuple[float, ...]:
    import numpy as np

    flat = np.ravel(array)
    places = np.unique(np.linspace(0, max(len(flat) - 1, 0), min(_SAMPLES, len(flat))).astype(np.int64))
    return tuple(float(value) for value in np.asarray(flat[places], np.float64))


def check_outputs(session: InferenceSession, in_force: LockInForce) -> None:
    """Run probe inputs and compare their outputs with those of a lock.

    A lock has none where no probe inputs can be made or the model refuses them, and only there.
    """
    from xpuruntime.engines.precision import probing

    lock, where = in_force.lock, in_force.where
    for shapes in lock.identity.shapes:
        locked = tuple(one for one in lock.identity.outputs if one.at == shapes.id)
        try:
            feeds = probe_at(session.model, shapes.inputs)
            with probing(session.model, feeds):
                results = session.run(feeds)
        except (InputError, PolicyError, OutOfMemoryError) as error:
            if not locked and isinstance(error, InputError):
                continue
            raise drift_error(where, [_shapes_drift(shapes, error)]) from error
        drifts = compare_results(locked, lock, results, shapes.id, session.model)
        if drifts:
            raise drift_error(where, drifts)


def _shapes_drift(shapes: LockedShapes, error: XpuRuntimeError) -> LockDrift:
    return LockDrift(
        code=DriftCode.SHAPES,
        subject=shapes.id,
        expected=shown({name: list(sizes) for name, sizes in shapes.inputs.items()}),
        found=f"a model that does not run with them: {error.reason}",
        restore="restore the file of the lock, or make it again with `xrt lock MODEL --upgrade --shapes`",
    )


def compare_results(
    locked: tuple[LockedOutput, ...], lock: Lock, results: Mapping[str, Any], at: str, model: ModelInfo
) -> tuple[LockDrift, ...]:
    """Return what differs between the outputs of a lock and those of one run on its probe inputs."""
    found, _ = observed_outputs([results], rtol=0, atol=0, at=at, random=model.random_outputs)
    now = {one.name: one for one in found}
    samples = {one.name: one.values for one in lock.measured.samples if one.at == at}
    for one in locked:
        other = now.get(one.name)
        near = (
            one.grade == "tolerance"
            and other is not None
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and samples_agree(samples.get(one.name, ()), _samples(_array(results[one.name])), one.rtol, one.atol)
        )
        if near:
            now[one.name] = one
    return compare_outputs(locked, tuple(now.values()), unseen(lock.identity))
