# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Canary of kernels of other packages: each planted fault is found before the first use, and a right kernel passes."""

from __future__ import annotations

import math

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.ops import plugins
from xpuruntime.ops.torch_kernels import forget_torch_kernels
from xpuruntime.runtime.profiler import TUNING

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from xpuruntime.pytorch.providers.operators import perform  # noqa: E402 - it needs PyTorch

F = torch.nn.functional


class Norm(plugins.TorchKernel):
    """An RMS norm, right unless `fault` says otherwise."""

    id = "planted.rms_norm"
    op = "rms_norm"
    fault = ""
    first_columns = 0

    def supports(self, call):
        if self.fault == "few types" and call.attributes["epsilon"] == 1e-6 and call.operands["x"].shape[0] == 5:
            return False, "it takes other rows"
        return (call.attributes["formula"] == "torch"), "it computes the formula of F.rms_norm alone"

    def forward(self, call, x, weight):
        wide = x.float()
        columns = x.shape[-1]
        if self.fault == "collision":  # what was compiled for the first size is taken for every other one
            self.first_columns = columns = self.first_columns or columns
        rstd = torch.rsqrt(wide.pow(2).sum(-1) / columns + call.attributes["epsilon"])
        out = wide * rstd[..., None] * (weight + 1 if self.fault == "offset" else weight)
        if self.fault == "own size" and columns == 8:
            out = out + 1
        if self.fault == "half":
            rstd = rstd.half().float()
        if self.fault == "writes input":
            x.copy_(out)
        return (out.to(x.dtype),), (rstd,)

    def backward(self, call, saved, grads):
        if self.fault == "raises":
            raise RuntimeError("no gradient today")
        (x, weight), rstd, grad = saved.inputs, saved.extra[0][..., None], grads[0].float()
        normal, scaled = x.float() * rstd, grad * weight
        of_norm = 0 if self.fault == "constant norm" else normal * (normal * scaled).mean(-1, keepdim=True)
        of_x = ((scaled - of_norm) * rstd).to(x.dtype)
        of_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        if self.fault == "in place":
            grads[0].copy_(of_x)
        if self.fault == "no weight gradient":
            of_weight = torch.zeros_like(weight)
        return of_x, of_weight


class Unit(plugins.TorchKernel):
    """A gated unit whose gate is GELU, and not SiLU."""

    id = "planted.swiglu"
    op = "swiglu"

    def supports(self, call):
        return True, ""

    def forward(self, call, gate, up):
        return (F.gelu(gate) * up,), ()


class Attention(plugins.TorchKernel):
    """An attention as fused kernels compute it, right unless `fault` says otherwise."""

    id = "planted.attention"
    op = "attention"
    fault = ""
    deterministic = "its sums are in any order"

    def supports(self, call):
        return True, ""

    def weights(self, call, q, k, mask=None):
        scale = call.attributes["scale"] or q.shape[-1] ** -0.5
        scores = q.float() @ wide(k, q).mT * scale
        if call.attributes["causal"]:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        if mask is not None and self.fault != "dropped mask":
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if mask is not None and self.fault == "hidden queries":
            scores = scores.clamp_min(torch.finfo(scores.dtype).min)
        return torch.nan_to_num(torch.softmax(scores, -1)), torch.logsumexp(scores, -1), scale

    def forward(self, call, q, k, v, mask=None):
        weights, lse, _ = self.weights(call, q, k, mask)
        return (torch.empty_like(q).copy_(weights @ wide(v, q)),), (lse,)

    def backward(self, call, saved, grads):
        (q, k, v, *mask), grad, groups = (
            saved.inputs,
            grads[0].float(),
            saved.inputs[0].shape[1] // saved.inputs[1].shape[1],
        )
        weights, lse, scale = self.weights(call, q, k, *mask)
        delta = (grad * saved.outputs[0].float()).sum(-1, keepdim=True)
        if self.fault == "key alone" and k.shape[2] == 1:
            delta = 0
        of_scores = (weights * (grad @ wide(v, q).mT - delta)).to(q.dtype).float() * scale
        by_head = [of_scores.mT @ q.float(), weights.to(q.dtype).float().mT @ grad]
        scores = [of_scores @ wide(k, q), *(x.unflatten(1, (-1, groups)).sum(2) for x in by_head)]
        found = [torch.empty_like(x).copy_(y) for x, y in zip((q, k, v), scores, strict=True)]
        if self.fault == "strides":
            found[0] = found[0].mT.contiguous().mT
        if self.fault == "nan gradient" and k.shape[2] % 128 == 64 and bool((lse < -88.7).any()):
            found[0].fill_(math.nan)
        return [*found, *([None] * len(mask))]


