# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verdicts and exit codes of a verification, its JSON Schema, and its text."""

from __future__ import annotations

import itertools
import json

import jsonschema
import pytest
from claim_records import HOSTILE, claim, result

from xpuruntime.evidence.documents import schema_of
from xpuruntime.locks.verification.claims import VERDICTS, ClaimCode
from xpuruntime.locks.verification.result import VerificationResult

#: Word for inconclusive claims to the exit code that one of them brings.
INCONCLUSIVE = {None: 4, "fail": 1, "warn": 0, "pass": 0}


@pytest.mark.parametrize("word", INCONCLUSIVE)
@pytest.mark.parametrize(
    "verdicts",
    [combination for size in (1, 2, 3) for combination in itertools.combinations(VERDICTS, size)],
    ids="+".join,
)
def test_exit_codes_of_every_combination_of_verdicts(verdicts, word):
    found = result(*(claim(f"evidence.{verdict}", verdict) for verdict in verdicts), inconclusive=word)
    if "fail" in verdicts:
        expected = 1
    elif "inconclusive" in verdicts:
        expected = INCONCLUSIVE[word]
    else:
        expected = 0 if "pass" in verdicts else 4  # nothing was verified
    assert found.exit_code == expected
    assert found.to_dict()["exit_code"] == expected
    warns = "inconclusive" in verdicts and "fail" not in verdicts and word == "warn"
    assert found.verdict == ("warn" if warns else {0: "pass", 1: "fail", 4: "inconclusive"}[expected])


def test_a_claim_has_its_own_word_for_being_inconclusive():
    def undecided(word):
        return claim("speed.latency.p50", "inconclusive", inconclusive=word)

    assert result(undecided("warn"), claim("evidence.x")).exit_code == 0
    assert result(undecided("warn"), claim("evidence.x", "inconclusive")).exit_code == 4
    assert result(undecided("fail"), claim("evidence.x"), inconclusive="pass").exit_code == 1


def test_another_machine_is_of_the_environment():
    found = result(claim("evidence.x", "inconclusive"), comparable=False)
    assert (found.exit_code, found.headline) == (3, "not comparable: this is another machine than the lock's")
    assert result(claim("evidence.x", "fail"), comparable=False).exit_code == 1


def test_json_meets_its_schema(mixed):
    schema = schema_of(VerificationResult, "")
    jsonschema.Draft202012Validator.check_schema(schema)
    read = json.loads(mixed.to_json())
    jsonschema.Draft202012Validator(schema).validate(read)
    for key in schema["required"]:
        less = {name: value for name, value in read.items() if name != key}
        assert not jsonschema.Draft202012Validator(schema).is_valid(less), key


def test_text_names_reason_place_and_fix_and_has_no_controls(mixed):
    text = str(mixed)
    assert text.startswith(mixed.headline)
    assert "a reason (policies/my policy,a:b%.yaml:7:3)" in " ".join(text.split())
    assert "fix: do this" in text
    assert not set("\x1b\x00\r\ud800").intersection(text)
    assert "\\u001b" in text
    assert HOSTILE.isprintable() is False


def test_a_notebook_shows_no_markup_of_a_claim(mixed):
    assert "<b>&amp;amp;" not in mixed._repr_html_().replace("&lt;b&gt;", "")


def test_identifiers_of_rules_are_unique_and_of_one_form():
    ids = [code.rule for code in ClaimCode]
    assert len(ids) == len(set(ids))
    assert all(id_[:3] == "XRT" and id_[3:].isdigit() and len(id_) == 7 for id_ in ids)
    assert all(code.rule_name.isidentifier() for code in ClaimCode)
    # what was given out stays: tools keep a history by these
    given_out = (ClaimCode.SUBSTITUTED, ClaimCode.OUT_OF_TOLERANCE, ClaimCode.SLOWER)
    assert [code.rule for code in given_out] == ["XRT1001", "XRT2001", "XRT4001"]
