# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions on the HTP simulator, as users open them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from qnn_models import array, chip, open_on, unary, wrong_in_threads

import xpuruntime as xrt
from xpuruntime.testing import models

pytest.importorskip("onnxruntime_qnn")


def test_runs_on_the_simulator_and_says_so(mlp: Path) -> None:
    x = array((4, 64))
    want = xrt.InferenceSession(mlp, device="cpu").run({"x": x})["y"]
    with xrt.InferenceSession(mlp, device="npu", backend="qnn", policy=chip()) as session:
        got = session.run({"x": x})["y"]
        assert "simulator as SM8650" in session.plan.accepted.reason
    assert np.abs(got - want).max() < 2e-3 * np.abs(want).max()
    assert not np.array_equal(got, want), "fp16 arithmetic cannot give the bits of fp32"


def test_ten_runs_and_sixteen_threads_give_one_answer(mlp: Path) -> None:
    with open_on(mlp) as session:
        assert len({session.run({"x": array((4, 64))})["y"].tobytes() for _ in range(10)}) == 1
        assert wrong_in_threads(session) == []


def test_shapes_of_the_policy_make_a_dynamic_model_run(tmp_path: Path) -> None:
    path = models.save(models.mlp(), tmp_path)
    with open_on(path, shapes={"x": [2, 64]}) as session:
        assert session.run({"x": array((2, 64))})["y"].shape == (2, 64)
        with pytest.raises(xrt.InputError, match=r"'x' has shape \[3, 64\]"):
            session.run({"x": array((3, 64))})


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        ("Celu", TensorProto.FLOAT, r"celu \(Celu\): Operators of type .Celu. are not supported by QNN EP\. To let"),
        ("Erf", TensorProto.FLOAT, r"erf \(Erf\): Operators of type .Erf. are not supported"),
        ("Identity", TensorProto.DOUBLE, r"identity \(Identity\): Failed to add node"),
    ],
)
def test_refused_nodes_are_named_with_reason_and_fix(tmp_path: Path, op: str, dtype: int, message: str) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=message) as caught:
        open_on(unary(op, tmp_path, dtype))
    assert f"execution.allow_cpu_ops: [{op}]" in str(caught.value)
    assert caught.value.engine == "qnn"


def test_a_shape_that_depends_on_values(tmp_path: Path) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"Cannot get shape.*execution\.shapes"):
        open_on(unary("Unique", tmp_path))


def test_listed_operators_run_on_the_cpu_and_no_others(tmp_path: Path) -> None:
    path = unary("Celu", tmp_path)
    x = array((4, 16))
    want = xrt.InferenceSession(path, device="cpu").run({"x": x})["y"]
    with open_on(path, allow_cpu_ops=["Celu"]) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], want, atol=5e-3)
        report = session.explain({"x": x}, runs=1)
        assert {u.source_nodes: u.device for u in report.units if u.source_nodes} == {
            ("mm",): "npu",
            ("celu",): "cpu",
            ("relu",): "npu",
        }
        assert [b.where for b in report.boundaries if b.kind == "cpu_island"] == ["celu (Celu)"]
        assert report.honoured, report.headline
    with pytest.raises(xrt.UnsupportedOperationError, match=r"1 node\(s\).*celu \(Celu\)"):
        open_on(path, allow_cpu_ops=["Erf", "Shape"])


def test_a_session_wholly_on_the_cpu_is_none_on_qnn(tmp_path: Path) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"identity \(Identity\)"):
        open_on(unary("Identity", tmp_path, TensorProto.DOUBLE), allow_cpu_ops=["Identity"])


def test_a_chip_that_qnn_does_not_know(mlp: Path) -> None:
    """The numbers are the user's own; what QNN says of them is in the error, not its talk of the CPU."""
    with pytest.raises(xrt.EngineError, match=r"soc_model 9999.*QNN_DEVICE_ERROR_INVALID_CONFIG") as caught:
        xrt.InferenceSession(
            mlp, device="npu", engine="qnn",
            policy={"execution": {"provider_options": {"qnn": {"soc_model": 9999, "htp_arch": 75}}}},
        )  # fmt: skip
    assert "fallback" not in str(caught.value)


def test_an_option_that_the_chip_refuses(mlp: Path) -> None:
    with pytest.warns(xrt.XpuRuntimeWarning, match="extended_udma"), pytest.raises(xrt.EngineError, match="tensor"):
        open_on(mlp, options={"extended_udma": True})


def test_nothing_is_printed(mlp: Path, tmp_path: Path) -> None:
    """A refused load, whose reasons are read from a verbose log, leaves the caller's own output alone."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import xpuruntime as xrt\n"
        "from qnn_models import open_on\n"
        "print('before', flush=True); print('before', file=sys.stderr, flush=True)\n"
        "try:\n    open_on(sys.argv[2])\n"
        "except xrt.UnsupportedOperationError as error:\n"
        "    print('refused', 'celu (Celu)' in str(error), flush=True)\n"
        "print('after', file=sys.stderr, flush=True)\n"
    )
    path = unary("Celu", tmp_path)
    done = subprocess.run(
        [sys.executable, str(script), str(Path(__file__).parent), str(path)],
        capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["before", "refused True"]
    assert done.stderr.splitlines() == ["before", "after"]


def test_bound_buffers(mlp: Path) -> None:
    x = array((4, 64))
    with open_on(mlp) as session:
        want = session.run({"x": x})["y"]
        binding = session.bind({"x": x})
        binding.run()
        np.testing.assert_array_equal(binding.outputs["y"], want)
        out = np.zeros((4, 64), np.float32)
        binding = session.bind({"x": x}, {"y": out})
        binding.run()
        np.testing.assert_array_equal(out, want)
