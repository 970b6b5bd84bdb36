# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Our kernels as operators of ONNX Runtime, on its CUDA execution provider: results, streams, graphs, memory."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from custom_op_models import (
    NUMPY,
    activate,
    assert_close,
    attention,
    decisions_of,
    heads_first,
    model,
    name_rules,
    node,
    normalise,
    one_op,
    open_session,
    rounded,
)
from onnx import helper

import xpuruntime as xrt
from xpuruntime import _core

CUDA = "CUDAExecutionProvider"
#: fp32 as fp32, and no choice by racing, so that the same convolution runs each time.
PROVIDER: Any = ((CUDA, {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}),)
GRAPH: Any = ((CUDA, {"use_tf32": "0", "enable_cuda_graph": "1"}),)
F32 = np.float32
DRAW = np.random.default_rng(21)


def randn(*shape: int) -> Any:
    return DRAW.standard_normal(shape).astype(F32)


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    assert _core.build_info()["onnxruntime"], "built without the headers of ONNX Runtime: make ort-headers install"
    assert CUDA in ort.get_available_providers(), "the tests of operators need onnxruntime-gpu"
    _core.Dispatcher.instance().clear_decisions()


def on_device(value: Any) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), "cuda", 0)


class Bound:
    """A session with its inputs and outputs on the device, always at the same addresses."""

    def __init__(self, session: Any, inputs: dict[str, Any], outputs: dict[str, tuple[Any, Any]]) -> None:
        self.session, self.binding = session, session.io_binding()
        self.inputs = {name: on_device(value) for name, value in inputs.items()}
        self.outputs = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, "cuda", 0)
            for name, (shape, dtype) in outputs.items()
        }
        for name, value in self.inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        for name, value in self.outputs.items():
            self.binding.bind_ortvalue_output(name, value)

    def run(self, options: Any = None, **inputs: Any) -> dict[str, Any]:
        for name, value in inputs.items():
            self.inputs[name].update_inplace(np.ascontiguousarray(value))
        self.session.run_with_iobinding(self.binding, options)
        return {name: value.numpy() for name, value in self.outputs.items()}


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize(("activation", "with_bias"), [("none", False), ("relu", True), ("gelu_tanh", True)])
def test_matmul(dtype: str, rows: int, activation: str, with_bias: bool) -> None:
    operands = {"a": randn(rows, 256), "b": randn(256, 192) / 16} | ({"c": randn(192)} if with_bias else {})
    rules = name_rules()
    found = one_op("MatMul", dtype, operands, rules, PROVIDER, ("b",), activation=activation)
    a, b, *c = (rounded(x, dtype) for x in operands.values())
    assert_close(found, activate(a @ b + (c[0] if c else 0), activation), dtype)


@pytest.mark.parametrize(
    ("kernel", "dtype", "rows"),
    [
        ("cuda_raw.skinny", "fp16", 3),
        ("cuda_raw.skinny", "bf16", 16),
        ("cublas.cublasLt", "fp32", 16),
        ("cublas.cublasLt", "bf16", 100),
        ("cublas.cublas", "fp16", 16),
    ],
)
def test_matmul_by_the_kernel_asked_for(kernel: str, dtype: str, rows: int) -> None:
    operands = {"a": randn(rows, 512), "b": randn(512, 384) / 16}
    rules = name_rules(matmul=kernel)
    found = one_op("MatMul", dtype, operands, rules, PROVIDER, ("b",))
    a, b = (rounded(x, dtype) for x in operands.values())
    assert_close(found, a @ b, dtype)
    (made,) = decisions_of("MatMul_y")
    assert (made["chosen"], made["device"]) == (kernel, "cuda:0")


