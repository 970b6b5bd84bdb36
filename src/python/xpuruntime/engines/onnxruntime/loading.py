# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Loading a model into ONNX Runtime: convert, open, wrap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model_source import ModelSource, prepare_source
from xpuruntime.engines.onnxruntime._private_api import raw_session
from xpuruntime.engines.onnxruntime.device_arrays import no_capture
from xpuruntime.engines.onnxruntime.opening import Opened, open_session, session_options
from xpuruntime.engines.onnxruntime.options import DISABLED, LAYER_FUSIONS, OnnxRuntimeSettings
from xpuruntime.errors import EngineError, ModelError, XpuRuntimeError
from xpuruntime.files.reading import decode_json

if TYPE_CHECKING:
    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.base import LoadedModel, Observed, Request
    from xpuruntime.engines.onnxruntime.rewriting.graph_edit import Rewriting


def load_model(request: Request, settings: OnnxRuntimeSettings) -> LoadedModel:
    """Return the loaded model; leaves nothing behind when it fails."""
    log = ConversionLog()
    if request.artifact is not None:  # it holds the graph as it was rewritten then, which is run as it is
        settings = settings.replace(level="disable")
    source = model_source(request, settings, log)
    if settings.provider != "CUDAExecutionProvider":
        from xpuruntime.engines.onnxruntime.cpu import CpuModel
        from xpuruntime.engines.onnxruntime.pass_through import refuse_shared_caches

        refuse_shared_caches(settings)
        rewriting = _rewritten(request, settings, source, log)
        opened, settings = _open(settings, _as_it_runs(source, rewriting), request.device, log)
        _check(rewriting, request, settings, opened, log)
        observer = _observer(request, settings, source, rewriting)
        return CpuModel(opened, request.model, strict=settings.strict, observer=observer, log=log)
    return _load_cuda(request, settings, source, log)


def _rewritten(
    request: Request, settings: OnnxRuntimeSettings, source: ModelSource, log: ConversionLog
) -> Rewriting | None:
    if request.artifact is not None or not (settings.rewrites or settings.tune):
        return None
    from xpuruntime.engines.onnxruntime.rewriting.loading import rewritten

    return rewritten(request, settings, source, log)


def _as_it_runs(source: ModelSource, rewriting: Rewriting | None) -> ModelSource:
    return source if rewriting is None or not rewriting.rewrites else rewriting.source


def _check(
    rewriting: Rewriting | None, request: Request, settings: OnnxRuntimeSettings, opened: Opened, log: ConversionLog
) -> None:
    if rewriting is not None:
        from xpuruntime.engines.onnxruntime.rewriting.loading import check

        check(rewriting, request, settings, opened.session, log)


def _open(
    settings: OnnxRuntimeSettings, source: ModelSource, device: str, log: ConversionLog
) -> tuple[Opened, OnnxRuntimeSettings]:
    """Open a session, and return it with the settings that it was opened with."""
    # A graph that was changed here, and that an optimizer spoils, is opened with fewer optimizers. A level that the
    # policy states is kept.
    try:
        return open_session(settings, source, device), settings
    except (EngineError, ModelError) as error:
        if not source.changed or settings.level == "disable":
            raise
        reason = error
    off = dict.fromkeys((*settings.session.get(DISABLED, "").split(";"), *LAYER_FUSIONS))
    fewer = {f"without {', '.join(LAYER_FUSIONS)}": settings.with_session({DISABLED: ";".join(filter(None, off))})}
    if not settings.level_stated:
        fewer["at level disable"] = settings.replace(level="disable")
    for less, changed in fewer.items():
        try:
            opened = open_session(changed, source, device)
        except XpuRuntimeError:
            continue
        log.add(
            f"graph optimized {less}", f"at level {settings.level} the graph, {source.changed}, is refused: {reason}"
        )
        return opened, changed
    raise reason  # the optimizers are not what it was refused for


