# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Known silent errors of engines: each row reproduced on the installed version, and its warning in plans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import yaml
from known_error_models import (
    F32,
    OPENVINO,
    RIGHT,
    SEQUENCE,
    X3,
    X4,
    feeds_of,
    lengths,
    one,
)
from ml_dtypes import bfloat16
from onnx import numpy_helper as nh
from onnx.reference import ReferenceEvaluator
from sampled import part

import xpuruntime as xrt
from xpuruntime.engines.known_errors import KEY, applies_to, known_errors, nodes_with_errors
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.planning import PlanRequest, resolve
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.snapshot import machine_snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence


def truth(model: Any, feeds: dict[str, Any]) -> list[Any]:
    """Compute on ONNX Runtime, or where it refuses, by ONNX's reference."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, feeds))
    except Exception:
        return list(ReferenceEvaluator(model).run(None, feeds))


def raw_openvino(model: Any, feeds: dict[str, Any]) -> list[Any]:
    ov = pytest.importorskip("openvino")
    core = ov.Core()
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", F32)
    results = zip(compiled(feeds).to_tuple(), compiled.outputs, strict=True)
    return [made.view(bfloat16) if port.element_type == ov.Type.bf16 else made for made, port in results]


def differs(want: Sequence[Any], got: Sequence[Any]) -> bool:
    return any(
        a.shape != b.shape or not np.allclose(a.astype(np.float64), b, rtol=0, atol=1e-3, equal_nan=True)
        for a, b in zip(want, got, strict=True)
    )


def saved(model: Any, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def here() -> str:
    import openvino as ov

    return str(ov.__version__)


def test_every_row_has_models() -> None:
    """Rows of values, which no model has, are in `test_openvino_values`."""
    assert {row.id for row in known_errors("openvino") if not (row.saturates or row.values)} == set(OPENVINO)


@pytest.mark.parametrize("row", OPENVINO)
def test_a_row_and_the_installed_version_agree(row: str, tmp_path: Path) -> None:
    """A row whose error the installed version no longer shows must be closed; one that it still shows, extended."""
    pytest.importorskip("openvino")
    (error,) = [error for error in known_errors("openvino") if error.id == row]
    for model in OPENVINO[row]():
        feeds = feeds_of(model)
        shows = differs(truth(model, feeds), raw_openvino(model, feeds))
        assert shows == applies_to(error, here(), "cpu"), (row, model.graph.node[0])
        assert [
            (name, found.id) for name, found in nodes_with_errors(inspect_model(saved(model, tmp_path)), (error,))
        ] == [("node", row)]


@pytest.mark.parametrize("row", part(OPENVINO, 3))
def test_plans_and_reports_say_so(row: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model = OPENVINO[row]()[0]
    path, feeds = saved(model, tmp_path), feeds_of(model)
    execution = {"engine": "openvino", "device": "cpu", "precision": "fp32"}
    with pytest.raises(UnsupportedOperationError, match="'node' ") as refused:
        xrt.InferenceSession(path, policy={"mode": "strict", "execution": execution})
    (error,) = [row_ for row_ in known_errors("openvino") if row_.id == row]
    assert error.instead in str(refused.value)
    fixes = re.findall(r"\((execution: {[^}]*})\)", str(refused.value))
    assert len(fixes) == error.elsewhere, "there must be a way out"
    for fix in fixes:
        with xrt.InferenceSession(path, policy={"mode": "strict", **yaml.safe_load(fix)}) as session:
            assert session.plan.engine == "onnxruntime"
            assert not differs(truth(model, feeds), list(session.run(feeds).values()))
    with pytest.warns(xrt.XpuRuntimeWarning, match="known to compute some nodes wrongly"):
        session = xrt.InferenceSession(path, policy={"execution": execution})
    with session:
        report = session.explain(feeds, runs=1)
    assert not report.honoured
    assert (KEY, "unsupported") in [(deviation.key, deviation.status) for deviation in report.deviations]


@pytest.mark.parametrize("index", range(len(RIGHT)))
def test_what_is_right_is_not_refused(index: int, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model = RIGHT[index]()
    feeds = feeds_of(model)
    execution = {"engine": "openvino", "device": "cpu", "precision": "fp32"}
    with xrt.InferenceSession(saved(model, tmp_path), policy={"mode": "strict", "execution": execution}) as session:
        assert not differs(truth(model, feeds), list(session.run(feeds).values()))


@pytest.mark.parametrize(
    ("x", "axis", "dynamic", "opset"),
    part(
        [
            (x, axis, dynamic, opset)
            for opset in (11, 12)
            for dynamic in (False, True)
            for x, axis in ((X3, None), (X4, 1), (X4, -2))
        ],
        5,
    ),
)
def test_softmax_of_old_opsets_is_computed_as_defined(
    opset: int, x: Any, axis: int | None, dynamic: bool, tmp_path: Path
) -> None:
    pytest.importorskip("openvino")
    model = one("Softmax", x, opset, **({} if axis is None else {"axis": axis}))
    if dynamic:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    first = (1 if axis is None else axis) % x.ndim
    flat = np.exp(x.reshape(int(np.prod(x.shape[:first], dtype=int)), -1).astype(np.float64))
    want = (flat / flat.sum(1, keepdims=True)).reshape(x.shape)
    execution = {"engine": "openvino", "device": "cpu", "precision": "fp32"}
    with xrt.InferenceSession(saved(model, tmp_path), policy={"mode": "strict", "execution": execution}) as session:
        assert np.abs(session.run({"x": x})["y"] - want).max() < 1e-5
        report = session.explain({"x": x}, runs=1)
    assert report.honoured, report.observations
    assert any("computed on a matrix" in conversion.what for conversion in report.conversions)
    assert [u for u in report.units if "node" in u.source_nodes and u.relation != "folded"]


def test_versions() -> None:
    (error,) = [error for error in known_errors("openvino") if error.id == "lstm-peepholes"]
    assert [applies_to(error, version, "cpu") for version in ("2021.4", "2026.4.1-123-abc", "2026.5.0", None)] == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("version", "known"), [("2026.4.1", True), ("2026.4.1-22982-abc", True), ("2027.0.0", False)])
def test_a_plan_says_that_a_version_was_not_swept(version: str, known: bool, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    facts = EngineFacts(name="openvino", version=version, loadable=True, providers=("CPU",))
    request = PlanRequest(model=inspect_model(saved(RIGHT[0](), tmp_path)))
    policy = Policy.coerce({"execution": {"engine": "openvino", "device": "cpu", "precision": "fp32"}})
    machine = machine_snapshot().with_engines({"openvino": facts})
    notes = resolve(request, policy, machine, default_registry().engines()).notes
    assert any("2027.0.0 was not swept" in note for note in notes) != known


OUT_OF_8_BITS = (
    "g (uint8[n] x) => (uint8[n] y) <uint8[1] k = {5}> "
    "{ a = Cast <to = 6> (x) b = Cast <to = 6> (k) c = Sub (a, b) y = Cast <to = 2> (c) }"
)
OUT_OF_FP32 = (
    "g (int32[n] x) => (int32[1] y) { a = Cast <to = 1> (x) b = ReduceMax <keepdims = 1> (a) y = Cast <to = 6> (b) }"
)


@pytest.mark.parametrize(
    ("text", "x"), [(OUT_OF_8_BITS, np.arange(8, dtype=np.uint8)), (OUT_OF_FP32, np.int32([3, 2**24]))]
)
def test_the_casts_of_the_fixes_make_it_right(text: str, x: Any, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    execution = {"engine": "openvino", "device": "cpu", "precision": "fp32"}
    with xrt.InferenceSession(saved(model, tmp_path), policy={"mode": "strict", "execution": execution}) as session:
        assert not differs(truth(model, {"x": x}), list(session.run({"x": x}).values()))


INSTEAD = {
    "recurrent-layout": (
        "g (float[4, 2, 3] x, float[1, 5, 3] w, float[1, 5, 5] r) => (float[4, 2, 1, 5] y) "
        "{ a = Transpose <perm = [1, 0, 2]> (x) b = RNN <hidden_size = 5> (a, w, r) "
        "y = Transpose <perm = [2, 0, 1, 3]> (b) }"
    ),
    "attention-windows": (
        "g (float[1, 2, 4, 8] x, float[1, 2, 6, 8] a, float[1, 2, 6, 8] b) => (float[1, 2, 4, 8] y) "
        "<bool[4, 6] m = {1,1,0,0,0,0, 1,1,1,0,0,0, 0,1,1,1,0,0, 0,0,1,1,1,0}> { y = Attention (x, a, b, m) }"
    ),
    "bit-shift-left-of-signed-by-31": (
        'g (int64[2] x, int64 by) => (int64[2] y) { y = BitShift <direction = "LEFT"> (x, by) }'
    ),
    "bit-shift-right-of-signed": (
        "g (int8[4] x) => (int8[4] y) <float k = {2}> "
        "{ a = Cast <to = 1> (x) b = Div (a, k) c = Floor (b) y = Cast <to = 3> (c) }"
    ),
    "gemm-of-integers-with-fractions": (
        "g (int32[2, 2] x, int32[2, 2] a) => (int32[2, 2] y) "
        "{ b = Cast <to = 1> (x) c = Cast <to = 1> (a) d = Gemm <alpha = 0.5> (b, c) y = Cast <to = 6> (d) }"
    ),
    "einsum-of-8-bits": (
        "g (int8[1, 2] x) => (int8[1] y) "
        '{ a = Cast <to = 7> (x) b = Einsum <equation = "ij->i"> (a) y = Cast <to = 3> (b) }'
    ),
    "einsum-of-other-integers-in-fp32": (
        "g (uint32[2, 2] x) => (uint32[2] y) "
        '{ a = Cast <to = 7> (x) b = Einsum <equation = "ij->i"> (a) y = Cast <to = 12> (b) }'
    ),
    "space-to-depth-crd": (
        "g (float[1, 2, 4, 6] x) => (float[1, 8, 2, 3] y) <int64[6] s = {1, 2, 2, 2, 3, 2}, int64[4] t = {1, 8, 2, 3}> "
        "{ a = Reshape (x, s) b = Transpose <perm = [0, 1, 3, 5, 2, 4]> (a) y = Reshape (b, t) }"
    ),
}


def test_every_row_has_a_way_out() -> None:
    assert set(INSTEAD) == {row.id for row in known_errors("openvino") if not row.elsewhere}


@pytest.mark.parametrize("row", part(INSTEAD, 3))
def test_the_fixes_of_what_no_other_engine_takes_make_it_right(row: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    original = OPENVINO[row]()[-1 if row == "recurrent-layout" else 0]
    feeds = feeds_of(original)
    (error,) = [error for error in known_errors("openvino") if error.id == row]
    engine, opset = ("onnxruntime", 22) if "onnxruntime" in error.instead else ("openvino", 28)
    fixed = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {INSTEAD[row]}')
    taken = feeds | {weight.name: nh.to_array(weight) for weight in original.graph.initializer}
    inputs = {value.name: taken[value.name] for value in fixed.graph.input}
    execution = {"engine": engine, "device": "cpu", "precision": "fp32"}
    with xrt.InferenceSession(saved(fixed, tmp_path), policy={"mode": "strict", "execution": execution}) as session:
        (got,) = session.run(inputs).values()
    want = np.trunc(truth(original, feeds)[0]) if got.dtype.kind == "i" else truth(original, feeds)[0]
    assert not differs([want], [got])


def text_model(text: str, folder: Path) -> list[str]:
    """Return the nodes of a model that rows of OpenVINO are about."""
    head = '<ir_version: 9, opset_import: ["" : 18, "ours" : 1]>'
    path = saved(onnx.parser.parse_model(f"{head} {text}"), folder)
    return [error.id for _, error in nodes_with_errors(inspect_model(path), known_errors("openvino"))]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("g (int32[n] x, int32[n] k) => (int32[n] y) { y = Div (x, k) }", ["div-of-integers-in-fp32"]),
        ("g (uint8[4] x, uint8[4] k) => (uint8[4] y) { y = Div (x, k) }", []),
        ("g (float[n] x, float[n] k) => (float[n] y) { y = Div (x, k) }", []),
        # sizes are below 2**24
        (
            "g (float[n] x) => (int64[1] y) { s = Shape (x) k = Constant <value = int64[1] {4}> () y = Div (s, k) }",
            [],
        ),
        # constants of an index computation, and one that is not finite
        (
            f"g () => (int64[200] y) <int64[200] a = {{{', '.join(map(str, range(200)))}}}, int64 k = {{64}}> "
            "{ i = Mul (a, a) y = Div (i, k) }",
            [],
        ),
        (
            "g (int64[2] x) => (int64[2] y) { f = Constant <value = float[2] {inf, 1}> () i = Cast <to = 7> (f) "
            "y = Div (x, i) }",
            ["div-of-integers-in-fp32"],
        ),
        (
            "g (uint32[4] x) => (uint32[4] y) { k = Constant <value = uint32[1] {8}> () i = Cast <to = 6> (k) "
            'j = Cast <to = 12> (i) y = BitShift <direction = "RIGHT"> (j, k) }',
            [],
        ),
        *(
            (
                "g (float[3, 64] x) => (float[3, m] v, int64[3, m] i) { b = Constant <value = int64[1] {1}> () "
                f"a = Constant <value = int64 {{{k}}}> () k = Reshape (a, b) v, i = TopK (x, k) }}",
                rows,
            )
            for k, rows in ((6, []), (7, ["top-k-of-equal-values"]))
        ),
        (
            "g (float[n] x) => (int32[n] y) { i = Cast <to = 6> (x) j = ours.Shuffle (i) y = Div (j, i) }",
            ["div-of-integers-in-fp32"],
        ),
        (
            "g (bool c, uint8[4] x) => (uint8[4] y) { y = If (c) "
            "<then_branch = t () => (uint8[4] p) { p = Sub (x, x) }, "
            "else_branch = e () => (uint8[4] p) { p = Add (x, x) }> }",
            ["saturating-8-bits", "saturating-8-bits"],
        ),
        (
            'g (uint8[4] x) => (uint8[4] y) { y = ours.twice (x) } <domain: "ours", opset_import: ["" : 18]> '
            "twice (a) => (b) { b = Add (a, a) }",
            ["saturating-8-bits"],
        ),
        *(
            (f'g (uint32[200] x{more} {{ y = BitShift <direction = "LEFT"> (x, k) }}', rows)
            for more, rows in (
                (") => (uint32[200] y) <uint32[200] k = {" + "31, " * 199 + "31}>", ["bit-shift-left-by-31"]),
                (", uint32[200] k) => (uint32[200] y)", []),
            )
        ),
    ],
)
def test_types_sizes_subgraphs_and_functions(text: str, rows: list[str], tmp_path: Path) -> None:
    assert text_model(text, tmp_path) == rows


def test_fixed_sizes_make_it_right(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model = lengths("LSTM", 4)
    execution: dict[str, Any] = {"engine": "openvino", "device": "cpu", "precision": "fp32"}
    path = saved(model, tmp_path)
    with pytest.raises(UnsupportedOperationError, match=r"execution\.shapes"):
        xrt.plan(path, policy={"mode": "strict", "execution": execution})
    execution["shapes"] = {"x": list(SEQUENCE.shape)}
    with xrt.InferenceSession(path, policy={"mode": "strict", "execution": execution}) as session:
        assert not differs(truth(model, {"x": SEQUENCE}), list(session.run({"x": SEQUENCE}).values()))
