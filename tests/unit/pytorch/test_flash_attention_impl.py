# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Our kernel as an implementation in PyTorch's registry of flash attention, at the key of the CPU."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
pytest.importorskip("xpuruntime.pytorch")

from torch.nn import attention as torch_attention  # noqa: E402 - it needs PyTorch

from xpuruntime.pytorch.attention.flash_impl import FlashAttentionImpl, register_flash_attention  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides.registry import quiet_override_warning  # noqa: E402

pytestmark = pytest.mark.torch

flash = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture
def below():
    """PyTorch has this operator for CUDA alone; give it something on the CPU, which counts its calls."""
    calls: list[str] = []

    def forward(q, *args, **kwargs):
        calls.append("forward")
        one = torch.zeros(1)
        return torch.zeros_like(q), torch.zeros(q.shape[:3]), None, None, 1, 1, one, one, one

    def backward(grad_out, q, k, v, *args, **kwargs):
        calls.append("backward")
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    quiet_override_warning()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    xrt.clear_decisions()
    yield calls
    library._destroy()


def operands(head_dim=8):
    return [torch.randn(1, 2, 3, head_dim, requires_grad=True) for _ in range(3)]


def test_it_is_in_the_registry_once_it_is_registered():
    register_flash_attention()
    register_flash_attention()
    assert "xpuruntime" in torch_attention.list_flash_attention_impls()
    if not torch.backends.cuda.is_built():
        with pytest.raises(UnsupportedOperationError, match=r"built without CUDA. Fix: install one that has it"):
            torch_attention.activate_flash_attention_impl("xpuruntime")


def test_it_serves_forward_and_backward_under_pytorchs_own_gradient(below):
    q, k, v = operands()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    impl = FlashAttentionImpl("cpu.reference", "CPU")
    try:
        out = flash(q, k, v, 0.0, True)[0]
        assert out.grad_fn.name() == "ScaledDotProductFlashAttentionBackward0"
        torch.testing.assert_close(out, expected)
        grad = torch.autograd.grad(out.sum(), (q, k, v))
    finally:
        impl.remove()
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), (q, k, v)))
    assert [decision.chosen for decision in xrt.decisions()] == ["cpu.reference", "cpu.reference"]
    assert below == []
    flash(q, k, v)
    assert below == ["forward"]


def test_the_backward_drops_what_the_forward_dropped(below):
    q, k, _ = operands(3)
    v = torch.eye(3).expand(1, 2, 3, 3).clone().requires_grad_()
    impl = FlashAttentionImpl("cpu.reference", "CPU")
    try:
        torch.manual_seed(2)
        found = flash(q, k, v, 0.5)
        (gradient,) = torch.autograd.grad(found[0].sum(), v)
        torch.manual_seed(2)
        again = flash(q, k, v, 0.5)
    finally:
        impl.remove()
    assert found[6].dtype == torch.uint64
    assert torch.equal(found[0], again[0])
    torch.testing.assert_close(gradient, found[0].detach().sum(-2)[..., None].expand(1, 2, 3, 3))


def test_what_it_cannot_serve_is_left_with_a_word(below):
    impl = FlashAttentionImpl("cuda_raw.flash_attention_v2", "CPU")
    try:
        with pytest.warns(XpuRuntimeWarning, match="runs by PyTorch's FlashAttention 2, not by cuda_raw"):
            out = flash(*operands())[0]
        out.sum().backward()
    finally:
        impl.remove()
    assert below == ["forward", "backward"]