def test_matmul_of_transposed_operands_and_batches() -> None:
    rules = name_rules()
    a, b = randn(6, 64, 32), randn(48, 64)
    found = one_op("MatMul", "fp16", {"a": a, "b": b}, rules, PROVIDER, trans_a=1, trans_b=1)
    assert_close(found, rounded(a, "fp16").swapaxes(1, 2) @ rounded(b, "fp16").T, "fp16")
    a, b = randn(2, 3, 16, 32), randn(2, 3, 32, 24)
    found = one_op("MatMul", "fp16", {"a": a, "b": b}, rules, PROVIDER)
    assert_close(found, rounded(a, "fp16") @ rounded(b, "fp16"), "fp16")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rows", [8, 256])
def test_a_pinned_algorithm(dtype: str, rows: int) -> None:
    """The configuration that one session settled on, demanded by the next, is the one that runs."""
    operands = {"a": randn(rows, 1024), "b": randn(1024, 512) / 32}
    rules = name_rules(matmul="cublas.cublasLt")
    first = one_op("MatMul", dtype, operands, rules, PROVIDER, ("b",))
    config = decisions_of("MatMul_y")[0]["config"]
    assert config
    _core.Dispatcher.instance().clear_decisions()
    pinned = name_rules(matmul=f"cublas.cublasLt@{config}")
    second = one_op("MatMul", dtype, operands, pinned, PROVIDER, ("b",))
    (made,) = decisions_of("MatMul_y")
    assert (made["chosen"], made["config"], made["asked"]) == ("cublas.cublasLt", config, [f"cublas.cublasLt@{config}"])
    np.testing.assert_array_equal(first, second)


def test_a_pinned_algorithm_that_cannot_be_read_is_refused() -> None:
    rules = name_rules(matmul="cublas.cublasLt@nonsense=1")
    with pytest.raises(Exception, match="nonsense"):
        one_op("MatMul", "fp16", {"a": randn(8, 64), "b": randn(64, 64)}, rules, PROVIDER)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 16, 14, 14), (32, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((2, 16, 15, 13), (32, 8, 3, 3), {"group": 2, "strides": [2, 1], "pads": [1, 1, 1, 1]}),
        ((4, 64, 7, 7), (128, 64, 1, 1), {"activation": "relu"}),
        ((2, 16, 40), (32, 16, 3), {"strides": [2], "pads": [1, 1]}),
    ],
)
def test_conv_against_float64_and_stock(dtype: str, x: Any, w: Any, attributes: dict[str, Any]) -> None:
    operands = {"x": randn(*x), "w": randn(*w) / 8, "b": randn(w[0])}
    rules = name_rules()
    found = one_op("Conv", dtype, operands, rules, PROVIDER, ("w", "b"), **attributes)
    stated = dict(attributes)
    activation = stated.pop("activation", "none")
    stock = helper.make_node("Conv", list(operands), ["y"], **stated)
    inputs = {n: ("fp32", v.shape) for n, v in operands.items()}
    values = {n: rounded(v, dtype).astype(F32) for n, v in operands.items()}
    exact = open_session(model([stock], inputs, {"y": "fp32"})).run(None, values)[0]
    assert_close(found, activate(exact.astype(np.float64), activation), dtype)
    assert decisions_of("Conv_y")[0]["chosen"].startswith("cudnn.")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("shape", "axis"), [((4, 33, 768), -1), ((4, 3, 64), 1)])
