# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`flex_attention` and `varlen_attn` under a policy, on CUDA: the backend that is compiled, and FlashAttention."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention import varlen as torch_varlen

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.pytorch.attention import sdpa_backends
from xpuruntime.pytorch.dispatch.overrides.registry import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's compiler, on loading
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
]

TRITON, DECODE, FLASH = "torch.flex_triton", "torch.flex_decode", "torch.flex_flash"
PACKED = "torch_attn::_varlen_attn"
LENGTHS = (100, 28, 128)
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _no_policy_is_left(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    sdpa_backends.fix_backend_order()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    xt.clear_kernel_policy()
    assert installed() == ()
    torch._dynamo.reset()
    torch.cuda.synchronize()


def strict(*words: str, rules: Any = ()) -> dict[str, Any]:
    kernels = {"attention": list(words)} if words else {}
    return {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {**kernels, "rules": list(rules)}}


def rule(use: Any, **match: Any) -> dict[str, Any]:
    return {"match": {"op": "attention", **match}, "use": use}


def attention_rows(found: Any) -> list[Any]:
    return [row for row in found.rows if row.op == "attention"]


def operands(length: int = 256, heads: int = 4, *, grad: bool = False) -> list[torch.Tensor]:
    shape = (2, heads, length, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def nearer(score: Any, batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
    del batch, head
    return score - (q_index - k_index).abs() * 0.25


def flex(q: Any, k: Any, v: Any, **more: Any) -> Any:
    return torch_flex.flex_attention(q, k, v, score_mod=nearer, **more)


def unfused(q: Any, k: Any, v: Any) -> Any:
    place = torch.arange(q.shape[-2], device="cuda")
    bias = (place[:, None] - torch.arange(k.shape[-2], device="cuda")).abs() * -0.25
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def backends_lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the backend of each forward that Inductor lowers for CUDA."""
    from torch._inductor.kernel.flex import flex_attention as lowering

    seen: list[str] = []
    real = lowering._sanitize_kernel_options_for_triton

    def sanitize(options: dict[str, Any]) -> Any:
        seen.append(options.get("BACKEND", ""))
        return real(options)

    monkeypatch.setattr(lowering, "_sanitize_kernel_options_for_triton", sanitize)
    return seen


@pytest.mark.parametrize(("word", "backend", "length"), [(TRITON, "TRITON", 64), (DECODE, "TRITON_DECODE", 64), (TRITON, "TRITON", 512)])  # fmt: skip  # noqa: E501
def test_inductor_takes_the_backend_and_it_is_explained(word, backend, length, monkeypatch):
    seen = backends_lowered(monkeypatch)
    q, k, v = operands(length)
    compiled = torch.compile(flex, fullgraph=True)
    with xt.kernel_policy(strict(word)), torch.no_grad():
        close(compiled(q, k, v), unfused(q, k, v))
        with xt.explain() as report:
            compiled(q, k, v)
        assert set(seen) == {backend}
        rows = attention_rows(report)
        assert rows, report.rows
        for row in rows:
            assert (row.requested, row.source) == ((word,), "kernels.attention"), row
            assert (row.resolved, row.status) == (word, "honoured"), row
            assert row.observed[0].startswith("triton_"), row
        report.require()
    seen.clear()
    with torch.no_grad():
        compiled(q, k, v)
    assert set(seen) == {"AUTO"}


def test_forward_and_backward_of_a_training(monkeypatch):
    seen = backends_lowered(monkeypatch)
    tensors = operands(256, grad=True)
    expected = torch.autograd.grad(unfused(*tensors).float().square().sum(), tensors)
    compiled = torch.compile(flex, fullgraph=True)
    with xt.kernel_policy(strict(TRITON)):
        actual = torch.autograd.grad(compiled(*tensors).float().square().sum(), tensors)
        with xt.explain() as report:
            torch.autograd.grad(compiled(*tensors).float().square().sum(), tensors)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)
    assert set(seen) == {"TRITON"}
    assert len(seen) >= 2
    assert {(row.resolved, row.status) for row in attention_rows(report)} == {(TRITON, "honoured")}


def test_a_call_that_states_its_backend_is_explained_as_bypassed(monkeypatch):
    seen = backends_lowered(monkeypatch)
    q, k, v = operands(64)
    compiled = torch.compile(lambda q, k, v: flex(q, k, v, kernel_options={"BACKEND": "TRITON_DECODE"}), fullgraph=True)
    with xt.kernel_policy(strict(TRITON)), torch.no_grad():
        compiled(q, k, v)
        with xt.explain() as report:
            close(compiled(q, k, v), unfused(q, k, v))
    assert set(seen) == {"TRITON_DECODE"}
    assert {(row.resolved, row.status) for row in attention_rows(report)} == {(DECODE, "bypassed")}
    assert all("states its own backend, TRITON_DECODE" in row.reason for row in attention_rows(report))


def test_rules_by_module(monkeypatch):
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return flex(x, x, x)

    seen = backends_lowered(monkeypatch)
    model = torch.nn.Sequential(Block(), Block())
    (x, _, _) = operands(64)
    with xt.kernel_policy(strict(rules=[rule(TRITON, module="0"), rule(DECODE, module="1")])), torch.no_grad():
        close(torch.compile(model, fullgraph=True)(x), unfused(*[unfused(x, x, x)] * 3))
    assert seen == ["TRITON", "TRITON_DECODE"]


def test_decoding_of_symbolic_sizes(monkeypatch):
    seen = backends_lowered(monkeypatch)
    compiled = torch.compile(flex, fullgraph=True, dynamic=True)
    with xt.kernel_policy(strict(DECODE, TRITON)), torch.no_grad():
        for length in (16, 48, 640):
            q, k, v = operands(length)
            close(compiled(q, k, v), unfused(q, k, v))
    assert set(seen) == {"TRITON_DECODE", "TRITON"}


def test_too_many_queries_for_decoding_are_refused_or_said():
    q, k, v = operands(512)
    with xt.kernel_policy(strict(DECODE)), pytest.raises(Exception, match="it is for less than 128 queries"):
        torch.compile(flex, fullgraph=True)(q, k, v)
    torch._dynamo.reset()
    said = pytest.warns(XpuRuntimeWarning, match="runs by torch.flex, though kernels.attention asks for")
    with xt.kernel_policy(attention=DECODE), torch.no_grad(), said:
        close(torch.compile(flex, fullgraph=True)(q, k, v), unfused(q, k, v))


def test_flash_attention_4_where_it_is_installed(monkeypatch):
    try:
        there = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        there = False
    seen = backends_lowered(monkeypatch)
    q, k, v = operands(256)
    with torch.no_grad():
        if there:
            with xt.kernel_policy(strict(FLASH)):
                close(torch.compile(flex, fullgraph=True)(q, k, v), unfused(q, k, v))
            assert set(seen) == {"FLASH"}
        else:
            with xt.kernel_policy(strict(FLASH)), pytest.raises(Exception, match="FlashAttention 4 is not installed"):
                torch.compile(flex, fullgraph=True)(q, k, v)


def test_eager_flex_attention_is_unfused_forward_and_backward():
    tensors = operands(64, grad=True)
    with xt.kernel_policy(strict("torch.math")), xt.explain() as report:
        out = flex(*tensors)
        torch.autograd.grad(out.float().sum(), tensors)
    close(out, unfused(*tensors))
    rows = {row.operator: row for row in attention_rows(report)}
    for operator, phase in (("flex_attention", "train"), ("flex_attention_backward", "backward")):
        row = rows[f"higher_order::{operator}"]
        assert (row.resolved, row.status, row.phase) == ("torch.math", "honoured", phase), row
    with xt.kernel_policy(strict(TRITON)), pytest.raises(UnsupportedOperationError, match="is unfused"):
        flex(*tensors)


def test_rules_by_phase_in_eager_flex_attention():
    tensors = operands(64, grad=True)
    rules = [rule("torch.math", phase="train"), rule(TRITON, phase="infer")]
    with xt.kernel_policy(strict(rules=rules)):
        torch.autograd.grad(flex(*tensors).float().sum(), tensors)
        with torch.no_grad(), pytest.raises(UnsupportedOperationError, match=r"kernels.rules\[1\] asks for"):
            flex(*tensors)


def packed(*, grad: bool = False) -> list[torch.Tensor]:
    shape = (sum(LENGTHS), 4, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def places() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch_varlen.varlen_attn(q, k, v, at, at, max(LENGTHS), max(LENGTHS))
    return out


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = [x.split(LENGTHS) for x in (q, k, v)]
    done = [sdpa(*(x.transpose(0, 1)[None] for x in each))[0].transpose(0, 1) for each in zip(*parts, strict=True)]
    return torch.cat(done)


@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_attn_runs_by_flash_forward_and_backward(compiled):
    tensors, at = packed(grad=True), places()
    expected = torch.autograd.grad(one_by_one(*tensors).float().square().sum(), tensors)
    call = torch.compile(varlen, fullgraph=True) if compiled else varlen
    with xt.kernel_policy(strict("torch.flash")):
        torch.autograd.grad(call(*tensors, at).float().sum(), tensors)
        with xt.explain() as report:
            out = call(*tensors, at)
            actual = torch.autograd.grad(out.float().square().sum(), tensors)
    close(out, one_by_one(*tensors))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)
    rows = {row.operator: row for row in attention_rows(report)}
    assert set(rows) == {PACKED, f"{PACKED}_backward"}
    for row in rows.values():
        assert (row.requested, row.source) == (("torch.flash",), "kernels.attention"), row
        assert (row.resolved, row.status, row.count) == ("torch.flash", "honoured", 1), row
        assert any("flash" in name for name in row.observed), row
    assert rows[f"{PACKED}_backward"].phase == "backward"
    report.require()


@pytest.mark.parametrize("word", ["cuda_raw.flash_attention_v2", "cudnn.sdpa", "torch.cudnn", "torch.efficient"])
def test_what_cannot_serve_varlen_attn(word):
    tensors, at = packed(), places()
    refused = pytest.raises(UnsupportedOperationError, match=rf"varlen_attn of .* asks for {word}, which cannot serve")
    with xt.kernel_policy(strict(rules=[rule(word)])), refused:
        varlen(*tensors, at)
    said = pytest.warns(XpuRuntimeWarning, match="varlen_attn of .* runs by torch.varlen")
    with xt.kernel_policy(xrt.KernelPolicy(rules=[rule(word)])), said, xt.explain() as report:
        out = varlen(*tensors, at)
    close(out, one_by_one(*tensors))
    (row,) = attention_rows(report)
    assert (row.requested, row.resolved, row.status) == ((word,), "torch.varlen", "substituted")
    assert any("flash" in name for name in row.observed), row


def test_rules_of_varlen_attn_by_phase_and_module():
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return varlen(q, k, v, at)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(self.a(q, k, v, at), k, v, at)
            return out

    model, tensors, at = Model(), packed(grad=True), places()
    rules = [rule("torch.flash", module="a", phase="train"), rule(["torch.cudnn", "torch.flash"], phase="backward")]
    with xt.kernel_policy(strict(rules=rules)), xt.explain() as report:
        model(*tensors, at).float().sum().backward()
    rows = {(row.module, row.phase): (row.source, row.resolved, row.status) for row in attention_rows(report)}
    assert rows == {
        ("a", "train"): ("kernels.rules[0]", "torch.flash", "honoured"),
        ("b", "train"): ("default", "torch.varlen", "default"),
        ("a", "backward"): ("kernels.rules[1]", "torch.flash", "honoured"),
        ("b", "backward"): ("kernels.rules[1]", "torch.flash", "honoured"),
    }


def test_our_flash_attention_in_the_registry_leaves_packed_sequences_alone():
    from torch.nn import attention as torch_attention

    tensors, at = packed(), places()
    xt.register_flash_attention()
    torch_attention.activate_flash_attention_impl("xpuruntime")
    try:
        with xt.kernel_policy(strict(rules=[rule("torch.flash")])):
            close(varlen(*tensors, at), one_by_one(*tensors))
    finally:
        torch_attention.restore_flash_attention_impl()
