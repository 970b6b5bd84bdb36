# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gates on next-token distributions: what each decides, what it cannot judge, and which gate catches which fault."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.generation import check_gates
from xpuruntime.policies import Policy, VerifyGeneration

STRICT = {"top1": 1.0, "kl": 1e-9, "perplexity": "0.01%", "tokens": 8}
TEXTS = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0]]


class Bigram:
    """A model that knows the last token alone."""

    def __init__(self, table: Any) -> None:
        self.table = np.asarray(table, dtype=np.float32)

    def logprobs(self, tokens: Any) -> Any:
        return self.table[np.asarray(tokens[:-1])]


def bigram(seed: int = 0, vocabulary: int = 4) -> Any:
    return np.random.default_rng(seed).normal(size=(vocabulary, vocabulary))


def verdicts(report: Any) -> dict[str, str]:
    return {gate.name: gate.verdict for gate in report.gates}


def only(report: Any, name: str) -> Any:
    [result] = [gate for gate in report.gates if gate.name == name]
    return result


class TestFigures:
    def test_the_same_distributions_are_at_zero(self) -> None:
        table = bigram()
        report = check_gates(Bigram(table), Bigram(table + 3.0), STRICT, texts=TEXTS)
        assert verdicts(report) == {"top1": "pass", "kl": "pass", "perplexity": "pass", "tokens": "reported"}
        assert only(report, "kl").figures["kl"] == pytest.approx(0.0, abs=1e-12)
        assert (report.verdict, report.texts, report.positions) == ("pass", 2, 8)
        assert only(report, "tokens").figures["same"] == 2

    def test_figures_are_those_of_the_definitions(self) -> None:
        want, got = (table - np.log(np.exp(table).sum(1, keepdims=True)) for table in (bigram(0), bigram(1)))
        report = check_gates(Bigram(want), Bigram(got), {"kl": 1.0}, texts=TEXTS)
        pairs = [pair for text in TEXTS for pair in itertools.pairwise(text)]
        kl = np.mean([(np.exp(want[a]) * (want[a] - got[a])).sum() for a, _ in pairs])
        assert only(report, "kl").figures["kl"] == pytest.approx(kl, rel=1e-5)
        figures = only(report, "perplexity").figures
        assert figures["perplexity"] == pytest.approx(math.exp(-np.mean([got[a, b] for a, b in pairs])), rel=1e-5)
        share = np.mean([want[a].argmax() == got[a].argmax() for a, _ in pairs])
        assert only(report, "top1").figures["top1"] == pytest.approx(share)

    def test_perplexity_is_judged_both_ways(self) -> None:
        sure = 4.0 * np.eye(4)[[1, 2, 3, 0]]
        texts = [[0, 1, 2, 3, 0, 1, 2]]
        for other in (sure * 1.2, sure / 1.2):
            report = check_gates(Bigram(sure), Bigram(other), {"perplexity": "1%"}, texts=texts)
            assert only(report, "perplexity").verdict == "fail"
        assert "higher" in only(report, "perplexity").reason

    def test_the_first_other_token_has_its_margin(self) -> None:
        want = np.zeros((4, 4))
        want[:, 1], want[:, 2] = 2.0, 1.75
        got = want[:, [0, 2, 1, 3]]
        gate = only(check_gates(Bigram(want), Bigram(got), STRICT, texts=TEXTS), "tokens")
        assert gate.verdict == "reported"
        assert gate.figures["margin"] == pytest.approx(0.25)
        assert "the first other token is 2 in place of 1, token 0 after text 0" in gate.reason


