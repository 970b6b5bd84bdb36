# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Loading a model into OpenVINO: read, name, compile or import, verify, wrap."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.base import Compiled, LoadedModel, Observed, Request
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model.external import is_external, load, real_files
from xpuruntime.engines.model.graph import tensors
from xpuruntime.engines.model.shapes import with_shapes
from xpuruntime.engines.model_source import ModelSource, prepare_source
from xpuruntime.engines.openvino.execution_graph import flatten_softmax, name_operations
from xpuruntime.engines.openvino.options import OpenVinoSettings, read_back, word
from xpuruntime.engines.openvino.probing import process_core, translate
from xpuruntime.errors import EngineError, EngineUnavailable, ModelError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.runtime.interruptible_waits import kept_signal_stack

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo

#: The one file of a compiled artifact.
BLOB = "model.blob"
#: A protobuf message holds less than this.
_LARGEST = 2**31 - 1
_COUNTERS = {"PERF_COUNT": "YES"}


def load_model(request: Request, settings: OpenVinoSettings) -> LoadedModel:
    """Return the loaded model; leaves nothing behind when it fails."""
    from xpuruntime.engines.openvino.model import OpenVinoModel

    log = ConversionLog()
    opener = _Opener(request, settings, log)
    compiled = opener.open({})
    return OpenVinoModel(
        compiled,
        functools.partial(opener.open, {}),
        opener.info,
        device=request.device,
        strict=settings.strict,
        observer=_observer(request, settings, opener),
        log=log,
    )


def compile_model(request: Request, settings: OpenVinoSettings, folder: Path) -> Compiled:
    """Write the compiled model into `folder`."""
    log = ConversionLog()
    opener = _Opener(request, settings, log)
    compiled = opener.open({})
    try:
        data = compiled.export_model().getvalue()
    except Exception as error:
        raise translate(error, doing=f"exporting {request.model.path}", device=request.device) from None
    (folder / BLOB).write_bytes(data)
    node_map: dict[str, tuple[str, ...]] = {node.name: (node.name,) for node in opener.info.nodes}
    return Compiled(files=(BLOB,), node_map=node_map, notes=log.notes())


def prepared_graph(request: Request, settings: OpenVinoSettings) -> tuple[Any, ModelInfo]:
    """Return OpenVINO's graph of a model as a session compiles it, and the facts of the model with its sizes."""
    opener = _Opener(request, settings, ConversionLog())
    return opener.graph(), opener.info


