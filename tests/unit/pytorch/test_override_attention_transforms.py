# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`scaled_dot_product_attention` under a policy inside compiled code, checkpoints and the transforms of autograd."""

from __future__ import annotations

import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from attention_calls import counts, operands, rule, sdpa, strict  # noqa: E402 - it needs PyTorch

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_of_attention_is_left")]


def test_a_checkpoint_draws_the_same_dropout_again():
    q, k, v = operands()
    q.requires_grad_()

    def attend(q):
        return sdpa(q, k, v, dropout_p=0.4)

    with xt.kernel_policy(strict("cpu.reference")):
        torch.manual_seed(3)
        (expected,) = torch.autograd.grad(attend(q).square().sum(), q)
        torch.manual_seed(3)
        out = torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False)
        (found,) = torch.autograd.grad(out.square().sum(), q)
    assert torch.equal(found, expected)


def test_rules_by_module_hold_in_compiled_code():
    class Block(torch.nn.Module):
        def forward(self, x):
            return sdpa(x, x, x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(), Block(), Block()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Model(), torch.randn(1, 2, 3, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    with xt.kernel_policy(strict(rules=[rule("cpu.reference", module="layers.1")])):
        for compiled in (model, lambda x: model(x)):
            xrt.clear_decisions()
            grad = torch.autograd.grad(torch.compile(compiled, backend="aot_eager", fullgraph=True)(x).sum(), x)
            torch.testing.assert_close(grad, expected)
            assert counts() == {"attention": 1, "attention_backward": 1}
            assert {decision.module for decision in xrt.decisions()} == {"layers.1"}


def test_a_compiled_graph_keeps_its_dropout_in_step():
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q):
        return sdpa(q, q, q, dropout_p=0.5)

    with xt.kernel_policy(strict("cpu.reference")):
        out = attend(q)
        (found,) = torch.autograd.grad(out.square().sum(), q)
        assert not torch.equal(attend(q), out)
    assert counts() == {"attention": 2, "attention_backward": 1}
    assert torch.isfinite(found).all()


def test_the_transforms_of_torch_func():
    q, k, v = operands(batch=1)
    many = torch.randn(3, *q.shape)

    def loss(a):
        return sdpa(a, k, v).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        gradient, mapped, both = (
            torch.func.grad(loss)(q),
            torch.vmap(loss)(many),
            torch.vmap(torch.func.grad(loss))(many),
        )
    with xt.kernel_policy(strict("cpu.reference")):
        torch.testing.assert_close(torch.func.grad(loss)(q), gradient)
        assert counts() == {"attention": 1, "attention_backward": 1}
        torch.testing.assert_close(torch.vmap(loss)(many), mapped)
        torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(many), both)
        assert counts() == {"attention": 3, "attention_backward": 2}
        torch.func.jacrev(lambda a: sdpa(a, k, v))(q[:, :1, :2].expand(1, 4, 2, 8))


def test_forward_mode_and_nested_gradients_are_pytorchs():
    q, k, v = (x[:, :1, :2] for x in operands(batch=1))
    with warnings.catch_warnings(), xt.kernel_policy(attention=["cpu.reference", "torch.math"]):
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        expected = torch.func.jvp(lambda a: torch.softmax(a @ k.mT / 8**0.5, -1) @ v, (q,), (q,))
        torch.testing.assert_close(torch.func.jvp(lambda a: sdpa(a, k, v), (q,), (q,)), expected)
        with torch.autograd.forward_ad.dual_level():
            out = sdpa(torch.autograd.forward_ad.make_dual(q, q), k, v)
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, expected[1])
        torch.func.hessian(lambda a: sdpa(a, k, v).sum())(q)
    assert counts() == {}
    with xt.kernel_policy(strict("cpu.reference")), pytest.raises(UnsupportedOperationError, match="forward-mode"):
        torch.func.jvp(lambda a: sdpa(a, k, v), (q,), (q,))


def test_no_forward_derivative_is_lost():
    q, k, v = operands(batch=1)
    mask, tangent = torch.randn(2, q.shape[-2], k.shape[-2])
    forward_ad = torch.autograd.forward_ad

    def derived(attend):
        with forward_ad.dual_level():
            of_mask = attend(q, k, v, forward_ad.make_dual(mask, tangent))
            of_query = attend(forward_ad.make_dual(q, q), k, v)
            return [forward_ad.unpack_dual(side).tangent for side in (of_mask, of_query)]

    def by_hand(q, k, v, mask=0):
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + mask, -1) @ v

    expected = derived(by_hand)
    with warnings.catch_warnings(), xt.kernel_policy(attention=["cpu.reference", "torch.math"]):
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        with forward_ad.dual_level():
            sdpa(q, k, v)  # by ours: a call of the same sizes with nothing to derive
        assert counts() == {"attention": 1}
        torch.testing.assert_close(derived(sdpa), expected)
    assert counts() == {"attention": 1}


