# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Loading a model into ONNX Runtime: convert, open, verify, wrap."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.feeds import ConversionLog
from xpuruntime.engines.onnxruntime.failures import translate
from xpuruntime.engines.onnxruntime.opening import Opened, Source, open_session, session_options
from xpuruntime.errors import EngineError, XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.engines.base import LoadedModel, Observed, Request
    from xpuruntime.engines.onnxruntime.settings import Settings

__all__ = ["load_model"]

#: Options that belong to one session and not to an instrumented copy of it.
_PRIVATE = (
    "user_compute_stream",
    "has_user_compute_stream",
    "gpu_external_alloc",
    "gpu_external_free",
    "gpu_external_empty_cache",
    "enable_cuda_graph",
)


def load_model(request: Request, settings: Settings) -> LoadedModel:
    """Return the loaded model; leaves nothing behind when it fails.

    Raises
    ------
    XpuRuntimeError
        See `OnnxRuntimeEngine.load`.
    """
    log = ConversionLog()
    source = _source(request, settings, log)
    if settings.provider == "CPUExecutionProvider":
        from xpuruntime.engines.onnxruntime.cpu import CpuModel

        opened = open_session(settings, source, request.device)
        _verify(request, settings, opened, log)
        observer = _observer(request, settings, source)
        return CpuModel(opened, request.model, strict=settings.strict, observer=observer, log=log)
    return _load_cuda(request, settings, source, log)


def _load_cuda(request: Request, settings: Settings, source: Source, log: ConversionLog) -> LoadedModel:
    from xpuruntime import _core

    _preload()
    with _core.DeviceScope(request.device):  # ONNX Runtime changes the current device and leaves it so
        return _open_cuda(request, settings, source, log)


def _open_cuda(request: Request, settings: Settings, source: Source, log: ConversionLog) -> LoadedModel:
    from xpuruntime import _core
    from xpuruntime.engines.onnxruntime.cuda import CudaModel

    allocator = _allocator(request, settings)
    stream = None
    if allocator is None:
        stream = _core.Stream(request.device)
        settings.options["has_user_compute_stream"] = "1"
        settings.options["user_compute_stream"] = str(stream.handle)
    graph_refused = None
    try:
        opened = open_session(settings, source, request.device)
    except XpuRuntimeError as error:
        if settings.graph != "prefer" or "graph" not in str(error).lower():
            raise _with_reason(error, allocator) from None
        graph_refused = str(error)
        settings.options.pop("enable_cuda_graph", None)
        opened = open_session(settings, source, request.device)
        log.add("CUDA graphs are off in this session", graph_refused)
    _verify(request, settings, opened, log)
    return CudaModel(
        opened,
        request.model,
        device=request.device,
        settings=settings,
        stream=stream,
        allocator=allocator,
        graph_refused=graph_refused,
        observer=_observer(request, settings, source),
        log=log,
    )


@functools.cache
def _preload() -> None:
    """Load the provider's libraries once a process; a failure is tried again."""
    import onnxruntime as ort

    from xpuruntime.runtime.libraries import libraries_needed_by, preload

    provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if provider.is_file():
        linked, later = libraries_needed_by(provider)
        preload((*linked, *later))


def _allocator(request: Request, settings: Settings) -> Any:
    """Return a slot over a pool of the session's own, or ``None``.

    The provider tells no stream with its allocations, so the pool is shared with nobody: what is freed in it is used
    again only by the same provider, whose runs are put one after the other.
    """
    if settings.pool == "engine":
        return None
    from xpuruntime import _core

    name = f"session {Path(request.model.path).name}"
    pool = _core.MemoryPool(request.device, settings.pool, limit=settings.pool_limit, name=name)
    allocator = _core.EngineAllocator(pool)
    settings.options["gpu_external_alloc"] = str(allocator.alloc_address)
    settings.options["gpu_external_free"] = str(allocator.free_address)
    settings.options["gpu_external_empty_cache"] = str(allocator.empty_cache_address)
    return allocator


def _with_reason(error: XpuRuntimeError, allocator: Any) -> XpuRuntimeError:
    reason = allocator.take_failure() if allocator is not None else None
    if not reason:
        return error
    return type(error)(
        f"{error} The pool said: {reason}.", engine=error.engine, device=error.device, status=error.status
    )


