# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Observation of TensorRT: an instrumented run, and the layers of an engine with the nodes that they stand for."""

from __future__ import annotations

import collections
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.base import Observed, Request
from xpuruntime.engines.model.shapes import ShapeRange
from xpuruntime.engines.observation import CONVERSIONS, folded_unit
from xpuruntime.engines.precision.types import FLOATS, main_precision, read_and_written
from xpuruntime.engines.tensorrt.handle import Handle, Slot
from xpuruntime.engines.tensorrt.network import layer_nodes
from xpuruntime.errors import EngineError, ModelError
from xpuruntime.evidence.documents import COLD, COUNTED, LOADED, checkpoint
from xpuruntime.evidence.records import Boundary, Time, Unit

if TYPE_CHECKING:
    from xpuruntime.engines.model.facts import NodeInfo
    from xpuruntime.engines.tensorrt.model import TensorRtModel

_UNSEEN = (
    "times of layers are the vendor's, by CUDA events; with the profiler attached layers do not overlap",
    "whether a kernel used TF32 is not reported, except where its name shows it",
)


def observe(model: TensorRtModel, request: Request, feeds: Mapping[str, Any], runs: int) -> Observed:
    """Run a context of its own `runs` times after a cold run, and report what ran."""
    handle = model.handle
    slot = Slot(handle)
    checkpoint(LOADED)
    try:
        times = _times(model, slot, feeds, runs)
        text = _inspect(handle, slot)
        effective = read_back(handle, slot.context, request)
    finally:
        slot.close()
    try:
        layers = read_engine(text)
    except EngineError as error:
        return Observed(effective=effective, notes=(str(error), *_UNSEEN), partial=True)
    source = SourceModel(request.model.nodes, _types(request), handle.record.nodes(request.model), handle.record.layers)
    joined = attribute_units(
        layers,
        times,
        source,
        engine=handle.product.name,
        device=handle.device,
        precision=request.policy.execution.precision,
    )
    return Observed(
        units=joined.units, boundaries=joined.boundaries, effective=effective, notes=(*joined.notes, *_UNSEEN)
    )


def _times(model: TensorRtModel, slot: Slot, feeds: Mapping[str, Any], runs: int) -> dict[str, list[float]]:
    profiler = _profiler(model.handle.trt)
    slot.watch(profiler)
    items = {name: model.upload(array, slot.stream) for name, array in feeds.items()}
    outputs = []
    for name, shape in model.place(slot, items).items():
        if shape is None:
            outputs.append(slot.output_memory(name))
        else:
            outputs.append(model.room(name, shape, slot.stream))
            slot.address(name, outputs[-1].data_ptr)
    times: dict[str, list[float]] = {}
    for run in range(runs + 1):
        profiler.seen.clear()
        slot.enqueue()
        slot.stream.synchronize()
        if run:
            for name, spent in profiler.seen.items():
                times.setdefault(name, []).append(spent)
        if run in (0, runs):
            checkpoint(COUNTED if run else COLD)
    return times