class _Opener:
    """Opens a model again and again with the same settings: for running, and with instruments for the evidence."""

    def __init__(self, request: Request, settings: OpenVinoSettings, log: ConversionLog) -> None:
        self.request, self.settings, self.log = request, settings, log
        self.info: ModelInfo = with_shapes(request.model, request.policy)
        self._quantized: ModelSource | None = None
        self._told = False
        self._flattened = False
        #: What the copy that is counted has on top, where the session has several streams.
        self.one_stream: dict[str, str] = {}
        with kept_signal_stack():
            self.core = _core(request.device)
            _there(self.core, settings.device, request.device)

    def open(self, extra: Mapping[str, Any]) -> Any:
        with kept_signal_stack():  # a plugin can load another one
            return self._open(extra)

    def counted(self) -> tuple[Any, Any, list[str]]:
        """Compile the model with counters. Return the copy to count, one with all settings to read back, and notes."""
        # OpenVINO runs a request on any of its streams, and each counts for itself; so the copy that is counted has
        # one, with the threads that one of several has.
        compiled = self.open(_COUNTERS)
        streams = _whole(compiled, "NUM_STREAMS") if self.settings.device == "CPU" else 1
        if streams <= 1:
            return compiled, compiled, []
        threads = max(1, _whole(compiled, "INFERENCE_NUM_THREADS") // streams)
        self.one_stream = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads)}
        note = (
            f"the session has {streams} streams; the copy that was counted has one, with {threads} of their threads, "
            "because OpenVINO counts each stream for itself"
        )
        return self.open({**_COUNTERS, **self.one_stream}), compiled, [note]

    def idle(self) -> Any:
        """Compile a graph without operators, with the same settings as the copy that is counted."""
        import openvino as ov
        from openvino import opset8 as opset

        through = opset.parameter(ov.Shape([1]), ov.Type.f32)
        graph = ov.Model([opset.result(through)], [through], "idle")
        return self.core.compile_model(
            graph, self.settings.device, {**self._properties(), **_COUNTERS, **self.one_stream}
        )

    def _properties(self) -> dict[str, Any]:
        return {**self.settings.properties, "INFERENCE_PRECISION_HINT": self.settings.hint}

    def _open(self, extra: Mapping[str, Any]) -> Any:
        settings = self.settings
        properties: dict[str, Any] = {**self._properties(), **extra}
        artifact = self.request.artifact
        if artifact is not None:
            data = artifact.entry.read_bytes()
            doing = f"importing {artifact.entry}"
            try:
                compiled = self.core.import_model(data, settings.device, properties)
            except Exception as error:
                raise translate(error, doing=doing, device=self.request.device) from None
        else:
            graph = self.graph()
            try:
                compiled = self.core.compile_model(graph, settings.device, properties)
            except Exception as error:
                doing = f"compiling {self.request.model.path}"
                raise translate(error, doing=doing, device=self.request.device) from None
        self._verify(compiled, extra)
        return compiled

    def graph(self) -> Any:
        """Return OpenVINO's graph of the model, named after the source nodes and limited to the ranges stated."""
        path = self.request.model.path
        source = self._source()
        try:
            with contextlib.ExitStack() as kept:  # of a folder, where one is needed
                model = _with_data(source, self.info, lambda: kept.enter_context(ScratchFolder("openvino")))
                graph = self.core.read_model(model)
                del model
        except Exception as error:
            if isinstance(error, OSError):
                raise ModelError(f"{path} cannot be prepared for OpenVINO: {error}", engine="openvino") from None
            nodes = self.info.nodes
            raise translate(error, doing=f"reading {path}", device=self.request.device, nodes=nodes) from None
        self._note_flattened(flatten_softmax(graph, self.info))
        name_operations(graph, self.info.nodes)
        try:
            self._limit(graph)
        except Exception as error:
            doing = f"reshaping {path} to execution.shapes"
            raise translate(error, doing=doing, device=self.request.device) from None
        return graph

    def _note_flattened(self, nodes: list[str]) -> None:
        if nodes and not self._flattened:
            rest = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            reason = "opsets 11 and 12 normalize all axes from its own on, and OpenVINO reads it as of one axis"
            self.log.add(f"Softmax {nodes[0]!r}{rest}: computed on a matrix", reason, len(nodes))
        self._flattened = self._flattened or bool(nodes)

    def _source(self) -> ModelSource:
        """Return the prepared model; one that was quantized is kept, for that takes long."""
        settings = self.settings
        if not settings.quantize:
            log, self._told = (ConversionLog() if self._told else self.log), True
            return prepare_source(self.request, log)
        if self._quantized is None:
            self._quantized = prepare_source(self.request, self.log, qdq=settings.style, keep_fp32=settings.keep_fp32)
        return self._quantized

    def _limit(self, graph: Any) -> None:
        if not self.settings.ranges:
            return
        import openvino as ov

        shapes = {}
        for tensor in self.info.inputs:
            if tensor.name in self.settings.ranges and tensor.limits:
                sizes = [
                    ov.Dimension(size) if isinstance(size, int) else ov.Dimension(*limit) if limit else ov.Dimension()
                    for size, limit in zip(tensor.shape or (), tensor.limits, strict=True)
                ]
                shapes[tensor.name] = ov.PartialShape(sizes)
        if shapes:
            graph.reshape(shapes)

    def _verify(self, compiled: Any, extra: Mapping[str, Any]) -> None:
        settings, device = self.settings, self.request.device
        path = self.request.model.path
        hint = word(compiled.get_property("INFERENCE_PRECISION_HINT"))
        if hint != settings.hint:
            msg = (
                f"{path} on {device}: INFERENCE_PRECISION_HINT={settings.hint} was requested, and OpenVINO chose {hint}"
                f": this device does not compute in {settings.hint}. State a precision it has: "
                f"{', '.join(self.core.get_property(settings.device, 'OPTIMIZATION_CAPABILITIES'))}"
            )
            raise UnsupportedOperationError(msg, engine="openvino", device=device)
        ran = [str(word) for word in compiled.get_property("EXECUTION_DEVICES")]
        if not all(device.partition(".")[0] == settings.device.partition(".")[0] for device in ran):
            msg = (
                f"{path}: {settings.device} was asked for, and OpenVINO compiled the model for {', '.join(ran)}. "
                "Fix: state the device that it is to run on"
            )
            raise EngineError(msg, engine="openvino", device=device)
        for name, value in {**settings.properties, **extra}.items():
            got = read_back(compiled, name)
            if got is not None and got != value and (name, got) != ("PERFORMANCE_HINT", ""):
                self.log.add(f"OpenVINO took {name}={got}", f"{name}={value} was asked")


