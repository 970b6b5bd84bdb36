# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls that are new by their sizes alone, as those of a growing KV cache: their route is not looked for again."""

from __future__ import annotations

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from attention_calls import gradients, operands, rule, sdpa  # noqa: E402 - it needs PyTorch

from xpuruntime.policies.advisories import Platform, holding  # noqa: E402
from xpuruntime.pytorch.attention import advised, selection  # noqa: E402
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy  # noqa: E402
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy  # noqa: E402
from xpuruntime.pytorch.dispatch.fast_path import fast_path  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides import attention as attention_override  # noqa: E402
from xpuruntime.pytorch.dispatch.step_cost import RoutePin  # noqa: E402
from xpuruntime.pytorch.ops import attention_operator  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_of_attention_is_left")]

F = torch.nn.functional
WEIGHT, ROW, IMAGE = torch.randn(6, 6), torch.randn(6), torch.randn(2, 3, 2, 2)
CALLS = {
    "mm": ("matmul", lambda n: torch.mm(torch.randn(n, 6), WEIGHT)),
    "bmm": ("matmul", lambda n: torch.bmm(torch.randn(2, 5, n), torch.randn(2, n, 5))),
    "addmm": ("matmul", lambda n: torch.addmm(ROW, torch.randn(n, 6), WEIGHT)),
    "linear": ("matmul", lambda n: F.linear(torch.randn(2, n, 6, requires_grad=True), WEIGHT, ROW).sum().backward()),
    "layer_norm": ("layer_norm", lambda n: norm_and_gradient(F.layer_norm, n, (6,), ROW, ROW)),
    "rms_norm": ("rms_norm", lambda n: norm_and_gradient(F.rms_norm, n, (6,), ROW)),
    "conv": ("conv", lambda n: F.conv2d(torch.randn(1, 3, n, 4, requires_grad=True), IMAGE).sum().backward()),
}


def norm_and_gradient(norm, n, *rest):
    x = torch.randn(n, 6, requires_grad=True)
    rest = [one.clone().requires_grad_() if isinstance(one, torch.Tensor) else one for one in rest]
    norm(x, *rest).square().sum().backward()


def counted(monkeypatch):
    """Return a list that grows by the name of what looks for a route, by rules or by asking kernels."""
    names = []

    def count(name, real):
        return lambda *args, **more: (names.append(name), real(*args, **more))[1]

    for owner, name in ((CompiledPolicy, "resolve"), (selection, "rejection"), (selection, "xrt_rejection")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, count(name, real))
    return names


@pytest.mark.parametrize("kernel", ["torch.flash", "cpu.reference"])
@pytest.mark.parametrize("grows", ["in place", "by a copy"])
def test_a_growing_kv_cache_is_looked_up_once(kernel, grows, monkeypatch):
    asked = counted(monkeypatch)
    q, cache = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 64, 16)
    policy = xrt.Policy(kernels={"rules": [rule(kernel, phase="infer")]})
    with torch.no_grad(), xt.kernel_policy(policy):
        for length in range(2, 64):
            k = cache[:, :, :length] if grows == "in place" else cache[:, :, :length].contiguous()
            found = sdpa(q, k, k, enable_gqa=True)
            if length == 3:
                asked.clear()
            torch.testing.assert_close(found, sdpa_of_groups(q, k))
    assert asked == []


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("words", [{"attention": "torch.flash"}, {"rules": [rule("torch.flash")]}])
def test_calls_of_a_known_kind_are_served_without_python(words, trains, monkeypatch):
    if fast_path().route != "addon":
        pytest.skip(f"without the addon: {fast_path().reason}")
    lengths, real = [], attention_override.attend
    monkeypatch.setattr(
        attention_override, "attend",
        lambda active, natively, given: (lengths.append(given.key.shape[-2]), real(active, natively, given))[1],
    )  # fmt: skip
    q, cache = torch.randn(1, 4, 1, 16, requires_grad=trains), torch.randn(1, 2, 64, 16)
    mask = torch.zeros(1, 1, 1, 64)
    phases = ("infer", "train", "backward") if "rules" in words else ()
    rules = [rule("torch.flash", phase=phase) for phase in phases]
    with xt.kernel_policy(**({"rules": rules} if rules else words)):
        for length in range(2, 64):
            k = cache[:, :, :length]
            found = sdpa(q, k, k, attn_mask=mask[..., :length], enable_gqa=True)
            torch.testing.assert_close(found, sdpa_of_groups(q, k))
    assert lengths == [2]


def sdpa_of_groups(q, k):
    k = k.repeat_interleave(2, 1).double()
    return ((q.double() @ k.mT * 16**-0.5).softmax(-1) @ k).float()


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch says why its kernel cannot serve
@pytest.mark.parametrize("kernel", ["torch.flash", "cpu.reference"])
def test_what_the_kernel_of_a_kind_cannot_serve_is_looked_up(kernel, monkeypatch):
    monkeypatch.setattr(attention_override, "attention_kind", lambda *_: "all calls")
    monkeypatch.setattr(attention_operator, "attention_kind", lambda *_: "all calls")
    q, k, v = operands(head_dim=16)
    narrow = v[..., :8].contiguous()  # neither of the two serves that
    with torch.no_grad():
        expected = sdpa(q, k, narrow)
        with xt.kernel_policy(xrt.Policy(kernels={"rules": [rule(kernel)]}, mode="auto")):
            sdpa(q, k, v)
            for _ in range(2):
                torch.testing.assert_close(sdpa(q, k, narrow), expected)


