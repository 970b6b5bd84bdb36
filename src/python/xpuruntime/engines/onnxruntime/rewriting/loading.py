# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rewriting while a session is loaded: rewrite, measure what is free, compare the result with the original."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model.graph import graphs
from xpuruntime.engines.model_source import ModelSource
from xpuruntime.engines.onnxruntime._private_api import raw_session
from xpuruntime.engines.onnxruntime.opening import open_session, translate
from xpuruntime.engines.onnxruntime.rewriting.graph import Scope, number, rewrite, scopes
from xpuruntime.engines.onnxruntime.rewriting.graph_edit import Rewriting, begin
from xpuruntime.engines.onnxruntime.rewriting.rules import Rewrite, session_rules
from xpuruntime.errors import AccuracyError, InputError, XpuRuntimeError
from xpuruntime.measuring.rounds import KernelTiming, Replacement, choose, timed
from xpuruntime.measuring.tuning_watch import TuningStep
from xpuruntime.ops import tuned_records
from xpuruntime.printable import error_line

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings
    from xpuruntime.evidence.tolerances import ProbeResult, Tolerance
    from xpuruntime.policies import TuningPolicy


def rewritten(request: Request, settings: OnnxRuntimeSettings, source: ModelSource, log: ConversionLog) -> Rewriting:
    """Return the model with xpuruntime operators as the plan says."""
    rewriting = begin(request, settings, source, log)
    if settings.tune and rewriting.matches.free:
        _tune(rewriting, request, settings, log)
    if not rewriting.rewrites:
        rewriting.release()
    return rewriting


def _tune(rewriting: Rewriting, request: Request, settings: OnnxRuntimeSettings, log: ConversionLog) -> None:
    """Rewrite also what is faster as an xpuruntime operator where the policy leaves the choice."""
    copy = settings.public()
    rules = session_rules(rewriting.policy.replace(rules=(), **_NO_KERNELS), (), strict=False)

    def open_part(model: bytes) -> Callable[[], Any]:
        from xpuruntime import _core

        source = ModelSource(model, rewriting.folder, rewriting.before.label, operators=str(_core.__file__))
        return _runner(open_session(copy, source, request.device).session, request)

    times = measure_free(
        rewriting.model, rewriting.matches.free, rules.key, open_part, deterministic=settings.deterministic,
        rule=request.policy.kernels.tuning, place=_place(copy, request), versions={"onnxruntime": _ort_version()},
    )  # fmt: skip
    for time_ in times:
        log.add(
            f"{time_.rewrite.node!r} was measured as ONNX Runtime has it and as xpuruntime.{time_.rewrite.op}",
            str(time_),
        )
    rewriting.timed = tuple(times)
    rewriting.use([*rewriting.matches.rewrites, *(time_.rewrite for time_ in times if time_.wins)])


def _place(settings: OnnxRuntimeSettings, request: Request) -> str:
    from xpuruntime.runtime.device import Device

    kind = request.device.partition(":")[0]
    device = Device(request.device) if kind == "cuda" else Device("cpu")
    cores = "" if device.cores is None else f" x{device.cores}"
    options = sorted({**settings.options, **settings.session}.items())
    facts = (settings.provider, options, settings.level, settings.threads)
    return f"{kind};{device.name}{cores};{facts}"


def _ort_version() -> str:
    import onnxruntime as ort

    return str(ort.__version__)


_NO_KERNELS = dict.fromkeys(("matmul", "attention", "layer_norm", "rms_norm", "conv"))


def _runner(session: Any, request: Request) -> Callable[[], Any]:
    """Return what runs a session once on inputs that lie on its device, and waits."""
    import numpy as np
    import onnxruntime as ort

    random = np.random.default_rng(0)
    binding = session.io_binding()
    kind, _, index = request.device.partition(":")
    location = (kind, int(index or 0))
    for input_ in session.get_inputs():
        word = input_.type.removeprefix("tensor(").removesuffix(")")
        dtype = {"float": "float32", "double": "float64", "bool": "bool", "float16": "float16"}.get(word, word)
        values = random.standard_normal([int(d) for d in input_.shape])
        binding.bind_ortvalue_input(input_.name, _value(ort, values, dtype, location))
    for output in session.get_outputs():
        binding.bind_output(output.name, *location)

    def run() -> None:
        try:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
        except Exception as error:
            raise translate(error, doing="measuring one operation", device=request.device) from None

    return run


