# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Layout`: which axis of a model's inputs and outputs is the batch, and how inputs are padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.model.shapes import batch_axes
from xpuruntime.errors import PolicyError, UnsupportedOperationError

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.serving.batching.settings import BatchSettings, PadRule

#: Type of a model's tensor to the datatype of the protocol.
DATATYPE_OF = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32",
    "float64": "FP64", "string": "BYTES",
}  # fmt: skip


def datatype_of(info: TensorInfo) -> str:
    """Return the datatype of the protocol."""
    datatype = DATATYPE_OF.get(info.dtype) if info.kind == "tensor" else None
    if datatype is None:
        what = info.dtype if info.kind == "tensor" else f"a {info.kind} of {info.dtype}"
        raise UnsupportedOperationError(
            f"{info.name!r} is {what}, for which the Open Inference Protocol has no datatype. Fix: convert it inside "
            f"of the model to one of {', '.join(DATATYPE_OF)}"
        )
    return datatype


def shape_of(dims: Sequence[int | str | None]) -> list[int]:
    """Return dimensions in the protocol's words, with -1 for those that are open."""
    return [dim if isinstance(dim, int) else -1 for dim in dims]


@dataclass(frozen=True, slots=True)
class Padding:
    """How one input is padded: axis, fill value, and ascending sizes, of which none means the longest of the batch."""

    axis: int
    value: float
    sizes: tuple[int, ...]
    mask: str | None


