# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's own tests of the operators that a policy can decide, on CPU: what passes natively passes under a policy."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from opinfo_cases import OPS, Case  # noqa: E402 - it needs PyTorch

import xpuruntime.pytorch as xt  # noqa: E402

pytestmark = pytest.mark.torch

REFERENCE = dict.fromkeys(("matmul", "attention", "layer_norm", "rms_norm", "conv"), "cpu.reference")
FAST = {
    "matmul": "cpu.blas",
    "attention": "cpu.reference",
    "layer_norm": "cpu.vectorised",
    "rms_norm": "cpu.vectorised",
    "conv": "cpu.gemm_conv",
}
POLICIES = {"reference": REFERENCE, "fast": FAST}
#: Operators of which PyTorch's samples have nothing that these kernels take, by policy, with the reason.
NOTHING_SERVED = {
    "inner": "vectors alone",
    "nn.functional.conv3d": "three dimensions",
    "nn.functional.conv_transpose2d": "transposed",
}

SERVED = [name for name in OPS if name not in NOTHING_SERVED]

#: One operator of each override: its forms reach the other kernel of an operation in one way.
FAST_OPS = (
    "mm", "addmm", "baddbmm", "nn.functional.linear", "nn.functional.scaled_dot_product_attention",
    "nn.functional.layer_norm", "nn.functional.rms_norm", "nn.functional.conv2d",
)  # fmt: skip
everything = [
    pytest.param(policy, name, id=f"{policy}-{name}")
    for policy, names in (("reference", OPS), ("fast", FAST_OPS))
    for name in names
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    # The samples are tiny: a second thread costs more than it does.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_policy():
    xt.clear_kernel_policy()
    yield
    xt.clear_kernel_policy()


def case(policy: str, name: str) -> Case:
    return Case(name, "cpu", POLICIES[policy])


@pytest.mark.parametrize(("policy", "name"), everything)
def test_forward(policy, name):
    served = case(policy, name).forward(torch.float32, most=12)
    assert bool(served) is (name not in NOTHING_SERVED), served
    assert set(served) <= set(POLICIES[policy].values())


@pytest.mark.parametrize("name", OPS)
def test_forward_in_other_types(name):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        operation = case("reference", name)
        if operation.takes(dtype):
            assert bool(operation.forward(dtype, most=4)) is (name not in NOTHING_SERVED)


@pytest.mark.parametrize("name", ["mm", "bmm", "matmul", "nn.functional.linear"])
def test_what_is_not_ours_stays_as_it_is(name):
    for dtype in (torch.complex64, torch.int64):
        operation = case("reference", name)
        if operation.takes(dtype):
            assert not operation.forward(dtype, most=12)


@pytest.mark.parametrize(("policy", "name"), everything)
def test_gradients(policy, name):
    operation = case(policy, name)
    assert bool(operation.backward(torch.float32, most=6)) is (name not in NOTHING_SERVED)
    if policy == "reference" and operation.differentiates(torch.bfloat16):
        operation.backward(torch.bfloat16, most=3)


@pytest.mark.parametrize("name", SERVED)
def test_gradients_by_finite_differences(name):
    assert case("reference", name).gradcheck(most=2) > 0


@pytest.mark.parametrize("name", OPS)
def test_errors_are_those_of_pytorch(name):
    operation = case("reference", name)
    assert operation.errors() > 0 or operation.info.error_inputs_func is None


@pytest.mark.parametrize("name", OPS)
def test_out(name):
    operation = case("reference", name)  # where a result goes is the same for each kernel
    if operation.info.supports_out:
        assert operation.out(torch.float32, most=4) > 0
