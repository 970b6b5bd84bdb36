# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Building an engine: a configuration, its caches and timing, a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model.file import looks_like, parse
from xpuruntime.engines.model_source import ModelSource, prepare_source
from xpuruntime.engines.tensorrt.network import (
    Cancel,
    Listener,
    failure,
    interruptible,
    layer_nodes,
    logger,
    parse_network,
    strong_typing,
)
from xpuruntime.engines.tensorrt.options import TensorRtProduct, TensorRtSettings, bindings
from xpuruntime.errors import EngineError, ModelError
from xpuruntime.files.paths import cache_folder, make_private, not_private, reason_of, with_home
from xpuruntime.files.reading import read_regular
from xpuruntime.files.writing import locked, replace_file

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.input_binding import ConversionLog

#: The form of quantized graph that the parser takes.
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
    """Return the model as the builder gets it: with fixed sizes, converted or quantized."""
    qdq = _STYLE if settings.quantize else None
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
        parse_network(network, parser, source, request, product, heard)
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
        regions = dict(source.quantized.regions) if source.quantized is not None else {}
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


#: Options that are an attribute of the configuration and take a number.
_NUMBERS = (
    "builder_optimization_level",
    "max_aux_streams",
    "max_num_tactics",
    "avg_timing_iterations",
    "l2_limit_for_tiling",
)
#: Options that are an attribute and take a member of an enumeration, which is the word in capitals.
_WORDS = {
    "tiling_optimization_level": "TilingOptimizationLevel",
    "hardware_compatibility": "HardwareCompatibilityLevel",
    "runtime_platform": "RuntimePlatform",
    "profiling_verbosity": "ProfilingVerbosity",
}
_ATTRIBUTE = {"hardware_compatibility": "hardware_compatibility_level"}
#: Options that are a flag.
_FLAGS = {
    "sparse_weights": "SPARSE_WEIGHTS",
    "strict_nans": "STRICT_NANS",
    "distributive_independence": "DISTRIBUTIVE_INDEPENDENCE",
    "strip_plan": "STRIP_PLAN",
    "weight_streaming": "WEIGHT_STREAMING",
    "version_compatible": "VERSION_COMPATIBLE",
}
_REFIT = {"on": "REFIT", "identical": "REFIT_IDENTICAL"}
_PINNING = {"record": ("EDITABLE_TIMING_CACHE",), "require": ("EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS")}


def configure(trt: Any, builder: Any, config: Any, settings: TensorRtSettings) -> dict[str, str]:
    """Set everything that a build depends on, and return it as read back: option to value."""
    held = _Held()
    options = settings.options
    for option in (name for name in _NUMBERS if name in options):
        number = int(options[option])
        held.check(option, options[option], _set(config, option, number))
    for option, kind in _WORDS.items():
        word = options.get(option, "detailed" if option == "profiling_verbosity" else None)
        if word is not None:
            member = getattr(getattr(trt, kind), word.upper())
            held.check(option, word, _set(config, _ATTRIBUTE.get(option, option), member).name.lower())
    if "max_threads" in options:
        held.check("max_threads", options["max_threads"], _set(builder, "max_threads", int(options["max_threads"])))
    for flag, option, wanted in _flags(settings):
        held.check(option, str(int(wanted)), int(_flag(trt, config, flag, wanted)))
    _pools(trt, config, settings, held.check)
    _targets(trt, config, settings, held.check)
    _profile(builder, config, settings)
    return held.values


class _Held:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def check(self, option: str, wanted: str, held: object) -> None:
        if str(held) != wanted:
            raise EngineError(
                f"the builder does not take {option}={wanted}: it holds {held}. Fix: leave the option out"
            )
        self.values[option] = wanted


def _set(thing: Any, attribute: str, value: Any) -> Any:
    setattr(thing, attribute, value)
    return getattr(thing, attribute)


def _flags(settings: TensorRtSettings) -> list[tuple[str, str, bool]]:
    options = settings.options
    flags = [("TF32", "tf32", settings.tf32)]
    flags += [(flag, option, options[option] == "1") for option, flag in _FLAGS.items() if option in options]
    refit = _REFIT.get(options.get("refit", "off"))
    if refit is not None:
        flags.append((refit, "refit", True))
    flags += [(flag, f"pin_tactics.{flag}", True) for flag in _PINNING.get(options.get("pin_tactics", "off"), ())]
    return flags


def _flag(trt: Any, config: Any, name: str, wanted: bool) -> bool:
    flag = getattr(trt.BuilderFlag, name)
    (config.set_flag if wanted else config.clear_flag)(flag)
    return bool(config.get_flag(flag))


