# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Errors carry reason and fix as values beside their text, and a code of a closed list."""

from __future__ import annotations

import copy
import json
import linecache
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import xpuruntime as xrt
from xpuruntime import errors
from xpuruntime.codes import Code
from xpuruntime.evidence.records import VerdictCode
from xpuruntime.lockfile.drift import DriftCode, ValidatorKind
from xpuruntime.locks.verification.claims import ClaimCode
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.printable import error_line, first_line
from xpuruntime.runtime.doctor.facts import FindingCode

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[2] / "src" / "python" / "xpuruntime"


@pytest.mark.parametrize("kind", [errors.InputError, errors.EngineUnavailable, errors.LockError])
@pytest.mark.parametrize("message", ["the file is missing", "the file is missing."])
def test_reason_and_fix_are_values(kind: type[errors.XpuRuntimeError], message: str) -> None:
    error = kind(message, fix="name\x1banother")
    assert (error.reason, error.fix) == ("the file is missing", r"name\u001banother")
    assert str(error) == r"the file is missing. Fix: name\u001banother"
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.fix, str(again)) == (error.reason, error.fix, str(error))
    plain = kind(message)
    assert (plain.reason, plain.fix, str(plain)) == ("the file is missing", None, message)


@pytest.mark.parametrize(
    ("error", "line", "named"),
    [
        (AssertionError(), "AssertionError", "AssertionError"),
        (RuntimeError(" \n\t\n"), "RuntimeError", "RuntimeError"),
        (RuntimeError("\n  what is wrong \nwhere"), "what is wrong", "RuntimeError: what is wrong"),
        (ValueError("what is wrong\r\nwhere"), "what is wrong", "ValueError: what is wrong"),
        (KeyError(""), "''", "KeyError: ''"),
    ],
)
def test_the_line_of_an_exception(error: BaseException, line: str, named: str) -> None:
    assert (error_line(error), error_line(error, named=True)) == (line, named)
    assert first_line(str(error)) == (line if str(error).strip() else "")


def warned_at(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return the file and the line of each warning of a call."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [(entry.filename, linecache.getline(entry.filename, entry.lineno).strip()) for entry in told]


def test_a_warning_points_at_the_line_of_the_user(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    asked: dict[str, Any] = {"device": "cpu", "engine": "onnxruntime", "precision": "fp16"}
    model = xrt.demo_model_path()

    def opened() -> None:
        xrt.InferenceSession(model, **asked).close()

    def locked() -> None:
        xrt.lock(model, **asked)

    def compiled() -> None:
        xrt.compile_model(model, tmp_path / "digits.xrt", **asked)

    for call, line in ((opened, "xrt.InferenceSession("), (locked, "xrt.lock("), (compiled, "xrt.compile_model(")):
        places = warned_at(call)
        assert places
        assert {file for file, _ in places} == {__file__}
        assert all(text.startswith(line) for _, text in places), places


@pytest.mark.torch
def test_a_warning_of_training_points_at_the_line_of_the_user() -> None:
    torch = pytest.importorskip("torch")
    import xpuruntime.pytorch as xt

    net = torch.nn.Sequential(torch.nn.Linear(8, 8))
    rules = [{"match": {"module": "nowhere", "op": "matmul"}, "use": "cpu.blas"}]

    def trained() -> None:
        with xt.kernel_policy({"kernels": {"rules": rules}}, root=net):
            net(torch.ones(2, 8))

    places = warned_at(trained)
    assert places
    assert {file for file, _ in places} == {__file__}


def test_every_warning_of_ours_points_there() -> None:
    own = [path for path in SOURCE.rglob("*.py") if "XpuRuntimeWarning, stacklevel" in path.read_text(encoding="utf-8")]
    assert own == []


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
