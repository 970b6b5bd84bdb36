# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention of transformers with ``attn_implementation="eager"`` under a policy."""

from __future__ import annotations

import sys

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards")]

ATTENTION = xrt.Policy(mode="strict", kernels={"attention": "cpu.reference"})


@pytest.fixture
def hf(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    return pytest.importorskip("transformers")


def made(hf, family, **more):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0, "attn_implementation": "eager",
    }  # fmt: skip
    config = getattr(hf, f"{family}Config")(**sizes, **more)
    return getattr(hf, f"{family}ForCausalLM")(config)


IDS = torch.tensor([[5, 9, 2, 7, 1, 3], [0, 0, 4, 8, 6, 2]])
PADDED = {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "labels": IDS}


def train(model, **more):
    model.zero_grad()
    out = model(**PADDED, **more)
    out.loss.backward()
    return [
        out.logits[PADDED["attention_mask"].bool()].detach(),
        *[parameter.grad.clone() for parameter in model.parameters()],
    ]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma", "Mixtral"])
def test_padded_batches_are_computed_as_before(hf, family):
    model = made(hf, family)
    module = sys.modules[type(model).__module__]
    own, plain = module.eager_attention_forward, train(model)
    assert xt.coverage_gaps(ATTENTION, module=model) == ()
    with xt.kernel_policy(ATTENTION), xt.explain(root=model) as report:
        assert module.eager_attention_forward is not own
        torch.testing.assert_close(train(model), plain, rtol=1e-4, atol=1e-5)
    assert module.eager_attention_forward is own
    rows = [row for row in report.require().rows if row.op == "attention"]
    assert {row.status for row in rows} == {"honoured"}
    assert sum(row.count for row in rows if row.phase == "train") == 2
    with xt.kernel_policy(xrt.KernelPolicy(attention="torch")):
        assert all(map(torch.equal, train(model), plain))


def test_weights_that_a_model_returns_are_its_own(hf):
    model = made(hf, "Llama")
    plain = model(**PADDED, output_attentions=True)
    with pytest.raises(UnsupportedOperationError, match="returns the weights"), xt.kernel_policy(ATTENTION):
        model(**PADDED, output_attentions=True)
    with xt.kernel_policy(attention=["cpu.reference", "torch"]):
        under = model(**PADDED, output_attentions=True)
    assert all(map(torch.equal, under.attentions, plain.attentions))
    assert torch.equal(under.logits, plain.logits)


def test_a_form_of_its_own_is_a_gap(hf):
    model = made(hf, "GptOss", num_local_experts=2, num_experts_per_tok=1)
    gaps = [gap for gap in xt.coverage_gaps(ATTENTION, module=model) if gap.op == "attention"]
    assert len(gaps) == 2
    assert all("attn_implementation='sdpa'" in gap.fix for gap in gaps)
    with torch.no_grad():
        plain = model(IDS).logits
        with pytest.raises(UnsupportedOperationError, match="no plain attention"), xt.kernel_policy(ATTENTION):
            model(IDS)
        with xt.kernel_policy(attention=["cpu.reference", "torch"]), xt.explain(root=model) as report:
            assert torch.equal(model(IDS).logits, plain)
    assert {row.resolved for row in report.rows if row.op == "attention"} == {"torch.sdpa"}


def test_compiled_code_has_it_built_in(hf):
    torch._dynamo.reset()
    model = made(hf, "Llama").eval()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = model(IDS).logits
        torch.testing.assert_close(run(IDS).logits, plain)
        with xt.kernel_policy(ATTENTION), xt.explain(root=model) as report:
            torch.testing.assert_close(run(IDS).logits, plain, rtol=1e-4, atol=1e-5)
    assert {row.status for row in report.require().rows if row.op == "attention"} == {"honoured"}
