# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``execution.static_batch``: one batch size for the engine, and batches of every size up to it for the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError
from xpuruntime.testing import models

torch = pytest.importorskip("torch")

import planted  # noqa: E402 - it needs PyTorch

SIZE = 4
ENGINES = ("onnxruntime", "openvino", "qnn", "torch")
LIMIT = {"onnxruntime": 1e-4, "openvino": 1e-4, "qnn": 2e-2, "torch": 1e-4}


def opened(engine: str, folder: Path, **execution: Any) -> tuple[xrt.InferenceSession, Any]:
    """Return a session, and the same model in float64 NumPy."""
    asked = {"static_batch": SIZE, **execution}
    if engine == "qnn":
        asked |= {"precision": "fp16", "provider_options": {"qnn": {"soc": "sm8650"}}}
    policy = {"execution": asked}
    if engine == "torch":
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).eval()
        weight, bias = (p.detach().numpy().astype(np.float64) for p in module[0].parameters())
        example = (torch.zeros(2, 16),)
        session = xrt.InferenceSession(module, device="cpu", engine=engine, policy=policy, example_inputs=example)
        return session, lambda x: np.maximum(x @ weight.T + bias, 0)
    proto = models.mlp(16)
    first, second = (onnx.numpy_helper.to_array(one).astype(np.float64) for one in proto.graph.initializer)
    path = models.save(proto, folder)
    session = xrt.InferenceSession(path, device="npu" if engine == "qnn" else "cpu", engine=engine, policy=policy)
    return session, lambda x: np.maximum(x @ first, 0) @ second


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_are_right_and_the_same_in_batches_of_every_size(engine: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((SIZE, 16)).astype(np.float32)
    session, exact = opened(engine, tmp_path)
    with session:
        feed, out = session.inputs[0].name, session.outputs[0].name
        assert session.inputs[0].shape is not None
        assert session.outputs[0].shape is not None
        assert (session.inputs[0].shape[0], session.inputs[0].limits) == ("batch", ((1, SIZE), None))
        assert session.outputs[0].shape[0] == "batch"
        output = session.run({feed: rows})[out]
        np.testing.assert_allclose(output, exact(rows.astype(np.float64)), rtol=LIMIT[engine], atol=LIMIT[engine])
        for size in range(1, SIZE + 1):
            for start in range(SIZE - size + 1):
                part = session.run({feed: rows[start : start + size]})[out]
                assert part.shape == (size, 16)
                assert part.tobytes() == output[start : start + size].tobytes()
        assert session.run_async({feed: rows[:2]}).result()[out].tobytes() == output[:2].tobytes()
        for count in (0, SIZE + 1):
            with pytest.raises(InputError, match=f"has {count} rows; execution.static_batch takes 1 to {SIZE}"):
                session.run({feed: np.zeros((count, 16), np.float32)})
        report = session.explain({feed: rows[:1]}, runs=2)
    seen = {observation.key: observation for observation in report.observations}["execution.static_batch"]
    assert (seen.status, seen.observed) == ("honoured", f"every run has {SIZE} rows")
    padded = [conversion for conversion in report.conversions if conversion.what == "batch padded"]
    assert len(padded) == 1
    assert padded[0].count >= 9


def test_it_grants_what_the_engine_alone_does_not_give(tmp_path: Path) -> None:
    """Products of PyTorch depend on the number of rows; padded, they cannot."""
    torch.manual_seed(0)
    module = torch.nn.Linear(512, 512).eval()
    rows = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    policy = {"execution": {"static_batch": 8}}
    with xrt.InferenceSession(
        module, device="cpu", engine="torch", policy=policy, example_inputs=(torch.zeros(8, 512),)
    ) as session:
        feed, out = session.inputs[0].name, session.outputs[0].name
        output = session.run({feed: rows})[out]
        alone = [session.run({feed: rows[row : row + 1]})[out] for row in range(8)]
    assert np.concatenate(alone).tobytes() == output.tobytes()


def test_bound_buffers_and_tensors_inside_have_all_rows(tmp_path: Path) -> None:
    session, exact = opened("onnxruntime", tmp_path)
    rows = np.random.default_rng(0).standard_normal((SIZE, 16)).astype(np.float32)
    with session:
        inside = session.intermediates({"x": rows[:2]}, ["h"])["h"]
        assert inside.shape == (SIZE, 16)
        binding = session.bind({"x": rows})
        binding.run()
        np.testing.assert_allclose(binding.outputs["y"], exact(rows.astype(np.float64)), rtol=1e-4, atol=1e-4)
        with pytest.raises(InputError, match="axis 0 must be 4, got 2"):
            session.bind({"x": rows[:2]})


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("centred", "rows of the output 'y' change with the other rows of the batch"),
        ("summed", "the output 'total' has no batch dimension"),
    ],
)
def test_a_model_whose_rows_depend_on_each_other_is_refused(
    engine: str, name: str, reason: str, tmp_path: Path
) -> None:
    onnx.save(getattr(planted, name)(), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedOperationError, match=f"static_batch: {SIZE} cannot be granted: {reason}"):
        xrt.InferenceSession(
            tmp_path / "model.onnx", device="cpu", engine=engine, policy={"execution": {"static_batch": SIZE}}
        )


