# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arguments that a kernel calls wrong: reported as not served where PyTorch takes them, else PyTorch's own error."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime import _core  # noqa: E402
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning  # noqa: E402
from xpuruntime.ops import plugins  # noqa: E402
from xpuruntime.pytorch.dispatch.context import CONTEXT  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

F = torch.nn.functional
IMAGE, FILTER = torch.arange(32.0).view(1, 2, 4, 4), torch.ones(3, 2, 3, 3)
CALLS = {
    "matmul": lambda: torch.mm(torch.arange(6.0).view(2, 3), torch.ones(3, 2)),
    "layer_norm": lambda: F.layer_norm(torch.arange(12.0).view(3, 4), (4,)),
    "rms_norm": lambda: F.rms_norm(torch.arange(12.0).view(3, 4), (4,)),
    "conv": lambda: F.conv2d(IMAGE, FILTER),
}


class Picky(plugins.PythonKernel):
    """Takes every call, and finds its arguments wrong when it runs."""

    description, limits = "for tests", "none"

    def __init__(self, op):
        self.op, self.id, self.runs = op, f"testing_picky.{op}", 0

    def supports(self, op):
        return True, ""

    def prepare(self, op, config):
        if config:
            raise UnsupportedOperationError(f"it has no configuration,\nnot even {config}")

        def run(operands, stream):
            self.runs += 1
            raise InputError("these arguments are wrong, says the kernel")

        return run


@pytest.fixture(params=sorted(CALLS))
def picky(request):
    kernel = Picky(request.param)
    plugins.register(plugins.KernelBackend("testing_picky", "cpu", "1"), kernel)
    yield kernel
    _core.KernelRegistry.instance().remove("testing_picky")


def test_what_pytorch_takes_is_said_and_served_by_pytorch(picky):
    call, wanted = CALLS[picky.op], CALLS[picky.op]()
    policy = xrt.KernelPolicy(rules=[{"match": {"op": picky.op}, "use": picky.id}])
    with torch.no_grad(), xt.kernel_policy(policy):
        with pytest.warns(XpuRuntimeWarning, match="these arguments are wrong, says the kernel"):
            found = call()
        assert torch.equal(found, wanted)
        runs = picky.runs
        assert runs
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with xt.explain() as explanation:
                assert torch.equal(call(), wanted)
        assert picky.runs == runs, "its route is known, and the kernel is not tried again"
    (row,) = (row for row in explanation.rows if row.op == picky.op)
    assert (row.status, row.requested) == ("substituted", (picky.id,))
    assert "these arguments are wrong" in row.reason


def test_strict_refuses_it(picky):
    strict = xrt.Policy(mode="strict", kernels={"rules": [{"match": {"op": picky.op}, "use": picky.id}]})
    with torch.no_grad(), xt.kernel_policy(strict), pytest.raises(UnsupportedOperationError, match="says the kernel"):
        CALLS[picky.op]()


def test_a_configuration_that_is_refused_has_its_own_reason(picky):
    use = f"{picky.id}@fast"
    strict = xrt.Policy(mode="strict", kernels={"rules": [{"match": {"op": picky.op}, "use": use}]})
    with torch.no_grad(), xt.kernel_policy(strict), pytest.raises(UnsupportedOperationError) as refused:
        CALLS[picky.op]()
    assert refused.value.passed_over == ((use, "it has no configuration,\nnot even fast"),)


@pytest.mark.parametrize("mode", ["prefer", "strict"])
def test_arguments_that_pytorch_refuses_leave_no_trace(mode):
    """The error is PyTorch's, nothing is warned of, and no route is made of the kernel that was asked for."""
    a, b = torch.ones(2, 3), torch.ones(4, 2)
    with pytest.raises(RuntimeError) as natively:
        torch.mm(a, b)
    policy = xrt.Policy(mode=mode, kernels={"matmul": "cpu.blas"})
    with xt.kernel_policy(policy), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError) as under:
            torch.mm(a, b)
        assert CONTEXT.process_policy is not None
        assert all(not route.passed_over for route in CONTEXT.process_policy.routes.values())
    assert str(under.value) == str(natively.value)


def test_a_result_that_overlaps_an_operand_is_the_product():
    """The kernel refuses such a result, so that it gets another one, whichever part of the memory is shared."""
    memory = torch.arange(24.0)
    a, b, wanted = memory[:9].view(3, 3), torch.eye(3) * 2, memory[:9].view(3, 3) * 2
    apart = memory[12:21].view(3, 3)
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"matmul": "cpu.blas"})):
        assert torch.equal(torch.mm(a, b, out=apart), wanted)
        assert torch.equal(torch.mm(a, b, out=memory[3:12].view(3, 3)), wanted)
