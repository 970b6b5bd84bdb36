# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A session in a worker process: opened, run, timed, explained and looked into there.

The interpreter of the worker imports this file from its own folder, and its xpuruntime may be of another version: all
but `intermediates` use the public API alone. Arrays go through files of a folder that both processes see.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from xpuruntime import InferenceSession
    from xpuruntime.engines.model import ModelInfo

#: Runs in which engines fill their arenas.
_RUNS = 3

_session: InferenceSession
_feeds: dict[str, Any]


def write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name into a new folder."""
    folder.mkdir()
    for index, (name, array) in enumerate(arrays.items()):
        write_array(folder / f"{index}.npy", array, name)


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Read what `write_arrays` wrote, in the same order."""
    paths = sorted(folder.glob("*.npy"), key=lambda path: int(path.stem))
    return dict(read_array(path) for path in paths)


def write_array(path: Path, array: Any, name: str) -> None:
    """Write an array as ``.npy``, and its name and type beside it."""
    plain = np.asarray(array, order="C")
    try:
        np.save(path, plain.astype(np.str_) if plain.dtype == object else plain, allow_pickle=False)
        path.with_suffix(".json").write_text(json.dumps({"name": name, "dtype": plain.dtype.name}), encoding="utf-8")
    except OSError as error:  # NumPy and a full disk name no file, and NumPy no reason
        code = error.errno or errno.ENOSPC
        raise OSError(code, os.strerror(code), str(path)) from error


def read_array(path: Path) -> tuple[str, np.ndarray]:
    """Return the name and the array that `write_array` wrote."""
    facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    array = np.load(path, allow_pickle=False)
    if array.dtype.kind == "V" and facts["dtype"] != array.dtype.name:  # a type of ml_dtypes: its name is lost
        import ml_dtypes

        array = array.view(getattr(ml_dtypes, facts["dtype"]))
    return facts["name"], array.astype(object) if facts["dtype"] == "object" else array


def load_core() -> None:
    """Import xpuruntime and its native core."""
    importlib.import_module("xpuruntime._core")


