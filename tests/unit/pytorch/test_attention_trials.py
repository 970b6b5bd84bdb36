# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is measured where a tuned policy chooses a kernel of attention: the same work, native or ours."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime import _core  # noqa: E402
from xpuruntime.pytorch import tuning  # noqa: E402
from xpuruntime.pytorch.attention import trials  # noqa: E402
from xpuruntime.pytorch.attention.call import AttentionCall  # noqa: E402
from xpuruntime.pytorch.held import current  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards", "decisions_of_this_test")]

F = torch.nn.functional


def place():
    return current().place("attention", "cpu.reference", "policy", "", allow_tf32=False, deterministic=False)


def operands(needs_grad, kv_heads=4):
    torch.manual_seed(0)
    shapes = ((2, 4, 8, 16), (2, kv_heads, 8, 16), (2, kv_heads, 8, 16))
    return tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=needs_grad) for shape in shapes)


@pytest.mark.parametrize(
    ("causal", "scale", "masked", "kv_heads"), [(False, None, False, 4), (True, 0.3, False, 2), (False, None, True, 4)]
)
def test_ours_gives_the_result_and_the_gradients(causal, scale, masked, kv_heads, monkeypatch):
    q, k, v = operands(True, kv_heads)
    mask = torch.randn(8, 8, dtype=torch.float64) if masked else None
    grouped = kv_heads != 4
    call = AttentionCall(q, k, v, mask, 0.0, causal, scale, enable_gqa=grouped, needs_grad=True)
    seen = []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda out, xs, g: seen.append((out, real(out, xs, g))))

    def native():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)

    trials.natively(call, native)
    with xt.kernel_policy(xrt.KernelPolicy(matmul="cpu.blas")):
        trials.ours(call, place(), (q, k, v))
    (expected, gradients), (found, ours) = seen
    torch.testing.assert_close(found, expected)
    for one, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert [x.grad for x in (q, k, v)] == [None] * 3


def test_without_a_gradient_none_is_computed(monkeypatch):
    q, k, v = operands(False)
    call = AttentionCall(q, k, v, None, 0.0, False, None, enable_gqa=False, needs_grad=False)

    def never(*_):
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(_core, "op_attention_backward", never)
    monkeypatch.setattr(torch.autograd, "grad", never)
    with xt.kernel_policy(xrt.KernelPolicy(matmul="cpu.blas")):
        trials.ours(call, place(), (q, k, v))
    trials.natively(call, lambda: F.scaled_dot_product_attention(q, k, v))


def test_what_serves_training_is_measured_with_its_gradient_on_both_sides(tmp_path, monkeypatch):
    monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", str(tmp_path / "tuning.json"))
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_store_is_open", False)
    done = []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: (done.append(1), real(*args, **more))[1])
    gradients = []

    def measure(candidates, *_):
        for _, run in candidates:
            done.clear()
            run()
            gradients.append(len(done))
        return {name: 1.0 for name, _ in candidates}

    monkeypatch.setattr(tuning, "_measure", measure)
    q, k, v = operands(True)
    with xt.kernel_policy(xrt.KernelPolicy(auto_strategy="best_performance")):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert len(gradients) > 1
    assert set(gradients) == {1}
