# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rules for `scaled_dot_product_attention`: by size, phase, module and thread, forward and backward."""

from __future__ import annotations

import threading

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from attention_calls import FLASH, counts, gradients, operands, rule, sdpa, strict  # noqa: E402 - it needs PyTorch

from xpuruntime.pytorch.attention import sdpa_backends  # noqa: E402
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy  # noqa: E402
from xpuruntime.pytorch.dispatch.context import CONTEXT, thread_policy  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_of_attention_is_left")]


def test_rules_by_head_dim_and_dtype():
    rules = [rule("cpu.reference", head_dim="<=8"), rule("torch.math", head_dim=16), rule("torch", dtype="fp64")]
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules)):
        ours = sdpa(*(x.requires_grad_() for x in operands(head_dim=8)))
        math = sdpa(*(x.requires_grad_() for x in operands(head_dim=16)))
        rest = sdpa(*(x.requires_grad_() for x in operands(head_dim=24)))
    assert rest.grad_fn.name() == FLASH
    assert math.grad_fn.name() == "UnsafeViewBackward0"
    assert "Attention" in ours.grad_fn.name()
    assert ours.grad_fn.name() != FLASH
    assert counts() == {"attention": 1}


def test_a_kernel_of_pytorchs_for_some_calls_alone():
    q, k, v = operands()
    with xt.kernel_policy(xrt.KernelPolicy(rules=[rule("torch.math", phase="train")])):
        assert sdpa(q.requires_grad_(), k, v).grad_fn.name() == "UnsafeViewBackward0"
        with torch.no_grad():
            sdpa(q, k, v)
        assert sdpa_backends.read().enabled[1]
    with xt.kernel_policy(strict(rules=[rule("torch.flash", phase="infer")])):
        sdpa(q, k, v, dropout_p=0.1)
        with (
            torch.no_grad(),
            pytest.raises(
                UnsupportedOperationError, match=r"asks for torch.flash, which cannot serve it: torch.flash: .*dropout"
            ),
        ):
            sdpa(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("word", ["cudnn.sdpa", "cuda_raw.flash_attention_v2", "torch.cudnn", "torch.efficient"])
def test_what_runs_on_cuda_alone_is_refused_on_cpu(word):
    q, k, v = operands()
    refused = pytest.raises(UnsupportedOperationError, match=r"cuda|CUDA|another kind of device|not in this build")
    with xt.kernel_policy(strict(rules=[rule(word, device="cpu")])), refused:
        sdpa(q, k, v)
    with xt.kernel_policy(attention=[word, "cpu.reference"]):
        sdpa(q, k, v)
    assert counts() == {"attention": 1}


def test_rules_by_module_hold_in_both_directions():
    class Block(torch.nn.Module):
        def forward(self, x):
            return sdpa(x, x, x)

    model = torch.nn.ModuleDict({"a": Block(), "b": Block()})
    model.forward = lambda x: model["b"](model["a"](x))
    x = torch.randn(1, 2, 3, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    with xt.kernel_policy(strict(rules=[rule("cpu.reference", module="b")])):
        grad = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(grad, expected)
    assert counts() == {"attention": 1, "attention_backward": 1}


def test_the_backward_may_be_by_another_kernel():
    q, k, v = operands()
    expected = gradients(q, k, v, is_causal=True)
    for forward, backward, ran in (
        ("cpu.reference", "torch.math", {"attention": 1}),
        ("torch.flash", "cpu.reference", {"attention_backward": 1}),
        ("torch.math", "torch.flash", {}),
    ):
        xrt.clear_decisions()
        rules = [rule(backward, phase="backward"), rule(forward, phase=["train", "infer"])]
        with xt.kernel_policy(strict(rules=rules)):
            torch.testing.assert_close(gradients(q, k, v, is_causal=True), expected)
        assert counts() == ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["causal", "boolean mask", "added mask", "mask of keys"])
def test_the_backward_apart_from_its_forward_knows_all_weights(form, dtype):
    q, k, v = operands(kv_heads=2, q_length=37, kv_length=90, dtype=dtype)
    shape = (1, 90) if form == "mask of keys" else (37, 90)
    more = {"enable_gqa": True, "is_causal": form == "causal"}
    if form != "causal":
        more["attn_mask"] = torch.randn(shape, dtype=dtype) if form == "added mask" else torch.rand(shape) > 0.5
    if form == "boolean mask":
        more["attn_mask"][3] = False
    expected = gradients(q, k, v, **more)
    rules = [rule("cpu.reference", phase="backward"), rule("torch.math", phase="train")]
    with xt.kernel_policy(strict(rules=rules)):
        torch.testing.assert_close(gradients(q, k, v, **more), expected)
    assert counts() == {"attention_backward": 1}


def test_the_backward_apart_from_its_forward_costs_no_memory_of_all_scores():
    q = torch.randn(1, 4, 1024, 16, requires_grad=True)

    def allocated():
        sdpa(q, q, q)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
            sdpa(q, q, q)
        return sum(max(average.self_cpu_memory_usage, 0) for average in found.key_averages())

    plain = allocated()
    with xt.kernel_policy(strict(rules=[rule("cpu.reference", phase="backward"), rule("torch.flash", phase="train")])):
        assert allocated() < 4 * plain


def test_products_inside_of_attention_are_no_calls_that_a_rule_for_products_misses():
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    rules = [rule("cpu.reference", phase="backward"), rule("torch.math", phase="train")]
    rules.append({"match": {"op": "matmul"}, "use": "cpu.reference"})
    with xt.kernel_policy(strict(rules=rules)), xt.explain() as report:
        sdpa(q, q, q).sum().backward()
    assert {(row.op, row.phase, row.resolved) for row in report.rows if row.op in ("attention", "matmul")} == {
        ("attention", "train", "torch.math"),
        ("attention", "backward", "cpu.reference"),
    }


def test_with_dropout_the_backward_has_to_follow_the_forward():
    q, k, v = operands()
    rules = [rule("torch.math", phase="backward"), rule("cpu.reference", phase="train")]
    with xt.kernel_policy(strict(rules=rules)), pytest.raises(UnsupportedOperationError, match="what it dropped"):
        gradients(q, k, v, dropout_p=0.5)
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules)), pytest.warns(XpuRuntimeWarning, match="what it dropped"):
        gradients(q, k, v, dropout_p=0.5)
    assert counts()["attention_backward"] == 1


