# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`fused_attention` and the operators under it: what PyTorch asks of an operator, and which kernel serves."""

from __future__ import annotations

import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from xpuruntime.pytorch.ops import fused_attention  # noqa: E402 - it needs PyTorch

pytestmark = pytest.mark.torch

ops = torch.ops.xpuruntime
sdpa = torch.nn.functional.scaled_dot_product_attention
FLASH = "ScaledDotProductFlashAttentionForCpuBackward0"
REFERENCE = "cpu.reference"


@pytest.fixture(autouse=True)
def _no_policy_is_left():
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    torch.manual_seed(0)
    yield
    xt.clear_kernel_policy()


def strict(word):
    return {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"attention": word}}


def operands(grad=False, dtype=torch.float32, kv_heads=4):
    shapes = ((2, 4, 5, 8), (2, kv_heads, 7, 8), (2, kv_heads, 7, 8))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def counts() -> dict[str, int]:
    results: dict[str, int] = {}
    for decision in xrt.decisions():
        results[decision.op] = results.get(decision.op, 0) + decision.count
    return results


def forward_arguments(grad, mask=None, rng=None, dropout_p=0.0, is_causal=False, kernel=REFERENCE, want_lse=True):
    return (*operands(grad), mask, rng, dropout_p, is_causal, None, kernel, want_lse, "", "")


FORWARD = {
    "gradients": lambda: forward_arguments(True, is_causal=True),
    "no gradients": lambda: forward_arguments(False, want_lse=False),
    "bool mask": lambda: forward_arguments(True, torch.rand(2, 1, 5, 7) > 0.3),
    "added mask": lambda: forward_arguments(True, torch.randn(5, 7)),
    "dropout": lambda: forward_arguments(True, rng=torch.tensor([3, 4]), dropout_p=0.4),
    "by the default": lambda: forward_arguments(True, kernel=""),
}


@pytest.mark.parametrize("case", FORWARD)
def test_opcheck_of_attention(case):
    torch.library.opcheck(ops.attention.default, FORWARD[case]())


def test_opcheck_of_attention_backward():
    q, k, v = operands(True)
    out, lse = ops.attention(*forward_arguments(False)[:3], *forward_arguments(False)[3:])
    arguments = (torch.randn_like(out), q, k, v, out, lse, None, None, 0.0, False, None, "", "")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the gradient of the gradient")
        torch.library.opcheck(ops.attention_backward.default, arguments)


@pytest.mark.parametrize("kernel", ["", REFERENCE, "torch.math"])
@pytest.mark.parametrize("more", [{}, {"is_causal": True}, {"attn_mask": torch.ones(5, 7).tril() > 0}])
def test_opcheck_of_fused_attention(kernel, more):
    torch.library.opcheck(ops.fused_attention.default, operands(True), {**more, "kernel": kernel})


@pytest.mark.parametrize("kernel", [None, REFERENCE, "torch", "torch.flash", "flash_v2", "torch.math", ["torch.math"]])
def test_every_kernel_gives_the_same(kernel):
    q, k, v = operands(True)
    expected = sdpa(q, k, v, is_causal=True, scale=0.2)
    found = fused_attention(q, k, v, None, 0.0, True, 0.2, kernel=kernel)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), (q, k, v)), torch.autograd.grad(expected.square().sum(), (q, k, v))
    )
    if kernel != REFERENCE:
        assert found.grad_fn.name() == ("UnsafeViewBackward0" if "torch.math" in (kernel or "") else FLASH)
    assert counts() == ({"attention": 1, "attention_backward": 1} if kernel == REFERENCE else {})


