# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Libraries of operators that a policy has ONNX Runtime take: checked, seen in the evidence, and held by a lock."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.runtime.libraries.loading import EXTENSIONS, operator_library

pytest.importorskip("onnxruntime")

from custom_op_models import model, name_rules, node

KEY = "execution.provider_options.onnxruntime.custom_op_libraries"


def policy(libraries: str) -> dict[str, Any]:
    options = {"onnxruntime": {"custom_op_libraries": libraries}}
    return {"mode": "strict", "execution": {"device": "cpu", "engine": "onnxruntime", "provider_options": options}}


@pytest.fixture
def product() -> Any:
    """Return a model with an operator of the core, which is a library of operators too, and the rules it runs by."""
    rules = name_rules()
    inputs = {"a": ("fp32", [2, 3]), "b": ("fp32", [3, 4])}
    return model([node("MatMul", ["a", "b"], ["y"], rules)], inputs, {"y": "fp32"}), rules


def test_operators_of_a_library(product: Any) -> None:
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    with xrt.InferenceSession(product[0], policy=policy(str(_core.__file__))) as session:
        np.testing.assert_array_equal(session.run({"a": a, "b": b})["y"], a @ b)
        report = session.explain({"a": a, "b": b}, runs=1)
    seen = next(observation for observation in report.observations if observation.key == KEY)
    assert (seen.observed, seen.status) == (str(_core.__file__), "honoured")


def test_without_the_library_the_fix_names_the_option(product: Any) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=rf"xpuruntime: MatMul.*Fix: state {KEY}"):
        xrt.plan(product[0], device="cpu", engine="onnxruntime")


def test_what_is_no_library(product: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    for stated, error, words in (
        ("libops.so", xrt.PolicyError, "no absolute path"),
        (str(tmp_path / "moon.so"), xrt.EngineError, "there is no library of operators"),
        (str(text), xrt.EngineError, "as a library of operators"),
    ):
        with pytest.raises(error, match=f"(?s){words}.*Fix: "):
            xrt.InferenceSession(product[0], policy=policy(stated))


def upper(tmp_path: Path) -> Path:
    pytest.importorskip("onnxruntime_extensions")
    value = onnx.helper.make_tensor_value_info
    tensors = [value(name, onnx.TensorProto.STRING, [None]) for name in "xy"]
    made = onnx.helper.make_node("StringUpper", ["x"], ["y"], domain="ai.onnx.contrib")
    graph = onnx.helper.make_graph([made], "upper", tensors[:1], tensors[1:])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.contrib", 1)]
    path = tmp_path / "upper.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def test_the_package_of_extensions(tmp_path: Path) -> None:
    with xrt.InferenceSession(upper(tmp_path), policy=policy(EXTENSIONS)) as session:
        assert list(session.run({"x": np.array(["one", "two"], object)})["y"]) == ["ONE", "TWO"]


def test_a_lock_holds_the_library(tmp_path: Path) -> None:
    path = upper(tmp_path)
    found = operator_library(EXTENSIONS)
    assert found is not None
    library = tmp_path / "libtext_ops.so"
    shutil.copy(found, library)
    feeds = {"x": np.array(["one"], object)}
    lock = tmp_path / "upper.lock.yaml"
    xrt.lock(path, policy(str(library)), lock, inputs=feeds)
    validators = {
        validator.key: validator.expect
        for validator in xrt.load_lock(lock).identity.validators
        if validator.kind == "library"
    }
    assert isinstance(validators["libtext_ops.so"], dict)
    with xrt.InferenceSession(path, lock=lock, frozen=True) as session:
        assert list(session.run(feeds)["y"]) == ["ONE"]
    with library.open("ab") as file:
        file.write(b"another")
    with pytest.raises(xrt.LockError, match=r"libtext_ops\.so"):
        xrt.InferenceSession(path, lock=lock, frozen=True)