class LayerNorm(plugins.TorchKernel):
    """A layer norm whose mean is off by a rounding to fp32, which decides a row of a single column."""

    id = "planted.layer_norm"
    op = "layer_norm"
    fault = ""

    def supports(self, call):
        return True, ""

    def forward(self, call, x, *columns):
        mean = x.float().mean(-1, keepdim=True) * (1.5 if self.fault else 1 + torch.finfo(torch.float32).eps)
        rstd = torch.rsqrt((x.float() - mean).pow(2).mean(-1, keepdim=True) + call.attributes["epsilon"])
        scale, *offset = [y.float() for y in columns] or [torch.ones(())]
        out = (x.float() - mean) * rstd * scale + sum(offset)
        return (out.to(x.dtype),), (mean[:, 0], rstd[:, 0])

    def backward(self, call, saved, grads):
        x, *columns = saved.inputs
        mean, rstd = (y[:, None] for y in saved.extra)
        normal, grad = (x.float() - mean) * rstd, grads[0].float()
        scaled = grad * columns[0].float() if columns else grad
        of_x = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
        of_columns = [(grad * normal).sum(0), grad.sum(0)][: len(columns)]
        return [y.to(like.dtype) for y, like in zip((of_x * rstd, *of_columns), saved.inputs, strict=True)]


class Loss(plugins.TorchKernel):
    """A cross entropy that keeps the logsumexp of a row in fp32, as kernels do."""

    id = "planted.cross_entropy"
    op = "cross_entropy"
    fault = ""

    def supports(self, call):
        return True, ""

    def forward(self, call, logits, target):
        seen, sums = target != call.attributes["ignore_index"], logits.logsumexp(-1)
        rows = torch.where(seen, sums - logits.gather(-1, torch.where(seen, target, 0)[:, None])[:, 0], 0)
        return (rows.sum() / seen.sum(),), (sums,)

    def backward(self, call, saved, grads):
        (logits, target), sums = saved.inputs, saved.extra[0]
        seen = target != call.attributes["ignore_index"]
        shares = torch.exp(logits - sums[:, None]) * (1.0002 if self.fault == "shares" else 1)
        shares[torch.arange(len(target)), torch.where(seen, target, 0)] -= 1
        return shares * (torch.where(seen, grads[0], 0) / seen.sum())[:, None], None

    def saved_like(self, call, *tensors):
        return (tensors[0].new_empty(tensors[0].shape[:1]),)


