# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models of transformers with ``flash_attention_2`` and its kin under a policy: no package of them is needed then."""

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


def strict(word="math"):
    return xrt.Policy(mode="strict", kernels={"attention": word})


@pytest.mark.parametrize("word", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_policy_decides_attention_of_the_word(llama, word):
    ids = torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        plain = llama(ids).logits
        llama.config._attn_implementation = word
        with xt.kernel_policy(strict()), xt.explain(root=llama) as report:
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
    with xt.kernel_policy(strict()), torch.no_grad():
        for more in ({"attention_mask": mask}, {"position_ids": packed}):
            with pytest.raises(UnsupportedOperationError, match="one length for all sequences"):
                llama(ids, **more)
        llama(ids)
    torch._dynamo.reset()
    refused = pytest.raises(Exception, match="is compiled with the kernels of its package")
    with xt.kernel_policy(strict()), torch.no_grad(), refused:
        torch.compile(llama, backend="eager")(ids)
