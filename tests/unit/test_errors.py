# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Errors carry reason and fix as values beside their text."""

from __future__ import annotations

import pickle

import pytest

from xpuruntime import errors


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
