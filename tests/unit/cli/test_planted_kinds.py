# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models whose evidence is easily wrong: what ``xrt explain`` says of each, and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

Xrt = Any
RNG = np.random.default_rng(0)


def written(folder: Path, text: str, weights: dict[str, Any] | None = None, opset: int = 17) -> Path:
    """Write a model from ONNX's text form; its nodes are named after what they make."""
    head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "ai.onnx.ml": 3]>'
    model = onnx.parser.parse_model(f"{head} g {text}")
    for node in model.graph.node:
        node.name = f"make_{node.output[0]}"
    for name, one in (weights or {}).items():
        tensor = one if isinstance(one, onnx.TensorProto) else nh.from_array(np.asarray(one), name)
        model.graph.initializer.append(tensor)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def policy(folder: Path, engine: str = "onnxruntime", mode: str = "prefer", **content: Any) -> Path:
    execution = {"engine": engine, "device": "cpu", **content.pop("execution", {})}
    path = folder / "policy.json"
    path.write_text(json.dumps({"mode": mode, "execution": execution, **content}))
    return path


def told(xrt: Xrt, model: Path, given: Path, code: int) -> tuple[str, dict[str, str]]:
    """Return the headline, and key to status."""
    shown = xrt("explain", model, "-p", given)
    result = xrt("explain", model, "-p", given, "--json")
    assert (shown.code, result.code) == (code, code), shown.out + shown.err
    report = result.json()
    assert shown.out.splitlines()[0].startswith(report["headline"])
    assert report["honoured"] is (code == 0)
    return report["headline"], {observation["key"]: observation["status"] for observation in report["observations"]}


def deviating(statuses: dict[str, str]) -> set[str]:
    return {key for key, status in statuses.items() if status in ("substituted", "unsupported")}


def quantized(folder: Path) -> Path:
    text = """(float[5, 8] x) => (float[5, 8] y) {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) a = Add(d, d)
        p = QuantizeLinear(a, s, z) y = DequantizeLinear(p, s, z) }"""
    return written(folder, text, {"s": np.float32(0.02), "z": np.uint8(128)})


def dynamic(folder: Path) -> Path:
    text = "(float[5, 8] x) => (float[5, 8] y) { y = com.microsoft.DynamicQuantizeMatMul(x, w, s, z) }"
    weights = {"w": RNG.integers(-64, 64, (8, 8)).astype(np.int8), "s": np.float32(0.1), "z": np.int8(0)}
    return written(folder, text, weights)


def four_bits(folder: Path) -> Path:
    text = (
        "(float[5, 32] x) => (float[5, 8] y) { f = DequantizeLinear<axis = 0, block_size = 32>(w, s) y = MatMul(x, f) }"
    )
    q = RNG.integers(-8, 8, 256)
    weights = {"w": h.make_tensor("w", T.INT4, [32, 8], q.tolist()), "s": np.full((1, 8), 0.1, np.float32)}
    model = written(folder, text, weights, opset=21)
    proto = onnx.load(model)
    proto.ir_version = 10
    onnx.save(proto, model)
    return model


class TestPrecision:
    def test_integers_between_a_quantized_pair(self, xrt: Xrt, tmp_path: Path) -> None:
        model = quantized(tmp_path)
        _, found = told(xrt, model, policy(tmp_path, execution={"precision": "fp32"}), 1)
        assert deviating(found) == {"execution.precision"}
        refused = xrt("plan", model, "-p", policy(tmp_path, mode="strict", execution={"precision": "fp32"}))
        assert refused.code not in (0, 70)
        options = {"onnxruntime": {"session.disable_quant_qdq": "1"}}
        floats = {"precision": "fp32", "provider_options": options}
        told(xrt, model, policy(tmp_path, mode="strict", execution=floats), 0)
        for precision in ("model", "int8"):
            told(xrt, model, policy(tmp_path, execution={"precision": precision}), 0)

    def test_integer_operators(self, xrt: Xrt, tmp_path: Path) -> None:
        model = dynamic(tmp_path)
        _, found = told(xrt, model, policy(tmp_path, execution={"precision": "fp32"}), 1)
        assert found["execution.precision"] == "unsupported"
        for precision in ("model", "int8"):
            told(xrt, model, policy(tmp_path, execution={"precision": precision}), 0)
        refused = xrt("plan", model, "-p", policy(tmp_path, mode="strict", execution={"precision": "fp32"}))
        assert refused.code not in (0, 70)
        assert "'make_y' (DynamicQuantizeMatMul)" in refused.err

    def test_activations_that_the_engine_quantizes(self, xrt: Xrt, tmp_path: Path) -> None:
        model = four_bits(tmp_path)
        strict = {"mode": "strict", "execution": {"precision": "fp32"}}
        told(xrt, model, policy(tmp_path, **strict), 0)
        options = {"onnxruntime": {"session.qdq_matmulnbits_accuracy_level": 4}}
        _, found = told(xrt, model, policy(tmp_path, execution={"precision": "fp32", "provider_options": options}), 1)
        assert deviating(found) == {"execution.precision"}


