# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel policies inside ONNX Runtime on a CUDA device: which kernels ran, on streams, in graphs, in our pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from exported_models import example, exported
from onnx import numpy_helper, parser

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cuda_onnxruntime

torch = pytest.importorskip("torch")

#: Operators on sizes, which ONNX Runtime computes on the CPU.
SIZES = ["Concat", "Gather", "Range", "Reshape", "Shape", "Slice", "Squeeze", "Unsqueeze"]
OURS = {"matmul": "cublas", "layer_norm": "cuda_raw.layer_norm", "conv": "cudnn.conv_heuristic"}


def save(folder: Path, inputs: str, outputs: str, body: str, weights: dict[str, Any]) -> Path:
    head = '<ir_version: 10, opset_import: ["" : 21]>'
    model = parser.parse_model(f"{head}\ng ({inputs}) => ({outputs}) {{\n{body}\n}}")
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def normal(*shape: int, seed: int = 0) -> Any:
    return (np.random.default_rng((seed, *shape)).standard_normal(shape) / 8).astype(np.float32)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    weights = {"w1": normal(256, 512), "b1": normal(512), "w2": normal(512, 256, seed=1), "b2": normal(256)}
    body = "p = MatMul(x, w1)\nh = Add(p, b1)\nr = Relu(h)\nq = MatMul(r, w2)\ny = Add(q, b2)"
    return save(tmp_path, "float[n, 256] x", "float[n, 256] y", body, weights)


def wanted(path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    with xrt.InferenceSession(path, engine="onnxruntime", device="cpu", precision="fp32") as plain:
        return plain.run(feeds)


def policy(kernels: dict[str, Any], mode: str = "strict", **execution: Any) -> dict[str, Any]:
    execution.setdefault("precision", "fp32")
    return {"mode": mode, "kernels": kernels, "execution": {"engine": "onnxruntime", "device": "cuda:0", **execution}}


def verdicts(report: Any) -> dict[str, str]:
    return {
        observation.key: observation.status
        for observation in report.observations
        if observation.key.startswith("kernels.")
    }


def close(got: Any, want: Any, rtol: float) -> None:
    got = got.float().cpu().numpy() if isinstance(got, torch.Tensor) else got
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 2e-5), ("fp16", 1e-2), ("bf16", 5e-2)])
@pytest.mark.parametrize("name", ["encoder", "convnet"])
def test_real_models(name: str, precision: str, rtol: float) -> None:
    feeds = example(name)
    path = exported(name)
    # Strict refuses a key for operations that the model does not have.
    absent = {"encoder": "conv", "convnet": "layer_norm"}[name]
    kernels = {op: word for op, word in OURS.items() if op != absent}
    asked = policy(kernels, precision=precision, allow_cpu_ops=SIZES)
    with xrt.InferenceSession(path, policy=asked) as session:
        got = session.run(feeds)
        report = session.explain(feeds, runs=2)
    for output, want in wanted(path, feeds).items():
        close(got[output], want, rtol)
    assert set(verdicts(report).values()) == {"honoured"}, verdicts(report)
    nodes = sorted(node for unit in report.units for node in unit.source_nodes)
    assert nodes == sorted(node.name for node in session.model.nodes)
    assert {unit.kernel.partition(".")[0] for unit in report.units if unit.kernel} <= {"cublas", "cuda_raw", "cudnn"}


def test_a_product_takes_bias_and_relu_along(mlp: Path) -> None:
    x = normal(7, 256)
    with xrt.InferenceSession(mlp, policy=policy({"matmul": "cublas.cublasLt"})) as session:
        assert session.plan.settings["rewrites"].keys() == {"MatMul_p", "MatMul_q"}
        report = session.explain({"x": x}, runs=2)
        close(session.run({"x": x})["y"], wanted(mlp, {"x": x})["y"], 2e-5)
    assert sorted(len(unit.source_nodes) for unit in report.units if unit.kernel) == [2, 3]
    assert all(unit.kernel.startswith("cublas.cublasLt") for unit in report.units if unit.kernel)


