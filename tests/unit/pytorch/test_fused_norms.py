# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`fused_layernorm` and `fused_rms_norm`: as PyTorch's functions, differentiable, traceable, with a kernel named."""

from __future__ import annotations

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402 - it needs PyTorch

F = torch.nn.functional

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch
from xpuruntime.pytorch.ops import fused_layernorm, fused_rms_norm  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

operators = torch.ops.xpuruntime
SIZES = {"one": [8], "two": [2, 4]}
#: Kernels, and what a decision calls them; PyTorch's own leave none.
KERNELS = {"cpu.reference": "cpu.reference", "cpu.vectorised": "cpu.vectorised", "torch": None}


def chosen() -> set[str]:
    return {decision.chosen for decision in xrt.decisions()}


def leaf(*size, dtype=torch.float32):
    return torch.randn(size, dtype=dtype, requires_grad=True)


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("given", ["both", "weight", "bias", "none"])
def test_layernorm_with_a_kernel_named(kernel, shape, given):
    x = leaf(3, *shape)
    weight = leaf(*shape) if given in ("both", "weight") else None
    bias = leaf(*shape) if given in ("both", "bias") else None
    wanted = [one for one in (x, weight, bias) if one is not None]
    expected = F.layer_norm(x, shape, weight, bias)
    gradients = torch.autograd.grad(expected.square().sum(), wanted)
    found = fused_layernorm(x, shape, weight, bias, kernel=kernel)
    close(found, expected)
    close(torch.autograd.grad(found.square().sum(), wanted), gradients)
    assert chosen() == ({KERNELS[kernel]} if KERNELS[kernel] else set())
    assert sum(decision.count for decision in xrt.decisions()) == (2 if KERNELS[kernel] else 0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_with_a_kernel_named(kernel, weighted):
    x, weight = leaf(3, 2, 4), leaf(2, 4) if weighted else None
    wanted = [side for side in (x, weight) if side is not None]
    expected = F.rms_norm(x, [2, 4], weight)
    gradients = torch.autograd.grad(expected.square().sum(), wanted)
    norm = fused_rms_norm(x, [2, 4], weight, kernel=kernel)
    close(norm, expected)
    close(torch.autograd.grad(norm.square().sum(), wanted), gradients)
    assert chosen() == ({KERNELS[kernel]} if KERNELS[kernel] else set())


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@pytest.mark.parametrize("rms", [False, True])
def test_a_residual_is_added_and_the_sum_comes_back(kernel, rms):
    x, residual, weight = leaf(3, 8), leaf(3, 8), leaf(8)
    norm = F.rms_norm if rms else F.layer_norm
    fused = fused_rms_norm if rms else fused_layernorm

    def loss(out, total):
        return out.square().sum() + total.pow(3).sum()

    wanted = (x, residual, weight)
    expected = (norm(x + residual, [8], weight), x + residual)
    found = fused(x, [8], weight, residual=residual, kernel=kernel)
    close(found, expected)
    close(torch.autograd.grad(loss(*found), wanted), torch.autograd.grad(loss(*expected), wanted), 1e-4)
    expected = norm(x + residual, [8], weight)
    out, total = fused(x, [8], weight, residual=residual, kernel=kernel)
    close(torch.autograd.grad(total.sum(), residual, retain_graph=True)[0], torch.ones_like(x))
    close(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


def test_the_policy_chooses_and_a_name_overrules_it():
    x, weight = leaf(3, 8), leaf(8)
    with xt.kernel_policy(layer_norm="cpu.reference", rms_norm="cpu.reference"):
        fused_layernorm(x, [8], weight).sum().backward()
        fused_rms_norm(x, [8], weight).sum().backward()
        fused_layernorm(x, [8], weight, residual=x)[0].sum().backward()
        assert chosen() == {"cpu.reference"}
        assert sum(decision.count for decision in xrt.decisions()) == 6
        xrt.clear_decisions()
        fused_layernorm(x, [8], weight, kernel="cpu.vectorised").sum().backward()
        assert chosen() == {"cpu.vectorised"}
        xrt.clear_decisions()
        fused_rms_norm(x, [8], weight, kernel="torch").sum().backward()
        assert chosen() == set()
    with xt.kernel_policy(layer_norm="torch", rms_norm="torch"):
        fused_layernorm(x, [8], weight, kernel="cpu.reference").sum().backward()
    assert chosen() == {"cpu.reference"}


def test_rules_by_phase():
    x, residual = leaf(3, 8), leaf(3, 8)
    rules = [
        {"match": {"op": "layer_norm", "phase": "backward"}, "use": "cpu.reference"},
        {"match": {"op": "layer_norm", "phase": "train"}, "use": "cpu.vectorised"},
        {"match": {"op": "layer_norm", "phase": "infer"}, "use": "torch"},
    ]
    with xt.kernel_policy(rules=rules):
        fused_layernorm(x, [8], residual=residual)[0].sum().backward()
        assert [decision.chosen for decision in xrt.decisions()] == ["cpu.vectorised", "cpu.reference"]
        xrt.clear_decisions()
        with torch.no_grad():
            fused_layernorm(x, [8], residual=residual)
        assert chosen() == set()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_types_and_fp32_parameters(dtype):
    x, residual = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype)
    tolerance = 1e-6 if dtype == torch.float64 else 3e-2
    for weight in (torch.randn(8).to(dtype), torch.randn(8)):
        if dtype == torch.float64 and weight.dtype != dtype:
            continue
        for fused, norm in ((fused_layernorm, F.layer_norm), (fused_rms_norm, F.rms_norm)):
            exact = norm((x + residual).double(), [8], weight.double())
            out, total = fused(x, [8], weight, residual=residual)
            assert out.dtype == total.dtype == dtype
            close(out.double(), exact, tolerance)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("kernel", ["cpu.reference", "torch"])
def test_gradients_of_gradients(residual, kernel):
    x, more = leaf(2, 5, dtype=torch.float64), leaf(2, 5, dtype=torch.float64)
    weight, bias = leaf(5, dtype=torch.float64), leaf(5, dtype=torch.float64)

    def layer(x, more, weight, bias):
        return fused_layernorm(x, [5], weight, bias, residual=more if residual else None, kernel=kernel)

    def rms(x, more, weight):
        return fused_rms_norm(x, [5], weight, 1e-3, residual=more if residual else None, kernel=kernel)

    more.requires_grad_(residual)
    for function, operands in ((layer, (x, more, weight, bias)), (rms, (x, more, weight))):
        assert torch.autograd.gradcheck(function, operands, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, operands, fast_mode=True)


@pytest.mark.parametrize("kernel", [None, "cpu.reference"])
def test_transforms(kernel):
    x, weight = torch.randn(4, 3, 8), torch.randn(8)
    for fused, norm in ((fused_layernorm, F.layer_norm), (fused_rms_norm, F.rms_norm)):

        def ours(x, w, fused=fused):
            return fused(x, [8], w, kernel=kernel)

        def theirs(x, w, norm=norm):
            return norm(x, [8], w)

        def derived(function):
            def loss(x, w):
                return function(x, w).square().sum()

            return [
                torch.vmap(function, (0, None))(x, weight),
                torch.vmap(function, (1, 0), 1)(x.transpose(0, 1), weight.expand(4, 8) * 2),
                torch.vmap(torch.func.grad(loss, (0, 1)), (0, None))(x, weight),
                torch.func.jacrev(torch.func.grad(loss))(x[0, :1], weight),
            ]

        close(derived(ours), derived(theirs), 1e-4)


@pytest.mark.parametrize("recorded", [False, True], ids=["inferring", "training"])
@pytest.mark.parametrize("held", [None, "cpu.reference"])
@pytest.mark.parametrize("rms", [False, True])
def test_forward_mode_with_a_residual(rms, held, recorded):
    x, more, weight, tangent = torch.randn(2, 5), torch.randn(2, 5), torch.randn(5), torch.randn(2, 5)
    weight.requires_grad_(recorded)
    fused, norm = (fused_rms_norm, F.rms_norm) if rms else (fused_layernorm, F.layer_norm)
    with forward_ad.dual_level(), xt.kernel_policy(layer_norm=held, rms_norm=held):
        dual = forward_ad.make_dual(x, tangent)
        found = fused(dual, [5], weight, residual=more)
        expected = (norm(dual + more, [5], weight), dual + more)
        for ours, theirs in zip(found, expected, strict=True):
            close(forward_ad.unpack_dual(ours).tangent, forward_ad.unpack_dual(theirs).tangent)


@pytest.mark.parametrize("kernel", ["cpu.reference", "torch"])
@pytest.mark.parametrize("fused", [fused_layernorm, fused_rms_norm])
def test_a_kernel_that_is_named_loses_no_forward_derivative(fused, kernel):
    x, weight = torch.randn(2, 5), torch.randn(5)
    with forward_ad.dual_level():
        for given in ((forward_ad.make_dual(x, x), [5], weight), (x, [5], forward_ad.make_dual(weight, weight))):
            with pytest.raises(UnsupportedOperationError, match="leave kernel= out"):
                fused(*given, kernel=kernel)
        close(fused(x, [5], weight, kernel=kernel), fused(x, [5], weight, kernel="torch"))


@pytest.mark.parametrize("kernel", [None, "cpu.reference"])
@pytest.mark.parametrize("fused", [fused_layernorm, fused_rms_norm])
def test_transforms_in_compiled_code(fused, kernel):
    torch._dynamo.reset()
    x = torch.randn(4, 3, 8)

    def derived(x):
        def loss(x):
            out, total = fused(x, [8], residual=x, kernel=kernel)
            return (out * total).sum()

        return torch.vmap(torch.func.grad(loss))(x)

    close(torch.compile(derived, backend="aot_eager", fullgraph=kernel is None)(x), derived(x))
    if kernel is not None:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="leave kernel= out"):
            torch.compile(derived, backend="aot_eager", fullgraph=True)(x)


