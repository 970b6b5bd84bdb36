# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`varlen_attn` under a policy. PyTorch has no kernel of it for the CPU; one by einsum stands for FlashAttention."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")
torch_varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this PyTorch has no varlen_attn")

from attention_calls import rule, sdpa, strict  # noqa: E402 - it needs PyTorch
from packed_attention import kernels_for_the_cpu  # noqa: E402
from torch.nn import attention as torch_attention  # noqa: E402

from xpuruntime.pytorch.dispatch.overrides import registry  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_policy_of_attention_is_left", "flash_on_the_cpu"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's compiler, on loading
]

OPERATOR = "torch_attn::_varlen_attn"
NO_FORM = "varlen_attn stays PyTorch's because this one has no form for sequences that are packed into one tensor"
LENGTHS = (3, 5)


@pytest.fixture
def flash_on_the_cpu():
    library = kernels_for_the_cpu()
    yield
    library._destroy()


@pytest.fixture
def operands():
    return [torch.randn(sum(LENGTHS), 2, 16, requires_grad=True) for _ in range(3)]


def attend(q, k, v):
    places = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch_varlen.varlen_attn(q, k, v, places, places, max(LENGTHS), max(LENGTHS))


def expected(q, k, v):
    parts = [x.split(LENGTHS) for x in (q, k, v)]
    outs = [sdpa(*(x.transpose(0, 1)[None] for x in sequence))[0].transpose(0, 1) for sequence in zip(*parts)]  # noqa: B905
    return torch.cat(outs)


def attention_rows(found):
    return [row for row in found.rows if row.op == "attention"]


def test_flash_is_what_runs(operands):
    with xt.kernel_policy(strict("torch.flash")), xt.explain() as report:
        out = attend(*operands)
        grads = torch.autograd.grad(out.sum(), operands)
    torch.testing.assert_close(out, expected(*operands))
    torch.testing.assert_close(grads, torch.autograd.grad(expected(*operands).sum(), operands))
    rows = {row.operator: row for row in attention_rows(report)}
    assert set(rows) == {OPERATOR, f"{OPERATOR}_backward"}
    for operator, phase in ((OPERATOR, "train"), (f"{OPERATOR}_backward", "backward")):
        row = rows[operator]
        assert (row.requested, row.source) == (("torch.flash",), "kernels.attention")
        assert (row.resolved, row.status, row.phase, row.count) == ("torch.flash", "honoured", phase, 1)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("cpu.reference", NO_FORM),
        pytest.param("cuda_raw.flash_attention_v2", NO_FORM, marks=pytest.mark.needs_build("cuda")),
        pytest.param("cudnn.sdpa", NO_FORM, marks=pytest.mark.needs_build("cudnn")),
        ("torch.cudnn", "torch.cudnn: this PyTorch has cuDNN turned off for varlen_attn"),
        ("torch.math", "it is a kernel of scaled_dot_product_attention and flex_attention, and this is varlen_attn"),
        ("torch.efficient", "it is a kernel of scaled_dot_product_attention, and this is varlen_attn"),
        ("torch.flex_triton", "it is a kernel of flex_attention, and this is varlen_attn"),
        ("trt_fused", "varlen_attn has no such kernel"),
        ("plugin.attention", "varlen_attn has no such kernel"),
    ],
)
def test_what_cannot_serve_is_said_and_refused_under_strict(operands, word, why):
    said = pytest.warns(XpuRuntimeWarning, match=rf"varlen_attn of \[8, 2, 16\] fp32 on cpu runs by .*: {word}: ")
    with xt.kernel_policy(xrt.KernelPolicy(rules=[rule(word)])), xt.explain() as report, said:
        out = attend(*operands)
    torch.testing.assert_close(out, expected(*operands))
    (row,) = attention_rows(report)
    assert (row.requested, row.resolved, row.status) == ((word,), "torch.varlen", "substituted")
    assert why in row.reason
    refused = pytest.raises(UnsupportedOperationError, match=f"{why}|and there is no such kernel")
    with refused, xt.kernel_policy(strict(rules=[rule(word)])):
        attend(*operands)
    with xt.kernel_policy(strict(rules=[rule([word, "torch.flash"])])):
        torch.testing.assert_close(attend(*operands), expected(*operands))


def test_rules_by_phase_and_module(operands):
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, q, k, v):
            return self.b(self.a(q, k, v), k, v)

    model = Model()
    rules = [
        rule("torch.flash", module="a", phase="train"),
        rule(["torch.cudnn", "torch.flash"], module="b", phase="backward"),
        rule(["torch.cudnn", "torch"], phase="infer"),
    ]
    with xt.kernel_policy(strict(rules=rules)), xt.explain() as report:
        model(*operands).sum().backward()
        with torch.no_grad():
            model(*operands)
    rows = {(row.module, row.phase): (row.source, row.resolved, row.status) for row in attention_rows(report)}
    assert rows == {
        ("a", "train"): ("kernels.rules[0]", "torch.flash", "honoured"),
        ("b", "train"): ("default", "torch.varlen", "default"),
        ("a", "backward"): ("default", "torch.varlen", "default"),
        ("b", "backward"): ("kernels.rules[1]", "torch.flash", "honoured"),
        ("a", "infer"): ("kernels.rules[2]", "torch.varlen", "honoured"),
        ("b", "infer"): ("kernels.rules[2]", "torch.varlen", "honoured"),
    }