def test_each_size_gets_its_kernel(mlp: Path) -> None:
    kernels = {"matmul": "cublas", "rules": [{"match": {"op": "matmul", "m": "<=16"}, "use": "cuda_raw.skinny"}]}
    with xrt.InferenceSession(mlp, policy=policy(kernels, precision="fp16")) as session:
        for rows, backend in ((1, "cuda_raw.skinny"), (16, "cuda_raw.skinny"), (64, "cublas.cublasLt")):
            x = normal(rows, 256, seed=rows)
            close(session.run({"x": x})["y"], wanted(mlp, {"x": x})["y"], 1e-2)
            report = session.explain({"x": x}, runs=1)
            ran = {unit.kernel.partition("@")[0] for unit in report.units if unit.kernel}
            assert ran == {backend}, rows


@pytest.mark.parametrize("kernel", ["cuda_raw.flash_attention_v2", "cudnn.sdpa"])
def test_attention_of_products(kernel: str, tmp_path: Path) -> None:
    inputs = "float[b, 4, s, 64] q, float[b, 4, s, 64] k, float[b, 4, s, 64] v"
    body = "t = Transpose<perm=[0,1,3,2]>(k)\np = MatMul(q, t)\nz = Mul(p, c)\nw = Softmax(z)\ny = MatMul(w, v)"
    path = save(tmp_path, inputs, "float[b, 4, s, 64] y", body, {"c": np.float32(0.125).reshape(())})
    feeds = {name: 8 * normal(2, 4, 33, 64, seed=index) for index, name in enumerate("qkv")}
    with xrt.InferenceSession(path, policy=policy({"attention": kernel}, precision="fp16")) as session:
        close(session.run(feeds)["y"], wanted(path, feeds)["y"], 1e-2)
        report = session.explain(feeds, runs=1)
    assert verdicts(report) == {"kernels.attention": "honoured"}
    assert [unit.kernel.partition("@")[0] for unit in report.units if unit.kernel] == [kernel]


def test_a_cuda_graph_replays_our_kernels(mlp: Path) -> None:
    given = policy({"matmul": "cublas"}, cuda_graph="require")
    with xrt.InferenceSession(mlp, policy=given) as session:
        x = torch.from_numpy(normal(4, 256)).cuda()
        binding = session.bind({"x": x})
        assert binding.graph == "captured"
        for seed in range(3):
            fresh = normal(4, 256, seed=seed)
            x.copy_(torch.from_numpy(fresh))
            binding.run()
            torch.cuda.synchronize()
            close(torch.from_dlpack(binding.outputs["y"]), wanted(mlp, {"x": fresh})["y"], 2e-5)
        binding.close()


def test_in_our_pool_and_on_the_callers_stream(mlp: Path) -> None:
    side = torch.cuda.Stream()
    fresh = normal(4, 256)
    for memory in ({"pool": "engine"}, {"pool": "caching", "limit": "1GiB"}):
        with xrt.InferenceSession(mlp, policy=policy({"matmul": "cublas"}, memory=memory)) as session:
            x = torch.full((4, 256), float("nan"), device="cuda")
            session.run({"x": x})
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                x.copy_(torch.from_numpy(fresh))
                y = session.run({"x": x})["y"]
            side.synchronize()
            close(y, wanted(mlp, {"x": fresh})["y"], 2e-5)


def test_what_is_faster_is_found(tmp_path: Path) -> None:
    weights = {f"w{i}": normal(4096, 4096, seed=i) for i in range(2)}
    path = save(tmp_path, "float[8, 4096] x", "float[8, 4096] y", "h = MatMul(x, w0)\ny = MatMul(h, w1)", weights)
    given = {**policy({}, precision="fp16"), "auto_strategy": "best_performance"}
    with xrt.InferenceSession(path, policy=given) as session:
        report = session.explain(runs=2)
    measured = [conversion for conversion in report.conversions if "was measured" in conversion.what]
    assert len(measured) == 2
    ours = {node for unit in report.units if unit.kernel for node in unit.source_nodes}
    assert len(ours) == sum(": the xpuruntime operator is used" in one.reason for one in measured)


def test_kernels_of_the_cpu_are_refused(mlp: Path) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match="serves another kind of device"):
        xrt.InferenceSession(mlp, policy=policy({"matmul": "cpu.blas"}))
