# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A folder of transformers on a CUDA device: captured decode steps give the tokens of eager ones."""

from __future__ import annotations

import sys

import pytest
import torch

sys.modules.setdefault("torchvision", None)
hf = pytest.importorskip("transformers")

import xpuruntime as xrt  # noqa: E402

pytestmark = pytest.mark.usefixtures("cuda_is_usable_afterwards")

PROMPT = [5, 7, 11, 2]
EXECUTION = {"engine": "torch", "device": "cuda:0", "precision": "fp32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=1, eos_token_id=63, pad_token_id=0,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("llama")
    hf.LlamaForCausalLM(config).save_pretrained(place)
    return place


def test_captured_steps_give_the_tokens_of_eager_ones(folder):
    with xrt.GenerationSession(folder, {"mode": "strict", "execution": EXECUTION}) as eager:
        expected = eager.generate(PROMPT, 40).tokens
        several = [result.tokens for result in eager.generate([PROMPT, [9]], 20)]
        assert eager.explain(PROMPT, runs=2).honoured
    graphs = {"mode": "strict", "execution": {**EXECUTION, "cuda_graph": "require"}}
    with xrt.GenerationSession(folder, graphs) as captured:
        for _ in range(2):
            assert captured.generate(PROMPT, 40).tokens == expected
        assert [result.tokens for result in captured.generate([PROMPT, [9]], 20)] == several
        report = captured.explain(PROMPT, runs=2)
        seen = {observation.key: observation for observation in report.observations}["execution.cuda_graph"]
        assert seen.status == "honoured", report
        with pytest.raises(xrt.UnsupportedOperationError, match="run eagerly"):
            next(iter(captured.stream(PROMPT, 4)))
        with pytest.raises(xrt.InputError, match="inside of the graph"):
            captured.generate(PROMPT, 4, logprobs=True)


def test_a_seed_draws_the_same_tokens_again(folder):
    with xrt.GenerationSession(folder, {"execution": {**EXECUTION, "cuda_graph": "require"}}) as session:
        drawn = {"temperature": 0.9, "top_k": 20, "seed": 7}
        state = torch.cuda.get_rng_state()
        first = session.generate(PROMPT, 30, **drawn).tokens
        assert session.generate(PROMPT, 30, **drawn).tokens == first
        assert torch.equal(torch.cuda.get_rng_state(), state)
