# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Loading a model into QNN: prepare, open here or in a worker, read back where every node went, wrap."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from xpuruntime.engines.base import Compiled, LoadedModel, Observed, Request
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model.file import parse, read
from xpuruntime.engines.model_source import ModelSource, prepare_source
from xpuruntime.engines.onnxruntime.options import LAYER_FUSIONS
from xpuruntime.engines.qnn.model import QnnModel, SessionWorker, WorkerFailed, WorkerSession, translated
from xpuruntime.engines.qnn.observing.records import write_units
from xpuruntime.engines.qnn.opening import PROVIDER, Opening, Placed, claim, construct, placements
from xpuruntime.errors import EngineError, EngineFailed, ModelError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.files.scratch import ScratchFolder

if TYPE_CHECKING:
    from xpuruntime.engines.qnn.options import QnnSettings, Target

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
        style = settings.style if settings.quantize else None
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
    chip = (int(match["soc_model"]), int(match["htp_arch"]))
    if chip[0] != target.soc_model or chip[1] not in (0, target.htp_arch):
        msg = (
            f"{source.label} was compiled for soc_model {chip[0]}, HTP v{chip[1]}, and the policy names {target}; "
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
    return WorkerSession(worker, number, reply["outputs"]), [msgspec.convert(node, Placed) for node in reply["placed"]]


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
        worker = SessionWorker(log_bytes=_LOG)
        try:
            worker.drop(worker.open(source.model, opening)[0])  # the trace is written as the session ends
        except (WorkerFailed, EngineError):
            pass  # as expected: the reasons are in the log
        finally:
            worker.close()
        trace = Path(folder) / "qnn_op_trace.json"
        written = trace.read_text(encoding="utf-8", errors="replace") if trace.is_file() else ""
    log = worker.log()
    return rejected_in_trace(written) or rejected_in_log(log), faults_in_log(log)


#: Bytes of a verbose log that are read.
_LOG = 1 << 26


def _verify(placed: Sequence[Placed], source: ModelSource, opening: Opening, settings: QnnSettings) -> None:
    away = [node for node in placed if node.provider != PROVIDER]
    strays = [node for node in away if not _allowed(node, settings.allow_cpu_ops)]
    if strays or (placed and len(away) == len(placed)):  # none at all: the graph was folded to constants
        rejected, faults = _reasons(source, opening)
        names = {stray.name for stray in strays}
        told = [node for node in rejected if node.name in names or not strays]
        raise refusal(told or rejected, faults, label=source.label, where=str(settings.target))


def _allowed(node: Placed, allowed: Sequence[str]) -> bool:
    return node.op in allowed or f"{node.domain}:{node.op}" in allowed


def _observer(
    request: Request, settings: QnnSettings, source: ModelSource, opening: Opening
) -> Callable[[Mapping[str, Any], int], Observed]:
    def observer(feeds: Mapping[str, Any], runs: int) -> Observed:
        from xpuruntime.engines.qnn.observing import observe

        return observe(request, settings, source, opening, feeds, runs)

    return observer


_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ \[(?P<level>[A-Z]):[^\]]*\]\s*(?P<text>.*)$")
_FAILED = re.compile(
    r"Validation FAILED for \d+ nodes? in [^\n]*\n(?P<nodes>(?:\s+Operator type: [^\n]*\n)+)"
    r"\s+REASON : (?P<reason>[^\n]*)"
)
_NODE = re.compile(r"Operator type: (?P<op>.*?) Node name: (?P<name>.*?) Node index: \d+")
_UNSUPPORTED = re.compile(r"\{ name: (?P<name>.*?), type: (?P<op>.*?) \}")
_TAIL = re.compile(r"\.?[^\s.]+ node `[^`]*` will not be assigned to QNN EP\.?$")
#: Text that says nothing beyond that it failed, or that repeats another line.
_EMPTY = ("fallback to CPU EP has been explicitly disabled", "Unsupported nodes in QNN EP", "OrtEp::GetCapability()")
_SHAPE = "Cannot get shape"
_NAMED = 8


class RejectedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node that QNN does not take: its name in the source model, operator, and the reason."""

    name: str
    op: str
    reason: str


def plain_name(name: str) -> str:
    """Return a node's name without what a change of layout added to it."""
    return re.sub(r"(_token_\d+|/duplicated)+$", "", name)


def rejected_in_trace(text: str) -> list[RejectedNode]:
    """Return the nodes that ``qnn_op_trace.json`` lists as not supported; none when it is missing or cut off."""
    try:
        listed = json.loads(text).get("unsupported_nodes", [])
        nodes = [RejectedNode(name=n["node_name"], op=n["op_type"], reason=_clean(n.get("reason", ""))) for n in listed]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return _distinct(nodes)


