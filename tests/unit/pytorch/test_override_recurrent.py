# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Recurrent layers under a policy for products: what does not reach into them is said where they run, or refused."""

from __future__ import annotations

import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]


def strict(**kernels):
    return xrt.Policy(mode="strict", kernels=kernels)


def lstm():
    return torch.nn.Sequential(torch.nn.LSTM(8, 8)), torch.randn(3, 2, 8)


def test_it_is_said_once_and_runs_as_ever():
    model, x = lstm()
    expected = model(x)[0]
    with xt.kernel_policy(matmul="cpu.blas"):
        with pytest.warns(XpuRuntimeWarning, match=r"mkldnn_rnn_layer of \[3, 2, 8\] fp32 on cpu runs by torch.rnn"):
            found = model(x)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)[0].sum().backward()
    torch.testing.assert_close(found, expected)


def test_strict_refuses_it_and_a_rule_allows_it():
    model, x = lstm()
    with xt.kernel_policy(strict(matmul="cpu.blas")), pytest.raises(UnsupportedOperationError, match="use: torch"):
        model(x)
    rules = [{"match": {"module": "0"}, "use": "torch"}]
    with xt.kernel_policy(strict(matmul="cpu.blas", rules=rules)):
        model(x)[0].sum().backward()
    assert model[0].weight_ih_l0.grad is not None


def test_a_rule_for_the_backward_alone_is_not_met_either():
    model, x = lstm()
    rules = [{"match": {"op": "matmul", "phase": "backward"}, "use": "cpu.blas"}]
    with xt.kernel_policy(strict(rules=rules)):
        loss = model(x)[0].sum()
        with pytest.raises(UnsupportedOperationError, match=r"mkldnn_rnn_layer_backward .* kernels.rules\[0\]"):
            loss.backward()


def test_compiled_code_that_has_one_is_refused_too():
    model, x = lstm()
    torch._dynamo.reset()
    with xt.kernel_policy(strict(matmul="cpu.blas")), pytest.raises(UnsupportedOperationError, match="recurrent layer"):
        torch.compile(model, backend="eager")(x)
    torch._dynamo.reset()


def test_layers_that_multiply_step_by_step_obey():
    layer, x = torch.nn.GRU(8, 8), torch.randn(3, 2, 8)
    with xt.kernel_policy(strict(matmul="cpu.reference")):
        layer(x)[0].sum().backward()
    assert {decision.chosen for decision in xrt.decisions()} == {"cpu.reference"}
    assert xt.coverage_gaps(strict(matmul="cpu.reference"), module=layer) == ()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")  # by oneDNN, says PyTorch
@pytest.mark.parametrize("kind", ["plain", "projecting", "fp64", "fp16", "bf16"])
def test_what_is_said_before_is_what_runs(kind):
    """An LSTM of a type that oneDNN has no kernel for, or with projections, multiplies step by step."""
    dtype = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
    layer = torch.nn.LSTM(8, 8, proj_size=4 if kind == "projecting" else 0, dtype=dtype)
    said = [gap.what for gap in xt.coverage_gaps(xrt.KernelPolicy(matmul="cpu.reference"), module=layer)]
    with warnings.catch_warnings(record=True) as seen, torch.no_grad(), xt.kernel_policy(matmul="cpu.reference"):
        warnings.simplefilter("always")
        layer(torch.randn(3, 2, 8, dtype=dtype))
    assert said == ["LSTM"] * sum("recurrent layer" in str(one.message) for one in seen)


def test_dynamo_does_not_follow_what_stands_behind_an_operator():
    """An LSTM breaks the graph, and what it calls in Python is no code of the user's to be compiled."""
    model, x = lstm()
    torch._dynamo.reset()
    with xt.kernel_policy(matmul="cpu.blas"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=XpuRuntimeWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        torch.compile(model, backend="eager")(x)[0].sum().backward()
    torch._dynamo.reset()