class TestUndecided:
    def test_too_few_positions_for_the_limit(self) -> None:
        gate = only(check_gates(Bigram(bigram()), Bigram(bigram()), {"top1": 0.99}, texts=TEXTS), "top1")
        assert gate.verdict == "inconclusive"
        assert gate.reason == "8 positions cannot tell 0.99 from 1; 100 are needed"

    def test_ties_of_the_reference_decide_nothing(self) -> None:
        report = check_gates(Bigram(np.zeros((4, 4))), Bigram(bigram()), {"top1": 1.0}, texts=TEXTS)
        assert verdicts(report)["top1"] == "inconclusive"

    @pytest.mark.parametrize("texts", [[[1]], [[]], []])
    def test_no_next_token(self, texts: Any) -> None:
        report = check_gates(Bigram(bigram()), Bigram(bigram(1)), STRICT, texts=texts)
        assert report.verdict == "inconclusive"
        assert set(verdicts(report).values()) == {"inconclusive", "reported"}

    @pytest.mark.parametrize(("side", "verdict"), [("reference", "inconclusive"), ("candidate", "fail")])
    def test_nan(self, side: str, verdict: str) -> None:
        table = bigram()
        table[2, 2] = np.nan
        sides = {"reference": Bigram(bigram()), "candidate": Bigram(bigram()), side: Bigram(table)}
        report = check_gates(**sides, limits={"top1": 1.0, "kl": 1.0, "perplexity": 0.5}, texts=TEXTS)
        assert set(verdicts(report).values()) == {verdict}

    def test_a_token_that_the_candidate_rules_out(self) -> None:
        got = bigram()
        got[1, 2] = -np.inf
        report = check_gates(Bigram(bigram()), Bigram(got), {"kl": 1e6, "perplexity": 9.0}, texts=TEXTS)
        assert (verdicts(report)["kl"], verdicts(report)["perplexity"]) == ("fail", "fail")
        both = check_gates(Bigram(got), Bigram(got), {"kl": 1e-9}, texts=TEXTS)
        assert verdicts(both)["kl"] == "pass"

    def test_another_vocabulary_fails(self) -> None:
        report = check_gates(Bigram(bigram()), Bigram(bigram(0, 5)), {"kl": 1.0}, texts=TEXTS)
        assert verdicts(report)["kl"] == "fail"
        assert "it tells 5 tokens apart, and the reference 4" in only(report, "kl").reason


class Silent(Bigram):
    """Says nothing about the second text."""

    def logprobs(self, tokens: Any) -> Any:
        return super().logprobs(tokens)[: 0 if list(tokens) == TEXTS[1] else None]


class TestWhatWouldPassUnseen:
    def test_a_candidate_that_prefers_no_token(self) -> None:
        gate = only(check_gates(Bigram(bigram()), Bigram(np.zeros((4, 4))), {"top1": 0.9}, texts=TEXTS), "top1")
        assert (gate.verdict, gate.figures["top1"]) == ("fail", 0.0)
        tied = bigram()
        tied[np.arange(4), tied.argsort()[:, -2]] = tied.max(axis=1)
        assert verdicts(check_gates(Bigram(bigram()), Bigram(tied), {"top1": 1.0}, texts=TEXTS))["top1"] == "pass"

    def test_a_text_about_which_nothing_is_said(self) -> None:
        limits = {"top1": 1.0, "kl": 1.0, "perplexity": 0.5}
        report = check_gates(Bigram(bigram()), Silent(bigram()), limits, texts=TEXTS)
        assert set(verdicts(report).values()) == {"fail"}
        report = check_gates(Silent(bigram()), Bigram(bigram()), limits, texts=TEXTS)
        assert set(verdicts(report).values()) == {"inconclusive"}

    @pytest.mark.parametrize("values", [1j * bigram(), [["a"] * 4] * 5, None, bigram()[None]], ids=range(4))
    def test_values_that_are_no_rows_of_real_numbers(self, values: Any) -> None:
        class Other:
            def logprobs(self, tokens: Any) -> Any:
                return values

        with pytest.raises(xrt.InputError, match=r"logprobs have the shape .*, and these have .* Fix: have the source"):
            check_gates(Bigram(bigram()), Other(), {"kl": 1.0}, texts=TEXTS)

    @pytest.mark.parametrize("token", [1.5, True, "1", None])
    def test_tokens_that_are_no_ids(self, token: Any) -> None:
        with pytest.raises(xrt.InputError, match=r"in place of a token id. Fix: write whole numbers"):
            check_gates(Bigram(bigram()), Bigram(bigram()), {"kl": 1.0}, texts=[[0, token]])


