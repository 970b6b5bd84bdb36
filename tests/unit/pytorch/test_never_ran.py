# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a policy names and what never runs: refused on entry where it can be known then, and else a deviation."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards")]


def strict(**kernels):
    return xrt.Policy(mode="strict", kernels=kernels)


class OwnNorm(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = torch.nn.Parameter(torch.ones(8)), kind


class Products(OwnNorm):
    def forward(self, x):
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x


class Calls(OwnNorm):
    def forward(self, x):
        x = torch.nn.functional.rms_norm(torch.nn.functional.layer_norm(x, (8,)), (8,), self.weight)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).softmax(-1) @ x.transpose(-1, -2)


def test_a_module_that_computes_an_operation_by_others_is_a_gap_and_a_deviation():
    kind, op = Products, "attention"
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), kind(op), kind(op)), torch.randn(2, 4, 8)
    policy = strict(**{op: "cpu.reference"})
    gaps = xt.coverage_gaps(policy, module=model)
    assert [(gap.op, gap.what) for gap in gaps] == [(op, "1"), (op, "2")]
    assert kind.__qualname__ in gaps[0].reason
    with xt.kernel_policy(policy), xt.explain(root=model) as found:
        model(x).sum().backward()
    (sentence,) = found.never_ran
    assert "0 calls obey" in sentence
    assert "0 of 2" in sentence
    assert kind.__qualname__ in sentence
    assert "never ran" in str(found)
    with pytest.raises(UnsupportedOperationError, match=r"0 calls obey.*Fix: .* require\(no_unmatched=False\)"):
        found.require()
    assert xt.coverage_gaps(strict(**{op: "torch"}), module=model) == ()


@pytest.mark.parametrize("stated", [{"dtype": "bf16"}, {"m": ">1000"}, {"phase": "decode"}, {"device": "cuda:0"}])
def test_a_rule_whose_conditions_hold_for_no_call_is_noted_and_no_deviation(stated):
    policy = strict(rules=[{"match": {"op": "matmul", **stated}, "use": "cpu.reference"}])
    with xt.kernel_policy(policy), xt.explain() as found:
        torch.nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
    ((name, value),) = stated.items()
    assert found.notes == (f"kernels.rules[0] (op: matmul, {name}: {value}) decided no call that was seen",)
    found.require()


def test_a_compiled_root_is_asked_for_its_modules():
    model = torch.compile(torch.nn.Linear(8, 8), backend="aot_eager")
    with xt.kernel_policy(rms_norm="cpu.reference"), xt.explain(root=model) as found:
        model(torch.randn(4, 8))
    assert "0 calls obey" in found.never_ran[0]


def test_a_module_that_calls_them_is_none():
    policy = strict(rms_norm="cpu.reference", layer_norm="cpu.reference", attention="cpu.reference")
    model = torch.nn.Sequential(Calls(""), torch.nn.RMSNorm(8), torch.nn.LayerNorm(8), torch.nn.Softmax(-1))
    assert xt.coverage_gaps(policy, module=model) == ()
    with xt.kernel_policy(policy), xt.explain() as found:
        Calls("")(torch.randn(1, 1, 8, 8))
    assert found.require().never_ran == ()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "complex64"])
@pytest.mark.parametrize("kernel", ["cpu.reference", "cublasLt"])
@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_products_of_other_numbers_than_floats_stay_pytorchs_own_and_obey_nothing(dtype, kernel):
    x = torch.ones(4, 4, dtype=getattr(torch, dtype))
    mode = "strict" if kernel == "cpu.reference" else "prefer"
    with xt.kernel_policy(xrt.Policy(mode=mode, kernels={"matmul": kernel})), xt.explain() as found:
        assert torch.equal(x @ x, 4 * x)
        assert torch.equal(torch.addmm(x, x, x), 5 * x)
        assert torch.equal(x[None] @ x[None], 4 * x[None])
        assert torch.equal(x @ x[0], 4 * x[0])
    rows = {row.operator: row for row in found.rows if row.op == "matmul"}
    assert set(rows) == {"aten::mm", "aten::addmm", "aten::bmm", "aten::mv"}
    for row in rows.values():
        assert (row.status, row.requested, row.source, row.dtypes) == ("default", (), "default", (dtype,))
        assert "does not include products of integers" in row.reason
    assert found.coverage.honoured == 0
    with pytest.raises(UnsupportedOperationError, match="but products of integers or complex numbers"):
        found.require()
    with xt.kernel_policy(strict(matmul="cpu.reference")), xt.explain() as found:
        x @ x
        torch.ones(4, 4) @ torch.ones(4, 4)
    found.require()


@pytest.fixture
def unknown_operator():
    library = torch.library.Library("some_other_package", "DEF")
    library.define("compute(Tensor x) -> Tensor")
    library.impl("compute", lambda x: torch.from_numpy(x.numpy() * 2), "CPU")
    yield torch.ops.some_other_package.compute
    library._destroy()


@pytest.mark.parametrize("products", [True, False])
def test_what_an_opaque_row_may_hide_is_inconclusive(unknown_operator, products):
    x = torch.ones(4, 4)
    with xt.kernel_policy(strict(rms_norm="cpu.reference", matmul="cpu.reference")), xt.explain() as found:
        unknown_operator(x)
        if products:
            x @ x
    named = [sentence.split(":")[1].split()[0] for sentence in found.never_ran]
    assert named == (["kernels.rms_norm"] if products else ["kernels.matmul", "kernels.rms_norm"])
    for sentence in found.never_ran:
        assert sentence.startswith("inconclusive: ")
        assert "some_other_package::compute" in sentence
    with pytest.raises(UnsupportedOperationError, match="some_other_package::compute cannot be seen"):
        found.require()
    assert found.require(no_unmatched=False) is found