class TestAccuracy:
    @pytest.mark.parametrize("body", ["y = Sqrt(n)", "y = Relu(n)"])
    def test_an_output_that_says_nothing(self, xrt: Xrt, body: str, tmp_path: Path) -> None:
        model = written(tmp_path, f"(float[5, 8] x) => (float[5, 8] y) {{ a = Abs(x) n = Neg(a) {body} }}")
        headline, found = told(xrt, model, policy(tmp_path, accuracy={"rtol": 0.01, "cosine": 0.99}), 1)
        assert headline == "2 keys inconclusive"
        assert {found["accuracy.rtol"], found["accuracy.cosine"]} == {"inconclusive"}


class TestOperators:
    def test_a_known_silent_error(self, xrt: Xrt, tmp_path: Path) -> None:
        pytest.importorskip("openvino")
        text = (
            "(float[1, 2, 6, 6] x) => (float[1, 2, h, w] y) { y = AveragePool<kernel_shape = [3, 3], strides = [2, 2],"
        )
        model = written(tmp_path, f"{text} pads = [1, 1, 1, 1], ceil_mode = 1, count_include_pad = 1>(x) }}")
        _, found = told(xrt, model, policy(tmp_path, "openvino"), 1)
        assert deviating(found) == {"execution.operators"}
        refused = xrt("run", model, "-p", policy(tmp_path, "openvino", "strict"))
        assert refused.code not in (0, 70)
        assert "'make_y' divides by another number of elements" in refused.err

    def test_attention_that_is_written_out(self, xrt: Xrt, tmp_path: Path) -> None:
        text = """(float[1, 2, 8, 16] q, float[1, 2, 16, 8] k, float[1, 2, 8, 16] v) => (float[1, 2, 8, 16] y) {
            s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }"""
        model = written(tmp_path, text)
        _, found = told(xrt, model, policy(tmp_path, kernels={"attention": "flash_v2"}), 1)
        assert deviating(found) == {"kernels.attention"}
        refused = xrt("plan", model, "-p", policy(tmp_path, mode="strict", kernels={"attention": "flash_v2"}))
        assert refused.code not in (0, 70)
        # A core with CUDA has the kernel, for another device.
        assert "the model writes attention out" in refused.err or "serves another kind of device" in refused.err

    def test_a_kernel_key_for_nothing(self, xrt: Xrt, tmp_path: Path) -> None:
        model = written(tmp_path, "(float[5, 8] x) => (float[5, 8] y) { y = Tanh(x) }")
        _, found = told(xrt, model, policy(tmp_path, kernels={"attention": "cpu.reference"}), 1)
        assert deviating(found) == {"kernels.attention"}


class TestNoDeviation:
    @pytest.mark.parametrize("words", ["auto", ["cpu.reference", "auto"]])
    def test_a_kernel_key_for_nothing_that_leaves_the_choice(self, xrt: Xrt, words: object, tmp_path: Path) -> None:
        model = written(tmp_path, "(float[5, 8] x) => (float[5, 8] y) { y = Tanh(x) }")
        told(xrt, model, policy(tmp_path, kernels={"attention": words}), 0)

    @pytest.mark.parametrize("labels", ['classlabels_strings = ["no", "yes"]', "classlabels_ints = [0, 1]"])
    def test_labels_beside_numbers(self, xrt: Xrt, labels: str, tmp_path: Path) -> None:
        kind = "string" if "strings" in labels else "int64"
        text = f"""(float[5, 2] x) => ({kind}[5] label, seq(map({kind}, float)) scores) {{
            label, p = ai.onnx.ml.LinearClassifier<
                coefficients = [0.1, 0.2, -0.1, 0.3], intercepts = [0.0, 0.1], post_transform = "SOFTMAX", {labels}>(x)
            scores = ai.onnx.ml.ZipMap<{labels.replace("classlabels_ints", "classlabels_int64s")}>(p) }}"""
        model = written(tmp_path, text)
        told(xrt, model, policy(tmp_path), 0)
        told(xrt, model, policy(tmp_path, mode="strict", execution={"precision": "fp32"}), 0)

    def test_numbers_beside_indices_and_masks(self, xrt: Xrt, tmp_path: Path) -> None:
        text = """(float[5, 8] x) => (float[5, 2] v, int64[5, 2] i, bool[5, 2] b, string[5, 2] t, int64[5] a) {
            v, i = TopK(x, k) b = Greater(v, z) t = Cast<to = 8>(i) a = ArgMax<axis = 1, keepdims = 0>(x) }"""
        model = written(tmp_path, text, {"k": np.int64([2]), "z": np.float32(0)})
        told(xrt, model, policy(tmp_path), 0)
        told(xrt, model, policy(tmp_path, mode="strict", execution={"precision": "fp32"}), 0)

    def test_a_fallback_that_the_policy_lists(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        given = policy(tmp_path, "qnn", execution={"device": "npu", "fallback": ["onnxruntime@cpu"]})
        headline, found = told(xrt, Path(digits), given, 0)
        assert headline == "policy honoured by fallback onnxruntime@cpu"
        assert found["execution.fallback"] == "fallback"
