# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Loading a model into QNN: prepare, open here or in a worker, read back where every node went, wrap."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model.file import parse, read
from xpuruntime.engines.model_source import ModelSource, prepare_source
from xpuruntime.engines.onnxruntime.options import LAYER_FUSIONS
from xpuruntime.engines.qnn.model import QnnModel, WorkerSession, translated
from xpuruntime.engines.qnn.opening import PROVIDER, Opening, Placed, claim, construct, placements
from xpuruntime.engines.qnn.refusals import faults_in_log, refusal, rejected_in_log, rejected_in_trace
from xpuruntime.engines.qnn.worker import SessionWorker, WorkerFailed
from xpuruntime.errors import EngineError, ModelError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.files.scratch import ScratchFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.engines.base import LoadedModel, Observed, Request
    from xpuruntime.engines.qnn.settings import QnnSettings
    from xpuruntime.engines.qnn.targets import Target

__all__ = ["check_context", "load_model", "opening_of", "refused", "source_of", "without_layer_fusions"]

T = TypeVar("T")

#: What the provider writes into a compiled model: SDK, then the numbers of architecture and chip.
_RECORD = "ep_compatibility_info.QNNExecutionProvider"
_RECORD_FORM = re.compile(r"v\d+:\d+:(?P<sdk>[\d.]+):[\d.]+:(?P<htp_arch>\d+):(?P<soc_model>\d+):")
#: Classes of ONNX Runtime's exceptions that speak of the model itself, not of the provider.
_ABOUT_MODEL = frozenset({"InvalidGraph", "InvalidProtobuf", "NoSuchFile", "NoModel", "InvalidArgument", "ModelLoaded"})


def load_model(request: Request, settings: QnnSettings) -> LoadedModel:
    """Return the loaded model; leaves nothing behind when it fails."""
    log = ConversionLog()
    source = source_of(request, settings, log)
    opening = opening_of(settings, source)
    session, placed = _open(source, opening, settings, log)
    try:
        _verify(placed, source, opening, settings)
    except BaseException:
        if isinstance(session, WorkerSession):
            session.worker.close()
        raise
    return QnnModel(
        session,
        request.model,
        where=str(settings.target),
        strict=settings.strict,
        observer=_observer(request, settings, source, opening),
        log=log,
    )


def source_of(request: Request, settings: QnnSettings, log: ConversionLog) -> ModelSource:
    """Return the model as QNN gets it: the compiled one of an artifact, or the model with what the policy changes."""
    if request.artifact is not None:
        source = ModelSource(str(request.artifact.entry), None, str(request.artifact.folder))
    else:
        style = settings.style if settings.quantise else None
        source = prepare_source(request, log, convert=settings.convert, keep_fp32=settings.keep_fp32, qdq=style)
    if request.artifact is not None or "com.microsoft:EPContext" in request.model.ops:
        check_context(source, settings.target)
    return source


def opening_of(settings: QnnSettings, source: ModelSource) -> Opening:
    """Return how a session is opened for `settings`."""
    return Opening(options=settings.provider_options(), strict=not settings.allow_cpu_ops, folder=source.folder)


def check_context(source: ModelSource, target: Target) -> None:
    """Hold the record inside a compiled model against the chip: ONNX Runtime itself runs it for any."""
    data = read(source.model)[1] if isinstance(source.model, str) else source.model
    proto = parse(data, source.label)
    text = next((prop.value for prop in proto.metadata_props if prop.key == _RECORD), "")
    match = _RECORD_FORM.match(text)
    if match is None:
        msg = (
            f"{source.label} holds a compiled QNN context that does not say for which chip (its record is {text!r}); "
            "compile the model again with `xrt compile --engine qnn`"
        )
        raise EngineError(msg, engine="qnn", device="npu")
    made = (int(match["soc_model"]), int(match["htp_arch"]))
    if made[0] != target.soc_model or made[1] not in (0, target.htp_arch):
        msg = (
            f"{source.label} was compiled for soc_model {made[0]}, HTP v{made[1]}, and the policy names {target}; "
            "compile it for this chip, or name the other one"
        )
        raise EngineError(msg, engine="qnn", device="npu")


def _open(
    source: ModelSource, opening: Opening, settings: QnnSettings, log: ConversionLog
) -> tuple[Any, Sequence[Placed]]:
    return without_layer_fusions(lambda: _opened(source, opening, settings, log), source, opening, log)