@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("weights", ["same", "fp32"])
def test_norms(op: str, dtype: str, shape: tuple[int, ...], axis: int, weights: str) -> None:
    rms = op == "RMSNormalization"
    tail = "_fp32" if weights == "fp32" else ""
    names = ("x", f"s{tail}") if rms else ("x", f"s{tail}", f"b{tail}")
    operands = {name: randn(*(shape if name == "x" else shape[axis:])) for name in names}
    rules = name_rules(**{"rms_norm" if rms else "layer_norm": "cuda_raw"})
    found = one_op(op, dtype, operands, rules, PROVIDER, names[1:], axis=axis)
    values = [rounded(v, "fp32" if n.endswith("_fp32") else dtype) for n, v in operands.items()]
    assert_close(found, normalise(*values, axis=axis, rms=rms), dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kernel", ["cuda_raw.flash_attention_v2", "cudnn.sdpa"])
@pytest.mark.parametrize(("q_length", "causal"), [(64, 1), (64, 0), (1, 2)])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention(dtype: str, kernel: str, q_length: int, causal: int, kv_heads: int) -> None:
    shapes = {"q": (2, 8, q_length, 64), "k": (2, kv_heads, 128, 64), "v": (2, kv_heads, 128, 64)}
    operands = {name: randn(*shape) for name, shape in shapes.items()}
    rules = name_rules("prefer", attention=kernel)
    found = one_op("Attention", dtype, operands, rules, PROVIDER, is_causal=causal)
    assert_close(found, attention(*(rounded(x, dtype) for x in operands.values()), causal=causal), dtype)
    (made,) = decisions_of("Attention_y")
    if kernel.startswith("cuda_raw"):
        assert made["chosen"] == kernel


def test_attention_on_joined_heads_and_with_a_mask() -> None:
    rules = name_rules(attention="cuda_raw.flash_attention_v2")
    operands = {"q": randn(2, 40, 8 * 64), "k": randn(2, 72, 4 * 64), "v": randn(2, 72, 4 * 64)}
    mask = randn(2, 1, 40, 72) > -0.5
    found = one_op("Attention", "fp16", {**operands, "m": mask}, rules, PROVIDER, q_num_heads=8, kv_num_heads=4)
    q, k, v = (rounded(x, "fp16") for x in operands.values())
    wanted = attention(heads_first(q, 8), heads_first(k, 4), heads_first(v, 4), mask)
    assert_close(found, wanted.swapaxes(1, 2).reshape(2, 40, 512), "fp16")


def test_strict_rules_refuse_by_name_of_every_candidate() -> None:
    rules = name_rules(matmul="cuda_raw.skinny")
    with pytest.raises(Exception, match=r"cuda_raw\.skinny(.|\n)*cublas\.cublasLt"):
        one_op("MatMul", "fp32", {"a": randn(8, 64), "b": randn(64, 64)}, rules, PROVIDER)
    rules = name_rules(matmul="cpu.blas")
    with pytest.raises(Exception, match=r"cpu\.blas(.|\n)*operands are on cuda"):
        one_op("MatMul", "fp32", {"a": randn(8, 64), "b": randn(64, 64)}, rules, PROVIDER)


# ---- one model, stock and ours --------------------------------------------------------------------------------------

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
    global DRAW
    DRAW = np.random.default_rng(5)
    stock = chain(dtype, None)
    DRAW = np.random.default_rng(5)
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
        for one in graphs:
            found = one.run()
            for name, value in wanted.items():
                assert_close(found[name].astype(np.float64), value.astype(np.float64), "fp16")
            dispatcher.clear_workspaces()
            xrt.MemoryManager.instance().empty_cache()
            # What a released block would be given to.
            filler = xrt.Tensor.empty((64 << 20,), "uint8", "cuda:0")
            filler.copy_(xrt.Tensor.from_numpy(np.full(64 << 20, 0x7B, np.uint8)))
    held = dispatcher.workspace_bytes()
    del graphs, one, found
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


# ---- streams and memory ---------------------------------------------------------------------------------------------


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
            wanted, found = reference.run(None, {"x": x})[0], session.run(None, {"x": x})[0]
            assert_close(found.astype(np.float64), wanted.astype(np.float64), "bf16")

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


def test_inputs_that_need_no_work() -> None:
    rules = name_rules()
    source = model([node("MatMul", ["a", "b"], ["y"], rules)], {n: ("fp16", [None, None]) for n in "ab"}, {"y": "fp16"})
    session = open_session(source, PROVIDER)
    for m, k, n in ((0, 8, 8), (8, 8, 0), (8, 0, 8)):
        (found,) = session.run(None, {"a": np.ones((m, k), np.float16), "b": np.ones((k, n), np.float16)})
        np.testing.assert_array_equal(found, np.zeros((m, n), np.float16))
