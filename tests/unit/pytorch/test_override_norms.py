# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layer norm and RMS norm under a policy: results, statistics and gradients as PyTorch gives them."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
F = torch.nn.functional

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

aten = torch.ops.aten
KERNELS = ("cpu.reference", "cpu.vectorised")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-11, "atol": 1e-12},
    torch.bfloat16: {"rtol": 2e-2, "atol": 6e-2},
    torch.float16: {"rtol": 3e-3, "atol": 1e-2},
}
ALL = [True, True, True]


def served() -> list[tuple[str, str, int]]:
    return [(decision.op, decision.chosen, decision.count) for decision in xrt.decisions()]


def alike(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        torch.testing.assert_close(one, other, **tolerance)


def usable(kernel, dtype):
    return kernel == "cpu.reference" or dtype != torch.float64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("shape", "given"),
    [((1,), "both"), ((33,), "both"), ((2, 3), "weight"), ((2, 3), "none")],
    ids=str,
)
def test_layer_norm_and_its_gradient_are_those_of_pytorch(kernel, dtype, shape, given):
    if not usable(kernel, dtype):
        return
    x = torch.randn(4, 3, *shape).to(dtype)
    weight = torch.randn(shape).to(dtype) if given in ("both", "weight") else None
    bias = torch.randn(shape).to(dtype) if given in ("both", "bias") else None
    grad = torch.randn(x.shape).to(dtype)
    mask = [True, weight is not None, bias is not None]

    def run():
        norm = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        return [*norm, *aten.native_layer_norm_backward(grad, x, shape, *norm[1:], weight, bias, mask)]

    expected = run()
    with xt.kernel_policy(layer_norm=kernel):
        found = run()
    close = dict(CLOSE[dtype])
    if shape == (1,):
        close["atol"] = max(
            close["atol"], 1e-4
        )  # all variances are 0, and what is left of rounding is multiplied by 316
    alike(found, expected, **close)
    assert served() == [("layer_norm", kernel, 1), ("layer_norm_backward", kernel, 1)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_parameters_of_16_bit_inputs(kernel, dtype):
    x, grad = torch.randn(6, 8).to(dtype), torch.randn(6, 8).to(dtype)
    weight, bias = torch.randn(8), torch.randn(8)

    def run(*operands):
        x, grad, weight, bias = operands
        norm = aten.native_layer_norm(x, [8], weight, bias, 1e-5)
        return [*norm, *aten.native_layer_norm_backward(grad, x, [8], *norm[1:], weight, bias, ALL)]

    expected = run(x, grad, weight, bias)
    exact = run(*(one.double() for one in (x, grad, weight, bias)))
    with xt.kernel_policy(layer_norm=kernel):
        found = run(x, grad, weight, bias)
    for one, other, true in zip(found, expected, exact, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        # PyTorch rounds the gradients of fp32 parameters to 16 bits on the way; ours do not.
        assert (one.double() - true).abs().max() <= 1.01 * (other.double() - true).abs().max() + 1e-5
    assert {kernel for _, kernel, _ in served()} == {kernel}


@pytest.mark.parametrize("mask", [[a, b, c] for a in (True, False) for b in (True, False) for c in (True, False)])
def test_only_gradients_that_are_wanted_come_back(mask):
    x, weight, bias, grad = torch.randn(3, 8), torch.randn(8), torch.randn(8), torch.randn(3, 8)
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, bias, 1e-5)

    def run():
        return torch.ops.aten.native_layer_norm_backward(grad, x, [8], mean, rstd, weight, bias, mask)

    expected = run()
    with xt.kernel_policy(layer_norm="cpu.reference"):
        found = run()
    alike(found, expected, rtol=1e-5, atol=1e-5)


def test_kernels_by_phase_understand_each_other():
    model = torch.nn.LayerNorm((3, 8))
    x = torch.randn(4, 3, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    for forward, backward in (("cpu.reference", "torch"), ("torch", "cpu.vectorised"), KERNELS):
        rules = [
            {"match": {"op": "layer_norm", "phase": "backward"}, "use": backward},
            {"match": {"op": "layer_norm", "phase": "train"}, "use": forward},
        ]
        xrt.clear_decisions()
        with xt.kernel_policy(rules=rules):
            grad = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
        alike(grad, expected, rtol=1e-5, atol=1e-5)
        assert [kernel for _, kernel, _ in served()] == [side for side in (forward, backward) if side != "torch"]


def test_out_overloads():
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = aten.native_layer_norm(x, [8], weight, None, 1e-5)
    out = [torch.empty(0) for _ in range(3)]
    with xt.kernel_policy(layer_norm="cpu.reference"):
        aten.native_layer_norm.out(x, [8], weight, None, 1e-5, out0=out[0], out1=out[1], out2=out[2])
    alike(out, expected, rtol=1e-5, atol=1e-5)
    assert served() == [("layer_norm", "cpu.reference", 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("shape", "eps"), [((8,), None), ((2, 3), 1e-3)], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_and_its_gradient_are_those_of_pytorch(kernel, dtype, shape, eps, weighted):
    if not usable(kernel, dtype):
        return
    x = torch.randn(4, 3, *shape).to(dtype).requires_grad_()
    weight = torch.randn(shape).to(dtype).requires_grad_() if weighted else None
    wanted = (x, weight) if weighted else (x,)

    def run():
        out = F.rms_norm(x, shape, weight, eps)
        return [out, *torch.autograd.grad(out.float().square().sum(), wanted)]

    expected = run()
    with xt.kernel_policy(rms_norm=kernel):
        found = run()
    alike(found, expected, **CLOSE[dtype])
    assert served() == [("rms_norm", kernel, 1), ("rms_norm_backward", kernel, 1)]


def test_rms_norm_keeps_its_gradient_after_the_policy():
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    expected = torch.autograd.grad(F.rms_norm(x, [8], weight).square().sum(), (x, weight))
    with xt.kernel_policy(rms_norm="cpu.reference"):
        out = F.rms_norm(x, [8], weight)
    grad = torch.autograd.grad(out.square().sum(), (x, weight))
    alike(grad, expected, rtol=1e-5, atol=1e-5)
    assert "Fused" not in type(F.rms_norm(x, [8], weight).grad_fn).__name__


def test_rms_norm_of_complex_numbers_stays_pytorchs():
    x = torch.randn(3, 8, dtype=torch.complex64, requires_grad=True)
    expected = torch.autograd.grad(F.rms_norm(x, [8]).abs().sum(), x)
    with xt.kernel_policy(rms_norm="cpu.reference"):
        grad = torch.autograd.grad(F.rms_norm(x, [8]).abs().sum(), x)
    alike(grad, expected)
    assert served() == []


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_transforms(name):
    norm = getattr(F, name)
    x, weight = torch.randn(4, 3, 8), torch.randn(8)

    def loss(x, weight):
        return norm(x, [8], weight).square().sum()

    def run():
        each = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), (0, None))(x, weight)
        return [*each, *torch.func.jvp(loss, (x, weight), (x, weight)), *torch.func.jacrev(loss, (0, 1))(x, weight)]

    expected = run()
    with xt.kernel_policy(**{name: "cpu.reference"}):
        alike(run(), expected, rtol=1e-4, atol=1e-4)


def test_what_ours_cannot_do_is_said_or_refused():
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = F.layer_norm(x, [8])
    with (
        xt.kernel_policy(layer_norm="cpu.vectorised"),
        pytest.warns(
            XpuRuntimeWarning, match=r"runs by torch\.layer_norm.*computes in fp32.*Fix: add a rule .*use: torch"
        ),
    ):
        assert torch.equal(F.layer_norm(x, [8]), expected)
    strict = {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"layer_norm": "cpu.vectorised"}}
    with xt.kernel_policy(strict), pytest.raises(UnsupportedOperationError, match=r"kernels\.layer_norm asks for"):
        F.layer_norm(x, [8])
    with xt.kernel_policy(rules=[{"match": {"op": "layer_norm"}, "use": ["cpu.vectorised", "cpu.reference"]}]):
        F.layer_norm(x, [8])
    assert served() == [("layer_norm", "cpu.reference", 1)]


def compiled_norms(x, weight, bias):
    hidden = F.layer_norm(torch.relu(x) * 2, [8], weight, bias)
    return F.rms_norm(hidden + 1, [8], weight).square().sum()


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_keeps_the_kernels(dynamic):
    torch._dynamo.reset()
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((3, 8), 8, 8))
    operands = (x, weight, bias)
    expected = compiled_norms(*operands)
    gradients = torch.autograd.grad(expected, operands)
    with xt.kernel_policy(layer_norm="cpu.reference", rms_norm="cpu.vectorised"):
        function = torch.compile(compiled_norms, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        out = function(*operands)
        alike([out, *torch.autograd.grad(out, operands)], [expected, *gradients], rtol=1e-4, atol=1e-5)
        assert sorted(served()) == [
            ("layer_norm", "cpu.reference", 1),
            ("layer_norm_backward", "cpu.reference", 1),
            ("rms_norm", "cpu.vectorised", 1),
            ("rms_norm_backward", "cpu.vectorised", 1),
        ]
        with torch.no_grad():
            torch.testing.assert_close(function(*operands), expected)
    xrt.clear_decisions()
    torch.testing.assert_close(function(*operands), expected)
    assert served() == []


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.slow
def test_inductor_does_not_fuse_them_away():
    torch._dynamo.reset()
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((3, 8), 8, 8))
    expected = compiled_norms(x, weight, bias)
    with xt.kernel_policy(layer_norm="cpu.reference", rms_norm="cpu.vectorised"):
        out = torch.compile(compiled_norms, fullgraph=True)(x, weight, bias)
        out.backward()
    torch.testing.assert_close(out, expected)
    assert sum(count for *_, count in served()) == 4


def test_a_policy_that_leaves_norms_alone_leaves_them_to_the_compiler():
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    from torch._dynamo.backends.common import aot_autograd

    rules = [{"match": {"op": "layer_norm", "dtype": "bf16"}, "use": "cpu.reference"}]
    with xt.kernel_policy(rules=rules):
        function = torch.compile(lambda x: F.layer_norm(x, [8]), backend=aot_autograd(fw_compiler=keep))
        function(torch.randn(3, 8))
        function(torch.randn(3, 8).bfloat16())
    assert "native_layer_norm" in graphs[0]
    assert "xpuruntime.layer_norm" in graphs[1]
