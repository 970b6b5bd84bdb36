# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention of nn.MultiheadAttention that calls no function for attention, under a policy for attention: it is said."""

from __future__ import annotations

import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")
functional = torch.nn.functional

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_of_attention_is_left")]


class Net(torch.nn.Module):
    def __init__(self, **call):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2, batch_first=True)])
        self.call = call

    def forward(self, x):
        return torch.softmax(self.blocks[0](x, x, x, **self.call)[0], -1)


def strict(**kernels):
    return xrt.Policy(mode="strict", kernels=kernels)


@pytest.fixture
def x():
    return torch.randn(2, 6, 8)


def test_it_is_said_once_and_computes_as_ever(x):
    net = Net()
    expected = net(x)
    with xt.kernel_policy(attention="cpu.reference"):
        with pytest.warns(XpuRuntimeWarning, match=r"need_weights=True runs by torch.math.* state need_weights=False"):
            found = net(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net(x).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["cpu.reference", "torch.flash"])  # by an override, and by PyTorch's switch
def test_strict_refuses_it(x, kernel):
    message = r"attention of .* fp32 on cpu in nn.MultiheadAttention with need_weights=True: kernels.attention asks for"
    with xt.kernel_policy(strict(attention=kernel)):
        with pytest.raises(UnsupportedOperationError, match=message):
            Net()(x)
        with pytest.raises(UnsupportedOperationError, match=message), torch.no_grad():
            Net().eval()(x)  # where the fast path would run
        Net(need_weights=False)(x).sum().backward()


@pytest.mark.parametrize(
    "kernels",
    [
        {"attention": "torch.math"},
        {"attention": ["cpu.reference", "auto"]},
        {"attention": "cpu.reference", "rules": [{"match": {"module": "blocks.0"}, "use": "torch"}]},
        {"rules": [{"match": {"op": "attention", "dtype": "bf16"}, "use": "cpu.reference"}]},
        {"rules": [{"match": {"op": "attention", "head_dim": 8}, "use": "cpu.reference"}]},
        {"matmul": "cpu.reference"},
    ],
)
def test_what_it_does_is_what_is_asked_for(x, kernels):
    with xt.kernel_policy(strict(**kernels)), warnings.catch_warnings():
        warnings.simplefilter("error")
        Net()(x).sum().backward()


@pytest.mark.parametrize("phase", ["train", "backward"])
def test_rules_by_phase(x, phase):
    net = Net()
    with xt.kernel_policy(strict(rules=[{"match": {"op": "attention", "phase": phase}, "use": "cpu.reference"}])):
        with pytest.raises(UnsupportedOperationError, match=r"asks for cpu.reference"):
            net(x)
        with torch.no_grad():
            net(x)


def test_the_type_is_that_of_autocast(x):
    rules = [{"match": {"op": "attention", "dtype": "bf16"}, "use": "cpu.reference"}]
    with xt.kernel_policy(strict(rules=rules)):
        Net()(x)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedOperationError, match="bf16 on cpu"):
            Net()(x)


def test_arguments_by_position_and_by_name(x):
    layer = torch.nn.MultiheadAttention(8, 2)
    rest = (8, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0, layer.out_proj.weight, None)
    with xt.kernel_policy(strict(attention="cpu.reference")):
        for call in (
            lambda: functional.multi_head_attention_forward(x, x, x, *rest, True, None, True),
            lambda: functional.multi_head_attention_forward(x, x, x, *rest),
            lambda: layer(query=x, key=x, value=x),
        ):
            with pytest.raises(UnsupportedOperationError, match="need_weights=True"):
                call()
        functional.multi_head_attention_forward(x, x, x, *rest, True, None, False)