def test_strict_refuses_a_gradient_by_another_kernel_in_the_forward(operands):
    rules = [rule("torch.flash", phase=["train", "infer"]), rule("cudnn.sdpa", phase="backward")]
    with (
        xt.kernel_policy(strict(rules=rules)),
        pytest.raises(UnsupportedOperationError, match="the gradient of varlen_attn"),
    ):
        attend(*operands)
    with xt.kernel_policy(strict(rules=rules)), torch.no_grad():
        attend(*operands)


def test_what_is_active_in_place_of_flash(operands, monkeypatch):
    monkeypatch.setattr(torch_attention, "current_flash_attention_impl", lambda: "FA3")
    with xt.kernel_policy(strict(rules=[rule("flash_v3")])), xt.explain() as report:
        attend(*operands)
    (row,) = attention_rows(report)
    assert (row.resolved, row.status) == ("flash_v3", "honoured")
    refused = pytest.raises(UnsupportedOperationError, match=r"FA3 is active in its place; .*restore_flash_attention")
    with xt.kernel_policy(strict(rules=[rule("torch.flash")])), refused:
        attend(*operands)
    monkeypatch.undo()
    refused = pytest.raises(UnsupportedOperationError, match="FlashAttention 3 is not active in PyTorch's registry")
    with xt.kernel_policy(strict(rules=[rule("flash_v3")])), refused:
        attend(*operands)


def test_compiled_code_looks_the_policy_up_when_it_runs(operands):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True)
    with xt.kernel_policy(strict("torch.flash")), xt.explain() as report:
        torch.testing.assert_close(compiled(*operands), expected(*operands))
    assert {(row.resolved, row.status) for row in attention_rows(report)} == {("torch.flash", "honoured")}
    with xt.kernel_policy(strict("cpu.reference")), pytest.raises(UnsupportedOperationError, match=NO_FORM):
        compiled(*operands)


def test_rules_of_a_module_and_a_phase_in_compiled_code(operands):
    class Attending(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Attending(), Attending()])

        def forward(self, q, k, v):
            return self.layers[1](self.layers[0](q, k, v), k, v)

    torch._dynamo.reset()
    model = Twice()
    compiled = torch.compile(model, fullgraph=True)
    with xt.kernel_policy(strict(rules=[{"match": {"op": "attention", "module": "layers.1"}, "use": "torch.flash"}])):
        grads = torch.autograd.grad(compiled(*operands).sum(), operands)
        with xt.explain() as report:
            torch.autograd.grad(compiled(*operands).sum(), operands)
    torch.testing.assert_close(grads, torch.autograd.grad(model(*operands).sum(), operands))
    assert {(row.module, row.phase, row.status) for row in attention_rows(report)} == {
        (f"layers.{index}", phase, status)
        for index, status in enumerate(("default", "honoured"))
        for phase in ("train", "backward")
    }
    refuses = {"match": {"op": "attention", "module": "layers.1", "phase": "train"}, "use": "cpu.reference"}
    with xt.kernel_policy(strict(rules=[refuses])):
        with torch.no_grad():
            compiled(*operands)
        with pytest.raises(UnsupportedOperationError, match=NO_FORM):
            compiled(*operands)


@pytest.mark.skipif(not hasattr(torch_varlen, "varlen_attn_out"), reason="this PyTorch has no varlen_attn_out")
def test_the_form_that_writes_into_a_tensor(operands):
    q, k, v = (x.detach() for x in operands)
    places = torch.tensor([0, 3, 8], dtype=torch.int32)
    out = torch.empty_like(q)
    with xt.kernel_policy(strict("torch.flash")), xt.explain() as report:
        torch_varlen.varlen_attn_out(out, q, k, v, places, places, 5, 5)
    torch.testing.assert_close(out, expected(q, k, v))
    (row,) = attention_rows(report)
    assert (row.operator, row.resolved, row.status) == (f"{OPERATOR}_out", "torch.flash", "honoured")


def test_without_a_policy_it_is_the_default(operands):
    with xt.explain() as report:
        attend(*operands)
    (row,) = attention_rows(report)
    assert (row.requested, row.resolved, row.status) == ((), "torch.varlen", "default")


def test_everything_is_given_back(operands):
    def tables():
        return [torch._C._dispatch_dump_table(f"{OPERATOR}{form}") for form in ("", "_backward")]

    before = tables()
    with xt.kernel_policy(attention="torch.flash"):
        assert f"{OPERATOR} [CPU]" in registry.installed()
        assert tables() != before
    assert tables() == before
    with xt.kernel_policy(matmul="cpu.blas", attention="auto"):
        assert tables() == before
        attend(*operands)


IMPORTED_LATER = """
    import sys
    import torch, xpuruntime.pytorch as xt
    from xpuruntime.pytorch.dispatch.overrides.registry import installed
    with xt.kernel_policy(attention="torch.flash"):
        pass  # imports what waits for modules of PyTorch as long as the process lives
    finders = len(sys.meta_path)
    with xt.kernel_policy(attention=["torch.flash", "cpu.reference"]):
        assert not any("varlen" in name or "_options" in name for name in installed()), installed()
        assert "torch.nn.attention.varlen" not in sys.modules
    assert len(sys.meta_path) == finders
    with xt.kernel_policy(attention="torch.flash"):
        import torch.nn.attention.varlen, torch.nn.attention.flex_attention
        names = installed()
        assert "torch_attn::_varlen_attn [CPU]" in names, names
        assert "higher_order::flex_attention [CompositeExplicitAutograd]" in names, names
        assert "torch.nn.attention.flex_attention._apply_kernel_options" in names, names
    assert installed() == ()
"""


def test_what_is_imported_under_a_policy_is_under_it():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(IMPORTED_LATER)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
