# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations captured into CUDA graphs, and what holds their scratch memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from op_work import (
    WORKS,
    Work,
    assert_near,
    attention_backward_work,
    attention_work,
    make_work,
    matmul_work,
    norm_backward_work,
    norm_work,
    randn,
)
from torch_work import warm_up

import xpuruntime as xrt
from xpuruntime import Graph, Stream, Tensor, _core
from xpuruntime.ops import layer_norm_backward

NAMES = list(WORKS)


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    warm_up()
    for name in NAMES:
        make_work(name)()


def capture(call: Any, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def check_with_new_inputs(work: Work, graph: torch.cuda.CUDAGraph) -> None:
    """Replay twice, with other values in the first input the second time."""
    work.poison()
    graph.replay()
    work.check()
    if work.op.endswith("backward"):  # its inputs belong together
        return
    lead = next(iter(work.inputs.values()))
    lead.copy_(torch.randn_like(lead))
    work.poison()
    graph.replay()
    work.check()


@pytest.mark.parametrize("name", NAMES)
def test_capture_and_replay(name: str) -> None:
    work = make_work(name)
    graph = capture(work)
    check_with_new_inputs(work, graph)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_call_of_all_may_be_captured(name: str) -> None:
    """What is prepared for a shape is then prepared inside the capture."""
    make = {
        "matmul": lambda: matmul_work(144, 328, 136),
        "skinny": lambda: matmul_work(5, 520, 1032),
        "attention": lambda: attention_work(136, 64),
        "attention_backward": lambda: attention_backward_work(136, 64),
        "layer_norm": lambda: norm_work(False, 26, 520),
        "rms_norm": lambda: norm_work(True, 26, 520),
        "layer_norm_backward": lambda: norm_backward_work(False, 26, 520),
        "rms_norm_backward": lambda: norm_backward_work(True, 26, 520),
    }.get(name)
    if make is None and name != "conv":  # the gradients of a convolution: no other test has these types
        work = make_work(name, torch.float16)
    elif make is None:
        work = make_work(name)
        work.inputs["x"] = work.inputs["x"][:, :, 2:, 1:]
        work.inputs["x"] = work.inputs["x"].clone(memory_format=torch.channels_last)
        work.into["out"] = work.into["out"][:, :, :8, :9].clone(memory_format=torch.channels_last)
    else:
        work = make()
    check_with_new_inputs(work, capture(work))


@pytest.mark.parametrize("name", NAMES)
def test_results_made_in_a_capture(name: str) -> None:
    """Their memory is of PyTorch's pool of the graph."""
    work = make_work(name)
    kept: list[Any] = []
    graph = capture(lambda: kept.append(work.fresh()))
    made = kept[0] if isinstance(kept[0], tuple) else kept
    for tensor in made:
        if tensor is not None:
            tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for tensor, want in zip(made, work.want(**work.inputs).values(), strict=False):
        assert_near(tensor, want, work.dtype, name)


def test_a_whole_layer_in_one_graph() -> None:
    """A block of a transformer, forward and backward, ours only."""
    batch, length, heads, head_dim = 2, 128, 4, 64
    width = heads * head_dim
    x, residual = randn(batch, length, width), randn(batch, length, width)
    weights = {name: randn(width, width) * width**-0.5 for name in ("q", "k", "v", "o")}
    norm = randn(width)
    ops = xrt.ops

    def split(t: torch.Tensor) -> torch.Tensor:
        return t.view(batch, length, heads, head_dim).transpose(1, 2)

    def layer() -> tuple[torch.Tensor, ...]:
        normed, total = ops.rms_norm(x, norm, residual, return_sum=True)
        q, k, v = (split(ops.matmul(normed, weights[name])) for name in ("q", "k", "v"))
        out, lse = ops.attention(q, k, v, is_causal=True, return_lse=True)
        grads = ops.attention_backward(out, q, k, v, out, lse, is_causal=True)
        joined = out.transpose(1, 2).reshape(batch, length, width)
        return (ops.matmul(joined, weights["o"]), total, *grads)

    eager = layer()
    kept: list[tuple[torch.Tensor, ...]] = []
    graph = capture(lambda: kept.append(layer()))
    for again in range(3):
        for tensor in kept[0]:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(kept[0], eager, strict=True):
            assert_near(got, want.double(), torch.bfloat16, f"replay {again}")


def backward_of_norm() -> tuple[Any, list[torch.Tensor]]:
    """Return a call that needs scratch memory for certain, and what it should give."""
    work = norm_backward_work(False, 4096, 1024)

    def call() -> Any:
        return layer_norm_backward(**work.inputs, has_bias=True, grad_x=work.into["grad_x"])

    want = [tensor.clone() for tensor in call()]
    torch.cuda.synchronize()
    return call, want


def equal(got: Any, want: list[torch.Tensor]) -> bool:
    torch.cuda.synchronize()
    return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_scratch_memory_of_a_graph_is_its_own() -> None:
    """Eager work on the same stream before, between and after replays does not share it."""
    dispatcher = _core.Dispatcher.instance()
    call, want = backward_of_norm()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        eager = dispatcher.workspace_bytes()
        assert eager > 0, "it needs scratch memory"
    kept: list[Any] = []
    graph = capture(lambda: kept.append(call()), stream)
    assert dispatcher.workspace_bytes() > eager
    dispatcher.clear_workspaces()
    other, other_want = backward_of_norm()
    for _ in range(5):
        with torch.cuda.stream(stream):
            graph.replay()
            got = other()
            graph.replay()
        assert equal(kept[0], want)
        assert equal(got, other_want)
    del stream
    gc.collect()
    graph.replay()
    assert equal(kept[0], want)


def test_two_graphs_at_once_on_two_streams() -> None:
    (first, first_want), (second, second_want) = backward_of_norm(), backward_of_norm()
    stream = torch.cuda.Stream()  # both are captured on one stream
    kept: list[Any] = []
    graphs = [capture(lambda: kept.append(first()), stream), capture(lambda: kept.append(second()), stream)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(50):
        for graph, on_stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(on_stream):
                graph.replay()
    assert equal(kept[0], first_want)
    assert equal(kept[1], second_want)


@pytest.mark.parametrize("name", NAMES)
def test_two_graphs_of_every_operation_at_once(name: str) -> None:
    works = [make_work(name), make_work(name)]
    graphs = [capture(work) for work in works]
    for work in works:
        work.poison()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    for work in works:
        work.check()


def test_our_graph_and_our_tensors() -> None:
    work = make_work("rms_norm")
    stream, graph = Stream("cuda:0"), Graph()
    ours = {key: Tensor.from_dlpack(value, stream) for key, value in work.inputs.items()}
    into = {key: Tensor.from_dlpack(value, stream) for key, value in work.into.items()}
    work.run(**ours, **into, stream=stream)
    torch.cuda.synchronize()
    with graph.capture(stream):
        work.run(**ours, **into, stream=stream)
    work.poison()
    graph.replay(stream)
    stream.synchronize()
    work.check()


def test_a_refusal_in_a_capture_leaves_it_usable() -> None:
    work = make_work("matmul")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(xrt.InputError, match="'b'"):
            xrt.ops.matmul(work.inputs["a"], work.inputs["b"].T)
        with pytest.raises(xrt.UnsupportedOperationError):
            xrt.ops.matmul(work.inputs["a"], work.inputs["b"], kernel="cpu.blas")
        work()
    work.poison()
    graph.replay()
    work.check()