def test_compiled_code_hides_norms_alone():
    compiled = torch.compile(lambda x: (x + 1).sin())
    x = torch.ones(64)
    with xt.kernel_policy(strict(layer_norm="cpu.reference", attention="cpu.reference")):
        compiled(x)
        with xt.explain() as found:
            compiled(x)
    attention, norm = found.never_ran
    assert attention.startswith("kernels.attention names")
    assert norm.startswith("inconclusive: kernels.layer_norm")
    assert "torch.compile" in norm


IMPOSSIBLE = [
    {"op": "attention", "m": "<=1"}, {"op": "layer_norm", "m": "<=4"}, {"op": "conv", "n": "<=4"},
    {"op": "matmul", "head_dim": "<=64"}, {"op": "matmul", "kv": "<=64"}, {"m": 1, "head_dim": 64},
]  # fmt: skip


@pytest.mark.parametrize("match", IMPOSSIBLE)
def test_a_rule_whose_keys_its_operation_lacks(match):
    kernels = {"rules": [{"match": match, "use": "torch"}]}
    with pytest.raises(UnsupportedOperationError, match=r"kernels.rules\[0\] can match no call"):
        xt.set_kernel_policy(strict(**kernels))
    assert xt.get_kernel_policy() is None
    with pytest.warns(XpuRuntimeWarning, match="can match no call"), xt.kernel_policy(xrt.Policy(kernels=kernels)):
        pass
    assert [gap.what for gap in xt.coverage_gaps(xrt.Policy(kernels=kernels))] == ["kernels.rules[0]"]


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        ({"matmul": "cpu.blass"}, r"kernels\.matmul asks for cpu\.blass, .*did you mean 'cpu\.blas'\?"),
        ({"attention": ["torch.flashh", "nobody.attention"]}, r"kernels\.attention asks for torch\.flashh, nobody"),
        ({"rules": [{"match": {"op": "rms_norm"}, "use": "cpu.refrence"}]}, r"rules\[0\] asks for cpu\.refrence"),
        ({"rules": [{"match": {"module": "*"}, "use": "nobody.kernel"}]}, r"rules\[0\] asks for nobody\.kernel, and"),
    ],
)
def test_kernels_that_nobody_knows_are_refused_before_anything_runs(kernels, words):
    with pytest.raises(UnsupportedOperationError, match=rf"{words}.*Fix: "), xt.kernel_policy(strict(**kernels)):
        pass
    with xt.kernel_policy(strict(matmul=["nobody.gemm", "auto"], attention=["nobody.attention", "torch"])):
        pass


def test_a_rule_of_a_module_that_the_root_lacks_is_refused_before_anything_runs():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    policy = strict(rules=[{"match": {"op": "matmul", "module": "layer.0"}, "use": "cpu.reference"}])
    with pytest.raises(UnsupportedOperationError, match=r"root has no module 'layer\.0'"):
        xt.set_kernel_policy(policy, root=model)
    assert [gap.what for gap in xt.coverage_gaps(policy, module=model)] == ["kernels.rules[0]"]
    named = strict(rules=[{"match": {"op": "matmul", "module": "0"}, "use": "cpu.reference"}])
    with xt.kernel_policy(named, root=model), xt.explain(root=model) as found:
        model(torch.randn(2, 8))
    found.require()


@pytest.mark.parametrize("use", ["compiled.swiglu", ["liger.swiglu", "compiled.swiglu"], "flash_v2"])
def test_a_rule_without_an_operation_names_kernels_of_the_one_that_they_compute(use):
    op = "attention" if use == "flash_v2" else "swiglu"
    with xt.kernel_policy(rules=[{"match": {"module": "*"}, "use": use}]), xt.explain() as found:
        torch.nn.Sequential(torch.nn.SiLU())(torch.ones(2, 2))
    (sentence,) = found.never_ran
    assert sentence.startswith(f"kernels.rules[0] names a kernel for {op}, and no call of {op} was seen")
    with pytest.raises(UnsupportedOperationError, match="0 calls obey"):
        found.require()


@pytest.mark.parametrize("use", ["cpu.reference", "cpu.vectorised", "auto", "torch"])
def test_a_rule_without_an_operation_whose_kernels_compute_several_or_any_names_none(use):
    with xt.kernel_policy(rules=[{"match": {"module": "*"}, "use": use}]), xt.explain() as found:
        torch.nn.Sequential(torch.nn.SiLU())(torch.ones(2, 2))
    assert found.require().never_ran == ()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch has cuBLASLt")
@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_a_library_that_this_pytorch_lacks_is_no_default():
    with xt.kernel_policy(matmul="cublasLt"), xt.explain() as found:
        torch.ones(2, 2) @ torch.ones(2, 2)
    (row,) = (row for row in found.rows if row.op == "matmul")
    assert (row.requested, row.source, row.status) == (("cublasLt",), "kernels.matmul", "substituted")
    with xt.kernel_policy(matmul=["cublasLt", "auto"]), xt.explain() as found:
        torch.ones(2, 2) @ torch.ones(2, 2)
    found.require()