def test_rules_for_lengths_hold_at_each_length():
    policy = xrt.Policy(kernels={"rules": [rule("torch.math", kv="<10"), rule("torch.flash")]})
    q = torch.randn(1, 2, 4, 16)
    with torch.no_grad(), xt.kernel_policy(policy):
        for length in (8, 9, 10, 11):
            k = torch.randn(1, 2, length, 16)
            sdpa(q, k, k)
        assert (
            sorted(route.kernel for route in active_policy().routes.values())
            == ["torch.flash"] * 2 + ["torch.math"] * 2
        )


@pytest.mark.parametrize("kernel", ["torch", "cpu.reference"])
@pytest.mark.parametrize("name", CALLS)
def test_other_sizes_are_looked_up_once(name, kernel, monkeypatch):
    asked = counted(monkeypatch)
    op, call = CALLS[name]
    rules = [{"match": {"op": op, "phase": phase}, "use": kernel} for phase in ("infer", "train", "backward")]
    with xt.kernel_policy(xrt.Policy(kernels={"rules": rules}, mode="strict")):
        for n in range(2, 12):
            call(n)
            if n == 3:
                asked.clear()
                seen = len(active_policy().routes)
        assert len(active_policy().routes) > seen
    assert asked == []


def test_a_gradient_with_a_rule_of_its_own_is_looked_up_once(monkeypatch):
    asked = counted(monkeypatch)
    rules = [rule("torch.flash", phase="train"), rule("cpu.reference", phase="backward")]
    with xt.kernel_policy(xrt.Policy(kernels={"rules": rules})):
        for length in range(4, 12):
            tensors = operands(q_length=length, kv_length=length)
            found = gradients(*tensors)
            if length == 5:
                asked.clear()
            with xt.kernel_policy(None):
                torch.testing.assert_close(found, gradients(*tensors))
    assert set(asked) <= {"rejection"}  # PyTorch is asked whether its kernel serves the forward


def normal(x):
    return F.layer_norm(x.double(), (6,), ROW.double())


def test_arrays_that_lie_otherwise_are_served_as_well():
    policy = xrt.Policy(kernels={"layer_norm": "cpu.reference", "matmul": "cpu.reference"}, mode="strict")
    with xt.kernel_policy(policy):
        for n in (2, 3, 4):
            for x in (torch.randn(n, 6), torch.randn(6, n).T, torch.randn(n, 12)[:, ::2]):
                for _ in range(2):  # the second time by the fast kernel, where it may
                    torch.testing.assert_close(F.layer_norm(x, (6,), ROW), normal(x).float())
                    torch.testing.assert_close(x @ WEIGHT, (x.double() @ WEIGHT.double()).float())


def test_rules_for_sizes_of_products_hold_at_each_size():
    rules = [{"match": {"op": "matmul", "m": "<4"}, "use": "cpu.reference"}]
    with xt.kernel_policy(xrt.Policy(kernels={"matmul": "torch", "rules": rules})):
        for m in (6, 2, 5, 3):
            torch.mm(torch.randn(m, 6), WEIGHT)
        kernels = [route.kernel for route in active_policy().routes.values()]
    assert kernels == ["torch.mm", "cpu.reference"] * 2


def test_a_call_that_is_calibrated_takes_no_route_of_its_kind():
    policy = xrt.KernelPolicy(
        rules=[{"match": {"op": "matmul", "dtype": "fp32"}, "use": "cpu.reference"}], auto_strategy="best_performance"
    )
    with xt.kernel_policy(policy):
        torch.mm(torch.randn(3, 6), WEIGHT)
        CONTEXT.thread.route_pin = pin = RoutePin(xrt=False)
        try:
            torch.mm(torch.randn(4, 6), WEIGHT)
        finally:
            CONTEXT.thread.route_pin = None
        assert pin.held
        pin.forget()


def test_lengths_count_where_an_advisory_asks_for_them(monkeypatch):
    """On a device where some kernel is known to be wrong at some lengths."""
    rows = holding(Platform((2, 11), (9, 19, 0), "sm90"))
    monkeypatch.setattr(advised, "rows_on", lambda _: rows)
    monkeypatch.setattr(advised, "own_choice", lambda _: "torch.cudnn")
    asked = counted(monkeypatch)
    policy = xrt.Policy(kernels={"rules": [rule("cpu.reference")]})
    for grad, looked_for in ((False, False), (True, True)):
        q, cache = torch.randn(1, 2, 1, 16, requires_grad=grad), torch.randn(1, 2, 64, 16)
        with xt.kernel_policy(policy):
            for length in range(2, 12):
                sdpa(q, cache[:, :, :length], cache[:, :, :length])
                if length == 3:
                    asked.clear()
        assert bool(asked) is looked_for
