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


def test_a_folder_of_transformers_is_compared_with_one_of_genai(llama_folder: Path, built: Path, tmp_path: Path):
    found = xrt.compare_generations(llama_folder, built)
    assert found.agreed, found
    assert "on torch@cpu" in found.reference
    assert "on onnxruntime-genai@cpu" in found.candidate
    assert (found.logprobs > 100, found.bits, found.first) == (True, False, "")
    assert found.max_difference < 1e-4
    assert {gate.name: gate.verdict for gate in found.gates.gates}["kl"] == "pass"
    same = xrt.compare_generations(llama_folder, llama_folder, texts=[[1, 2, 3]], new_tokens=2)
    assert (same.bits, same.max_difference, same.logprobs) == (True, 0.0, 2)
    (tmp_path / "texts.json").write_text('["hello, world", [1, 2, 3, 4]]')
    limits = {"text": str(tmp_path / "texts.json"), "kl": 1e-9}
    strict = xrt.compare_generations(llama_folder, built, {"verify": {"generation": limits}}, atol=0.0)
    assert (strict.texts, strict.first[:10]) == (limits["text"], "token 1 of")
    for wrong in ([], [[1]]):
        with pytest.raises(xrt.InputError, match="Fix: give texts of two tokens or more"):
            xrt.compare_generations(llama_folder, built, texts=wrong)


def test_a_planted_fault_is_found_on_the_command_line(
    llama: Any, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import copy
    import json

    from xpuruntime.cli.entry import run

    other = copy.deepcopy(llama)
    other.model.layers[0].mlp.down_proj.weight.data *= 3
    other.save_pretrained(tmp_path / "other")
    assert run(["compare", str(llama_folder), str(tmp_path / "other"), "--new-tokens", "4", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["agreed"], told["bits"]) == (False, False)
    assert "of text 0" in told["first"]
    capsys.readouterr()
    assert run(["compare", str(llama_folder), str(llama_folder)]) == 0
    assert "GenerationComparison(" not in capsys.readouterr().out
    for more in (["--engines", "torch"], ["--runs", "3"], ["--html", "x.html"]):
        assert run(["compare", str(llama_folder), str(llama_folder), *more]) == 2
        assert "has no effect on two language models" in capsys.readouterr().err
    assert run(["compare", str(llama_folder), "--new-tokens", "3"]) == 2