def open_session(model: str, inputs: str, arguments: dict[str, Any]) -> dict[str, str]:
    """Open a model, with inputs of the folder that `write_arrays` wrote, and return engine and versions."""
    global _session, _feeds
    import xpuruntime

    _feeds = read_arrays(Path(inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _session = xpuruntime.InferenceSession(model, **arguments)
    plan = _session.plan
    return {"engine": plan.engine, "engine_version": str(plan.engine_version), "xpuruntime": xpuruntime.__version__}


def lock(model: str, inputs: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the lock of a model as it runs here, as plain values; `inputs` is a folder of `write_arrays`."""
    import msgspec

    import xpuruntime

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = xpuruntime.lock(model, inputs=None if inputs is None else read_arrays(Path(inputs)), **arguments).lock
    plain: dict[str, Any] = msgspec.to_builtins(result)
    return plain


def time_session(calls: int, samples: int) -> list[float]:
    """Return the seconds of `samples` times so many runs."""
    run, feeds, clock = _session.run, _feeds, time.perf_counter
    clocks = []
    for _ in range(samples):
        start = clock()
        for _ in range(calls):
            run(feeds)
        clocks.append(clock() - start)
    return clocks


def memory_peak() -> int | None:
    """Return the bytes that this process has held at most; ``None`` where the system does not say."""
    from xpuruntime.runtime.cpu_and_memory import process_memory

    return process_memory().most_resident


def session_memory(model: str, inputs: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Open two sessions and run each, and return what the second took of its device."""
    import xpuruntime

    feeds = read_arrays(Path(inputs))
    held, taken = [], []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session = xpuruntime.InferenceSession(model, **arguments)
        for _ in range(_RUNS):
            session.run(feeds)
        held.append(session)
        taken.append(_taken(session.plan.device))
    first, second = taken
    device = held[0].plan.device
    for session in held:
        session.close()
    return None if first is None or second is None else {"device": device, "bytes": max(0, second - first)}


def _taken(device: str) -> int | None:
    import xpuruntime
    from xpuruntime.runtime.cpu_and_memory import process_memory

    if device == "cpu":
        return process_memory().resident
    if not device.startswith("cuda"):
        return None
    own = xpuruntime.Device(device)
    return own.total_memory - own.free_memory


def explain() -> dict[str, Any]:
    """Return the report of the session, and the defaults of its engine."""
    return {"report": _session.explain(_feeds).to_dict(), "defaults": _defaults(_session.plan.engine)}


def outputs(folder: str) -> dict[str, dict[str, Any]]:
    """Write the outputs of a run, and return the file of each and whether a second run gave the same bits."""
    first, second = (dict(_session.run(_feeds)) for _ in range(2))
    results = {}
    for index, (name, value) in enumerate(first.items()):
        if not isinstance(value, np.ndarray):
            continue  # sequences and maps have no bits of their own
        written = _written(value, name, Path(folder, f"output-{index}.npy"))
        repeats = isinstance(second[name], np.ndarray) and written["sha256"] == _digest(second[name])
        results[name] = {**written, "repeats": repeats}
    return results


def intermediates(folder: str) -> dict[str, Any]:
    """Write the output of every node, with all of them as outputs of the model, in the order of the graph."""
    session = _session
    if session.model.format != "onnx":
        return {"nodes": [], "note": f"a model of the format {session.model.format} cannot be looked into"}
    try:
        from xpuruntime.engines.accuracy import limits_of
        from xpuruntime.inference.comparing import answers_of
        from xpuruntime.inference.comparison import measure_drift
        from xpuruntime.planning import PlanRequest
    except ImportError as error:
        return {"nodes": [], "note": f"that version of xpuruntime gives no tensors of nodes ({error})"}
    request = PlanRequest(model=session.model)
    answer = answers_of(request, session.plan, session.policy, session._machine, _feeds)
    tensors: dict[str, dict[str, Any]] = {}

    def recorded(model: ModelInfo) -> Mapping[str, Any]:
        got = answer(model)
        for name, value in got.items():
            if isinstance(value, np.ndarray) and name not in tensors:
                tensors[name] = _written(value, name, Path(folder, f"tensor-{len(tensors)}.npy"))
        return got

    limits = limits_of(request.on(session.plan.device, session.policy), session.plan.settings.get("computes"))
    drift = measure_drift(session.model, _feeds, limits, recorded, agreed=True)
    nodes = session.model.named_proto().graph.node
    return {
        "nodes": [
            {
                "node": node.name,
                "op": node.op_type,
                "tensors": {name: tensors[name] for name in node.output if name in tensors},
            }
            for node in nodes
            if node.op_type != "Constant"
        ],
        "note": f"{len(drift.skipped)} nodes could not be looked into" if drift.skipped else "",
    }


def _written(value: np.ndarray, name: str, path: Path) -> dict[str, Any]:
    write_array(path, value, name)
    return {"file": str(path), "sha256": _digest(value)}


def _digest(value: np.ndarray) -> str:
    plain = value.astype(np.str_) if value.dtype == object else value
    return hashlib.sha256(f"{plain.dtype.str} {plain.shape}".encode() + plain.tobytes()).hexdigest()


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
        defaults = {}
        for name in sorted(core.get_property("CPU", "SUPPORTED_PROPERTIES")):
            with contextlib.suppress(Exception):  # some are of compiled models alone
                defaults[f"CPU.{name}"] = str(core.get_property("CPU", name))
        for fact in ("CPU.AVAILABLE_DEVICES", "CPU.SUPPORTED_PROPERTIES", "CPU.FULL_DEVICE_NAME"):
            defaults.pop(fact, None)
        return defaults
    return {}


def _enum(value: object) -> bool:
    return hasattr(value, "name") and hasattr(value, "value")
