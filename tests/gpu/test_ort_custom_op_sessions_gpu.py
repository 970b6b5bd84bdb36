# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions with our operators on the CUDA execution provider: bound memory, CUDA graphs, streams, threads."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from bound_sessions import CUDA, GRAPH, PROVIDER, Bound
from custom_op_models import (
    NUMPY,
    Normal,
    assert_close,
    attention,
    decisions_of,
    model,
    name_rules,
    node,
    open_session,
)
from onnx import helper

import xpuruntime as xrt
from xpuruntime import _core

pytestmark = [pytest.mark.usefixtures("operators_of_onnxruntime"), pytest.mark.cuda_onnxruntime]
randn = Normal(21)
LAYERS, WIDTH = 4, 512


def chain(dtype: str, rules: Any) -> bytes:
    """Return LAYERS of norm, product, bias, relu and residual; with `rules` all but the sum are ours."""
    nodes: list[Any] = []
    weights: dict[str, Any] = {}
    x = "x"
    for i in range(LAYERS):
        weights |= {
            f"w{i}": (randn(WIDTH, WIDTH) / 16).astype(NUMPY[dtype]),
            f"c{i}": randn(WIDTH).astype(NUMPY[dtype]),
            f"s{i}": randn(WIDTH).astype(NUMPY[dtype]),
        }
        if rules:
            nodes += [
                node("LayerNormalization", [x, f"s{i}"], [f"n{i}"], rules),
                node("MatMul", [f"n{i}", f"w{i}", f"c{i}"], [f"r{i}"], rules, activation="relu"),
            ]
        else:
            nodes += [
                helper.make_node("LayerNormalization", [x, f"s{i}"], [f"n{i}"]),
                helper.make_node("MatMul", [f"n{i}", f"w{i}"], [f"m{i}"]),
                helper.make_node("Add", [f"m{i}", f"c{i}"], [f"b{i}"]),
                helper.make_node("Relu", [f"b{i}"], [f"r{i}"]),
            ]
        nodes.append(helper.make_node("Add", [f"r{i}", x], [f"y{i}"]))
        x = f"y{i}"
    return model(nodes, {"x": (dtype, ["rows", WIDTH])}, {x: dtype}, weights)


def both(dtype: str, rules: Any) -> tuple[bytes, bytes]:
    randn.restart(5)
    stock = chain(dtype, None)
    randn.restart(5)
    return stock, chain(dtype, rules)


def bound(source: bytes, rows: int, providers: Any, dtype: Any = np.float16) -> Bound:
    last = f"y{LAYERS - 1}"
    session = open_session(source, providers)
    return Bound(session, {"x": np.zeros((rows, WIDTH), dtype)}, {last: ((rows, WIDTH), dtype)})


@pytest.mark.parametrize("kernel", ["cuda_raw.skinny", "cublas.cublasLt"])
def test_beside_the_stock_model_with_bound_memory(kernel: str) -> None:
    rules = name_rules(matmul=kernel, layer_norm="cuda_raw")
    stock, ours = (bound(source, 16, PROVIDER) for source in both("fp16", rules))
    for _ in range(5):
        x = randn(16, WIDTH).astype(np.float16)
        wanted, found = stock.run(x=x)["y3"], ours.run(x=x)["y3"]
        assert_close(found.astype(np.float64), wanted.astype(np.float64), "bf16")  # four layers of fp16 roundings
    assert all(d["chosen"].split(".")[0] in kernel or d["op"] == "layer_norm" for d in decisions_of("MatMul_r0"))


