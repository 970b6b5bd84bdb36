# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention in PyTorch under a policy, on CUDA: our kernels, PyTorch's, and both in one step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.measuring.rounds import replacing
from xpuruntime.pytorch.attention import sdpa_backends
from xpuruntime.pytorch.dispatch import tuning
from xpuruntime.pytorch.dispatch.overrides.registry import installed
from xpuruntime.pytorch.ops import fused_attention

pytestmark = pytest.mark.torch

DEVICE = torch.device("cuda", 0)
FLASH, CUDNN = OURS = ["cuda_raw.flash_attention_v2", "cudnn.sdpa"]
NODES = {
    "torch.flash": "ScaledDotProductFlashAttentionBackward0",
    "torch.cudnn": "ScaledDotProductCudnnAttentionBackward0",
    "torch.efficient": "ScaledDotProductEfficientAttentionBackward0",
}
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _no_policy_is_left():
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    sdpa_backends.fix_backend_order()
    before = sdpa_backends.read()
    torch.manual_seed(0)
    yield
    xt.clear_kernel_policy()
    assert installed() == ()
    assert sdpa_backends.read() == before
    torch.cuda.synchronize()


def strict(*words, rules=()):
    kernels = {"attention": list(words)} if words else {}
    return {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {**kernels, "rules": list(rules)}}


def rule(use, **match):
    return {"match": {"op": "attention", **match}, "use": use}


def operands(dtype=torch.bfloat16, batch=2, heads=4, kv_heads=4, q_length=128, kv_length=128, head_dim=64):
    """Return q, k and v as views of ``[batch, length, heads, head_dim]``, as a model has them."""
    sizes = ((q_length, heads), (kv_length, kv_heads), (kv_length, kv_heads))
    return [torch.randn(batch, n, h, head_dim, device=DEVICE, dtype=dtype).transpose(1, 2) for n, h in sizes]


