# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Linear cross entropy and softmax: losses of language models without their logits, and the functions of PyTorch."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from xpuruntime.ops import plugins  # noqa: E402 - it needs both
from xpuruntime.ops.torch_kernels import find_torch_kernel, forget_torch_kernels  # noqa: E402
from xpuruntime.pytorch.providers.operations import OPERATIONS  # noqa: E402
from xpuruntime.pytorch.providers.operators import perform  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards", "own_tuning_cache")]

OP = "linear_cross_entropy"
F = torch.nn.functional


def strict(word="chunked", op=OP):
    return xrt.Policy(mode="strict", kernels={op: word})


def rows_of(found, op=OP):
    return {(row.resolved, row.status, row.phase, row.count) for row in found.rows if row.op == op}


def made(rows=300, columns=16, classes=40, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((rows, columns), (classes, columns), (classes,))
    )
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[3] = -100
    return x, weight, target, bias


def with_gradients(operands, reduction, kernel=""):
    names = ("x", "weight", "target", "bias")
    loss = perform(OP, dict(zip(names, operands, strict=False)), {"reduction": reduction}, kernel)
    wanted = [x for x in operands if x.requires_grad]
    return loss, *torch.autograd.grad(loss, wanted, torch.linspace(0.5, 2, loss.numel()).view_as(loss).to(loss.dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_give_the_loss_and_gradients_of_the_definition(reduction, bias):
    operands = made()[: 4 if bias else 3]
    for gradient, wanted in zip(
        with_gradients(operands, reduction, "chunked"), with_gradients(operands, reduction), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)
    x, weight, target = operands[:3]
    wanted = F.cross_entropy(F.linear(x, weight, operands[3] if bias else None), target, reduction=reduction)
    torch.testing.assert_close(with_gradients(operands, reduction, "chunked")[0], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_halves_is_in_float32(dtype):
    operands, wide = made(dtype=dtype), [x.detach() for x in made(dtype=dtype)]
    wide = [x.double().requires_grad_() if x.is_floating_point() else x for x in wide]
    gradients, wanted = with_gradients(operands, "mean", "chunked"), with_gradients(wide, "mean")
    assert [x.dtype for x in gradients] == [torch.float32, dtype, dtype, dtype]
    for one, other in zip(gradients, (x.detach() for x in wanted), strict=True):
        torch.testing.assert_close(one.detach().double(), other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_no_more_than_a_chunk_of_logits_is_in_memory():
    sizes = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            tensors = (x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            sizes.extend(x.numel() for x in tensors if not x.is_meta)
            return out

    x, weight, target, _ = made(rows=1024, columns=8, classes=500)
    with xt.kernel_policy(strict()), Seen():
        with_gradients((x, weight, target), "mean", "chunked")
    assert max(sizes) <= 128 * 500 < 1024 * 500


def test_the_gradient_of_a_frozen_layer_is_not_computed(monkeypatch):
    kernel, asked = find_torch_kernel("chunked", OP), []
    backward = type(kernel).backward
    monkeypatch.setattr(
        type(kernel), "backward", lambda self, call, *rest: asked.append(call) or backward(self, call, *rest)
    )
    x, weight, target, _ = made()
    operands = (x, weight.detach(), target)
    gradients, wanted = with_gradients(operands, "mean", "chunked"), with_gradients(operands, "mean")
    assert [call.attributes["needs"] for call in asked if call.operands["x"].shape[0] == 300] == [("x",)]
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.skipif(not hasattr(F, OP), reason="PyTorch 2.13 and later have it")
@pytest.mark.parametrize("word", ["chunked", "torch_chunked.linear_cross_entropy"])
def test_the_function_of_pytorch_is_reached(word):
    x, weight, target, bias = made(dtype=torch.float32)

    def step():
        loss = F.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="sum")
        return loss.detach(), *torch.autograd.grad(loss, (x, weight, bias))

    plain = step()
    with xt.kernel_policy(strict(word)), xt.explain() as report:
        under = step()
    report.require()
    for one, other in zip(under, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert {row[1:3] for row in rows_of(report)} == {("honoured", "train"), ("honoured", "backward")}
    with xt.kernel_policy(strict(word)), pytest.raises(UnsupportedOperationError, match="without class weights"):
        F.linear_cross_entropy(x, weight, target, weight=torch.ones(40))
    assert all(map(torch.equal, step(), plain))


@pytest.mark.skipif(not hasattr(F, OP), reason="PyTorch 2.13 and later have it")
def test_compiled_code_has_one_operator():
    x, weight, target, _ = made(dtype=torch.float32)
    torch._dynamo.reset()
    run = torch.compile(lambda: F.linear_cross_entropy(x, weight, target), backend="aot_eager", fullgraph=True)
    with xt.kernel_policy(strict()), xt.explain() as report:
        loss = run()
        gradients = torch.autograd.grad(loss, (x, weight))
    assert {row[1:3] for row in rows_of(report)} == {("honoured", "train"), ("honoured", "backward")}
    plain = F.linear_cross_entropy(x, weight, target)
    torch.testing.assert_close((loss, *gradients), (plain, *torch.autograd.grad(plain, (x, weight))))


@pytest.fixture
def language(monkeypatch):
    """Return a function that makes a small model of transformers, and its ids."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    hf = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip

    def make(family):
        torch.manual_seed(0)
        model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**sizes))
        return model, torch.randint(1, 64, (2, 6))

    return make


def train(model, ids, **more):
    model.zero_grad()
    out = model(ids, labels=ids, **more)
    out[0].backward()
    return out, [out[0].detach(), *[parameter.grad.clone() for parameter in model.parameters()]]


@pytest.mark.parametrize("family", ["Llama", "Gemma", "Phi3"])
def test_losses_of_language_models_without_logits(family, language):
    model, ids = language(family)
    own = type(model).__dict__["forward"]
    plain_out, plain = train(model, ids)
    computed = []
    with xt.kernel_policy(strict()), xt.explain(root=model) as report:
        out, under = train(model, ids)
        torch.testing.assert_close(under, plain)
        model.lm_head.register_forward_hook(lambda *_: computed.append(1))
    report.require()
    assert {row[:3] for row in rows_of(report)} == {
        ("chunked.linear_cross_entropy", "honoured", "train"), ("chunked.linear_cross_entropy", "honoured", "backward"),
    }  # fmt: skip
    assert tuple(out.logits.shape) == (2, 6, 64)
    assert torch.equal(out.logits.argmax(-1), plain_out.logits.argmax(-1))
    assert torch.equal(out.logits, plain_out.logits)
    assert type(out.logits + 0) is torch.Tensor
    model.lm_head._forward_hooks.clear()
    assert not model.lm_head._forward_pre_hooks
    assert type(model).__dict__["forward"] is own
    assert all(map(torch.equal, train(model, ids)[1], plain))
    with xt.kernel_policy(strict("torch")):
        assert all(map(torch.equal, train(model, ids)[1], plain))
    with xt.kernel_policy(strict()):
        assert all(map(torch.equal, train(model, ids, return_dict=False)[1], under))
        assert torch.equal(model(ids).logits, plain_out.logits)


def test_logits_that_the_weights_have_left_behind(language):
    model, ids = language("Llama")
    with xt.kernel_policy(strict()):
        kept, out = train(model, ids)[0], train(model, ids)[0]
    before = kept.logits.detach()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(kept.logits, before)
    with pytest.raises(UnsupportedOperationError, match="weights have changed since"):
        print(out.logits)


def test_models_that_read_their_logits(language):
    model, ids = language("Gemma2")
    plain = train(model, ids)[1]
    with xt.kernel_policy(strict()), pytest.raises(UnsupportedOperationError, match="computes more of its logits"):
        train(model, ids)
    with (
        pytest.warns(XpuRuntimeWarning, match="computes more of its logits"),
        xt.kernel_policy({"kernels": {OP: "chunked"}}),
    ):
        assert all(map(torch.equal, train(model, ids)[1], plain))
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager")
    compiled = pytest.warns(XpuRuntimeWarning, match="its loss is compiled with its logits")
    with compiled, xt.kernel_policy({"kernels": {OP: "chunked"}}):
        run(ids, labels=ids)


def test_losses_under_autocast(language):
    model, ids = language("Llama")
    with torch.autocast("cpu", torch.bfloat16):
        plain = train(model, ids)[1]
        with xt.kernel_policy(strict()):
            out, under = train(model, ids)
    torch.testing.assert_close(under, plain, rtol=2e-2, atol=1e-3)
    assert out.logits.dtype == model(ids).logits.dtype or out.logits.dtype == torch.bfloat16


class _Softmax(plugins.TorchKernel):
    id, op = "rows.softmax", "softmax"

    def supports(self, call):
        return True, ""

    def forward(self, call, x):
        wide = x.double()
        return (torch.exp(wide - torch.logsumexp(wide, -1, keepdim=True)).to(x.dtype).contiguous(),), ()

    def backward(self, call, saved, grads):
        out = saved.outputs[0].double()
        scaled = out * grads[0].double()
        return ((scaled - out * scaled.sum(-1, keepdim=True)).to(grads[0].dtype),)


def test_softmax_of_rows():
    plugins.register(plugins.KernelBackend("rows", "cpu", "1"), _Softmax())
    try:
        x = torch.randn(3, 4, 5, requires_grad=True)
        upstream = torch.randn(3, 4, 5)
        calls = (
            lambda: F.softmax(x, -1), lambda: torch.softmax(x, 2), lambda: x.softmax(-1),
            lambda: torch.nn.Softmax(-1)(x), lambda: F.softmax(x.bfloat16(), -1, dtype=torch.float32),
        )  # fmt: skip
        for call in calls:
            plain = torch.autograd.grad(call(), x, upstream)
            with xt.kernel_policy(strict("rows.softmax", "softmax")), xt.explain() as report:
                torch.testing.assert_close(torch.autograd.grad(call(), x, upstream), plain)
            report.require()
            assert rows_of(report, "softmax") == {
                ("rows.softmax", "honoured", "train", 1), ("rows.softmax", "honoured", "backward", 1)
            }  # fmt: skip
        refused = pytest.raises(UnsupportedOperationError, match="last dimension of floating-point")
        with xt.kernel_policy(strict("rows.softmax", "softmax")), refused:
            torch.softmax(x, 0)
        torch._dynamo.reset()
        run = torch.compile(lambda: F.softmax(x, -1), backend="aot_eager", fullgraph=True)
        with xt.kernel_policy(strict("rows.softmax", "softmax")), xt.explain() as report:
            run().sum().backward()
        assert {row[1] for row in rows_of(report, "softmax")} == {"honoured"}
    finally:
        forget_torch_kernels("rows")
        plugins._sources.pop("rows", None)
    assert torch.equal(OPERATIONS["softmax"].reference(x), torch.softmax(x, -1))


class _AlignedSoftmax(_Softmax):
    def supports(self, call):
        return call.operands["x"].alignment >= 16, "x does not begin at a multiple of 16 bytes"


def test_the_same_rows_at_an_address_that_a_kernel_does_not_take():
    plugins.register(plugins.KernelBackend("rows", "cpu", "1"), _AlignedSoftmax())
    try:
        memory = torch.randn(33)
        views = (memory[:32].view(4, 8), memory[1:].view(4, 8))
        plain = [torch.softmax(x, -1) for x in views]
        with xt.kernel_policy(strict(["rows.softmax", "torch"], "softmax")), xt.explain() as report:
            torch.testing.assert_close([torch.softmax(x, -1) for x in views], plain)
        assert {row[0] for row in rows_of(report, "softmax")} == {"rows.softmax", "torch.softmax"}
    finally:
        forget_torch_kernels("rows")
        plugins._sources.pop("rows", None)


def test_the_verdict_of_the_canary_depends_on_its_cases():
    from xpuruntime.pytorch.providers import canary

    held = canary._held_by(find_torch_kernel("chunked", OP))
    assert all(one != other for one, other in pairwise(held["cases"].split()[1::2]))
    assert held["adapter"].startswith("xpuruntime.pytorch.providers.chunked._Chunked sha256 ")