@pytest.mark.parametrize("kernel", ["cuda_raw.skinny", "cublas.cublasLt"])
def test_inside_the_cuda_graph_of_onnx_runtime(kernel: str) -> None:
    """Replays give what runs outside of a graph give, whatever happens to scratch memory and pools in between."""
    rules = name_rules(matmul=kernel, layer_norm="cuda_raw")
    source = both("fp16", rules)[1]
    plain = bound(source, 16, PROVIDER)
    graph = bound(source, 16, GRAPH)
    inputs = [randn(16, WIDTH).astype(np.float16) for _ in range(6)]
    wanted = [plain.run(x=x)["y3"] for x in inputs]
    graph.run(x=inputs[0])
    counts = [d["count"] for d in decisions_of("MatMul_r0")]
    for x, want in zip(inputs, wanted, strict=True):
        np.testing.assert_array_equal(graph.run(x=x)["y3"], want)
        _core.Dispatcher.instance().clear_workspaces()
        xrt.MemoryManager.instance().empty_cache()
        plain.run(x=x)
    replayed = [d["count"] for d in decisions_of("MatMul_r0")]
    assert sum(replayed) - sum(counts) == len(inputs)  # those of `plain`: a replay calls nothing of ours


def heavy(rules: Any) -> tuple[bytes, dict[str, Any]]:
    """Return operators whose kernels need scratch memory, one after the other on one stream."""
    weights = {"w": (randn(4096, 512) / 64).astype(np.float16), "k": (randn(64, 64, 3, 3) / 24).astype(np.float16)}
    nodes = [
        node("MatMul", ["a", "w"], ["m"], rules),
        node("Attention", ["q", "p", "p"], ["t"], rules, is_causal=2),
        node("Conv", ["x", "k"], ["c"], rules, pads=[1, 1, 1, 1]),
        node("MatMul", ["a", "w"], ["l"], rules, name="last"),
    ]
    inputs: dict[str, Any] = {
        "a": randn(4, 4096).astype(np.float16),
        "q": randn(1, 4, 1, 64).astype(np.float16),
        "p": randn(1, 4, 2048, 64).astype(np.float16),
        "x": randn(2, 64, 28, 28).astype(np.float16),
    }
    outputs = dict.fromkeys("mtcl", "fp16")
    return model(nodes, {n: ("fp16", v.shape) for n, v in inputs.items()}, outputs, weights), inputs


OUTPUTS: Any = {
    "m": ((4, 512), np.float16),
    "t": ((1, 4, 1, 64), np.float16),
    "c": ((2, 64, 28, 28), np.float16),
    "l": ((4, 512), np.float16),
}


def test_scratch_memory_in_a_cuda_graph_lives_as_long_as_the_session() -> None:
    rules = name_rules(matmul=["cublas.cublasLt", "cuda_raw.skinny"])
    source, inputs = heavy(rules)
    plain = Bound(open_session(source, PROVIDER), inputs, OUTPUTS)
    wanted = plain.run()
    dispatcher = _core.Dispatcher.instance()
    graphs = [Bound(open_session(source, GRAPH), inputs, OUTPUTS) for _ in range(2)]
    for _ in range(3):
        for graph in graphs:
            outputs = graph.run()
            for name, value in wanted.items():
                assert_close(outputs[name].astype(np.float64), value.astype(np.float64), "fp16")
            dispatcher.clear_workspaces()
            xrt.MemoryManager.instance().empty_cache()
            # What a released block would be given to.
            filler = xrt.Tensor.empty((64 << 20,), "uint8", "cuda:0")
            filler.copy_(xrt.Tensor.from_numpy(np.full(64 << 20, 0x7B, np.uint8)))
    held = dispatcher.workspace_bytes()
    del graphs, graph, outputs
    gc.collect()
    deadline = time.monotonic() + 10
    while dispatcher.workspace_bytes() >= held and time.monotonic() < deadline:
        dispatcher.clear_workspaces()
        time.sleep(0.05)
    assert dispatcher.workspace_bytes() < held
    for name, value in plain.run().items():
        np.testing.assert_array_equal(value, wanted[name])


def test_measuring_happens_before_the_capture() -> None:
    rules = name_rules("prefer", auto_strategy="best_performance")
    source = both("fp16", rules)[1]
    graph = bound(source, 16, GRAPH)
    x = randn(16, WIDTH).astype(np.float16)
    found = graph.run(x=x)["y3"]
    (made,) = decisions_of("MatMul_r0")
    assert made["source"] == "tuned"
    assert_close(found.astype(np.float64), bound(source, 16, PROVIDER).run(x=x)["y3"].astype(np.float64), "fp16")


