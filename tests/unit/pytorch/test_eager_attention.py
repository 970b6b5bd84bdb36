# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention of transformers under a policy: its eager form, and what is said of kernels by the name of flash."""

from __future__ import annotations

import sys

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("nothing_is_watched_afterwards"),
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated"),
]

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


@pytest.fixture
def llama(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config).eval()


def by_word(word="math"):
    return xrt.Policy(mode="strict", kernels={"attention": word})


@pytest.mark.parametrize("word", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_policy_decides_attention_of_the_word(llama, word):
    ids = torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        plain = llama(ids).logits
        llama.config._attn_implementation = word
        with xt.kernel_policy(by_word()), xt.explain(root=llama) as report:
            out = llama(ids, use_cache=True)
            torch.testing.assert_close(out.logits, plain)
            logits = llama(torch.cat((ids, ids), 1)[:, 7:10], past_key_values=out.past_key_values).logits
    report.require()
    rows = {(row.resolved, row.status) for row in report.rows if row.op == "attention"}
    assert rows == {("torch.math", "honoured")}
    llama.config._attn_implementation = "sdpa"
    with torch.no_grad():
        torch.testing.assert_close(logits, llama(torch.cat((ids, ids), 1)[:, :10]).logits[:, 7:])
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    assert ALL_ATTENTION_FUNCTIONS[word].__module__ == "transformers.integrations.flash_attention"


def test_calls_that_say_more_than_queries_and_keys_are_refused(llama):
    llama.config._attn_implementation = "flash_attention_2"
    ids = torch.randint(0, 64, (1, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with xt.kernel_policy(by_word()), torch.no_grad():
        for more in ({"attention_mask": mask}, {"position_ids": packed}):
            with pytest.raises(UnsupportedOperationError, match="one length for all sequences"):
                llama(ids, **more)
        llama(ids)
    torch._dynamo.reset()
    refused = pytest.raises(Exception, match="is compiled with the kernels of its package")
    with xt.kernel_policy(by_word()), torch.no_grad(), refused:
        torch.compile(llama, backend="eager")(ids)