def _load_cuda(request: Request, settings: OnnxRuntimeSettings, source: ModelSource, log: ConversionLog) -> LoadedModel:
    from xpuruntime import _core

    preload_cuda()
    with no_capture(), _core.DeviceScope(request.device):  # ONNX Runtime changes the current device and leaves it so
        return _open_cuda(request, settings, source, log)


def _open_cuda(request: Request, settings: OnnxRuntimeSettings, source: ModelSource, log: ConversionLog) -> LoadedModel:
    from xpuruntime import _core
    from xpuruntime.engines.onnxruntime.cuda import CudaModel

    rewriting = _rewritten(request, settings, source, log)
    runs = _as_it_runs(source, rewriting)
    stream = None
    allocator = _allocator(request, settings)
    if allocator is None:
        stream = _core.Stream(request.device)
        own = {"has_user_compute_stream": "1", "user_compute_stream": str(stream.handle)}
    else:
        own = {
            "gpu_external_alloc": str(allocator.alloc_address),
            "gpu_external_free": str(allocator.free_address),
            "gpu_external_empty_cache": str(allocator.empty_cache_address),
        }
    settings = settings.with_options(own)
    graph_refused = None
    try:
        opened, settings = _open(settings, runs, request.device, log)
    except XpuRuntimeError as error:
        if settings.graph != "prefer" or "graph" not in str(error).lower():
            raise _with_reason(error, allocator) from None
        graph_refused = str(error)
        options = {name: value for name, value in settings.options.items() if name != "enable_cuda_graph"}
        opened, settings = _open(settings.replace(options=options), runs, request.device, log)
        log.add("CUDA graphs are off in this session", graph_refused)
    _check(rewriting, request, settings, opened, log)
    return CudaModel(
        opened,
        request.model,
        device=request.device,
        settings=settings,
        stream=stream,
        allocator=allocator,
        graph_refused=graph_refused,
        observer=_observer(request, settings, source, rewriting),
        log=log,
    )


@functools.cache
def preload_cuda() -> None:
    """Load the provider's libraries once a process; a failure is tried again."""
    import onnxruntime as ort

    from xpuruntime.runtime.libraries.loading import libraries_needed_by, preload

    provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if provider.is_file():
        linked, later = libraries_needed_by(provider)
        preload((*linked, *later))


def _allocator(request: Request, settings: OnnxRuntimeSettings) -> Any:
    """Return a slot over a pool of the session's own, or ``None``."""
    # The provider passes no stream with its allocations, so the pool is shared with nobody: what is freed in it is used
    # again only by the same provider, whose runs are put one after the other.
    if settings.pool == "engine":
        return None
    from xpuruntime import _core

    name = f"session {Path(request.model.path).name}"
    pool = _core.MemoryPool(request.device, settings.pool, limit=settings.pool_limit, name=name)
    return _core.EngineAllocator(pool)


def _with_reason(error: XpuRuntimeError, allocator: Any) -> XpuRuntimeError:
    reason = allocator.take_failure() if allocator is not None else None
    if not reason:
        return error
    return type(error)(
        f"{error} The pool said: {reason}.", engine=error.engine, device=error.device, status=error.status
    )


def model_source(request: Request, settings: OnnxRuntimeSettings, log: ConversionLog) -> ModelSource:
    """Return the model as ONNX Runtime gets it: converted where the policy says so, or that of an artifact."""
    if request.artifact is not None:
        return artifact_source(request.artifact, request.model.path)
    supported = None
    if settings.convert == "bf16":
        from xpuruntime.engines.onnxruntime import kernel_controls as kernels

        supported = kernels.CUDA_BF16_OPS
    return prepare_source(
        request,
        log,
        convert=settings.convert,
        qdq=settings.qdq,
        keep_fp32=settings.keep_fp32,
        supported_ops=supported,
    )


