# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Building an engine: a model in, a plan out."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model_source import prepare_source
from xpuruntime.engines.tensorrt.caches import cache_file
from xpuruntime.engines.tensorrt.configuring import configure
from xpuruntime.engines.tensorrt.interruptible import Cancel, interruptible
from xpuruntime.engines.tensorrt.messages import Listener, failure, logger
from xpuruntime.engines.tensorrt.network import layer_nodes, parse, strong_typing
from xpuruntime.engines.tensorrt.probing import bindings
from xpuruntime.engines.tensorrt.timing import TimingCache

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.conversion_log import ConversionLog
    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.tensorrt.products import TensorRtProduct
    from xpuruntime.engines.tensorrt.settings import TensorRtSettings

__all__ = ["Built", "build", "prepare"]

#: The form of quantised graph that the parser takes.
_STYLE = "tensorrt"

#: One build at a time: the library's log does not distinguish builds.
_TURN = threading.Lock()


class Built(NamedTuple):
    """A plan, and what `Record` keeps of how it was made."""

    plan: bytes
    layers: dict[str, tuple[str, ...]]
    regions: dict[str, tuple[str, ...]]
    flags: dict[str, str]


def prepare(request: Request, settings: TensorRtSettings, log: ConversionLog) -> ModelSource:
    """Return the model as the builder gets it: with fixed sizes, converted or quantised."""
    qdq = _STYLE if settings.quantise else None
    return prepare_source(request, log, convert=settings.convert, keep_fp32=settings.keep_fp32, qdq=qdq)


def build(
    request: Request, settings: TensorRtSettings, product: TensorRtProduct, target: dict[str, str], log: ConversionLog
) -> Built:
    """Build the engine of a model. Slow; Ctrl-C ends it."""
    source = prepare(request, settings, log)
    cancel = Cancel()

    def work() -> Built:
        with _TURN, Listener() as heard:
            return _build(request, settings, product, target, source, log, cancel, heard)

    return interruptible(work, cancel)


def _build(
    request: Request,
    settings: TensorRtSettings,
    product: TensorRtProduct,
    target: dict[str, str],
    source: ModelSource,
    log: ConversionLog,
    cancel: Cancel,
    heard: Listener,
) -> Built:
    trt = bindings(product)
    known = {"engine": product.name, "device": request.device}
    doing = f"building {source.label} with {product.title}"
    with _on_device(request, product, settings):
        builder = trt.Builder(logger(trt))
        if builder is None:
            raise failure(doing, heard.errors(), **known)
        network = builder.create_network(strong_typing(trt))
        parser = trt.OnnxParser(network, logger(trt))
        parse(network, parser, source, request, product, heard)
        config = builder.create_builder_config()
        flags = configure(trt, builder, config, settings)
        file = cache_file(settings.options.get("timing_cache"), "timing", target)
        timing = TimingCache.attach(config, file, required=settings.options.get("pin_tactics") == "require")
        monitor = cancel.monitor(trt)  # has to live until the engine is built
        config.progress_monitor = monitor
        memory = builder.build_serialized_network(network, config)
        if memory is None:
            raise failure(doing, heard.errors(), **known)
        if timing is not None:
            log.add(*timing.keep())
        regions = dict(source.quantised.regions) if source.quantised is not None else {}
        nodes = {**{node.name: (node.name,) for node in request.model.nodes}, **regions}
        layers = {
            layer.name: layer_nodes(layer.metadata, nodes)
            for layer in map(network.get_layer, range(network.num_layers))
        }
        told = {name: named for name, named in layers.items() if named}
        return Built(bytes(memory), told, regions, flags)


def _on_device(request: Request, product: TensorRtProduct, settings: TensorRtSettings) -> Any:
    """Make the GPU current that kernels are timed on; a build for named targets needs none."""
    import contextlib

    if product.jit and settings.targets:
        return contextlib.nullcontext()
    from xpuruntime import _core

    return _core.DeviceScope(request.device)