def gradients(tensors, **more):
    """Return the output and the gradients of q, k and v for a fixed gradient of the output."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = sdpa(*leaves, **more)
    torch.manual_seed(99)
    arriving = torch.randn(out.shape, device=DEVICE, dtype=torch.float64).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, leaves, arriving))


def exact(tensors, **more):
    mask = more.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        more = {**more, "attn_mask": mask.double()}
    with sdpa_kernel(SDPBackend.MATH):
        return gradients([x.double() for x in tensors], **more)


def assert_as_good_as(found, natively, truth):
    """Fail where a result is farther from the truth than thrice what PyTorch's own kernel of the same type is."""
    for name, one, other, true in zip(("out", "q", "k", "v"), found, natively, truth, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        limit = 3 * (other.double() - true).abs().max() + 1e-3
        assert (one.double() - true).abs().max() <= limit, name


def chosen() -> dict[str, set[str]]:
    results: dict[str, set[str]] = {}
    for decision in xrt.decisions():
        results.setdefault(decision.op, set()).add(decision.chosen)
    return results


def counts() -> dict[str, int]:
    results: dict[str, int] = {}
    for decision in xrt.decisions():
        results[decision.op] = results.get(decision.op, 0) + decision.count
    return results


CASES = {
    "64": lambda: (operands(), {}),
    "128": lambda: (operands(head_dim=128), {}),
    "256": lambda: (operands(head_dim=256), {}),
    "fp16": lambda: (operands(torch.float16), {}),
    "causal": lambda: (operands(head_dim=128), {"is_causal": True}),
    "grouped": lambda: (operands(heads=8, kv_heads=2), {"enable_gqa": True, "is_causal": True}),
    "other lengths": lambda: (operands(q_length=72, kv_length=200), {}),
    "odd lengths": lambda: (operands(q_length=77, kv_length=131), {"is_causal": True}),
    "scale": lambda: (operands(), {"scale": 0.3}),
    "added mask": lambda: (
        operands(), {"attn_mask": torch.randn(2, 1, 128, 128, device=DEVICE, dtype=torch.bfloat16)}
    ),
    "contiguous": lambda: ([x.contiguous() for x in operands()], {}),
    "packed": lambda: (
        [x.transpose(1, 2) for x in torch.randn(2, 128, 3, 4, 64, device=DEVICE, dtype=torch.bfloat16).unbind(2)], {}
    ),
    "no batch": lambda: ([x[0] for x in operands()], {"is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("kernel", OURS)
@pytest.mark.parametrize("case", CASES)
def test_ours_is_as_good_as_pytorchs(kernel, case):
    torch.manual_seed(1)
    tensors, more = CASES[case]()
    natively, truth = gradients(tensors, **more), exact(tensors, **more)
    with xt.kernel_policy(strict(kernel)):
        found = gradients(tensors, **more)
    assert_as_good_as(found, natively, truth)
    assert chosen() == {"attention": {kernel}, "attention_backward": {kernel}}
    assert found[0].stride() == torch.empty_like(tensors[0]).stride()


def test_bool_masks_are_for_our_flash_attention():
    tensors = operands()
    mask = torch.rand(2, 1, 128, 128, device=DEVICE) > 0.3
    natively, truth = gradients(tensors, attn_mask=mask), exact(tensors, attn_mask=mask)
    with xt.kernel_policy(strict(FLASH)):
        assert_as_good_as(gradients(tensors, attn_mask=mask), natively, truth)
    with xt.kernel_policy(strict(CUDNN)), pytest.raises(UnsupportedOperationError, match="masks that are added"):
        gradients(tensors, attn_mask=mask)
    xrt.clear_decisions()
    with xt.kernel_policy(strict(CUDNN, FLASH)):
        gradients(tensors, attn_mask=mask)
    assert chosen() == {"attention": {FLASH}, "attention_backward": {FLASH}}


def test_a_query_that_sees_no_key_gets_0():
    tensors = operands()
    mask = torch.ones(128, 128, device=DEVICE, dtype=torch.bool)
    mask[5] = False
    with xt.kernel_policy(strict(FLASH)):
        found = gradients(tensors, attn_mask=mask)
    assert all(torch.isfinite(x).all() for x in found)
    assert not found[0][:, :, 5].any()


@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("float16 and bfloat16", lambda: operands(torch.float32)),
        ("head_dim is 20", lambda: operands(head_dim=20)),
        ("contiguous last dimension", lambda: [x.mT.contiguous().mT for x in operands()]),
    ],
)
def test_what_ours_cannot_serve_is_pytorchs_with_a_word(reason, make):
    tensors = make()
    expected = gradients(tensors)
    with xt.kernel_policy(strict(FLASH)), pytest.raises(UnsupportedOperationError, match=reason):
        sdpa(*tensors)
    said = pytest.warns(XpuRuntimeWarning, match=f"runs by torch.sdpa, though .*{reason}")
    with xt.kernel_policy(attention=FLASH), said:
        found = gradients(tensors)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert counts() == {}


@pytest.mark.parametrize("kernel", OURS)
def test_dropout_follows_the_seed_and_the_backward_drops_the_same(kernel):
    q, k, _ = operands(head_dim=128)
    v = torch.eye(128, device=DEVICE, dtype=torch.bfloat16).expand(2, 4, 128, 128).contiguous()

    def run():
        torch.manual_seed(7)
        leaf = v.clone().requires_grad_()
        out = sdpa(q, k, leaf, dropout_p=0.5)
        (gradient,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        return out.detach(), gradient, sdpa(q, k, v, dropout_p=0.5)

    with xt.kernel_policy(strict(kernel)):
        first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    weights, gradient, another = first
    assert not torch.equal(weights, another)
    plain = torch.softmax(q.double() @ k.double().mT / 128**0.5, -1)  # the weights, since v is the identity
    kept = weights != 0
    assert 0.45 < kept.double().mean() < 0.55
    torch.testing.assert_close(weights.double(), torch.where(kept, plain * 2, 0), rtol=2e-2, atol=2e-3)
    expected = weights.double().sum(-2)[..., None].expand(2, 4, 128, 128)
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", OURS)
def test_a_cuda_graph_draws_dropout_anew_in_each_replay(kernel):
    q, k, _ = operands(head_dim=128)
    v = torch.eye(128, device=DEVICE, dtype=torch.bfloat16).expand(2, 4, 128, 128).contiguous().requires_grad_()

    def step():
        out = sdpa(q, k, v, dropout_p=0.5)
        (gradient,) = torch.autograd.grad(out, v, torch.ones_like(out))
        return out.detach(), gradient

    with xt.kernel_policy(strict(kernel)):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.manual_seed(5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out, gradient = step()
        seen = []
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            seen.append(out.clone())
            expected = out.double().sum(-2)[..., None].expand(2, 4, 128, 128)
            torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=2e-2)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_deterministic_algorithms_give_the_same_bits():
    tensors = operands(q_length=512, kv_length=512)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with xt.kernel_policy(strict(FLASH)):
            first, second = gradients(tensors, is_causal=True), gradients(tensors, is_causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("word", [*NODES, "torch.math"])
def test_pytorchs_kernels_by_the_switch_and_by_a_rule(word):
    q, k, v = operands()
    q.requires_grad_()
    for policy in (strict(word), strict(rules=[rule(word)])):
        with xt.kernel_policy(policy):
            name = sdpa(q, k, v).grad_fn.name()
        assert name == NODES.get(word, name)
        assert word != "torch.math" or "ScaledDotProduct" not in name


def test_several_of_pytorchs_by_the_switch_in_order():
    q, k, v = operands()
    mask = torch.zeros(128, 128, device=DEVICE, dtype=torch.bfloat16)
    q.requires_grad_()
    with xt.kernel_policy(attention=["torch.flash", "torch.efficient"]):
        assert sdpa(q, k, v).grad_fn.name() == NODES["torch.flash"]
        assert sdpa(q, k, v, mask).grad_fn.name() == NODES["torch.efficient"]  # flash takes no mask
    for policy in (strict("torch.flash"), strict(rules=[rule("torch.flash")])):
        with xt.kernel_policy(policy), pytest.raises(UnsupportedOperationError, match=r"torch\.flash: .*mask"):
            sdpa(q, k, v, mask)


def test_rules_by_head_dim_and_by_phase():
    small, large = operands(head_dim=64), operands(head_dim=128)
    rules = [
        rule("torch.flash", head_dim=128),
        rule(CUDNN, phase="backward"),
        rule(FLASH, phase=["train", "infer"]),
    ]
    natively, truth = gradients(small), exact(small)
    with xt.kernel_policy(strict(rules=rules)):
        assert_as_good_as(gradients(small), natively, truth)
        assert chosen() == {"attention": {FLASH}, "attention_backward": {CUDNN}}
        large[0].requires_grad_()
        assert sdpa(*large).grad_fn.name() == NODES["torch.flash"]
        assert counts() == {"attention": 1, "attention_backward": 1}


def test_ours_and_pytorchs_in_one_step():
    tensors = operands()
    natively, truth = gradients(tensors), exact(tensors)
    for forward, backward in ((FLASH, "torch.flash"), ("torch.flash", FLASH), ("torch.cudnn", CUDNN)):
        rules = [rule(backward, phase="backward"), rule(forward, phase="train")]
        with xt.kernel_policy(strict(rules=rules)):
            assert_as_good_as(gradients(tensors), natively, truth)


@pytest.mark.parametrize("kernel", OURS)
def test_torch_compile_obeys(kernel):
    tensors = operands()
    natively, truth = gradients(tensors, is_causal=True), exact(tensors, is_causal=True)

    @torch.compile(fullgraph=True)
    def attend(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    with xt.kernel_policy(strict(kernel)):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attend(*leaves)
        torch.manual_seed(99)
        arriving = torch.randn(out.shape, device=DEVICE, dtype=torch.float64).to(out.dtype)
        found = (out.detach(), *torch.autograd.grad(out, leaves, arriving))
    assert_as_good_as(found, natively, truth)
    assert chosen() == {"attention": {kernel}, "attention_backward": {kernel}}


def test_fused_attention_takes_ours_by_itself():
    q, k, v = operands()
    torch.testing.assert_close(fused_attention(q, k, v, is_causal=True), sdpa(q, k, v, is_causal=True),
                               rtol=2e-2, atol=2e-2)  # fmt: skip
    assert chosen() == {"attention": {FLASH}}
    xrt.clear_decisions()
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fused_attention(*wide), sdpa(*wide))
    with torch.autocast("cuda", torch.bfloat16):
        out = fused_attention(*wide)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert wide[0].grad.dtype == torch.float32
    assert chosen() == {"attention": {FLASH}, "attention_backward": {FLASH}}


@pytest.mark.parametrize("kernel", OURS)
def test_opcheck(kernel):
    tensors = [x.contiguous().requires_grad_() for x in operands()]
    rng = torch.tensor([3, 4], device=DEVICE)
    for mask, dropout_p in ((None, 0.0), (None, 0.3)):
        arguments = (*tensors, mask, rng if dropout_p else None, dropout_p, True, None, kernel, True, "", "")
        torch.library.opcheck(
            torch.ops.xpuruntime.attention.default, arguments,
            rtol=2e-2, atol=2e-2,
        )  # fmt: skip


def test_best_performance_measures_and_stays_right():
    tensors = operands(batch=4, heads=16, kv_heads=16, q_length=1024, kv_length=1024)
    natively, truth = gradients(tensors, is_causal=True), exact(tensors, is_causal=True)
    with xt.kernel_policy(attention="auto", auto_strategy="best_performance"):
        first, second = gradients(tensors, is_causal=True), gradients(tensors, is_causal=True)
    assert_as_good_as(first, natively, truth)
    assert_as_good_as(second, natively, truth)
    assert chosen().get("attention", set()) <= set(OURS)


@pytest.mark.usefixtures("nothing_is_tuned")
@pytest.mark.parametrize("kernel", ["torch.flash", "torch.efficient"])
def test_another_kernel_of_pytorch_may_be_the_fastest(kernel, monkeypatch):
    real = tuning._measure

    def measure(candidates, *rest):
        found = real(candidates, *rest)
        assert kernel in {candidate.kernel for candidate in found.candidates}  # PyTorch's own choice is cuDNN here
        verdicts = [
            candidate._replace(verdict="faster", ratio=0.1) if candidate.kernel == kernel
            else candidate._replace(verdict="control" if candidate.verdict == "control" else "slower")
            for candidate in found.candidates
        ]  # fmt: skip
        return replacing(verdicts, rounds=found.rounds, seconds=found.seconds)

    monkeypatch.setattr(tuning, "_measure", measure)
    tensors = operands()
    natively, truth = gradients(tensors, is_causal=True), exact(tensors, is_causal=True)
    with xt.kernel_policy(attention="auto", auto_strategy="best_performance"):
        for _ in range(2):
            assert_as_good_as(gradients(tensors, is_causal=True), natively, truth)
        out = sdpa(*(x.detach().requires_grad_() for x in tensors), is_causal=True)
    assert out.grad_fn.name() == NODES[kernel]


def test_ours_in_pytorchs_registry_of_flash_attention():
    tensors = operands()
    natively, truth = gradients(tensors, is_causal=True), exact(tensors, is_causal=True)
    xt.register_flash_attention()
    torch_attention.activate_flash_attention_impl("xpuruntime")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found = gradients(tensors, is_causal=True)
            assert sdpa(tensors[0].requires_grad_(), *tensors[1:]).grad_fn.name() == NODES["torch.flash"]
        assert chosen() == {"attention": {FLASH}, "attention_backward": {FLASH}}
        xt.set_kernel_policy(attention="torch.math")
        xt.clear_kernel_policy()
        assert torch_attention.current_flash_attention_impl() == "xpuruntime"
    finally:
        torch_attention.restore_flash_attention_impl()
    assert_as_good_as(found, natively, truth)
    xrt.clear_decisions()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        sdpa(*tensors)
    assert counts() == {}