def test_what_contradicts_it(tmp_path: Path) -> None:
    fixed = models.save(models.mlp(16, batch=2), tmp_path, "fixed.onnx")
    with pytest.raises(PolicyError, match=r"no input of .* begins with an open dimension"):
        xrt.plan(fixed, device="cpu", policy={"execution": {"static_batch": SIZE}})
    path = models.save(models.mlp(16), tmp_path)
    with pytest.raises(PolicyError, match=r"contradicts the range of the batch in execution\.shapes\.x"):
        xrt.plan(path, device="cpu", policy={"execution": {"static_batch": SIZE, "shapes": {"x": ["1..8", 16]}}})
    for wrong in (0, -1, 70000, "many"):
        with pytest.raises(PolicyError, match=r"execution\.static_batch"):
            xrt.plan(path, device="cpu", policy={"execution": {"static_batch": wrong}})
    control = xrt.plan(path, device="cpu", engine="onnxruntime", policy={"execution": {"static_batch": SIZE}}).control(
        "execution.static_batch"
    )
    assert control is not None
    assert control.enforceability == "enforced"


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_artifact_keeps_it(engine: str, tmp_path: Path) -> None:
    session, exact = opened(engine, tmp_path)
    rows = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
    with session:
        session.save_compiled(tmp_path / "model.xrt")
        want = session.run({"x": rows})["y"]
    with xrt.InferenceSession(tmp_path / "model.xrt") as again:
        assert again.inputs[0].shape == ("batch", 16)
        assert again.run({"x": rows})["y"].tobytes() == want.tobytes()
    np.testing.assert_allclose(want, exact(rows.astype(np.float64)), rtol=1e-4, atol=1e-4)


def test_inputs_with_different_numbers_of_rows(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> '
        "m (float[N,4] a, float[N,4] b, float[4] c) => (float[N,4] y) { s = Add(a, b) y = Mul(s, c) }"
    )
    onnx.save(proto, tmp_path / "model.onnx")
    with xrt.InferenceSession(
        tmp_path / "model.onnx", device="cpu", engine="onnxruntime", policy={"execution": {"static_batch": SIZE}}
    ) as session:
        a, c = np.ones((3, 4), np.float32), np.full(4, 2, np.float32)
        np.testing.assert_array_equal(session.run({"a": a, "b": a, "c": c})["y"], np.full((3, 4), 4))
        with pytest.raises(InputError, match="'b' has 2 rows, and others have 3"):
            session.run({"a": a, "b": a[:2], "c": c})
