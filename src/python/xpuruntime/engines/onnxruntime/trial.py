# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Trial loads: a graph that this package changed is opened in a process of its own before the caller's opens it.

ONNX Runtime's optimisers can end the process on a graph whose values change type between its nodes. The result is kept
in the cache folder, by the digest of the model, the version and the settings.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.errors import EngineError, XpuRuntimeError
from xpuruntime.files.folders import cache_folder, make_private, not_private
from xpuruntime.files.reading import read_regular
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.files.writing import replace_file

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime.settings import Settings
    from xpuruntime.engines.source import Source

__all__ = ["CONFUSED_BY_CASTS", "DISABLED", "LAYER_FUSIONS", "SAFE_LEVEL", "refuse_crash"]

#: The level of converted graphs on the CPU where none is stated. Fusions above it look through casts and end the
#: process: MatmulTransposeFusion followed by NchwcTransformer.
SAFE_LEVEL = "basic"
#: Fusions at that level that look through casts too, and make invalid graphs.
CONFUSED_BY_CASTS = ("LayerNormFusionL1", "GeluFusionL1")
#: The same at all levels.
LAYER_FUSIONS = (*CONFUSED_BY_CASTS, "LayerNormFusionL2", "GeluFusionL2", "SimplifiedLayerNormFusion")
DISABLED = "optimization.disable_specified_optimizers"
#: Levels at which no trial is needed.
_SAFE = ("disable", SAFE_LEVEL)
_SECONDS = 600.0
_SMALL = 4096
_WORK = """
import json, sys
import onnxruntime as ort
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
    ort.InferenceSession(asked["path"], options, providers=[("CPUExecutionProvider", asked["options"])])
except Exception:
    pass  # the caller's process gets the same exception, and reports it
"""

_lock = threading.Lock()
#: By key: empty text for a model that opens, else how the process ended.
_known: dict[str, str] = {}


def refuse_crash(settings: Settings, source: Source, level: str, device: str) -> None:
    """Open a converted model in a process of its own, and raise where that process is killed.

    Parameters
    ----------
    settings : Settings
    source : Source
    level : str
        The name that ONNX Runtime has for ``settings.level``.
    device : str

    Raises
    ------
    EngineError
        The process was ended by a signal, or did not finish; the message has the level and the fix.
    """
    if not source.converted or settings.provider != "CPUExecutionProvider" or settings.level in _SAFE:
        return
    asked: dict[str, object] = {
        "level": level,
        "threads": settings.threads,
        "deterministic": settings.deterministic,
        "session": settings.session,
        "options": settings.options,
    }
    ended = _ended(source, asked)
    if ended:
        raise EngineError(
            f"{source.label} converted to another precision cannot be opened at graph_optimization_level: "
            f"{settings.level}: in a process of its own, ONNX Runtime {ended}. Fix: state "
            f"execution.provider_options.onnxruntime.graph_optimization_level: {SAFE_LEVEL}, or leave it out, which is "
            "the same for converted models",
            engine="onnxruntime",
            device=device,
        )


def _ended(source: Source, asked: dict[str, object]) -> str:
    """Return how a trial ended, from memory or the cache where it is known; empty where the model opened."""
    model = source.model
    with ScratchFolder("trial") as name:
        path = Path(name) / "model.onnx" if isinstance(model, bytes) else Path(model)
        content = hashlib.sha256(model) if isinstance(model, bytes) else _digest(path)
        version = importlib.metadata.version("xpuruntime"), _onnxruntime()
        content.update(json.dumps([asked, version, source.operators], sort_keys=True).encode())
        key = content.hexdigest()
        with _lock:
            known = _known.get(key)
        if known is None:
            known = _read(key)
        if known is None:
            if isinstance(model, bytes):
                path.write_bytes(model)
            known = _try({**asked, "path": str(path)})
            _write(key, known)
    with _lock:
        _known[key] = known
    return known


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


def _try(asked: dict[str, object]) -> str:
    """Open the model in a process of its own."""
    command = [sys.executable, "-I", "-X", "faulthandler=0", "-c", _WORK, json.dumps(asked)]
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


def _read(key: str) -> str | None:
    try:
        folder = cache_folder() / "trials"
        if not_private(folder) or not_private(folder / key):
            return None
        return read_regular(folder / key, _SMALL).decode("utf-8")
    except (OSError, ValueError, XpuRuntimeError):
        return None


def _write(key: str, ended: str) -> None:
    """Keep a result; where there is no cache, the next process tries again."""
    try:
        folder = cache_folder() / "trials"
        make_private(folder)
        replace_file(folder / key, ended.encode())
    except (OSError, XpuRuntimeError):
        return
