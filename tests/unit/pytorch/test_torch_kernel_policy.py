# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`set_kernel_policy` and what belongs to it: an active policy, another one, none."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.optim import swa_utils  # noqa: E402


@pytest.fixture(autouse=True)
def _no_policy_is_left():
    from xpuruntime.pytorch.dispatch.overrides.registry import installed

    xt.clear_kernel_policy()
    xrt.clear_decisions()
    yield
    xt.clear_kernel_policy()
    assert installed() == ()


def chosen() -> list[str]:
    return [decision.chosen for decision in xrt.decisions()]


def test_set_get_clear():
    assert xt.get_kernel_policy() is None
    xt.set_kernel_policy(matmul="cpu.blas", attention="torch.flash")
    assert xt.get_kernel_policy() == xrt.KernelPolicy(matmul="cpu.blas", attention="torch.flash")
    xt.set_kernel_policy(None)
    assert xt.get_kernel_policy() is None
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert chosen() == []


def test_blocks_nest_and_restore():
    xt.set_kernel_policy(matmul="cpu.blas")
    with xt.kernel_policy(matmul="cpu.reference") as inner:
        assert inner.matmul == "cpu.reference"
        with xt.kernel_policy():
            assert xt.get_kernel_policy() is None
        assert xt.get_kernel_policy() is not None
    assert xt.get_kernel_policy().matmul == "cpu.blas"


def test_an_error_inside_a_block_restores():
    with pytest.raises(ZeroDivisionError), xt.kernel_policy(matmul="cpu.reference"):
        1 / 0  # noqa: B018
    assert xt.get_kernel_policy() is None


@pytest.mark.parametrize("kernels", [{"matmull": "cpu.blas"}, {"matmul": "flash_v2"}, {"matmul": "cublass"}])
def test_a_wrong_name_leaves_the_former_policy(kernels):
    xt.set_kernel_policy(matmul="cpu.blas")
    with pytest.raises(PolicyError):
        xt.set_kernel_policy(**kernels)
    assert xt.get_kernel_policy().matmul == "cpu.blas"


def test_a_policy_and_kernels_together_are_refused():
    with pytest.raises(PolicyError, match="both a policy and matmul"):
        xt.set_kernel_policy(xrt.KernelPolicy(), matmul="cpu.blas")


def test_a_block_that_is_not_entered_cannot_be_left():
    block = xt.kernel_policy(matmul="cpu.blas")
    with block:
        pass
    with pytest.raises(InputError, match="not entered, or its with block has been left"):
        block.__exit__(None, None, None)


def test_a_policy_can_be_a_file(tmp_path):
    path = tmp_path / "p.yaml"
    xrt.KernelPolicy(matmul="cpu.reference").save(path)
    with xt.kernel_policy(path):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert chosen() == ["cpu.reference"]


def test_no_warning_of_pytorch_is_heard():
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import torch, xpuruntime.pytorch as xt\n"
        "xt.set_kernel_policy(matmul='cpu.reference'); torch.mm(torch.ones(2, 2), torch.ones(2, 2))\n"
        "xt.clear_kernel_policy()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_rules_by_shape_dtype_and_phase():
    rules = [
        {"match": {"op": "matmul", "m": "<=2"}, "use": "cpu.reference"},
        {"match": {"op": "matmul", "phase": "backward", "dtype": "fp32"}, "use": "cpu.blas"},
    ]
    layer = torch.nn.Linear(5, 3, bias=False)
    with xt.kernel_policy(rules=rules):
        layer(torch.randn(2, 5)).sum()
        assert chosen() == ["cpu.reference"]
        loss = layer(torch.randn(4, 5)).square().sum()
        assert chosen() == ["cpu.reference"]
        loss.backward()
    assert set(chosen()) == {"cpu.reference", "cpu.blas"}


class Product(torch.nn.Module):
    def forward(self, x):
        return x @ x


class Wrapper(torch.nn.Module):
    """A module of the user's, in which a name is a name, whatever it is."""

    def __init__(self, inner, name):
        super().__init__()
        self.name = name
        setattr(self, name, inner)

    def forward(self, x):
        return getattr(self, self.name)(x)


@pytest.mark.parametrize(
    "name", ["_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module", "a_module"]
)
def test_a_name_like_that_of_a_wrapper_stays_in_the_path(name):
    x = torch.randn(4, 4)
    outer = torch.nn.Sequential(Wrapper(torch.nn.Sequential(Product()), name))
    with xt.kernel_policy(rules=[{"match": {"module": f"0.{name}.0"}, "use": "cpu.reference"}]):
        outer(x)
    assert [(decision.module, decision.count) for decision in xrt.decisions()] == [(f"0.{name}.0", 1)]