def _value(ort: Any, values: Any, dtype: str, location: tuple[str, int]) -> Any:
    import numpy as np

    if dtype == "bfloat16":  # NumPy has none: the upper half of an fp32
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, 16)
    array = values > 0 if dtype == "bool" else values.astype(dtype)
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), *location)


def check(
    rewriting: Rewriting, request: Request, settings: OnnxRuntimeSettings, session: Any, log: ConversionLog
) -> None:
    """Hold a rewritten session against one without rewrites; see `check_rewriting`."""
    if not rewriting.rewrites:
        return
    copy = settings.public()

    def open_plain(source: ModelSource) -> Any:
        return open_session(copy, source, request.device).session

    def run(candidate: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
        import onnxruntime as ort

        options = ort.RunOptions()
        if candidate is session and settings.options.get("enable_cuda_graph") == "1":
            options.add_run_config_entry("gpu_graph_id", "-1")  # capture none
        names = [output.name for output in candidate.get_outputs()]
        try:
            return dict(zip(names, raw_session(candidate).run(names, dict(feeds), options), strict=True))
        except Exception as error:
            doing = f"holding the rewritten graph of {request.model.path} against the original"
            raise translate(error, doing=doing, device=request.device) from None

    check_rewriting(rewriting, request, open_plain, run, session, log)
    rewriting.release()


_COMPARED = "the rewritten graph was compared with the original on a probe input"
_NOT_COMPARED = "the rewritten graph was not compared with the original"


def check_rewriting(
    rewriting: Rewriting,
    request: Request,
    open_plain: Callable[[ModelSource], Any],
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    session: Any,
    log: ConversionLog,
) -> None:
    """Run the rewritten session and one without rewrites on the same probe input."""
    from xpuruntime.engines.model.shapes import with_shapes
    from xpuruntime.engines.precision import probe_feeds
    from xpuruntime.evidence.tolerances import compare_within

    info = with_shapes(request.model, request.policy)
    try:
        feeds = probe_feeds(info)
    except InputError as error:
        log.add(_NOT_COMPARED, error.reason)
        return
    narrow = [t.name for t in (*info.inputs, *info.outputs) if t.dtype == "bfloat16"]
    if narrow:
        log.add(_NOT_COMPARED, f"{narrow[0]!r} is bfloat16, which NumPy has not")
        return
    tolerance = _tolerance(rewriting)
    plain = open_plain(rewriting.before)
    try:
        expected = run(plain, feeds)
    except XpuRuntimeError as error:  # inputs that are generated may be none that a model takes
        log.add(_NOT_COMPARED, f"it refuses the probe input: {error.reason}")
        return
    result = compare_within(expected, run(session, feeds), tolerance, request.model.random_outputs)
    if result.passed:
        log.add(_NOT_COMPARED if result.inconclusive else _COMPARED, result.inconclusive or str(result))
        return
    where = _first_difference(rewriting, open_plain, run, feeds, tolerance)
    msg = (
        f"{request.model.path} on {request.device}: with xpuruntime kernels its results differ from ONNX Runtime's own "
        f"on a probe input. {where}. Of the model's outputs, {_failing(result)}. Ask for another kernel for this node, "
        "or remove the kernel key"
    )
    raise AccuracyError(msg, engine="onnxruntime", device=request.device)


def _tolerance(rewriting: Rewriting) -> Tolerance:
    from xpuruntime.engines.onnxruntime.rewriting.graph import DTYPES
    from xpuruntime.evidence.tolerances import TOLERANCES

    held = {DTYPES.get(tensor.data_type) for graph in graphs(rewriting.model) for tensor in graph.initializer}
    held |= {DTYPES.get(v.type.tensor_type.elem_type) for v in rewriting.model.graph.input}
    words: list[str] = [word for word in ("bf16", "fp16") if word in held]
    if not words and any(rewrite.attributes.get("allow_tf32") for rewrite in rewriting.rewrites):
        words = ["tf32"]
    return TOLERANCES[words[0] if words else "fp32"]


def _failing(result: ProbeResult) -> str:
    worst = next(output for output in result.outputs if not output.passed)
    return f"{worst.name!r} is out of tolerance: {worst.reason}"


def _first_difference(
    rewriting: Rewriting,
    open_plain: Callable[[ModelSource], Any],
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    feeds: Mapping[str, Any],
    tolerance: Tolerance,
) -> str:
    from xpuruntime.evidence.tolerances import compare_within

    tapped = {rewrite.output: rewrite.node for rewrite in rewriting.rewrites if rewrite.graph == ""}
    order = [name for node in rewriting.model.graph.node for name in node.output if name in tapped]
    try:
        expected = run(open_plain(rewriting.sourced(rewriting.model, order)), feeds)
        got = run(open_plain(rewriting.written(rewriting.rewrites, order)), feeds)
    except XpuRuntimeError as error:
        return f"Which node it is could not be found: {error.reason}"
    for name in order:
        wanted = {name: expected[name]}
        result = compare_within(wanted, {name: got[name]}, tolerance)
        if not result.passed:
            return f"The first node that differs is {tapped[name]!r} ({_failing(result)})"
    return "No single rewritten node differs by more than the tolerance: the differences add up"


#: Id of ONNX Runtime's own kernel in records.
STOCK = "onnxruntime"
_BLOCK = 0.005
_ENDED = "the tuning was cancelled, or its time is used up"
#: Its library, which is loaded when it is imported.
_LIBRARIES = ("onnxruntime_pybind11_state*",)


class Timed(NamedTuple):
    """One node and what was measured of its operation, or why nothing was."""

    rewrite: Rewrite
    replacement: Replacement | None = None
    reason: str = ""

    @property
    def stock(self) -> float:
        """Microseconds of ONNX Runtime's own kernel."""
        return self._of(STOCK).microseconds

    @property
    def xpuruntime(self) -> float:
        """Microseconds of the xpuruntime operator."""
        return self._of(f"xpuruntime.{self.rewrite.op}").microseconds

    @property
    def wins(self) -> bool:
        """Whether the xpuruntime operator is decided to be faster by more than the margin."""
        return self.replacement is not None and self.replacement.chosen.kernel != STOCK

    def _of(self, kernel: str) -> KernelTiming:
        assert self.replacement is not None
        return next(candidate for candidate in self.replacement.candidates if candidate.kernel == kernel)

    def __str__(self) -> str:
        """Return what was measured in one line."""
        if self.replacement is None:
            return f"not measured: {self.reason}"
        own = self._of(f"xpuruntime.{self.rewrite.op}")
        verdict = "the xpuruntime operator is used" if self.wins else "ONNX Runtime's own stays"
        if self.replacement.undecided:
            verdict += f", as it is not decided after {self.replacement.rounds} rounds"
        return (
            f"{self.stock:.1f} us by ONNX Runtime, {self.xpuruntime:.1f} us by xpuruntime, {own.ratio:.3f} times as "
            f"long [{own.low:.3f}, {own.high:.3f}]: {verdict}"
        )


def measure_free(
    model: onnx.ModelProto,
    free: Sequence[Rewrite],
    rules: str,
    open_session: Callable[[bytes], Any],
    *,
    deterministic: bool,
    rule: TuningPolicy,
    place: str,
    versions: dict[str, str],
) -> list[Timed]:
    """Measure each distinct operation of `free` alone: as the model has it, and as an xpuruntime operator."""
    by_path = {scope.path: scope for scope in scopes(model)}
    known: dict[bytes, Timed] = {}
    timings: list[Timed] = []
    for free_rewrite in free:
        part = _part(model, by_path[free_rewrite.graph], free_rewrite)
        if isinstance(part, str):
            timings.append(Timed(free_rewrite, reason=part))
            continue
        key = _identity(part)
        if key not in known:
            digest = hashlib.sha256(key).hexdigest()
            text = f"onnxruntime;{free_rewrite.op};{digest};{place};deterministic={deterministic}"
            text += tuned_records.rule_suffix(rule)
            held_by = tuned_records.validators(free_rewrite.kind, place.partition(";")[0], versions, _LIBRARIES)
            kept = tuned_records.recall(text, held_by, rule)
            if kept is not None:
                known[key] = Timed(free_rewrite, kept)
            else:
                measured = _measure(part, free_rewrite, rules, open_session, rule, deterministic=deterministic)
                if measured.replacement is not None:
                    tuned_records.keep(text, held_by, measured.replacement)
                known[key] = measured
        timings.append(known[key]._replace(rewrite=free_rewrite))
    return timings


def _measure(
    part: onnx.ModelProto,
    free_rewrite: Rewrite,
    rules: str,
    open_session: Callable[[bytes], Any],
    rule: TuningPolicy,
    *,
    deterministic: bool,
) -> Timed:
    from xpuruntime.engines.onnxruntime.rewriting.rules import Rewrite as Record

    alone = Record(
        **{name: getattr(free_rewrite, name) for name in free_rewrite.__struct_fields__ if name != "graph"}, graph=""
    )
    edited = rewrite(part, [alone], rules, deterministic=deterministic)
    step = TuningStep("onnxruntime", f"{free_rewrite.op} at {free_rewrite.node!r}")
    if step(2, 0, 0, 0.0):
        return Timed(free_rewrite, reason=_ENDED)
    try:
        runs = {STOCK: open_session(part.SerializeToString())}
        runs[f"xpuruntime.{free_rewrite.op}"] = open_session(edited.SerializeToString())
        for run in runs.values():
            run()
    except XpuRuntimeError as error:
        return Timed(free_rewrite, reason=error_line(error))
    choice = choose(
        {name: timed(run) for name, run in runs.items()}, control=STOCK, rule=rule, block=_BLOCK, step=step,
    )  # fmt: skip
    return Timed(free_rewrite, reason=_ENDED) if choice.cancelled else Timed(free_rewrite, choice)


def _part(model: onnx.ModelProto, scope: Scope, free_rewrite: Rewrite) -> onnx.ModelProto | str:
    import onnx

    names = set(free_rewrite.nodes)
    nodes = [node for node in scope.graph.node if node.name in names]
    produced = {name for node in nodes for name in node.output}
    reads = list(dict.fromkeys(n for node in nodes for n in node.input if n and n not in produced))
    reads += [t.source for t in free_rewrite.before if t.source not in produced and t.source not in reads]
    inputs, constants = [], []
    for name in reads:
        tensor = scope.constant(name)
        if tensor is not None and tensor.data_location != 1:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = name
            constants.append(copy)
            continue
        shape = scope.shape(name)
        sizes = None if shape is None else [number(dim) for dim in shape]
        if sizes is None or None in sizes or not scope.type(name):
            return f"the sizes of {name!r} are not known before it runs; state execution.shapes to fix them"
        inputs.append(onnx.helper.make_tensor_value_info(name, scope.type(name), [int(s or 0) for s in sizes]))
    output = onnx.helper.make_tensor_value_info(
        free_rewrite.output, scope.type(free_rewrite.output) or scope.type(free_rewrite.inputs[0]), None
    )
    graph = onnx.helper.make_graph(nodes, "part", inputs, [output], constants)
    part = onnx.helper.make_model(graph, opset_imports=list(model.opset_import))
    part.ir_version = max(4, model.ir_version)
    return part


def _identity(part: onnx.ModelProto) -> bytes:
    """Return what two operations share that take the same time: everything but names and values."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(part)
    graph = copy.graph
    renamed: dict[str, str] = {}

    def short(name: str) -> str:
        return renamed.setdefault(name, f"t{len(renamed)}") if name else ""

    for node in graph.node:
        node.name = ""
        node.doc_string = ""
        for field in (node.input, node.output):
            for index, name in enumerate(field):
                field[index] = short(name)
    for value in (*graph.input, *graph.output):
        value.name = short(value.name)
    for tensor in graph.initializer:
        tensor.name = short(tensor.name)
        if sum(len(getattr(tensor, f)) for f in ("raw_data", "float_data", "double_data", "int32_data")) > 64:
            for field_name in ("raw_data", "float_data", "double_data", "int32_data"):
                tensor.ClearField(field_name)
    return bytes(copy.SerializeToString(deterministic=True))
