# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The checks of `real_models.py` for one model on one engine, each against the raw engine or raw fp32 results.

``run``, ``bind``, ``run_async``, ``explain`` and ``compile`` are compared with the engine itself, used directly with
the same options. Of fp16 and int8 the probe input, which a session claims to be within tolerance, is compared with
fp32 of raw ONNX Runtime; other inputs give the drift. What the engine itself refuses has to be refused.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from real_model_table import Model, feeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

CHECKS = ("run", "bind", "run_async", "explain", "compile", "fp16", "int8")
ENGINES = ("onnxruntime", "openvino")
SAMPLES = 8


class Limits(NamedTuple):
    """How far a result may be off: `rtol` of the largest magnitude of its reference plus `atol`, and its cosine."""

    rtol: float
    atol: float
    cosine: float


#: Of results of the same engine with the same options, and of the precisions as docs/guides/accuracy.md states them.
SAME = Limits(1e-6, 0.0, 0.9999999)
LIMITS = {
    "fp32": Limits(1e-4, 1e-5, 0.99999),
    "fp16": Limits(1e-2, 1e-3, 0.999),
    "int8": Limits(0.15, 2e-2, 0.98),
}
#: ONNX operators that multiply integers.
_INTEGER = re.compile(r"Integer|^QLinear|^DynamicQuantize(MatMul|LSTM)|^MatMulNBits$")
#: OpenVINO's layers that multiply.
_PRODUCTS = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNSeq", "RNNCell")
_WORST = "worst of the other inputs"

Arrays = dict[str, "np.ndarray[Any, Any]"]


class CheckFailedError(Exception):
    """What the product did is not what was expected of it."""


class DeviationError(Exception):
    """What a report states that did not run as asked."""


class Different(NamedTuple):
    """One output that is out of its limits, or nothing; `rel` is the largest difference over the largest magnitude."""

    reason: str
    rel: float


def compare(expected: Arrays, found: Arrays, limits: Limits) -> Different:
    """Compare outputs by name, in float64; integers, booleans and strings may differ in the share `rtol`."""
    import numpy as np

    if list(expected) != list(found):
        return Different(f"the outputs are {list(found)}, not {list(expected)}", math.inf)
    worst = 0.0
    for name, right in expected.items():
        value = np.asarray(found[name])
        if value.shape != right.shape or value.dtype != right.dtype:
            return Different(f"{name} is {value.dtype}{value.shape}, not {right.dtype}{right.shape}", math.inf)
        if right.dtype.kind not in "fc":
            share = float(np.mean(value != right)) if right.size else 0.0
            worst = max(worst, share)
            if share > limits.rtol:
                return Different(f"{name}: {share:.1%} of the elements differ", share)
            continue
        a, b = right.astype(np.float64).ravel(), value.astype(np.float64).ravel()
        finite = np.isfinite(a)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
            return Different(f"{name}: other elements are NaN or infinite", math.inf)
        a, b = a[finite], b[finite]
        if not a.size:
            continue
        off, scale = float(np.abs(a - b).max()), float(np.abs(a).max())
        norm = float(np.linalg.norm(a) * np.linalg.norm(b))
        cosine = float(a @ b / norm) if norm else 1.0 if off <= limits.atol else 0.0
        worst = max(worst, off / scale if scale else off)
        if off > limits.atol + limits.rtol * scale or cosine < limits.cosine:
            return Different(f"{name}: off by {off:.3g} of {scale:.3g}, cosine {cosine:.6f}", worst)
    return Different("", worst)


def raw(engine: str, path: Path) -> Callable[[Arrays], Arrays]:
    """Open a model on an engine as the engine's own documentation does, with one thread and in fp32."""
    if engine == "onnxruntime":
        session = _raw_session(path)
        names = [each.name for each in session.get_outputs()]
        return lambda values: dict(zip(names, session.run(None, values), strict=True))
    import openvino as ov

    core = ov.Core()
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    compiled = core.compile_model(core.read_model(path), "CPU", options)
    read = {name for port in compiled.inputs for name in port.names}

    def infer(values: Arrays) -> Arrays:
        result = compiled({name: value for name, value in values.items() if name in read})
        return {_name(port, path): result[port].copy() for port in compiled.outputs}

    return infer


def _raw_session(path: Path, profile: str | None = None) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)


def _name(port: Any, path: Path) -> str:
    import onnx

    declared = [each.name for each in onnx.load(str(path), load_external_data=False).graph.output]
    return next(name for name in declared if name in port.names)


