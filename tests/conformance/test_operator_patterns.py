# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operator patterns by engine and precision: right within a tolerance, or refused for a reason that is listed.

The reference is ONNX Runtime itself, in fp32 and with its optimizers off. All patterns of a cell's engine and precision
run in one process, which is started again after a crash.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import pattern_cells
import pytest
from operator_patterns import PATTERNS, QUANTIZED, inputs_of, write

#: The largest difference from the reference, as a share of its largest magnitude. fp32: sums of up to 108 products, in
#: another order, each of which rounds with 2^-24. fp16 rounds with 2^-11 and bf16 with 2^-9 at each of up to eight
#: nodes. int8: inputs and results of a product have 256 steps over their range and weights 128 or 256, half a step of
#: which is up to 0.4 percent; up to six quantized values follow each other.
TOLERANCES = {"fp32": 1e-5, "fp16": 8 * 2.0**-11, "bf16": 8 * 2.0**-9, "int8": 0.05}
#: Engine, precision and pattern with a larger one: a Tanh between two products is coarser than fp16 on HTP.
LOOSE = {("qnn", "fp16", "shared_weight"): 0.01}
#: A report of QNN starts its simulator once more, for half a second: these patterns have one, every other pattern runs
#: without. `make test-patterns` makes all reports.
EVERY = 1 if os.environ.get("XPURUNTIME_ALL_PATTERNS") else 8
#: On the engines beside ONNX Runtime `make test` runs a third of the patterns, and those of the lists below.
OTHERS = 1 if EVERY == 1 else 3
#: Engine to patterns with a row of its known errors: large integers, a square that may be of -0.0.
KNOWN = {"qnn": ("integers", "layer_norm_written_out")}
CELLS = [
    ("onnxruntime", "fp32"), ("onnxruntime", "fp16"), ("onnxruntime", "bf16"), ("onnxruntime", "int8"),
    ("openvino", "fp32"), ("openvino", "fp16"), ("openvino", "bf16"), ("openvino", "int8"),
    ("qnn", "fp16"), ("qnn", "int8"),
]  # fmt: skip
PACKAGES = {"openvino": "openvino", "qnn": "onnxruntime_qnn"}


class Refusal(NamedTuple):
    """A reason for which patterns are refused. `here`: whether the processor decides it."""

    engines: tuple[str, ...]
    precisions: tuple[str, ...]
    patterns: tuple[str, ...]
    reason: str
    here: bool = False


ALL = tuple(PATTERNS)
#: What ONNX Runtime's optimizers make one operator of.
FUSED = ("layer_norm_written_out",)
#: Without a product whose weights are constants: int8 quantizes nothing.
FLOATS_ONLY = (
    "einsum", "max_pool_ceil", "average_pool", "resize", "pad_reflect", "depth_to_space", "layer_norm",
    "layer_norm_written_out", "rms_norm_written_out", "instance_norm", "group_norm_written_out", "prelu", "softmax",
    "softmax_opset_11", "log_softmax", "lstm", "gru", "split", "reshape_by_shape", "scatter", "reduce_sum_axes",
    "top_k", "where_mask", "cumulative_sum", "integers",
)  # fmt: skip
#: As `FLOATS_ONLY`, for QNN's form of int8, which has more operators in 8 bits.
QNN_UNQUANTIZED = ("max_pool_ceil", "average_pool", "resize", "reshape_by_shape", "top_k")
REFUSALS = [
    Refusal(("onnxruntime",), ("bf16",), ALL, "the CPU provider has no bfloat16 kernels"),
    Refusal(("onnxruntime", "openvino"), ("int8",), FLOATS_ONLY, "nothing in it can be quantized"),
    Refusal(("onnxruntime",), ("int8",), ("conv_transposed",), "no integer kernel for 1 ConvTranspose"),
    Refusal(("openvino",), ("fp16",), ALL, "this processor has no fp16 arithmetic", here=True),
    Refusal(("openvino",), ("bf16",), ALL, "this one has neither", here=True),
    Refusal(("openvino",), ("fp32", "fp16", "bf16"), ("function",), r"no conversion for the operators local\.Twice"),
    Refusal(("qnn",), ("int8",), QNN_UNQUANTIZED, "nothing in it can be quantized"),
    Refusal(("qnn",), ("fp16",), ("gemm_factors",), "only support alpha=1.0"),
    Refusal(("qnn",), ("fp16", "int8"), ("einsum",), "Einsum unsupported equation"),
    Refusal(("qnn",), ("fp16", "int8"), ("triangle",), "`Trilu` are not supported"),
    Refusal(("qnn",), ("fp16", "int8"), ("if_reads_outer",), "produced outside the QNN partition"),
    Refusal(("qnn",), ("int8",), ("gelu_written_out",), "`Erf` are not supported"),
    # The row cumsum-of-integers of QNN's known errors.
    Refusal(("qnn",), ("int8",), ("cumulative_sum",), "does not agree with fp32 on the CPU"),
    # With AMX, OpenVINO's int8 kernel of it returns arbitrary numbers; the accuracy probe refuses that.
    Refusal(("openvino",), ("int8",), ("function",), "does not agree with fp32 on the CPU", here=True),
]


