# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compiling with ONNX Runtime: the graph as its optimizers leave it, so that they need not run again.

Such a graph has operators and weight layouts that suit one processor, one provider and one version: all of them are in
the target of the artifact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.base import Compiled, Request
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.onnxruntime.device_arrays import no_capture
from xpuruntime.engines.onnxruntime.loading import QUANTIZED, SOURCE, model_source, preload_cuda
from xpuruntime.engines.onnxruntime.observing.unit_attribution import attribute_units
from xpuruntime.engines.onnxruntime.opening import open_session, session_options
from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings, uncompilable
from xpuruntime.errors import EngineError, UnsupportedOperationError

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.runtime.machine import Machine

_MODEL = "model.onnx"
_WEIGHTS = "model.onnx.data"
#: Weights of more bytes than this lie beside the graph, from where they are mapped into memory.
_INSIDE = 1024
#: Tensors of more bytes than this are emptied in the graph that is kept for the evidence.
_KEPT = 256
_ASSIGNMENT = "session.record_ep_graph_assignment_info"


def compiled_for(settings: OnnxRuntimeSettings, machine: Machine, device: str) -> dict[str, str]:
    """Return what a compiled graph is tied to. Pure."""
    facts = machine.engines["onnxruntime"]
    target = {
        "onnxruntime": facts.version or "",
        "provider": settings.provider,
        "system": machine.system,
        "architecture": machine.architecture,
        # Blocked layouts and fusions on the CPU depend on its vector instructions.
        "cpu features": " ".join(machine.cpu.features),
    }
    if settings.provider != "CPUExecutionProvider":
        index = int(device.partition(":")[2] or 0)
        cuda_device = next((gpu for gpu in machine.cuda if gpu.index == index), None)
        target["cuda"] = facts.detail.get("cuda", "")
        target["compute capability"] = "" if cuda_device is None else ".".join(map(str, cuda_device.compute_capability))
    return target


def compile_model(request: Request, settings: OnnxRuntimeSettings, folder: Path) -> Compiled:
    """Write the optimized graph, its weights and the graph before it into `folder`.

    Raises
    ------
    UnsupportedOperationError
        See `uncompilable`.
    EngineError
        ONNX Runtime did not write it.
    XpuRuntimeError
        As `load_model`.
    """
    reason = uncompilable(settings)
    if reason is not None:
        raise UnsupportedOperationError(reason, engine="onnxruntime", device=request.device)
    log = ConversionLog()
    source = model_source(request, settings, log)
    options = session_options(settings, source)
    options.optimized_model_filepath = str(folder / _MODEL)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(_INSIDE))
    options.add_session_config_entry(_ASSIGNMENT, "1")
    if request.device.startswith("cuda"):
        from xpuruntime import _core

        preload_cuda()
        with no_capture(), _core.DeviceScope(request.device):
            opened = open_session(settings, source, request.device, options)
    else:
        opened = open_session(settings, source, request.device, options)
    graph = _written(folder, request.device)
    names = [_MODEL, SOURCE]
    if (folder / _WEIGHTS).is_file() and (folder / _WEIGHTS).stat().st_size:
        names.append(_WEIGHTS)
    before = _without_weights(_before(request, source))
    (folder / SOURCE).write_bytes(before.SerializeToString(deterministic=True))
    units = attribute_units(before, graph, (), opened.placements, device=request.device).units
    if source.quantized is not None:
        from xpuruntime.engines.quantization import in_source_terms

        units = in_source_terms(units, source.quantized, request.model)
        told = msgspec.structs.replace(source.quantized, data=b"")
        (folder / QUANTIZED).write_bytes(msgspec.json.encode(told))
        names.append(QUANTIZED)
    return Compiled(
        files=tuple(names),
        node_map={unit.id: unit.source_nodes for unit in units if unit.source_nodes},
        notes=log.notes(),
    )


def _before(request: Request, source: ModelSource) -> Any:
    if source.quantized is None:
        return request.model.named_proto()
    import onnx

    return onnx.load_model_from_string(source.quantized.data)


def _written(folder: Path, device: str) -> Any:
    """Read back the graph that was written; ONNX Runtime says nothing when it could not be written whole."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(str(folder / _MODEL), load_external_data=False)
        if graph.graph.output:
            return graph
        reason = "it is empty: is the disk full?"
    except (OSError, DecodeError, ValueError) as error:
        reason = str(error)
    msg = f"ONNX Runtime did not write the compiled model whole: {reason}"
    raise EngineError(msg, engine="onnxruntime", device=device)


def _without_weights(model: Any) -> Any:
    from xpuruntime.engines.model.external import is_external, nbytes
    from xpuruntime.engines.model.graph import tensors

    for tensor in tensors(model):
        if is_external(tensor) or (nbytes(tensor) or _KEPT + 1) > _KEPT:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return model