def test_grouped_heads_masks_and_other_numbers_of_dimensions():
    q, k, v = operands(kv_heads=2)
    mask = torch.rand(2, 1, 5, 7) > 0.3
    expected = sdpa(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(fused_attention(q, k, v, mask, enable_gqa=True, kernel=REFERENCE), expected)
    one = fused_attention(q[0], k[0], v[0], mask[0], enable_gqa=True, kernel=REFERENCE)
    torch.testing.assert_close(one, expected[0])


def test_a_policy_chooses_where_the_call_does_not():
    q, k, v = operands(True)
    for kernel, node in ((None, FLASH), ("torch.math", "UnsafeViewBackward0"), ("torch", FLASH), ("auto", FLASH)):
        with xt.kernel_policy(**({} if kernel is None else {"attention": kernel})):
            assert fused_attention(q, k, v).grad_fn.name() == node
    with xt.kernel_policy(matmul="cpu.reference"):
        assert fused_attention(q, k, v).grad_fn.name() == FLASH
    xrt.clear_decisions()
    with xt.kernel_policy(strict(REFERENCE)):
        fused_attention(q, k, v)
        assert fused_attention(q, k, v, kernel="torch.flash").grad_fn.name() == FLASH
    assert counts() == {"attention": 1}


def test_a_kernel_that_is_asked_for_serves_or_the_call_is_refused():
    q, k, v = operands()
    with pytest.raises(UnsupportedOperationError, match=r"asks for torch.cudnn, which cannot serve it"):
        fused_attention(q, k, v, kernel="torch.cudnn")
    with pytest.raises(
        UnsupportedOperationError,
        match=r"kernel= asks for .*(another kind of device|not in this build).*leave kernel= out",
    ):
        fused_attention(q, k, v, kernel="cuda_raw.flash_attention_v2")
    with pytest.raises(UnsupportedOperationError, match="v has a head_dim of 3"):
        fused_attention(q, k, v[..., :3], kernel=REFERENCE)
    fused_attention(q, k, v[..., :3], kernel=[REFERENCE, "torch"])
    fused_attention(q, k, v, kernel=["cudnn.sdpa", REFERENCE])
    assert counts() == {"attention": 1}


@pytest.mark.parametrize("kernel", ["flash", 3, [], [REFERENCE, 1], "cublas", ""])
def test_what_is_no_kernel_is_named(kernel):
    with pytest.raises(PolicyError, match="kernel="):
        fused_attention(*operands(), kernel=kernel)


def test_what_asks_is_named():
    q, k, v = operands()
    argument = r": kernel= asks for cudnn.sdpa, which .* Fix: name another kernel"
    with xt.kernel_policy(strict("cuda_raw.flash_attention_v2")):
        with pytest.raises(UnsupportedOperationError, match=argument):
            fused_attention(q, k, v, kernel="cudnn.sdpa")
        with pytest.raises(UnsupportedOperationError, match=r": kernels.attention asks for cuda_raw.* mode: prefer"):
            fused_attention(q, k, v)
    with xt.explain() as report:
        fused_attention(q, k, v, kernel=REFERENCE)
    assert [row.source for row in report.rows if row.op == "attention"] == ["kernel="]
    assert {decision.asked_by for decision in xrt.decisions()} == {"kernel="}


def test_a_mask_on_another_device_is_refused():
    """PyTorch takes one on meta beside a query on the CPU, and adds what the memory holds."""
    q, k, v = operands()
    with pytest.raises(InputError, match="attn_mask is on meta and query on cpu: move one to the other"):
        fused_attention(q, k, v, torch.zeros(q.shape[-2], k.shape[-2], device="meta"))


def test_autocast_casts_as_it_does_for_pytorchs_own():
    q, k, v = operands(True)
    mask = torch.randn(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        expected = sdpa(q, k, v, mask)
        for kernel in (None, REFERENCE, "torch.math"):
            found = fused_attention(q, k, v, mask, kernel=kernel)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
        double = fused_attention(*operands(dtype=torch.float64), kernel=REFERENCE)
    assert double.dtype == torch.float64
    found.float().sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("kernel", [REFERENCE, None])
def test_torch_compile_keeps_it_whole_for_any_length(kernel):
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(q, k, v):
        return fused_attention(q * 2, k, v, is_causal=True, kernel=kernel).sin()

    for length in (7, 6, 5):
        q, k, v = (x[:, :, :length].detach().requires_grad_() for x in operands())
        found = attend(q, k, v)
        expected = sdpa(q * 2, k, v, is_causal=True).sin()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), (q, k, v)),
                                   torch.autograd.grad(expected.sum(), (q, k, v)))  # fmt: skip
    assert counts() == ({} if kernel is None else {"attention": 3, "attention_backward": 3})


def test_an_exported_graph_obeys_the_policy_that_holds_when_it_runs():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fused_attention(q, k, v)

    tensors = tuple(operands())
    expected = sdpa(*tensors)
    with warnings.catch_warnings(), xt.kernel_policy(attention=REFERENCE):
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own export
        program = torch.export.export(Model(), tensors).run_decompositions()
    assert "xpuruntime.attention" in str(program.graph)
    xrt.clear_decisions()
    for kernel, ran in ((REFERENCE, {"attention": 1}), ("torch.math", {}), (None, {})):
        with xt.kernel_policy(**({} if kernel is None else {"attention": kernel})):
            xrt.clear_decisions()
            torch.testing.assert_close(program.module()(*tensors), expected)
            assert counts() == ran


def test_the_operator_says_what_it_needs():
    q, k, v = operands(True)
    with pytest.raises(InputError, match="pass want_lse=True"):
        ops.attention(q, k, v, None, None, 0.0, False, None, REFERENCE, False, "", "")
    rng = torch.tensor([1, 2])
    with pytest.raises(UnsupportedOperationError, match=r"with dropout cannot run by torch.math"):
        ops.attention(q, k, v, None, rng, 0.5, False, None, "torch.math", True, "", "")


def test_the_lse_is_the_same_whoever_computes_it():
    q, k, v = operands()
    for mask in (None, torch.rand(5, 7) > 0.4, torch.randn(2, 1, 5, 7)):
        ours = ops.attention(q, k, v, mask, None, 0.0, mask is None, None, REFERENCE, True, "", "")
        theirs = ops.attention(q, k, v, mask, None, 0.0, mask is None, None, "torch.math", True, "", "")
        torch.testing.assert_close(ours, theirs)


def test_under_the_transforms_of_torch_func():
    q, k, v = (torch.randn(3, 2, 4, 5, 8) for _ in range(3))
    masks = torch.rand(3, 5, 5) > 0.3

    def loss(q, k, v, mask):
        return fused_attention(q, k, v, mask, kernel=REFERENCE).square().sum()

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 2)), (0, 1, None, 0))(q, k.transpose(0, 1), v[0], masks)
    for n in range(3):
        grad, two = q[n].clone().requires_grad_(), v[0].clone().requires_grad_()
        expected = torch.autograd.grad(sdpa(grad, k[n], two, masks[n]).square().sum(), (grad, two))
        torch.testing.assert_close((found[0][n], found[1][n]), expected, rtol=1e-4, atol=1e-5)
    assert counts() == {"attention": 1, "attention_backward": 1}