def _observer(
    request: Request, settings: OnnxRuntimeSettings, source: ModelSource, rewriting: Rewriting | None
) -> Callable[[Mapping[str, Any], int], Observed]:
    """Return what makes an instrumented copy of the session and watches it run. Keeps the rules of `rewriting`."""
    copy = settings.public()

    def observer(feeds: Mapping[str, Any], runs: int) -> Observed:
        from xpuruntime.engines.onnxruntime.observing.instrumented_run import instrument, observe
        from xpuruntime.engines.onnxruntime.observing.kernels import DecidedKernels
        from xpuruntime.engines.onnxruntime.observing.unit_facts import rewrite_decisions, unreplaced_decisions
        from xpuruntime.engines.onnxruntime.options import attention_kernels, read_back

        effective: dict[str, str] = {}
        decided = None
        if rewriting is not None and rewriting.rewrites:
            decided = DecidedKernels(rewriting, request.device, settings.arch)
        current = source if decided is None else decided.source

        def make(prefix: str | None, optimized: str | None) -> Any:
            prepared = session_options(copy, current)
            instrument(prepared, prefix, optimized)
            session = open_session(copy, current, request.device, prepared).session
            effective.update(read_back(session, settings, request.policy.execution.shapes))
            return session

        def run(session: Any, arrays: Mapping[str, Any]) -> Any:
            names, feeds = [o.name for o in session.get_outputs()], dict(arrays)
            if any(type(value).__name__ == "OrtValue" for value in feeds.values()):
                return raw_session(session).run_with_ort_values(feeds, names, None)
            return raw_session(session).run(names, feeds, None)

        with attention_kernels(request) as kernels:
            seen = observe(
                make,
                feeds,
                runs,
                source_graph_of(request, source),
                device=request.device,
                precision=settings.convert or request.policy.execution.precision,
                allow_cpu_ops=settings.allow_cpu_ops,
                run=run,
            )
        if source.quantized is not None:
            from xpuruntime.engines.quantization import in_source_terms

            units = in_source_terms(seen.units, source.quantized, request.model)
            seen = msgspec.structs.replace(seen, units=units)
        seen = kernels.attach(seen, effective)
        if rewriting is None:
            from xpuruntime.engines.onnxruntime.rewriting.graph_edit import left_alone

            left = unreplaced_decisions(left_alone(request, settings, source), request.device)
            return msgspec.structs.replace(seen, decisions=left)
        rewriting.release()
        if decided is not None:
            return decided.attach(seen)
        return msgspec.structs.replace(seen, decisions=rewrite_decisions(rewriting, {}, request.device))

    return observer


def source_graph_of(request: Request, source: ModelSource) -> Any:
    """Return the graph before any optimizer saw it: of the model, as it was quantized, or as an artifact keeps it."""
    if source.quantized is not None:
        import onnx

        return onnx.load_model_from_string(source.quantized.data)
    if request.artifact is None:
        return request.model
    return source_graph(request.artifact)


#: The graph before any optimizer saw it, without its weights: evidence is joined to it.
SOURCE = "source.onnx"
#: What was quantized, where it was quantized here.
QUANTIZED = "quantized.json"


def artifact_source(artifact: Artifact, label: str) -> ModelSource:
    """Return the compiled model as ONNX Runtime opens it."""
    quantized = None
    if QUANTIZED in artifact.manifest.files:
        from xpuruntime.engines.quantization import QuantizedModel

        try:
            told = decode_json((artifact.folder / QUANTIZED).read_bytes(), QuantizedModel)
            data = (artifact.folder / SOURCE).read_bytes()
        except (OSError, msgspec.MsgspecError) as error:
            msg = f"the artifact {artifact.folder} cannot be read: {error}. Fix: compile the model again"
            raise ModelError(msg) from None
        quantized = msgspec.structs.replace(told, data=data)
    return ModelSource(str(artifact.entry), None, label, quantized=quantized)


def source_graph(artifact: Artifact) -> Any:
    """Return the graph that an artifact was compiled from, without its weights."""
    import onnx
    from google.protobuf.message import DecodeError

    path = artifact.folder / SOURCE
    try:
        return onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError, ValueError) as error:
        msg = f"the graph {path} of the artifact cannot be read: {error}. Fix: compile the model again"
        raise ModelError(msg) from None
