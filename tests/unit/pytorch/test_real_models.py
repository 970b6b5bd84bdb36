# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training of real model families under policies: the losses are those of no policy, and nothing stays in PyTorch."""

from __future__ import annotations

import warnings

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the models are of transformers: pip install --group real-models")

from torch.nn.modules import module as torch_module  # noqa: E402
from transformer_models import FAMILIES, losses  # noqa: E402 - it needs both

import xpuruntime.pytorch as xt  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_of_attention_is_left")]

KERNELS = {
    "matmul": "cpu.blas",
    "attention": ["cpu.reference", "torch"],
    "layer_norm": "cpu.vectorised",
    "rms_norm": "cpu.vectorised",
    "conv": ["cpu.gemm_conv", "torch"],
}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    hooks = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    before = [len(hook) for hook in hooks]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
    assert [len(hook) for hook in hooks] == before


def policy(name, **more):
    rule = {"match": {"op": "matmul", "module": FAMILIES[name].module}, "use": "cpu.reference"}
    return xrt.Policy(kernels={**KERNELS, "rules": [rule]}, **more)


def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_steps(name):
    expected, _ = losses(name)
    assert expected[1] != expected[0]
    xrt.clear_decisions()
    with xt.kernel_policy(policy(name)):
        found, _ = losses(name)
    close(found, expected)
    chosen = {decision.chosen for decision in xrt.decisions()}
    assert "cpu.reference" in chosen
    assert "cpu.blas" in chosen or name == "resnet"  # which has one product alone, that of the rule
    again, _ = losses(name)
    assert again == expected


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_gradient_checkpointing(name):
    expected, _ = losses(name)

    def prepare(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": name == "bert"})
        return model

    if name == "bert":  # the other kind needs an input with a gradient

        def prepare(model):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            return model

    with xt.kernel_policy(policy(name)):
        found, _ = losses(name, prepare)
    close(found, expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generate(name):
    torch.manual_seed(0)
    model = FAMILIES[name].make().eval()
    ids = torch.randint(3, 64, (2, 4))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    xrt.clear_decisions()
    with xt.kernel_policy(policy(name)):
        assert torch.equal(model.generate(ids, **options), expected)
    assert "cpu.reference" in {decision.chosen for decision in xrt.decisions()}


def test_generate_with_a_static_cache_under_a_strict_policy():
    torch.manual_seed(0)
    model = FAMILIES["llama"].make().eval()
    ids = torch.randint(3, 64, (2, 4))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(ids, **options)
    strict = xrt.Policy(mode="strict", kernels={"matmul": "cpu.blas", "rms_norm": "cpu.vectorised"})
    with xt.kernel_policy(strict), xt.explain() as report:
        assert torch.equal(model.generate(ids, **options), expected)
    products = {(row.resolved, row.status) for row in report.rows if row.op == "matmul"}
    assert products == {("cpu.blas", "honoured")}
    assert {row.status for row in report.rows} <= {"honoured", "default", "other"}


def test_adapters_that_are_put_in_between_two_steps():
    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.a = torch.nn.Parameter(0.1 * torch.randn(2, base.in_features))
            self.b = torch.nn.Parameter(0.1 * torch.randn(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + (x @ self.a.T) @ self.b.T

    def prepare(model):
        turns = []

        def called(**batch):
            if turns:
                for layer in model.model.layers:
                    layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
            turns.append(1)
            return model(**batch)

        return called

    expected, _ = losses("llama", prepare)
    with xt.kernel_policy(policy("llama", mode="strict")), xt.explain() as report:
        actual, _ = losses("llama", prepare)
    close(actual, expected)
    assert {row.status for row in report.rows if row.op == "matmul"} == {"honoured"}
    used = {row.resolved for row in report.rows if row.module == "model.layers.1.self_attn.q_proj"}
    assert used == {"cpu.reference"}
