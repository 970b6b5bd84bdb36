# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`scaled_dot_product_attention` under a policy: which kernel serves, and that nothing else changes."""

from __future__ import annotations

import threading
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from xpuruntime.pytorch import calls, sdpa_backends  # noqa: E402 - it needs PyTorch
from xpuruntime.pytorch.held import Held, holding  # noqa: E402
from xpuruntime.pytorch.overriding.registry import installed  # noqa: E402

pytestmark = pytest.mark.torch

sdpa = torch.nn.functional.scaled_dot_product_attention
FLASH = "ScaledDotProductFlashAttentionForCpuBackward0"


@pytest.fixture(autouse=True)
def _no_policy_is_left():
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    before = sdpa_backends.read()
    torch.manual_seed(0)
    yield
    xt.clear_kernel_policy()
    assert installed() == ()
    assert sdpa_backends.read() == before


def strict(*words, rules=()):
    kernels = {"attention": list(words)} if words else {}
    return {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {**kernels, "rules": list(rules)}}


def rule(use, **match):
    return {"match": {"op": "attention", **match}, "use": use}


def counts() -> dict[str, int]:
    found: dict[str, int] = {}
    for one in xrt.decisions():
        found[one.op] = found.get(one.op, 0) + one.count
    return found


def gradients(q, k, v, **more):
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sdpa(*operands, **more)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return (out.detach(), *torch.autograd.grad(out, operands, weights))


def operands(batch=2, heads=4, kv_heads=4, q_length=5, kv_length=7, head_dim=8, dtype=torch.float32):
    q = torch.randn(batch, heads, q_length, head_dim, dtype=dtype)
    return (q, *(torch.randn(batch, kv_heads, kv_length, head_dim, dtype=dtype) for _ in range(2)))


def packed():
    """Return q, k and v as parts of one array ``[batch, length, 3, heads, head_dim]``."""
    return [x.transpose(1, 2) for x in torch.randn(2, 5, 3, 4, 8).unbind(2)]


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


def test_nested_tensors_stay_pytorchs():
    rows = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    q = rows.transpose(1, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        expected = sdpa(q, q, q)
        with xt.kernel_policy(strict(rules=[rule(["cpu.reference", "torch"])])):
            torch.testing.assert_close(sdpa(q, q, q).values(), expected.values())
    assert counts() == {}


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


def test_a_checkpoint_draws_the_same_dropout_again():
    q, k, v = operands()
    q.requires_grad_()

    def attend(q):
        return sdpa(q, k, v, dropout_p=0.4)

    with xt.kernel_policy(strict("cpu.reference")):
        torch.manual_seed(3)
        (expected,) = torch.autograd.grad(attend(q).square().sum(), q)
        torch.manual_seed(3)
        out = torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False)
        (found,) = torch.autograd.grad(out.square().sum(), q)
    assert torch.equal(found, expected)


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
    refused = pytest.raises(UnsupportedOperationError, match=r"cuda|CUDA|another kind of device")
    with xt.kernel_policy(strict(rules=[rule(word, device="cpu")])), refused:
        sdpa(q, k, v)
    with xt.kernel_policy(attention=[word, "cpu.reference"]):
        sdpa(q, k, v)
    assert counts() == {"attention": 1}


def test_rules_by_module_hold_in_both_directions():
    class Block(torch.nn.Module):
        def forward(self, x):
            return sdpa(x, x, x)

    model = torch.nn.ModuleDict({"a": Block(), "b": Block()})
    model.forward = lambda x: model["b"](model["a"](x))
    x = torch.randn(1, 2, 3, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    with xt.kernel_policy(strict(rules=[rule("cpu.reference", module="b")])):
        found = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(found, expected)
    assert counts() == {"attention": 1, "attention_backward": 1}


def test_rules_by_module_hold_in_compiled_code():
    class Block(torch.nn.Module):
        def forward(self, x):
            return sdpa(x, x, x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(), Block(), Block()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Model(), torch.randn(1, 2, 3, 8, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    with xt.kernel_policy(strict(rules=[rule("cpu.reference", module="layers.1")])):
        for compiled in (model, lambda x: model(x)):
            xrt.clear_decisions()
            found = torch.autograd.grad(torch.compile(compiled, backend="aot_eager", fullgraph=True)(x).sum(), x)
            torch.testing.assert_close(found, expected)
            assert counts() == {"attention": 1, "attention_backward": 1}
            assert {one.module for one in xrt.decisions()} == {"layers.1"}


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


def test_with_dropout_the_backward_has_to_follow_the_forward():
    q, k, v = operands()
    rules = [rule("torch.math", phase="backward"), rule("cpu.reference", phase="train")]
    with xt.kernel_policy(strict(rules=rules)), pytest.raises(UnsupportedOperationError, match="what it dropped"):
        gradients(q, k, v, dropout_p=0.5)
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules)), pytest.warns(XpuRuntimeWarning, match="what it dropped"):
        gradients(q, k, v, dropout_p=0.5)
    assert counts()["attention_backward"] == 1


def test_compiled_code_obeys_and_changes_with_the_policy():
    tensors = operands()
    expected = gradients(*tensors, is_causal=True)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    def run(n):
        q, k, v = (x[:, :, :n].detach().requires_grad_() for x in tensors)
        out = attend(q, k, v)
        return out.detach(), torch.autograd.grad(out.sum(), q)[0]

    plain = run(5)
    torch.testing.assert_close(plain[0], expected[0])
    assert counts() == {}
    with xt.kernel_policy(strict("cpu.reference")):
        torch.testing.assert_close(run(5), plain)
        run(4), run(3)
        assert counts() == {"attention": 3, "attention_backward": 3}
    run(5)
    assert counts()["attention"] == 3


def test_a_compiled_graph_keeps_its_dropout_in_step():
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q):
        return sdpa(q, q, q, dropout_p=0.5)

    with xt.kernel_policy(strict("cpu.reference")):
        out = attend(q)
        (found,) = torch.autograd.grad(out.square().sum(), q)
        assert not torch.equal(attend(q), out)
    assert counts() == {"attention": 2, "attention_backward": 1}
    assert torch.isfinite(found).all()