def samples():
    x, residual, weight, bias = leaf(3, 8), leaf(3, 8), leaf(8), leaf(8)
    plain = [one.detach() for one in (x, residual, weight, bias)]
    _, total, mean, rstd = operators.layer_norm(plain[0], plain[1], [8], *plain[2:], 1e-5, "", "infer")
    flipped = torch.randn(8, 3).mT.requires_grad_()
    rest = (mean, rstd, *plain[2:])
    layer = operators.layer_norm.default
    rms = operators.rms_norm.default
    back = operators.layer_norm_backward.default
    rms_back = operators.rms_norm_backward.default
    return {
        "layer": (layer, (x, None, [8], weight, bias, 1e-5, "", "train")),
        "layer, residual": (layer, (x, residual, [8], weight, None, 1e-5, "cpu.reference", "train")),
        "layer, two dimensions": (layer, (x, None, [3, 8], None, None, 1e-5, "torch", "train")),
        "layer, no gradient": (layer, (plain[0], plain[1], [8], plain[2], None, 1e-5, "", "train")),
        "layer, bf16": (layer, (plain[0].bfloat16(), None, [8], None, None, 1e-5, "", "train")),
        "layer, bf16 by fp32": (layer, (plain[0].bfloat16(), None, [8], plain[2], plain[3], 1e-5, "", "train")),
        "layer, transposed": (layer, (flipped, None, [8], weight, bias, 1e-5, "", "train")),
        "rms": (rms, (x, None, [8], weight, None, "", "infer")),
        "rms, residual": (rms, (x, residual, [8], None, 1e-3, "torch", "infer")),
        "rms, fp64": (rms, (x.detach().double(), None, [8], None, 1e-3, "", "infer")),
        "layer backward": (back, (plain[1], None, total, [8], *rest, [True] * 3, "")),
        "layer backward, sum": (back, (plain[1], plain[0], total, [8], *rest, [True, False, False], "")),
        "layer backward, torch": (back, (plain[1], plain[0], total, [8], *rest, [True] * 3, "torch")),
        "layer backward, parameters": (back, (plain[1], None, total, [8], *rest, [False, True, True], "")),
        "rms backward": (rms_back, (plain[1], None, total, [8], rstd, plain[2], [True, True], "")),
        "rms backward, torch": (rms_back, (plain[1], plain[0], total, [8], rstd, plain[2], [True, True], "torch")),
    }  # fmt: skip