def _source(request: Request, settings: Settings, log: ConversionLog) -> Source:
    info = request.model
    label = info.path
    if settings.convert is not None:
        from xpuruntime.engines.onnxruntime.kernels import CUDA_BF16_OPS
        from xpuruntime.engines.precision import convert

        supported = CUDA_BF16_OPS if settings.convert == "bf16" else None
        converted = convert(info, settings.convert, keep_fp32_nodes=settings.keep_fp32, supported_ops=supported)
        for note in converted.notes:
            log.add(f"graph converted to {settings.convert}", note)
        if converted.fits_in_memory():
            return Source(converted.serialized(), None, label)
        folder = tempfile.TemporaryDirectory(prefix="xpuruntime-converted-")
        return Source(str(converted.write(folder.name)), None, label, keep=folder)
    if info.needs_renaming or info.data is not None:
        for name in info.renamed[:1]:
            count = len(info.renamed)
            what = (
                f"1 node was given the name {name!r}"
                if count == 1
                else f"{count} nodes were given names: {name!r}, ..."
            )
            log.add(what, "unnamed in the model, or one name for several nodes")
        return Source(info.serialized_named(), info.base_dir, label)
    return Source(info.path, None, label)


def _verify(request: Request, settings: Settings, opened: Opened, log: ConversionLog) -> None:
    """Hold a probe input against fp32 on the CPU, when the graph was converted or the policy states an accuracy."""
    wanted = request.policy.accuracy
    if settings.convert is None and wanted is None:
        return
    from xpuruntime.engines.onnxruntime.settings import Settings as Plain
    from xpuruntime.engines.precision import TOLERANCES, probe_feeds, verify

    feeds = probe_feeds(request.model)
    plain = Plain(provider="CPUExecutionProvider", threads=settings.threads)
    info = request.model
    original = Source(info.serialized_named() if info.data is not None else info.path, info.base_dir, info.path)
    reference = open_session(plain, original, "cpu").session
    names = [o.name for o in reference.get_outputs()]

    def answer(session: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        options = _plain_run_options(settings)
        return lambda arrays: dict(zip(names, session._sess.run(names, dict(arrays), options), strict=True))

    tolerance = TOLERANCES[settings.convert or "fp32"]
    if wanted is not None:
        stated = {name: getattr(wanted, name) for name in ("rtol", "atol", "cosine")}
        tolerance = msgspec.structs.replace(tolerance, **{k: v for k, v in stated.items() if v is not None})
    try:
        result = verify(answer(reference), answer(opened.session), feeds, tolerance)
    except Exception as error:
        raise translate(error, doing=f"checking {info.path} on a probe input", device=request.device) from None
    log.add("a probe input was held against fp32 on the CPU", str(result))
    if not result.passed:
        msg = f"{info.path} on {request.device} does not agree with fp32 on the CPU: {result}"
        raise EngineError(msg, engine="onnxruntime", device=request.device)


def _plain_run_options(settings: Settings) -> Any:
    """Return run options that capture no CUDA graph."""
    import onnxruntime as ort

    options = ort.RunOptions()
    if settings.options.get("enable_cuda_graph") == "1":
        options.add_run_config_entry("gpu_graph_id", "-1")
    return options


def _observer(request: Request, settings: Settings, source: Source) -> Callable[[Mapping[str, Any], int], Observed]:
    """Return what makes an instrumented copy of the session and watches it run."""
    from xpuruntime.engines.onnxruntime.controls import PROBED
    from xpuruntime.engines.onnxruntime.settings import Settings as Plain

    options = {key: value for key, value in settings.options.items() if key not in _PRIVATE}

    def observer(feeds: Mapping[str, Any], runs: int) -> Observed:
        from xpuruntime.engines.onnxruntime.observing import instrument, observe
        from xpuruntime.engines.onnxruntime.readback import attention_kernels, read_back

        copy = Plain(
            provider=settings.provider,
            options=options,
            session=settings.session,
            level=settings.level,
            threads=settings.threads,
            deterministic=settings.deterministic,
            allow_cpu_ops=settings.allow_cpu_ops,
        )
        # A session whose probe input was out of tolerance was refused, so it does not come here.
        effective = {f"accuracy.{key}": PROBED for key in ("reference", "rtol", "atol", "cosine")}

        def make(prefix: str | None, optimized: str | None) -> Any:
            prepared = session_options(copy, source)
            instrument(prepared, prefix, optimized)
            session = open_session(copy, source, request.device, prepared).session
            effective.update(read_back(session, settings))
            return session

        def run(session: Any, arrays: Mapping[str, Any]) -> Any:
            names, given = [o.name for o in session.get_outputs()], dict(arrays)
            if any(type(value).__name__ == "OrtValue" for value in given.values()):
                return session._sess.run_with_ort_values(given, names, None)
            return session._sess.run(names, given, None)

        with attention_kernels(request) as kernels:
            seen = observe(
                make,
                feeds,
                runs,
                request.model,
                device=request.device,
                precision=settings.convert or request.policy.execution.precision,
                allow_cpu_ops=settings.allow_cpu_ops,
                run=run,
            )
        return kernels.attach(seen, effective)

    return observer
