# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`prepare_source`: the model as an engine gets it, with everything that the policy changes in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from xpuruntime.engines.model.external import resolve_links
from xpuruntime.engines.model.file import refuse
from xpuruntime.engines.model.graph import tensors
from xpuruntime.engines.model.shapes import with_shapes
from xpuruntime.files.paths import is_utf8

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.quantization import QuantizedModel, Style


class ModelSource(msgspec.Struct, eq=False):
    """The model as an engine will get it: a path, or bytes and the folder of their external data."""

    model: str | bytes
    folder: str | None
    label: str
    keep: object = None
    quantized: QuantizedModel | None = None
    operators: str | None = None
    converted: bool = False
    info: ModelInfo | None = None
    __repr__ = object.__repr__

    def __post_init__(self) -> None:
        if isinstance(self.model, bytes) and self.folder is not None:
            self.model, self.folder = _without_links(self.model, self.folder)

    @property
    def changed(self) -> str:
        """How the graph was changed here, to follow its name in a message; empty where it was not."""
        if self.info is None:
            return ""
        ways = {
            "converted to another precision": self.converted,
            "quantized": self.quantized is not None,
            "with kernels of xpuruntime": self.operators is not None,
        }
        return " and ".join(way for way, done in ways.items() if done)


def _without_links(model: bytes, folder: str) -> tuple[bytes, str]:
    if b"location" not in model:
        return model, folder
    import onnx

    proto = onnx.load_model_from_string(model)
    real = resolve_links(tensors(proto), folder)
    return (model, folder) if real == folder else (proto.SerializeToString(deterministic=True), real)


def prepare_source(
    request: Request,
    log: ConversionLog,
    *,
    convert: Literal["fp16", "bf16"] | None = None,
    keep_fp32: Sequence[str] = (),
    supported_ops: frozenset[str] | None = None,
    qdq: str | Style | None = None,
) -> ModelSource:
    """Return the model of a request with unique node names and the sizes that the policy fixes, converted if asked."""
    info = with_shapes(request.model, request.policy)
    label = info.path
    if qdq is not None and info.quantization.scheme == "none":
        return _quantized(request, info, log, qdq, keep_fp32)
    if convert is not None:
        from xpuruntime.engines.precision import convert as convert_precision

        converted = convert_precision(info, convert, keep_fp32_nodes=keep_fp32, supported_ops=supported_ops)
        for note in converted.notes:
            log.add(f"graph converted to {convert}", note)
        if converted.fits_in_memory():
            return ModelSource(converted.serialized(), None, label, converted=converted.changed, info=info)
        from xpuruntime.files.scratch import ScratchFolder

        folder = ScratchFolder("converted")
        path = str(converted.write(folder.name))
        return ModelSource(path, None, label, keep=folder, converted=converted.changed, info=info)
    if info.needs_renaming or info.data is not None:
        for name in info.renamed[:1]:
            count = len(info.renamed)
            what = (
                f"1 node was given the name {name!r}"
                if count == 1
                else f"{count} nodes were given names: {name!r}, ..."
            )
            log.add(what, "unnamed in the model, or one name for several nodes")
        return ModelSource(info.serialized_named(), info.base_dir, label, info=info)
    if not is_utf8(info.file):
        if info.has_external_data:
            fix = "give the folder and the file other names"
            raise refuse(info.path, "engines cannot open its data: the path is not UTF-8", fix)
        log.add("the model was read into memory", "the name of its file is not UTF-8, and engines open no such file")
        return ModelSource(info.serialized_named(), None, label, info=info)
    info.check_unchanged()  # an engine reads the file itself, and would report of another model
    return ModelSource(info.file, None, label, info=info)


def _quantized(
    request: Request, info: ModelInfo, log: ConversionLog, style: str | Style, keep_fp32: Sequence[str]
) -> ModelSource:
    from xpuruntime.engines.quantization import quantize

    quantized = quantize(info, request.calibration, style, keep_fp32=keep_fp32)
    for note in quantized.notes:
        log.add("graph quantized to int8", note)
    return ModelSource(quantized.data, None, info.path, quantized=quantized, info=info)