@pytest.mark.parametrize("name", samples())
def test_opcheck(name):
    operator, arguments = samples()[name]
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def fused_both(x, residual, weight, bias):
    out, total = fused_layernorm(x * 2, [8], weight, bias, residual=residual)
    return fused_rms_norm(out, [8], weight).square().sum() + total.sum()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("held", [False, True])
def test_compiled(dynamic, held):
    torch._dynamo.reset()
    operands = (leaf(3, 8), leaf(3, 8), leaf(8), leaf(8))
    expected = fused_both(*operands)
    gradients = torch.autograd.grad(expected, operands)
    kernels = {"layer_norm": "cpu.reference", "rms_norm": "cpu.reference"} if held else {}
    with xt.kernel_policy(**kernels):
        xrt.clear_decisions()
        function = torch.compile(fused_both, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        out = function(*operands)
        close([out, *torch.autograd.grad(out, operands)], [expected, *gradients], 1e-4)
        assert chosen() == ({"cpu.reference"} if held else {"cpu.vectorised"})
        assert sum(decision.count for decision in xrt.decisions()) == 4
        more = (leaf(7, 8), leaf(7, 8), *operands[2:])
        close(function(*more), fused_both(*more), 1e-4)


def test_export_keeps_them():
    class Module(torch.nn.Module):
        def forward(self, x, residual):
            return fused_layernorm(x, [8], residual=residual)

    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    program = torch.export.export(Module(), (x, residual))
    assert "xpuruntime.layer_norm" in str(program.graph)
    close(program.module()(x, residual), fused_layernorm(x, [8], residual=residual))


def test_autocast_on_cpu_is_that_of_pytorch():
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused_layernorm(x, [8], weight).dtype == F.layer_norm(x, [8], weight).dtype == torch.bfloat16


ONE_SIZE = [8, np.int64(8), torch.tensor(8), np.array(8), (np.int32(8),), [torch.tensor(8)], np.array([8])]


@pytest.mark.parametrize("size", ONE_SIZE, ids=repr)
def test_a_size_is_any_integer(size):
    x = torch.randn(3, 8)
    close(fused_layernorm(x, size), F.layer_norm(x, [8]))
    close(fused_rms_norm(x, size), F.rms_norm(x, [8]))


X = torch.ones(3, 8)
WRONG = {
    "input": (lambda: fused_layernorm([1.0], [1]), InputError, "input is list. Fix: give a torch.Tensor"),
    "integers": (lambda: fused_layernorm(X.int(), [8]), InputError, "input is torch.int32. Fix: give float64, float32"),
    "no shape": (lambda: fused_layernorm(X, []), InputError, "normalized_shape is empty"),
    "shape": (lambda: fused_rms_norm(X, [7]), InputError, r"input is \[3, 8\] and normalized_shape \[7\]"),
    "no sizes": (lambda: fused_layernorm(X, 8.0), InputError, "normalized_shape is 8.0. Fix: give a size"),
    "no whole sizes": (lambda: fused_rms_norm(X, [8.0]), InputError, r"normalized_shape is \[8.0\]. Fix: give a size"),
    "long shape": (lambda: fused_rms_norm(X, [1, 3, 8]), InputError, r"normalized_shape \[1, 3, 8\]"),
    "weight": (lambda: fused_layernorm(X, [8], X), InputError, r"weight is \[3, 8\]. Fix: give \[8\]"),
    "bias": (lambda: fused_layernorm(X, [8], X[0], 1.0), InputError, "bias is float"),
    "dtype": (lambda: fused_layernorm(X, [8], X[0].double()), InputError, "weight is torch.float64. Fix: give torch.f"),
    "residual": (lambda: fused_rms_norm(X, [8], residual=X[0]), InputError, r"residual is \[8\]. Fix: give \[3, 8\]"),
    "residual dtype": (lambda: fused_rms_norm(X, [8], residual=X.half()), InputError, "residual is torch.float16"),
    "device": (lambda: fused_rms_norm(X, [8], X[0].to("meta")), InputError, "weight is on meta and input on cpu"),
    "kernel": (lambda: fused_layernorm(X, [8], kernel="flash_v2"), PolicyError, "kernel of attention, not of layer_n"),
    "other kernel": (lambda: fused_rms_norm(X, [8], kernel="cpu.blas"), PolicyError, "kernel of matmul, not of rms_n"),
    "no kernel": (lambda: fused_rms_norm(X, [8], kernel=3), PolicyError, "3 is no name of a kernel"),
    "unable": (
        lambda: fused_layernorm(X.double(), [8], kernel="cpu.vectorised"),
        UnsupportedOperationError,
        "computes in fp32",
    ),
    "elsewhere": (lambda: fused_layernorm(X, [8], kernel="cuda_raw.layer_norm"), UnsupportedOperationError, "cuda_raw"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()


def test_a_refusal_by_a_policy_names_the_operator():
    x = torch.randn(3, 8)
    policy = xrt.Policy(mode="strict", kernels={"layer_norm": "cuda_raw.layer_norm"})
    with xt.kernel_policy(policy):
        with pytest.raises(
            UnsupportedOperationError, match=r"^xpuruntime::layer_norm of .*: kernels.layer_norm asks for"
        ):
            fused_layernorm(x, [8], residual=x)
        with pytest.raises(UnsupportedOperationError, match=r"as kernel= demands"):
            fused_layernorm(x, [8], kernel="cuda_raw.layer_norm")
