# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's own tests of what a policy can decide, on CUDA: what passes natively passes under a policy."""

from __future__ import annotations

import pytest
import torch
from opinfo_cases import OPS, Case

import xpuruntime.pytorch as xt

pytestmark = pytest.mark.torch

POLICIES = {
    "cuda_raw": {
        "matmul": "cuda_raw.skinny",
        "attention": "cuda_raw.flash_attention_v2",
        "layer_norm": "cuda_raw.layer_norm",
        "rms_norm": "cuda_raw.rms_norm",
        "conv": "cudnn.conv_default",
    },
    "vendors": {
        "matmul": "cublas.cublasLt",
        "attention": "cudnn.sdpa",
        "layer_norm": "cuda_raw.layer_norm",
        "rms_norm": "cuda_raw.rms_norm",
        "conv": "cudnn.conv_heuristic",
    },
}
#: Operators that must be served in fp32, in every one of these policies.
NORMS = ("native_layer_norm", "nn.functional.layer_norm", "nn.functional.rms_norm")
#: By the policy of the vendors' libraries alone: fp32 operators that must be served there.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "nn.functional.linear")
CONVOLUTIONS = ("nn.functional.conv1d", "nn.functional.conv2d")

everything = [pytest.param(policy, name, id=f"{policy}-{name}") for policy in POLICIES for name in OPS]


@pytest.fixture(autouse=True)
def _exact_and_clean():
    """Products and convolutions in fp32 proper, so that results can be compared closely; no policy before or after."""
    xt.clear_kernel_policy()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    xt.clear_kernel_policy()


def case(policy: str, name: str) -> Case:
    return Case(name, "cuda", POLICIES[policy])


@pytest.mark.parametrize(("policy", "name"), everything)
def test_forward(policy, name):
    served = case(policy, name).forward(torch.float32, most=20)
    assert set(served) <= set(POLICIES[policy].values())
    if name in (*NORMS, *CONVOLUTIONS) or (policy == "vendors" and name in PRODUCTS):
        assert served, f"{name} ran by PyTorch's own kernels alone"


@pytest.mark.parametrize(("policy", "name"), everything)
def test_forward_and_gradients_in_16_bits(policy, name):
    one = case(policy, name)
    for dtype in (torch.bfloat16, torch.float16):
        if one.takes(dtype):
            served = one.forward(dtype, most=8)
            assert served or name not in (*NORMS, *CONVOLUTIONS)
        if one.differentiates(dtype):
            one.backward(dtype, most=4)


@pytest.mark.parametrize(("policy", "name"), everything)
def test_gradients(policy, name):
    served = case(policy, name).backward(torch.float32, most=8)
    assert served or name not in (*NORMS, *CONVOLUTIONS)


@pytest.mark.parametrize("name", OPS)
def test_gradients_by_finite_differences(name):
    assert case("vendors", name).gradcheck(most=1) > 0


@pytest.mark.parametrize("name", OPS)
def test_errors_are_those_of_pytorch(name):
    one = case("vendors", name)
    assert one.errors() > 0 or one.info.error_inputs_func is None


@pytest.mark.parametrize(("policy", "name"), everything)
def test_out(policy, name):
    one = case(policy, name)
    if one.info.supports_out:
        assert one.out(torch.float32, most=4) > 0