def test_all_threads_obey_and_a_thread_may_hold_its_own():
    q, k, v = operands()
    names: dict[str, str] = {}

    def work(name):
        names[name] = type(sdpa(q.detach().requires_grad_(), k, v).grad_fn).__name__

    with xt.kernel_policy(attention="cpu.reference"):
        thread = threading.Thread(target=work, args=("other",))
        thread.start()
        thread.join()
        with thread_policy(None):
            work("plain")
        with thread_policy(CompiledPolicy(xrt.Policy(kernels=xrt.KernelPolicy(rules=[rule("torch.math")])))):
            work("math")
    assert names["plain"] == FLASH
    assert names["math"] == "UnsafeViewBackward0"
    assert names["other"] not in (FLASH, "UnsafeViewBackward0")


def test_who_watches_sees_forward_and_backward():
    seen = []

    class Watch:
        def call(self, name, op, route, run, args, kwargs):
            seen.append((name, op, None if route is None else route.kernel))
            assert sum(isinstance(arg, torch.Tensor) for arg in args) >= 3
            return run(*args, **kwargs)

    q, k, v = operands()
    before = CONTEXT.watch(Watch())
    try:
        with xt.kernel_policy(attention="cpu.reference"):
            gradients(q, k, v)
        with xt.kernel_policy(xrt.KernelPolicy(rules=[rule("torch.math")])):
            sdpa(q, k, v)
    finally:
        CONTEXT.watch(before)
    ours = [(f"xpuruntime::{name}", "attention", "cpu.reference") for name in ("attention", "attention_backward")]
    assert [one for one in seen if one[1] == "attention"] == [
        *ours, ("scaled_dot_product_attention", "attention", "torch.math"),
    ]  # fmt: skip


def test_best_performance_measures_once_and_keeps_pytorchs_where_ours_is_slower():
    q, k, v = operands(q_length=256, kv_length=256, head_dim=64)
    policy = xrt.KernelPolicy(attention="auto", auto_strategy="best_performance")
    expected = gradients(q, k, v)
    with xt.kernel_policy(policy):
        torch.testing.assert_close(gradients(q, k, v), expected)
        measured = counts()
        assert sdpa(q.requires_grad_(), k, v).grad_fn.name() == FLASH
        gradients(q, k, v)
        assert counts() == measured
