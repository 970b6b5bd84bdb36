# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Worker that runs an exported script of ONNX Runtime, profiled; a copy of it is imported without xpuruntime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

#: A cold run and a counted one.
_RUNS = 2


def run(script: str, inputs: str, outputs: str, folder: str) -> dict[str, Any]:
    """Open the script's session twice, plain and profiled, and return where the profile and the graph are.

    The outputs are those of the plain session.
    """
    side = importlib.import_module("native_side")
    native, session, feeds = side.first_run(script, inputs, outputs, "open_session")
    facts = {"version": _version(), "device": session.get_providers()[0]}
    optimized: Path | None = Path(folder) / "optimized.onnx"
    try:
        profiled = native.open_session(_options(native, folder, optimized))
    except Exception:  # graphs with functions that a provider compiled cannot be written
        optimized = None
        profiled = native.open_session(_options(native, folder, None))
    for _ in range(_RUNS):
        native.run(profiled, feeds)
    profile = profiled.end_profiling()
    return {
        "facts": facts,
        "profile": profile,
        "optimized": None if optimized is None else str(optimized),
        "assignment": _assignment(profiled),
    }


def _options(native: Any, folder: str, optimized: Path | None) -> Any:
    options = native.session_options()
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(folder) / "profile")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        name = "session.optimized_model_external_initializers_file_name"
        options.add_session_config_entry(name, optimized.name + ".weights")
        options.log_severity_level = 3
    return options


def _assignment(session: Any) -> list[Any]:
    read = getattr(session, "get_provider_graph_assignment_info", None)
    if read is None:
        return []
    return [
        [str(part.ep_name), [[str(node.name), str(node.op_type), str(node.domain)] for node in part.get_nodes()]]
        for part in read()
    ]


def _version() -> str:
    return str(importlib.import_module("onnxruntime").__version__)