def explained_by(engine: str) -> tuple[str, ...]:
    return ALL if engine != "qnn" else tuple(dict.fromkeys((*ALL[::EVERY], *FUSED, "arg_max", "integers")))


def run_by(engine: str) -> tuple[str, ...]:
    if engine == "onnxruntime":
        return ALL
    alone = (name for row in REFUSALS if engine in row.engines and len(row.patterns) == 1 for name in row.patterns)
    named = {*alone, *FUSED, *QUANTIZED, *KNOWN.get(engine, ()), *(name for at, _, name in LOOSE if at == engine)}
    return tuple(name for place, name in enumerate(ALL) if name in named or not place % OTHERS)


def reference(name: str, folder: Path) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(write(name, folder), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs_of(name)), strict=True))


def run_cells(engine: str, precision: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the result of each pattern; ``{"crash": ...}`` where the process ended in it."""
    cells: dict[str, dict[str, Any]] = {}
    left = list(run_by(engine))
    explained = ",".join(explained_by(engine))
    paths = [str(Path(pattern_cells.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    while left:
        command = [sys.executable, pattern_cells.__file__, engine, precision, str(folder), explained, *left]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=280 if EVERY > 1 else 800
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"pattern"')]
        cells |= {line["pattern"]: line for line in lines if len(line) > 1}
        begun = [line["pattern"] for line in lines if line["pattern"] not in cells]
        if begun or done.returncode:
            at = begun[-1] if begun else left[0]
            cells.setdefault(at, {"crash": f"the process ended with {done.returncode}: {done.stderr[-2000:]}"})
        left = [name for name in left if name not in cells]
    return cells


def limit_of(engine: str, name: str, precision: str) -> float:
    """Return the tolerance; a model that rounds its inputs to integers may round them to the next ones."""
    if (engine, precision, name) in LOOSE:
        return LOOSE[engine, precision, name]
    rounds = name in QUANTIZED and precision in ("fp16", "bf16")
    return TOLERANCES["int8" if rounds else precision]


def difference(want: Any, got: dict[str, Any]) -> float:
    """Return how far an output is from the reference; infinite where it is another array altogether."""
    if got["dtype"] != str(want.dtype) or tuple(got["shape"]) != want.shape:
        return float("inf")
    array = np.array(got["values"], want.dtype).reshape(want.shape)
    if want.dtype.kind != "f":
        return 0.0 if np.array_equal(array, want) else float("inf")
    if not np.isfinite(array).all():
        return float("inf")
    return float(np.abs(array.astype(np.float64) - want).max() / np.abs(want).max())


def fault(row: dict[str, Any], want: dict[str, Any], limit: float) -> str:
    """Return what is wrong with a cell that was not refused; empty where nothing is."""
    if "crash" in row or "bare" in row:
        return row.get("crash") or row["bare"]
    if set(row["outputs"]) != set(want):
        return f"other outputs: {sorted(row['outputs'])}"
    if row["again"] != row["outputs"]:
        return "another result when it runs again"
    far = max(difference(array, row["outputs"][key]) for key, array in want.items())
    if far > limit:
        return f"{far:.2e} from the reference{', and reported as honoured' if row.get('honoured') else ''}"
    return ""


@pytest.mark.parametrize(("engine", "precision"), CELLS, ids=lambda one: one)
def test_patterns_are_right_or_refused_for_a_reason_listed(engine: str, precision: str, tmp_path: Path) -> None:
    if engine in PACKAGES and find_spec(PACKAGES[engine]) is None:
        pytest.skip(f"needs {PACKAGES[engine]}: make engines installs the engines")
    cells = run_cells(engine, precision, tmp_path)
    rows = [refusal for refusal in REFUSALS if engine in refusal.engines and precision in refusal.precisions]
    faults = {}
    for name, row in cells.items():
        listed = [one for one in rows if name in one.patterns]
        if "refused" in row:
            if not any(re.search(one.reason, row["refused"]) for one in listed):
                faults[name] = f"refused, which is not listed: {row['refused']}"
        elif any(not one.here for one in listed):
            faults[name] = "is not refused any more: take it out of the list"
        elif (
            (precision == "fp32" or (engine, precision) == ("qnn", "int8"))
            and not row.get("honoured", True)
            and name not in (*QUANTIZED, *KNOWN.get(engine, ()))
        ):
            faults[name] = f"a deviation that is none: {row['deviations']}"
        elif said := fault(row, reference(name, tmp_path), limit_of(engine, name, precision)):
            faults[name] = said
    assert not faults, "\n".join(f"{engine} {precision} {name}: {said}" for name, said in faults.items())


def test_the_list_of_refusals_names_patterns_that_there_are() -> None:
    assert {name for row in REFUSALS for name in row.patterns} <= set(PATTERNS)
    assert {(engine, precision) for row in REFUSALS for engine in row.engines for precision in row.precisions} <= set(
        CELLS
    )