def without_layer_fusions(attempt: Callable[[], T], source: ModelSource, opening: Opening, log: ConversionLog) -> T:
    """Return what an attempt returns; of a graph that was changed here, try again where an optimizer spoils it.

    ONNX Runtime's fusions of written-out layer norms and GELUs look through casts, and may make a graph that is not
    valid. `opening` has what it was opened with.
    """
    try:
        return attempt()
    except UnsupportedOperationError:
        raise
    except (EngineError, ModelError) as error:
        if not source.changed:
            raise
        reason = error
    opening.without = LAYER_FUSIONS
    try:
        result = attempt()
    except XpuRuntimeError:
        opening.without = ()
        raise reason from None
    what = f"graph optimized without {', '.join(LAYER_FUSIONS)}"
    log.add(what, f"with them the graph, {source.changed}, is refused: {reason}")
    return result


def _opened(
    source: ModelSource, opening: Opening, settings: QnnSettings, log: ConversionLog
) -> tuple[Any, Sequence[Placed]]:
    try:
        if claim(settings.target):
            session = construct(source.model, opening)
            return session, placements(session)
    except Exception as error:
        raise refused(error, source, opening, settings) from None
    worker = SessionWorker()
    try:
        number, reply = worker.open(source.model, opening)
    except BaseException as error:
        worker.close()
        if isinstance(error, Exception):
            raise refused(error, source, opening, settings) from None
        raise
    log.add(
        "the session runs in a process of its own",
        "this process holds another QNN chip, or was forked from one that holds QNN",
    )
    return WorkerSession(worker, number, reply["outputs"]), [msgspec.convert(one, Placed) for one in reply["placed"]]


def refused(error: Exception, source: ModelSource, opening: Opening, settings: QnnSettings) -> XpuRuntimeError:
    """Return the error of a load that failed, with QNN's reasons, which it gives in its log and its trace only."""
    kind = error.kind if isinstance(error, WorkerFailed) else type(error).__name__
    if isinstance(error, XpuRuntimeError) or kind in _ABOUT_MODEL:
        return translated(error, doing=f"loading {source.label} for {settings.target}")
    rejected, faults = _reasons(source, opening)
    if not rejected and not faults:
        faults = [str(translated(error, doing=f"loading {source.label}"))]
    composing = "Failed to compose" in str(error)
    return refusal(rejected, faults, label=source.label, where=str(settings.target), composing=composing)


def _reasons(source: ModelSource, opening: Opening) -> tuple[list[Any], list[str]]:
    """Open once more in a process of its own, with the log at its most verbose, only to read what it says."""
    with ScratchFolder("qnn") as folder:
        telling = {"enable_framework_op_trace": "1", "framework_op_trace_dir": folder}
        opening = msgspec.structs.replace(opening, options={**opening.options, **telling}, severity=0)
        worker = SessionWorker()
        try:
            worker.open(source.model, opening)
        except (WorkerFailed, EngineError):
            pass  # as expected: the reasons are in the log
        finally:
            worker.close()
        trace = Path(folder) / "qnn_op_trace.json"
        written = trace.read_text(encoding="utf-8", errors="replace") if trace.is_file() else ""
    log = worker.log()
    return rejected_in_trace(written) or rejected_in_log(log), faults_in_log(log)


def _verify(placed: Sequence[Placed], source: ModelSource, opening: Opening, settings: QnnSettings) -> None:
    """Refuse a session whose nodes did not go where the policy lets them."""
    away = [one for one in placed if one.provider != PROVIDER]
    strays = [one for one in away if not _allowed(one, settings.allow_cpu_ops)]
    if strays or (placed and len(away) == len(placed)):  # none at all: the graph was folded to constants
        rejected, faults = _reasons(source, opening)
        names = {stray.name for stray in strays}
        told = [one for one in rejected if one.name in names or not strays]
        raise refusal(told or rejected, faults, label=source.label, where=str(settings.target))


def _allowed(one: Placed, allowed: Sequence[str]) -> bool:
    return one.op in allowed or f"{one.domain}:{one.op}" in allowed


def _observer(
    request: Request, settings: QnnSettings, source: ModelSource, opening: Opening
) -> Callable[[Mapping[str, Any], int], Observed]:
    def observer(feeds: Mapping[str, Any], runs: int) -> Observed:
        from xpuruntime.engines.qnn.observing import observe

        return observe(request, settings, source, opening, feeds, runs)

    return observer