@dataclass(frozen=True, slots=True)
class InputLayout:
    """One input."""

    name: str
    datatype: str
    dtype: np.dtype[Any]
    dims: tuple[int | str | None, ...] | None
    batch: int | None
    required: bool
    padding: Padding | None


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """One output: axis of the batch, and axes that are cut back to the size of an input before it was padded."""

    name: str
    datatype: str
    dims: tuple[int | str | None, ...] | None
    batch: int | None
    cuts: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Inputs and outputs of a model, by name."""

    inputs: Mapping[str, InputLayout]
    outputs: Mapping[str, OutputLayout]
    batched: bool
    #: Inputs that are made where a request has none, to the input whose length they tell.
    masks: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        settings: BatchSettings,
        *,
        optional: Sequence[TensorInfo] = (),
    ) -> Layout:
        """Return the layout of a model under its settings."""
        key, axes = batch_axes(inputs) if settings.max_batch_size else (None, {})
        if settings.max_batch_size and not axes:
            raise PolicyError(
                f"batching.max_batch_size: {settings.max_batch_size}, but no input of the model begins with an open "
                "dimension. Fix: state 0, or export the model with an open batch dimension"
            )
        paddings = {name: _padding(name, rule, inputs, axes.get(name)) for name, rule in settings.pad.items()}
        symbols = _padded_symbols(paddings, inputs)
        _check_symbols(symbols, paddings, inputs, optional)
        masks = {rule.mask: name for name, rule in settings.pad.items() if rule.mask is not None}
        input_layouts = [
            InputLayout(
                name=info.name,
                datatype=datatype_of(info),
                dtype=_buffer_type(info.dtype),
                dims=info.shape,
                batch=axes.get(info.name),
                required=required and info.name not in masks,
                padding=paddings.get(info.name),
            )
            for some, required in ((inputs, True), (optional, False))
            for info in some
        ]
        _check_masks(masks, {layout.name: layout for layout in input_layouts})
        rules = {name: rule.outputs for name, rule in settings.pad.items()}
        results = {output.name: _output(output, key, bool(axes), symbols, rules) for output in outputs}
        if axes:
            for result in results.values():
                if result.batch is None:
                    raise PolicyError(
                        f"batching.max_batch_size: {settings.max_batch_size}, but the output {result.name!r} has no "
                        "batch dimension, so its rows cannot be distinguished. Fix: state 0, or give the output one"
                    )
        return cls({layout.name: layout for layout in input_layouts}, results, bool(axes), masks)


def _buffer_type(dtype: str) -> np.dtype[Any]:
    return np.dtype({"bfloat16": "uint16", "string": "object"}.get(dtype, dtype))


def _padding(name: str, rule: PadRule, inputs: Sequence[TensorInfo], batch: int | None) -> Padding:
    info = next((input_ for input_ in inputs if input_.name == name), None)
    if info is None:
        raise PolicyError(
            f"batching.pad.{name}: the model has no input {name!r}. Fix: name one of "
            f"{', '.join(input_.name for input_ in inputs)}"
        )
    if info.dtype == "string":
        raise PolicyError(f"batching.pad.{name}: it holds strings, which are not padded. Fix: leave the rule out")
    if info.shape is None:
        raise PolicyError(f"batching.pad.{name}: the rank of {name!r} is not known. Fix: leave the rule out")
    free = [axis for axis, size in enumerate(info.shape) if not isinstance(size, int) and axis != batch]
    axis = rule.axis
    if axis is None:
        if len(free) != 1:
            raise PolicyError(
                f"batching.pad.{name}: the input has {len(free)} free dimensions beside the batch: {list(info.shape)}. "
                "Fix: state which with 'axis'" + ("" if free else ", or leave the rule out")
            )
        axis = free[0]
    elif axis not in free:
        raise PolicyError(
            f"batching.pad.{name}.axis: {axis} is no free dimension of {list(info.shape)}. Fix: state one of {free}"
        )
    _check_fill(name, rule.value, _buffer_type(info.dtype), info.dtype)
    return Padding(axis, rule.value, rule.to, rule.mask)


def _check_fill(name: str, value: float, dtype: np.dtype[Any], word: str) -> None:
    fits = True
    if word == "bfloat16":
        fits = value == 0
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = value.is_integer() and limits.min <= value <= limits.max
    elif dtype.kind == "b":
        fits = value in (0.0, 1.0)
    if not fits:
        raise PolicyError(f"batching.pad.{name}.value: {value:g} is no value of {word}. Fix: state one that it holds")


def _padded_symbols(paddings: Mapping[str, Padding], inputs: Sequence[TensorInfo]) -> dict[str, str]:
    symbols: dict[str, str] = {}
    for info in inputs:
        padding = paddings.get(info.name)
        if padding is not None and info.shape is not None:
            symbol = info.shape[padding.axis]
            if isinstance(symbol, str):
                symbols.setdefault(symbol, info.name)
    return symbols


def _check_symbols(
    symbols: Mapping[str, str],
    paddings: Mapping[str, Padding],
    inputs: Sequence[TensorInfo],
    optional: Sequence[TensorInfo],
) -> None:
    for info in (*inputs, *optional):
        for axis, size in enumerate(info.shape or ()):
            if isinstance(size, str) and size in symbols:
                own = paddings.get(info.name)
                if own is None or own.axis != axis:
                    raise PolicyError(
                        f"batching.pad: {symbols[size]!r} is padded along {size!r}, which {info.name!r} has too, and "
                        f"there is no rule for it. Fix: add pad.{info.name} with its fill value"
                    )
                if own.sizes != paddings[symbols[size]].sizes:
                    raise PolicyError(
                        f"batching.pad: {symbols[size]!r} and {info.name!r} share {size!r} and have different sizes. "
                        "Fix: state the same sizes in 'to'"
                    )


def _check_masks(masks: Mapping[str, str], inputs: Mapping[str, InputLayout]) -> None:
    for name, source in masks.items():
        mask, other = inputs.get(name), inputs[source]
        if mask is None or mask.dims != other.dims or mask.datatype == "BYTES" or mask.padding is None:
            raise PolicyError(
                f"batching.pad.{source}.mask: {name!r} is no input of the same shape as {source!r} with a rule of its "
                "own. Fix: name such an input, or leave 'mask' out"
            )


def _output(
    info: TensorInfo,
    key: str | None,
    batched: bool,
    symbols: Mapping[str, str],
    rules: Mapping[str, Mapping[str, int]],
) -> OutputLayout:
    dims = info.shape
    batch: int | None = None
    if batched and dims:
        if key is not None:
            batch = dims.index(key) if key in dims else 0 if dims[0] is None else None
        elif not isinstance(dims[0], int):
            batch = 0
    cuts = [(axis, symbols[size]) for axis, size in enumerate(dims or ()) if isinstance(size, str) and size in symbols]
    stated = [(axes[info.name], name) for name, axes in rules.items() if info.name in axes]
    for axis, _ in stated:
        if dims is not None and (axis >= len(dims) or axis == batch):
            raise PolicyError(f"batching.pad: output {info.name!r} has no axis {axis} to cut. Fix: correct 'outputs'")
    return OutputLayout(info.name, datatype_of(info), dims, batch, tuple(dict.fromkeys([*stated, *cuts])))


#: Operators whose results are as large as the values of these inputs say, which shapes do not tell; of all where empty.
_SIZES: dict[str, tuple[int, ...]] = {
    "CenterCropPad": (1,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Loop": (),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (),
    "Resize": (2, 3),
    "Tile": (1,),
    "Upsample": (1,),
}


def sized_by_values(model: ModelInfo) -> bool:
    """Return whether the values of a request may say how much a model computes, beside the shapes of its inputs."""
    made_by = {name: node for node in model.nodes for name in node.outputs}
    input_names = {input_.name for input_ in model.inputs}
    todo = [
        name
        for node in model.nodes
        if node.op in _SIZES
        for at, name in enumerate(node.inputs)
        if not _SIZES[node.op] or at in _SIZES[node.op]
    ]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in input_names:
            return True
        node = made_by.get(name)
        if name not in seen and node is not None and node.op not in ("Shape", "Size"):
            todo += node.inputs
        seen.add(name)
    return False