class ModelChecks:
    """One model on one engine; each check is a method that returns a sentence, and raises where it fails."""

    def __init__(self, model: Model, path: Path, engine: str) -> None:
        import xpuruntime as xrt

        self.xrt, self.model, self.path, self.engine = xrt, model, path, engine
        self.feeds = list(feeds(model, SAMPLES + 3))
        self.samples, self.others = self.feeds[:SAMPLES], self.feeds[SAMPLES:]
        self.reference = [raw("onnxruntime", path)(each) for each in (self.samples[0], *self.others)]
        self.right: list[Arrays] = []
        self.engine_error = ""
        try:
            infer = raw(engine, path)
            self.right = [infer(each) for each in self.others]
        except Exception as error:  # whatever the engine raises is its refusal
            self.engine_error = f"{type(error).__name__}: {error}"
        self._session: Any = None

    def close(self) -> None:
        """Close the session that the checks share."""
        if self._session is not None:
            self._session.close()

    def policy(self, precision: str = "", mode: str = "strict") -> dict[str, Any]:
        """Return the policy of a check."""
        precision = precision or self.model.precision
        execution = {"engine": self.engine, "device": "cpu", "precision": precision, "threads": 1}
        return {"mode": mode, "execution": execution}

    @property
    def quantized(self) -> bool:
        """Whether the model rounds its numbers to integers, and so, after a conversion, to the next ones."""
        from xpuruntime.engines.model import inspect_model

        return str(inspect_model(self.path).quantization.scheme) not in ("", "none", "None")

    @property
    def session(self) -> Any:
        """The fp32 session, opened at its first use."""
        if self._session is None:
            self._session = self.xrt.InferenceSession(self.path, policy=self.policy())
        return self._session

    def _equal(self, found: Arrays, index: int, doing: str) -> None:
        if self.engine_error:  # a session may avoid what the engine refuses, and is then compared as another engine is
            different = compare(self.reference[1 + index], found, LIMITS["fp32"])
            if different.reason:
                raise CheckFailedError(f"{doing}: raw {self.engine} refuses it, and the result is {different.reason}")
            return
        different = compare(self.right[index], found, SAME)
        if different.reason:
            raise CheckFailedError(f"{doing}: not what raw {self.engine} returns: {different.reason}")

    def run(self) -> str:
        """Run three inputs twice."""
        kept = [{name: value.copy() for name, value in each.items()} for each in self.others]
        found = [(index, self.session.run(self.others[index])) for index in (0, 1, 2, 0, 1, 2)]
        for index, result in found:
            self._equal(result, index, f"run of input {index}")
        self._unchanged(kept)
        if self.engine_error:
            return f"raw {self.engine} refuses it, and the session agrees with raw ONNX Runtime"
        drift = max((compare(a, b, LIMITS["fp32"]) for a, b in zip(self.reference[1:], self.right, strict=True)))
        return f"raw engines differ: {drift.reason}" if drift.reason else ""

    def _unchanged(self, kept: list[Arrays]) -> None:
        import numpy as np

        for before, now in zip(kept, self.others, strict=True):
            if any(not np.array_equal(before[name], now[name]) for name in before):
                raise CheckFailedError("an input of the caller was overwritten")

    def bind(self) -> str:
        """Bind the caller's arrays, run, write other values into them, run again."""
        import numpy as np

        own = {name: value.copy() for name, value in self.others[0].items()}
        binding = self.session.bind(own)
        binding.run()
        self._equal({name: np.array(value) for name, value in binding.outputs.items()}, 0, "the first bound run")
        for name, value in self.others[1].items():
            np.asarray(binding.inputs[name])[...] = value
        binding.run()
        self._equal({name: np.array(value) for name, value in binding.outputs.items()}, 1, "the second bound run")
        self._equal(self.session.run(self.others[2]), 2, "run after bind")
        return ""

    def run_async(self) -> str:
        """Start nine runs at once."""
        order = [0, 1, 2] * 3
        futures = [self.session.run_async(self.others[index]) for index in order]
        for index, future in zip(order, futures, strict=True):
            self._equal(future.result(120), index, f"run_async of input {index}")
        return ""

    def explain(self) -> str:
        """Explain one input: each node once, none that ran called folded, integers not called fp32."""
        report = self.session.explain(self.others[0], runs=2)
        self._equal(self.session.run(self.others[0]), 0, "run after explain")
        units = [(name, unit) for unit in report.units for name in unit.source_nodes]
        if sorted(name for name, _ in units) != sorted(node.name for node in self.session.model.nodes):
            raise CheckFailedError("explain: not every node of the model is in exactly one unit")
        folded = {name for name, unit in units if unit.relation == "folded"}
        ran, multiplied = self._ran()
        if wrong := sorted(folded & ran):
            raise CheckFailedError(f"explain: {len(wrong)} nodes that ran are called folded, such as '{wrong[0]}'")
        if multiplied and report.honoured and self.model.precision == "fp32":
            raise CheckFailedError(f"explain: fp32 is called honoured, and {multiplied} nodes multiply integers")
        if not str(report).strip() or not json.loads(report.to_json())["units"]:
            raise CheckFailedError("explain: the report is empty")
        if not report.honoured:
            raise DeviationError(
                "; ".join(f"{deviation.key}: {deviation.reason}" for deviation in report.deviations) or report.headline
            )
        return ""

    def _ran(self) -> tuple[set[str], int]:
        """Return names of nodes that the raw engine executes under the model's own names, and how many in integers.

        Nothing where the raw engine refuses the model.
        """
        if self.engine_error:
            return set(), 0
        import onnx

        names = [node.name for node in _nodes(onnx.load(str(self.path)).graph)]
        unique = {name for name in names if name and names.count(name) == 1}
        if self.engine == "openvino":
            return self._ran_openvino(unique)
        with tempfile.TemporaryDirectory() as folder:
            session = _raw_session(self.path, str(Path(folder) / "raw"))
            session.run(None, self.others[0])
            events = json.loads(Path(session.end_profiling()).read_text())
        nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
        integers = sum(bool(_INTEGER.search(e["args"]["op_name"])) for e in nodes)
        return {e["name"].removesuffix("_kernel_time") for e in nodes} & unique, integers

    def _ran_openvino(self, unique: set[str]) -> tuple[set[str], int]:
        import openvino as ov

        core = ov.Core()
        options = {"INFERENCE_PRECISION_HINT": "f32", "PERF_COUNT": True}
        compiled = core.compile_model(core.read_model(self.path), "CPU", options)
        request = compiled.create_infer_request()
        read = {name for port in compiled.inputs for name in port.names}
        request.infer({name: value for name, value in self.others[0].items() if name in read})
        status = ov.ProfilingInfo.Status.EXECUTED
        layers = [one.get_rt_info() for one in compiled.get_runtime_model().get_ops()]
        kernels = [
            layer["primitiveType"].astype(str) for layer in layers if layer["layerType"].astype(str) in _PRODUCTS
        ]
        ran = {one.node_name for one in request.get_profiling_info() if one.status == status}
        return ran & unique, sum(kernel.endswith(("_I8", "_U8")) for kernel in kernels)

    def compile(self) -> str:
        """Compile into a folder, load that, run."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "model.xrt"
            self.xrt.compile_model(self.path, target, policy=self.policy())
            with self.xrt.InferenceSession(target) as session:
                for index in (0, 1):
                    self._equal(session.run(self.others[index]), index, f"run of the artifact on input {index}")
        return ""

    def fp16(self) -> str:
        """Convert to fp16."""
        return self._reduced("fp16")

    def int8(self) -> str:
        """Quantize with eight samples."""
        return self._reduced("int8")

    def _reduced(self, precision: str) -> str:
        policy = self.policy(precision, mode="prefer")
        limits = LIMITS["int8" if self.quantized else precision]
        with self.xrt.InferenceSession(self.path, policy=policy, calibration=self.samples) as session:
            probe = compare(self.reference[0], session.run(self.samples[0]), limits)
            others = [
                compare(right, session.run(each), limits)
                for right, each in zip(self.reference[1:], self.others, strict=True)
            ]
            report = session.explain(self.samples[0], runs=1)
            again = compare(self.reference[0], session.run(self.samples[0]), limits)
        if probe.reason or again.reason:
            raise CheckFailedError(f"the session opened, and its probe input is out of tolerance: {probe.reason}")
        ran = {unit.precision_run for unit in report.units if unit.time is not None and unit.precision_run}
        wanted = {"fp16": ("fp16",), "int8": ("int8", "uint8")}[precision]
        reduced = any(word in wanted for each in ran for word in each.split("->"))
        precision_row = next(row for row in report.observations if row.key == "execution.precision")
        if precision_row.status == "honoured" and not reduced:
            raise CheckFailedError(f"{precision} is called honoured, and no unit computed in it: {sorted(ran)}")
        worst = max(others, key=lambda other: (bool(other.reason), other.rel))
        said = f"{precision_row.status}, probe {probe.rel:.1e}, {_WORST} {worst.rel:.1e}"
        return said + (f", out of tolerance: {worst.reason}" if worst.reason else "")


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def check(
    model: Model, path: Path, engine: str, wanted: tuple[str, ...], tell: Callable[[dict[str, Any]], None]
) -> None:
    """Run checks and tell of each, before it begins (``{"begins": check}``) and what came of it."""
    import xpuruntime as xrt

    tell({"begins": "raw engine"})
    checks = ModelChecks(model, path, engine)
    for name in wanted:
        tell({"begins": name})
        row: dict[str, Any] = {"check": name, "result": "ok", "detail": ""}
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                row["detail"] = getattr(checks, name)()
            except CheckFailedError as error:
                row |= {"result": "wrong", "detail": str(error)}
            except DeviationError as error:
                row |= {"result": "deviates", "detail": str(error)}
            except xrt.XpuRuntimeError as error:
                row |= {"result": "refused", "detail": str(error), "error": type(error).__name__}
            except Exception as error:  # a bare error is a finding, not the end of the other checks
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
                row |= {"result": "error", "detail": text}
        foreign = [str(one.message) for one in caught if not isinstance(one.message, xrt.XpuRuntimeWarning)]
        if foreign and row["result"] == "ok":
            row |= {"result": "error", "detail": f"a warning of no xpuruntime class: {foreign[0]}"}
        row |= {"seconds": round(time.perf_counter() - start, 2), "raw": checks.engine_error}
        tell(row)
    checks.close()
