# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Errors carry reason and fix as values beside their text, and any exception is shown in one line."""

from __future__ import annotations

import pickle

import pytest

from xpuruntime import errors
from xpuruntime.error_text import error_line, first_line


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
