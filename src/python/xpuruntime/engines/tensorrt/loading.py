# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""From a request to a model that runs: the plan is built, or read from an artifact, and put on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.conversion_log import ConversionLog
from xpuruntime.engines.model.shapes import with_shapes
from xpuruntime.engines.tensorrt.artifact import Record, SerializedEngine, read_artifact
from xpuruntime.engines.tensorrt.building import build, prepare
from xpuruntime.engines.tensorrt.caches import cache_file
from xpuruntime.engines.tensorrt.handle import Handle
from xpuruntime.engines.tensorrt.interruptible import Cancel, interruptible
from xpuruntime.engines.tensorrt.probing import bindings

if TYPE_CHECKING:
    from xpuruntime.engines.base import LoadedModel, Request
    from xpuruntime.engines.tensorrt.products import TensorRtProduct
    from xpuruntime.engines.tensorrt.settings import TensorRtSettings

__all__ = ["load_model"]


def load_model(
    request: Request, settings: TensorRtSettings, product: TensorRtProduct, target: dict[str, str], chip: str
) -> LoadedModel:
    """Return the loaded model; leaves nothing behind when it fails."""
    from xpuruntime.engines.tensorrt.model import TensorRtModel

    log = ConversionLog()
    ready = _plan(request, settings, product, target, log)
    handle = Handle(bindings(product), product, request.device, settings, ready.record, request.model.path)
    stripped = settings.options.get("strip_plan") == "1" and request.artifact is None
    weights = prepare(request, settings, log) if stripped else None
    runtime_cache = settings.options.get("runtime_cache")
    file = cache_file(runtime_cache, "runtime", {**target, "compute_capability": chip})
    info = with_shapes(request.model, request.policy)

    def work() -> TensorRtModel:
        from xpuruntime import _core

        with _core.DeviceScope(request.device):
            try:
                handle.open(ready.plan, file, weights)
                return TensorRtModel(handle, info, request=request, log=log)
            except BaseException:
                handle.close()
                raise

    # The library logs into Python while it loads: see `background`.
    model = interruptible(work, Cancel())
    if handle.cache_note is not None:
        log.add(*handle.cache_note)
    return model


def _plan(
    request: Request, settings: TensorRtSettings, product: TensorRtProduct, target: dict[str, str], log: ConversionLog
) -> SerializedEngine:
    if request.artifact is not None:
        return read_artifact(request.artifact, product, target)
    built = build(request, settings, product, target, log)
    return SerializedEngine(built.plan, Record.of(built, target))
