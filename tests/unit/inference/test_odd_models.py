# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files that the standard does not allow: what an engine opens and runs is not refused by us, and the plan says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from odd_models import ODD, feeds
from sampled import part

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model

if TYPE_CHECKING:
    from pathlib import Path

#: What OpenVINO itself refuses.
NOT_OF_OPENVINO = {
    "parametric_softplus",
    "scaled_tanh",
    "contrib_operator_in_a_branch",
    "contrib_operator_in_a_function",
    "domain_by_its_long_name",
    "ml_domain_not_imported",
    "dropout_that_trains_at_ratio_zero",
    "local_function",
    "local_function_of_a_standard_name",
    "sparse_weight",
    "input_without_a_rank",
}
#: What is noted, beside what the engine says.
NOTED = {
    "contrib_domain_not_imported": "'com.microsoft' is used and not imported",
    "further_output_without_a_type": "'a' has no type",
    "graph_without_a_name": "the graph has no name",
    "ir_3_weights_not_listed": "are not among the inputs",
    "metadata_and_doc_strings": "the metadata has one key twice",
    "one_weight_twice": "defined by two initializers",
}


def raw(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, given), strict=True))


@pytest.fixture(params=part(ODD, 3))
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, Any], dict[str, Any]]:
    """A file by its name, inputs for it, and what ONNX Runtime makes of them."""
    model = ODD[request.param]()
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    given = feeds(model)
    return request.param, path, given, raw(path, given)


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert set(got) == set(want)
    for name, array in want.items():
        assert got[name].shape == array.shape, name
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_onnxruntime(odd: tuple[str, Path, dict[str, Any], dict[str, Any]]) -> None:
    name, path, given, want = odd
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as session:
        same(session.run(given), want)
        binding = session.bind(given)
        binding.run()
        same(dict(binding.outputs), want)
        assert session.explain(given, runs=1).units or not session.model.nodes
        notes = " ".join(session.plan.notes)
    assert NOTED.get(name, "") in notes


def test_openvino(odd: tuple[str, Path, dict[str, Any], dict[str, Any]]) -> None:
    pytest.importorskip("openvino")
    name, path, given, want = odd
    if name in NOT_OF_OPENVINO:
        with pytest.raises(xrt.XpuRuntimeError, match=r"OpenVINO|the CPU plugin"):
            xrt.InferenceSession(path, device="cpu", engine="openvino")
        return
    with xrt.InferenceSession(path, device="cpu", engine="openvino") as session:
        same(session.run(given), want)
        binding = session.bind(given)
        binding.run()
        same(dict(binding.outputs), want)


@pytest.mark.parametrize("odd", ["contrib_gelu", "nodes_without_names", "weights_listed_as_inputs"], indirect=True)
def test_a_file_as_the_standard_wants_it_has_no_notes(odd: tuple[str, Path, Any, Any]) -> None:
    assert inspect_model(odd[1]).notes == ()


def test_sizes_and_conversions_of_odd_files(tmp_path: Path) -> None:
    """What changes the graph takes them too."""
    for name in ("output_without_a_type", "graph_without_a_name", "ir_3_weights_not_listed", "image_scaler"):
        model = ODD[name]()
        model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "rows"
        path = tmp_path / f"{name}.onnx"
        onnx.save(model, path)
        given = feeds(model)
        want = raw(path, given)
        policy = {"execution": {"engine": "onnxruntime", "device": "cpu", "shapes": {"x": [1, 3, 4, 4]}}}
        with xrt.InferenceSession(path, policy=policy) as session:
            same(session.run(given), want)
