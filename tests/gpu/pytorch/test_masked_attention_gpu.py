# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention with boolean masks by cuDNN on a CUDA device, beside float64: also of queries that see no key."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import SDPBackend

import xpuruntime as xrt
import xpuruntime.pytorch as xrt_torch
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.policies import KernelPolicy
from xpuruntime.pytorch.dispatch.context import CONTEXT

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_policy_is_left"),
]

DEVICE = torch.device("cuda", 0)
WORD = "torch_masked.cudnn"
attend = torch.nn.functional.scaled_dot_product_attention
SHAPES = ((2, 4, 4, 256, 256, 64), (3, 4, 2, 200, 328, 128), (2, 2, 1, 1024, 128, 64))


def operands(batch, heads, kv_heads, queries, keys, head_dim, dtype, *, low=False):
    generator = torch.Generator(DEVICE).manual_seed(0)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(batch, *size, head_dim, device=DEVICE, generator=generator).to(dtype) for size in sizes)
    if low:  # all scores are about -120
        q, k = q * 0.1, k * 0.1
        q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(head_dim)
    return [x.requires_grad_() for x in (q, k, v)]


def mask_of(kind, batch, heads, queries, keys):
    generator = torch.Generator(DEVICE).manual_seed(1)
    if kind == "keys":
        mask = torch.ones(batch, 1, 1, keys, device=DEVICE, dtype=torch.bool)
        mask[0, ..., keys // 3 :] = False
        mask[-1] = False
        return mask
    rows = heads if kind == "heads" else 1
    mask = torch.rand(batch, rows, queries, keys, device=DEVICE, generator=generator) < 0.5
    mask[..., 0] = True
    if kind != "seen":
        mask[0, :, : queries // 3] = False
        mask[0, :, -1] = False
    if kind == "sequence":
        mask[-1] = False
    return mask


def run(leaves, mask, grad):
    spoiled = [torch.full((x.numel(),), math.nan, device=DEVICE, dtype=x.dtype) for x in leaves for _ in range(3)]
    del spoiled  # so that what is not written is NaN
    out = attend(*leaves, attn_mask=mask, enable_gqa=leaves[0].shape[1] != leaves[1].shape[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_near(results, wanted):
    for x, y in zip(results, wanted, strict=True):
        scale = float(y.abs().max()) or 1.0
        torch.testing.assert_close(x.double() / scale, y / scale, rtol=0, atol=2e-2)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kind", ["seen", "queries", "heads", "sequence", "keys"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_those_of_float64(dtype, shape, kind, low):
    batch, heads, _, queries, keys, head_dim = shape
    leaves, mask = operands(*shape, dtype, low=low), mask_of(kind, batch, heads, queries, keys)
    grad = torch.randn(batch, heads, queries, head_dim, device=DEVICE)
    wanted = run([x.detach().double().requires_grad_() for x in leaves], mask, grad)
    with xrt_torch.kernel_policy(xrt.Policy(mode="strict", kernels={"attention": WORD})):
        results = run(leaves, mask, grad)
    if low:  # the terms of this column are large and add up to 0
        results[1], wanted[1] = results[1][..., 1:], wanted[1][..., 1:]
    assert_near(results, wanted)
    hidden = ~mask.any(-1).expand(batch, heads, queries)
    assert not results[0][hidden].any()
    assert not results[1][hidden].any()


@pytest.mark.parametrize("kind", ["queries", "sequence", "keys"])
def test_added_masks_are_as_right(kind):
    leaves, mask = operands(*SHAPES[1], torch.bfloat16), mask_of(kind, 3, 4, 200, 328)
    grad = torch.randn(3, 4, 200, 128, device=DEVICE)
    wanted = run([x.detach().double().requires_grad_() for x in leaves], mask, grad)
    added = torch.zeros(mask.shape, dtype=torch.bfloat16, device=DEVICE).masked_fill_(~mask, -math.inf)
    with xrt_torch.kernel_policy(xrt.Policy(mode="strict", kernels={"attention": WORD})):
        assert_near(run(leaves, added, grad), wanted)


@pytest.mark.parametrize("kind", ["sequence", "keys"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_has_it(dynamic, kind):
    leaves, mask = operands(*SHAPES[0], torch.bfloat16), mask_of(kind, 2, 4, 256, 256).expand(2, 4, 256, 256)
    grad = torch.randn(2, 4, 256, 64, device=DEVICE)
    wanted = run([x.detach().double().requires_grad_() for x in leaves], mask, grad)
    policy = xrt.Policy(mode="strict", kernels={"attention": WORD})
    with xrt_torch.kernel_policy(policy), xrt_torch.explain() as explained:
        compiled = torch.compile(lambda q, k, v, mask: attend(q, k, v, attn_mask=mask), dynamic=dynamic)
        out = compiled(*leaves, mask)
        results = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
    assert_near(results, wanted)
    assert {row.resolved for row in explained.rows if row.op == "attention"} == {WORD}


@pytest.mark.parametrize("kind", ["queries", "keys"])
def test_compiled_inference_of_views_has_it(kind):
    rows, mask = torch.cat(operands(*SHAPES[0], torch.bfloat16), -1).detach(), mask_of(kind, 2, 4, 256, 256)
    wanted = attend(*rows.double().chunk(3, -1), attn_mask=mask)
    with xrt_torch.kernel_policy(xrt.Policy(mode="strict", kernels={"attention": WORD})), torch.no_grad():
        compiled = torch.compile(lambda rows, mask: attend(*rows.chunk(3, -1), attn_mask=mask), dynamic=False)
        assert_near([compiled(rows, mask)], [wanted])


def calls_of_graph(q, k, v, mask):
    """Return what the code that Inductor has made calls, without the names and the numbers of its kernels."""
    torch.compiler.reset()
    compiled = torch.compile(lambda *operands: attend(*operands), dynamic=False)
    _, graphs = run_and_get_code(compiled, q, k, v, mask)
    bodies = [graph.partition("def call(")[2].partition("\n    return")[0] for graph in graphs]
    lines = [line.strip() for body in bodies for line in body.splitlines() if not line.strip().startswith("#")]
    assert any("_scaled_dot_product_cudnn_attention" in line for line in lines)
    return [re.sub(r"triton_\w+", "kernel", line) for line in lines]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_compiled_code_calls_what_that_of_pytorch_calls(needs_grad):
    """So it is as fast: the masks differ in one number."""
    leaves, mask = operands(*SHAPES[0], torch.bfloat16), mask_of("queries", 2, 4, 256, 256)
    with torch.set_grad_enabled(needs_grad), torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        own = calls_of_graph(*leaves, mask)
    policy = xrt.Policy(mode="strict", kernels={"attention": WORD})
    with torch.set_grad_enabled(needs_grad), xrt_torch.kernel_policy(policy):
        assert calls_of_graph(*leaves, mask) == own


def test_auto_measures_it_and_is_right():
    leaves, mask = operands(4, 8, 8, 1024, 1024, 64, torch.bfloat16), mask_of("sequence", 4, 8, 1024, 1024)
    grad = torch.randn(4, 8, 1024, 64, device=DEVICE)
    wanted = run([x.detach().double().requires_grad_() for x in leaves], mask, grad)
    policy = xrt.Policy(mode="strict", kernels=KernelPolicy(attention="auto", auto_strategy="best_performance"))
    with xrt_torch.kernel_policy(policy):
        results = run(leaves, mask, grad)
        marks = [times for (op, text, _), times in CONTEXT.times.items() if op == "attention" and "1024, 1024" in text]
    assert_near(results, wanted)
    assert any(candidate.kernel == WORD for times in marks for candidate in times.candidates)


@pytest.mark.parametrize(("queries", "keys"), [(1, 128), (192, 192)])
def test_gradients_that_may_be_nan_are_refused(queries, keys):
    leaves = operands(2, 4, 4, queries, keys, 64, torch.bfloat16, low=True)
    mask = torch.ones(queries, keys, device=DEVICE, dtype=torch.bool)
    policy = xrt.Policy(mode="strict", kernels={"attention": WORD})
    with xrt_torch.kernel_policy(policy), pytest.raises(UnsupportedOperationError, match="may be NaN"):
        attend(*leaves, attn_mask=mask)
