# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of installed packages on a CUDA device: named, chosen by measured times, and replayed from a graph."""

from __future__ import annotations

import time

import pytest
import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch
from xpuruntime.ops.torch_kernels import find_torch_kernel, missing_distributions
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch import step_cost
from xpuruntime.pytorch.providers.operators import perform

pytestmark = [  # of these packages, as they are imported and compile
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
F = torch.nn.functional
DEVICE = torch.device("cuda", 0)


SHAPES = {
    "rms_norm": ((64, 1024), (1024,)),
    "attention": ((2, 4, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64)),
    "cross_entropy": ((64, 1024),),
    "linear_cross_entropy": ((64, 128), (1024, 128)),
    "swiglu": ((64, 1024), (64, 1024)),
}
WORDS = (
    ("rms_norm", "quack.rms_norm"), ("rms_norm", "liger.rms_norm"), ("attention", "fa4.attention"),
    ("cross_entropy", "quack.cross_entropy"), ("cross_entropy", "liger.cross_entropy"), ("swiglu", "liger.swiglu"),
    ("linear_cross_entropy", "quack.linear_cross_entropy"), ("linear_cross_entropy", "compiled.linear_cross_entropy"),
)  # fmt: skip
TARGET = torch.arange(64) * 7


def operands(op):
    torch.manual_seed(0)
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for shape in SHAPES[op]]


def step(op, leaves):
    """Return what an operation computes of these leaves, and their gradients."""
    if op == "rms_norm":
        out = F.rms_norm(leaves[0], (1024,), leaves[1], 1e-6)
    elif op == "attention":
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    elif op == "cross_entropy":
        out = F.cross_entropy(leaves[0], TARGET)
    elif op == "linear_cross_entropy":
        out = perform(op, {"x": leaves[0], "weight": leaves[1], "target": TARGET}, {})
    else:
        out = perform(op, {"gate": leaves[0], "up": leaves[1]}, {})
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def assert_near(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        scale = float(y.abs().max())
        torch.testing.assert_close(x.double() / scale, y.double() / scale, rtol=0, atol=2e-2)


@pytest.fixture(autouse=True, params=WORDS, ids=lambda pair: pair[1])
def case(request, monkeypatch):
    """Return an operation, a kernel of an installed package, and what PyTorch computes."""
    op, word = request.param
    if missing := missing_distributions(find_torch_kernel(word, op)):
        pytest.skip(missing)
    monkeypatch.setitem(globals(), "TARGET", TARGET.to(DEVICE))
    return op, word, step(op, operands(op))


def strict(op, word):
    return xrt_torch.kernel_policy(xrt.Policy(mode="strict", kernels={op: word}))


def test_it_serves_forward_and_backward(case):
    op, word, wanted = case
    with strict(op, word), xrt_torch.explain() as found:
        results = step(op, operands(op))
    assert_near(results, wanted)
    assert {(row.phase, row.resolved) for row in found.rows if row.op == op} == {("train", word), ("backward", word)}


def test_auto_measures_it(case, nothing_is_tuned):
    op, word, wanted = case
    with xrt_torch.kernel_policy(xrt.KernelPolicy(**{op: "auto"}, auto_strategy="best_performance")):
        assert_near(step(op, operands(op)), wanted)
        assert_near(step(op, operands(op)), wanted)
    assert word in nothing_is_tuned.read_text()


def test_a_graph_replays_it(case):
    op, word, wanted = case
    if find_torch_kernel(word, op).capturable is not True:
        pytest.skip(f"{word} cannot be captured")
    leaves = operands(op)
    with strict(op, word):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(op, leaves)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(op, leaves)
    graph.replay()
    assert_near(captured, wanted)


def test_the_device_does_not_wait_for_what_a_first_call_compiles(monkeypatch):
    calls, waits = [], []
    occupy = _private_api.occupy_stream
    monkeypatch.setattr(_private_api, "occupy_stream", lambda cycles: (waits.append(cycles), occupy(cycles)))
    x = torch.ones(8, device=DEVICE)

    def run():
        if not calls:
            time.sleep(0.5)
        calls.append(x + 1)

    step_cost.time_on_cuda(run, DEVICE, 7)
    assert max(waits) < 1e9


def test_whether_a_step_waits_for_the_device_and_what_a_call_holds_are_observed():
    torch.cuda.synchronize()
    waiting, idle = step_cost.StepLag(DEVICE), step_cost.StepLag(DEVICE)
    waiting._APART = idle._APART = 0.0
    for _ in range(25):
        idle.observe()
        torch.cuda.synchronize()
    assert (idle.behind, idle.settled) == (False, True)
    _private_api.occupy_stream(1 << 30)  # for about half a second
    assert [waiting.observe() for _ in range(4)] == [False, False, False, True]
    assert waiting.behind
    torch.cuda.synchronize()
    x = torch.randn(1 << 20, device=DEVICE, requires_grad=True)

    def work():
        x.exp().sum().backward()
        x.grad = None

    assert 2 * x.nbytes <= step_cost.peak_bytes(work, DEVICE) <= 3 * x.nbytes
