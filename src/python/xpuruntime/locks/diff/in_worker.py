# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One side of a difference, in a worker: a session is opened, explained, run, timed and looked into.

`xrt diff` calls these functions by name in the interpreters of both sides. Arrays go through files of a folder that
both processes see.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.measuring.rounds import time_calls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.inference import InferenceSession

__all__ = ["available", "explain", "intermediates", "open_session", "outputs", "sample"]


class _Side:
    """The session and the inputs of this process."""

    def __init__(self, session: InferenceSession, feeds: dict[str, Any]) -> None:
        self.session, self.feeds = session, feeds


_side: _Side | None = None


def _open() -> _Side:
    if _side is None:
        raise RuntimeError("open_session comes first")
    return _side


def available() -> str:
    """Return the version of xpuruntime here, with its core loaded."""
    from importlib import metadata

    from xpuruntime import _core

    del _core
    try:
        return metadata.version("xpuruntime")
    except metadata.PackageNotFoundError:
        return "of the source tree of the command"


def open_session(model: str, arguments: dict[str, Any], inputs: str) -> None:
    """Plan and load a model; `inputs` is an ``.npz`` file."""
    global _side
    from xpuruntime.inference import InferenceSession

    with np.load(inputs, allow_pickle=False) as found:
        feeds = {name: found[name] for name in found.files}
    _side = _Side(InferenceSession(model, **arguments), feeds)


def explain() -> dict[str, Any]:
    """Return the report of the session, and the defaults of its engine."""
    side = _open()
    report = side.session.explain(side.feeds)
    return {"report": report.to_dict(), "defaults": _defaults(side.session.plan.engine)}


def outputs(folder: str) -> dict[str, dict[str, Any]]:
    """Write the outputs of a run, and return the file of each and whether a second run gave the same bits."""
    side = _open()
    first, second = (dict(side.session.run(side.feeds)) for _ in range(2))
    found = {}
    for place, (name, value) in enumerate(first.items()):
        if not isinstance(value, np.ndarray):
            continue  # sequences and maps have no bits of their own
        repeats = isinstance(second[name], np.ndarray) and value.tobytes() == second[name].tobytes()
        found[name] = {**_written(value, Path(folder, f"output-{place}.npy")), "repeats": repeats}
    return found


def sample(calls: int, samples: int) -> list[float]:
    """Time runs of the session; see `time_calls`."""
    side = _open()
    run, feeds = side.session.run, side.feeds
    return time_calls(lambda: run(feeds), calls, samples)


def intermediates(folder: str) -> dict[str, Any]:
    """Write the output of every node, with all of them as outputs of the model, in the order of the graph."""
    from xpuruntime.engines.accuracy import limits_of
    from xpuruntime.inference.comparing import answers_of
    from xpuruntime.inference.drift import measure_drift
    from xpuruntime.planning import PlanRequest

    side = _open()
    session = side.session
    if session.model.format != "onnx":
        return {"nodes": [], "note": f"a model of the format {session.model.format} cannot be looked into"}
    request = PlanRequest(model=session.model)
    answer = answers_of(request, session.plan, session.policy, session._machine, side.feeds)
    found: dict[str, dict[str, Any]] = {}

    def recorded(model: ModelInfo) -> Mapping[str, Any]:
        got = answer(model)
        for name, value in got.items():
            if isinstance(value, np.ndarray) and name not in found:
                found[name] = _written(value, Path(folder, f"tensor-{len(found)}.npy"))
        return got

    limits = limits_of(request.on(session.plan.device, session.policy), session.plan.settings.get("computes"))
    drift = measure_drift(session.model, side.feeds, limits, recorded, agreed=True)
    nodes = session.model.named_proto().graph.node
    return {
        "nodes": [
            {
                "node": node.name,
                "op": node.op_type,
                "tensors": {name: found[name] for name in node.output if name in found},
            }
            for node in nodes
            if node.op_type != "Constant"
        ],
        "note": f"{len(drift.skipped)} nodes could not be looked into" if drift.skipped else "",
    }


def _written(value: np.ndarray, path: Path) -> dict[str, Any]:
    plain = np.ascontiguousarray(value)
    np.save(path, plain, allow_pickle=False)
    digest = hashlib.sha256(f"{plain.dtype.str} {plain.shape}".encode() + plain.tobytes()).hexdigest()
    return {"file": str(path), "sha256": digest}


def _defaults(engine: str) -> dict[str, str]:
    """Return what an engine does where nothing is asked of it, as far as it says."""
    if engine in ("onnxruntime", "qnn"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        names = (name for name in dir(options) if not name.startswith("_"))
        values = {f"SessionOptions.{name}": getattr(options, name) for name in names}
        return {
            name: str(value) for name, value in values.items() if isinstance(value, (int, float, str)) or _enum(value)
        }
    if engine == "openvino":
        import openvino

        core = openvino.Core()
        found = {}
        for name in sorted(core.get_property("CPU", "SUPPORTED_PROPERTIES")):
            with contextlib.suppress(Exception):  # some are of compiled models alone
                found[f"CPU.{name}"] = str(core.get_property("CPU", name))
        for fact in ("CPU.AVAILABLE_DEVICES", "CPU.SUPPORTED_PROPERTIES", "CPU.FULL_DEVICE_NAME"):
            found.pop(fact, None)
        return found
    return {}


def _enum(value: object) -> bool:
    return hasattr(value, "name") and hasattr(value, "value")