def test_a_kernel_that_nobody_knows_is_named_with_what_was_meant():
    for mode in ("auto", "prefer", "strict"):
        for use in ("cpu.blass", ["cpu.blass", "auto"]):
            with pytest.raises(UnsupportedOperationError, match=r"matmul asks for cpu\.blass,.* mean 'cpu\.blas'\?"):
                xt.set_kernel_policy(xrt.Policy(mode=mode, kernels={"matmul": use}))
    assert xt.get_kernel_policy() is None
    strict = xrt.Policy(mode="strict", kernels={"layer_norm": "cpuu.vectorised"})
    with pytest.raises(UnsupportedOperationError, match=r"no such kernel; did you mean 'cpu\.v"):
        xt.kernel_policy(strict).__enter__()
    q = torch.ones(1, 1, 2, 4)
    with (
        xt.kernel_policy(xrt.Policy(mode="strict", kernels={"attention": ["trt_fused", "cpu.reference"]})),
        xt.explain() as found,
    ):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    (row,) = (row for row in found.rows if row.op == "attention")
    assert (row.resolved, row.count) == ("cpu.reference", 1)  # the attempt is no row of its own
    assert "has TensorRT's fused attention kernels here" in row.reason


def test_without_pytorch_the_import_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import xpuruntime.pytorch\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith('xpuruntime.pytorch requires PyTorch. Install with: `pip install "torch>=')
    assert done.stdout.strip().endswith("(the extra xpuruntime[torch])")


@pytest.mark.parametrize(
    ("use", "op", "call"),
    [
        ("cpu.blas", "matmul", lambda: torch.nn.functional.rms_norm(torch.ones(2, 2), (2,))),
        ("cpu.vectorised", "layer_norm", lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2))),
        ("chunked.linear_cross_entropy", "linear_cross_entropy", lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2))),
    ],
)
def test_a_rule_without_an_operation_is_for_what_its_kernel_computes(use, op, call):
    rule = {"match": {"dtype": "fp32"}, "use": use}
    with (
        xt.kernel_policy(xrt.Policy(mode="strict", kernels=xrt.KernelPolicy(rules=[rule]))),
        pytest.raises(UnsupportedOperationError, match=f"it has no kernel for .* Fix: state op: {op}"),
    ):
        call()
    rule["match"]["op"] = op
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels=xrt.KernelPolicy(rules=[rule]))):
        call()


def test_a_rule_without_an_operation_reaches_kernels_of_packages():
    rule = {"match": {"dtype": "fp32"}, "use": "quack.softmax"}
    policy = xrt.Policy(mode="strict", kernels=xrt.KernelPolicy(rules=[rule]))
    with xt.kernel_policy(policy), pytest.raises(UnsupportedOperationError, match=r"quack\.softmax"):
        torch.softmax(torch.ones(2, 8), -1)
    rule["use"] = "cpu.blas"
    with xt.kernel_policy(rules=[rule]), xt.explain() as found:
        torch.softmax(torch.ones(2, 8), -1)
    assert {row.status for row in found.rows if row.op == "softmax"} == {"default"}
    assert any("decided no call" in note for note in found.notes)


def test_a_rule_of_an_operation_of_packages_is_named_by_its_place():
    rules = [
        {"match": {"op": "softmax", "dtype": "bf16"}, "use": "torch"},
        {"match": {"op": "softmax", "dtype": "fp32"}, "use": "triton:torch.nn.functional.softmax"},
    ]
    x = torch.randn(4, 8, requires_grad=True)
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules)), warnings.catch_warnings(), xt.explain() as found:
        warnings.simplefilter("ignore", UserWarning)
        torch.softmax(x, -1).sum().backward()
    rows = [row for row in found.rows if row.op == "softmax"]
    assert {(row.source, row.status) for row in rows} == {("kernels.rules[1]", "honoured")}
    assert [note for note in found.notes if "rules[1]" in note] == []


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.nn.DataParallel, swa_utils.AveragedModel])
def test_a_wrapper_and_what_it_holds_have_one_path(wrap):
    x = torch.randn(4, 4)
    outer = wrap(torch.nn.Sequential(wrap(Product()), Product()))
    with xt.kernel_policy(rules=[{"match": {"module": "0"}, "use": "cpu.reference"}]):
        outer(x)
        wrap(Product())(x)  # the model itself, whose path is empty
    assert [(decision.chosen, decision.count) for decision in xrt.decisions()] == [("cpu.reference", 1)]
