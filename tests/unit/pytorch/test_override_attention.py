# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`scaled_dot_product_attention` by a kernel of ours: it gives what PyTorch's gives, and what ours cannot take."""

from __future__ import annotations

import threading
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from attention_calls import (  # noqa: E402 - it needs PyTorch
    FLASH,
    counts,
    gradients,
    operands,
    packed,
    rule,
    sdpa,
    strict,
)

from xpuruntime.pytorch.attention import sdpa_backends  # noqa: E402
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy  # noqa: E402
from xpuruntime.pytorch.dispatch.context import thread_policy  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_of_attention_is_left")]


CASES = {
    "plain": lambda: (operands(), {}),
    "causal": lambda: (operands(), {"is_causal": True}),
    "causal, more queries": lambda: (operands(q_length=9, kv_length=4), {"is_causal": True}),
    "scale": lambda: (operands(), {"scale": 0.3}),
    "bool mask": lambda: (operands(), {"attn_mask": torch.rand(2, 1, 5, 7) > 0.4}),
    "row of a mask": lambda: (operands(), {"attn_mask": torch.rand(1, 7) > 0.4}),
    "added mask": lambda: (operands(), {"attn_mask": torch.randn(4, 5, 7)}),
    "transposed mask": lambda: (operands(), {"attn_mask": torch.randn(7, 5).mT}),
    "blind query": lambda: (operands(), {"attn_mask": torch.arange(5)[:, None].expand(5, 7) > 1}),
    "grouped": lambda: (operands(kv_heads=2), {"enable_gqa": True}),
    "one head for all": lambda: (operands(kv_heads=1), {"enable_gqa": True, "is_causal": True}),
    "packed": lambda: (packed(), {}),
    "transposed rows": lambda: ([x.mT.contiguous().mT for x in operands()], {}),
    "expanded": lambda: ([x[:1].expand(3, -1, -1, -1) for x in operands()], {}),
    "no batch": lambda: ([x[0] for x in operands()], {}),
    "no heads": lambda: ([x[0, 0] for x in operands()], {}),
    "two batches": lambda: ([x.reshape(2, 1, *x.shape[1:]) for x in operands()], {}),
    "mask, no batch": lambda: ([x[0] for x in operands()], {"attn_mask": torch.rand(4, 5, 7) > 0.4}),
    "empty batch": lambda: (operands(batch=0), {}),
    "no queries": lambda: (operands(q_length=0), {}),
    "head_dim 1": lambda: (operands(head_dim=1), {}),
    "half": lambda: (operands(dtype=torch.bfloat16), {"is_causal": True}),
    "half with a float32 mask": lambda: (operands(dtype=torch.float16), {"attn_mask": torch.randn(5, 7)}),
    "double": lambda: (operands(dtype=torch.float64), {"is_causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_ours_gives_what_pytorch_gives(case):
    torch.manual_seed(1)
    (q, k, v), more = CASES[case]()
    expected = gradients(q, k, v, **more)
    with xt.kernel_policy(strict("cpu.reference")):
        found = gradients(q, k, v, **more)
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3}.get(q.dtype, 1e-5)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert counts() == {"attention": 1, "attention_backward": 1} or q.numel() == 0


def test_the_output_lies_in_memory_as_pytorch_has_it():
    q, k, v = packed()
    expected = sdpa(q, k, v).stride()
    with xt.kernel_policy(strict("cpu.reference")):
        assert sdpa(q, k, v).stride() == expected == (160, 8, 32, 1)


UNFIT = {
    "attn_mask requires a gradient": lambda: (operands(), {"attn_mask": torch.randn(5, 7, requires_grad=True)}),
    "v has a head_dim of 6": lambda: ((*operands()[:2], torch.randn(2, 4, 7, 6)), {}),
    "different batches": lambda: ((operands()[0], *(x[:1] for x in operands()[1:])), {}),
    "different numbers of heads, without": lambda: (operands(kv_heads=1), {}),
    "k and v have different": lambda: (
        (*operands(kv_heads=2)[:2], torch.randn(2, 1, 7, 8)), {"enable_gqa": True}
    ),
    "dropout_p is 1": lambda: (operands(), {"dropout_p": 1.0}),
    "is_causal beside attn_mask": lambda: (
        operands(), {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True}
    ),
    "attn_mask has 5 dimensions": lambda: (
        [x[None] for x in operands()], {"attn_mask": torch.randn(1, 2, 1, 5, 7)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", UNFIT)
def test_what_ours_cannot_take_is_pytorchs_with_a_word(reason):
    torch.manual_seed(1)
    tensors, more = UNFIT[reason]()
    if reason.startswith("is_causal") and torch.__version__ >= (2, 14):  # PyTorch refuses it then
        with pytest.raises(RuntimeError, match="attn_mask should not be set"), xt.kernel_policy(attention="torch.math"):
            sdpa(*tensors, **more)
        return
    expected = sdpa(*tensors, **more)
    with xt.kernel_policy(attention="cpu.reference"):
        with pytest.warns(XpuRuntimeWarning, match=f"runs by torch.sdpa, though .*{reason}"):
            found = sdpa(*tensors, **more)
        torch.testing.assert_close(found, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sdpa(*tensors, **more)
    with xt.kernel_policy(strict("cpu.reference")), pytest.raises(UnsupportedOperationError, match=reason):
        sdpa(*tensors, **more)
    assert counts() == {}


def test_a_mask_learns_by_pytorch():
    q, k, v = operands()
    bias = torch.randn(5, 7, requires_grad=True)
    (expected,) = torch.autograd.grad(sdpa(q, k, v, bias).sum(), bias)
    with xt.kernel_policy(strict(rules=[rule(["cpu.reference", "torch.math"])])):
        (found,) = torch.autograd.grad(sdpa(q, k, v, bias).sum(), bias)
        with torch.no_grad():
            sdpa(q, k, v, bias)
    torch.testing.assert_close(found, expected)
    assert counts() == {"attention": 1}


def negated(x):
    """Return the same numbers, of which PyTorch holds the opposite."""
    return torch._neg_view(-x.detach()).requires_grad_()


@pytest.mark.parametrize("which", ["query", "key", "value", "attn_mask", "all"])
def test_numbers_that_pytorch_has_yet_to_negate_are_right(which):
    torch.manual_seed(1)
    q, k, v = operands()
    given = {"query": q, "key": k, "value": v, "attn_mask": torch.randn(5, 7)}
    lazy = {name: negated(x) if which in (name, "all") else x for name, x in given.items()}
    if lazy["attn_mask"].is_neg():
        lazy["attn_mask"] = lazy["attn_mask"].detach()
    expected = gradients(q, k, v, attn_mask=given["attn_mask"])
    with xt.kernel_policy(strict("cpu.reference")):
        for _ in range(3):
            found = gradients(lazy["query"], lazy["key"], lazy["value"], attn_mask=lazy["attn_mask"])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            with torch.no_grad():
                torch.testing.assert_close(sdpa(**lazy), expected[0], rtol=1e-5, atol=1e-5)
                sdpa(**given)  # then a guard knows calls that look like these


def test_a_gradient_that_pytorch_has_yet_to_negate_is_right():
    torch.manual_seed(1)
    q, k, v = (x.requires_grad_() for x in operands())
    weights = torch.randn(2, 4, 5, 8)

    def found():
        out = sdpa(q, k, v)
        return torch.autograd.grad(out, (q, k, v), torch._neg_view(-weights))

    expected = found()
    with xt.kernel_policy(strict("cpu.reference")):
        torch.testing.assert_close(found(), expected, rtol=1e-5, atol=1e-5)


def test_zeros_that_pytorch_does_not_keep_are_zeros():
    zeros = torch._efficientzerotensor((2, 4, 5, 8))
    with xt.kernel_policy(strict("cpu.reference")):
        for _ in range(3):
            assert not sdpa(zeros, zeros, zeros).any()
            assert not sdpa(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), zeros).any()
            sdpa(*operands(q_length=5, kv_length=5))


def test_nested_tensors_with_strides_stay_pytorchs_and_it_is_said_once():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        q = torch.nested.nested_tensor([torch.randn(4, 3, 8), torch.randn(4, 5, 8)])
        expected = sdpa(q, q, q).to_padded_tensor(0)
        with xt.kernel_policy(strict(rules=[rule(["cpu.reference", "torch"])])):
            for _ in range(2):
                torch.testing.assert_close(sdpa(q, q, q).to_padded_tensor(0), expected)
        with xt.kernel_policy(attention="cpu.reference"):
            with pytest.warns(XpuRuntimeWarning, match=r"\[2, 4, 0, 8\].*nested tensors are PyTorch's own"):
                sdpa(q, q, q)
            torch.testing.assert_close(sdpa(q, q, q).to_padded_tensor(0), expected)
    assert counts() == {}


def test_nested_tensors_stay_pytorchs():
    rows = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    q = rows.transpose(1, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        expected = sdpa(q, q, q)
        with xt.kernel_policy(strict(rules=[rule(["cpu.reference", "torch"])])):
            torch.testing.assert_close(sdpa(q, q, q).values(), expected.values())
    assert counts() == {}


def test_dropout_follows_the_seed():
    q, k, v = operands(q_length=32, kv_length=32)
    with xt.kernel_policy(strict("cpu.reference")):
        torch.manual_seed(7)
        first, second = gradients(q, k, v, dropout_p=0.3), gradients(q, k, v, dropout_p=0.3)
        torch.manual_seed(7)
        again = gradients(q, k, v, dropout_p=0.3)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[0], second[0])


def test_the_backward_drops_what_the_forward_dropped():
    q, k, _ = operands(batch=1, heads=1, kv_heads=1, q_length=6, kv_length=6)
    v = torch.eye(6)[None, None, :, :].clone().requires_grad_()
    q6, k6 = q[..., :6].clone(), k[..., :6].clone()
    with xt.kernel_policy(strict("cpu.reference")):
        out = sdpa(q6, k6, v, dropout_p=0.5)  # the weights themselves, since v is the identity
        (gradient,) = torch.autograd.grad(out.sum(), v)
    plain = torch.softmax(q6 @ k6.mT / 6**0.5, -1)
    kept = out.detach() != 0
    assert 5 < int(kept.sum()) < 31
    torch.testing.assert_close(out.detach(), torch.where(kept, plain * 2, 0.0))
    torch.testing.assert_close(gradient, out.detach().sum(-2)[..., None].expand(1, 1, 6, 6))


def test_no_grad_inference_mode_and_autocast():
    q, k, v = operands()
    expected = sdpa(q, k, v)
    with xt.kernel_policy(strict("cpu.reference")):
        with torch.inference_mode():
            torch.testing.assert_close(sdpa(q, k, v), expected)
        with torch.no_grad():
            torch.testing.assert_close(sdpa(q.requires_grad_(), k, v), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert sdpa(q, k, v).dtype == torch.bfloat16
    assert {decision.dtype for decision in xrt.decisions()} == {"fp32", "bf16"}


def test_rules_by_head_dim_and_dtype():
    rules = [rule("cpu.reference", head_dim="<=8"), rule("torch.math", head_dim=16), rule("torch", dtype="fp64")]
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules)):
        ours = sdpa(*(x.requires_grad_() for x in operands(head_dim=8)))
        math = sdpa(*(x.requires_grad_() for x in operands(head_dim=16)))
        rest = sdpa(*(x.requires_grad_() for x in operands(head_dim=24)))
    assert rest.grad_fn.name() == FLASH
    assert math.grad_fn.name() == "UnsafeViewBackward0"
    assert "Attention" in ours.grad_fn.name()
    assert ours.grad_fn.name() != FLASH
    assert counts() == {"attention": 1}


def test_a_kernel_of_pytorchs_for_some_calls_alone():
    q, k, v = operands()
    with xt.kernel_policy(xrt.KernelPolicy(rules=[rule("torch.math", phase="train")])):
        assert sdpa(q.requires_grad_(), k, v).grad_fn.name() == "UnsafeViewBackward0"
        with torch.no_grad():
            sdpa(q, k, v)
        assert sdpa_backends.read().enabled[1]
    with xt.kernel_policy(strict(rules=[rule("torch.flash", phase="infer")])):
        sdpa(q, k, v, dropout_p=0.1)
        with (
            torch.no_grad(),
            pytest.raises(
                UnsupportedOperationError, match=r"asks for torch.flash, which cannot serve it: torch.flash: .*dropout"
            ),
        ):
            sdpa(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("word", ["cudnn.sdpa", "cuda_raw.flash_attention_v2", "torch.cudnn", "torch.efficient"])
def test_what_runs_on_cuda_alone_is_refused_on_cpu(word):
    q, k, v = operands()
    refused = pytest.raises(UnsupportedOperationError, match=r"cuda|CUDA|another kind of device|not in this build")
    with xt.kernel_policy(strict(rules=[rule(word, device="cpu")])), refused:
        sdpa(q, k, v)
    with xt.kernel_policy(attention=[word, "cpu.reference"]):
        sdpa(q, k, v)
    assert counts() == {"attention": 1}


def test_the_backward_may_be_by_another_kernel():
    q, k, v = operands()
    expected = gradients(q, k, v, is_causal=True)
    for forward, backward, ran in (
        ("cpu.reference", "torch.math", {"attention": 1}),
        ("torch.flash", "cpu.reference", {"attention_backward": 1}),
        ("torch.math", "torch.flash", {}),
    ):
        xrt.clear_decisions()
        rules = [rule(backward, phase="backward"), rule(forward, phase=["train", "infer"])]
        with xt.kernel_policy(strict(rules=rules)):
            torch.testing.assert_close(gradients(q, k, v, is_causal=True), expected)
        assert counts() == ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["causal", "boolean mask", "added mask", "mask of keys"])
def test_the_backward_apart_from_its_forward_knows_all_weights(form, dtype):
    q, k, v = operands(kv_heads=2, q_length=37, kv_length=90, dtype=dtype)
    shape = (1, 90) if form == "mask of keys" else (37, 90)
    more = {"enable_gqa": True, "is_causal": form == "causal"}
    if form != "causal":
        more["attn_mask"] = torch.randn(shape, dtype=dtype) if form == "added mask" else torch.rand(shape) > 0.5
    if form == "boolean mask":
        more["attn_mask"][3] = False
    expected = gradients(q, k, v, **more)
    rules = [rule("cpu.reference", phase="backward"), rule("torch.math", phase="train")]
    with xt.kernel_policy(strict(rules=rules)):
        torch.testing.assert_close(gradients(q, k, v, **more), expected)
    assert counts() == {"attention_backward": 1}


def test_the_backward_apart_from_its_forward_costs_no_memory_of_all_scores():
    q = torch.randn(1, 4, 1024, 16, requires_grad=True)

    def allocated():
        sdpa(q, q, q)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
            sdpa(q, q, q)
        return sum(max(average.self_cpu_memory_usage, 0) for average in found.key_averages())

    plain = allocated()
    with xt.kernel_policy(strict(rules=[rule("cpu.reference", phase="backward"), rule("torch.flash", phase="train")])):
        assert allocated() < 4 * plain


def test_products_inside_of_attention_are_no_calls_that_a_rule_for_products_misses():
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    rules = [rule("cpu.reference", phase="backward"), rule("torch.math", phase="train")]
    rules.append({"match": {"op": "matmul"}, "use": "cpu.reference"})
    with xt.kernel_policy(strict(rules=rules)), xt.explain() as report:
        sdpa(q, q, q).sum().backward()
    assert {(row.op, row.phase, row.resolved) for row in report.rows if row.op in ("attention", "matmul")} == {
        ("attention", "train", "torch.math"),
        ("attention", "backward", "cpu.reference"),
    }


def test_with_dropout_the_backward_has_to_follow_the_forward():
    q, k, v = operands()
    rules = [rule("torch.math", phase="backward"), rule("cpu.reference", phase="train")]
    with xt.kernel_policy(strict(rules=rules)), pytest.raises(UnsupportedOperationError, match="what it dropped"):
        gradients(q, k, v, dropout_p=0.5)
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules)), pytest.warns(XpuRuntimeWarning, match="what it dropped"):
        gradients(q, k, v, dropout_p=0.5)
    assert counts()["attention_backward"] == 1


def test_all_threads_obey_and_a_thread_may_hold_its_own():
    q, k, v = operands()
    names: dict[str, str] = {}

    def work(name):
        names[name] = type(sdpa(q.detach().requires_grad_(), k, v).grad_fn).__name__

    with xt.kernel_policy(attention="cpu.reference"):
        thread = threading.Thread(target=work, args=("other",))
        thread.start()
        thread.join()
        with thread_policy(None):
            work("plain")
        with thread_policy(CompiledPolicy(xrt.Policy(kernels=xrt.KernelPolicy(rules=[rule("torch.math")])))):
            work("math")
    assert names["plain"] == FLASH
    assert names["math"] == "UnsafeViewBackward0"
    assert names["other"] not in (FLASH, "UnsafeViewBackward0")


@pytest.mark.parametrize(
    "make",
    [
        lambda q, k, v: sdpa(q, k.double(), v),
        lambda q, k, v: sdpa(q, k[..., :3], v),
        lambda q, k, v: sdpa(q, k, v, torch.ones(3, 3)),
        lambda q, k, v: sdpa(q, k, v, torch.ones(5, 7, dtype=torch.int32)),
        lambda q, k, v: sdpa(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]),
        lambda q, k, v: sdpa(q, k, v, dropout_p=-0.5),
    ],
)
def test_wrong_arguments_are_refused_in_pytorchs_words(make):
    tensors = operands()
    with pytest.raises((RuntimeError, IndexError)) as expected:
        make(*tensors)
    with xt.kernel_policy(attention=["cpu.reference", "torch"]), pytest.raises(expected.type) as found:
        make(*tensors)
    assert str(found.value) == str(expected.value)


def test_best_performance_measures_once_and_keeps_pytorchs_where_ours_is_slower():
    q, k, v = operands(q_length=256, kv_length=256, head_dim=64)
    policy = xrt.KernelPolicy(attention="auto", auto_strategy="best_performance")
    expected = gradients(q, k, v)
    with xt.kernel_policy(policy):
        torch.testing.assert_close(gradients(q, k, v), expected)
        measured = counts()
        assert sdpa(q.requires_grad_(), k, v).grad_fn.name() == FLASH
        gradients(q, k, v)
        assert counts() == measured