def _core(device: str) -> Any:
    try:
        return process_core()
    except Exception as error:  # a vendor package can fail in any way
        msg = f"OpenVINO cannot be used: {error}. Reinstall it: pip install --force-reinstall openvino "
        raise EngineUnavailable(msg, engine="openvino", device=device) from None


def _whole(compiled: Any, name: str) -> int:
    try:
        return int(str(compiled.get_property(name)))
    except (RuntimeError, ValueError):
        return 1


def _there(core: Any, word_: str, device: str) -> None:
    """Refuse a device that OpenVINO does not list: compiling for it fails with a message about something else."""
    kind, _, index = word_.partition(".")
    try:
        indices = [str(number) for number in core.get_property(kind, "AVAILABLE_DEVICES")]
    except RuntimeError as error:
        raise translate(error, doing=f"opening the {kind} plugin", device=device) from None
    if not indices or (index and index not in indices and (index, indices) != ("0", [""])):
        msg = f"{device} was not found: OpenVINO lists {indices or 'none'} for {kind}; run `xrt doctor`"
        raise EngineError(msg, engine="openvino", device=device)


def _with_data(source: ModelSource, info: ModelInfo, folder: Callable[[], str]) -> Any:
    """Return a model as OpenVINO reads it: a path, or bytes that hold their weights."""
    # OpenVINO looks external data up beside a file only, and follows no links out of that folder, so that bytes with
    # such data and files with such links are given their weights; where these are too large for that, the model is
    # written to the folder that `folder` makes.
    model, base = source.model, source.folder
    if isinstance(model, str):
        if model != info.file or not real_files([file.location for file in info.external_files], info.base_dir or "."):
            return model
        model, base = info.serialized_named(), info.base_dir
    if base is None:
        return model
    import onnx

    proto = onnx.load_from_string(model)
    if not any(map(is_external, tensors(proto))):
        return model
    load(tensors(proto), base, source.label)
    if proto.ByteSize() < _LARGEST:
        return proto.SerializeToString()
    path = Path(folder()) / "model.onnx"
    onnx.save_model(proto, str(path), save_as_external_data=True, location="model.weights", convert_attribute=True)
    return str(path)


def _observer(
    request: Request, settings: OpenVinoSettings, opener: _Opener
) -> Callable[[Mapping[str, Any], int], Observed]:
    def observer(feeds: Mapping[str, Any], runs: int) -> Observed:
        from xpuruntime.engines.base import Observed
        from xpuruntime.engines.openvino.observing import observe
        from xpuruntime.evidence.documents import LOADED, checkpoint

        try:
            counted, compiled, notes = opener.counted()
        except XpuRuntimeError as error:
            return Observed(partial=True, notes=(f"nothing was observed: the instrumented copy: {error}",))
        checkpoint(LOADED)
        observed = observe(
            counted,
            feeds,
            runs,
            opener.info,
            request=request,
            settings=settings,
            idle=opener.idle,
            compiled_model=compiled,
        )
        return msgspec.structs.replace(observed, notes=(*notes, *observed.notes))

    return observer