def test_explain_has_a_row_for_it(x):
    net = Net()
    with xt.kernel_policy(attention="cpu.reference"), pytest.warns(XpuRuntimeWarning), xt.explain() as report:
        net(x)
    (row,) = (row for row in report.rows if row.op == "attention")
    assert (row.operator, row.status, row.resolved, row.count) == (
        "nn::multi_head_attention_forward", "substituted", "torch.math", 1,
    )  # fmt: skip
    assert "need_weights=False" in row.reason
    with pytest.raises(UnsupportedOperationError, match="another kernel than was asked for"):
        report.require()
    with xt.explain() as free:
        net(x)
    assert not [row for row in free.rows if row.op == "attention"]


def test_the_fast_path_that_was_turned_on_again_is_said_too(x):
    layers = (Net().eval(), torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval())
    with xt.kernel_policy(strict(attention="cpu.reference")), torch.no_grad():
        layers[1](x)
        assert {decision.chosen for decision in xrt.decisions()} == {"cpu.reference"}
        torch.backends.mha.set_fastpath_enabled(True)
        for layer in layers:
            with pytest.raises(UnsupportedOperationError, match=r"in the fast path of nn.MultiheadAttention: "):
                layer(x)
    with xt.kernel_policy(strict(layer_norm="cpu.vectorised")), torch.no_grad():
        layers[1](x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_need_the_fast_path_and_it_is_said():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    with torch.no_grad():
        expected = layer(nested, nested, nested)[0]
        with xt.kernel_policy(attention="cpu.reference"):
            with pytest.raises(AssertionError, match="get_fastpath_enabled"):
                layer(nested, nested, nested)
            torch.backends.mha.set_fastpath_enabled(True)
            with pytest.warns(XpuRuntimeWarning, match=r"attention of \[2, 0, 8\] .* runs by torch.mha"):
                found = layer(nested, nested, nested)[0]
        with xt.kernel_policy(strict(attention="cpu.reference")):
            torch.backends.mha.set_fastpath_enabled(True)
            with pytest.raises(UnsupportedOperationError, match=r"in the fast path of nn.MultiheadAttention: "):
                layer(nested, nested, nested)
    for one, other in zip(found.unbind(), expected.unbind(), strict=True):
        assert torch.equal(one, other)


def test_clearing_gives_back_what_was_there(x):
    before = functional.multi_head_attention_forward
    with xt.kernel_policy(layer_norm="cpu.vectorised"):
        assert functional.multi_head_attention_forward is before
    with xt.kernel_policy(attention="torch.flash"):
        assert functional.multi_head_attention_forward is not before
        with xt.kernel_policy(attention="torch"):
            Net()(x)
    assert functional.multi_head_attention_forward is before


@pytest.mark.parametrize("known", [False, True])
def test_compiled_code_is_refused_before_it_runs(x, known):
    if known:  # then Dynamo keeps PyTorch's function as one operation of the graph
        torch.compile(Net(), backend="eager")(x)
    with xt.kernel_policy(strict(attention="cpu.reference")):
        with pytest.raises(Exception, match=r"compiled code would bypass it. blocks.0: with need_weights=True"):
            torch.compile(Net(), fullgraph=True)(x)
        torch.compile(Net(need_weights=False), fullgraph=True)(x)
    rules = [{"match": {"module": "blocks.0"}, "use": "torch"}]
    with xt.kernel_policy(strict(attention="cpu.reference", rules=rules)):
        torch.compile(Net(), fullgraph=True)(x)
    with (
        xt.kernel_policy(attention="cpu.reference"),
        pytest.warns(XpuRuntimeWarning, match=r"blocks.0: with need_weights=True.*state need_weights=False"),
    ):
        found = torch.compile(net := Net(), fullgraph=True)(x)
    torch.testing.assert_close(found, net(x))
    torch._dynamo.reset()


def test_it_can_be_scripted_and_exported(x):
    layer = torch.nn.MultiheadAttention(8, 2)
    with xt.kernel_policy(strict(attention="cpu.reference")):
        torch.testing.assert_close(
            torch.jit.script(layer)(x, x, x)[0], torch.export.export(layer, (x, x, x)).module()(x, x, x)[0]
        )