def wide(x, q):
    """Return keys or values in fp32, for each head of queries."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


@pytest.fixture
def planted():
    def register(kind, fault):
        kernel = kind()
        kernel.fault = fault
        kernel.__class__ = type(fault or "right", (kind,), {})  # a verdict is of a class of an adapter
        plugins.register(plugins.KernelBackend("planted", "cpu", fault or "1"), kernel)

    yield register
    forget_torch_kernels("planted")
    plugins._sources.pop("planted", None)


def strict(**kernels):
    return xrt.Policy(mode="strict", kernels=kernels)


def norm():
    x, weight = torch.ones(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    perform("rms_norm", {"x": x, "weight": weight}, {"epsilon": 1e-6}).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("offset", "the output differs by"), ("collision", "rows of 63 columns.*the output differs"),
        ("writes input", "it writes into its input x"), ("in place", "writes into the gradient that it gets"),
        ("no weight gradient", "the gradient of weight differs"), ("raises", "it raised RuntimeError: no gradient"),
        ("half", "the gradient of"), ("own size", "rows of 8 columns.*the output differs"),
        ("few types", "supports none of the inputs"),
    ],
)  # fmt: skip
def test_fault_of_a_norm_is_found_before_its_first_use(planted, fault, said):
    planted(Norm, fault)
    with xt.kernel_policy(strict(rms_norm="planted.rms_norm")), pytest.raises(UnsupportedOperationError, match=said):
        norm()
    with xt.kernel_policy(rms_norm="planted.rms_norm"), pytest.warns(XpuRuntimeWarning, match=said):
        norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fault_of_usual_numbers_is_found_beside_extreme_ones(planted, dtype):
    x, weight = (torch.ones(*shape, dtype=dtype, requires_grad=True) for shape in ((2, 8), (8,)))
    planted(Norm, "constant norm")
    said = "one of large numbers: the gradient of x differs"
    with xt.kernel_policy(strict(rms_norm="planted.rms_norm")), pytest.raises(UnsupportedOperationError, match=said):
        perform("rms_norm", {"x": x, "weight": weight}, {"epsilon": 1e-6})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gate_of_another_function_is_found(planted, dtype):
    gate = torch.ones(2, 8, dtype=dtype)
    planted(Unit, "gelu")
    with xt.kernel_policy(strict(swiglu="planted.swiglu")), pytest.raises(UnsupportedOperationError, match="differs"):
        perform("swiglu", {"gate": gate, "up": gate}, {})


@pytest.mark.parametrize(
    ("fault", "mask", "said"),
    [
        ("dropped mask", torch.ones(1, 1, 8, 8, dtype=torch.bool), "hidden: the output differs"),
        ("hidden queries", torch.ones(1, 1, 8, 8, dtype=torch.bool), "keys of some queries hidden: the output differs"),
        ("strides", None, "the gradient of q has the strides"),
        ("nan gradient", None, "192 keys, scores about -120: the gradient of q has .* not finite"),
    ],
)
def test_fault_of_an_attention_is_found_before_its_first_use(planted, fault, mask, said):
    planted(Attention, fault)
    q = torch.ones(1, 1, 8, 16, requires_grad=True)
    with xt.kernel_policy(strict(attention="planted.attention")), pytest.raises(UnsupportedOperationError, match=said):
        F.scaled_dot_product_attention(q, q, q, mask)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_kernels_pass(planted, dtype, head_dim):
    planted(Norm, "")
    planted(Attention, "")
    x, weight = (torch.ones(*shape, dtype=dtype, requires_grad=True) for shape in ((2, 8), (8,)))
    q = torch.ones(1, 2, 8, head_dim, dtype=dtype, requires_grad=True)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    policy = strict(rms_norm="planted.rms_norm", attention="planted.attention")
    with xt.kernel_policy(policy), xt.explain() as report:
        perform("rms_norm", {"x": x, "weight": weight}, {"epsilon": 1e-6}).sum().backward()
        for given in (None, mask, torch.zeros(8, 8, dtype=dtype)):
            F.scaled_dot_product_attention(q, q, q, given).sum().backward()
    assert {row.resolved for row in report.rows if row.op} == {"planted.rms_norm", "planted.attention"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_that_has_to_be_zero_is_found(planted, dtype):
    planted(Attention, "key alone")
    q = torch.ones(1, 2, 8, 16, dtype=dtype, requires_grad=True)
    said = "1 keys, scores about 0: the gradient of q differs"
    with xt.kernel_policy(strict(attention="planted.attention")), pytest.raises(UnsupportedOperationError, match=said):
        F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("fault", ["", "shares"])
def test_gradient_of_a_loss_may_round_as_its_logits_do(planted, fault):
    planted(Loss, fault)
    logits, target = torch.randn(6, 136, requires_grad=True), torch.arange(6)
    with xt.kernel_policy(strict(cross_entropy="planted.cross_entropy")):
        if fault:
            with pytest.raises(UnsupportedOperationError, match="gradient of logits differs"):
                F.cross_entropy(logits, target)
        else:
            F.cross_entropy(logits, target).backward()


@pytest.mark.parametrize("fault", ["", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_that_are_zero_in_theory_may_round_as_their_parts_do(planted, fault, dtype):
    planted(LayerNorm, fault)
    x, weight = torch.randn(4, 1, dtype=dtype, requires_grad=True), torch.ones(1, dtype=dtype)
    with xt.kernel_policy(strict(layer_norm="planted.layer_norm")):
        if fault:
            with pytest.raises(UnsupportedOperationError, match="the output differs by"):
                F.layer_norm(x, (1,), weight)
        else:
            F.layer_norm(x, (1,), weight).sum().backward()


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_softmax_of_few_columns_has_no_row_that_is_hidden_whole(planted, columns):
    class Softmax(plugins.TorchKernel):
        id, op, fault = "planted.softmax", "softmax", ""

        def supports(self, call):
            return True, ""

        def forward(self, call, x):
            return (torch.softmax(x, -1),), ()

    planted(Softmax, "")
    with xt.kernel_policy(strict(softmax="planted.softmax")), torch.no_grad():
        F.softmax(torch.ones(2, columns), -1)


def test_verdict_is_kept_for_the_same_adapter(planted, monkeypatch):
    planted(Norm, "")
    policy = strict(rms_norm="planted.rms_norm")
    with xt.kernel_policy(policy):
        norm()
    from xpuruntime.pytorch.providers import canary

    monkeypatch.setattr(canary, "_verdicts", {})  # as another process begins
    monkeypatch.setitem(canary.CASES, "rms_norm", lambda *_: pytest.fail("it was compared once more"))
    with xt.kernel_policy(policy):
        norm()


def test_verdict_without_a_mask_is_none_with_it(planted):
    planted(Attention, "dropped mask")
    q, mask = torch.ones(1, 1, 8, 16), torch.ones(8, 8, dtype=torch.bool)
    with xt.kernel_policy(strict(attention="planted.attention")):
        F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(UnsupportedOperationError, match="hidden: the output differs"):
            F.scaled_dot_product_attention(q, q, q, mask)


def test_variable_leaves_it_out_and_evidence_says_so(planted, monkeypatch):
    monkeypatch.setenv("XPURUNTIME_CANARY", "off")
    planted(Norm, "offset")
    with xt.kernel_policy(strict(rms_norm="planted.rms_norm")), xt.explain() as report:
        norm()
    rows = [row for row in report.rows if row.op]
    assert {row.resolved for row in rows} == {"planted.rms_norm"}
    assert all("not compared with float64" in row.reason for row in rows)


def test_comparison_inside_an_explained_block_is_no_call_of_the_program(planted):
    planted(Norm, "none, explained")
    with xt.kernel_policy(strict(rms_norm="planted.rms_norm")), xt.explain() as report:
        norm()
    rows = [row for row in report.rows if row.op]
    assert {(row.op, row.resolved, row.status) for row in rows} == {("rms_norm", "planted.rms_norm", "honoured")}
    assert sum(row.count for row in rows) == 2  # forward and backward
    assert report.coverage.bypassed == 0
    assert "xpuruntime, tuning" in {row.operator for row in report.rows}  # the time of the comparison


def test_profiler_can_link_kernels_to_the_range_of_the_comparison(planted):
    planted(Norm, "none, profiled")
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        xt.kernel_policy(strict(rms_norm="planted.rms_norm")),
        torch.profiler.profile(activities=activities, experimental_config=options) as profile,
    ):
        norm()
    ranges = [event for event in profile.events() if event.name == TUNING]
    assert ranges
    assert not any(event.is_user_annotation for event in ranges)  # to which it links none
