# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Norms under a policy on CUDA: results, statistics and gradients as PyTorch gives them; fused and compiled."""

from __future__ import annotations

import uuid

import pytest
import torch
from torch.nn import functional

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch.ops import fused_layernorm, fused_rms_norm

pytestmark = pytest.mark.torch

aten = torch.ops.aten
OURS = {"layer_norm": "cuda_raw.layer_norm", "rms_norm": "cuda_raw.rms_norm"}
CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 6e-2},
    torch.float16: {"rtol": 3e-3, "atol": 2e-2},
}
SHAPES = [(8,), (4, 24), (1000,), (4096,), (16384,)]


def _no_cache():
    """Have Inductor compile anew: what an earlier run left on disk may be of another state of these sources."""
    return torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)


@pytest.fixture(autouse=True)
def _clean():
    torch.manual_seed(0)
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    yield
    xt.clear_kernel_policy()


def served() -> list[tuple[str, str, int]]:
    return [(decision.op, decision.chosen, decision.count) for decision in xrt.decisions()]


def alike(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        torch.testing.assert_close(one, other, **tolerance)


def draw(*size, dtype=torch.float32):
    return torch.randn(size, device="cuda").to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("parameters", [True, False])
def test_layer_norm_and_its_gradient_are_those_of_pytorch(shape, dtype, parameters):
    x, grad = draw(5, 7, *shape, dtype=dtype), draw(5, 7, *shape, dtype=dtype)
    weight, bias = (draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)) if parameters else (None, None)
    mask = [True, parameters, parameters]

    def run():
        norm = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        grads = aten.native_layer_norm_backward(grad, x, shape, *norm[1:], weight, bias, mask)
        return [*norm, *(grad for grad in grads if grad is not None)]

    expected = run()
    with xt.kernel_policy(**OURS):
        found = run()
    alike(found, expected, **CLOSE[dtype])
    kernel = OURS["layer_norm"]
    assert served() == [("layer_norm", kernel, 1), ("layer_norm_backward", kernel, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_and_its_gradient_are_those_of_pytorch(shape, dtype, eps):
    x, weight = draw(5, 7, *shape, dtype=dtype).requires_grad_(), draw(*shape, dtype=dtype).requires_grad_()
    grad = draw(5, 7, *shape, dtype=dtype)

    def run():
        out = functional.rms_norm(x, shape, weight, eps)
        return [out, *torch.autograd.grad(out, (x, weight), grad)]

    expected = run()
    with xt.kernel_policy(**OURS):
        found = run()
    alike(found, expected, **CLOSE[dtype])
    kernel = OURS["rms_norm"]
    assert served() == [("rms_norm", kernel, 1), ("rms_norm_backward", kernel, 1)]


def test_statistics_of_rms_norm_are_those_of_pytorch():
    x, weight = draw(4, 64, dtype=torch.bfloat16), draw(64, dtype=torch.bfloat16)
    expected = aten._fused_rms_norm(x, [64], weight, None)
    with xt.kernel_policy(**OURS):
        norm = aten._fused_rms_norm(x, [64], weight, None)
    alike(norm, expected, **CLOSE[torch.bfloat16])


def test_kernels_by_phase_understand_each_other():
    model = torch.nn.LayerNorm(256).cuda()
    x = draw(64, 256).requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    for forward, backward in ((OURS["layer_norm"], "torch"), ("torch", OURS["layer_norm"])):
        rules = [
            {"match": {"op": "layer_norm", "phase": "backward"}, "use": backward},
            {"match": {"op": "layer_norm", "phase": "train"}, "use": forward},
        ]
        xrt.clear_decisions()
        with xt.kernel_policy(rules=rules):
            grad = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
        alike(grad, expected, rtol=1e-4, atol=1e-3)
        assert len(served()) == 1


def test_autocast_computes_in_fp32():
    model = torch.nn.LayerNorm(64).cuda()
    x = draw(8, 64, dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        expected = model(x)
        with xt.kernel_policy(**OURS):
            found = model(x)
            assert fused_layernorm(x, [64], model.weight, model.bias).dtype == torch.float32
            assert fused_rms_norm(x, [64], kernel=OURS["rms_norm"]).dtype == torch.float32
    assert found.dtype == expected.dtype == torch.float32
    alike([found], [expected], **CLOSE[torch.float32])


def test_another_stream_and_a_graph():
    model = torch.nn.LayerNorm(512).cuda()
    x = draw(64, 512)
    expected = model(x)
    with xt.kernel_policy(**OURS), torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                found = model(x)
        torch.cuda.current_stream().wait_stream(stream)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        x.copy_(torch.roll(x, 1, 0))
        graph.replay()
        torch.testing.assert_close(captured, torch.roll(expected, 1, 0), rtol=1e-4, atol=1e-4)


def norms(x, weight, bias):
    hidden = functional.layer_norm(torch.relu(x) * 2, [256], weight, bias)
    return functional.rms_norm(hidden + 1, [256], weight).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_does_not_fuse_them_away(dtype):
    torch._dynamo.reset()
    operands = [draw(*size, dtype=dtype).requires_grad_() for size in ((64, 256), (256,), (256,))]
    expected = norms(*operands)
    gradients = torch.autograd.grad(expected, operands)
    with _no_cache(), xt.kernel_policy(**OURS):
        xrt.clear_decisions()
        out = torch.compile(norms, fullgraph=True)(*operands)
        found = [out, *torch.autograd.grad(out, operands)]
    alike(found, [expected, *gradients], **CLOSE[dtype])
    assert {(op, kernel) for op, kernel, _ in served()} == {
        ("layer_norm", OURS["layer_norm"]),
        ("layer_norm_backward", OURS["layer_norm"]),
        ("rms_norm", OURS["rms_norm"]),
        ("rms_norm_backward", OURS["rms_norm"]),
    }


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rms", [False, True])
def test_fused_with_a_residual(rms, weight_dtype):
    x, residual = (draw(32, 768, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    weight = draw(768, dtype=weight_dtype).requires_grad_()
    fused, norm = (fused_rms_norm, functional.rms_norm) if rms else (fused_layernorm, functional.layer_norm)

    def loss(out, total):
        return (out.float().square().mean() + total.float().pow(3).mean()) * 100

    out, total = fused(x, [768], weight, residual=residual)
    grad = torch.autograd.grad(loss(out, total), (x, residual, weight))
    exact = [one.detach().double().requires_grad_() for one in (x, residual, weight)]
    true = norm(exact[0] + exact[1], [768], exact[2])
    expected = torch.autograd.grad(loss(true, exact[0] + exact[1]), exact)
    torch.testing.assert_close(out.double(), true, rtol=3e-2, atol=3e-2)
    for one, other in zip(grad, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3e-2, atol=3e-2)
    kernel = OURS["rms_norm" if rms else "layer_norm"]
    assert {chosen for _, chosen, _ in served()} == {kernel}


def test_what_ours_cannot_do():
    x = draw(4, 8, dtype=torch.float64)
    with pytest.raises(UnsupportedOperationError, match="not float64"):
        fused_layernorm(x, [8], kernel=OURS["layer_norm"])
    torch.testing.assert_close(fused_layernorm(x, [8]), functional.layer_norm(x, [8]))


@pytest.mark.parametrize("rms", [False, True])
def test_opcheck(rms):
    x, residual, weight = (draw(*size).requires_grad_() for size in ((8, 64), (8, 64), (64,)))
    operators = torch.ops.xpuruntime
    arguments = (x, residual, [64], weight, 1e-5) if rms else (x, residual, [64], weight, None, 1e-5)
    operator = operators.rms_norm.default if rms else operators.layer_norm.default
    assert set(torch.library.opcheck(operator, (*arguments, "", "train")).values()) == {"SUCCESS"}
