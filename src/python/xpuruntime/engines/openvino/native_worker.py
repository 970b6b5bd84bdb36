# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Worker of a native run: OpenVINO's executed graph, and the run of an exported script that it is read from.

The interpreter that runs the script imports a copy of this file, and cannot import xpuruntime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEYS = (
    "layerType", "originalLayersNames", "outputLayouts", "outputPrecisions", "primitiveType", "runtimePrecision",
    "execTimeMcs",
)  # fmt: skip
#: A cold run and a counted one.
_RUNS = 2


def run(script: str, inputs: str, outputs: str, folder: str) -> dict[str, Any]:
    """Open the script's model, run it, and return the executed graph of a copy with counters."""
    del folder
    native, compiled, feeds = importlib.import_module("native_side").first_run(script, inputs, outputs)
    counted = native.open_model({"PERF_COUNT": "YES", **_one_stream(compiled)})
    for _ in range(_RUNS):
        native.run(counted, feeds)
    version = str(importlib.import_module("openvino").__version__).partition("-")[0]
    devices = ", ".join(str(device) for device in compiled.get_property("EXECUTION_DEVICES"))
    return {"facts": {"version": version, "device": devices}, "graph": graph_facts(counted)}


def _one_stream(compiled: Any) -> dict[str, str]:
    """Return what leaves one stream of several, with its threads: OpenVINO counts each for itself."""
    try:
        streams = int(str(compiled.get_property("NUM_STREAMS")))
        threads = int(str(compiled.get_property("INFERENCE_NUM_THREADS")))
    except (RuntimeError, ValueError):
        return {}
    if streams <= 1:
        return {}
    return {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(max(1, threads // streams))}


def graph_facts(compiled: Any) -> list[dict[str, Any]]:
    """Return name, type, facts, what is read, and bytes of each output of every executed node, in order."""
    return [
        {
            "name": operation.get_friendly_name(),
            "type": operation.get_type_name(),
            "info": _info(operation.get_rt_info()),
            "above": [port.get_source_output().get_node().get_friendly_name() for port in operation.inputs()],
            "sizes": [_bytes(port) for port in operation.outputs()],
        }
        for operation in compiled.get_runtime_model().get_ordered_ops()
    ]


def _info(info: Mapping[str, Any]) -> dict[str, str]:
    return {key: _text(info, key) for key in _KEYS}


def _text(info: Mapping[str, Any], key: str) -> str:
    try:
        return str(info[key].astype(str))
    except (KeyError, RuntimeError, TypeError):
        return ""


def _bytes(port: Any) -> int | None:
    if not port.get_partial_shape().is_static:
        return None
    count = 1
    for size in port.get_shape():
        count *= int(size)
    return int(count * port.get_element_type().size)