def test_a_gradient_is_differentiated_again_by_math_with_a_word():
    tensors = [x.double().requires_grad_() for x in operands(1, 1, 1, 2, 3, 2)]
    with xt.kernel_policy(attention="cpu.reference"):
        assert torch.autograd.gradcheck(sdpa, tensors)
        with pytest.warns(XpuRuntimeWarning, match="gradient of the gradient of attention runs by torch.math"):
            assert torch.autograd.gradgradcheck(sdpa, tensors)
    q, k, v = tensors
    with xt.kernel_policy(strict("cpu.reference")):
        (first,) = torch.autograd.grad(sdpa(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(UnsupportedOperationError, match=r"no kernel but torch.math"):
            first.sum().backward()
    with xt.kernel_policy(attention="cpu.reference"):
        (first,) = torch.autograd.grad(sdpa(q, k, v, dropout_p=0.5).sum(), q, create_graph=True)
        with pytest.raises(UnsupportedOperationError, match="leave dropout out"):
            first.sum().backward()


def test_what_vmap_maps_may_require_gradients():
    """A mapped tensor does not say that gradients are recorded of what is inside of it."""
    q, k, v = operands()
    weight = torch.randn(q.shape[-1], q.shape[-1], requires_grad=True)

    def attend(q, k, v):
        return sdpa(q @ weight, k, v)

    (expected,) = torch.autograd.grad(attend(q, k, v).square().sum(), weight)
    with xt.kernel_policy(strict("cpu.reference")):
        out = torch.func.vmap(attend)(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))
        (found,) = torch.autograd.grad(out.square().sum(), weight)
        torch.testing.assert_close(found, expected)
        assert counts() == {"attention": 1, "attention_backward": 1}


@pytest.mark.parametrize("form", ["kernels", "rules"])
def test_compiled_code_keeps_to_a_kernel_of_pytorchs_and_explain_says_so(form):
    policy = strict("torch.flash") if form == "kernels" else strict(rules=[rule("torch.flash")])
    q, k, v = operands()
    q.requires_grad_()
    expected = torch.autograd.grad(sdpa(q, k, v).square().sum(), q)
    torch._dynamo.reset()
    compiled = torch.compile(sdpa, backend="aot_eager", fullgraph=True)
    with xt.kernel_policy(policy):
        torch.testing.assert_close(torch.autograd.grad(compiled(q, k, v).square().sum(), q), expected)
        with xt.explain() as report:
            compiled(q, k, v).square().sum().backward()
    rows = [row for row in report.rows if row.op == "attention"]
    assert {(row.resolved, row.status) for row in rows} == {("torch.flash", "honoured")}
    assert len(rows) == 2
    assert report.require(no_bypass=True, no_substitution=True) is report


def test_a_named_kernel_of_pytorchs_is_traced():
    from xpuruntime.pytorch.ops import fused_attention

    q, k, v = operands()
    torch._dynamo.reset()
    for dynamic in (False, True):
        compiled = torch.compile(
            lambda q, k, v: fused_attention(q, k, v, kernel="torch.flash"), backend="aot_eager", fullgraph=True,
            dynamic=dynamic,
        )  # fmt: skip
        torch.testing.assert_close(compiled(q, k, v), sdpa(q, k, v))


@pytest.mark.parametrize("mode", ["prefer", "strict"])
def test_explain_knows_the_kernel_of_mapped_attention(mode):
    q = torch.randn(3, 2, 4, 5, 8)
    per_sample = torch.func.vmap(torch.func.grad(lambda q: sdpa(q, q, q).sum()))
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sdpa(leaf, leaf, leaf).sum(), leaf)
    policy = xrt.Policy(mode=mode, kernels={"rules": [rule("torch.math")]})
    with xt.kernel_policy(policy), xt.explain() as report:
        result = per_sample(q)
    torch.testing.assert_close(result, expected)
    rows = [(row.phase, row.resolved, row.status) for row in report.rows if row.op == "attention"]
    assert sorted(rows) == [(phase, "torch.math", "honoured") for phase in ("backward", "train")]
    report.require(no_bypass=True, no_substitution=True)