def _pools(trt: Any, config: Any, settings: TensorRtSettings, check: Callable[[str, str, object], None]) -> None:
    limits = {"WORKSPACE": settings.workspace}
    if "tactic_shared_memory" in settings.options:
        limits["TACTIC_SHARED_MEMORY"] = int(settings.options["tactic_shared_memory"])
    for name, limit in limits.items():
        if limit is None:
            continue
        pool = getattr(trt.MemoryPoolType, name)
        # The vendor's own limit is the memory of the GPU; a policy's may be more than that.
        limit = min(limit, int(config.get_memory_pool_limit(pool)))
        config.set_memory_pool_limit(pool, limit)
        check(name.lower(), str(limit), int(config.get_memory_pool_limit(pool)))


def _targets(trt: Any, config: Any, settings: TensorRtSettings, check: Callable[[str, str, object], None]) -> None:
    if not settings.targets:
        return
    config.num_compute_capabilities = len(settings.targets)
    for index, target in enumerate(settings.targets):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target.replace('.', '')}"), index)
    held = [config.get_compute_capability(index).name[2:] for index in range(config.num_compute_capabilities)]
    wanted = " ".join(settings.targets)
    check("compute_capability", wanted, " ".join(f"{name[:-1]}.{name[-1]}" for name in held))


def _profile(builder: Any, config: Any, settings: TensorRtSettings) -> None:
    if not settings.profiles:
        return
    profile = builder.create_optimization_profile()
    for name, (least, best, largest) in settings.profiles.items():
        profile.set_shape(name, least, best, largest)
    if config.add_optimization_profile(profile) < 0:
        raise EngineError(f"the builder refused the optimization profile {settings.profiles}; check execution.shapes")


#: TensorRT's own are a few megabytes.
_MAX_BYTES = 1 << 31


class CacheFile:
    """One file, replaced as a whole: who reads it sees the old content or the new one, also when a writer is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes | None:
        """Return its content, or ``None`` where there is no such file."""
        reason = not_private(self.path.parent) or not_private(self.path)
        if reason is not None:
            raise EngineError(f"the cache {self.path} is not used, since another user may have written it: {reason}")
        try:
            return read_regular(self.path, _MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EngineError(f"the cache {self.path} cannot be read: {reason_of(error)}") from error

    def update(self, change: Callable[[bytes | None], bytes | None]) -> bool:
        """Replace the content by what `change` makes of it, keeping other processes out meanwhile."""
        try:
            make_private(self.path.parent)
            with locked(self.path.with_name(self.path.name + ".lock")):
                before = self.read()
                self._refuse_another(before)
                after = change(before)
                if after is None or after == before:
                    return False
                replace_file(self.path, after)
        except OSError as error:
            raise EngineError(f"the cache {self.path} cannot be written: {reason_of(error)}") from error
        return True

    def _refuse_another(self, content: bytes | None) -> None:
        """Refuse to replace what is plainly no cache: a model, an archive, a picture. Raises EngineError."""
        if not content:
            return
        known = looks_like(content[:4096])
        what = known[0] if known is not None else "an ONNX model" if _is_onnx(content) else None
        if what is not None:
            raise EngineError(f"the cache {self.path} is not written: that file is {what}. Fix: name another file")


def _is_onnx(content: bytes) -> bool:
    try:
        return len(parse(content, "").graph.node) > 0
    except ModelError:
        return False


def cache_file(stated: str | None, kind: str, target: dict[str, str]) -> CacheFile | None:
    """Return the file that an option names, or ``None`` where it is off."""
    if stated in (None, "off"):
        return None
    if stated != "default":
        return CacheFile(with_home(str(stated), f"the {kind} cache"))
    chip = target["compute_capability"].replace(" ", "-")
    return CacheFile(cache_folder() / "tensorrt" / f"{target['flavour']}-{target['version']}-sm{chip}.{kind}")


class TimingCache:
    """A timing cache in use by one build."""

    def __init__(self, config: Any, cache: Any, file: CacheFile) -> None:
        self._config = config
        self._cache = cache  # has to live until the engine is built
        self._file = file

    @classmethod
    def attach(cls, config: Any, file: CacheFile | None, *, required: bool) -> TimingCache | None:
        """Give the content of `file` to the builder; ``None`` without a file."""
        if file is None:
            return None
        content = file.read()
        if content is None and required:
            msg = f"pin_tactics: require, but there is no timing cache {file.path}; build once with pin_tactics: record"
            raise EngineError(msg)
        cache = config.create_timing_cache(content or b"")
        if cache is None or not config.set_timing_cache(cache, False):
            msg = (
                f"the timing cache {file.path} was made on another GPU or by another version; delete it, or name "
                "another file"
            )
            raise EngineError(msg)
        return cls(config, cache, file)

    def keep(self) -> tuple[str, str]:
        """Write what is known now, together with what others wrote meanwhile; return what to tell."""
        cache = self._config.get_timing_cache()

        def merged(others: bytes | None) -> bytes:
            if others:
                other = self._config.create_timing_cache(others)
                if other is not None:
                    cache.combine(other, False)
            return bytes(cache.serialize())

        written = self._file.update(merged)
        return f"timing cache {self._file.path}", "written" if written else "nothing new was measured"