class TestInputs:
    def test_a_model_against_itself(self) -> None:
        source = Bigram(bigram())
        with pytest.raises(xrt.InputError, match="the reference is the candidate"):
            check_gates(source, source, STRICT, texts=TEXTS)

    def test_files(self, tmp_path: Path) -> None:
        file = tmp_path / "texts.json"
        file.write_text(json.dumps(TEXTS))
        limits = VerifyGeneration(text=str(file), kl=1e-9)
        assert check_gates(Bigram(bigram()), Bigram(bigram()), limits).sha256
        for content in ("[]", "[1, 2]", "{", '"text"'):
            file.write_text(content)
            with pytest.raises(xrt.InputError, match=r"the texts .* Fix: write"):
                check_gates(Bigram(bigram()), Bigram(bigram()), limits)
        file.unlink()
        if hasattr(os, "mkfifo"):
            os.mkfifo(file)
            with pytest.raises(xrt.InputError, match=r"the texts .* pipe.* Fix: write"):
                check_gates(Bigram(bigram()), Bigram(bigram()), limits)

    def test_strings_need_a_tokenizer(self) -> None:
        with pytest.raises(xrt.InputError, match="without a tokenizer"):
            check_gates(Bigram(bigram()), Bigram(bigram()), STRICT, texts=["text"])

    def test_a_token_out_of_the_vocabulary(self) -> None:
        with pytest.raises(xrt.InputError, match="a text has the token 9, and the model tells tokens 0 to 3 apart"):
            check_gates(Bigram(bigram()), Bigram(bigram()), STRICT, texts=[[1, 9]])

    @pytest.mark.parametrize("limits", [{"text": "t.json"}, {"kl": 0.1}, {"text": "t.json", "top1": 1.5}])
    def test_policies_that_judge_nothing(self, limits: Any) -> None:
        with pytest.raises(xrt.PolicyError):
            Policy(verify={"generation": limits})

    def test_the_file_is_relative_to_the_policy(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.yaml"
        path.write_text("verify:\n  generation: {text: texts.json, kl: 0.001, perplexity: 1%}\n")
        verify = Policy.load(path).verify
        assert verify is not None
        limits = verify.generation
        assert limits is not None
        assert (limits.text, limits.kl, limits.perplexity) == (str(tmp_path / "texts.json"), 0.001, 0.01)


@pytest.fixture(scope="module")
def models() -> Any:
    """The byte model and its faults."""
    pytest.importorskip("torch")
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    pytest.importorskip("transformers")
    import byte_model

    return byte_model


#: Fault to the gates that catch it.
CAUGHT = {
    "": set(),
    "scaled layer": {"kl", "perplexity"},
    "other eps": {"kl", "perplexity"},
    "dropped processor": {"top1", "kl", "perplexity"},
    "bf16 layer": {"kl"},
}


@pytest.mark.parametrize("fault", list(CAUGHT))
def test_faults_of_a_trained_model(models: Any, fault: str) -> None:
    import xpuruntime.pytorch as xt

    reference, candidate = (xt.logprobs_of(models.faulty(name)) for name in ("", fault))
    limits = {"kl": 1e-9, "perplexity": "0.01%", "top1": 0.95, "tokens": 4}
    report = check_gates(reference, candidate, limits, texts=models.held_out())
    failed = {gate.name for gate in report.gates if gate.verdict == "fail"}
    assert failed == CAUGHT[fault], str(report)
    if not fault:
        assert only(report, "kl").figures["kl"] == 0.0


#: Fault to the layer that parity names first, and whether it is out of tolerance there.
FIRST = {
    "": None,
    "scaled layer": "model.layers.1.mlp.down_proj",
    "other eps": "model.layers.0.input_layernorm",
    "dropped processor": None,
    "bf16 layer": "model.layers.1.mlp.gate_proj",
}


@pytest.mark.parametrize("fault", list(FIRST))
def test_parity_names_the_first_layer_that_differs(models: Any, fault: str) -> None:
    import xpuruntime.pytorch as xt

    parity = xt.parity(models.faulty(""), models.faulty(fault), models.held_out(2), rtol=0.0, atol=1e-6)
    assert parity.logprobs is not None
    assert parity.logprobs.bits is parity.agreed is (not fault)
    first = parity.first_different
    assert (None if first is None else first.module) == FIRST[fault], str(parity)
    assert ("(decoding)" in parity.skipped) is (fault == "dropped processor")
    assert ("the same bits" in str(parity)) is (not fault)
    assert parity.to_dict()["logprobs"]["bits"] is (not fault)


def test_parity_of_a_policy_and_of_another_engine(models: Any) -> None:
    import xpuruntime.pytorch as xt

    model, prompts = models.trained(), models.held_out(2)
    ours = xt.logprobs_of(model, policy={"kernels": {"matmul": "cpu.reference"}})
    parity = xt.parity(model, ours, prompts)
    assert parity.agreed, str(parity)
    assert parity.logprobs is not None
    assert not parity.logprobs.bits
    assert 0 < parity.logprobs.max_abs < 1e-4
    assert xt.get_kernel_policy() is None

    class Elsewhere:
        def logprobs(self, tokens: Any) -> Any:
            return np.zeros((len(tokens) - 1, 256), dtype=np.float32)

    parity = xt.parity(model, Elsewhere(), prompts)
    assert not parity.agreed
    assert parity.skipped == {"(layers)": "the other side shows no tensors inside of it"}


def test_a_text_goes_on_after_a_token_that_ends_one(models: Any) -> None:
    import xpuruntime.pytorch as xt

    model, [text] = models.faulty(""), models.held_out(1)
    model.generation_config.eos_token_id = text[30]
    source = xt.logprobs_of(model)
    assert len(source.logprobs(text)) == len(text) // 2
    assert model.generation_config.eos_token_id == text[30]
    model.train()
    with pytest.raises(xrt.ModelError, match="training mode"):
        source.logprobs(text)