def test_the_transforms_of_torch_func():
    q, k, v = operands(batch=1)
    many = torch.randn(3, *q.shape)

    def loss(a):
        return sdpa(a, k, v).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        gradient, mapped, both = (
            torch.func.grad(loss)(q),
            torch.vmap(loss)(many),
            torch.vmap(torch.func.grad(loss))(many),
        )
    with xt.kernel_policy(strict("cpu.reference")):
        torch.testing.assert_close(torch.func.grad(loss)(q), gradient)
        assert counts() == {"attention": 1, "attention_backward": 1}
        torch.testing.assert_close(torch.vmap(loss)(many), mapped)
        torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(many), both)
        assert counts() == {"attention": 3, "attention_backward": 2}
        torch.func.jacrev(lambda a: sdpa(a, k, v))(q[:, :1, :2].expand(1, 4, 2, 8))


def test_forward_mode_and_nested_gradients_are_pytorchs():
    q, k, v = (x[:, :1, :2] for x in operands(batch=1))
    with warnings.catch_warnings(), xt.kernel_policy(attention=["cpu.reference", "torch.math"]):
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        expected = torch.func.jvp(lambda a: torch.softmax(a @ k.mT / 8**0.5, -1) @ v, (q,), (q,))
        torch.testing.assert_close(torch.func.jvp(lambda a: sdpa(a, k, v), (q,), (q,)), expected)
        with torch.autograd.forward_ad.dual_level():
            out = sdpa(torch.autograd.forward_ad.make_dual(q, q), k, v)
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, expected[1])
        torch.func.hessian(lambda a: sdpa(a, k, v).sum())(q)
    assert counts() == {}
    with xt.kernel_policy(strict("cpu.reference")), pytest.raises(UnsupportedOperationError, match="forward-mode"):
        torch.func.jvp(lambda a: sdpa(a, k, v), (q,), (q,))


def test_a_gradient_is_differentiated_again_by_math_with_a_word():
    tensors = [x.double().requires_grad_() for x in operands(1, 1, 1, 2, 3, 2)]
    with xt.kernel_policy(attention="cpu.reference"):
        assert torch.autograd.gradcheck(sdpa, tensors)
        with pytest.warns(XpuRuntimeWarning, match="gradient of the gradient of attention runs by torch.math"):
            assert torch.autograd.gradgradcheck(sdpa, tensors)
    q, k, v = tensors
    with xt.kernel_policy(strict("cpu.reference")):
        (first,) = torch.autograd.grad(sdpa(q, k, v).sum(), q, create_graph=True)
        with pytest.raises(UnsupportedOperationError, match=r"no kernel but torch.math"):
            first.sum().backward()
    with xt.kernel_policy(attention="cpu.reference"):
        (first,) = torch.autograd.grad(sdpa(q, k, v, dropout_p=0.5).sum(), q, create_graph=True)
        with pytest.raises(UnsupportedOperationError, match="leave dropout out"):
            first.sum().backward()


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
    assert {one.dtype for one in xrt.decisions()} == {"fp32", "bf16"}


def test_all_threads_obey_and_a_thread_may_hold_its_own():
    q, k, v = operands()
    names: dict[str, str] = {}

    def work(name):
        names[name] = sdpa(q.detach().requires_grad_(), k, v).grad_fn.name()

    with xt.kernel_policy(attention="cpu.reference"):
        thread = threading.Thread(target=work, args=("other",))
        thread.start()
        thread.join()
        with holding(None):
            work("plain")
        with holding(Held(xrt.Policy(kernels=xrt.KernelPolicy(rules=[rule("torch.math")])))):
            work("math")
    assert names["plain"] == FLASH
    assert names["math"] == "UnsafeViewBackward0"
    assert names["other"] not in (FLASH, "UnsafeViewBackward0")


def test_who_watches_sees_forward_and_backward():
    seen = []

    class Watch:
        def call(self, name, op, route, run, args, kwargs):
            seen.append((name, op, None if route is None else route.kernel))
            assert sum(isinstance(one, torch.Tensor) for one in args) >= 3
            return run(*args, **kwargs)

    q, k, v = operands()
    before = calls.watch(Watch())
    try:
        with xt.kernel_policy(attention="cpu.reference"):
            gradients(q, k, v)
        with xt.kernel_policy(xrt.KernelPolicy(rules=[rule("torch.math")])):
            sdpa(q, k, v)
    finally:
        calls.watch(before)
    ours = [(f"xpuruntime::{name}", "attention", "cpu.reference") for name in ("attention", "attention_backward")]
    assert [one for one in seen if one[1] == "attention"] == [
        *ours, ("scaled_dot_product_attention", "attention", "torch.math"),
    ]  # fmt: skip


def test_best_performance_measures_once_and_keeps_pytorchs_where_ours_is_slower():
    q, k, v = operands(q_length=64, kv_length=64, head_dim=32)
    policy = xrt.KernelPolicy(attention="auto", auto_strategy="best_performance")
    expected = gradients(q, k, v)
    with xt.kernel_policy(policy):
        torch.testing.assert_close(gradients(q, k, v), expected)
        measured = counts()
        assert sdpa(q.requires_grad_(), k, v).grad_fn.name() == FLASH
        gradients(q, k, v)
        assert counts() == measured
