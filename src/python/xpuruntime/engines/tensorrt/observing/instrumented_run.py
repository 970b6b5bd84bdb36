# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Instrumented run of TensorRT, with the vendor's profiler attached and its configuration read back."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.base import Observed
from xpuruntime.engines.model.shapes import ShapeRange
from xpuruntime.engines.tensorrt.handle import Slot
from xpuruntime.engines.tensorrt.observing.unit_attribution import SourceModel, attribute_units, read_engine
from xpuruntime.errors import EngineError, ModelError
from xpuruntime.evidence.checkpoints import COLD, COUNTED, LOADED, checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.tensorrt.handle import Handle
    from xpuruntime.engines.tensorrt.model import TensorRtModel

__all__ = ["observe", "read_back"]

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
    """Return layer name to microseconds, one for each run but the first."""
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
    found = {"execution.engine": product.name, "execution.device": handle.device}
    if "tf32" in flags:
        found["execution.tf32"] = f"BuilderFlag.TF32={flags['tf32']}"
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
            found["execution.determinism"] = f"kernel_specialization={specialization}"
    if "weight_streaming_budget" in handle.settings.options:
        options["weight_streaming_budget"] = str(handle.engine.weight_streaming_budget_v2)
    if "workspace" in flags:
        found["execution.memory.limit"] = f"workspace {flags['workspace']} bytes"
    for name in product.names:
        found.update({f"execution.provider_options.{name}.{option}": value for option, value in options.items()})
    for name in request.policy.execution.shapes:
        found[f"execution.shapes.{name}"] = _sizes(handle.engine, name)
    return found


def _sizes(engine: Any, name: str) -> str:
    """Return the sizes an input was built for, as a policy writes them."""
    shape = tuple(engine.get_tensor_shape(name))
    if all(size >= 0 for size in shape):
        return f"[{', '.join(map(str, shape))}]"
    least, best, largest = (tuple(one) for one in engine.get_tensor_profile_shape(name, 0))
    return f"[{', '.join(str(ShapeRange(*sizes)) for sizes in zip(least, best, largest, strict=True))}]"


def _types(request: Request) -> dict[str, str]:
    """Return tensor to precision; empty where the model's file is not at hand, as with an artifact from elsewhere."""
    from xpuruntime.engines.precision.names import model_precisions

    try:
        return model_precisions(request.model.named_proto())
    except ModelError:
        return {}
