# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Trial runs: a graph that this package changed is opened and run in a process of its own before the caller's.

ONNX Runtime's optimizers can end the process on graphs that no exporter writes, such as those whose values change type
between their nodes. The result is kept in the cache folder, by the digest of the model, the versions and the settings.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.engines.model.graph import graphs
from xpuruntime.engines.onnxruntime.options import SAFE_LEVEL, OnnxRuntimeSettings
from xpuruntime.engines.onnxruntime.rewriting.rules import DOMAIN
from xpuruntime.engines.precision import probe_feeds
from xpuruntime.errors import EngineFailed, XpuRuntimeError
from xpuruntime.files.digests import CacheEntries
from xpuruntime.files.scratch import ScratchFolder

if TYPE_CHECKING:
    from xpuruntime.engines.model_source import ModelSource

_SECONDS = 600.0
_ENTRIES = CacheEntries("trials", most=1000, largest=4096)
#: A model of more bytes, or with larger inputs, is opened and not run; a run that takes longer is given up.
_LIGHT, _LIGHT_INPUTS, _RUN_SECONDS = 64 << 20, 1 << 20, 20.0
_WORK = """
import json, os, sys, threading
import numpy, onnxruntime as ort
asked = json.loads(sys.argv[1])
ort.set_default_logger_severity(4)
options = ort.SessionOptions()
options.log_severity_level = 4
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, asked["level"])
if asked["threads"] is not None:
    options.intra_op_num_threads = asked["threads"]
options.use_deterministic_compute = asked["deterministic"]
for key, value in asked["session"].items():
    options.add_session_config_entry(key, value)
try:
    if asked["operators"] is not None:
        options.register_custom_ops_library(asked["operators"])
    session = ort.InferenceSession(asked["path"], options, providers=[("CPUExecutionProvider", asked["options"])])
    if asked["feeds"] is not None:
        late = threading.Timer(asked["seconds"], os._exit, (0,))
        late.daemon = True
        late.start()
        with numpy.load(asked["feeds"], allow_pickle=False) as arrays:
            session.run(None, {name: arrays[str(at)] for at, name in enumerate(asked["inputs"])})
except Exception:
    pass  # the caller's process gets the same exception, and reports it
os._exit(0)
"""

_lock = threading.Lock()
#: By key: empty text for a model that opens, else how the process ended.
_known: dict[str, str] = {}


def refuse_crash(settings: OnnxRuntimeSettings, source: ModelSource, level: str, device: str) -> None:
    """Open a model that was changed here in a process of its own, and raise where that process is killed.

    A light model is also run there, on inputs that are generated.
    """
    if not source.changed or settings.provider != "CPUExecutionProvider":
        return
    session = dict(settings.session)
    if isinstance(source.model, bytes) and source.folder is not None:
        session["session.model_external_initializers_file_folder_path"] = source.folder
    trial_request: dict[str, object] = {
        "level": level,
        "threads": settings.threads,
        "deterministic": settings.deterministic,
        "session": session,
        "options": settings.options,
        "operators": source.operators,
    }
    ended = _ended(source, trial_request)
    if ended:
        safe = settings.level in (SAFE_LEVEL, "disable")
        fix = (
            "use precision fp32, without kernel keys"
            if safe
            else f"state execution.provider_options.onnxruntime.graph_optimization_level: {SAFE_LEVEL}, or leave it "
            "out, which is the same for models converted to fp16"
        )
        raise EngineFailed(
            f"{source.label} {source.changed} cannot be used at graph_optimization_level: {settings.level}: in a "
            f"process of its own, ONNX Runtime {ended}. Fix: {fix}",
            engine="onnxruntime",
            device=device,
        )


def _ended(source: ModelSource, trial_request: dict[str, object]) -> str:
    """Return how a trial ended, from memory or the cache where it is known; empty where nothing ended it."""
    model = source.model if source.operators is None else _without_rules(source.model)
    with ScratchFolder("trial") as name:
        path = Path(name) / "model.onnx" if isinstance(model, bytes) else Path(model)
        content = hashlib.sha256(model) if isinstance(model, bytes) else _digest(path)
        version = importlib.metadata.version("xpuruntime"), _onnxruntime()
        content.update(json.dumps([_WORK, trial_request, version, platform.machine()], sort_keys=True).encode())
        key = content.hexdigest()
        with _lock:
            known = _known.get(key)
        if known is None:
            kept = _ENTRIES.read(key)
            known = None if kept is None else kept.decode()
        if known is None:
            if isinstance(model, bytes):
                path.write_bytes(model)
            known = _try({**trial_request, "path": str(path), "seconds": _RUN_SECONDS, **_inputs(source, Path(name))})
            _ENTRIES.write(key, known.encode())
    with _lock:
        _known[key] = known
    return known


def _without_rules(model: str | bytes) -> bytes:
    """Return a model whose operators of xpuruntime name no rules, which are those of one session and one process."""
    # ONNX Runtime refuses it when it makes the kernels, which is after its optimizers ran.
    import onnx

    proto = onnx.ModelProto.FromString(model) if isinstance(model, bytes) else onnx.load(model)
    for graph in graphs(proto):
        for node in graph.node:
            for attribute in node.attribute if node.domain == DOMAIN else ():
                if attribute.name == "rules":
                    attribute.s = b""
    return bytes(proto.SerializeToString(deterministic=True))


def _inputs(source: ModelSource, folder: Path) -> dict[str, object]:
    """Write made-up inputs for a light model; where there are none, it is opened only."""
    import numpy as np

    size = len(source.model) if isinstance(source.model, bytes) else Path(source.model).stat().st_size
    none: dict[str, object] = {"feeds": None, "inputs": []}
    if source.info is None or size > _LIGHT:
        return none
    try:
        feeds = probe_feeds(source.info)
    except XpuRuntimeError:
        return none
    if sum(array.nbytes for array in feeds.values()) > _LIGHT_INPUTS or any(
        array.dtype.kind not in "biufc" for array in feeds.values()
    ):
        return none
    np.savez(folder / "feeds.npz", **{str(at): array for at, array in enumerate(feeds.values())})
    return {"feeds": str(folder / "feeds.npz"), "inputs": list(feeds)}


def _digest(path: Path) -> hashlib._Hash:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while part := file.read(1 << 20):
            digest.update(part)
    weights = path.with_name(f"{path.name}.data")
    digest.update(str(weights.stat().st_size if weights.exists() else 0).encode())
    return digest


def _onnxruntime() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


def _try(trial_request: dict[str, object]) -> str:
    command = [sys.executable, "-I", "-X", "faulthandler=0", "-c", _WORK, json.dumps(trial_request)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return f"did not finish within {_SECONDS:.0f} s"
    except OSError as error:
        return f"could not be started ({error.strerror or error})"
    if done.returncode < 0:
        try:
            return f"was ended by {signal.Signals(-done.returncode).name}"
        except ValueError:
            return f"was ended by signal {-done.returncode}"
    return "" if done.returncode == 0 else f"ended with exit status {done.returncode}"