def test_work_goes_to_the_stream_of_the_user() -> None:
    """While the stream waits for other work nothing is computed, and once it is done all is."""
    stream, other = xrt.Stream("cuda:0"), xrt.Stream("cuda:0")
    rules = name_rules(matmul="cublas.cublasLt", layer_norm="cuda_raw")
    source = both("fp16", rules)[1]
    provider: Any = ((CUDA, {"user_compute_stream": str(stream.handle)}),)
    mine, plain = bound(source, 16, provider), bound(source, 16, PROVIDER)
    x, y = (randn(16, WIDTH).astype(np.float16) for _ in range(2))
    before = mine.run(x=x)["y3"]
    np.testing.assert_array_equal(before, plain.run(x=x)["y3"])
    wanted = plain.run(x=y)["y3"]
    mine.inputs["x"].update_inplace(y)
    source_bytes, target_bytes = (xrt.Tensor.empty((1 << 30,), "uint8", "cuda:0") for _ in range(2))
    quick = ort.RunOptions()
    quick.add_run_config_entry("disable_synchronize_execution_providers", "1")
    for _ in range(400):  # a tenth of a second and more
        target_bytes.copy_(source_bytes, stream=other)
    stream.wait_stream(other)
    mine.session.run_with_iobinding(mine.binding, quick)
    untouched = mine.outputs["y3"].numpy()
    assert not stream.query(), "the blocking work was too short to tell"
    np.testing.assert_array_equal(untouched, before)
    stream.synchronize()
    np.testing.assert_array_equal(mine.outputs["y3"].numpy(), wanted)


def test_closing_sessions_gives_scratch_memory_back() -> None:
    rules = name_rules(matmul=["cublas.cublasLt", "cuda_raw.skinny"])
    source, inputs = heavy(rules)

    def once() -> None:
        Bound(open_session(source, PROVIDER), inputs, OUTPUTS).run()

    once()
    gc.collect()
    after_one = _core.Dispatcher.instance().workspace_bytes()
    for _ in range(8):
        once()
        gc.collect()
    assert _core.Dispatcher.instance().workspace_bytes() <= after_one


def test_threads_on_one_session() -> None:
    rules = name_rules(matmul="cublas.cublasLt", layer_norm="cuda_raw")
    stock, ours = both("fp16", rules)
    reference, session = (open_session(source, PROVIDER) for source in (stock, ours))

    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for i in range(20):
            x = draw.standard_normal((1 + (5 * seed + i) % 40, WIDTH)).astype(np.float16)
            wanted, output = reference.run(None, {"x": x})[0], session.run(None, {"x": x})[0]
            assert_close(output.astype(np.float64), wanted.astype(np.float64), "bf16")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_a_decoding_loop_meets_a_new_length_in_each_step() -> None:
    rules = name_rules(attention="cuda_raw.flash_attention_v2")
    made = node("Attention", ["q", "k", "v"], ["y"], rules, is_causal=2)
    shapes: dict[str, Any] = {"q": [1, 4, 1, 64], "k": [1, 4, "n", 64], "v": [1, 4, "n", 64]}
    session = open_session(model([made], {n: ("fp16", s) for n, s in shapes.items()}, {"y": "fp16"}), PROVIDER)
    q, k, v = (randn(1, 4, n, 64).astype(np.float16) for n in (1, 150, 150))
    for length in range(1, 151):
        (found,) = session.run(None, {"q": q, "k": k[:, :, :length].copy(), "v": v[:, :, :length].copy()})
        wanted = attention(*(x.astype(np.float64) for x in (q, k[:, :, :length], v[:, :, :length])), causal=2)
        assert_close(found.astype(np.float64), wanted, "fp16")
