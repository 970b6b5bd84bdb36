# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The engine inspector's JSON, in the forms of TensorRT 10 and of TensorRT 11 and TensorRT-RTX, as one."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from xpuruntime.errors import EngineError

__all__ = ["Layer", "TensorSeen", "read_engine"]

#: Words of the vendor for element types, in the order in which they are looked for in a sentence.
_DTYPES = (
    (re.compile(r"\b(?:BF16|BFloat16|kBF16)\b", re.IGNORECASE), "bf16"),
    (re.compile(r"\b(?:FP16|Half|kHALF|Float16)\b", re.IGNORECASE), "fp16"),
    (re.compile(r"\b(?:FP32|Float|kFLOAT|Float32)\b", re.IGNORECASE), "fp32"),
    (re.compile(r"\b(?:FP8|kFP8|Float8)\b", re.IGNORECASE), "fp8"),
    (re.compile(r"\b(?:FP4|kFP4|Float4)\b", re.IGNORECASE), "fp4"),
    (re.compile(r"\b(?:UInt8|kUINT8)\b", re.IGNORECASE), "uint8"),
    (re.compile(r"\b(?:Int8|kINT8)\b", re.IGNORECASE), "int8"),
    (re.compile(r"\b(?:Int4|kINT4)\b", re.IGNORECASE), "int4"),
    (re.compile(r"\b(?:Int64|kINT64)\b", re.IGNORECASE), "int64"),
    (re.compile(r"\b(?:Int32|kINT32)\b", re.IGNORECASE), "int32"),
    (re.compile(r"\b(?:Bool|kBOOL)\b", re.IGNORECASE), "bool"),
)
_LINEAR = re.compile(r"row[ -]major linear|k?LINEAR", re.IGNORECASE)
_CHANNELS_LAST = re.compile(r"channel[ -]major|channels? last|k?D?HWC\d*", re.IGNORECASE)
_VECTORIZED = re.compile(
    r"(\d+|two|four|eight|sixteen|thirty-two)[ -]wide channel vectorized|k?CD?HW(\d+)", re.IGNORECASE
)
_NUMBERS = {"two": "2", "four": "4", "eight": "8", "sixteen": "16", "thirty-two": "32"}
_IMAGE_RANKS = (4, 5)


class TensorSeen(NamedTuple):
    """A tensor that a layer reads or writes. What was not reported is ``None``."""

    name: str
    dimensions: tuple[int, ...]
    dtype: str | None
    layout: str | None

    @property
    def elements(self) -> int:
        """Number of elements; an open dimension counts as one."""
        count = 1
        for size in self.dimensions:
            count *= max(size, 1)
        return count


class Layer(NamedTuple):
    """One layer of an engine."""

    name: str
    kind: str = ""
    metadata: str = ""
    inputs: tuple[TensorSeen, ...] = ()
    outputs: tuple[TensorSeen, ...] = ()
    tactic: str | None = None


def read_engine(text: str) -> tuple[Layer, ...]:
    """Return the layers in the text that ``get_engine_information`` gave in the JSON format."""
    try:
        document = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the engine inspector's answer is no JSON: {error}") from None
    layers = document.get("Layers") if isinstance(document, dict) else None
    if not isinstance(layers, list):
        raise EngineError("the engine inspector's answer has no list of layers; another version writes another form")
    return tuple(_layer(entry) for entry in layers)


def _layer(entry: Any) -> Layer:
    if not isinstance(entry, dict):
        return Layer(str(entry))
    tactic = entry.get("TacticName")
    return Layer(
        name=str(entry.get("Name", "")),
        kind=str(entry.get("LayerType", "")),
        metadata=str(entry.get("Metadata") or ""),
        inputs=_tensors(entry.get("Inputs")),
        outputs=_tensors(entry.get("Outputs")),
        tactic=str(tactic) if tactic else None,
    )


def _tensors(entries: Any) -> tuple[TensorSeen, ...]:
    found = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        sizes = entry.get("Dimensions")
        dimensions = tuple(int(size) for size in sizes) if isinstance(sizes, list) else ()
        both = str(entry.get("Format/Datatype") or "")
        dtype = str(entry.get("Datatype") or entry.get("DataType") or both)
        layout = str(entry.get("Format") or both)
        found.append(
            TensorSeen(str(entry.get("Name", "")), dimensions, _dtype(dtype), _layout(layout, len(dimensions)))
        )
    return tuple(found)


def _dtype(text: str) -> str | None:
    return next((word for pattern, word in _DTYPES if pattern.search(text)), None)


def _layout(text: str, rank: int) -> str | None:
    """Return xpuruntime's name of the layout of an image; other tensors have none."""
    if rank not in _IMAGE_RANKS:
        return None
    wide = _VECTORIZED.search(text)
    if wide is not None:
        number = next(group for group in wide.groups() if group)
        return f"nchw{_NUMBERS.get(number.lower(), number)}c"
    if _CHANNELS_LAST.search(text):
        return "nhwc"
    return "nchw" if _LINEAR.search(text) else None
