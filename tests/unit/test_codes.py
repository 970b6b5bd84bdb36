# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Codes are strings of a closed list, each with its meaning."""

from __future__ import annotations

import copy
import json
import pickle

import msgspec
import pytest

from xpuruntime.codes import Code
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.lockfile.drift import DriftCode, ValidatorKind
from xpuruntime.locks.verification.claims import ClaimCode
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.runtime.doctor.facts import FindingCode

#: Every enumeration of codes.
CODES = (CandidateCode, ClaimCode, DriftCode, FindingCode, ValidatorKind, VerdictCode)


class Colour(Code):
    """Colours."""

    RED = "red", "Of blood."
    BLUE = "blue", "Of the sky."


class Painted(msgspec.Struct):
    colour: Colour


def test_a_code_is_the_word_itself():
    assert (f"{Colour.RED}", str(Colour.RED), repr(Colour.RED), f"{Colour.RED:>5}") == ("red", "red", "'red'", "  red")
    assert Colour.RED == "red"
    assert {Colour.RED: 1}["red"] == 1
    assert Colour("red").meaning == "Of blood."
    assert json.dumps({Colour.RED: Colour.BLUE}) == '{"red": "blue"}'


def test_a_code_is_written_as_its_word_and_read_back_as_the_code():
    text = msgspec.json.encode(Painted(colour=Colour.BLUE))
    assert text == b'{"colour":"blue"}'
    assert msgspec.json.decode(text, type=Painted).colour is Colour.BLUE
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'green'"):
        msgspec.json.decode(b'{"colour":"green"}', type=Painted)
    assert pickle.loads(pickle.dumps(Colour.RED)) is Colour.RED
    assert copy.deepcopy(Colour.RED) is Colour.RED


@pytest.mark.parametrize("codes", CODES)
def test_every_code_says_what_it_means(codes):
    assert [code for code in codes if not code.meaning[:1].isupper() or not code.meaning.endswith(".")] == []
    assert [code.name for code in codes] == [code.upper() for code in codes]
    assert len({code.meaning for code in codes}) == len(codes)


def test_a_validator_that_does_not_hold_has_a_code():
    assert [DriftCode(kind).meaning for kind in ValidatorKind] == [kind.meaning for kind in ValidatorKind]