def rejected_in_log(text: str) -> list[RejectedNode]:
    """Return the nodes that a verbose log says failed validation, with its reasons."""
    text = _COLOUR.sub("", text)
    nodes = [
        RejectedNode(name=node["name"], op=node["op"], reason=_clean(match["reason"]))
        for match in _FAILED.finditer(text)
        for node in _NODE.finditer(match["nodes"])
    ]
    seen = {node.name for node in nodes}
    for line in text.splitlines():
        if "Unsupported nodes in QNN EP" in line:
            nodes += [
                RejectedNode(name=node["name"], op=node["op"], reason="QNN gives no reason")
                for node in _UNSUPPORTED.finditer(line)
                if node["name"] not in seen
            ]
    return _distinct(nodes)


def faults_in_log(text: str) -> list[str]:
    """Return what a log says at level ERROR or FATAL, without repeats and without lines that name no cause."""
    faults = []
    for line in _COLOUR.sub("", text).splitlines():
        match = _STAMP.match(line)
        if match is None or match["level"] not in "EF":
            continue
        said = re.sub(r"^\S+\.cc:\d+ \S+\s+", "", match["text"]).strip()
        if said and not any(empty in said for empty in _EMPTY):
            faults.append(said)
    return list(dict.fromkeys(faults))


def refusal(
    rejected: Sequence[RejectedNode], faults: Sequence[str], *, label: str, where: str, composing: bool = False
) -> XpuRuntimeError:
    """Return the error of a model that QNN does not take as a whole."""
    if not rejected:
        said = "; ".join(faults) or "QNN gave no reason, not even in its verbose log"
        msg = f"QNN does not load {label} for {where}: {said}. Run `xrt doctor`, and check the options of the policy"
        return EngineFailed(msg, engine="qnn", device="npu")
    named = "; ".join(f"{node.name} ({node.op}): {node.reason}" for node in rejected[:_NAMED])
    rest = f"; and {len(rejected) - _NAMED} more" if len(rejected) > _NAMED else ""
    ops = ", ".join(sorted({node.op for node in rejected}))
    fixes = [f"To let them run on the CPU, state execution.allow_cpu_ops: [{ops}]"]
    if composing:
        fixes = [
            "QNN accepts them one by one and fails to build its graph, so execution.allow_cpu_ops cannot leave them "
            f"to the CPU. Replace them in the model (operators {ops}), or run it on another engine"
        ]
    if any(node.reason == _SHAPE for node in rejected):
        fixes.insert(
            0,
            "QNN needs every shape beforehand: state execution.shapes for the inputs, and export the model without "
            "operators whose result has a shape that depends on values",
        )
    msg = f"{len(rejected)} node(s) of {label} do not run on QNN for {where}: {named}{rest}. {'. '.join(fixes)}"
    return UnsupportedOperationError(msg, engine="qnn", device="npu")


def _clean(reason: str) -> str:
    return _TAIL.sub("", reason.strip()).rstrip(".") or "QNN gives no reason"


def _distinct(nodes: Sequence[RejectedNode]) -> list[RejectedNode]:
    """Keep one entry a node: QNN looks at the graph twice, the second time in another layout."""
    kept: dict[str, RejectedNode] = {}
    for node in nodes:
        kept.setdefault(plain_name(node.name), msgspec.structs.replace(node, name=plain_name(node.name)))
    return list(kept.values())


_MODEL = "model.onnx"


def compile_model(request: Request, settings: QnnSettings, folder: Path) -> Compiled:
    """Write the compiled model into `folder`, in a process of its own: any chip may be named, whatever runs here.

    Raises
    ------
    XpuRuntimeError
        QNN does not take the model; the nodes and the reasons are named.
    """
    from xpuruntime.engines.qnn.observing import instrumented, read_records, units_of

    if settings.uncompilable is not None:
        fix = "load the model itself, or compile it without that"
        raise EngineError(settings.uncompilable, fix=fix, engine="qnn", device=request.device)
    log = ConversionLog()
    source = source_of(request, settings, log)
    opening = opening_of(settings, source)

    def compiled() -> Any:
        with ScratchFolder("qnn") as directory:
            worker = SessionWorker()
            try:
                worker.compile(
                    source.model, instrumented(opening, Path(directory), compiling=True), str(folder / _MODEL)
                )
            except WorkerFailed as error:
                worker.close()
                raise refused(error, source, opening, settings) from None
            finally:
                worker.close()
            return read_records(Path(directory))

    recorded = without_layer_fusions(compiled, source, opening, log)
    units, notes, _ = units_of(request, source, recorded, ())
    write_units(folder, units)
    others = sorted(path.name for path in folder.iterdir() if path.name != _MODEL)
    node_map = {unit.id: unit.source_nodes for unit in units if unit.source_nodes}
    return Compiled(files=(_MODEL, *others), node_map=node_map, notes=(*log.notes(), *notes))
