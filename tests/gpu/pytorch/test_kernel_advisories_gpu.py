# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of attention that are known to be wrong, where they are: the rows are true, and `auto` avoids them."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.policies.advisories import ADVISORIES
from xpuruntime.pytorch.attention import advised, sdpa_backends
from xpuruntime.pytorch.dispatch.overrides.registry import installed

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

DEVICE = torch.device("cuda", 0)
ROWS = {row.id: row for row in ADVISORIES}
OF_KEYS, OF_ONE_QUERY = ROWS["cudnn-gradient-of-queries"], ROWS["cudnn-gradient-of-one-query"]
OF_BOOLEAN_MASKS, OF_OTHER_TYPES = ROWS["torch-cudnn-hidden-query"], ROWS["torch-cudnn-type-of-mask"]
attend = torch.nn.functional.scaled_dot_product_attention


def needs(row):
    if row not in advised.rows_on(DEVICE):
        pytest.skip("the versions or the device are not those of the advisory")


def operands(queries, keys, *, low=True):
    """Return q, k and v; with `low` all scores are about -120."""
    torch.manual_seed(0)
    sizes = ((queries, 0.1), (keys, 0.1), (keys, 1.0))
    q, k, v = (torch.randn(1, 2, n, 64, device=DEVICE, dtype=torch.bfloat16) * scale for n, scale in sizes)
    if low:
        q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(64)
    return [x.requires_grad_() for x in (q, k, v)]


def run(operands, mask):
    out = attend(*operands, attn_mask=mask)
    return out, torch.autograd.grad(out, operands, torch.ones_like(out))


def finite(tensors):
    return all(bool(x.isfinite().all()) for x in tensors)


@pytest.mark.parametrize(("row", "queries", "keys"), [(OF_KEYS, 192, 192), (OF_KEYS, 256, 192), (OF_ONE_QUERY, 1, 128)])
def test_gradients_are_nan_without_a_policy_and_not_under_auto(row, queries, keys):
    needs(row)
    tensors = operands(queries, keys)
    mask = torch.ones(queries, keys, device=DEVICE, dtype=torch.bool)
    _, gradients = run(tensors, mask)
    assert not finite(gradients), "the row is no longer true of these versions"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xt.kernel_policy(attention="auto"):
            out, gradients = run(tensors, mask)
    assert finite((out, *gradients))


def test_kernels_that_are_named_are_refused():
    needs(OF_KEYS)
    tensors = operands(192, 192)
    mask = torch.zeros(192, 192, device=DEVICE, dtype=torch.bfloat16)
    for kernel in OF_KEYS.kernels:
        policy = xrt.Policy(kernels={"attention": kernel}, mode="strict")
        with xt.kernel_policy(policy), pytest.raises(UnsupportedOperationError, match="NaN"):
            run(tensors, mask)


def test_what_is_left_to_pytorch_is_warned_of():
    needs(OF_KEYS)
    said = pytest.warns(XpuRuntimeWarning, match=r"attention is left to PyTorch, which may choose torch\.cudnn")
    with said, xt.kernel_policy(matmul="cublasLt"):
        assert installed() == ()
    rules = [{"match": {"op": "attention"}, "use": "torch"}]
    with pytest.warns(XpuRuntimeWarning, match="which PyTorch chooses"), xt.kernel_policy(rules=rules):
        run(operands(192, 192), None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["", "boolean"])
def test_compiled_code_takes_another_kernel_under_auto(kind, dynamic):
    needs(OF_KEYS)
    compiled = torch.compile(attend, dynamic=dynamic)
    with xt.kernel_policy(attention="auto"):
        for length in (256, 192) if dynamic else (192,):
            tensors = operands(length, length)
            mask = torch.ones(length, length, device=DEVICE, dtype=torch.bool) if kind else None
            out = compiled(*tensors, attn_mask=mask)
            gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
            assert finite((out, *gradients))


def test_compiled_code_obeys_kernels_that_are_named():
    tensors = operands(256, 256, low=False)
    expected = run(tensors, None)
    for kernel, name in (("torch.flash", "Flash"), ("torch.efficient", "Efficient"), ("torch.cudnn", "Cudnn")):
        torch._dynamo.reset()
        policy = xrt.Policy(kernels={"rules": [{"match": {"op": "attention"}, "use": kernel}]}, mode="strict")
        with xt.kernel_policy(policy), torch.profiler.profile(acc_events=True) as profile:
            found = torch.compile(attend)(*tensors)
            gradients = torch.autograd.grad(found, tensors, torch.ones_like(found))
        ran = {average.key for average in profile.key_averages()}
        assert f"aten::_scaled_dot_product_{name.lower()}_attention" in ran
        torch.testing.assert_close((found, gradients), expected, rtol=5e-2, atol=5e-2)


def test_why_traced_code_cannot_have_a_kernel_is_said_by_no_warning():
    seen = []

    def choice(query, mask):
        seen.append(
            sdpa_backends.rejection("torch.flash", *[query] * 3, mask, 0.0, False, scale=None, enable_gqa=False)
        )
        return query.clone()

    library = torch.library.Library("xpuruntime_test", "DEF")
    library.define("choice(Tensor query, Tensor mask) -> Tensor")
    library.impl("choice", choice, "CompositeImplicitAutograd")
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        query = torch.empty(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
        torch.ops.xpuruntime_test.choice(query, torch.empty(256, 256, device="cuda", dtype=torch.bool))
    library._destroy()
    assert "attn_mask" in seen[0]


@pytest.mark.parametrize("row", [OF_BOOLEAN_MASKS, OF_OTHER_TYPES])
def test_masks_count_under_auto(row):
    needs(row)
    tensors = operands(256, 256, low=False)
    mask = torch.ones(256, 256, device=DEVICE, dtype=torch.bool)
    mask[:4] = False
    if row is OF_OTHER_TYPES:
        mask = torch.zeros(256, 256, device=DEVICE).masked_fill_(~mask, -torch.inf)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected, _ = run(wide, mask if mask.dtype == torch.bool else mask.double())

    def error():
        return (run(tensors, mask)[0].double() - expected).abs().nan_to_num(math.inf).max().item()

    assert error() > 0.05, "the row is no longer true of these versions"
    with xt.kernel_policy(attention="auto"):
        assert error() < 0.02