def _profiler(trt: Any) -> Any:
    base: Any = trt.IProfiler

    class Profiler(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.seen: collections.Counter[str] = collections.Counter()

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.seen[layer_name] += ms * 1e3  # type: ignore[assignment]

    return Profiler()


def _inspect(handle: Handle, slot: Slot) -> str:
    """Return the inspector's JSON. With kernels that are compiled at load, it knows them from a context that ran."""
    inspector = handle.engine.create_engine_inspector()
    inspector.execution_context = slot.context
    return str(inspector.get_engine_information(handle.trt.LayerInformationFormat.JSON))


def read_back(handle: Handle, context: Any, request: Request) -> dict[str, str]:
    """Return policy key to value, where engine, context or the record of the build hold it."""
    product, flags = handle.product, handle.record.flags
    in_effect = {"execution.engine": product.name, "execution.device": handle.device}
    if "tf32" in flags:
        in_effect["execution.tf32"] = f"BuilderFlag.TF32={flags['tf32']}"
    options = {name: value for name, value in flags.items() if name not in ("tf32", "workspace")}
    if hasattr(context, "get_runtime_config"):
        config = context.get_runtime_config()
        for option, attribute in (
            ("cuda_graph_strategy", "cuda_graph_strategy"),
            ("kernel_specialization", "dynamic_shapes_kernel_specialization_strategy"),
        ):
            if hasattr(config, attribute):
                options[option] = getattr(config, attribute).name.lower()
        specialization = options.get("kernel_specialization")
        if specialization is not None:
            in_effect["execution.determinism"] = f"kernel_specialization={specialization}"
    if "weight_streaming_budget" in handle.settings.options:
        options["weight_streaming_budget"] = str(handle.engine.weight_streaming_budget_v2)
    if "workspace" in flags:
        in_effect["execution.memory.limit"] = f"workspace {flags['workspace']} bytes"
    for name in product.names:
        in_effect.update({f"execution.provider_options.{name}.{option}": value for option, value in options.items()})
    for name in request.policy.execution.shapes:
        in_effect[f"execution.shapes.{name}"] = _sizes(handle.engine, name)
    return in_effect


def _sizes(engine: Any, name: str) -> str:
    shape = tuple(engine.get_tensor_shape(name))
    if all(size >= 0 for size in shape):
        return f"[{', '.join(map(str, shape))}]"
    least, best, largest = (tuple(sizes) for sizes in engine.get_tensor_profile_shape(name, 0))
    return f"[{', '.join(str(ShapeRange(*sizes)) for sizes in zip(least, best, largest, strict=True))}]"


def _types(request: Request) -> dict[str, str]:
    """Return tensor to precision; empty where the model's file is not at hand, as with an artifact from elsewhere."""
    from xpuruntime.engines.precision.types import model_precisions

    try:
        return model_precisions(request.model.named_proto())
    except ModelError:
        return {}


#: Layers that move data, or nothing at all. They name the node that they were made for, which another layer computes.
_MOVES = frozenset({"Reformat", "NoOp", "Signal", "Wait", "ShapeHostToDevice", "DeviceToShapeHost"})
_FOREIGN = "ForeignNode["
_TOKENS = re.compile(r"\s\+\s|[(),]\s*|\.\.\.")
_GONE = "no layer of the engine names it: computed or removed when the engine was built"
_INSIDE = "it may be inside of a layer that does not say what it is made of"


class SourceModel(NamedTuple):
    """What is known of the source model."""

    nodes: Sequence[NodeInfo]
    types: Mapping[str, str]
    parsed: Mapping[str, Sequence[str]]
    layers: Mapping[str, Sequence[str]]


class Attribution(NamedTuple):
    """The units, the boundaries between them, and notes on what is unknown."""

    units: tuple[Unit, ...]
    boundaries: tuple[Boundary, ...]
    notes: tuple[str, ...]


def attribute_units(
    layers: Sequence[Layer],
    times: Mapping[str, Sequence[float]],
    source: SourceModel,
    *,
    engine: str,
    device: str,
    precision: str = "model",
) -> Attribution:
    """Join the layers of one engine to the source model."""
    named = [_named(layer, source) for layer in layers]
    owner = _owners(layers, named)
    hidden = next((i for i, layer in enumerate(layers) if _FOREIGN in layer.name and not named[i]), None)
    lost = [node for node in source.nodes if node.name not in owner]
    if hidden is not None:
        owner.update((node.name, hidden) for node in lost)
    ids: Counter[str] = Counter()
    units, boundaries = [], []
    for index, layer in enumerate(layers):
        own = [node for node in source.nodes if owner.get(node.name) == index]
        served = tuple(name for name in named[index] if owner[name] != index)
        ids[layer.name] += 1
        label = layer.name if ids[layer.name] == 1 else f"{layer.name} #{ids[layer.name]}"
        units.append(_unit(layer, label, own, served, times, source, engine, device, precision, hidden=index == hidden))
        if layer.kind in _MOVES and not own:
            boundaries.append(_boundary(layer, label, times))
    notes = []
    if hidden is None and lost:
        units.extend(folded_unit(node, engine, _GONE) for node in lost)
    elif lost:
        notes.append(f"{len(lost)} nodes are accounted for at {layers[hidden or 0].name!r}: {_INSIDE}")
    untold = sum(1 for layer in layers if not layer.kind)
    if untold:
        notes.append(
            f"{untold} layers are known by name only; state profiling_verbosity: detailed for types and kernels"
        )
    return Attribution(tuple(units), tuple(boundaries), tuple(notes))


def _named(layer: Layer, source: SourceModel) -> tuple[str, ...]:
    nodes = layer_nodes(layer.metadata, source.parsed)
    if nodes or _FOREIGN in layer.name:
        return nodes
    parts = [part.strip() for part in (layer.name, *_TOKENS.split(layer.name))]
    names = [name for part in parts for name in (source.layers.get(part) or ())]
    return tuple(dict.fromkeys(names))


def _owners(layers: Sequence[Layer], named: Sequence[tuple[str, ...]]) -> dict[str, int]:
    owner: dict[str, int] = {}
    for moving in (False, True):
        for index, layer in enumerate(layers):
            if (layer.kind in _MOVES) == moving:
                for name in named[index]:
                    owner.setdefault(name, index)
    return owner


def _unit(
    layer: Layer,
    label: str,
    own: list[NodeInfo],
    served: tuple[str, ...],
    times: Mapping[str, Sequence[float]],
    source: SourceModel,
    engine: str,
    device: str,
    precision: str,
    *,
    hidden: bool,
) -> Unit:
    written = {tensor.name for tensor in layer.outputs}
    outputs = tuple(name for node in own for name in node.outputs if name in written)
    if not outputs and own:
        outputs = tuple(name for name in own[-1].outputs if name)
    relation = "opaque" if hidden else "inserted" if not own else "exact" if len(own) == 1 else "fused"
    return Unit(
        id=label,
        op=layer.kind or "Layer",
        relation=relation,  # type: ignore[arg-type]
        source_nodes=tuple(node.name for node in own),
        outputs=outputs,
        serves=served,
        engine=engine,
        device=device,
        provider="cuda",
        kernel=layer.tactic,
        kernel_source="reported" if layer.tactic else "unknown",
        precision_requested=_requested(own, source, precision) if own else None,
        precision_run=_run_in(layer),
        layout=next((t.layout for t in (*layer.outputs, *layer.inputs) if t.layout), None),
        time=_time(layer, times),
        placement_source="none",
    )


def _requested(own: list[NodeInfo], source: SourceModel, precision: str) -> str | None:
    for node in reversed(own):
        if node.op in CONVERSIONS:
            continue
        stated = next((source.types[name] for name in node.outputs if name in source.types), None)
        if stated is None:
            return None
        return precision if precision in ("fp16", "bf16", "int8") and stated in FLOATS else stated
    return None


def _run_in(layer: Layer) -> str | None:
    """Return the type a layer read and wrote, such as ``"fp16"``, or ``"int8->fp32"`` where these differ."""
    return read_and_written(_main(layer.inputs), _main(layer.outputs))


def _main(tensors: Sequence[TensorSeen]) -> str | None:
    return main_precision((tensor.dtype, tensor.elements) for tensor in tensors)


def _time(layer: Layer, times: Mapping[str, Sequence[float]]) -> Time | None:
    measured = sorted(times.get(layer.name, ()))
    if not measured:
        return None
    return Time(value=measured[len(measured) // 2], unit="us", kind="device", runs=len(measured))


def _boundary(layer: Layer, label: str, times: Mapping[str, Sequence[float]]) -> Boundary:
    read, written = _main(layer.inputs), _main(layer.outputs)
    kind = "cast" if read and written and read != written else "layout" if layer.kind == "Reformat" else "sync"
    return Boundary(kind=kind, where=label, count=1, time=_time(layer, times))  # type: ignore[arg-type]


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
    """A tensor that a layer reads or writes. A fact that was not reported is ``None``."""

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
    tensors = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        sizes = entry.get("Dimensions")
        dimensions = tuple(int(size) for size in sizes) if isinstance(sizes, list) else ()
        both = str(entry.get("Format/Datatype") or "")
        dtype = str(entry.get("Datatype") or entry.get("DataType") or both)
        layout = str(entry.get("Format") or both)
        tensors.append(
            TensorSeen(str(entry.get("Name", "")), dimensions, _dtype(dtype), _layout(layout, len(dimensions)))
        )
    return tuple(tensors)


def _dtype(text: str) -> str | None:
    return next((word for pattern, word in _DTYPES if pattern.search(text)), None)


def _layout(text: str, rank: int) -> str | None:
    if rank not in _IMAGE_RANKS:
        return None
    wide = _VECTORIZED.search(text)
    if wide is not None:
        number = next(group for group in wide.groups() if group)
        return f"nchw{_NUMBERS.get(number.lower(), number)}c"
    if _CHANNELS_LAST.search(text):
        return "nhwc"
    return "nchw" if _LINEAR.search(text) else None
