# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A folder that the engine's model builder makes of a model of transformers gives its tokens and logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from generation_folders import write_tokenizer

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai: make engines")
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

PROMPTS = [[1, 2, 3, 4, 5], [7], list(range(40))]


@pytest.fixture(scope="module")
def built(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in fp32, as the builder writes it."""
    from onnxruntime_genai.models import builder

    place = tmp_path_factory.mktemp("built")
    llama.save_pretrained(place / "llama")
    write_tokenizer(place / "llama")
    source, made, cache = (str(place / name) for name in ("llama", "made", "cache"))
    options = builder.parse_extra_options("", source, made, "fp32", "cpu", cache, [])
    builder.create_model(None, source, made, "fp32", "cpu", cache, **options)
    return place / "made"


def test_tokens_and_logprobs_are_those_of_transformers(llama: Any, built: Path):
    from xpuruntime.generation import check_gates
    from xpuruntime.pytorch import logprobs_of, parity

    policy = {"mode": "strict", "execution": {"precision": "fp32"}, "accuracy": {"rtol": 1e-3, "atol": 1e-3}}
    with xrt.GenerationSession(built, policy) as session:
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            expected = llama.generate(ids, max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
            result = session.generate(prompt, 16, logprobs=True)
            assert list(result) == expected
            tokens = [*prompt, *result]
            with torch.no_grad():
                rows = torch.log_softmax(llama(torch.tensor([tokens])).logits[0, :-1].double(), -1).numpy()
            np.testing.assert_allclose(session.logprobs(tokens), rows, atol=1e-4)
            np.testing.assert_allclose(
                result.logprobs, rows[np.arange(len(rows)), tokens[1:]][-len(expected) :], atol=1e-4
            )
        limits = {"kl": 1e-6, "top1": 0.999}
        report = check_gates(logprobs_of(llama), session, limits, texts=[list(range(60)), [5] * 20])
        assert report.verdict != "fail", report
        assert {gate.name: gate.verdict for gate in report.gates}["kl"] == "pass"
        found = parity(llama, session, PROMPTS[::2], rtol=0.0, atol=1e-4)
        assert found.logprobs is not None
        assert found.logprobs.passed, found
        assert found.logprobs.positions > 20  # those that the model of transformers was forced to, one by one
        with torch.no_grad():
            weight = llama.model.layers[1].mlp.down_proj.weight
            weight *= 1.05
            scaled = parity(llama, session, PROMPTS[::2], rtol=0.0, atol=1e-4)
            weight /= 1.05
        assert scaled.logprobs is not None
        assert not scaled.logprobs.passed, scaled
